"""Rows of the embedding for the tokens of a sweep.

The ids are known before the sweep, in RAM. They are sorted and counted then: within the sweep, a GPU would have to wait
until the host had read them from it. Rows of a table off the device are read by a task of their own, in the lane of the
tier where the table lies. Beside a GPU they are read into locked memory, from which they are copied without waiting;
each gpu_batch has a place of its own there until the next sweep.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.packed import TOGETHER
from flexengine.plan.facts import ENCODED_ROWS
from flexengine.plan.layout import EMBEDDED, Layout
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights

READ_BYTES = 4 << 20  # of encoded rows that are read at once: decoding takes room beside the pass that computes


class Read(NamedTuple):
    """Rows that are read together.

    Attributes:
        numbers: of the rows or, if they are encoded, of the blocks that they lie in; rising.
        inside: where the rows are among those of the blocks, int64, in RAM.
    """

    numbers: list[int]
    inside: Tensor


@dataclass
class Lookup:
    """Rows of the embedding that a gpu_batch needs.

    Attributes:
        place: the row of each token among those brought, [1, tokens], on the device.
        ids: on the device, the rows to take of a table there; None: the table is taken as it is.
        reads: what to read of a table off the device.
        target: where in locked memory the rows go, [rows, width]; None: anywhere in RAM.
        found: the rows that `read` has read, [rows, width], in RAM.
    """

    place: Tensor
    ids: Tensor | None = None
    reads: tuple[Read, ...] = ()
    target: Tensor | None = None
    found: Tensor | None = None


class Embedding:
    """Finds the rows of a job's sweeps: `begin` a sweep, `look_up` each gpu_batch, `read` in the table's lane, `bring`
    in the device's.

    Args:
        regions: takes the locked memory, and gives it back.
    """

    def __init__(self, weights: Weights, layout: Layout, regions: Regions) -> None:
        self.weights, self.machine = weights, weights.machine
        width, on = weights.skeleton.embedding[1][1], weights.machine.compute
        entering = weights.skeleton.enters  # then no layer sees the embedding's output, and no row of it is read
        self._blank = torch.zeros(1, width, dtype=weights.dtype, device=on) if entering else None
        self._stage: Tensor | None = None
        self._used = 0  # elements of it
        if layout.embedded:
            self._stage = self.machine.host.view(regions.take("host", layout.embedded, EMBEDDED, weights.dtype))

    def begin(self) -> None:
        """Let the sweep's gpu_batches use all of the locked memory anew."""
        self._used = 0

    def look_up(self, ids: Tensor, staged: bool = True) -> Lookup:
        """Return the rows for the ids of a gpu_batch; none is read yet.

        Args:
            ids: [1, tokens], in RAM.
            staged: whether rows read from RAM or disk go through locked memory, which has room for each gpu_batch once.
        """
        table, on = self.weights.table, self.machine.compute
        if self._blank is not None:
            return Lookup(torch.zeros_like(ids).to(on))
        if table is not None and table.dtype == self.weights.dtype:
            return Lookup(ids.to(on))
        unique, inverse = torch.unique(ids, return_inverse=True)
        if table is not None:
            return Lookup(inverse.to(on), unique.to(on))
        form = self.weights.embedding_form
        if form is None:
            reads = [Read(unique.tolist(), unique)]
        else:
            most = READ_BYTES // (form.packed.blocks[1] * form.packed.block_bytes)
            reads = [_blocks(some) for some in torch.split(unique, max(1, min(TOGETHER, most)))]
        return Lookup(inverse.to(on), None, tuple(reads), self._target(len(unique)) if staged else None)

    def _target(self, count: int) -> Tensor | None:
        if self._stage is None:
            return None
        width = self.weights.skeleton.embedding[1][1]
        start, self._used = self._used, self._used + count * width
        return self._stage[start : self._used].view(count, width)

    def read(self, rows: Lookup) -> None:
        """Read the rows of a table off the device to RAM, in the compute dtype."""
        if not rows.reads:
            return
        weights, form = self.weights, self.weights.embedding_form
        if form is None:
            (read,) = rows.reads
            found = weights.gather(read.numbers)
        else:
            found = torch.cat([
                replace(form.packed, rows=len(read.numbers) * ENCODED_ROWS).dequantize_rows(
                    weights.gather(read.numbers).view(-1), read.inside)
                for read in rows.reads
            ])  # fmt: skip
        rows.found = found.to(weights.dtype) if rows.target is None else rows.target.copy_(found)

    def bring(self, rows: Lookup) -> tuple[Tensor, Tensor]:
        """Return embedding rows on the device, and each token's place among them."""
        weights, form, dtype = self.weights, self.weights.embedding_form, self.weights.dtype
        if self._blank is not None:
            return self._blank, rows.place
        if rows.reads:
            if rows.found is None:
                self.read(rows)
            assert rows.found is not None
            found, rows.found = rows.found, None
            return found if rows.target is None else found.to(self.machine.compute, non_blocking=True), rows.place
        table = weights.table
        assert table is not None
        if rows.ids is None:
            return table, rows.place
        found = table[rows.ids] if form is None else form.packed.dequantize_rows(table, rows.ids)
        return found.to(dtype), rows.place

    def close(self) -> None:
        """Forget the locked memory, which `regions` gives back."""
        self._stage = None


def _blocks(ids: Tensor) -> Read:
    blocks, place = torch.unique(ids // ENCODED_ROWS, return_inverse=True)
    return Read(blocks.tolist(), place * ENCODED_ROWS + ids % ENCODED_ROWS)
