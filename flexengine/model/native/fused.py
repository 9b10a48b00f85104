"""Norms, gated MLPs and rotary positions as one kernel each, where layers run their modules.

A module gets a fused forward if its own computes the same with random numbers. An attention module keeps its forward
and its decorators; it gets the fused rotary function if its own computes the same. Dtypes other than fp32, and GPUs,
use the module's own code. A trial cannot show what code does with other numbers: only code of transformers is tried.
"""

import copy
from collections.abc import Callable
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from flexengine import kernels
from flexengine.kernels.cpu import is_fp32
from flexengine.model.linear import FastLinear, unwatched
from flexengine.model.native.describe import ACTIVATIONS, NormRecord, RotaryRecord, is_linear, norm_of, rotated, same

_ROTATE = "apply_rotary_pos_emb"
_OWN = "transformers."  # where the modules of classes and functions are that are tried
_PROJECTIONS = {"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}  # of a gated MLP; sizes in a trial
_MOST_NUMBERS = 1 << 20  # most numbers in the parameters of a norm
_norms = dict[Any, NormRecord | None]()  # by settings of a module: class, plain attributes, shapes of parameters
_acts = dict[Any, str | None]()


def settings_of(module: nn.Module, but: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return the class and the plain attributes of a module, without its children's. but: names to leave out."""
    plain = (x for x in vars(module).items() if isinstance(x[1], bool | int | float | str) and x[0] not in but)
    return type(module), *plain


def with_numbers(module: nn.Module) -> nn.Module:
    """Return a copy of a module without children that has random numbers for parameters."""
    small, rng = copy.copy(module), torch.Generator().manual_seed(0)
    small._parameters = {
        name: x if x is None else nn.Parameter(torch.randn(x.shape, generator=rng), requires_grad=False)
        for name, x in module._parameters.items()
    }
    return small


def norm_in(module: nn.Module) -> NormRecord | None:
    """Return what a norm of transformers or torch computes; None for other modules."""
    known = type(module).__module__.startswith((_OWN, "torch."))
    if not known or isinstance(module, nn.Embedding) or is_linear(module) or list(module.children()):
        return None
    if sum(x.numel() for x in module.parameters()) > _MOST_NUMBERS:  # others are not filled with random numbers
        return None
    key = (*settings_of(module), *((name, x.shape) for name, x in module.named_parameters()))
    if key not in _norms:
        _norms[key] = norm_of(with_numbers(module))
    return _norms[key]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module with parameters is a norm."""
    return "rms" in vars(module) or norm_in(module) is not None


def _norm(cls: Any) -> dict[str, Any]:
    def forward(self: Any, x: Tensor, *gate: Tensor, **named: Tensor) -> Tensor:
        if gate or named or not is_fp32(x, self.weight) or self.weight.shape != x.shape[-1:]:
            return cls.forward(self, x, *gate, **named)  # type: ignore[no-any-return]
        with unwatched():
            return kernels.load().rms_norm(x, self.weight, *self.rms)

    return {"forward": forward}


def _mlp(cls: Any) -> dict[str, Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_fp32(x) or self.act_fn is not self.__dict__["fused_act"][0]:
            return cls.forward(self, x)  # type: ignore[no-any-return]
        up = self.up_proj(x)
        return self.down_proj(kernels.load().gate(self.gate_proj(x), up, self.__dict__["fused_act"][1]))  # type: ignore[no-any-return]

    return {"forward": forward}


def _act_in(module: Any) -> str | None:
    """Return the activation function of a gated MLP, down(act(gate(x)) * up(x)); None for other modules."""
    children = dict(module.named_children())
    if children.keys() != {*_PROJECTIONS, "act_fn"} or not type(module).__module__.startswith(_OWN):
        return None
    if any(type(children[name]) not in (FastLinear, nn.Linear) for name in _PROJECTIONS):
        return None
    key = *settings_of(module), *settings_of(children["act_fn"])
    if key not in _acts:
        small: Any = copy.copy(module)
        small._modules = {name: with_numbers(nn.Linear(*sizes)) for name, sizes in _PROJECTIONS.items()}
        small._modules["act_fn"] = children["act_fn"]
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
        trials = [(small.gate_proj(y), small.up_proj(y), small(y.clone())) for y in (x, 300 * x)]  # large: limits act
        found = (
            act
            for act, function in ACTIVATIONS.items()
            if all(same(small.down_proj(function(gate) * up), y) for gate, up, y in trials)
        )
        _acts[key] = next(found, None)
    return _acts[key]


def _rotates(own: Any) -> bool:
    """Return whether a function is transformers' rotary positions of whole heads, of halves."""
    if not isinstance(own, FunctionType) or not own.__module__.startswith(_OWN):
        return False  # the package `kernels` may replace functions by modules
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, 8, generator=rng) for heads in (4, 2))
    cos, sin = (torch.randn(5, 8, generator=rng) for _ in range(2))
    try:
        found = own(*(x.transpose(0, 1)[None] for x in (q, k)), cos[None], sin[None])
    except Exception:
        return False
    expected = (rotated(RotaryRecord("halves", "each"), x, cos, sin) for x in (q, k))
    return all(same(y[0].transpose(0, 1), x) for y, x in zip(found, expected, strict=True))


def _rotated(own: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        expected = (q.shape[0], q.shape[2], q.shape[3])
        if unsqueeze_dim != 1 or not is_fp32(q, k, cos, sin) or not (cos.shape == sin.shape == expected):
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        kernel = kernels.load()
        with unwatched():
            return kernel.rotate(q, cos, sin), kernel.rotate(k, cos, sin)

    return turned


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
        if not _rotates(own):
            return None
        names = {**names, _ROTATE: _rotated(own)}
    else:
        return None
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@cache
def _fused(cls: Any, kind: str) -> type[nn.Module] | None:
    """Return a subclass of `cls` with a fused forward: of a "norm", an "mlp", or of rotary positions in it."""
    members: dict[str, Any] | None = {"norm": _norm, "mlp": _mlp}[kind](cls) if kind else None
    if members is None and (forward := _with_fused_rotary(cls.forward)) is not None:
        members = {"forward": forward}
    return type(f"Fused{cls.__name__}", (cls,), members) if members else None


def use_fused(model: nn.Module) -> None:
    """Change the classes of the model's modules to those with fused forwards. Parameters and their names stay."""
    for module in list(model.modules()):
        norm = norm_in(module) if module._parameters.get("weight") is not None else None
        act = None if norm else _act_in(module)
        if norm is not None and not norm.centred:
            module.rms = norm.eps, norm.shift  # type: ignore[assignment]
        if act is not None:
            module.__dict__["fused_act"] = module._modules["act_fn"], act
        kind = "mlp" if act else "norm" if norm and not norm.centred else ""
        if (fused := _fused(type(module), kind)) is not None:  # type: ignore[arg-type]
            module.__class__ = fused
        elif type(module) is OPTDecoderLayer and type(module.activation_fn) is nn.ReLU:
            module.activation_fn = nn.ReLU(inplace=True)  # its input is used nowhere else
