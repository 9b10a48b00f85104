"""Sparse feed-forward blocks of a job: neurons that become active are read from flash, and computed (LLM in a flash).

A token uses either all neurons of a block (prompts) or those that a predictor names (generated tokens, scored tokens).
Tokens that use all neurons take products of dense matrices, run after run of neighbouring records; others take products
with records that lie anywhere in memory. Neurons are summed in the order of their numbers, and those that a token does
not use add nothing. So a token's result does not depend on the other tokens of its batch, or on what is in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flexengine import kernels
from flexengine.codec.records import RecordForm
from flexengine.guests.flash.arena import Arena, Fetch, IntArray
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

# Reads records by number to rows of uint8 [room, bytes of a record] in RAM.
ReadNow = Callable[[IntArray, Tensor, IntArray], object]
BeginRead = Callable[[IntArray, Tensor, IntArray], Callable[[], object]]  # returns what waits for the end
Predict = Callable[[Tensor], Tensor]  # [tokens, width] to bool [tokens, neurons]


@dataclass
class Counts:
    """What the blocks of a job did."""

    used: int = 0  # neurons that tokens used, summed over calls; unions over the tokens of a call
    read: int = 0  # those that had to be read


class NeuronBlock:
    """One layer's block.

    Args:
        memory: uint8 [room, form.nbytes], on the device.
        streamed: two buffers uint8 [n, form.nbytes], in RAM, for reads of all records.
        read: begins to read records in another thread.
        predict: names the neurons of each token.
    """

    def __init__(
        self,
        feed: FeedForward,
        form: RecordForm,
        memory: Tensor,
        streamed: tuple[Tensor, Tensor],
        read: BeginRead,
        read_now: ReadNow,
        predict: Predict,
    ) -> None:
        self.feed, self.form, self.memory, self.streamed = feed, form, memory, streamed
        self.read, self.read_now, self.predict = read, read_now, predict
        self.arena = Arena(feed.neurons, len(memory))
        self.counts = Counts()

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
            self._bring(*self._fetched(union))
            return self.added(out, x, uses, union, self.memory, self.arena.rows(union)).to(x.dtype)
        parts = self.arena.overlapping(union, part_of(self.arena.room))  # one is computed while the next one is read
        arrive = self._begin(self._fetched(parts[0]))
        for i, numbers in enumerate(parts):
            arrive()
            if i + 1 < len(parts):
                arrive = self._begin(self._fetched(parts[i + 1]))
            out = self.added(out, x, uses, numbers, self.memory, self.arena.rows(numbers))
        return out.to(x.dtype)

    def _fetched(self, numbers: IntArray) -> Fetch:
        fetch = self.arena.fetch(numbers)
        self.counts.used += len(numbers)
        self.counts.read += len(fetch.neurons)
        return fetch

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
        dtype, x = x.dtype, x if kernels.load_for(x.device).narrow else x.float()
        records = self._held if self.arena.room == self.feed.neurons else self._passing
        for run, some in zip(runs, records(runs), strict=True):
            self._add_run(out, x, run, some)
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

    def _add_run(self, out: Tensor, x: Tensor, run: slice, records: Tensor) -> None:
        """Add what a run of neurons contributes to `out`, fp32 [n, width], of tokens that use all of them."""
        kernel, form = kernels.load_for(x.device), self.form
        a = self.feed.act(kernel.linear(x, kernel.record_vectors(records, form, 0), self._bias(run)))
        if form.gated:
            a = a * kernel.linear(x, kernel.record_vectors(records, form, 1), self._bias(run, 1))
        kernel.add_weighted(out, a, kernel.record_vectors(records, form, form.down))


class Neurons:
    """The blocks of a job, with their memory.

    Raises:
        OutOfMemory: a tier has less memory than the layout books.
    """

    def __init__(self, opened: OpenModel, layout: Layout, machine: Machine, disk: DemandReads) -> None:
        self._disk, self._regions, self._ended = disk, Regions(machine), ExitStack()
        self._machine, self._opened, self._layout = machine, opened, layout
        self.blocks: list[NeuronBlock] = []
        place = "device" if machine.capacity.shared else "host"
        bundles = opened.flash.prepare_bundles()
        known = [bundle for bundle in bundles if bundle is not None]
        with ExitStack() as undo:
            undo.callback(self._regions.free)
            undo.callback(self._release)
            self._reader = undo.enter_context(RecordReader(known))
            decoded = decoded_bytes(facts for facts in opened.facts.blocks if facts is not None)
            self._regions.keep_room(place, aligned(self._reader.nbytes), RECORDS)
            if passing := decoded + STREAMED * (machine.compute.type != "cpu"):
                self._regions.keep_room("device", passing, RECORDS)
            take, view = self._regions.take, machine.tier(place).view
            streams = [view(take(place, STREAMED, RECORDS)) for _ in range(2)]
            for j, (feed, bundle) in enumerate(zip(opened.flash.blocks, bundles, strict=True)):
                if feed is not None and bundle is not None:
                    self.blocks.append(self._block(j, feed, bundle, streams))
            self._ended = undo.pop_all()

    def _block(self, layer: int, feed: FeedForward, bundle: Bundle, streams: list[Tensor]) -> NeuronBlock:
        """Return the block of a layer, and have the layer use it."""
        nbytes, room = bundle.form.nbytes, self._layout.rooms[layer]
        fit = STREAMED // nbytes
        one, two = (stream[: fit * nbytes].view(fit, nbytes) for stream in streams)
        region = self._regions.take("device", room * nbytes, NEURONS)
        memory = self._machine.device.view(region).view(room, nbytes)
        first = feed.modules[0]
        assert isinstance(first, RecordFirst)
        begin, now = partial(self._begin, bundle), partial(self._read, bundle)
        first.block = NeuronBlock(feed, bundle.form, memory, (one, two), begin, now, self._predict(layer, feed, first))
        return first.block

    def _begin(self, bundle: Bundle, numbers: IntArray, target: Tensor, rows: IntArray) -> Callable[[], None]:
        return self._reader.begin(lambda: self._read(bundle, numbers, target, rows)).result

    def _read(self, bundle: Bundle, numbers: IntArray, target: Tensor, rows: IntArray) -> None:
        wanted = torch.from_numpy(numbers), target, torch.from_numpy(rows)
        self._disk.read_by(lambda: self._reader.read(bundle, *wanted).bytes)

    def _predict(self, layer: int, feed: FeedForward, first: RecordFirst) -> Predict:
        """Return what names the neurons of a token: a predictor, or the whole matrix of `first`."""
        predictor: Predictor | None = self._opened.flash.predictor(layer, self._machine.compute)
        if predictor is None:
            return lambda x: feed.act(FastLinear.forward(first, x)) != 0
        self._regions.keep_room("device", aligned(predictor.nbytes), PREDICTORS)
        return predictor.active

    def _release(self) -> None:
        for block in self.blocks:
            first = block.feed.modules[0]
            assert isinstance(first, RecordFirst)
            first.block = None
        self.blocks = []

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()
