"""A few rates of a device with its own memory, measured in about a second, for jobs too short to measure all rates."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from flexengine.measure.kernels import products
from flexengine.measure.links import WHAT, copies
from flexengine.measure.timing import fill, room, seconds_per_call, unnoticed
from flexengine.plan.assumed import assumed
from flexengine.plan.hardware import Hardware
from flexengine.tier.base import ALIGN
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions

ROWS, SECONDS = (1, 64, 1024), 0.03  # rows of activations; seconds of each figure
MOVED = 256 << 20  # bytes of device memory that a copy within the device reads; caches hold less
ATTENDED = 0.4  # rate at which attention reads the KV cache, by that of such copies; 0.3 to 0.8 were measured


@torch.no_grad()
def quick_rates(machine: Machine, dtype: torch.dtype) -> Hardware:
    """Return assumed rates, but measured ones of copies to and from the device, of products, and of device memory.

    These differ by more than ten times between GPUs, and decide which policy is best. The ledgers are unchanged
    afterwards.

    Args:
        machine: its device has memory of its own.
        dtype: of activations.

    Raises:
        OutOfMemory: a tier has no free memory.
    """
    known, name = assumed(machine.kind, machine.capacity, machine.same_device), str(dtype).removeprefix("torch.")
    with unnoticed(machine):
        links = copies(machine, SECONDS)
        with _halves(machine) as (source, target):
            copied = 2 * source.nbytes / seconds_per_call(lambda _: target.copy_(source), SECONDS, machine)
        with products(machine, dtype, dtype) as product:
            works = [(rows, product(rows)) for rows in ROWS]
            table = tuple((float(rows), w.flop / seconds_per_call(w.call, SECONDS, machine)) for rows, w in works)
    return replace(
        known, name=f"{machine.kind}, measured in a second", links={**known.links, **links}, elementwise=copied,
        products={name: table}, decode_attention=((1.0, ATTENDED * copied),),
    )  # fmt: skip


@contextmanager
def _halves(machine: Machine) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(ALIGN, min(MOVED, room(machine, "device") // 2) // ALIGN * ALIGN)
    with Regions(machine) as regions:
        first, second = (machine.device.view(regions.take("device", size, WHAT)) for _ in range(2))
        yield fill(first), fill(second)
