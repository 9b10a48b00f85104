"""The matrices of a checkpoint's layers, read from its headers, and the bytes that a pass reads of them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Projections of which one makes keys, of attention and of some modules with a state.
_KEYS = re.compile(r"\b(k_proj|kv_a_proj\w*|c_attn|query_key_value|qkv_proj|Wqkv|W_pack)\b")
Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layer:
    """[n, k] of the matrices of a layer.

    Attributes:
        kept: those whose products the last layer needs of every token: for keys and values, and for states.
        others: of the rest, those that every token uses.
        expert: of one expert.
        experts: how many there are.
        cached: whether it has keys and values.
    """

    kept: Shapes = ()
    others: Shapes = ()
    expert: Shapes = ()
    experts: int = 0
    cached: bool = False


def layers_of(files: Sequence[Path]) -> list[Layer]:
    """Return the layers in a checkpoint's headers, in order."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if layer := re.search(r"(^|\.)(?:layers|h|blocks)\.(\d+)\.", name):
                found.setdefault(int(layer[2]), {})[name] = tuple(entry["shape"])
    return [_layer(dict(sorted(found[j].items()))) for j in sorted(found)]


def _layer(tensors: Mapping[str, tuple[int, ...]]) -> Layer:
    """Return a layer from its tensors. Experts lie in tensors [experts, n, k], or in matrices with their numbers."""
    kept, others, expert = list[tuple[int, int]](), list[tuple[int, int]](), list[tuple[int, int]]()
    experts = 0
    for name, shape in tensors.items():
        if part := re.search(r"(?<![a-z_])experts\.(\d+)?", name):
            if len(shape) >= 2 and part[1] in (None, "0"):
                expert.append((shape[-2], shape[-1]))
            experts = max(experts, shape[0] if part[1] is None else int(part[1]) + 1)
        elif len(shape) == 2:
            (kept if re.search(r"\b((k|v)_proj|in_proj\w*)\b", name) else others).append((shape[0], shape[1]))
    attentions = {name[: found.start()] for name in tensors if (found := _KEYS.search(name))}
    scans = {name.removesuffix(part) for name in tensors for part in ("A_log", "dt_bias") if name.endswith(part)}
    return Layer(tuple(kept), tuple(others), tuple(expert), experts, bool(attentions - scans))


def active_of(config: Mapping[str, Any]) -> int:
    """Return how many experts a token uses."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    return int(next((config[name] for name in names if name in config), 0))


def used(experts: int, active: int, tokens: int) -> float:
    """Return how many experts a pass of some tokens uses, if each token draws its own evenly."""
    return experts * (1 - (1 - active / experts) ** tokens)


def cache_bytes(config: dict[str, Any], lossy: dict[str, Any], layers: int | None = None) -> float:
    """Return the KV cache bytes of a token, summed over layers, without the scales of an encoded cache.

    Args:
        layers: how many layers have keys and values, if not all do.
    """
    heads: int = config["num_attention_heads"]
    kept: int = config.get("num_key_value_heads") or heads
    dim: int = config.get("head_dim") or config["hidden_size"] // heads
    bits = {"bf16": 16, "int8": 8, "int4": 4, "int2": 2}.get(lossy.get("cache", ""), 32)
    count: int = config["num_hidden_layers"] if layers is None else layers
    return 2 * count * kept * dim * bits / 8


def weight_bytes(layers: Sequence[Layer], config: dict[str, Any], lossy: dict[str, Any], tokens: int = 1) -> float:
    """Return the bytes of the layers' matrices that a pass of some tokens uses, and of the head, in the format in which
    they are multiplied."""
    from flexengine.codec.packed import CODECS, Packed
    from flexengine.lossy import Lossy

    stored = config.get("dtype", config.get("torch_dtype"))
    item = 4 if stored == "float32" and lossy.get("compute") != "bf16" else 2
    codec = Lossy(**lossy).coded

    def nbytes(n: int, k: int, codec: Any = codec) -> int:
        return Packed(CODECS[codec], n, k).nbytes if isinstance(codec, str) else item * n * k

    total = float(nbytes(config["vocab_size"], config["hidden_size"], "int8" if isinstance(codec, str) else None))
    for layer in layers:
        total += sum(nbytes(*shape) for shape in layer.kept + layer.others)
        if layer.experts:
            total += used(layer.experts, active_of(config), tokens) * sum(nbytes(*shape) for shape in layer.expert)
    return total
