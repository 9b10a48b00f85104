"""Copies of pages between pools, host staging and device buffers."""

import torch
from torch import Tensor

from flexengine.places import place_of
from flexengine.plan.layout import Layout
from flexengine.schedule.rings import num_buffers
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.cache.pools import Pools
from flexengine.worker.cache.tables import Runs, Tables
from flexengine.worker.mover import Mover, Transfer
from flexengine.worker.regions import Regions
from flexengine.worker.rows import store_rows

Spans = list[tuple[int, int, int]]  # (byte in the pool, byte in the buffer, bytes)


class Movement:
    """Device buffers, host staging, and copies between these and the pools."""

    def __init__(self, layout: Layout, machine: Machine, regions: Regions, pools: Pools, dtype: torch.dtype) -> None:
        self.machine, self.pools, self.dtype, self._size = machine, pools, dtype, layout.cache_buffer
        self._mover = Mover(machine, pools.teams)
        count = num_buffers(layout.policy.slots) if self._size else 0
        self._buffers = [regions.take("device", self._size, "cache buffers", dtype) for _ in range(count)]
        count = count if any(place_of(home).staged for home in layout.pools) and machine.capacity.staged else 0
        self._stages = [regions.take("host", self._size, "cache staging", dtype) for _ in range(count)]

    def room(self, layer: int, home: str, buffer: int) -> Region:
        """Return the part of a buffer that holds whole pages of the layer."""
        page, base = self.pools.page_bytes(layer, home), self._buffers[buffer]
        return Region(base.place, base.start, self._size // page * page, self.dtype)

    def tensor(self, layer: int, home: str, buffer: int) -> Tensor:
        """Return the pages of a layer in a buffer."""
        room, group = self.room(layer, home, buffer), self.pools.group[layer]
        shape = self.pools.shape(group, home, room.nbytes // self.pools.page_bytes(layer, home))
        return self.machine.device.view(room).view(shape)

    def load(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy the cached pages of one layer one leg toward the device buffer; see `Mover.load`."""
        spans = self._spans(layer, home, tables.load, tables.keys)
        self._mover.load(home, hop, self._parts(layer, home, spans, buffer))

    def store(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy new pages one leg from the device buffer; see `Mover.store`. Rows have one leg."""
        spans = self._spans(layer, home, tables.store)
        self._mover.store(home, hop, self._parts(layer, home, spans, buffer))
        for rows in tables.rows:
            store_rows(self.machine, rows, self.room(layer, home, buffer), self.pools.region(layer, home), home)

    def _spans(self, layer: int, home: str, whole: Runs, keys: Runs | tuple[()] = ()) -> Spans:
        """Return the bytes of pages in a layer's pool and in a buffer. whole: whole pages. keys: pages without values,
        whose keys are the first half."""
        page = self.pools.page_bytes(layer, home)
        spans = [(source * page, target * page, count * page) for source, target, count in whole]
        halves = [(source + i, target + i) for source, target, count in keys for i in range(count)]
        return spans + [(source * page, target * page, page // 2) for source, target in halves]

    def _parts(self, layer: int, home: str, spans: Spans, buffer: int) -> list[Transfer]:
        """Return the spans as parts. A page has the same offset in the buffer and in its staging."""
        pool, device = self.pools.region(layer, home), self._buffers[buffer]
        stage = self._stages[buffer] if place_of(home).staged and self._stages else None
        return [
            Transfer([pool.part(first, nbytes)], self._part(stage, start, nbytes) if stage else None,
                 self._part(device, start, nbytes))
            for first, start, nbytes in spans
        ]  # fmt: skip

    def _part(self, base: Region, start: int, nbytes: int) -> Region:
        return Region(base.place, base.start + start, nbytes, self.dtype)

    def close(self) -> None:
        """Drop all references to the memory."""
        self._buffers.clear()
        self._stages.clear()
