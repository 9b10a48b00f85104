"""What is wrong with the files of a tokenizer, and the words on settings of generation. Imported where there is one."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput, json_kind, shown
from flexengine.model.files import AGAIN, read_object

_TEXT = ("a string", lambda x: isinstance(x, str))
_FLAG = ("true or false", lambda x: isinstance(x, bool))
_TOKEN = ("a string or an object with its content", lambda x: isinstance(x, str) or "content" in _object(x))
_OBJECT = ("an object, as {...}", lambda x: isinstance(x, Mapping))
_NAMES = ("a list of strings", lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x))
# What transformers takes for fields of tokenizer_config.json; null is taken for each.
_FIELDS: dict[str, tuple[str, Any]] = {
    "model_max_length": ("a number", lambda x: type(x) in (int, float)),
    "chat_template": ("a string, or a list of objects with name and template", lambda x: _is_template(x)),
    "tokenizer_class": _TEXT,
    "added_tokens_decoder": _OBJECT,
    "model_input_names": _NAMES,
    **dict.fromkeys(("padding_side", "truncation_side"), ("left or right", lambda x: x in ("left", "right"))),
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"), _TOKEN),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"), _FLAG),
}
_PARTS = {"added_tokens": list, "model": dict}  # of tokenizer.json; without them nothing can be tokenised


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise InvalidInput for the first field of a tokenizer_config.json that is of another kind than transformers
    reads, or that names a file elsewhere. path: of the file. settings: its content."""
    names = settings.get("fast_tokenizer_files") or []
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidInput(f"{path} names {shown(name)}, which is not a file name in that directory")
    for key, (must, good) in _FIELDS.items():
        if (value := settings.get(key)) is not None and not good(value):
            raise InvalidInput(f"{path} sets {key} to {shown(value)}; it must be {must}: correct it, or {AGAIN}")


def tokenizer_fault(directory: Path, error: BaseException) -> str:
    """Return why the tokenizer of a directory cannot be loaded. error: of transformers, which names a missing key of
    tokenizer.json alone."""
    file = directory / "tokenizer.json"
    content = read_object(file, 2**30) if file.is_file() else {}
    for key, kind in _PARTS.items() if content else ():
        if not isinstance(content.get(key), kind):
            must = "a list" if kind is list else "an object, as {...}"
            has = f"has {json_kind(content[key])} as" if key in content else "lacks"
            return f"{file.name} {has} {key}, which must be {must}; {AGAIN}"
    return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error) or repr(error)


def unapplied_words(path: Path, found: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return a message about settings of a generation config that change tokens and are not applied here. Raise
    InvalidInput for one that must be a number and is none. path: of the file. usual: each setting's neutral value."""
    for name, value in found.items():
        if usual[name] is not None and not (type(value) in (int, float) and math.isfinite(value)):
            fault = f"{path} sets {name} to {shown(value)}; it must be a number, such as {usual[name]}"
            raise InvalidInput(f"{fault}: correct it, or {AGAIN}")
    listed = ", ".join(f"{name} {shown(value)}" for name, value in found.items())
    penalty = found.get("repetition_penalty", 0)
    remedy = f"; --repetition-penalty {penalty} applies that one" if penalty > 0 else ""
    fault = f"{path} has {listed}, which generate of transformers applies and this engine does not"
    return f"{fault}, so tokens may differ{remedy}"


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_template(value: Any) -> bool:
    entries = value if isinstance(value, list) else []
    named = all(isinstance(_object(x).get(key), str) for x in entries for key in ("name", "template"))
    return isinstance(value, str | Mapping) or (isinstance(value, list) and named)
