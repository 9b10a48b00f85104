"""The choice of experts as a kernel, for routers that are found to compute it, and mixtures without modules in between.

A router is probed with random weights and numbers, not recognised by its class. One that a kernel replaces does so in
every pass, so that a token's shares do not depend on whether its layer is one call or runs modules.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexengine import kernels
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import SHARED, Routing
from flexengine.model.experts import native_experts, placed
from flexengine.model.linear import READS, is_experts

STEPS_OF_LAYER, CHOICE, MIXTURE = range(3)  # kinds of struct Item of layers.cpp
TOKENS = 24  # of a probe
SPREAD = (2.0, 30.0)  # standard deviations of logits, of a probe each
_found: WeakKeyDictionary[Any, Routing | None] = WeakKeyDictionary()  # by kind of layers


class Mixture(NamedTuple):
    """A block that is a router and experts only: experts(x, chosen, shares)."""

    block: nn.Module
    router: nn.Module  # with a weight [experts, hidden], and perhaps a bias
    experts: Any
    routing: Routing

    @property
    def watched(self) -> bool:
        """Whether something watches the modules, or reads experts when they are chosen, so that they must run."""
        return bool(vars(self.experts).keys() & READS) or any(
            m._forward_hooks or m._forward_pre_hooks for m in self[:3]
        )

    def compute(self, x: Tensor, logits: Tensor, empty: Callable[[Sequence[int]], Tensor]) -> Tensor | None:
        """Return the block's output; None if its modules must compute it.

        Args:
            x: input of the block, [rows, hidden].
            logits: of the router, [rows, experts].
            empty: returns memory for the output.
        """
        kernel, native = kernels.load(), native_experts(self.experts, x)
        if self.watched or native is None or not isinstance(kernel, NativeKernels):
            return None
        out = empty(x.shape)
        native.add(x, *self.routing.route(kernel, logits), out, fresh=True)
        return out

    def layers(
        self, first: Any, x: Tensor, given: Sequence[Tensor], layers: Sequence[tuple[Any, Any]]
    ) -> Tensor | None:
        """Return the output of whole layers with such blocks, [rows, hidden], computed by one call; None if it does not
        compute them. Arguments as of NativeLayer._whole. first: the first layer."""
        kernel, mixtures = kernels.load(), [layer.mixture for layer, _ in layers]
        natives = [None if mixture.watched else native_experts(mixture.experts, x) for mixture in mixtures]
        if None in natives or not first.adds or not isinstance(kernel, NativeKernels):
            return None
        recorded = first.whole_call(x, given, layers[0][1])
        sums: list[Tensor] = [first._empty(*recorded.results[0]) for _ in range(2)]  # layers write to them in turns
        normed, logits, *rest = (first._empty(*result) for result in recorded.results[1:])
        rows = first.addresses_of(x, given, layers, [[total, normed, logits, *rest] for total in sums])
        y = torch.empty_like(normed)
        chosen, shares = (torch.empty((len(x), self.routing.top), dtype=t) for t in (torch.int64, torch.float32))
        experts, kept = placed([native for native in natives if native], normed, chosen, shares, y)
        additions = [kernel.steps() for _ in sums]
        for added, total in zip(additions, sums, strict=True):
            added.add(total, y, 1.0, out=total)
        parts = recorded.placed(*rows), self.routing.call(logits, chosen, shares), experts
        arrays = [added.array() for added in additions]  # in memory, as `parts` and `kept`, until the call has returned
        kernel.run_items(_items(len(layers), *parts, arrays))
        del kept
        return sums[(len(layers) - 1) % len(sums)]


def _items(count: int, steps: Any, choice: Any, experts: Any, additions: Sequence[Any]) -> Any:
    """Return an array of struct Item, a row each: of each layer its steps, choice, experts and sum.

    Args:
        count: number of layers.
        steps: struct Step of all layers, a row each.
        choice: struct Route.
        experts: address of a struct Experts of each layer.
        additions: arrays of struct Step, which layers have in turns.
    """
    each, start, chooses = len(steps) // count, steps.ctypes.data, ctypes.addressof(choice)
    added = [(ctypes.addressof(array), STEPS_OF_LAYER, len(array)) for array in additions]
    items = list[tuple[int, int, int]]()
    for layer in range(count):
        items.append((start + layer * each * steps.strides[0], STEPS_OF_LAYER, each))
        items.append((chooses, CHOICE, 1))
        items.append((experts[layer], MIXTURE, 1))
        items.append(added[layer % len(added)])
    return np.array(items, dtype=np.int64)


def use_routing(block: nn.Module, kind: Any) -> Mixture | None:
    """Return a block as a Mixture, after letting its router choose by a kernel; None if it is not known to be one.

    Args:
        block: on the meta device.
        kind: of its layer; blocks of a kind compute the same.
    """
    children = list(block.children())
    experts, routers = ([m for m in children if is_experts(m) is so] for so in (True, False))
    if len(experts) != 1 or len(routers) != 1 or not _is_router(routers[0]) or any(True for _ in _own(block)):
        return None
    router: Any = routers[0]
    if kind not in _found:
        _found[kind] = _probed(block, router, experts[0])
    if (routing := _found[kind]) is None:
        return None
    router.product, router.routing = experts[0].product, routing
    own: Any = type(router)
    router.__class__ = _routed(own)
    return Mixture(block, router, experts[0], routing)


def _own(module: nn.Module) -> Iterator[Any]:
    """Yield the parameters and buffers of a module itself."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _is_router(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_parameters()}
    return "weight" in names <= {"weight", "bias"} and not list(module.children()) and not list(module.buffers())


class _Stub(nn.Module):
    """Stands for experts, and keeps what they get and return."""

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        self.got, self.out = (hidden, chosen, shares), hidden.cos()
        return self.out


def _probed(block: nn.Module, router: nn.Module, experts: nn.Module) -> Routing | None:
    """Return what the block's router computes; None if no kernel does, or the block does more."""
    try:
        tries = [_trial(block, router, experts, spread) for spread in SPREAD]
    except Exception:  # code of any model
        return None
    top = tries[0][1].shape[1] if tries[0] else 0
    for shared in SHARED:
        for normalised in (False, True):
            routing = Routing(shared, top, normalised)
            if all(trial and _gives(routing, *trial) for trial in tries):
                return routing
    return None


@torch.no_grad()
def _trial(
    block: nn.Module, router: nn.Module, experts: nn.Module, spread: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the logits of random numbers, and the experts and shares that the block's router makes of them; None if
    the block is more than a router and experts. spread: standard deviation of logits."""
    generator, stub = torch.Generator().manual_seed(0), _Stub()
    own: Any = copy.deepcopy(router).to_empty(device="cpu").float()
    width = own.weight.shape[1]
    for name, param in own.named_parameters():
        param.data.normal_(0, spread / (width**0.5 if name == "weight" else 1), generator=generator)
    alone, swapped = copy.copy(block), {id(experts): stub, id(router): own}
    alone._modules = {name: swapped.get(id(module)) for name, module in block._modules.items()}
    x = torch.randn(1, TOKENS, width, generator=generator)
    y = alone(x)
    y, (hidden, chosen, shares), given = y[0] if isinstance(y, tuple) else y, stub.got, own(x[0])
    logits = functional.linear(x[0], own.weight, own._parameters.get("bias"))
    same = torch.equal(hidden.reshape(x[0].shape), x[0]) and torch.equal(y.reshape(x.shape), stub.out.reshape(x.shape))
    same = same and type(given) is tuple and len(given) == 3 and torch.allclose(given[0], logits, 1e-4, 1e-4)
    same = same and torch.equal(given[1], shares) and torch.equal(given[2], chosen) and shares.dtype == torch.float32
    return (logits, chosen, shares) if same else None


def _gives(routing: Routing, logits: Tensor, chosen: Tensor, shares: Tensor) -> bool:
    """Return whether the kernel's choice is the router's."""
    kernel = kernels.load()
    if not isinstance(kernel, NativeKernels):
        return False
    found, wanted = (
        torch.zeros_like(logits).scatter_(1, *pair) for pair in (routing.route(kernel, logits), (chosen, shares))
    )
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@cache
def _routed(cls: type) -> type:
    """Return the class of a router that chooses by a kernel."""

    def forward(self: Any, hidden: Tensor) -> Any:
        kernel, weight = kernels.load(), self.weight
        x = hidden.reshape(-1, weight.shape[1])
        plain = hidden.device.type == weight.device.type == "cpu" and isinstance(kernel, NativeKernels)
        if not plain or x.dtype != torch.float32 or weight.dtype != torch.float32:
            return cls.forward(self, hidden)  # type: ignore[attr-defined]
        logits = self.product(x, weight, self._parameters.get("bias"))
        chosen, shares = self.routing.route(kernel, logits)
        return logits, shares, chosen

    return type(cls.__name__, (cls,), {"forward": forward})
