"""The modules of a decoder layer by what they compute, of the layers that native/layer.py can compute."""

from typing import Any, NamedTuple

from torch import nn

from flexengine.model.linear import FastLinear
from flexengine.model.native.fused import ACTS

# Paths of the modules with parameters. LLaMA's: norms, a gated MLP, rotary positions.
_LLAMA = {
    "before": "input_layernorm",
    "after": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkv"},
    "out": "self_attn.o_proj",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
# OPT's: layer norms, an MLP without a gate, learned positions.
_OPT = {
    "before": "self_attn_layer_norm",
    "after": "final_layer_norm",
    **{name: f"self_attn.{name}_proj" for name in "qkv"},
    "out": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
_HEAD_NORMS = {name: f"self_attn.{name}" for name in ("q_norm", "k_norm")}


class LayerParts(NamedTuple):
    """The modules of a layer."""

    attention: Any  # module that has the projections to queries, keys and values
    act: tuple[Any, str]  # module with the activation function, and the name of its attribute
    rotary: bool  # whether positions are rotary; if not, the layer gets no cosines and sines
    factor: float  # by which the layer multiplies queries before attention
    before: Any  # norm before attention
    after: Any  # norm after attention
    q: FastLinear  # projections of attention
    k: FastLinear
    v: FastLinear
    out: FastLinear
    up: FastLinear  # projections of the MLP
    down: FastLinear
    gate: FastLinear | None = None
    q_norm: Any = None  # norms of the heads of queries and keys
    k_norm: Any = None


def parts_of(layer: Any) -> LayerParts | None:
    """Return the modules of a layer; None if any is missing, if there are others, or if one is of another class."""
    attention = getattr(layer, "self_attn", None)
    if attention is None or not hasattr(attention, "head_dim") or any(True for _ in layer.buffers()):
        return None
    paths = {path for path, m in layer.named_modules() if any(True for _ in m.parameters(recurse=False))}
    norms = _HEAD_NORMS if paths & {*_HEAD_NORMS.values()} else {}
    if paths == {*_LLAMA.values(), *norms.values()}:
        modules, act, rotary, factor = _LLAMA | norms, (layer.mlp, "act_fn"), True, 1.0
    elif paths == {*_OPT.values()} and hasattr(attention, "scaling"):
        modules, act, rotary, factor = _OPT, (layer, "activation_fn"), False, attention.scaling
    else:
        return None
    named = {name: layer.get_submodule(path) for name, path in modules.items()}
    linear = [module for name, module in named.items() if modules[name].endswith(("_proj", "fc1", "fc2"))]
    fine = all(type(m) is FastLinear for m in linear) and all(is_norm(m) for m in named.values() if m not in linear)
    known = type(getattr(*act, None)).__name__ in ACTS
    return LayerParts(attention, act, rotary, factor, **named) if fine and known else None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm that the kernels compute: a fused RMS norm (fused.py), or a layer norm."""
    return hasattr(module, "rms") or (type(module) is nn.LayerNorm and module.elementwise_affine)
