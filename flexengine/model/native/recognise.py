"""Which modules compute by native kernels, all others by their own code. transformers repeats code in every family.

* Norms, gated MLPs and rotary positions: one kernel each. A norm or an MLP gets a fused forward if the bytecode of its
  forward equals a known one. An attention module keeps its forward and its decorators; it gets the fused rotary
  function if the bytecode of its own equals a known one. Dtypes other than fp32, and GPUs, use the module's own code.
* Decoder layers: the calls of native/layer.py. A layer is recognised by the names and classes of its modules
  (`parts_of`). A trial with random weights of a small layer then compares the calls with transformers' own modules,
  which shows that the layer connects its modules in this way. A trial cannot show what code does with other numbers or
  in other layers: so only layers of transformers' own models are recognised, not those of a checkpoint's own Python
  code.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm, apply_rotary_pos_emb
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from flexengine import kernels
from flexengine.errors import FlexError
from flexengine.kernels.cpu import NativeKernels, is_fp32
from flexengine.model.forward import ATTENTION, Attend, Pass, PausingLayer, pausing_layers
from flexengine.model.linear import FastLinear, Product, unwatched, use_product
from flexengine.model.native.layer import ACTS, LayerKind, LayerParts, NativeLayer, Scratch

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
            module.native = NativeLayer(layer, parts, event, kind)
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
    """Return whether a module is a norm that the kernels compute: a fused RMS norm or a layer norm."""
    return hasattr(module, "rms") or (type(module) is nn.LayerNorm and module.elementwise_affine)


def _ends(model: Any) -> bool:
    """Return whether nothing but a norm of each token, and the output projection, follows the last layer. Embeddings of
    ids and of positions come before the first layer."""
    inside = {m for layer in model.modules() if isinstance(layer, PausingLayer) for m in layer.modules()}
    outside = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    embeddings = [m for m in outside if isinstance(m, nn.Embedding)]
    return 1 <= len(embeddings) == len(outside) - 1 and sum(is_norm(m) for m in outside) == 1


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
    use_product(ours, Product(torch.float32))
    use_fused(ours)
    if (parts := parts_of(ours)) is None:
        return False
    x, cos, sin = (torch.randn(1, _TOKENS, n, generator=rng) for n in (width, *2 * [own.self_attn.head_dim]))
    positions = {"position_embeddings": (cos, sin)} if parts.rotary else {}
    event, theirs = _run(lambda: own(x.clone(), **positions))
    native = NativeLayer(ours, parts, event, LayerKind(lambda: True, Scratch()))
    found, result = _run(lambda: native(x.clone(), positions.get("position_embeddings"))[1])
    pairs = [(event.q * event.scale, found.q * found.scale), (event.k, found.k), (event.v, found.v), (theirs, result)]
    return all(a.shape == b.shape and float((a - b).norm() / a.norm()) < _CLOSE for a, b in pairs)


def _run(layer: Callable[[], Tensor]) -> tuple[Attend, Tensor]:
    """Return the pause at attention and the output of a layer. Attention answers with random numbers."""
    current = Pass(layer)
    event = current.switch()
    rng = torch.Generator().manual_seed(1)
    return event, current.switch(torch.randn(1, _TOKENS, event.q.shape[1], event.v.shape[-1], generator=rng))


# Fused modules.

_ROTATE = "apply_rotary_pos_emb"


def _same(one: Any, *others: Any) -> bool:
    """Return whether a function has the same bytecode, names and defaults as one of the others."""

    def steps(function: Any) -> Any:
        code = function.__code__
        constants = [x for x in code.co_consts if x is not None and not isinstance(x, str)]  # without the docstring
        arguments = code.co_argcount, code.co_kwonlyargcount, function.__defaults__, function.__kwdefaults__
        return code.co_code, code.co_names, code.co_freevars, constants, arguments

    known = [other for other in others if isinstance(other, FunctionType)]  # the package `kernels` may replace modules
    return isinstance(one, FunctionType) and any(steps(one) == steps(other) for other in known)


def _norm(cls: type[nn.Module]) -> dict[str, Any] | None:
    """Return the fused forward of a norm, weight * (x / root mean square), or with 1 + weight; None for other code."""
    gemma = _same(cls.forward, Gemma2RMSNorm.forward) and _same(getattr(cls, "_norm", None), Gemma2RMSNorm._norm)
    if not gemma and not _same(cls.forward, llama.LlamaRMSNorm.forward, Olmo2RMSNorm.forward):
        return None
    eps, shift = ("eps", 1.0) if gemma else ("variance_epsilon", 0.0)

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_fp32(x, self.weight) or self.weight.shape != x.shape[-1:]:
            return cls.forward(self, x)  # type: ignore[no-any-return]
        with unwatched():
            return kernels.load().rms_norm(x, self.weight, getattr(self, eps), shift)

    return {"forward": forward, "rms": (eps, shift)}


def _mlp(cls: type[nn.Module]) -> dict[str, Any] | None:
    """Return the fused forward of a gated MLP, down(act(gate(x)) * up(x)); None for other code."""
    if not _same(cls.forward, llama.LlamaMLP.forward, Gemma2MLP.forward):
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        act = ACTS.get(type(self.act_fn).__name__)
        if act is None or not is_fp32(x):
            return cls.forward(self, x)  # type: ignore[no-any-return]
        return self.down_proj(kernels.load().gate(self.gate_proj(x), self.up_proj(x), act))  # type: ignore[no-any-return]

    return {"forward": forward}


def _rotated(own: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        expected = (q.shape[0], q.shape[2], q.shape[3])
        if unsqueeze_dim != 1 or not is_fp32(q, k, cos, sin) or not (cos.shape == sin.shape == expected):
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        kernel = kernels.load()
        with unwatched():
            return kernel.rotate(q, cos, sin), kernel.rotate(k, cos, sin)

    return rotated


def _with_fused_rotary(forward: Any) -> FunctionType | None:
    """Return a copy of a forward that calls the fused rotary function. Decorators are copied around it."""
    if not isinstance(forward, FunctionType):
        return None
    names, closure = forward.__globals__, forward.__closure__
    if (inner := getattr(forward, "__wrapped__", None)) is not None:
        calls = [cell.cell_contents is inner for cell in closure or ()]
        if not any(calls) or (fused := _with_fused_rotary(inner)) is None:
            return None
        closure = tuple(CellType(fused) if call else cell for call, cell in zip(calls, closure or (), strict=True))
    elif _ROTATE in forward.__code__.co_names:
        own: Any = names.get(_ROTATE)
        known = _same(own, llama.apply_rotary_pos_emb, apply_rotary_pos_emb)
        if not known or not _same(own.__globals__.get("rotate_half"), llama.rotate_half):
            return None
        names = {**names, _ROTATE: _rotated(own)}
    else:
        return None
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@cache
def _fused(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return a subclass of `cls` with a fused forward, or None if the code of `cls` is not known."""
    members = _norm(cls) or _mlp(cls)
    if members is None and (forward := _with_fused_rotary(cls.forward)) is not None:
        members = {"forward": forward}
    return type(f"Fused{cls.__name__}", (cls,), members) if members else None


def use_fused(model: nn.Module) -> None:
    """Change the classes of the model's modules to those with fused forwards. Parameters and their names stay."""
    for module in model.modules():
        if (fused := _fused(type(module))) is not None:  # type: ignore[arg-type]
            module.__class__ = fused
        elif type(module) is OPTDecoderLayer and type(module.activation_fn) is nn.ReLU:
            module.activation_fn = nn.ReLU(inplace=True)  # its input is used nowhere else
