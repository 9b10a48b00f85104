"""Fused norms, rotary positions and gates: one native kernel each, for modules whose own code is recognised.

transformers repeats the code of these modules in every family. A norm or an MLP gets the fused forward if the bytecode
of its forward equals the known one. An attention module keeps its forward and its decorators; it gets the fused rotary
function if the bytecode of its own rotary function equals the known one. Other modules, dtypes other than fp32, and
GPUs use the module's own code.
"""

from collections.abc import Callable
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm, apply_rotary_pos_emb
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from flexengine import kernels
from flexengine.model.linear import unwatched

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


def _plain(*tensors: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def _norm(cls: type[nn.Module]) -> dict[str, Any] | None:
    """Return the fused forward of a norm, weight * (x / root mean square), or with 1 + weight; None for other code."""
    gemma = _same(cls.forward, Gemma2RMSNorm.forward) and _same(getattr(cls, "_norm", None), Gemma2RMSNorm._norm)
    if not gemma and not _same(cls.forward, llama.LlamaRMSNorm.forward, Olmo2RMSNorm.forward):
        return None
    eps, shift = ("eps", 1.0) if gemma else ("variance_epsilon", 0.0)

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _plain(x, self.weight) or self.weight.shape != x.shape[-1:]:
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
        if act is None or not _plain(x):
            return cls.forward(self, x)  # type: ignore[no-any-return]
        return self.down_proj(kernels.load().gate(self.gate_proj(x), self.up_proj(x), act))  # type: ignore[no-any-return]

    return {"forward": forward}


ACTS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "ReLU": "relu"}


def _rotated(own: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        expected = (q.shape[0], q.shape[2], q.shape[3])
        if unsqueeze_dim != 1 or not _plain(q, k, cos, sin) or not (cos.shape == sin.shape == expected):
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
