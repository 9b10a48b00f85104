"""Hidden states between layers, for gpu_batches with offloaded activations, and between the stages of a model.

A stage's worker puts hidden states into port AFTER, in lane "leave". The next stage's worker takes hidden states from
port BEFORE, in lane "enter". A port may move data within a process, or by messages between machines.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.errors import InvalidInput
from flexengine.model.skeleton import Skeleton
from flexengine.places import disks_of, place_of
from flexengine.plan.layout import Layout
from flexengine.plan.sizes import aligned
from flexengine.schedule.batches import Batch
from flexengine.schedule.frame import AFTER, BEFORE, num_buffers
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Mover, Regions, Transfer


class Port(ABC):
    """Transfers hidden states from one stage to another, in order."""

    @abstractmethod
    def put(self, batch: int, hidden: Tensor) -> None:
        """Send the hidden states of a gpu_batch. The tensor may be overwritten after the call.

        Args:
            hidden: as between layers, such as [1, tokens, hidden], on the device of the sending stage.
        """

    @abstractmethod
    def take(self, batch: int, target: Tensor) -> None:
        """Copy the hidden states of a gpu_batch to `target`. A port between processes waits until they have come.
        target: of the same shape, on the device of the receiving stage."""


class Ports(NamedTuple):
    """The ports of one stage."""

    before: Port | None = None  # hidden states enter here; None where the stage begins with the embedding
    after: Port | None = None  # hidden states leave here; None where the stage ends with the head

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ports that are not None."""
        return tuple(name for name, port in zip((BEFORE, AFTER), self, strict=True) if port is not None)

    def check(self, skeleton: Skeleton) -> None:
        """Raise InvalidInput if the model's layers lack a needed port, or have an unused one."""
        needed = (BEFORE,) * skeleton.enters + (AFTER,) * skeleton.leaves
        if self.names != needed:
            first, end = skeleton.layer_range
            wants, has = (" and ".join(f"port {n!r}" for n in names) or "no port" for names in (needed, self.names))
            raise InvalidInput(
                f"layers {first} to {end - 1} of {skeleton.total} need {wants}, but {has} is given; let a chain of"
                " stages hold all layers"
            )


NO_PORTS = Ports()


class Hidden:
    """Regions for offloaded hidden states, one per tier. Every sweep divides the regions among its gpu_batches.

    Transfers use device buffers and, between disk and device on some machines, staging buffers on the host. Before the
    first layer and after the last one, hidden states may pass through ports.
    """

    def __init__(
        self, shape: tuple[int, ...], layout: Layout, machine: Machine, dtype: torch.dtype, ports: Ports = NO_PORTS
    ) -> None:
        """shape: of hidden states between layers, with -1 for the number of tokens."""
        self.ports = ports
        self.machine, self.dtype, self._row = machine, dtype, -math.prod(shape) * dtype.itemsize
        self._shape, self._mover = shape, Mover(machine)
        self._regions = Regions(machine)
        take, size = self._regions.take, layout.hidden_buffer
        self._offloaded = {tier: take(tier, n, "hidden states", dtype) for tier, n in layout.hidden_home.items()}
        count = num_buffers(layout.policy.slots) if size else 0
        self._buffers = [take("device", size, "hidden buffers", dtype) for _ in range(count)]
        count = count if disks_of(layout.hidden_home) and machine.capacity.staged else 0
        self._stages = [take("host", size, "hidden staging", dtype) for _ in range(count)]
        self._parts: dict[int, Region] = {}  # by gpu_batch whose hidden states are offloaded
        size, slots = layout.port_buffer, range(layout.policy.slots)
        self._in_port = {name: [take("device", size, "port buffers", dtype) for _ in slots] for name in ports.names}
        self._tokens: list[int] = []

    def begin(self, batches: list[Batch]) -> None:
        """Assign a part of its tier's region to every gpu_batch of a sweep."""
        offset = dict.fromkeys(self._offloaded, 0)
        self._parts, self._tokens = {}, [batch.tokens for batch in batches]
        for k, batch in enumerate(batches):
            if (home := batch.hidden_home) != "device":
                self._parts[k] = self._offloaded[home].part(offset[home], batch.tokens * self._row)
                offset[home] += aligned(self._parts[k].nbytes)

    def _part(self, region: Region, k: int) -> Region:
        return Region(region.place, region.start, self._parts[k].nbytes, self.dtype)

    def buffer(self, k: int, buffer: int) -> Tensor:
        """Return the hidden states of gpu_batch k, in their own shape, in device buffer number `buffer`."""
        return self.machine.device.view(self._part(self._buffers[buffer], k)).view(self._shape)

    def load(self, k: int, tier: str, buffer: int, hop: int) -> None:
        """Copy gpu_batch k's hidden states one leg toward device buffer number `buffer`; see `Mover.load`."""
        self._mover.load(tier, hop, [self._moved(k, tier, buffer)])

    def store(self, k: int, tier: str, buffer: int, hop: int) -> None:
        """Copy gpu_batch k's hidden states one leg from device buffer number `buffer`; see `Mover.store`."""
        self._mover.store(tier, hop, [self._moved(k, tier, buffer)])

    def enter(self, k: int) -> None:
        """Take the hidden states of gpu_batch k from port BEFORE into buffer `at_port(BEFORE, k)`."""
        assert self.ports.before is not None
        self.ports.before.take(k, self.at_port(BEFORE, k))

    def leave(self, k: int) -> None:
        """Put the hidden states in buffer `at_port(AFTER, k)` into port AFTER."""
        assert self.ports.after is not None
        self.ports.after.put(k, self.at_port(AFTER, k))

    def at_port(self, port: str, k: int) -> Tensor:
        """Return the device buffer for hidden states of gpu_batch k that pass a port, in their own shape."""
        region = self._in_port[port][k % len(self._in_port[port])]
        part = Region(region.place, region.start, self._tokens[k] * self._row, self.dtype)
        return self.machine.device.view(part).view(self._shape)

    def _moved(self, k: int, tier: str, buffer: int) -> Transfer:
        stage = self._part(self._stages[buffer], k) if place_of(tier).disk and self._stages else None
        return Transfer([self._parts[k]], stage, self._part(self._buffers[buffer], k))

    def close(self) -> None:
        """Free the memory of all regions, even if other objects still refer to this object."""
        for held in (self._offloaded, self._buffers, self._stages, self._parts, self._in_port):
            held.clear()
        self._regions.free()
