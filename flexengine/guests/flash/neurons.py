"""Sparse feed-forward blocks of a job: neurons that become active are read from flash, and computed (LLM in a flash).

A token uses either all neurons of a block (prompts) or those that a predictor names (generated tokens, scored tokens).
Tokens that use all neurons take products of dense matrices, run after run of neighbouring records; others take products
with records that lie anywhere in memory. Neurons are summed in the order of their numbers, and those that a token does
not use add nothing. So a token's result does not depend on the other tokens of its batch, or on what is in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexengine import kernels
from flexengine.codec.records import RecordForm
from flexengine.guests.flash.bundles import Bundle
from flexengine.guests.flash.feed_forward import FeedForward, RecordFirst
from flexengine.guests.flash.predictors import Predictor
from flexengine.guests.flash.reader import RecordReader
from flexengine.model.linear import FastLinear
from flexengine.plan.layout import Layout
from flexengine.plan.neurons import NEURONS, PREDICTORS, RECORDS, STREAMED, decoded_bytes, part_of
from flexengine.tier.base import aligned
from flexengine.tier.machine import Machine
from flexengine.worker.on_demand import DemandReads
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions

IntArray = NDArray[np.int64]
_NOWHERE, _NEVER = -1, -1


class Fetch(NamedTuple):
    """Records to read."""

    neurons: IntArray  # their numbers, rising
    rows: IntArray  # row of the memory for each


class Arena:
    """Rows of one layer's memory, which has room for some of its records (LLM in a flash, section 3.3).

    Neurons that recent tokens used stay; the least recently used ones give their rows to new ones. Pinning the most
    frequent neurons (PowerInfer) was tried and left out: with a small memory it read more, with room for a half of the
    neurons up to a tenth less.

    The paper keeps rows without gaps, and moves the last row into the place of each deleted one. Here kernels get the
    row of each neuron, so a new record takes the row of the one that leaves, and nothing is moved.
    """

    def __init__(self, neurons: int, room: int) -> None:
        assert room > 0
        self.room = room  # number of rows
        self.step = 0  # number of calls of `fetch`
        self._row_of = np.full(neurons, _NOWHERE, np.int64)
        self._neuron_at = np.full(room, _NOWHERE, np.int64)
        self._used = np.full(room, _NEVER, np.int64)  # by row: last step; _NEVER if it is free

    def overlapping(self, neurons: IntArray, each: int) -> list[IntArray]:
        """Return more neurons than there is room for, in runs for successive calls of `fetch`.

        A run may be fetched while the rows of the run before are in use. `room - 2 * each` of the neurons that are in
        memory now stay until their run.

        Args:
            neurons: numbers, rising, without repeats.
            each: neurons of a run that are not kept so; at most half of the room.
        """
        assert 0 < each <= self.room // 2
        held = neurons[self._row_of[neurons] != _NOWHERE][: self.room - 2 * each]
        runs = (np.cumsum(np.isin(neurons, held, invert=True)) - 1).clip(0) // each
        parts = np.split(neurons, np.flatnonzero(np.diff(runs)) + 1)
        self.reserve(held, len(parts))
        return parts

    def fetch(self, neurons: IntArray) -> Fetch:
        """Make room for the neurons of the next token, or of a batch of tokens. Return those that must be read.
        neurons: numbers, rising, without repeats; not more than there is room for."""
        rows = self._row_of[neurons]
        missing = neurons[rows < 0]
        inside = rows[rows >= 0]
        assert len(neurons) <= self.room
        self.step += 1
        self._used[inside] = self.step
        # Free rows come first, then the least recently used ones, the first of equal ones.
        places = np.argsort(self._used, kind="stable")[: len(missing)] if len(missing) else np.empty(0, np.int64)
        gone = self._neuron_at[places]
        self._row_of[gone[gone >= 0]] = _NOWHERE
        self._row_of[missing], self._neuron_at[places], self._used[places] = places, missing, self.step
        return Fetch(missing, places)

    def reserve(self, neurons: IntArray, calls: int) -> None:
        """Have those of the neurons that are in memory leave after all others, for the next `calls` calls of `fetch`,
        or until they are fetched."""
        rows = self._row_of[neurons]
        self._used[rows[rows >= 0]] = self.step + calls + 1

    def rows(self, neurons: IntArray) -> IntArray:
        """Return the rows of neurons that are all in memory."""
        return self._row_of[neurons]


# Reads records by number to rows of uint8 [room, bytes of a record] in RAM.
ReadNow = Callable[[IntArray, Tensor, IntArray], object]
BeginRead = Callable[[IntArray, Tensor, IntArray], Callable[[], object]]  # returns what waits for the end
Predict = Callable[[Tensor], Tensor]  # [tokens, width] to bool [tokens, neurons]


@dataclass(eq=False)
class NeuronBlock:
    """One layer's block."""

    feed: FeedForward
    form: RecordForm
    memory: Tensor  # uint8 [room, form.nbytes], on the device
    streamed: tuple[Tensor, Tensor]  # two buffers uint8 [n, form.nbytes], in RAM, for reads of all records
    read: BeginRead  # begins to read records in another thread
    read_now: ReadNow  # reads records in this thread
    predict: Predict  # names the neurons of each token

    def __post_init__(self) -> None:
        self.arena = Arena(self.feed.neurons, len(self.memory))

    def __call__(self, x: Tensor, predicted: Tensor | None) -> Tensor:
        """Return the block's output for [..., width], see `RecordFirst.block`."""
        rows = x.reshape(-1, self.feed.width)
        if predicted is None or not bool(predicted.any()):
            return self.all(rows).view(x.shape)
        if bool(predicted.all()):
            return self._some(rows).view(x.shape)
        out = torch.empty_like(rows)
        predicted = predicted.to(x.device)
        out[predicted], out[~predicted] = self._some(rows[predicted]), self.all(rows[~predicted])
        return out.view(x.shape)

    def _some(self, x: Tensor) -> Tensor:
        """Return the output of tokens [n, width] that use the neurons that the predictor names."""
        # The sum is in fp32: it is rounded to x's dtype once, at the end.
        uses, out = self.predict(x), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        union = np.flatnonzero(uses.any(0).cpu().numpy())
        if len(union) <= self.arena.room:
            self._bring(*self.arena.fetch(union))
            return self.added(out, x, uses, union, self.memory, self.arena.rows(union)).to(x.dtype)
        parts = self.arena.overlapping(union, part_of(self.arena.room))  # one is computed while the next one is read
        arrive = self._begin(self.arena.fetch(parts[0]))
        for i, numbers in enumerate(parts):
            arrive()
            if i + 1 < len(parts):
                arrive = self._begin(self.arena.fetch(parts[i + 1]))
            out = self.added(out, x, uses, numbers, self.memory, self.arena.rows(numbers))
        return out.to(x.dtype)

    def _begin(self, fetch: Fetch) -> Callable[[], object]:
        """Begin to read records into the memory, and return what waits for them. With a GPU they are read by the
        latter, while the GPU computes what was queued before."""
        in_ram = self.memory.device.type == "cpu"
        return self.read(fetch.neurons, self.memory, fetch.rows) if in_ram else partial(self._bring, *fetch)

    def _bring(self, numbers: IntArray, rows: IntArray) -> None:
        if not len(numbers):
            return
        if self.memory.device.type == "cpu":
            self.read_now(numbers, self.memory, rows)
            return
        stage = self.streamed[0]
        for low in range(0, len(numbers), len(stage)):
            part = numbers[low : low + len(stage)]
            self.read_now(part, stage, np.arange(len(part)))
            places = torch.from_numpy(rows[low : low + len(stage)]).to(self.memory.device)
            self.memory[places] = stage[: len(part)].to(self.memory.device)

    def added(self, out: Tensor, x: Tensor, uses: Tensor, numbers: IntArray, records: Tensor, rows: IntArray) -> Tensor:
        """Return a sum with what more neurons contribute to the output, fp32 [n, width].

        Args:
            out: the sum of neurons with lower numbers, fp32 [n, width].
            x: [n, width].
            uses: bool [n, neurons]: neurons of each token.
            numbers: neurons to compute, rising.
            records: uint8 [room, form.nbytes], on the device.
            rows: row of each neuron's record.
        """
        kernel, form, device = kernels.load_for(x.device), self.form, x.device
        chosen, places = torch.from_numpy(numbers).to(device), torch.from_numpy(rows).to(device)
        a = self.feed.act(kernel.record_products(x, records, places, form, 0, self._bias(chosen)))
        if form.gated:
            a = a * kernel.record_products(x, records, places, form, 1, self._bias(chosen, 1))
        a = torch.where(uses[:, chosen], a, 0.0)
        return kernel.record_sum(a, records, places, form, form.down, out)

    def _bias(self, chosen: Tensor | slice, index: int = 0) -> Tensor | None:
        module = self.feed.modules[index]
        assert module is not None
        return None if module.bias is None else module.bias[chosen].float()

    def all(self, x: Tensor) -> Tensor:
        """Return the output of tokens [n, width] that use all neurons: of those in memory, if all fit, else of records
        on their way."""
        out, size = torch.zeros(x.shape, dtype=torch.float32, device=x.device), len(self.streamed[0])
        runs = [slice(low, min(self.feed.neurons, low + size)) for low in range(0, self.feed.neurons, size)]
        kernel, form, act = kernels.load_for(x.device), self.form, self.feed.act
        dtype, x = x.dtype, x if kernel.narrow else x.float()
        passing = self._held if self.arena.room == self.feed.neurons else self._passing
        for run, records in zip(runs, passing(runs), strict=True):
            a = act(kernel.linear(x, kernel.record_vectors(records, form, 0), self._bias(run)))
            if form.gated:
                a = a * kernel.linear(x, kernel.record_vectors(records, form, 1), self._bias(run, 1))
            kernel.add_weighted(out, a, kernel.record_vectors(records, form, form.down))
        return out.to(dtype)

    def _held(self, runs: Sequence[slice]) -> Iterator[Tensor]:
        """Yield the records of each run from the memory, after those that are not there were read."""
        for run in runs:
            numbers = np.arange(run.start, run.stop)
            self._bring(*self.arena.fetch(numbers))
            rows, out = torch.from_numpy(self.arena.rows(numbers)), None
            if self.memory.device.type == "cpu":  # these buffers are free; those of a GPU's copies are booked
                out = self.streamed[0][: len(rows)]
            yield torch.index_select(self.memory, 0, rows.to(self.memory.device), out=out)

    def _passing(self, runs: Sequence[slice]) -> Iterator[Tensor]:
        """Yield the records of each run from one of two buffers. While they are computed, the next ones are read."""
        buffers = [self.streamed[i % 2][: run.stop - run.start] for i, run in enumerate(runs)]

        def begin(i: int) -> Callable[[], object]:
            return self.read(np.arange(runs[i].start, runs[i].stop), buffers[i], np.arange(len(buffers[i])))

        arrive = begin(0)
        for i, records in enumerate(buffers):
            arrive()
            if i + 1 < len(runs):
                arrive = begin(i + 1)
            yield records.to(self.memory.device)


class JobBlocks(ABC):
    """Blocks of a job whose weights are read on demand, with their memory. Raise OutOfMemory if a tier has less memory
    than the layout books."""

    def __init__(self, opened: OpenModel, layout: Layout, machine: Machine, disk: DemandReads) -> None:
        self._opened, self._layout, self._machine, self._disk = opened, layout, machine, disk
        self._regions, self.blocks = Regions(machine), list[Any]()
        self._ram = "device" if machine.capacity.shared else "host"  # tier for what passes RAM
        with ExitStack() as undo:
            undo.callback(self._regions.free)
            undo.callback(self._release)
            self._allocate(undo)
            self._ended = undo.pop_all()

    @abstractmethod
    def _allocate(self, undo: ExitStack) -> None:
        """Make the blocks, and have their modules use them. undo: gets what must be closed before them."""

    @abstractmethod
    def _release(self) -> None:
        """Have modules use neither blocks nor their memory."""

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()


class Neurons(JobBlocks):
    """The blocks of a job of which only active neurons are read."""

    def _allocate(self, undo: ExitStack) -> None:
        opened, machine, take = self._opened, self._machine, self._regions.take
        bundles = opened.flash.prepare_bundles()
        self._reader = undo.enter_context(RecordReader([bundle for bundle in bundles if bundle is not None]))
        decoded = decoded_bytes(facts for facts in opened.facts.blocks if facts is not None)
        self._regions.keep_room(self._ram, aligned(self._reader.nbytes), RECORDS)
        if passing := decoded + STREAMED * (machine.compute.type != "cpu"):
            self._regions.keep_room("device", passing, RECORDS)
        streams = [machine.tier(self._ram).view(take(self._ram, STREAMED, RECORDS)) for _ in range(2)]
        for j, (feed, bundle) in enumerate(zip(opened.flash.blocks, bundles, strict=True)):
            if feed is not None and bundle is not None:
                self.blocks.append(self._block(j, feed, bundle, streams))

    def _block(self, layer: int, feed: FeedForward, bundle: Bundle, streams: list[Tensor]) -> NeuronBlock:
        """Return the block of a layer, and have the layer use it. A predictor names the neurons of a token, or the
        whole matrix of the block's first module."""
        nbytes, room = bundle.form.nbytes, self._layout.rooms[layer]
        fit = STREAMED // nbytes
        one, two = (stream[: fit * nbytes].view(fit, nbytes) for stream in streams)
        region = self._regions.take("device", room * nbytes, NEURONS)
        memory = self._machine.device.view(region).view(room, nbytes)
        first = feed.modules[0]
        assert isinstance(first, RecordFirst)
        predict: Predict = lambda x: feed.act(FastLinear.forward(first, x)) != 0  # noqa: E731
        predictor: Predictor | None = self._opened.flash.predictor(layer, self._machine.compute)
        if predictor is not None:
            self._regions.keep_room("device", aligned(predictor.nbytes), PREDICTORS)
            predict = predictor.active

        def read(numbers: IntArray, target: Tensor, rows: IntArray) -> None:
            wanted = torch.from_numpy(numbers), target, torch.from_numpy(rows)
            self._disk.read_by(lambda: self._reader.read(bundle, *wanted))

        def begin(numbers: IntArray, target: Tensor, rows: IntArray) -> Callable[[], None]:
            return self._reader.begin(lambda: read(numbers, target, rows)).result

        first.block = NeuronBlock(feed, bundle.form, memory, (one, two), begin, read, predict)
        return first.block

    def _release(self) -> None:
        for block in self.blocks:
            first = block.feed.modules[0]
            assert isinstance(first, RecordFirst)
            first.block = None
        self.blocks = []
