"""Hidden states between layers, for gpu_batches with offloaded activations."""

import torch
from torch import Tensor

from flexengine.places import disks_of, place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.plan.sizes import aligned
from flexengine.schedule.batches import Batch
from flexengine.schedule.frame import num_buffers
from flexengine.schedule.ports import AFTER, BEFORE
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.mover import Mover, Transfer
from flexengine.worker.regions import Regions
from flexengine.worker.stage_ports import NO_PORTS, Ports


class Hidden:
    """Regions for offloaded hidden states, one per tier. Every sweep divides the regions among its gpu_batches.

    Transfers use device buffers and, between disk and device on some machines, staging buffers on the host. Before the
    first layer and after the last one, hidden states may pass through ports.
    """

    def __init__(
        self, model: ModelFacts, layout: Layout, machine: Machine, dtype: torch.dtype, ports: Ports = NO_PORTS
    ) -> None:
        self.ports = ports
        self.machine, self.dtype, self._row = machine, dtype, model.hidden * dtype.itemsize
        self._width, self._mover = model.hidden, Mover(machine)
        self._regions = Regions(machine)
        take, size = self._regions.take, layout.hidden_buffer
        self._offloaded = {tier: take(tier, n, "hidden states", dtype) for tier, n in layout.hidden_home.items()}
        count = num_buffers(layout.policy.slots) if size else 0
        self._buffers = [take("device", size, "hidden buffers", dtype) for _ in range(count)]
        count = count if disks_of(layout.hidden_home) and machine.capacity.staged else 0
        self._stages = [take("host", size, "hidden staging", dtype) for _ in range(count)]
        self._parts: list[Region | None] = []
        size, slots = layout.port_buffer, layout.policy.slots
        taken = {name: [take("device", size, "port buffers", dtype) for _ in range(slots)] for name in ports.names}
        self._before, self._after = taken.get(BEFORE, []), taken.get(AFTER, [])
        self._tokens: list[int] = []

    def begin(self, batches: list[Batch]) -> None:
        """Assign a part of its tier's region to every gpu_batch of a sweep."""
        offset = dict.fromkeys(self._offloaded, 0)
        self._parts, self._tokens = [], [batch.tokens for batch in batches]
        for batch in batches:
            if batch.hidden_home == "device":
                self._parts.append(None)
                continue
            nbytes = batch.tokens * self._row
            self._parts.append(self._offloaded[batch.hidden_home].part(offset[batch.hidden_home], nbytes))
            offset[batch.hidden_home] += aligned(nbytes)

    def _part(self, region: Region, k: int) -> Region:
        part = self._parts[k]
        assert part is not None
        return Region(region.place, region.start, part.nbytes, self.dtype)

    def buffer(self, k: int, buffer: int) -> Tensor:
        """Return the hidden states of gpu_batch k, [1, tokens, hidden], in device buffer number `buffer`."""
        return self.machine.device.view(self._part(self._buffers[buffer], k)).view(1, -1, self._width)

    def load(self, k: int, tier: str, buffer: int, hop: int) -> None:
        """Copy gpu_batch k's hidden states one leg toward device buffer number `buffer`; see `Mover.load`."""
        self._mover.load(tier, hop, [self._moved(k, tier, buffer)])

    def store(self, k: int, tier: str, buffer: int, hop: int) -> None:
        """Copy gpu_batch k's hidden states one leg from device buffer number `buffer`; see `Mover.store`."""
        self._mover.store(tier, hop, [self._moved(k, tier, buffer)])

    def enter(self, k: int) -> None:
        """Take the hidden states of gpu_batch k from port BEFORE into buffer `entered(k)`."""
        assert self.ports.before is not None
        self.ports.before.take(k, self.entered(k))

    def leave(self, k: int) -> None:
        """Put the hidden states in buffer `leaving(k)` into port AFTER."""
        assert self.ports.after is not None
        self.ports.after.put(k, self.leaving(k))

    def entered(self, k: int) -> Tensor:
        """Return the device buffer for hidden states of gpu_batch k that enter, [1, tokens, hidden]."""
        return self._in_port(self._before, k)

    def leaving(self, k: int) -> Tensor:
        """Return the device buffer for hidden states of gpu_batch k that leave, [1, tokens, hidden]."""
        return self._in_port(self._after, k)

    def _in_port(self, buffers: list[Region], k: int) -> Tensor:
        region, nbytes = buffers[k % len(buffers)], self._tokens[k] * self._row
        return self.machine.device.view(Region(region.place, region.start, nbytes, self.dtype)).view(1, -1, self._width)

    def _moved(self, k: int, tier: str, buffer: int) -> Transfer:
        part = self._parts[k]
        assert part is not None
        stage = self._part(self._stages[buffer], k) if place_of(tier).disk and self._stages else None
        return Transfer([part], stage, self._part(self._buffers[buffer], k))

    def close(self) -> None:
        """Free the memory of all regions, even if other objects still refer to this object."""
        for held in (self._offloaded, self._buffers, self._stages, self._parts, self._before, self._after):
            held.clear()
        self._regions.free()
