"""Request fields of other programs: what their values ask for, and what to do about them. Imported if a row has one."""

import json
import re
from collections.abc import Mapping
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, shown
from flexengine.job.foreign import (
    FOREIGN,
    NAMES_HERE,
    NEUTRALS,
    OF_CHATS,
    OF_OPTIONS,
    OF_SYSTEM,
    OF_TEMPLATES,
    OVERRIDES,
)
from flexengine.records import unwrapped

# Kinds of values of fields whose names are likely in data; other values are data.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("reasoning", "json_schema"), (dict,)),
    **dict.fromkeys(("documents", "functions", "images", "videos", "stop_words", "until", "sampler_order"), (list,)),
    **dict.fromkeys(("samplers", "sampler_priority"), (list, str)),
    **dict.fromkeys(("grammar", "regex", "suffix", "stop_sequence"), (str,)),
    **dict.fromkeys(("stream", "echo", "watermark", "think"), (bool,)),
    **dict.fromkeys(("truncate", "beam_width"), (int,)),
    **dict.fromkeys(OF_SYSTEM, (str, list, dict)),
    "thinking": (bool, dict),
}
_SCHEMAS = ("guided_json", "json_schema", "structured_outputs")  # {} is a schema
_AS_DATA = "or rename the field if it holds data"


def check_foreign(request: Mapping[str, Any], sampling: SamplingParams, chat: bool, holds_data: bool) -> None:
    """Raise InvalidInput if a row has a field of another program that would be ignored. sampling: the row's own. chat:
    whether the prompt goes through a chat template. holds_data: whether fields may be data; a batch line's may not."""
    for name, value in request.items():
        if name not in FOREIGN:
            continue
        value = unwrapped(value)  # numpy compares each element
        if not (holds_data and _is_data(name, value, request, chat)) and _asks(name, value, sampling, chat):
            advice = _remedy(name, chat)
            advice = advice if holds_data else advice.removesuffix(f", {_AS_DATA}")
            raise InvalidInput(f"{name} is {shown(value)}; {advice}")


def _is_data(name: str, value: Any, request: Mapping[str, Any], chat: bool) -> bool:
    """Return whether a field of FOREIGN is data: beside the field that it stands for, or by its kind."""
    kinds = _KINDS.get(name, (object,))
    named = bool in kinds and isinstance(value, str) and value.lower() in ("true", "false")  # a cell of a CSV file
    renamed = request.get(NAMES_HERE.get(name, "")) is not None
    if name in OF_OPTIONS or name in OF_SYSTEM:
        renamed = not _holds_option(value) if name in OF_OPTIONS else _has_system(request)
    return renamed or (name in OF_CHATS and not chat) or not (named or isinstance(value, kinds))


def _holds_option(value: Any) -> bool:
    """Return whether a key of an object is the name of an option here or elsewhere, such as top_p or topP. Names of one
    word but temperature, such as stop, may be those of data."""
    names = {re.sub("(?=[A-Z])", "_", str(key)).lower() for key in value} if isinstance(value, Mapping) else set[str]()
    named = names & {*OVERRIDES, *NAMES_HERE, "do_sample"}
    return any("_" in name or name == "temperature" for name in named)


def _has_system(request: Mapping[str, Any]) -> bool:
    """Return whether a row's messages have one of the system, so that a field of this name is data."""
    given = request.get("messages") or request.get("prompt")
    listed = given if isinstance(given, list | tuple) else ()
    return any(isinstance(each, Mapping) and each.get("role") in ("system", "developer") for each in listed)


def _neutral(name: str, chat: bool) -> Any:
    """Return the value of a field of other programs that asks for nothing. Chats get no special tokens but those of the
    template."""
    return not chat if name == "add_special_tokens" else NEUTRALS.get(name)


def _asks(name: str, value: Any, sampling: SamplingParams, chat: bool) -> bool:
    """Return whether a field of FOREIGN, with this value, asks for something that is not done anyway."""
    if value is None or value in ("", []) or (value == {} and name not in _SCHEMAS):
        return False
    if name == "do_sample":
        return not _equal(value, sampling.temperature != 0)
    ours = "n" if name == "best_of" else NAMES_HERE.get(name)
    if ours is None:
        return not _equal(value, _neutral(name, chat))
    if ours == "seed" and sampling.temperature == 0:  # greedy: any seed gives the same text
        return False
    done = getattr(sampling, ours)
    return ours in ("max_tokens", "stop_token_ids") or not _equal(value, done or 0 if ours == "logprobs" else done)


def _remedy(name: str, chat: bool) -> str:
    """Return what to do about a field of FOREIGN."""
    if name in NAMES_HERE:
        return f"the field is named {NAMES_HERE[name]} here: rename it (beside {NAMES_HERE[name]} it is data)"
    if name in OF_OPTIONS:
        return f"options are fields of the row itself: move them out of {name}, {_AS_DATA}"
    if name in OF_SYSTEM:
        return f'it is a message here: begin messages with {{"role": "system", "content": ...}}, {_AS_DATA}'
    if name in OF_TEMPLATES:
        known = f'{{"{name}": ...}}' if name != "chat_template" else "the model's own template"
        return f"a chat template gets variables by chat_template_kwargs: move it there ({known}), {_AS_DATA}"
    if name == "do_sample":
        return "a temperature above 0 samples, 0 does not: set temperature"
    if name == "best_of":
        return f"it must be equal to n: remove it, {_AS_DATA}"
    only = _neutral(name, chat)
    allowed = f"only {json.dumps(only)} is possible here" if only is not None else "it is not supported"
    return f"{allowed}: remove it, {_AS_DATA}"


def _equal(value: Any, default: Any) -> bool:
    """Return whether a value is a field's default; text, as cells of CSV files are, by what it says."""
    if isinstance(value, str) and not isinstance(default, str):
        try:
            value = json.loads(value.lower())
        except (ValueError, RecursionError):
            return False
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)
