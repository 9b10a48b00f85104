"""Measurement of blocks of records: reads of scattered and of successive records, and their products.

Reads are of a file of the checkpoint, at random places, as the records themselves may not be made yet.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

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
from flexengine.plan.hardware import Table
from flexengine.tier.base import Tier
from flexengine.tier.machine import Machine
from flexengine.worker.neurons import Block
from flexengine.worker.opened import Opened
from flexengine.worker.regions import Regions

HELD = 128 << 20  # most bytes of records in memory, more than the caches of a CPU
BUFFER = 4 << 20  # bytes of a buffer for records that are all used
COUNTS = (4, 32, 256, 1024)  # records of one read
USED = 0.25  # share of the records in memory that tokens use
SOME, ALL = (1, 2, 4, 8), (4, 32, 256)  # tokens
SECONDS = 0.1  # of each point


@dataclass(frozen=True)
class _File(Bundle):
    """A file of a checkpoint, read as if it held records."""

    def check(self) -> None:
        """Accept any size."""


@torch.no_grad()
def measure_blocks(opened: Opened, machine: Machine) -> dict[str, dict[str, Table]]:
    """Return `Hardware.blocks` of a model. Products that do not fit in memory are left out."""
    found = dict[str, dict[str, Table]]()
    for feed, facts in zip(opened.blocks, opened.facts.blocks, strict=False):
        if feed is None or facts is None or facts.signature in found:
            continue
        form = record_form(feed, opened.locations, opened.record_kind)
        found[facts.signature] = reads = _reads(opened, form, feed.neurons, machine.disk)
        regions = Regions(machine)
        try:
            with unnoticed(machine):
                found[facts.signature] = reads | _products(opened, feed, form, machine, regions)
        except OutOfMemory:
            continue
        finally:
            regions.free()
    return found


def _reads(opened: Opened, form: RecordForm, neurons: int, disk: Tier) -> dict[str, Table]:
    """Return the rates of reads; {} without a file that is large enough. disk: tier of records."""
    largest = max(opened.files, key=lambda path: path.stat().st_size, default=None)
    total = largest.stat().st_size // form.nbytes if largest else 0
    if largest is None or total < neurons:
        return {}
    bundle, rng = _File(largest, form, total), np.random.default_rng(0)
    target = torch.empty(max(COUNTS[-1], BUFFER // form.nbytes), form.nbytes, dtype=torch.uint8)

    def points(draw: Callable[[int], Numbers], counts: tuple[int, ...]) -> Table:
        rates = []
        for count in counts:
            rows = torch.arange(count)

            def call(_: int, count: int = count, rows: Tensor = rows) -> None:
                disk.read_by(lambda: reader.read(bundle, torch.from_numpy(draw(count)), target, rows).bytes)

            rates.append((float(count), count * form.nbytes / seconds_per_call(call, SECONDS)))
        return tuple(rates)

    def scattered(count: int) -> Numbers:
        first = int(rng.integers(total - neurons + 1))  # records of one layer
        return first + np.sort(rng.choice(neurons, count, replace=False))

    def successive(count: int) -> Numbers:
        first = int(rng.integers(total - count + 1))
        return np.arange(first, first + count)

    counts = tuple(count for count in COUNTS if count <= neurons // 2) or (1,)
    with Reader([bundle]) as reader:
        return {"read": points(scattered, counts), "stream": points(successive, (min(total, BUFFER // form.nbytes),))}


def _products(
    opened: Opened, feed: FeedForward, form: RecordForm, machine: Machine, regions: Regions
) -> dict[str, Table]:
    """Return the rates of products with records in memory."""
    count = min(feed.neurons, max(64, min(HELD, room(machine, "device")) // form.nbytes))
    memory = _records(form, machine.device.view(regions.take("device", count * form.nbytes, WHAT)), machine)
    buffer = _records(form, torch.empty(min(count, max(1, BUFFER // form.nbytes)) * form.nbytes, dtype=torch.uint8),
                      machine)  # fmt: skip
    bare = tuple(None if module is None else SimpleNamespace(bias=None) for module in feed.modules)
    rng = np.random.default_rng(0)
    rates: dict[str, list[tuple[float, float]]] = {"some": [], "all": []}

    def block_of(neurons: int) -> Block:
        few = replace(feed, modules=bare, neurons=neurons)  # type: ignore[arg-type]
        return Block(few, form, memory, (buffer, buffer), lambda *_: lambda: None, lambda *_: None, _nothing)

    block, whole = block_of(count), block_of(len(buffer))
    used = max(1, int(USED * count))
    for tokens in SOME:
        x = fill(torch.empty(tokens, form.width, dtype=opened.dtype, device=machine.compute), 1.0)
        uses = torch.ones(tokens, count, dtype=torch.bool, device=machine.compute)
        out = torch.zeros_like(x)

        def some(_: int, x: Tensor = x, uses: Tensor = uses, out: Tensor = out) -> None:
            rows = np.sort(rng.choice(count, used, replace=False))
            block.added(out, x, uses, rows, memory, rows)

        rates["some"].append((float(tokens), used * form.nbytes / seconds_per_call(some, SECONDS, machine)))
    for tokens in ALL:
        x = fill(torch.empty(tokens, form.width, dtype=opened.dtype, device=machine.compute), 1.0)
        seconds = seconds_per_call(lambda _, x=x: whole.all(x), SECONDS, machine)  # type: ignore[misc]
        rates["all"].append((float(tokens), buffer.numel() / seconds))
    return {name: tuple(points) for name, points in rates.items()}


def _records(form: RecordForm, memory: Tensor, machine: Machine) -> Tensor:
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
