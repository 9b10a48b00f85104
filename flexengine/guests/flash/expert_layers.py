"""Mixtures of experts of a model whose experts are read when a router chooses them: `ExpertLayer` and its router.

`use_experts_apart` takes the stacked matrices of experts out of the model. The module of the experts then calls its
block (products.py), whose memory has room for some experts. Routers become weights that always are on the device,
because the router of the next layer names the experts to read early (`Router`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.model.products import is_experts
from flexengine.model.skeleton import ParamRef, Skeleton

_ROUTERS = ("gate", "router")  # names of the module that chooses experts, beside the module of the experts


@dataclass(frozen=True)
class Router:
    """The module that chooses the experts of tokens."""

    # Returns scores [tokens, experts], or a tuple whose last item is the chosen experts [tokens, active].
    module: nn.Module
    names: tuple[str, ...]  # of its parameters
    active: int  # number of experts that a token uses

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the experts of tokens [tokens, hidden]: int64 [tokens, active]."""
        out: Any = self.module(hidden)
        last: Tensor = out[-1] if isinstance(out, tuple) else out
        return last.topk(self.active).indices if last.is_floating_point() else last


@dataclass(frozen=True)
class ExpertLayer:
    """The mixture of experts of one layer."""

    module: Any  # holds the stacked matrices
    # By name of a parameter of the checkpoint, its reference: shape [experts, rows, columns].
    matrices: dict[str, ParamRef]
    experts: int  # their number
    active: int  # number of experts that a token uses
    router: Router | None  # None if it is not known


def find_experts(skeleton: Skeleton) -> tuple[ExpertLayer | None, ...]:
    """Return the mixture of experts of each layer; None for a layer without one, or with several."""
    return tuple(_find(skeleton, layer) for layer in skeleton.layers)


def _find(skeleton: Skeleton, layer: dict[str, ParamRef]) -> ExpertLayer | None:
    matrices = {n: slot for n, slot in layer.items() if len(slot.shape) == 3 and is_experts(slot.module)}
    modules, counts = {slot.module for slot in matrices.values()}, {slot.shape[0] for slot in matrices.values()}
    if len(modules) != 1 or len(counts) != 1:
        return None
    block = next(iter(matrices)).rpartition(".")[0].rpartition(".")[0]
    router = _router(skeleton, layer, block, counts)
    return ExpertLayer(modules.pop(), matrices, counts.pop(), skeleton.active, router)


def _router(skeleton: Skeleton, layer: dict[str, ParamRef], block: str, counts: set[int]) -> Router | None:
    """Return the router of the module `block`, whose weight has a row per expert; None if there is no such module."""
    for own in _ROUTERS:
        names = tuple(name for name in layer if name.startswith(f"{block}.{own}."))
        weight = layer.get(f"{block}.{own}.weight")
        if weight is not None and len(weight.shape) == 2 and weight.shape[0] in counts:
            return Router(skeleton.model.get_submodule(f"{block}.{own}"), names, skeleton.active)
    return None


def use_experts_apart(skeleton: Skeleton, layers: Sequence[ExpertLayer | None]) -> None:
    """Take the matrices of experts out of `skeleton.layers`, and move their routers to `skeleton.others`."""
    for j, experts in enumerate(layers):
        if experts is None:
            continue
        routers = {n: skeleton.layers[j][n] for n in (experts.router.names if experts.router else ())}
        out = experts.matrices.keys() | routers.keys()
        skeleton.layers[j] = {name: slot for name, slot in skeleton.layers[j].items() if name not in out}
        skeleton.others |= routers


def bind_meta(experts: ExpertLayer, dtype: torch.dtype) -> None:
    """Bind the stacked matrices to tensors without values, as they are before a job."""
    for slot in experts.matrices.values():
        slot.bind(nn.Parameter(torch.empty(slot.shape, dtype=dtype, device="meta"), requires_grad=False))
