"""The config of a model directory: read within limits, checked, and only then handed to transformers.

transformers builds whatever a config asks for; a number with a few zeros too many would keep it building for hours.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.files import read_json

_MOST_BYTES = 16 * 2**20
# The first pattern that a key's name fits says how large its number may be; generous beside all known models.
_LIMITS = tuple((re.compile(pattern), most) for pattern, most in (
    (r"vocab", 10**8),
    (r"(layers?|depths?|blocks|stages|groups|block_count)$", 10**4),
    (r"label|expert|head|key_length|value_length", 10**5),
    (r"position|context|window|seq|ctx", 10**9),
    (r"hidden|embd|embed|model$|inner|ffn|intermediate|feed_forward", 10**6),
    (r"length", 10**9),
    (r"seed|param|flos|token|theta|base|date|version|id$", 2**64),
    (r"", 10**7),
))  # fmt: skip
_COUNTS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")  # there and above 0 in any model
_FEW_LAYERS, _FEW_EXPERTS = 200, 5_000  # a skeleton of so many layers and experts is built in a second or two
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def load_config(directory: Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model directory. The directory's own Python code runs only with the flag.

    Raises BadCheckpoint (no readable config.json, or one that the checkpoint's headers contradict) or
    UnsupportedModel (limits, quantised weights, code without the flag, what transformers refuses).
    """
    path = directory / "config.json"
    raw = read_json(path, _MOST_BYTES)
    if not isinstance(raw, dict):
        raise BadCheckpoint(f"{path} holds a JSON {type(raw).__name__}; a config is an object")
    check_limits(path, raw)
    _check_quantisation(path, raw)
    _check_code(path, raw, trust_remote_code)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        counts = {name: getattr(config.get_text_config(), name, None) for name in _COUNTS}
        layers, experts = size_of(config)
        if not all(isinstance(name, str) for name in config.architectures or []):
            raise TypeError(f"architectures is {config.architectures!r}; it must be a list of class names")
    except Exception as error:  # transformers checks configs in many ways, and some contradictions only by failing
        raise UnsupportedModel(f"{directory}: {error or repr(error)}") from error
    counts["max_position_embeddings"] = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name, value in counts.items():
        if isinstance(value, int | float) and not value >= 1:
            raise UnsupportedModel(f"{path}: {name} is {value}; it must be at least 1")
    if layers > _FEW_LAYERS or layers * experts > _FEW_EXPERTS:
        tensors = read_checkpoint(directory).values()
        check_backed(path, (layers, experts), [math.prod(stored.shape) for stored in tensors])
    return config


def check_limits(path: Path, values: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel naming the first number of a config, at any depth, that no model has."""
    for key, value in _numbers(values):
        most = next(most for pattern, most in _LIMITS if pattern.search(key))
        if isinstance(value, int) and not abs(value) <= most:
            raise UnsupportedModel(f"{path}: {key} is {value}; at most {most:,} is supported")
        if isinstance(value, float) and most <= 10**6 and abs(value) > most:
            raise UnsupportedModel(f"{path}: {key} is {value}; at most {most:,} is supported")


def check_backed(path: Path, size: tuple[int, int], elements: list[int]) -> None:
    """Raises BadCheckpoint if tensors of that many elements cannot be a model of `size` (layers, experts of each)."""
    layers, experts = size
    if layers > len(elements):
        raise BadCheckpoint(f"{path} asks for {layers:,} layers, but there are only {len(elements):,} tensors")
    if layers * experts > (total := sum(elements)):
        raise BadCheckpoint(f"{path} asks for {layers:,} times {experts:,} experts of {total:,} weights in all")


def size_of(config: Any) -> tuple[int, int]:
    """Layers of a transformers config and the most experts a layer may have (1 if it is no mixture)."""
    layers = config.get_text_config().num_hidden_layers
    found = [v for key, v in _numbers(config.to_dict()) if key.endswith("experts") and isinstance(v, int)]
    return (layers if isinstance(layers, int) else 1), max((1, *found))


def _numbers(values: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """(key, number) of every number, at any depth; those of a list go by the list's key."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value, key)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield key, values


def _check_quantisation(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel if the weights are in a quantisation's own format, which would be read as if plain."""
    parts = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            if not (found := part.get(key)):
                continue
            settings = found if isinstance(found, Mapping) else {}
            method = settings.get("quant_method") or next((k for k in settings if k.startswith("load_in")), "unknown")
            if method == "gguf" and settings.get("dequantize") is True:
                continue  # left over from a GGUF file that was saved as plain floating point
            raise UnsupportedModel(
                f"{path}: the weights are quantised ({key}: {method}), which is not supported;"
                " take the model's unquantised checkpoint or a GGUF file"
            )


def _check_code(path: Path, raw: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raises UnsupportedModel for what would run code from elsewhere, or hand transformers another config."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if raw.get("auto_map") and not trust_remote_code and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        raise UnsupportedModel(
            f"{path}: model type {kind!r} is unknown to transformers and brings Python code of its own,"
            " which runs only with --trust-remote-code: read it before you do"
        )
    if "configuration_files" in raw:
        raise UnsupportedModel(f"{path} refers to other config files (configuration_files); give it the one to use")
    parts = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    if kernel := next((part[key] for part in parts for key in _KERNELS if "/" in str(part.get(key))), None):
        raise UnsupportedModel(f"{path} asks for the downloaded kernel {kernel!r}; remove that entry")
