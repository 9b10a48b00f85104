"""Sampling fields of a row, and request fields of vLLM, OpenAI, transformers, llama.cpp and SGLang that are not read.
The latter would change the prompt or the sampling, so a row with one is refused, unless its value changes nothing."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, shown
from flexengine.records import DEPTH, as_whole, unwrapped

OVERRIDES = tuple(f.name for f in fields(SamplingParams))
VARIABLES, TOOLS = "chat_template_kwargs", "tools"
CHAT_ONLY = {VARIABLES: None, "add_generation_prompt": True, "continue_final_message": False}  # by their defaults
# Names of other programs by the name here. Without the field of this name they are refused; beside it they are data.
_RENAMED = {
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens max_length max_gen_toks max_tokens_to_sample"
    " n_predict num_predict",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop_sequences stop_strings stop_words",
    "stop_token_ids": "eos_token_id",
    "bad_words": "bad_words_ids",
    "logit_bias": "sequence_bias",
    "logprobs": "top_logprobs top_logprobs_num n_probs",
    "n": "num_return_sequences",
    "seed": "sampling_seed random_seed",
}
# Fields by the value, as JSON, that asks for nothing. Null, "", [] and {} ask for nothing, too.
_NEUTRAL = {
    "false": "echo stream use_beam_search early_stopping include_stop_str_in_output no_stop_trim renormalize_logits"
    " penalize_nl return_logprob",
    "true": "skip_special_tokens spaces_between_special_tokens add_special_tokens",
    "0": "no_repeat_ngram_size encoder_no_repeat_ngram_size min_length mirostat dynatemp_range xtc_probability top_a"
    " dry_multiplier epsilon_cutoff eta_cutoff diversity_penalty penalty_alpha smoothing_factor n_keep num_keep"
    " prompt_logprobs",
    "1": "num_beams num_beam_groups length_penalty typical_p tfs_z guidance_scale encoder_repetition_penalty",
    "-1": "repeat_last_n reasoning_budget truncate_prompt_tokens top_n_sigma",
    "null": "allowed_token_ids guided_json guided_regex guided_choice guided_grammar guided_decoding structural_tag"
    " structured_outputs json_schema ebnf grammar regex stop_regex logits_processors custom_logit_processor"
    " suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id forced_decoder_ids"
    " exponential_decay_length_penalty watermarking_config negative_prompt_ids suffix functions multi_modal_data"
    " image_data images videos mm_processor_kwargs lora_path lora_request prompt_embeds sampling_params"
    " generation_config extra_body",
}
_NEUTRALS = {name: json.loads(value) for value, names in _NEUTRAL.items() for name in names.split()}
_OF_CHATS = ("documents", "functions", "images", "reasoning", "thinking", "verbosity", "videos")  # else data
_TEMPLATE = {"enable_thinking", "reasoning_effort", "thinking_budget", "chat_template", *_OF_CHATS} - _NEUTRALS.keys()
NAMES_HERE = {name: ours for ours, names in _RENAMED.items() for name in names.split()}
# Kinds of values of fields whose names are likely in data; other values are data.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("reasoning", "json_schema"), (dict,)),
    **dict.fromkeys(("documents", "functions", "images", "videos", "stop_words"), (list,)),
    **dict.fromkeys(("grammar", "regex", "suffix"), (str,)),
    **dict.fromkeys(("stream", "echo"), (bool,)),
    "thinking": (bool, dict),
}
FOREIGN = frozenset({"do_sample", "best_of", *NAMES_HERE, *_NEUTRALS, *_TEMPLATE})  # all of these fields
_SCHEMAS = ("guided_json", "json_schema", "structured_outputs")  # {} is a schema
_AS_DATA = "or rename the field if it holds data"


def check_foreign(request: Mapping[str, Any], sampling: SamplingParams, chat: bool, holds_data: bool) -> None:
    """Raise InvalidInput if a row has a field of another program that would be ignored. sampling: the row's own. chat:
    whether the prompt goes through a chat template. holds_data: whether fields may be data; a batch line's may not."""
    for name, value in request.items():
        if name not in FOREIGN:
            continue
        value = unwrapped(value)  # numpy compares each element
        if not (holds_data and _is_data(name, value, request, chat)) and _asks(name, value, sampling):
            advice = remedy(name) if holds_data else remedy(name).removesuffix(f", {_AS_DATA}")
            raise InvalidInput(f"{name} is {shown(value)}; {advice}")


def _is_data(name: str, value: Any, request: Mapping[str, Any], chat: bool) -> bool:
    """Return whether a field of FOREIGN is data: beside the field that it stands for, or by its kind."""
    kinds = _KINDS.get(name, (object,))
    named = bool in kinds and isinstance(value, str) and value.lower() in ("true", "false")  # a cell of a CSV file
    renamed = request.get(NAMES_HERE.get(name, "")) is not None
    return renamed or (name in _OF_CHATS and not chat) or not (named or isinstance(value, kinds))


def _asks(name: str, value: Any, sampling: SamplingParams) -> bool:
    """Return whether a field of FOREIGN, with this value, asks for something that is not done anyway."""
    if value is None or value in ("", []) or (value == {} and name not in _SCHEMAS):
        return False
    if name == "do_sample":
        return not _equal(value, sampling.temperature != 0)
    ours = "n" if name == "best_of" else NAMES_HERE.get(name)
    if ours is None:
        return not _equal(value, _NEUTRALS.get(name))
    if ours == "seed" and sampling.temperature == 0:  # greedy: any seed gives the same text
        return False
    done = getattr(sampling, ours)
    return ours in ("max_tokens", "stop_token_ids") or not _equal(value, done or 0 if ours == "logprobs" else done)


def remedy(name: str) -> str:
    """Return what to do about a field of FOREIGN."""
    if name in NAMES_HERE:
        return f"the field is named {NAMES_HERE[name]} here: rename it (beside {NAMES_HERE[name]} it is data)"
    if name in _TEMPLATE:
        known = f'{{"{name}": ...}}' if name != "chat_template" else "the model's own template"
        return f"a chat template gets variables by chat_template_kwargs: move it there ({known}), {_AS_DATA}"
    if name == "do_sample":
        return "a temperature above 0 samples, 0 does not: set temperature"
    if name == "best_of":
        return f"it must be equal to n: remove it, {_AS_DATA}"
    only = _NEUTRALS[name]
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


def own_sampling(request: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a row: `defaults`, and its own fields. In all formats 8.0 is the whole number
    8, and top_k -1 is 0, all tokens, as in vLLM."""
    own = {name: whole(request[name]) for name in OVERRIDES if request.get(name) is not None}
    if own.get("top_k") == -1:
        own["top_k"] = 0
    if defaults.chat_template_kwargs and isinstance(variables := own.get(VARIABLES), Mapping):
        own[VARIABLES] = {**defaults.chat_template_kwargs, **variables}
    if own.get("add_generation_prompt") is True and own.get("continue_final_message") is True:
        raise InvalidInput("add_generation_prompt and continue_final_message are both true; leave one out")
    return replace(defaults, **own) if own else defaults


def whole(value: Any, depth: int = DEPTH) -> Any:
    """Return the value with floats that are whole numbers as int, also those in a list: pandas writes 8 as 8.0. Numbers
    and arrays of numpy or torch become Python's. Lists in lists are taken as they are from a depth on."""
    value = unwrapped(value)
    if isinstance(value, list | tuple) and depth:
        return [whole(each, depth - 1) for each in value]
    return as_whole(value)


def check_format(request: Mapping[str, Any]) -> None:
    """Raise InvalidInput if `response_format` asks for another format than text."""
    wanted = request.get("response_format")
    if isinstance(wanted, Mapping) and wanted.get("type") != "text":
        raise InvalidInput(f'response_format is {shown(dict(wanted))}; only {{"type": "text"}} is supported: remove it')
