"""Pages between their home, host staging and the device's buffers."""

import torch
from torch import Tensor

from flexengine.plan.layout import Layout
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.cache.pools import Pools
from flexengine.worker.cache.tables import Runs, Tables
from flexengine.worker.regions import Regions
from flexengine.worker.rows import store_rows

Spans = list[tuple[int, int, int]]  # (byte in the pool, byte in the buffer, bytes)


class Movement:
    """Buffers on the device, staging on the host, and what is copied between them and the pools."""

    def __init__(self, layout: Layout, machine: Machine, regions: Regions, pools: Pools, dtype: torch.dtype) -> None:
        self.machine, self.pools, self.dtype, self._size = machine, pools, dtype, layout.cache_buffer
        count = layout.policy.slots if self._size else 0
        self._buffers = [regions.take("device", self._size, "cache buffers", dtype) for _ in range(count)]
        count = count if "disk" in layout.pools and machine.capacity.staged else 0
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
        """Copy the cached pages of one layer one leg further: to staging, or to the device buffer."""
        staged, machine = home == "disk" and bool(self._stages), self.machine
        spans = self._spans(layer, home, tables.load, tables.keys)
        if staged and hop == 1:
            self._between(spans, buffer, up=True)
            return
        where, near = (self._stages, machine.host) if staged else (self._buffers, machine.device)
        pairs = self._pairs(layer, home, spans, where, buffer)
        machine.tier(home).load_all([(far, near.view(inside)) for far, inside in pairs])

    def store(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy what this sweep appended one leg further: pages to staging or to their home, rows to their home."""
        staged, machine = home == "disk" and bool(self._stages), self.machine
        spans = self._spans(layer, home, tables.store)
        if staged and hop == 0:
            self._between(spans, buffer, up=False)
            return
        where, near = (self._stages, machine.host) if staged else (self._buffers, machine.device)
        pairs = self._pairs(layer, home, spans, where, buffer)
        machine.tier(home).store_all([(near.view(inside), far) for far, inside in pairs])
        for rows in tables.rows:
            store_rows(machine, rows, self.room(layer, home, buffer), self.pools.home(layer, home), home)

    def _spans(self, layer: int, home: str, whole: Runs, keys: Runs | tuple[()] = ()) -> Spans:
        """Return the bytes of those pages in a layer's pool and in a buffer, and of the first halves of `keys`."""
        page = self.pools.page_bytes(layer, home)
        found = [(first * page, at * page, count * page) for first, at, count in whole]
        halves = [(first + i, at + i) for first, at, count in keys for i in range(count)]
        return found + [(first * page, at * page, page // 2) for first, at in halves]

    def _pairs(
        self, layer: int, home: str, spans: Spans, where: list[Region], buffer: int
    ) -> list[tuple[Region, Region]]:
        """(part of the pool, its place in a buffer or stage) of every span."""
        pool, base = self.pools.home(layer, home), where[buffer]
        return [
            (pool.part(first, nbytes), Region(base.place, base.start + at, nbytes, self.dtype))
            for first, at, nbytes in spans
        ]

    def _between(self, spans: Spans, buffer: int, up: bool) -> None:
        """Staging to buffer (up) or buffer to staging: pages lie alike in both."""
        host, device = self.machine.host, self.machine.device
        near, far = (
            [Region(base.place, base.start + at, nbytes, self.dtype) for _, at, nbytes in spans]
            for base in (self._buffers[buffer], self._stages[buffer])
        )
        if up:
            host.load_all([(away, device.view(here)) for here, away in zip(near, far, strict=True)])
        else:
            host.store_all([(device.view(here), away) for here, away in zip(near, far, strict=True)])

    def close(self) -> None:
        """Drop all references to the memory."""
        self._buffers.clear()
        self._stages.clear()
