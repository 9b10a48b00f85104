"""Hidden states between layers, for gpu_batches whose activations have their home off the device."""

import torch
from torch import Tensor

from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.plan.sizes import aligned
from flexengine.schedule.order import Batch
from flexengine.tier.base import Home
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions


class Hidden:
    """One region per off-device tier, shared out anew every sweep; device buffers and staging to pass through."""

    def __init__(self, model: ModelFacts, layout: Layout, machine: Machine, dtype: torch.dtype) -> None:
        self.machine, self.dtype, self._row = machine, dtype, model.hidden * dtype.itemsize
        self._width = model.hidden
        self._regions = Regions(machine)
        take, size = self._regions.take, layout.hidden_buffer
        self._far = {tier: take(tier, n, "hidden states", dtype) for tier, n in layout.hidden_home.items()}
        count = layout.policy.slots if size else 0
        self._buffers = [take("device", size, "hidden buffers", dtype) for _ in range(count)]
        count = count if "disk" in layout.hidden_home and machine.capacity.staged else 0
        self._stages = [take("host", size, "hidden staging", dtype) for _ in range(count)]
        self._homes: list[Home | None] = []

    def begin(self, batches: list[Batch]) -> None:
        """Gives every batch of a sweep its place."""
        at = dict.fromkeys(self._far, 0)
        self._homes = []
        for batch in batches:
            if batch.hidden_home == "device":
                self._homes.append(None)
                continue
            nbytes = batch.tokens * self._row
            self._homes.append(self._far[batch.hidden_home].part(at[batch.hidden_home], nbytes))
            at[batch.hidden_home] += aligned(nbytes)

    def _part(self, region: Home, k: int) -> Home:
        home = self._homes[k]
        assert home is not None
        return Home(region.place, region.start, home.nbytes, self.dtype)

    def buffer(self, k: int, buffer: int) -> Tensor:
        """Batch k's hidden states `[1, tokens, hidden]` in a device buffer."""
        return self.machine.device.view(self._part(self._buffers[buffer], k)).view(1, -1, self._width)

    def load(self, k: int, tier: str, buffer: int, hop: int) -> None:
        """One leg from the home to staging or to the device buffer."""
        home, machine = self._homes[k], self.machine
        assert home is not None
        if tier == "disk" and self._stages:
            stage = self._part(self._stages[buffer], k)
            if hop == 0:
                machine.disk.load(home, machine.host.view(stage))
            else:
                machine.host.load(stage, self.buffer(k, buffer))
        else:
            machine.tier(tier).load(home, self.buffer(k, buffer))

    def store(self, k: int, tier: str, buffer: int, hop: int) -> None:
        """One leg from the device buffer to staging or to the home."""
        home, machine = self._homes[k], self.machine
        assert home is not None
        if tier == "disk" and self._stages:
            stage = self._part(self._stages[buffer], k)
            if hop == 0:
                machine.host.store(self.buffer(k, buffer), stage)
            else:
                machine.disk.store(machine.host.view(stage), home)
        else:
            machine.tier(tier).store(self.buffer(k, buffer), home)

    def close(self) -> None:
        """Free all memory of the regions, whatever still refers to this object."""
        for held in (self._far, self._buffers, self._stages, self._homes):
            held.clear()
        self._regions.free()
