"""Measurement of blocks of records: reads of scattered records, and products with records in memory and on their way.

Reads are of the records, at random places, or of files of the checkpoint if the records are not made yet. Products are
those of the block of a job (`neurons.NeuronBlock`), with as many neurons as tokens of the model use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexengine.codec.records import RecordForm
from flexengine.errors import OutOfMemory
from flexengine.guests.flash.arena import IntArray
from flexengine.guests.flash.bundles import Bundle, record_form
from flexengine.guests.flash.feed_forward import FeedForward
from flexengine.guests.flash.neurons import NeuronBlock, Predict
from flexengine.guests.flash.predictors import Predictor
from flexengine.guests.flash.reader import RecordReader
from flexengine.measure.links import WHAT
from flexengine.measure.timing import fill, room, seconds_per_call, unnoticed
from flexengine.plan.facts import NeuronFacts
from flexengine.plan.hardware import Table
from flexengine.plan.neurons import STREAMED, Use
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions

HELD = 128 << 20  # most bytes of records in memory, more than the caches of a CPU
OTHERS = 64 << 20  # bytes that are read before each call, as by a layer's other products: caches hold them then
COUNTS = (4, 32, 256, 1024)  # records of one read
SOME, ALL = (1, 2, 4, 8, 16), (4, 32, 128, 256, 512)  # tokens
SECONDS, ROUNDS = 0.1, 3  # seconds of each point in each round


@dataclass(frozen=True)
class _File(Bundle):
    """A file of a checkpoint, read as if it held records."""

    def check(self) -> None:
        """Accept any size."""


@torch.no_grad()
def measure_blocks(opened: OpenModel, machine: Machine) -> dict[str, dict[str, Table]]:
    """Return `Hardware.blocks` of a model. Products that do not fit in memory are left out."""
    found, bundles = dict[str, dict[str, Table]](), opened.flash.made_bundles
    for layer, (feed, facts) in enumerate(zip(opened.flash.blocks, opened.facts.blocks, strict=False)):
        if feed is None or facts is None or facts.signature in found:
            continue
        form = record_form(feed, opened.locations, opened.flash.record_kind)
        files = [b for b in bundles if b.form == form] or _files(form, feed.neurons, opened.files)
        predictor = opened.flash.predictor(layer, machine.compute)
        with unnoticed(machine), RecordReader(files) as reader:
            points = _Points(feed, facts, form, opened.dtype, machine, files, reader, predictor)
            found[facts.signature] = _typical([points.rates() for _ in range(ROUNDS)])
    return found


def _typical(rounds: Sequence[dict[str, Table]]) -> dict[str, Table]:
    """Return the median rate of each point. Rates of a disk that others use, too, change within seconds."""
    names = [name for name in rounds[0] if all(name in tables for tables in rounds)]
    return {name: tuple(sorted(same)[len(same) // 2] for same in zip(*(t[name] for t in rounds), strict=True))
            for name in names}  # fmt: skip


def _files(form: RecordForm, neurons: int, files: Sequence[Path]) -> list[Bundle]:
    """Return the files that have a layer's records at least, to be read as records. All of them, as a cache of the disk
    itself could hold a single one."""
    sizes = ((path, path.stat().st_size // form.nbytes) for path in files)
    return [_File(path, form, total) for path, total in sizes if total >= neurons]


@dataclass(frozen=True)
class _Points:
    """The points to measure for one kind of block."""

    feed: FeedForward
    facts: NeuronFacts
    form: RecordForm
    dtype: torch.dtype  # of activations
    machine: Machine
    files: list[Bundle]  # what is read
    reader: RecordReader
    predictor: Predictor | None  # what names the neurons of a job; None for an oracle

    def rates(self) -> dict[str, Table]:
        """Return all rates; without those for which there is too little memory."""
        regions, found = Regions(self.machine), dict[str, Table]()
        try:
            others = fill(self._ram(regions, OTHERS).view(torch.float32))
            found |= self.reads(regions, others)
            found |= self.products(regions, others)
        except OutOfMemory:
            pass
        finally:
            regions.free()
        return found

    def _ram(self, regions: Regions, nbytes: int) -> Tensor:
        place = "device" if self.machine.capacity.shared else "host"
        return self.machine.tier(place).view(regions.take(place, nbytes, WHAT))

    def reads(self, regions: Regions, others: Tensor) -> dict[str, Table]:
        """Return the rate of reads of scattered records. others: memory that is read before each call."""
        if not self.files:
            return {}
        rng, neurons, nbytes, rates = np.random.default_rng(0), self.feed.neurons, self.form.nbytes, []
        counts = tuple(count for count in COUNTS if count <= neurons // 2) or (1,)
        target = self._ram(regions, counts[-1] * nbytes).view(-1, nbytes)
        for count in reversed(counts):  # the first calls of new threads are slow: most of all with few records

            def call(_: int, count: int = count) -> None:
                numbers = np.sort(rng.choice(neurons, count, replace=False))
                self._read(*self._somewhere(rng, numbers), target, np.arange(count))

            rates.append((float(count), count * nbytes / seconds_per_call(call, SECONDS, before=others.sum)))
        return {"read": tuple(reversed(rates))}

    def _somewhere(self, rng: np.random.Generator, numbers: IntArray) -> tuple[Bundle, IntArray]:
        """Return a file, and the numbers of a layer's records at a random place of it."""
        file = self.files[rng.integers(len(self.files))]
        return file, numbers + int(rng.integers(file.neurons - self.feed.neurons + 1))

    def _read(self, file: Bundle, numbers: IntArray, target: Tensor, rows: IntArray) -> None:
        wanted = torch.from_numpy(numbers), target, torch.from_numpy(rows)
        self.machine.disk.read_by(lambda: self.reader.read(file, *wanted).bytes)

    def products(self, regions: Regions, others: Tensor) -> dict[str, Table]:
        """Return the rates of products with records in memory, and with records that are read. others: see `reads`."""
        nbytes, rng = self.form.nbytes, np.random.default_rng(0)
        count = min(self.feed.neurons, max(64, min(HELD, room(self.machine, "device")) // nbytes))
        memory = _records(self.form, self.machine.device.view(regions.take("device", count * nbytes, WHAT)))
        fit = max(1, STREAMED // nbytes) * nbytes
        buffers = tuple(_records(self.form, self._ram(regions, fit)) for _ in range(2))
        bare = tuple(None if module is None else SimpleNamespace(bias=None) for module in self.feed.modules)

        def block(neurons: int, room: int, read: Any, predict: Predict = _nothing) -> NeuronBlock:
            feed = replace(self.feed, modules=bare, neurons=neurons)  # type: ignore[arg-type]
            return NeuronBlock(feed, self.form, memory[:room], buffers, read, lambda *_: None, predict)  # type: ignore[arg-type]

        def at_once(*_: object) -> Callable[[], object]:
            return lambda: None

        def coming(numbers: IntArray, target: Tensor, rows: IntArray) -> Callable[[], object]:
            file, at = self._somewhere(rng, numbers)
            return self.reader.begin(lambda: self._read(file, at, target, rows)).result

        found = {"some": self._some(lambda predict: block(count, count, at_once, predict), count, others),
                 "all": self._all(block(count, count, at_once), others)}  # fmt: skip
        if self.files:
            found["all_read"] = self._all(block(self.feed.neurons, 1, coming), others)
        return found

    def _some(self, of: Callable[[Predict], NeuronBlock], count: int, others: Tensor) -> Table:
        """Return the rate of tokens that use some of `count` neurons, as many as in the model. of: makes the block."""
        rng, rates, tokens = np.random.default_rng(0), [], np.array(SOME, dtype=float)
        for n, share in zip(SOME, Use(self.facts).used(tokens), strict=True):
            used = max(1, min(count // 2, int(share * self.feed.neurons)))
            x, scored = self._inputs(n), torch.ones(n, dtype=torch.bool)

            def predict(x: Tensor, used: int = used) -> Tensor:
                if self.predictor is not None:
                    self.predictor.active(x)
                uses = torch.zeros(len(x), count, dtype=torch.bool)
                uses[:, torch.from_numpy(rng.choice(count, used, replace=False))] = True
                return uses.to(x.device)

            block = of(predict)
            rates.append((float(n), used * self.form.nbytes / self._seconds(partial(block, x, scored), others)))
        return tuple(rates)

    def _all(self, block: NeuronBlock, others: Tensor) -> Table:
        """Return the rate of tokens that use all neurons of a block."""
        nbytes, inputs = block.feed.neurons * self.form.nbytes, {n: self._inputs(n) for n in ALL}
        return tuple((float(n), nbytes / self._seconds(partial(block.all, x), others)) for n, x in inputs.items())

    def _inputs(self, tokens: int) -> Tensor:
        return fill(torch.empty(tokens, self.form.width, dtype=self.dtype, device=self.machine.compute), 1.0)

    def _seconds(self, call: Callable[[], object], others: Tensor) -> float:
        return seconds_per_call(lambda _: call(), SECONDS, self.machine, others.sum)


def _records(form: RecordForm, memory: Tensor) -> Tensor:
    """Fill memory with records of random numbers, and return it as uint8 [n, form.nbytes]."""
    records = memory.view(-1, form.nbytes)
    numbers = fill(torch.empty(min(len(records), 64), form.width))
    some = form.encode(*[numbers] * form.vectors).to(memory.device)
    for low in range(0, len(records), len(some)):
        part = records[low : low + len(some)]
        part.copy_(some[: len(part)])
    return records


def _nothing(x: Tensor) -> Tensor:
    raise AssertionError("measurements name the neurons themselves")
