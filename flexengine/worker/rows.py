"""Rows of the embedding off the device that are loaded for the tokens of a sweep.

Token ids are in RAM before the sweep, and are sorted then. Within the sweep, reading ids from a GPU would synchronize.
If the table is off the device, its rows are read by a LOAD_ROWS task, in the lane of the table's tier. With a GPU, rows
are read into pinned memory, from which a copy to the GPU is asynchronous. Each gpu_batch has its own part of the pinned
memory until the next sweep.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine import kernels
from flexengine.codec.forms import TOGETHER
from flexengine.plan.layout import EMBEDDED, Layout
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights

READ_BYTES = 4 << 20  # most bytes of encoded rows per read, as dequantization needs memory


class RowRead(NamedTuple):
    """Rows that are read together."""

    numbers: list[int]  # row numbers or, for encoded rows, numbers of blocks that contain the rows; rising
    inside: Tensor  # int64 [rows], in RAM: index of each row among all rows of the blocks


@dataclass
class Lookup:
    """Rows of the embedding that a gpu_batch needs."""

    row_of: Tensor  # int64 [1, tokens], on the device: index of each token's row in the tensor that `bring` returns
    # int64 [rows], on the device: rows of a table on the device; None if `bring` returns the whole table
    ids: Tensor | None = None
    reads: tuple[RowRead, ...] = ()  # reads from a table off the device
    target: Tensor | None = None  # [rows, width], in pinned memory: target of the reads; None for new memory
    in_ram: Tensor | None = None  # [rows, width], in RAM: rows that `read` has read


class Embedding:
    """Embedding rows of a job.

    Call `begin` for a sweep and `look_up` for each gpu_batch. Then call `read` in the lane of the table's tier, and
    `bring` in the device lane.

    Args:
        regions: owns the pinned memory.
    """

    def __init__(self, weights: Weights, layout: Layout, regions: Regions) -> None:
        self.weights, self.machine = weights, weights.machine
        width, device = weights.skeleton.embedding[1][1], weights.machine.compute
        entering = weights.skeleton.enters  # no layer reads the embedding's output
        self._blank = torch.zeros(1, width, dtype=weights.dtype, device=device) if entering else None
        self._stage: Tensor | None = None
        self._used = 0  # elements of `_stage`
        if layout.embedded:
            self._stage = self.machine.host.view(regions.take("host", layout.embedded, EMBEDDED, weights.dtype))

    def begin(self) -> None:
        """Make all pinned memory free for a new sweep."""
        self._used = 0

    def look_up(self, ids: Tensor, staged: bool = True) -> Lookup:
        """Return the rows for the ids of a gpu_batch, without reading them.

        Args:
            ids: int64 [1, tokens], in RAM.
            staged: whether to read rows into pinned memory, which has room for one call per gpu_batch and sweep.
        """
        table, device = self.weights.table, self.machine.compute
        if self._blank is not None:
            return Lookup(torch.zeros_like(ids).to(device))
        if table is not None and table.dtype == self.weights.dtype:
            return Lookup(ids.to(device))
        unique, inverse = torch.unique(ids, return_inverse=True)
        if table is not None:
            return Lookup(inverse.to(device), unique.to(device))
        form = self.weights.embedding_form
        if form is None:
            reads = [RowRead(unique.tolist(), unique)]
        else:
            most = READ_BYTES // form.packed.step_bytes
            step, reads = form.packed.step, list[RowRead]()
            for part in torch.split(unique, max(1, min(TOGETHER, most))):
                blocks, place = torch.unique(part // step, return_inverse=True)
                reads.append(RowRead(blocks.tolist(), place * step + part % step))
        rows = Lookup(inverse.to(device), None, tuple(reads))
        if staged and self._stage is not None:
            width = self.weights.skeleton.embedding[1][1]
            start, self._used = self._used, self._used + len(unique) * width
            rows.target = self._stage[start : self._used].view(len(unique), width)
        return rows

    def read(self, rows: Lookup) -> None:
        """Read the rows of a table off the device to RAM, in the compute dtype."""
        if not rows.reads:
            return
        weights, form = self.weights, self.weights.embedding_form
        if form is None:
            (read,) = rows.reads
            values = weights.gather(read.numbers)
        else:
            parts = list[Tensor]()
            for read in rows.reads:
                packed = form.packed.with_rows(len(read.numbers) * form.packed.step)
                parts.append(kernels.load().encoded_rows(weights.gather(read.numbers).view(-1), packed, read.inside))
            values = torch.cat(parts)
        rows.in_ram = values.to(weights.dtype) if rows.target is None else rows.target.copy_(values)

    def bring(self, rows: Lookup) -> tuple[Tensor, Tensor]:
        """Return embedding rows on the device, and the index of each token's row among them."""
        weights, form, dtype = self.weights, self.weights.embedding_form, self.weights.dtype
        if self._blank is not None:
            return self._blank, rows.row_of
        if rows.reads:
            if rows.in_ram is None:
                self.read(rows)
            assert rows.in_ram is not None
            values, rows.in_ram = rows.in_ram, None
            return values if rows.target is None else values.to(self.machine.compute, non_blocking=True), rows.row_of
        table = weights.table
        assert table is not None
        if rows.ids is None:
            return table, rows.row_of
        if form is None:
            return table[rows.ids].to(dtype), rows.row_of
        return kernels.load_for(table.device).encoded_rows(table, form.packed, rows.ids).to(dtype), rows.row_of

    def close(self) -> None:
        """Drop the reference to the pinned memory. `regions` frees the memory."""
        self._stage = None
