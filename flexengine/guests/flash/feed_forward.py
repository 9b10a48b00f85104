"""Feed-forward blocks whose neurons can be computed one by one: where a layer keeps them, and whether they are sparse.

A block computes down(act(first(x))), or down(act(first(x)) * up(x)) if it is gated. A neuron is one row of `first`, one
row of `up`, and one column of `down`. A neuron whose activation act(first(x)) is 0 adds nothing, so its weights need
not be read. ReLU is 0 for negative numbers; other activation functions can be `Sparsified`.

`use_records` takes the weights of such blocks out of the model. The first module of a block then has the whole block
computed elsewhere, and the last one returns the result. The modules between, which are elementwise, compute tensors
without elements.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import greenlet
import torch
from torch import Tensor, nn
from transformers.activations import ReLUSquaredActivation

from flexengine.model.forward import PausingLayer
from flexengine.model.linear import FastLinear, is_experts
from flexengine.model.skeleton import ParamRef, Skeleton

# Names of the modules (first, up, down) that models use.
_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("fc1", "", "fc2"),
    ("up_proj", "", "down_proj"),
    ("dense_h_to_4h", "", "dense_4h_to_h"),
)
_RELU = (nn.ReLU, ReLUSquaredActivation)
_WIDTH, _NEURONS = 3, 5  # of a trial
# Called with the number of a block, the `Inputs` of the pass, the block's input, and what its first matrix gives.
Note = Callable[[int, Any, Tensor, Tensor], None]


class Sparsified(nn.Module):
    """An activation function whose results of small magnitude become 0 (CATS, arXiv 2404.08763).

    Magnitudes are compared, not values as in FATReLU: SiLU falls to -0.28, and such a result matters as much as 0.28.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.threshold = 0.0  # results of a smaller magnitude become 0; 0 until the thresholds are known

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.plain(input)
        return torch.where(found.abs() < self.threshold, 0.0, found)


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward block of one layer."""

    # first, down: names of the weights, [neurons, width] and [width, neurons].
    first: str
    up: str  # name of the weight [neurons, width]; "" if the block is not gated
    down: str
    # The modules of `first`, `up` (None if not gated) and `down`.
    modules: tuple[FastLinear, FastLinear | None, FastLinear]
    neurons: int  # their number
    width: int  # the model's hidden size
    act: nn.Module  # the activation function, plain or `Sparsified`
    owner: nn.Module  # the module that has `act`

    @property
    def plain(self) -> nn.Module:
        """The activation function of the checkpoint."""
        return self.act.plain if isinstance(self.act, Sparsified) else self.act

    @property
    def activation(self) -> str:
        """Class of the activation function of the checkpoint."""
        return type(self.plain).__name__

    @property
    def relu(self) -> bool:
        """Whether the activation function of the checkpoint is 0 for negative numbers."""
        return isinstance(self.plain, _RELU)

    @property
    def sparse(self) -> bool:
        """Whether activations are exactly 0 for some neurons."""
        return self.relu or isinstance(self.act, Sparsified)

    def sparsified(self, yes: bool) -> "FeedForward":
        """Return the block with a sparsified activation function, or with that of the checkpoint. The model uses it
        from now on."""
        act = Sparsified(self.plain) if yes else self.plain
        name = next(name for name, child in self.owner.named_children() if child is self.act)
        setattr(self.owner, name, act)
        return replace(self, act=act)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that a neuron has a vector of, in the order of a record."""
        return (self.first, self.up, self.down) if self.up else (self.first, self.down)


Blocks = Sequence[FeedForward | None]  # by layer


def find(skeleton: Skeleton) -> tuple[FeedForward | None, ...]:
    """Return the feed-forward block of each layer; None for a layer without one that is known, such as a mixture. The
    blocks must not be blocks of records."""
    return tuple(_find(skeleton.model, layer) for layer in skeleton.layers)


def _find(model: Any, layer: dict[str, ParamRef]) -> FeedForward | None:
    if any(is_experts(slot.module) for slot in layer.values()):  # a shared expert is part of a mixture
        return None
    owners: dict[str, dict[str, str]] = {}  # by name of a parent module: its linear modules, with their weights
    for name, slot in layer.items():
        path, _, parameter = name.rpartition(".")
        if parameter == "weight" and type(slot.module) is FastLinear:
            parent, _, own = path.rpartition(".")
            owners.setdefault(parent, {})[own] = name
    modules = {parent: model.get_submodule(parent) for parent in owners}
    found = [f for parent, linears in owners.items() if (f := _block(modules[parent], linears, layer))]
    return found[0] if len(found) == 1 else None


def _block(module: nn.Module, linears: dict[str, str], layer: dict[str, ParamRef]) -> FeedForward | None:
    """Return the block that a module's linear layers form; None if they form none."""
    decoder = isinstance(module, PausingLayer)  # it has the linear layers itself, as in OPT
    parent: Any = module.layer if isinstance(module, PausingLayer) else module
    for first, up, down in _NAMES:
        if first not in linears or down not in linears or (up and up not in linears):
            continue
        names = linears[first], linears[up] if up else "", linears[down]
        one, middle, other = (layer[name].module if name else None for name in names)
        # Activation functions of the module's own: children without parameters whose name says so.
        named = [child for name, child in parent.named_children() if "act" in name]
        (neurons, width), acts = layer[names[0]].shape, [x for x in named if next(x.parameters(), None) is None]
        if layer[names[2]].shape != (width, neurons) or len(acts) != 1:
            return None
        if not decoder and not _computes(parent, (first, up, down), acts[0]):
            return None
        return FeedForward(*names, (one, middle, other), neurons, width, acts[0], parent)  # type: ignore[arg-type]
    return None


@torch.no_grad()
def _computes(parent: nn.Module, names: tuple[str, str, str], act: nn.Module) -> bool:
    """Return whether a module computes a feed-forward block from its linear modules and its activation function, and
    nothing else, such as a factor. A small copy of it is tried. names: of the linear modules, as in _NAMES."""
    generator = torch.Generator().manual_seed(0)

    def linear(width: int, out: int) -> nn.Linear:
        made = nn.Linear(width, out, device="meta")
        for name, shape in (("weight", (out, width)), ("bias", (out,))):
            setattr(made, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        return made

    one, other = linear(_WIDTH, _NEURONS), linear(_NEURONS, _WIDTH)
    middle = linear(_WIDTH, _NEURONS) if names[1] else None
    small = copy.copy(parent)
    fakes = {name: fake for name, fake in zip(names, (one, middle, other), strict=True) if fake is not None}
    small.__dict__["_modules"] = parent._modules | fakes
    x = torch.randn(1, 2, _WIDTH, generator=generator, dtype=torch.float64)
    expected = act(one(x)) if middle is None else act(one(x)) * middle(x)
    try:
        found = small(x)
    except Exception:  # it needs more than x, or has parameters of its own, which have no values
        return False
    return isinstance(found, Tensor) and torch.allclose(found, other(expected))


class RecordFirst(FastLinear):
    """The first module of a block of records: it has the block computed, and keeps the result for the last module."""

    # Returns the block's output, without the bias of `down`, [..., width]. Its arguments are the block's input and
    # `Inputs.predicted`. None outside a job (trial passes): the output is zeros.
    block: Callable[[Tensor, Tensor | None], Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        current: Any = greenlet.getcurrent()
        given = self.block is not None and not input.is_meta
        current.block = self.block(input, current.inputs.predicted) if given else torch.zeros_like(input)  # type: ignore[misc]
        return input.new_empty(*input.shape[:-1], 0)


class RecordUp(FastLinear):
    """The second module of a gated block of records."""

    def forward(self, input: Tensor) -> Tensor:
        return input.new_empty(*input.shape[:-1], 0)


class RecordDown(FastLinear):
    """The last module of a block of records: it returns the block's output."""

    def forward(self, input: Tensor) -> Tensor:
        current: Any = greenlet.getcurrent()
        block: Tensor = current.block
        current.block = None
        return block if self.bias is None else block + self.bias


def use_records(skeleton: Skeleton, blocks: Blocks, keep_first: bool) -> None:
    """Have blocks computed elsewhere, and take their weights out of `skeleton.layers`.

    Args:
        blocks: by layer; None leaves a layer as it is.
        keep_first: whether the weight of `first` stays a weight of the layer.
    """
    for j, block in enumerate(blocks):
        if block is None:
            continue
        for module, kind in zip(block.modules, (RecordFirst, RecordUp, RecordDown), strict=True):
            if module is not None:
                module.__class__ = kind
        block.modules[0].__dict__["block"] = None
        out = set(block.weights[keep_first:])
        skeleton.layers[j] = {name: slot for name, slot in skeleton.layers[j].items() if name not in out}


@contextmanager
def watching(blocks: Sequence[FeedForward], note: Note) -> Iterator[None]:
    """Call `note` for each block in each pass of a job, while the context is open."""

    def hook(number: int) -> Any:
        def noting(_: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
            inputs = getattr(greenlet.getcurrent(), "inputs", None)
            if inputs is not None:  # None in trial passes
                note(number, inputs, args[0], out)

        return noting

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.callback(block.modules[0].register_forward_hook(hook(number)).remove)
        yield
