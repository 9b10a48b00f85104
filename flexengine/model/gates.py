"""What experts compute between their products, found by probing the module with numbers, not by its class."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import ExpertGate, gated

_FAR, _STEP = 1e6, 0.0625  # a number beyond all limits; a step of `up` below them
_MATRICES = {"gate_up_proj", "up_proj", "down_proj"}  # parameters of experts that gates do not read
_NUMBERS = {"layer_idx", "layer_id"}  # attributes that have the number of a layer
_OURS = {"apart", "block", "by_rows", "forms", "packed"}  # attributes that tell the engine where matrices are
_TORCH = {*vars(torch.nn.Module())} - {"training"}  # attributes that all modules have
_ACTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "tanh": lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
    "erf": lambda x, _: torch.nn.functional.gelu(x),
    "relu": lambda x, _: x.relu(),
    "relu squared": lambda x, _: x.relu().square(),
}


def find_gate(module: Any, kernels: NativeKernels) -> ExpertGate | None:
    """Return what a mixture of experts computes between its products; None if the kernels do not compute it.

    The module's `_apply_gate` (or `act_fn` if it has no gate) is probed in fp64, and the kernel's results must equal
    its fp32 results on random numbers, small and large ones.
    """
    try:
        if (gate := _probed(module)) is None:
            return None
        pairs = [(x, _apply(module, x)) for x in _numbers(gate)]
    except Exception:  # code of any model
        return None
    return gate if all(_close(gated(kernels, gate, x), wanted) for x, wanted in pairs) else None


def gate_settings(module: Any) -> tuple[Any, ...] | None:
    """Return what the gates of the experts of one model may differ by; None if it may be numbers of parameters, the
    number of a layer, or a hook."""
    if module.has_gate:
        code = getattr(module._apply_gate, "__code__", None)
        if code is None or _NUMBERS & {*code.co_names, *code.co_consts}:
            return None
    names = {name.removesuffix("_bias") for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not names <= _MATRICES:
        return None
    settings = list[Any]()
    for path, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        settings += [path, type(part)]
        for name, x in vars(part).items():
            if name in _TORCH | _OURS | _NUMBERS:
                continue
            plain = isinstance(x, bool | int | float | str | None)
            settings.append((name, x if plain else repr(x) if isinstance(x, dict | list | tuple | set) else id(x)))
    return tuple(settings)


def _apply(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return out


def _probed(module: Any) -> ExpertGate | None:
    if not module.has_gate:
        return _with_act(lambda g: _apply(module, g[:, None])[:, 0], ExpertGate("sigmoid", gated=False))
    start = torch.full((1, 4), 0.5, dtype=torch.float64)
    moved = start.clone()
    moved[0, 1] = 0.75
    mixed = bool((_apply(module, moved) != _apply(module, start))[0, 0])  # else the second number is another gate

    def result(gate: Tensor, up: float) -> Tensor:
        pair = [gate, torch.full_like(gate, up)]
        return _apply(module, torch.stack([pair[i] for i in ((0, 1, 0, 1) if mixed else (0, 0, 1, 1))], 1))[:, 0]

    one = torch.ones(1, dtype=torch.float64)
    zero, slope = (float(y) for y in (result(one, 0.0), (result(one, _STEP) - result(one, 0.0)) / _STEP))
    most = float(result(one, _FAR)) / slope - zero / slope
    gate = ExpertGate("sigmoid", mixed=mixed, up_most=_limit(most), shift=_short(zero / slope))
    return _with_act(lambda g: (result(g, _STEP) - result(g, 0.0)) / _STEP, gate)


def _with_act(act: Any, gate: ExpertGate) -> ExpertGate | None:
    """Return the gate with the activation that equals `act` below its limit; None if there is none."""
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    quarter = torch.full((1,), 0.25, dtype=torch.float64)
    most, share = float(act(torch.full((1,), _FAR, dtype=torch.float64))), float(act(quarter)) / 0.25
    alpha = _short(math.log(share / (1 - share)) / 0.25) if 0 < share < 1 else 1.0
    y = act(x)
    below = y < 0.9 * most
    for name, known in _ACTS.items():
        if torch.allclose(known(x, alpha)[below], y[below], rtol=1e-5, atol=1e-5):
            return gate._replace(act=name, alpha=alpha if name == "sigmoid" else 1.0, act_most=_limit(most))
    return None


def _limit(most: float) -> float:
    return _short(most) if most < 0.9 * _FAR else math.inf


def _short(x: float) -> float:
    """Return x without its last digits, which come from rounding."""
    return float(f"{x:.7g}")


def _numbers(gate: ExpertGate) -> list[Tensor]:
    """Return small and large random inputs of the gate, fp32."""
    drawn = torch.randn(4, 24, 2 * 21, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    drawn = drawn if gate.gated else drawn[..., :21].contiguous()
    return [x * scale for x, scale in zip(drawn, (0.01, 1.0, 10.0, 1000.0), strict=True)]


def _close(found: Tensor, wanted: Tensor) -> bool:
    """Return whether the kernel's results equal the module's."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    least = 1e-6 * float(wanted.abs().max())  # GELU cancels digits where it is near 0
    return torch.allclose(found, wanted, rtol=1e-5, atol=least)
