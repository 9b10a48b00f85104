"""Experts of a job that are read when a router chooses them, and stay in memory while there is room.

Each layer has rows of memory for some of its experts; the least recently used ones leave. The stacked matrices of the
module are this memory, so an expert's row in them changes. Experts are computed in the order of their numbers, as
without a block, so a token's result does not depend on what is in memory.

The router of the next layer is applied to this layer's input (Fate). It names most of the experts that the next layer
chooses, because a layer changes hidden states little. When no read of this layer is left, a thread begins to read the
named experts that are not in memory. Such a read goes to a spare row, which belongs to no layer, or to RAM on the way
to a GPU. If the next layer chooses the expert, the read goes on, and the spare row changes places with the row that the
expert gets; else the read is stopped. So a wrong guess takes no expert out of memory, and costs one piece of a read
(expert_reads.py). Guesses change no result.
"""

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import greenlet
import numpy as np
import torch
from torch import Tensor, nn

from flexengine.guests.flash.arena import Arena
from flexengine.guests.flash.expert_layers import ExpertLayer, bind_meta
from flexengine.guests.flash.expert_reads import ExpertRead, ExpertReads, Pair
from flexengine.guests.flash.neurons import Counts
from flexengine.model.experts import add_expert, by_expert
from flexengine.plan.layout import Layout
from flexengine.plan.neurons import EXPERT_STAGES, NEURONS, RECORDS, expert_rows
from flexengine.plan.sizes import SHORT_READ
from flexengine.tier.base import ALIGN, Region
from flexengine.tier.machine import Machine
from flexengine.worker.mover import part_of, spread
from flexengine.worker.on_demand import DemandReads
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions

# For so few tokens an expert is computed in a small part of the time of its read. If not all chosen experts fit, they
# are fetched one by one, which saves up to a third of the reads. For more tokens several are fetched together, so
# that some are read while others are computed.
FEW_TOKENS = 32


@dataclass
class Guesses:
    """What the guesses of the layer before were worth, summed over the calls with a guess."""

    chosen: int = 0  # experts that the tokens of a call chose together
    right: int = 0  # those that the guess named
    missing: int = 0  # chosen experts that were not in memory
    found: int = 0  # those of `missing` that the guess named
    early: int = 0  # experts whose read began early
    wasted: int = 0  # those of them that were not chosen; the others were
    ahead_bytes: int = 0  # bytes of chosen experts that were read before the layer needed them
    wasted_bytes: int = 0  # bytes read of experts that were not chosen


class ExpertRows(NamedTuple):
    """The memory of a layer, within that of all layers whose experts have equally many bytes."""

    memory: dict[str, Tensor]  # by name of a matrix, [rows, ...], on the device
    own: list[int]  # rows of this layer
    spare: list[int]  # rows of no layer. All layers share this list


class ExpertBlock:
    """The experts of one layer.

    Args:
        layer: the module, its matrices and its router.
        rows: memory; which rows are the layer's own changes.
        pieces: by name of a matrix, the bytes of all experts in the checkpoint.
    """

    def __init__(
        self, layer: ExpertLayer, rows: ExpertRows, pieces: dict[str, list[Region]], reads: ExpertReads
    ) -> None:
        self.layer, self.rows, self.pieces, self.reads = layer, rows, pieces, reads
        self.arena = Arena(layer.experts, len(rows.own))
        self.follow: ExpertBlock | None = None  # the next layer's, whose experts are guessed; None for no guesses
        self.counts, self.guesses = Counts(), Guesses()
        self._coming: dict[int, ExpertRead] = {}
        self._named: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()  # by pass that has not come here yet

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs; arguments as in `experts._experts`."""
        groups = dict(by_expert(chosen, self.layer.experts))
        named = self._named.pop(greenlet.getcurrent(), None)
        self._stop_wrong(groups.keys())
        out, left, every = torch.zeros_like(hidden), len(groups), np.fromiter(groups, np.int64, len(groups))
        most = self.arena.room
        if left > most and len(hidden) <= FEW_TOKENS:
            self.arena.reserve(every, left)  # those in memory leave last
            most = 1
        for low in range(0, len(every), most):
            numbers = every[low : low + most]
            missing, left = self.arena.fetch(numbers).neurons.tolist(), left - len(numbers)
            self._compare(named, numbers.tolist(), missing)
            waiting = deque(missing)
            last = missing[-1] if missing else numbers[0]  # after its arrival, the thread that reads is idle
            for expert, row in zip(numbers.tolist(), self.arena.rows(numbers).tolist(), strict=True):
                self._begin(waiting)
                if expert in self._coming:
                    self._arrive(expert, row)
                if self.follow is not None and expert == last and not left:
                    self.follow.guess(hidden)
                add_expert(self.layer.module, hidden, weights, groups[expert], out, expert, self.rows.own[row])
        self.counts.used += len(groups)
        return out

    def guess(self, hidden: Tensor) -> None:
        """Begin to read the experts that this layer's router chooses for the input of the experts of a layer before.

        Args:
            hidden: [tokens, hidden].
        """
        if self.layer.router is None:
            return
        named = dict.fromkeys(self.layer.router.choose(hidden).T.flatten().tolist())  # all tokens' first choices first
        self._named[greenlet.getcurrent()] = frozenset(named)
        missing = [e for e in named if e not in self._coming and self.arena.rows(np.array([e]))[0] < 0]
        waiting = deque(missing)
        self._begin(waiting, early=True)
        self.guesses.early += len(missing) - len(waiting)

    def _compare(self, named: frozenset[int] | None, chosen: Collection[int], missing: Collection[int]) -> None:
        """Count how much of a pass's guess was right."""
        if named is not None:
            self.guesses.chosen += len(chosen)
            self.guesses.right += len(named.intersection(chosen))
            self.guesses.missing += len(missing)
            self.guesses.found += len(named.intersection(missing))

    def _begin(self, waiting: "deque[int]", early: bool = False) -> None:
        """Begin to read the first of the experts, as many as there are buffers for now."""
        while waiting:
            expert = waiting[0]
            if (coming := self._coming.get(expert)) is not None:
                self.guesses.ahead_bytes += self.reads.need(coming)
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
            return self.rows.spare.pop() if self.rows.spare else None
        return self.rows.own[int(self.arena.rows(np.array([expert]))[0])]

    def _free(self, coming: ExpertRead) -> None:
        if isinstance(coming.buffer, Tensor):
            assert self.reads.stages is not None
            self.reads.stages.append(coming.buffer)
        elif coming.early:
            self.rows.spare.append(coming.buffer)

    def _targets(self, buffer: Tensor | int) -> dict[str, Tensor]:
        if isinstance(buffer, int):
            return {name: memory[buffer] for name, memory in self.rows.memory.items()}
        targets, start = dict[str, Tensor](), 0
        for name, pieces in self.pieces.items():
            nbytes, dtype = self._nbytes(name), pieces[0].dtype
            targets[name] = buffer[start : start + nbytes].view(dtype).view(self.rows.memory[name].shape[1:])
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
                self.rows.memory[name][self.rows.own[row]].copy_(part)
        elif coming.early:
            self.rows.own[row], coming.buffer = coming.buffer, self.rows.own[row]
        self._free(coming)
        self.counts.read += 1

    def _stop_wrong(self, chosen: Collection[int]) -> None:
        """Stop early reads of experts that neither this pass chose, nor the guess of a pass that is still to come
        named."""
        for expert in self._coming.keys() - set(chosen).union(*self._named.values()):
            coming = self._coming.pop(expert)
            self.guesses.wasted += 1
            self.guesses.wasted_bytes += self.reads.stop(coming)
            self._free(coming)


class ExpertBlocks:
    """The experts of a job, with their memory.

    Raises:
        OutOfMemory: a tier has less memory than the layout books.
    """

    guessing = True  # whether experts of the next layer are read early

    def __init__(self, opened: OpenModel, layout: Layout, machine: Machine, disk: DemandReads) -> None:
        self._machine, self._opened, self._regions, self._ended = machine, opened, Regions(machine), ExitStack()
        self.blocks: list[ExpertBlock] = []  # one per layer with experts
        place = "device" if machine.capacity.shared else "host"
        with ExitStack() as undo:
            undo.callback(self._regions.free)
            self._regions.keep_room(place, SHORT_READ + 2 * ALIGN, RECORDS)
            stages = self._stages(place)
            self._reads = ExpertReads(disk, stages)
            undo.callback(self._reads.close)
            undo.callback(self._release)
            memories = self._memories(layout)
            for j, layer in enumerate(opened.flash.experts):
                if layer is not None and (facts := opened.facts.blocks[j]) is not None:
                    self.blocks.append(self._block(layer, layout.rooms[j], *memories[facts.record]))
                    layer.module.__dict__["block"] = self.blocks[-1]
            if self.guessing:
                for block, follow in zip(self.blocks, self.blocks[1:], strict=False):
                    block.follow = follow
            self._ended = undo.pop_all()

    def _stages(self, place: str) -> list[Tensor] | None:
        """Return RAM that experts pass on their way to a GPU; None without a GPU."""
        if self._machine.compute.type == "cpu":
            return None
        size = max(facts.read_bytes for facts in self._opened.facts.blocks if facts is not None and facts.experts)
        tier = self._machine.tier(place)
        return [tier.view(self._regions.take(place, size, RECORDS)) for _ in range(EXPERT_STAGES)]

    def _memories(self, layout: Layout) -> dict[int, tuple[Tensor, list[int]]]:
        """Return, by bytes of an expert, memory of all layers with such experts: uint8 [rows, bytes], and its rows."""
        made = dict[int, tuple[Tensor, list[int]]]()
        for record, count in expert_rows(self._opened.facts, layout.rooms).items():
            region = self._regions.take("device", record * count, NEURONS)
            made[record] = self._machine.device.view(region).view(count, record), list(range(count))
        return made

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
        return ExpertBlock(layer, ExpertRows(memory, own, free), pieces, self._reads)

    def _release(self) -> None:
        """Have modules use neither blocks nor their memory."""
        for block in self.blocks:
            block.layer.module.__dict__.pop("block", None)
            bind_meta(block.layer, self._opened.dtype)
        self.blocks = []

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()
