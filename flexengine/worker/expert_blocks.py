"""Experts of a job that are read when a router chooses them, and stay in memory while there is room.

Each layer has memory for some of its experts; the least recently used ones leave. The stacked matrices of the module
are this memory, so an expert's row in them changes. Experts are computed in the order of their numbers, as without a
block, so a token's result does not depend on what is in memory.

The router of the next layer is applied to this layer's input (Fate). It names most of the experts that the next layer
chooses, because a layer changes hidden states little. A thread reads the named experts that are not in memory, while
this layer and the next attention are computed. Wrong guesses take room and time of the disk, and change no result.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import greenlet
import numpy as np
import torch
from torch import Tensor, nn

from flexengine.flash.arena import Arena
from flexengine.model.expert_layers import ExpertLayer, bind_meta
from flexengine.model.products import add_expert, by_expert
from flexengine.plan.buffers import SHORT_READ
from flexengine.plan.layout import Layout
from flexengine.plan.neuron_memory import EXPERT_STAGES, NEURONS, RECORDS
from flexengine.tier.base import ALIGN, Region
from flexengine.tier.machine import Machine
from flexengine.worker.demand_reads import DemandReads
from flexengine.worker.mover import part_of, spread
from flexengine.worker.neurons import Counts
from flexengine.worker.opened import Opened
from flexengine.worker.regions import Regions

Pair = tuple[Region, Tensor]  # source and target of a read


class Guesses(NamedTuple):
    """What the guesses of the layer before were worth, summed over calls.

    Attributes:
        chosen: experts that calls with a guess chose; unions over the tokens of a call.
        right: those that the guess named.
        early: experts whose read began early.
        wasted: those of them that the next call did not choose.
    """

    chosen: int = 0
    right: int = 0
    early: int = 0
    wasted: int = 0


class Coming(NamedTuple):
    """An expert that is being read.

    Attributes:
        done: the read.
        stage: uint8, RAM that the expert is read to if the memory is a GPU's; else None.
        row: row of the memory.
        early: whether it was guessed.
    """

    done: Future[None]
    stage: Tensor | None
    row: int
    early: bool


class ExpertReads:
    """Reads in a thread, one after the other.

    Args:
        disk: reads the checkpoint.
        stages: RAM through which experts are read to a GPU; None if they are read straight into the memory.
    """

    def __init__(self, disk: DemandReads, stages: list[Tensor] | None) -> None:
        self.disk, self.stages = disk, stages
        self._thread = ThreadPoolExecutor(1, "flexengine-experts", lambda: torch.set_grad_enabled(False))

    def spare(self, early: bool) -> int | None:
        """Return the number of reads that can begin now; None for no limit. Early reads leave one for experts that are
        needed at once."""
        return None if self.stages is None else max(0, len(self.stages) - early)

    def begin(self, pairs: Sequence[Pair]) -> Future[None]:
        """Begin to read into memory."""
        return self._thread.submit(self.disk.load_all, pairs)

    def close(self) -> None:
        """Wait for the read that runs, and drop the others."""
        self._thread.shutdown(cancel_futures=True)


class ExpertBlock:
    """The experts of one layer.

    Args:
        layer: the module, its matrices and its router.
        memory: by name of a matrix, [room, rows, columns], on the device.
        pieces: by name of a matrix, the bytes of all experts in the checkpoint.
        reads: begins reads.

    Attributes:
        follow: the block of the next layer with experts, whose experts are guessed; None for no guesses.
    """

    def __init__(
        self, layer: ExpertLayer, memory: dict[str, Tensor], pieces: dict[str, list[Region]], reads: ExpertReads
    ) -> None:  # fmt: skip
        self.layer, self.memory, self.pieces, self.reads = layer, memory, pieces, reads
        self.arena = Arena(layer.experts, len(next(iter(memory.values()))))
        self.follow: ExpertBlock | None = None
        self.counts, self.guesses = Counts(), Guesses()
        self._coming: dict[int, Coming] = {}

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs; arguments as in `products._experts`."""
        groups = dict(by_expert(chosen, self.layer.experts))
        self._compare(groups.keys())
        out, left = torch.zeros_like(hidden), len(groups)
        for numbers in self.arena.parts(np.fromiter(groups, np.int64, len(groups))):
            self._settle(numbers.tolist())
            fetch, left = self.arena.fetch(numbers), left - len(numbers)
            waiting = deque(zip(fetch.neurons.tolist(), fetch.rows.tolist(), strict=True))
            self._begin(waiting)
            if self.follow is not None and not left:
                self.follow.guess(hidden)
            for expert, row in zip(numbers.tolist(), self.arena.rows(numbers).tolist(), strict=True):
                self._begin(waiting)
                self._arrive(expert)
                add_expert(self.layer.module, hidden, weights, groups[expert], out, expert, row)
        self.counts = self.counts._replace(used=self.counts.used + len(groups))
        return out

    def guess(self, hidden: Tensor) -> None:
        """Begin to read the experts that this layer's router chooses for the input of the experts of a layer before.

        Args:
            hidden: [tokens, hidden].
        """
        if self.layer.router is None:
            return
        current: Any = greenlet.getcurrent()
        named = current.guess = frozenset(self.layer.router.choose(hidden).flatten().tolist())
        rising = np.array(sorted(named), np.int64)
        inside = self.arena.rows(rising) >= 0
        kept = {*self._coming, *rising[inside].tolist()}
        most = self.reads.spare(early=True)
        missing = rising[~inside][: max(0, self.arena.room - len(kept))][:most]
        fetch = self.arena.fetch(np.array(sorted({*kept, *missing.tolist()}), np.int64))
        self._begin(deque(zip(fetch.neurons.tolist(), fetch.rows.tolist(), strict=True)), early=True)
        self.guesses = self.guesses._replace(early=self.guesses.early + len(missing))

    def _compare(self, chosen: Collection[int]) -> None:
        """Count how much of the pass's guess was right."""
        current: Any = greenlet.getcurrent()
        named, current.guess, found = getattr(current, "guess", None), None, self.guesses
        if named is not None:
            right = len(named.intersection(chosen))
            self.guesses = found._replace(chosen=found.chosen + len(chosen), right=found.right + right)

    def _begin(self, waiting: "deque[tuple[int, int]]", early: bool = False) -> None:
        """Begin the first of the reads of (expert, row), as many as can begin now."""
        while waiting and self.reads.spare(early) != 0:
            expert, row = waiting.popleft()
            stage = self.reads.stages.pop() if self.reads.stages is not None else None
            done = self.reads.begin(list(self._pairs(expert, self._targets(row, stage))))
            self._coming[expert] = Coming(done, stage, row, early)

    def _targets(self, row: int, stage: Tensor | None) -> dict[str, Tensor]:
        """Return where the matrices of one expert are read to, by name."""
        if stage is None:
            return {name: memory[row] for name, memory in self.memory.items()}
        targets, start = dict[str, Tensor](), 0
        for name, pieces in self.pieces.items():
            nbytes, dtype = self._nbytes(name), pieces[0].dtype
            targets[name] = stage[start : start + nbytes].view(dtype).view(self.memory[name].shape[1:])
            start += nbytes
        return targets

    def _nbytes(self, name: str) -> int:
        """Return the stored bytes of one expert's matrix."""
        return sum(piece.nbytes for piece in self.pieces[name]) // self.layer.experts

    def _pairs(self, expert: int, targets: dict[str, Tensor]) -> Iterable[Pair]:
        for name, target in targets.items():
            nbytes = self._nbytes(name)
            yield from spread(part_of(self.pieces[name], expert * nbytes, nbytes), target)

    def _arrive(self, expert: int) -> None:
        """Wait for an expert, if it is being read."""
        if (coming := self._coming.pop(expert, None)) is None:
            return
        try:
            coming.done.result()
            if coming.stage is not None:
                for name, part in self._targets(coming.row, coming.stage).items():
                    self.memory[name][coming.row].copy_(part)
        except BaseException:
            self.arena.drop(np.array([expert], np.int64))
            raise
        finally:
            if coming.stage is not None and self.reads.stages is not None:
                self.reads.stages.append(coming.stage)
        self.counts = self.counts._replace(read=self.counts.read + 1)

    def _settle(self, chosen: Sequence[int]) -> None:
        """End the reads of other experts than these, so that their rows can be given away."""
        for expert in self._coming.keys() - set(chosen):
            coming = self._coming[expert]
            self.guesses = self.guesses._replace(wasted=self.guesses.wasted + 1)
            if not coming.done.cancel():
                self._arrive(expert)
                continue
            del self._coming[expert]
            self.arena.drop(np.array([expert], np.int64))
            if coming.stage is not None and self.reads.stages is not None:
                self.reads.stages.append(coming.stage)


class ExpertBlocks:
    """The experts of a job, with their memory.

    Attributes:
        blocks: one per layer with experts.

    Raises:
        OutOfMemory: a tier has less memory than the layout books.
    """

    guessing = True  # whether experts of the next layer are read early

    def __init__(self, opened: Opened, layout: Layout, machine: Machine, disk: DemandReads) -> None:
        self._machine, self._opened, self._regions, self._ended = machine, opened, Regions(machine), ExitStack()
        self.blocks: list[ExpertBlock] = []
        place = "device" if machine.capacity.shared else "host"
        with ExitStack() as undo:
            undo.callback(self._regions.free)
            self._regions.keep_room(place, SHORT_READ + 2 * ALIGN, RECORDS)
            stages = self._stages(place)
            self._reads = ExpertReads(disk, stages)
            undo.callback(self._reads.close)
            undo.callback(self._release)
            for j, layer in enumerate(opened.experts):
                if layer is not None:
                    self.blocks.append(self._block(j, layer, layout))
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

    def _block(self, number: int, layer: ExpertLayer, layout: Layout) -> ExpertBlock:
        """Return the block of a layer, and have the layer's matrices be its memory."""
        opened, facts = self._opened, self._opened.facts.blocks[number]
        assert facts is not None
        room = layout.rooms[number]
        whole = self._machine.device.view(self._regions.take("device", room * facts.record, NEURONS))
        memory, start, pieces = dict[str, Tensor](), 0, dict[str, list[Region]]()
        for name, slot in layer.matrices.items():
            stored, held, shape = opened.locations[name], opened.held[name], (room, *slot.shape[1:])
            nbytes = torch.Size(shape).numel() * held.itemsize
            memory[name] = whole[start : start + nbytes].view(held).view(shape)
            start += nbytes
            pieces[name] = [self._machine.disk.checkpoint(*run, stored.dtype) for run in stored.runs]  # type: ignore[attr-defined]
            slot.bind(nn.Parameter(memory[name], requires_grad=False))
        return ExpertBlock(layer, memory, pieces, self._reads)

    def _release(self) -> None:
        """Have modules use neither blocks nor their memory."""
        for block in self.blocks:
            block.layer.module.__dict__.pop("block", None)
            bind_meta(block.layer, self._opened.dtype)
        self.blocks = []

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()
