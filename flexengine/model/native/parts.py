"""The modules of a decoder layer by what they compute, of the layers that native/layer.py can compute."""

from typing import Any, NamedTuple

from torch import nn

from flexengine.model.linear import FastLinear
from flexengine.model.native.fused import ACTS

HEAD_NORMS = {"q_norm", "k_norm"}

# Names of the modules with parameters. LLaMA's: norms, a gated MLP, rotary positions.
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
# OPT's: layer norms, an MLP without a gate, learned positions.
_OPT_LAYER = {"self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"}
_OPT_ATTENTION = {"q_proj", "k_proj", "v_proj", "out_proj"}


class LayerParts(NamedTuple):
    """The modules of a layer.

    Attributes:
        attention: module that has the projections to queries, keys and values.
        before, after: norm before attention, and norm after it.
        q, k, v, out: projections of attention.
        gate, up, down: projections of the MLP. gate: None if it has none.
        act: module with the activation function, and the name of its attribute.
        rotary: whether positions are rotary; if not, the layer gets no cosines and sines.
        factor: by which the layer multiplies queries before attention.
    """

    attention: Any
    before: Any
    after: Any
    q: FastLinear
    k: FastLinear
    v: FastLinear
    out: FastLinear
    gate: FastLinear | None
    up: FastLinear
    down: FastLinear
    act: tuple[Any, str]
    rotary: bool
    factor: float


def parts_of(layer: Any) -> LayerParts | None:
    """Return the modules of a layer; None if any is missing, if there are others, or if one is of another class."""
    attention = getattr(layer, "self_attn", None)
    if attention is None or not hasattr(attention, "head_dim") or any(True for _ in layer.buffers()):
        return None
    head_norms = _names(attention) & HEAD_NORMS
    if _names(layer) == _LAYER and _names(layer.mlp) == _MLP and _names(attention) - HEAD_NORMS == _ATTENTION:
        mlp = layer.mlp
        parts = LayerParts(
            attention,
            layer.input_layernorm,
            layer.post_attention_layernorm,
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            (mlp, "act_fn"),
            True,
            1.0,
        )
    elif _names(layer) == _OPT_LAYER and _names(attention) == _OPT_ATTENTION and hasattr(attention, "scaling"):
        mlp = layer
        parts = LayerParts(
            attention,
            layer.self_attn_layer_norm,
            layer.final_layer_norm,
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.out_proj,
            None,
            layer.fc1,
            layer.fc2,
            (layer, "activation_fn"),
            False,
            attention.scaling,
        )
    else:
        return None
    linear = [m for m in (*parts[3:7], parts.gate, parts.up, parts.down) if m is not None]
    norms = [parts.before, parts.after, *(getattr(attention, name) for name in head_norms)]
    own = {name for part in (layer, attention, mlp) for name, _ in part.named_parameters(recurse=False)}
    fine = not own and len(head_norms) != 1 and all(type(m) is FastLinear for m in linear) and all(map(is_norm, norms))
    return parts if fine and type(getattr(*parts.act, None)).__name__ in ACTS else None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm that the kernels compute: a fused RMS norm (fused.py), or a layer norm."""
    return hasattr(module, "rms") or (type(module) is nn.LayerNorm and module.elementwise_affine)


def _names(module: nn.Module) -> set[str]:
    """Return the names of a module's children that have parameters."""
    return {name for name, child in module.named_children() if any(True for _ in child.parameters())}
