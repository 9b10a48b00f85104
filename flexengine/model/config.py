"""The config of a model directory, which is checked against limits before transformers reads it.

transformers builds a model of any size that a config states; a number with a few zeros too many would take hours.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any

import torch

from flexengine.activity import message
from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, InvalidInput, UnsupportedModel, shown
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.files import AGAIN, PLACES, read_object

# Maximum of a number by its key: the first pattern that matches applies. All known models are far below these limits.
_LIMITS = {
    r"vocab": 10**8,
    r"(layers?|depths?|blocks|stages|groups|block_count)$": 10**4,
    r"label|expert|head|key_length|value_length": 10**5,
    r"position|context|window|seq|ctx": 10**9,
    r"hidden|embd|embed|model$|inner|ffn|intermediate|feed_forward": 10**6,
    r"length": 10**9,
    r"seed|param|flos|token|theta|base|date|version|id$": 2**64,
    r"": 10**7,
}
# At least 1 in any model.
_COUNTS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings")
_FEW_LAYERS, _FEW_EXPERTS = 200, 5_000  # up to these numbers a skeleton is built in a second or two, unchecked
_BARE_LAYERS, _BARE_EXPERTS = 1_000, 100_000  # at most without weights: about ten seconds. Kimi K2 has 23,424 experts
# Least value of sizes that a config states, under these names or those of its family.
_LEAST = dict.fromkeys((*_COUNTS, "num_key_value_heads", "head_dim"), 1) | {"intermediate_size": 0}
# Names of other sizes, which are never negative if the family has them. A window or a chunk may be -1, for no limit.
SIZES = re.compile(
    r"(dim|(?<!window_)(?<!chunk_)size|rank|inner|experts|heads|(?<!window_)layers|width|channels|groups?|per_tok|scalar)$"
)
# Kinds of values of fields, by name, and their description.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "model_type": ((str,), 'the name of a family, such as "llama"'),
    "architectures": ((list, NoneType), "a list of class names"),
    **dict.fromkeys(("dtype", "torch_dtype"), ((str, Mapping, NoneType), 'a name, such as "bfloat16"')),
    **dict.fromkeys(("text_config", "quantization_config"), ((Mapping, NoneType), "an object, as {...}")),
}
_ROPE = re.compile(r"factor$|^(rope_theta|beta_|original_max_position|mscale)")
_COUPLED_ROPE = {"dynamic", "longrope"}  # RoPE types whose frequencies depend on a text's length
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def load_config(directory: Path, trust_remote_code: bool = False, weights: bool = True) -> Any:
    """Return the transformers config of a model directory.

    Args:
        trust_remote_code: run its own Python code if it has some.
        weights: False if the directory has no weights, and a job is only planned. Quantised ones then count as plain.

    Raises:
        BadCheckpoint: config.json cannot be read, or the checkpoint's headers contradict it.
        UnsupportedModel: a number exceeds its limit, the weights are quantised in an unknown way, the model needs its
            own code and trust_remote_code is false, or transformers refuses the config.
    """
    config, stated, (layers, experts) = parsed_config(directory, trust_remote_code, weights)
    path = directory / "config.json"
    if stated and not weights:
        config.dtype = config.dtype or torch.bfloat16
        plain = str(config.dtype).removeprefix("torch.")
        message(f"{path} states quantised weights ({stated}), but they are not here; the plan is for {plain}")
    if not weights:
        if note := defaulted(path, config):
            message(note, logging.WARNING)
        if layers > _BARE_LAYERS or layers * experts > _BARE_EXPERTS:
            raise UnsupportedModel(
                f"{path} states {layers:,} layers times {experts:,} experts; without weights beside it, at most"
                f" {_BARE_LAYERS:,} layers, and {_BARE_EXPERTS:,} experts in all layers, are believed; correct it"
            )
    elif (directory / PLACES).is_file() and directory.parent == cache_root() / "prepared":
        pass  # it was compared with the weights of a file when it was made
    elif layers > _FEW_LAYERS or layers * experts > _FEW_EXPERTS:
        tensors = read_checkpoint(directory).values()
        check_backed(path, (layers, experts), [math.prod(stored.shape) for stored in tensors])
    return config


def parsed_config(
    directory: Path, trust_remote_code: bool = False, weights: bool = True
) -> tuple[Any, str, tuple[int, int]]:
    """Return the transformers config of a model directory, `quantisation` and `size_of` it. Args and errors as for
    `load_config`, but no weights are read."""
    path = directory / "config.json"
    raw = read_object(path)
    check_limits(path, raw)
    _check_sources(path, raw, trust_remote_code)
    if (stated := quantisation(raw)) and weights:
        resolve_name("flexengine.model.quantised.schemes:settings_of")(path, raw)
    _check_fields(path, raw)
    if any(_ROPE.search(key) and not (type(x) in (int, float) and 1 <= x < math.inf) for key, x in entries(raw)):
        resolve_name("flexengine.model.rope_faults:check_rope")(path, raw)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        if stated:  # the model is built as for plain weights
            for part in (config, text):
                part.__dict__.pop("quantization_config", None)
        counts = {name: getattr(text, name, None) for name in _COUNTS}
        size = size_of(config)
    except Exception as error:  # transformers raises errors of many types for bad configs
        reason = resolve_name("flexengine.model.config_faults:config_fault")(error, raw)  # it imports this module
        raise UnsupportedModel(f"{directory}: {reason}") from error
    for name, value in counts.items():
        if isinstance(value, int | float) and not value >= 1:
            raise UnsupportedModel(f"{path}: {name} is {value}; it must be at least 1")
    return config, stated, size


def check_limits(path: Path, values: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel if a number of the config, at any depth, exceeds its limit; the message names it."""
    for key, value in _numbers(values):
        most = next(most for pattern, most in _LIMITS.items() if re.search(pattern, key))
        if abs(value) > most and (isinstance(value, int) or most <= 10**6):
            raise UnsupportedModel(f"{path}: {key} is {value}; at most {most:,} is supported")


def _check_fields(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint if a field of the config, or of its text_config, is of another kind or smaller than in any
    model. transformers raises errors without the name of the field for most of these."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, Mapping) else {}):
        for key, (kinds, must) in _KINDS.items():
            value = part.get(key)
            names = value if key == "architectures" and isinstance(value, list) else ()
            if (key in part and not isinstance(value, kinds)) or not all(isinstance(name, str) for name in names):
                raise BadCheckpoint(f"{path}: {key} is {shown(value)}; it must be {must}: correct it, or {AGAIN}")
        usual, known = _own_names(part)
        for own, name in ((usual[name], name) for name in _COUNTS if name in usual):
            if all(isinstance(part.get(key), int | float) for key in (own, name)) and part[own] != part[name]:
                both = f"{own} is {part[own]}, but {name} is {part[name]}"
                raise BadCheckpoint(f"{path}: {both}, and both name one value: remove the wrong one, or {AGAIN}")
        least = {key: 0 for key in part if key in known and SIZES.search(key)}
        least |= {key: _LEAST[name] for name, (key, _) in stated_sizes(part).items()}
        for key, fewest in least.items():
            if isinstance(value := part[key], int | float) and value < fewest:
                must = f"it must be at least {fewest}: correct it, or {AGAIN}"
                raise BadCheckpoint(f"{path}: {key} is {shown(value)}; {must}")


def stated_sizes(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the key and the value of each size of _LEAST that a config states, by the size's usual name."""
    own, _ = _own_names(values)
    return {name: (key, values[key]) for name in _LEAST for key in (own.get(name, name), name) if key in values}


def _own_names(values: Mapping[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Return a family's own names of values that have usual names, too, by these; and all names that it has.
    transformers reads both."""
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return {}, set()
    family = CONFIG_MAPPING[kind]
    return family.attribute_map, {*family.attribute_map, *family.__dataclass_fields__}


def defaulted(path: Path, config: Any) -> str:
    """Return a message about sizes for which defaults of the family stand, as a config lacks the width or the number of
    layers; "" if it has both. Some published configs leave out other sizes, or say only what differs."""
    raw, text, kind = read_object(path), config.get_text_config(), config.model_type
    part = raw if text is config else raw.get("text_config")
    if not isinstance(part, Mapping):
        return ""
    sizes, usual = stated_sizes(part), {}
    with suppress(Exception):  # the defaults of some families contradict themselves
        usual = type(text)().to_dict()
    unstated = {name: getattr(text, name, None) for name in _LEAST if name not in sizes}
    unstated = {name: size for name, size in unstated.items() if type(size) is int and usual.get(name, size) == size}
    if unstated.keys().isdisjoint(("hidden_size", "num_hidden_layers")):
        return ""
    listed = ", ".join(f"{name} {size}" for name, size in unstated.items())
    return f"{path} lacks sizes, for which the defaults of {kind} in transformers stand: {listed}; add the model's own"


def check_backed(path: Path, size: tuple[int, int], elements: list[int]) -> None:
    """Raise BadCheckpoint if the checkpoint is too small for its config.

    Args:
        path: path of the config, for the message.
        size: as `size_of` the config.
        elements: number of elements of each tensor of the checkpoint.
    """
    (layers, experts), total = size, sum(elements)
    if layers > len(elements):
        raise BadCheckpoint(f"{path} states {layers:,} layers, but the checkpoint has only {len(elements):,} tensors")
    if layers * experts > total:
        stated = f"{layers:,} times {experts:,} experts"
        raise BadCheckpoint(f"{path} states {stated}, but the checkpoint has only {total:,} weights")


def size_of(config: Any) -> tuple[int, int]:
    """Return (layers, maximum experts per layer) of a transformers config; 1 expert if it is no mixture of experts."""
    layers = config.get_text_config().num_hidden_layers
    experts = [v for key, v in _numbers(config.to_dict()) if key.endswith("experts") and isinstance(v, int)]
    return (layers if isinstance(layers, int) else 1), max((1, *experts))


def coupled_rope(config: Any) -> set[str]:
    """Return the RoPE types of all layers whose frequencies depend on a text's length. transformers has one parameter
    table, or one per type of layer."""
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    tables = [rope, *rope.values()] if isinstance(rope, dict) else []
    kinds = {kind for table in tables if isinstance(table, dict) and isinstance(kind := table.get("rope_type"), str)}
    return kinds & _COUPLED_ROPE


def parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a config and the configs in it, such as that of its text model."""
    return [values, *(value for value in values.values() if isinstance(value, Mapping))]


def entries(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for every value that is no container, at any depth. Values in a list have the list's key."""
    pairs = values.items() if isinstance(values, Mapping) else ((key, value) for value in values)
    for name, value in pairs:
        if isinstance(value, Mapping | list | tuple):
            yield from entries(value, str(name))
        else:
            yield str(name), value


def context_of(config: Any) -> int | None:
    """Return the maximum number of tokens of a sequence; None if the config does not state it.

    YaRN, and linear scaling of all layers, extend the context by their factor, as in vLLM: Qwen's instruction for long
    texts adds `rope_scaling` alone. Longrope has other frequencies, which are not used, beyond its original length. The
    other types, and scaling by type of layer, are part of max_position_embeddings already."""
    text = config.get_text_config()
    stated, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None)
    for table in [rope, *rope.values()] if isinstance(rope, dict) else ():
        if isinstance(table, dict) and table.get("rope_type") == "longrope":
            original = table.get("original_max_position_embeddings")
            stated = min((n for n in (stated, original) if isinstance(n, int)), default=None)
    if not isinstance(stated, int) or not isinstance(rope, dict) or rope.get("rope_type") not in ("yarn", "linear"):
        return stated
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or stated
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return stated
    return max(stated, min(int(factor * original), 10**9))


def _numbers(values: Any) -> Iterator[tuple[str, int | float]]:
    """Yield (key, number) for every number, at any depth. Numbers in a list have the list's key."""
    for key, value in entries(values):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _check_sources(path: Path, raw: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raise UnsupportedModel if the config would run code from other sources, or refers to other config files."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if raw.get("auto_map") and not trust_remote_code and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        fault = f"{path}: model type {shown(kind)} is unknown to transformers and has its own Python code"
        raise UnsupportedModel(f"{fault}, which runs only with --trust-remote-code; read the code before you set it")
    if "configuration_files" in raw:
        fault = f"{path} refers to other config files (configuration_files)"
        raise UnsupportedModel(f"{fault}; remove that entry and use one config.json")
    if kernel := next((part[key] for part in parts(raw) for key in _KERNELS if "/" in str(part.get(key))), None):
        raise UnsupportedModel(f"{path} needs the downloaded kernel {shown(kernel)}; remove that entry")


def quantisation(raw: Mapping[str, Any]) -> str:
    """Return the key and the method of a config's quantised weights, as text; "" if they are plain numbers. Quantised
    ones would be read as plain numbers."""
    for part, key in product(parts(raw), ("quantization_config", "compression_config")):
        if not (entry := part.get(key)):
            continue
        settings = entry if isinstance(entry, Mapping) else {}
        method = settings.get("quant_method") or next((k for k in settings if k.startswith("load_in")), "unknown")
        if method != "gguf" or settings.get("dequantize") is not True:  # left over from a GGUF file saved as plain
            return f"{key}: {method}"
    return ""


def choose_dtype(requested: str | None, config: Any, device: str) -> torch.dtype:
    """Return the requested compute dtype, or the default: float32 on cpu and sim, the checkpoint's dtype on cuda."""
    own, asked = getattr(config, "dtype", None), named_dtype(requested)
    return asked or (own if device == "cuda" and isinstance(own, torch.dtype) else torch.float32)


def named_dtype(requested: str | None) -> torch.dtype | None:
    """Return the dtype with a name; None for auto or None. Raise InvalidInput if the name is unknown."""
    names: dict[str | None, torch.dtype | None]
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": None, None: None}
    if requested not in names:
        raise InvalidInput(f"dtype is {shown(requested)}; it must be one of auto, float32, bfloat16, float16")
    return names[requested]
