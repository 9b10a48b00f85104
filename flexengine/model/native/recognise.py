"""Which decoder layers compute by the calls of native/layer.py.

A layer is recognised by the names and classes of its modules (`parts_of`). A trial with random weights of a small
layer then compares the calls with transformers' own modules, which shows that the layer connects its modules in this
way. A trial cannot show what code does with other numbers or in other layers: so only layers of transformers' own
models are recognised, not those of a checkpoint's own Python code.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.errors import FlexError
from flexengine.kernels.cpu import NativeKernels
from flexengine.model.forward import ATTENTION, Attend, Pass, PausingLayer, pausing_layers
from flexengine.model.linear import FastLinear, Product, use_fast_linear
from flexengine.model.native.fused import ACTS, use_fused
from flexengine.model.native.layer import LayerParts, NativeLayer
from flexengine.model.native.shared import LayerKind, Scratch

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
# Sizes of a trial, by the names of a config's fields.
_SMALL = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_SMALL |= {"ffn_dim": 24, "word_embed_proj_dim": 32}
_TOKENS = 3  # of a trial
_WEIGHTS = (0.3, 30.0)  # standard deviations of matrices, of one trial each; large ones exceed limits such as clip_qkv
_CLOSE = 1e-5  # largest relative difference in a trial; two orders of summation differ by 5e-7
_KNOWN = {"transformers", "torch", "flexengine", "builtins"}  # packages whose classes a trial is for


def use_native_layers(model: Any, attends: dict[int, Attend]) -> None:
    """Let layers of a model, with pausing layers, fast linear and fused modules, compute as two calls if they are
    recognised. Their trials follow when they are first used. attends: by layer, its pause at attention in a pass on the
    meta device."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    if any(cls.__module__.partition(".")[0] not in _KNOWN for cls in classes):
        return
    kinds: dict[Any, LayerKind] = {}
    scratch = Scratch()
    before: PausingLayer | None = None
    for module in pausing_layers(model):
        layer: Any = module.layer
        event = attends[module.index]
        if (parts := parts_of(layer)) is not None and event.sinks is None:
            norms = tuple(m.rms for m in layer.modules() if hasattr(m, "rms"))
            # Layers of a class with equal plain attributes, except their numbers, compute alike.
            attributes = ((name, *item) for name, m in layer.named_modules() for item in vars(m).items())
            plain = (x for x in attributes if isinstance(x[2], bool | int | float | str) and x[1] != "layer_idx")
            key = type(layer), (*plain,), norms, event.scale, event.softcap
            proven = cache(partial(_alike, type(layer), model.config, layer.self_attn.layer_idx))
            kind = kinds.setdefault(key, LayerKind(proven, scratch))
            module.native = NativeLayer(layer, parts, _options(event, parts), kind)
            if before is not None and before.native is not None:
                before.native.following = module.native
        before = module
    if before is not None and before.native is not None:
        before.native.last = _ends(model)


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


def _ends(model: Any) -> bool:
    """Return whether nothing but a norm of each token, and the output projection, follows the last layer. Embeddings of
    ids and of positions come before the first layer."""
    inside = {m for layer in model.modules() if isinstance(layer, PausingLayer) for m in layer.modules()}
    outside = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    embeddings = [m for m in outside if isinstance(m, nn.Embedding)]
    return 1 <= len(embeddings) == len(outside) - 1 and sum(is_norm(m) for m in outside) == 1


def _options(event: Attend, parts: LayerParts) -> dict[str, Any]:
    return {"scaling": event.scale * parts.factor, "sliding_window": event.window, "softcap": event.softcap}


def _alike(layer: Any, config: Any, index: int) -> bool:
    """Return whether native kernels are at hand, and the calls compute the same, but for rounding, as small layers of a
    class, with a model's config and a number."""
    try:
        native = isinstance(kernels.load(), NativeKernels)
        return native and all(_compare(*_small(layer, config, index, size)) for size in _WEIGHTS)
    except FlexError:
        raise
    except Exception:  # the layer needs what a trial does not have
        return False


def _small(layer: Any, config: Any, index: int, weights: float) -> tuple[Any, int, torch.Generator]:
    """Return a small layer with random weights, matrices of a standard deviation, and the width of its input."""
    rng, config = torch.Generator().manual_seed(0), copy.deepcopy(config.get_text_config())
    for name, size in _SMALL.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    config._attn_implementation = ATTENTION
    small = layer(config, index).float().eval().requires_grad_(False)
    for tensor in small.parameters():
        tensor.copy_(torch.randn(tensor.shape, generator=rng) * (weights if tensor.dim() > 1 else 1.0))
    return small, config.hidden_size, rng


def _compare(own: Any, width: int, rng: torch.Generator) -> bool:
    """Return whether the calls compute the same as a layer of transformers."""
    ours = copy.deepcopy(own)
    use_fast_linear(ours, Product(torch.float32))
    use_fused(ours)
    if (parts := parts_of(ours)) is None:
        return False
    x, cos, sin = (torch.randn(1, _TOKENS, n, generator=rng) for n in (width, *2 * [own.self_attn.head_dim]))
    positions = {"position_embeddings": (cos, sin)} if parts.rotary else {}
    event, theirs = _run(lambda: own(x.clone(), **positions))
    native = NativeLayer(ours, parts, _options(event, parts), LayerKind(lambda: True, Scratch()))
    found, result = _run(lambda: native(x.clone(), positions.get("position_embeddings"))[1])
    pairs = [(event.q * event.scale, found.q * found.scale), (event.k, found.k), (event.v, found.v), (theirs, result)]
    return all(a.shape == b.shape and float((a - b).norm() / a.norm()) < _CLOSE for a, b in pairs)


def _run(layer: Callable[[], Tensor]) -> tuple[Attend, Tensor]:
    """Return the pause at attention and the output of a layer. Attention answers with random numbers."""
    current = Pass(layer)
    event = current.switch()
    rng = torch.Generator().manual_seed(1)
    return event, current.switch(torch.randn(1, _TOKENS, event.q.shape[1], event.v.shape[-1], generator=rng))
