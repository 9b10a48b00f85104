"""Tensors of GGUF files by the parameters of a model, and the changes that llama.cpp's converters made to them.

Names come from gguf-py's map from names of checkpoints (`gguf.get_tensor_name_map`), the changes from llama.cpp's
convert_hf_to_gguf.py. A change is undone on arrays of any content: on row numbers, to learn where rows went, or on
weights.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.gguf_header import GgufTensor, Header

ROPE_FREQS = "rope_freqs.weight"  # divisors of frequencies, no parameter
Array = np.ndarray[Any, Any]
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*experts\.(gate_up|down)_proj(_bias)?$")
_ROUTER = re.compile(r"(?:^|\.)layers\.(\d+)\.block_sparse_moe\.router\.weight$")
_LATENT = ".attn_kv_b."
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERT_BIAS = re.compile(r"(?:^|\.)layers\.(\d+)\..*e_score_correction_bias$")
# By architecture: whether rows of queries and keys are interleaved, so that rotary positions turn neighbours.
_INTERLEAVED = {"llama", "granite", "granitemoe", "smollm3", "arcee", "deci", "olmo", "minicpm", "baichuan"}
_PLUS_ONE = {"gemma", "gemma2", "gemma3", "nemotron"}  # norms whose weight the model adds to 1
_TURNED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")  # of GPT-2: [in, out]


def parts_of(header: Header, model: Any) -> dict[str, list[GgufTensor]]:
    """Return the tensors that each parameter is made of, in order. Raise UnsupportedModel if the family is not known or
    there is no parameter of a tensor, BadCheckpoint if a part of a parameter is missing.

    Args:
        model: of transformers, on the meta device.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if arch is None:
        raise UnsupportedModel(f"{header.path}: the gguf package has no names for {header.architecture!r}")
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if header.values.get(f"{header.architecture}.nextn_predict_layers"):  # generation does not use layers for these
        layers = model.config.num_hidden_layers
        beyond = [name for name in tensors if (block := _BLOCK.match(name)) and int(block[1]) >= layers]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in beyond}
    parts, prefix = dict[str, list[GgufTensor]](), f"{model.base_model_prefix}."
    for name in model.state_dict():
        wanted = _stored_names(name, names) or _stored_names(name.removeprefix(prefix), names)
        wanted = _instead(wanted, tensors)
        own = [tensors.pop(part) for part in wanted if part in tensors]
        if own and len(own) < len(wanted):
            fault = f"lacks a part of {name}, which is made of {' and '.join(wanted)}"
            raise BadCheckpoint(f"{header.path} {fault}")
        if own:
            parts[name] = own
        if own and _LATENT in wanted[0]:  # some files have these numbers twice
            for half in _halves(wanted[0]):
                tensors.pop(half, None)
    tensors.pop(ROPE_FREQS, None)
    if tensors:
        fault = f"{len(tensors)} tensors, among them {[*tensors][:3]}, have no place in {type(model).__name__}"
        raise UnsupportedModel(f"{header.path}: {fault}")
    return parts


def _instead(wanted: list[str], tensors: Mapping[str, GgufTensor]) -> list[str]:
    """Return the names of the tensors of a parameter in a file that has other ones instead of those `wanted`: experts'
    gates and ups in one tensor, or keys and values of latent attention apart."""
    first = wanted[0] if wanted else ""
    if (joined := first.replace("_gate_exps", "_gate_up_exps")) in tensors:
        return [joined]
    return _halves(first) if _LATENT in first and first not in tensors else wanted


def _halves(name: str) -> list[str]:
    """Return the names of the parts for keys and for values of a tensor _LATENT."""
    return [name.replace(_LATENT, f".attn_{half}_b.") for half in ("k", "v")]


def _stored_names(name: str, names: Any) -> list[str]:
    """Return the names of the tensors that a parameter is made of; [] if there are none. names: gguf-py's map."""
    if match := _EXPERTS.search(name):
        kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
        return [f"blk.{match[1]}.ffn_{kind}_exps.{'bias' if match[3] else 'weight'}" for kind in kinds]
    if match := _ROUTER.search(name):
        return [f"blk.{match[1]}.ffn_gate_inp.weight"]
    if match := _EXPERT_BIAS.search(name):
        return [f"blk.{match[1]}.exp_probs_b.bias"]
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, ".", "weight"
    found = names.get_name(stem)
    return [] if found is None else [f"{found}{dot}{suffix}"]


def undone(architecture: str, config: Any, tensors: Sequence[GgufTensor], arrays: Sequence[Array]) -> Array:
    """Return a parameter from its tensors, as the checkpoint had it.

    Args:
        config: of the model.
        tensors: as `parts_of` returns them for the parameter.
        arrays: their content, or other arrays that differ in the last dimension.
    """
    name, x = tensors[0].name, arrays[0]
    if ".attn_k_b." in name:  # of each head, the keys' part is transposed
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        keys, values = x.reshape(heads, rank, -1).swapaxes(1, 2), arrays[1].reshape(heads, -1, rank)
        return np.concatenate([keys, values], axis=1).reshape(-1, rank)
    if len(arrays) > 1:  # gate and up projection of experts
        return np.concatenate(arrays, axis=1)
    if architecture in _INTERLEAVED and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if architecture in _PLUS_ONE and "norm.weight" in name:
        return x - 1
    if architecture == "bloom" and "attn_qkv" in name:
        return np.stack(np.split(x.reshape(3 * config.n_head, -1, *x.shape[1:]), 3), axis=1).reshape(x.shape)
    if architecture == "gpt2" and name.endswith(_TURNED):
        return x.T
    rowed = name.endswith("ffn_gate_inp_shexp.weight") or (architecture == "ernie4_5-moe" and "exp_probs_b" in name)
    if rowed and len(tensors[0].shape) == 1:
        return x[None]
    return x
