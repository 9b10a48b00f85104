"""Experts of a job that are read when a router chooses them, and stay in memory while there is room.

Each layer has rows of memory for some of its experts; the least recently used ones leave. The stacked matrices of the
module are this memory, so an expert's row in them changes. Experts are computed in the order of their numbers, as
without a block, so a token's result does not depend on what is in memory.

The router of the next layer is applied to this layer's input (Fate). It names most of the experts that the next layer
chooses, because a layer changes hidden states little. When no read of this layer is left, a thread begins to read the
named experts that are not in memory. Such a read goes to a spare row, which belongs to no layer, or to RAM on the way
to a GPU. If the next layer chooses the expert, the read goes on, and the spare row changes places with the row that the
expert gets; else the read is stopped. So a wrong guess takes no expert out of memory, and costs one piece of a read
(reader.py). Guesses change no result.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import greenlet
import numpy as np
import torch
from torch import Tensor, nn

from flexengine.guests.flash.neurons import Arena, JobBlocks
from flexengine.guests.flash.reader import ExpertRead, ExpertReads, Pair
from flexengine.model.experts import add_expert, by_expert, native_experts
from flexengine.model.linear import is_experts
from flexengine.model.skeleton import ParamRef, Skeleton
from flexengine.plan.neurons import EXPERT_STAGES, NEURONS, RECORDS, expert_rows
from flexengine.plan.sizes import SHORT_READ
from flexengine.tier.base import ALIGN, Region
from flexengine.worker.regions import part_of, spread

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
    """Return the mixture of a layer; its router is the module whose weight has a row per expert, if there is one."""
    matrices = {n: slot for n, slot in layer.items() if len(slot.shape) == 3 and is_experts(slot.module)}
    modules, counts = {slot.module for slot in matrices.values()}, {slot.shape[0] for slot in matrices.values()}
    if len(modules) != 1 or len(counts) != 1:
        return None
    block = next(iter(matrices)).rpartition(".")[0].rpartition(".")[0]
    router = None
    for path in (f"{block}.{own}" for own in _ROUTERS):
        weight = layer.get(f"{path}.weight")
        if weight is not None and len(weight.shape) == 2 and weight.shape[0] in counts:
            names = tuple(name for name in layer if name.startswith(f"{path}."))
            router = Router(skeleton.model.get_submodule(path), names, skeleton.active)
            break
    return ExpertLayer(modules.pop(), matrices, counts.pop(), skeleton.active, router)


def use_experts_apart(skeleton: Skeleton, layers: Sequence[ExpertLayer | None]) -> None:
    """Take the matrices of experts out of `skeleton.layers`, so that the module of the experts calls its block. Move
    their routers to `skeleton.others`, which are always on the device, as a router names the experts to read early."""
    for j, experts in enumerate(layers):
        if experts is None:
            continue
        routers = {n: skeleton.layers[j][n] for n in (experts.router.names if experts.router else ())}
        out = experts.matrices.keys() | routers.keys()
        skeleton.layers[j] = {name: slot for name, slot in skeleton.layers[j].items() if name not in out}
        skeleton.others |= routers


# For so few tokens an expert is computed in a small part of the time of its read. If not all chosen experts fit, they
# are fetched one by one, which saves up to a third of the reads. For more tokens several are fetched together, so
# that some are read while others are computed.
FEW_TOKENS = 32


@dataclass(eq=False)
class ExpertBlock:
    """The experts of one layer."""

    layer: ExpertLayer  # the module, its matrices and its router
    # Memory of all layers whose experts have equally many bytes: by name of a matrix, [rows, ...], on the device.
    memory: dict[str, Tensor]
    own: list[int]  # its rows that are this layer's, which change
    spare: list[int]  # its rows of no layer. All layers share this list
    pieces: dict[str, list[Region]]  # by name of a matrix, the bytes of all experts in the checkpoint
    reads: ExpertReads
    follow: "ExpertBlock | None" = None  # the next layer's, whose experts are guessed; None for no guesses

    def __post_init__(self) -> None:
        self.arena = Arena(self.layer.experts, len(self.own))
        self._coming: dict[int, ExpertRead] = {}
        self._named: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()  # by pass that has not come here yet

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs; arguments as in `experts._experts`."""
        groups = dict(by_expert(chosen, self.layer.experts))
        self._named.pop(greenlet.getcurrent(), None)
        self._stop_wrong(groups.keys())
        out, left = torch.zeros_like(hidden, memory_format=torch.contiguous_format), len(groups)
        every = np.fromiter(groups, np.int64, left)
        most = self.arena.room
        if left > most and len(hidden) <= FEW_TOKENS:
            self.arena.reserve(every, left)  # those in memory leave last
            most = 1
        add = self._adder(hidden, chosen, weights, groups, out)
        for low in range(0, len(every), most):
            numbers = every[low : low + most]
            missing, left = self.arena.fetch(numbers).neurons.tolist(), left - len(numbers)
            waiting, ready = deque(missing), list[tuple[int, int]]()
            last = missing[-1] if missing else numbers[0]  # after its arrival, the thread that reads is idle
            for expert, row in zip(numbers.tolist(), self.arena.rows(numbers).tolist(), strict=True):
                self._begin(waiting)
                if expert in self._coming:
                    if not self._coming[expert].done.done():  # those before are computed meanwhile
                        add(ready)
                        ready = []
                    self._arrive(expert, row)
                ready.append((expert, self.own[row]))
                if self.follow is not None and expert == last and not left:
                    self.follow.guess(hidden)
            add(ready)
        return out

    def _adder(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, groups: Mapping[int, Tensor], out: Tensor
    ) -> Callable[[list[tuple[int, int]]], None]:
        """Return a function that adds the weighted outputs of experts to `out`.

        Its argument: numbers of experts, rising, and their rows in memory. groups: see `by_expert`.
        """
        native = native_experts(self.layer.module, hidden)

        def add(ready: list[tuple[int, int]]) -> None:
            if native is None:
                for expert, row in ready:
                    add_expert(self.layer.module, hidden, weights, groups[expert], out, expert, row)
            elif ready:
                places = [-1] * self.layer.experts
                for expert, row in ready:
                    places[expert] = row
                native.add(hidden, chosen, weights, out, torch.tensor(places))

        return add

    def guess(self, hidden: Tensor) -> None:
        """Begin to read the experts that this layer's router chooses for the input of the experts of a layer before.
        hidden: [tokens, hidden]."""
        if self.layer.router is None:
            return
        named = dict.fromkeys(self.layer.router.choose(hidden).T.flatten().tolist())  # all tokens' first choices first
        self._named[greenlet.getcurrent()] = frozenset(named)
        missing = [e for e in named if e not in self._coming and self.arena.rows(np.array([e]))[0] < 0]
        self._begin(deque(missing), early=True)

    def _begin(self, waiting: "deque[int]", early: bool = False) -> None:
        """Begin to read the first of the experts, as many as there are buffers for now."""
        while waiting:
            expert = waiting[0]
            if (coming := self._coming.get(expert)) is not None:
                self.reads.need(coming)
            elif (buffer := self._claim(expert, early)) is not None:
                self._coming[expert] = self.reads.begin(self._pairs(expert, self._targets(buffer)), early, buffer)
            else:
                return
            waiting.popleft()

    def _claim(self, expert: int, early: bool) -> Tensor | int | None:
        """Return where an expert is read to; None if all buffers are in use. Early reads leave a stage for others."""
        if (stages := self.reads.stages) is not None:
            return stages.pop() if len(stages) > (1 if early else 0) else None
        if early:
            return self.spare.pop() if self.spare else None
        return self.own[int(self.arena.rows(np.array([expert]))[0])]

    def _free(self, coming: ExpertRead) -> None:
        if isinstance(coming.buffer, Tensor):
            assert self.reads.stages is not None
            self.reads.stages.append(coming.buffer)
        elif coming.early:
            self.spare.append(coming.buffer)

    def _targets(self, buffer: Tensor | int) -> dict[str, Tensor]:
        if isinstance(buffer, int):
            return {name: memory[buffer] for name, memory in self.memory.items()}
        targets, start = dict[str, Tensor](), 0
        for name, pieces in self.pieces.items():
            nbytes, dtype = self._nbytes(name), pieces[0].dtype
            targets[name] = buffer[start : start + nbytes].view(dtype).view(self.memory[name].shape[1:])
            start += nbytes
        return targets

    def _nbytes(self, name: str) -> int:
        return sum(piece.nbytes for piece in self.pieces[name]) // self.layer.experts

    def _pairs(self, expert: int, targets: dict[str, Tensor]) -> Iterable[Pair]:
        for name, target in targets.items():
            nbytes = self._nbytes(name)
            yield from spread(part_of(self.pieces[name], expert * nbytes, nbytes), target)

    def _arrive(self, expert: int, row: int) -> None:
        """Wait until an expert is read, and have it lie in a row of the layer. An error of the read ends the job."""
        coming = self._coming.pop(expert)
        coming.done.result()
        if isinstance(coming.buffer, Tensor):
            for name, part in self._targets(coming.buffer).items():
                self.memory[name][self.own[row]].copy_(part)
        elif coming.early:
            self.own[row], coming.buffer = coming.buffer, self.own[row]
        self._free(coming)

    def _stop_wrong(self, chosen: Collection[int]) -> None:
        """Stop early reads of experts that neither this pass chose, nor the guess of a pass that is still to come
        named."""
        for expert in self._coming.keys() - set(chosen).union(*self._named.values()):
            coming = self._coming.pop(expert)
            self.reads.stop(coming)
            self._free(coming)


class ExpertBlocks(JobBlocks):
    """The experts of a job: a block per layer with experts."""

    guessing = True  # whether experts of the next layer are read early

    def _allocate(self, undo: ExitStack) -> None:
        opened, machine, layout, place = self._opened, self._machine, self._layout, self._ram
        self._regions.keep_room(place, SHORT_READ + 2 * ALIGN, RECORDS)
        stages = None  # RAM that experts pass on their way to a GPU
        if machine.compute.type != "cpu":
            size = max(facts.read_bytes for facts in opened.facts.blocks if facts is not None and facts.experts)
            regions = [self._regions.take(place, size, RECORDS) for _ in range(EXPERT_STAGES)]
            stages = [machine.tier(place).view(region) for region in regions]
        self._reads = ExpertReads(self._disk, stages)
        undo.callback(self._reads.close)
        # By bytes of an expert, memory of all layers with such experts: uint8 [rows, bytes], and its rows.
        memories = dict[int, tuple[Tensor, list[int]]]()
        for record, count in expert_rows(opened.facts, layout.rooms).items():
            memory = machine.device.view(self._regions.take("device", record * count, NEURONS))
            memories[record] = memory.view(count, record), list(range(count))
        for j, layer in enumerate(opened.flash.experts):
            if layer is not None and (facts := opened.facts.blocks[j]) is not None:
                self.blocks.append(self._block(layer, layout.rooms[j], *memories[facts.record]))
                layer.module.__dict__["block"] = self.blocks[-1]
        if self.guessing:
            for block, follow in zip(self.blocks, self.blocks[1:], strict=False):
                block.follow = follow

    def _block(self, layer: ExpertLayer, room: int, whole: Tensor, free: list[int]) -> ExpertBlock:
        """Return the block of a layer, and have the layer's matrices be the memory.

        Args:
            room: rows that the layer takes from `free`. After all layers have theirs, the spare ones are left in it.
            whole: memory, uint8 [rows, bytes of an expert].
        """
        opened = self._opened
        memory, start, pieces = dict[str, Tensor](), 0, dict[str, list[Region]]()
        for name, slot in layer.matrices.items():
            stored, held, shape = opened.locations[name], opened.held[name], slot.shape[1:]
            nbytes = torch.Size(shape).numel() * held.itemsize
            memory[name] = whole[:, start : start + nbytes].view(held).view(len(whole), *shape)
            start += nbytes
            pieces[name] = [self._machine.disk.checkpoint(*run, stored.dtype) for run in stored.runs]  # type: ignore[attr-defined]
            slot.bind(nn.Parameter(memory[name], requires_grad=False))
        own = [free.pop(0) for _ in range(room)]
        return ExpertBlock(layer, memory, own, free, pieces, self._reads)

    def _release(self) -> None:
        for block in self.blocks:
            block.layer.module.__dict__.pop("block", None)
            for slot in block.layer.matrices.values():  # tensors without values, as before a job
                empty = torch.empty(slot.shape, dtype=self._opened.dtype, device="meta")
                slot.bind(nn.Parameter(empty, requires_grad=False))
        self.blocks = []
