"""Measurement of blocks of records: reads of scattered records, and products with records in memory and on their way.

Reads are of a file of the checkpoint, at random places, as the records themselves may not be made yet. Products are
those of the block of a job (`worker.neurons`), with as many neurons as tokens of the model use.
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
from flexengine.flash.arena import Numbers
from flexengine.flash.bundles import Bundle, record_form
from flexengine.flash.reader import Reader
from flexengine.measure.links import WHAT
from flexengine.measure.timing import fill, room, seconds_per_call, unnoticed
from flexengine.model.neurons import FeedForward
from flexengine.plan.facts import NeuronFacts
from flexengine.plan.hardware import Table
from flexengine.plan.neuron_memory import STREAMED
from flexengine.plan.neurons import Use
from flexengine.tier.machine import Machine
from flexengine.worker.neurons import Block, Predict
from flexengine.worker.opened import Opened
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
def measure_blocks(opened: Opened, machine: Machine) -> dict[str, dict[str, Table]]:
    """Return `Hardware.blocks` of a model. Products that do not fit in memory are left out."""
    found = dict[str, dict[str, Table]]()
    others = fill(torch.empty(OTHERS // 4))
    for feed, facts in zip(opened.blocks, opened.facts.blocks, strict=False):
        if feed is None or facts is None or facts.signature in found:
            continue
        form = record_form(feed, opened.locations, opened.record_kind)
        file = _file(form, feed.neurons, opened.files)
        with unnoticed(machine), Reader([file] if file else []) as reader:
            points = _Points(feed, facts, form, opened.dtype, machine, file, reader, others)
            found[facts.signature] = _best([points.rates() for _ in range(ROUNDS)])
    return found


def _best(rounds: Sequence[dict[str, Table]]) -> dict[str, Table]:
    """Return the highest rate of each point. Rates of a disk that others use, too, change within seconds."""
    names = [name for name in rounds[0] if all(name in tables for tables in rounds)]
    return {name: tuple(map(max, *(tables[name] for tables in rounds))) for name in names}


def _file(form: RecordForm, neurons: int, files: Sequence[Path]) -> _File | None:
    """Return the largest of the files, to be read as records; None if it has fewer than a layer's. A single file, as a
    disk's own cache may hold it, like the records of a job, which a prompt has read before."""
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    total = largest.stat().st_size // form.nbytes if largest else 0
    return _File(largest, form, total) if largest and total >= neurons else None


@dataclass(frozen=True)
class _Points:
    """The points to measure for one kind of block.

    Attributes:
        dtype: of activations.
        file: what is read; None for no reads.
        others: memory that is read before each call.
    """

    feed: FeedForward
    facts: NeuronFacts
    form: RecordForm
    dtype: torch.dtype
    machine: Machine
    file: _File | None
    reader: Reader
    others: Tensor

    def rates(self) -> dict[str, Table]:
        """Return all rates; without those of products if there is too little memory."""
        regions, found = Regions(self.machine), self.reads()
        try:
            return found | self.products(regions)
        except OutOfMemory:
            return found
        finally:
            regions.free()

    def reads(self) -> dict[str, Table]:
        """Return the rate of reads of scattered records."""
        if self.file is None:
            return {}
        rng, neurons, nbytes, rates = np.random.default_rng(0), self.feed.neurons, self.form.nbytes, []
        counts = tuple(count for count in COUNTS if count <= neurons // 2) or (1,)
        target = torch.empty(counts[-1], nbytes, dtype=torch.uint8)
        for count in reversed(counts):  # the first calls of new threads are slow: most of all with few records

            def call(_: int, count: int = count) -> None:
                numbers = np.sort(rng.choice(neurons, count, replace=False))
                self._read(self._somewhere(rng, numbers), target, np.arange(count))

            rates.append((float(count), count * nbytes / seconds_per_call(call, SECONDS, before=self.others.sum)))
        return {"read": tuple(reversed(rates))}

    def _somewhere(self, rng: np.random.Generator, numbers: Numbers) -> Numbers:
        """Return the numbers of a layer's records at a random place of the file."""
        assert self.file is not None
        return numbers + int(rng.integers(self.file.neurons - self.feed.neurons + 1))

    def _read(self, numbers: Numbers, target: Tensor, rows: Numbers) -> None:
        assert self.file is not None
        file, wanted = self.file, (torch.from_numpy(numbers), target, torch.from_numpy(rows))
        self.machine.disk.read_by(lambda: self.reader.read(file, *wanted).bytes)

    def products(self, regions: Regions) -> dict[str, Table]:
        """Return the rates of products with records in memory, and with records that are read."""
        nbytes, rng = self.form.nbytes, np.random.default_rng(0)
        count = min(self.feed.neurons, max(64, min(HELD, room(self.machine, "device")) // nbytes))
        memory = _records(self.form, self.machine.device.view(regions.take("device", count * nbytes, WHAT)))
        buffer = _records(self.form, torch.empty(max(1, STREAMED // nbytes) * nbytes, dtype=torch.uint8))
        bare = tuple(None if module is None else SimpleNamespace(bias=None) for module in self.feed.modules)

        def block(neurons: int, room: int, read: Any, predict: Predict = _nothing) -> Block:
            feed = replace(self.feed, modules=bare, neurons=neurons)  # type: ignore[arg-type]
            buffers = buffer, buffer if read is at_once else buffer.clone()
            return Block(feed, self.form, memory[:room], buffers, read, lambda *_: None, predict)

        def at_once(*_: object) -> Callable[[], object]:
            return lambda: None

        def coming(numbers: Numbers, target: Tensor, rows: Numbers) -> Callable[[], object]:
            at = self._somewhere(rng, numbers)
            return self.reader.begin(lambda: self._read(at, target, rows)).result

        found = {"some": self._some(lambda predict: block(count, count, at_once, predict), count),
                 "all": self._all(block(count, count, at_once))}  # fmt: skip
        if self.file is not None:
            found["all_read"] = self._all(block(self.feed.neurons, 1, coming))
        return found

    def _some(self, of: Callable[[Predict], Block], count: int) -> Table:
        """Return the rate of tokens that use some of `count` neurons: as many as they use in the model.

        Args:
            of: makes the block, with what names the neurons.
        """
        rng, rates, tokens = np.random.default_rng(0), [], np.array(SOME, dtype=float)
        for n, share in zip(SOME, Use(self.facts).used(tokens), strict=True):
            used = max(1, min(count // 2, int(share * self.feed.neurons)))
            x, scored = self._inputs(n), torch.ones(n, dtype=torch.bool)

            def predict(x: Tensor, used: int = used) -> Tensor:
                uses = torch.zeros(len(x), count, dtype=torch.bool)
                uses[:, torch.from_numpy(rng.choice(count, used, replace=False))] = True
                return uses.to(x.device)

            block = of(predict)
            rates.append((float(n), used * self.form.nbytes / self._seconds(partial(block, x, scored))))
        return tuple(rates)

    def _all(self, block: Block) -> Table:
        """Return the rate of tokens that use all neurons of a block."""
        nbytes, inputs = block.feed.neurons * self.form.nbytes, {n: self._inputs(n) for n in ALL}
        return tuple((float(n), nbytes / self._seconds(partial(block.all, x))) for n, x in inputs.items())

    def _inputs(self, tokens: int) -> Tensor:
        return fill(torch.empty(tokens, self.form.width, dtype=self.dtype, device=self.machine.compute), 1.0)

    def _seconds(self, call: Callable[[], object]) -> float:
        return seconds_per_call(lambda _: call(), SECONDS, self.machine, self.others.sum)


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
