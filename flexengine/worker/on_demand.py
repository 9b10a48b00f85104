"""What computing tasks read when tokens use it: neurons, experts, and chosen values of the KV cache. No lane has tasks
for these reads."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from flexengine.places import DISK, USED_READ, place_of
from flexengine.plan.layout import VALUES, Layout
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Copy, Op, Task
from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine
from flexengine.worker.cache.tables import WIDE, Closed, PageShape
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions

# By field of `OpenModel.flash` with what it reads, by layer: the source as module:name, which is imported on first use.
SOURCES = {
    "blocks": "flexengine.guests.flash.neurons:Neurons",
    "experts": "flexengine.guests.flash.expert_blocks:ExpertBlocks",
}
Note = Callable[[Task, float, float], None]


class DemandReads:
    """Reads from a disk in any thread, and notes when.

    Args:
        notes: called after each read, with a task that stands for it, and its begin and end in seconds of
            time.perf_counter.

    Attributes:
        cell: the cell that is computed. A read is noted as part of the cell in which it runs first.
    """

    def __init__(self, disk: Tier, notes: Sequence[Note] = ()) -> None:
        self._disk, self._notes, self.cell = disk, notes, Cell(-1, -1, -1)

    def load_all(self, pairs: Sequence[tuple[Region, Tensor]]) -> None:
        """Do as `Tier.load_all`."""
        with self._noted():
            self._disk.load_all(pairs)

    def read_by(self, read: Callable[[], int]) -> None:
        """Do as `Tier.read_by`."""
        with self._noted():
            self._disk.read_by(read)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        task, began = Copy(Op.READ_USED, self.cell, USED_READ, home=DISK), time.perf_counter()
        yield
        end = time.perf_counter()
        for note in self._notes:
            note(task, began, end)


class OnDemand:
    """What a job reads on demand, with its memory.

    Raises:
        OutOfMemory: a tier has less memory than the layout books.
    """

    def __init__(self, opened: OpenModel, layout: Layout, machine: Machine, notes: Sequence[Note] = ()) -> None:
        """Allocate the memory. notes: see `DemandReads`."""
        self.reads = DemandReads(machine.disk, notes)
        self.sources: dict[str, Any] = {}  # by name in SOURCES, what is read, if the model has it
        with ExitStack() as undo:
            for name, source in SOURCES.items():
                if getattr(opened.flash, name):
                    self.sources[name] = resolve_name(source)(opened, layout, machine, self.reads)
                    undo.callback(self.sources[name].close)
            self._ended = undo.pop_all()

    @property
    def neurons(self) -> Any:
        """Blocks whose neurons are read when they become active; None if there are none."""
        return self.sources.get("blocks")

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()


class Values:
    """Loads rows of values from a pool into pages on the device, through a buffer of limited size.

    Chosen values: if attention reads only a fraction of the values (`topk`), only these are copied to the device.

    For a decoding sequence whose cache is off the device, this is loaded before a layer computes:

        the keys of all pages, and the values of the last page, which new tokens are appended to.

    The layer then computes queries and scores the keys. For each KV head, this is loaded from the other pages:

        the values of the tokens that a query head of this KV head chose.

    With pages of P tokens and `kv` bytes per token, one layer transfers per sequence

        kv / 2 * (P * (pages with cached tokens + 1 if the last of them is not full) + chosen / kv_heads)

    bytes, where `chosen` counts (KV head, token) pairs in full pages. In a layer with a window, only pages that the
    query sees count. If pages are short and every query head has its own KV head, this is (1 + topk) / 2 of all bytes.
    Attention then makes the same choice again, so it reads only values that were loaded.

    Pages are not written to while their values are loaded: stores of the same sweep end before the sequence's last
    piece is loaded, and the next sweep begins after this one has ended.
    """

    def __init__(self, layout: Layout, machine: Machine, regions: Regions) -> None:
        self.machine = machine
        self._device_buf = regions.take("device", layout.values, VALUES)
        self._stage = regions.take("host", layout.values, VALUES) if machine.capacity.staged else None

    def bring(self, chosen: Tensor, closed: Closed, home: str, pool: Region, buffer: Region, shape: PageShape) -> None:
        """Load the chosen values of one layer.

        Args:
            chosen: bool [decode, kv_heads, positions], result of `Kernels.choose`.
            pool: the layer's pages.
            buffer: pages on the device.
        """
        positions = torch.arange(chosen.shape[2], device=chosen.device)
        missing = chosen & (positions < closed.tokens[:, None])[:, None]
        paged = missing.view(*missing.shape[:2], -1, shape.page_tokens).transpose(1, 2)
        sequence, page, head, offset = paged.nonzero().unbind(1)  # in the order of bytes within a page
        pages = closed.pages[sequence, page], closed.buffer_pages[sequence, page]
        in_pool, in_buffer = ((number * 2 + 1) * shape.kv_heads + head for number in pages)  # panels of V
        for part in shape.parts:
            source = shape.rows(part, in_pool, offset)
            target = shape.rows(part, in_buffer, offset)
            if place_of(home).disk:
                source, order = source.sort()
                target = target[order]
            self._bring(home, pool, source.cpu(), buffer, target, part.width)

    def _bring(self, home: str, pool: Region, source: Tensor, buffer: Region, target: Tensor, width: int) -> None:
        device, step = self.machine.device, self._device_buf.nbytes // width
        wide = next(dtype for dtype in WIDE if width % dtype.itemsize == 0)
        whole = Region(buffer.place, buffer.start, buffer.nbytes // width * width, wide)
        into = device.view(whole).view(-1, width // wide.itemsize)
        for rows, target_rows in zip(torch.split(source, step), torch.split(target, step), strict=True):
            device_buf = device.view(self._device_buf.part(0, len(rows) * width)).view(-1, width)
            self._fetch(home, pool, rows, device_buf)
            into.index_copy_(0, target_rows, device_buf.view(wide))

    def _fetch(self, home: str, pool: Region, rows: Tensor, device_buf: Tensor) -> None:
        machine, width = self.machine, device_buf.shape[1]
        if self._stage is None:
            machine.tier(home).pick(pool, rows, width, device_buf)
            return
        part = self._stage.part(0, device_buf.nbytes)
        stage = machine.host.view(part).view(device_buf.shape)
        if home == "host":  # gather rows in RAM, so that one copy crosses the link
            every = machine.host.view(Region(pool.place, pool.start, pool.nbytes // width * width, torch.uint8))
            torch.index_select(every.view(-1, width), 0, rows, out=stage)
        else:
            machine.tier(home).pick(pool, rows, width, stage)
        machine.host.load(part, device_buf)
        machine.synchronize()  # the next call overwrites the staging
