"""Rows of the embedding for the tokens of a sweep.

Which rows those are is worked out before the sweep, from token ids in RAM: within it, a GPU would have to wait until
the host had been told. Off the device only the rows needed are read, and beside a GPU into locked memory, from which
they are copied without waiting; each gpu_batch has a place of its own there until the next sweep.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.packed import TOGETHER
from flexengine.plan.facts import ENCODED_ROWS
from flexengine.plan.layout import EMBEDDED, Layout
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights


class Read(NamedTuple):
    """Rows that are read together.

    Attributes:
        numbers: of the rows or, if they are encoded, of the blocks that they lie in; rising.
        inside: where the rows are among those of the blocks, int64, in RAM.
    """

    numbers: list[int]
    inside: Tensor


class Rows(NamedTuple):
    """What a gpu_batch needs of the embedding.

    Attributes:
        place: the row of each token among those brought, [1, tokens], on the device.
        ids: on the device, the rows to take of a table there; None: the table is taken as it is.
        reads: what to read of a table off the device.
        target: where in locked memory the rows go, [rows, width]; None: anywhere in RAM.
    """

    place: Tensor
    ids: Tensor | None = None
    reads: tuple[Read, ...] = ()
    target: Tensor | None = None


class Embedding:
    """Finds the rows of a job's sweeps. `begin` a sweep, then `rows` of each gpu_batch, and `bring` them in a task.

    Args:
        regions: takes the locked memory, and gives it back.
    """

    def __init__(self, weights: Weights, layout: Layout, regions: Regions) -> None:
        self.weights, self.machine = weights, weights.machine
        self._stage: Tensor | None = None
        self._used = 0  # elements of it
        if layout.embedded:
            self._stage = self.machine.host.view(regions.take("host", layout.embedded, EMBEDDED, weights.dtype))

    def begin(self) -> None:
        """Let the sweep's gpu_batches use all of the locked memory anew."""
        self._used = 0

    def rows(self, ids: Tensor, staged: bool = True) -> Rows:
        """Return the rows for the ids of a gpu_batch.

        Args:
            ids: [1, tokens], in RAM.
            staged: whether rows read from RAM or disk go through locked memory, which has room for each gpu_batch once.
        """
        table, on = self.weights.table, self.machine.compute
        if table is not None and table.dtype == self.weights.dtype:
            return Rows(ids.to(on))
        unique, inverse = torch.unique(ids, return_inverse=True)
        if table is not None:
            return Rows(inverse.to(on), unique.to(on))
        form = self.weights.embedding_form
        if form is None:
            reads = [Read(unique.tolist(), unique)]
        else:
            reads = [_blocks(some) for some in torch.split(unique, TOGETHER)]
        return Rows(inverse.to(on), None, tuple(reads), self._target(len(unique)) if staged else None)

    def _target(self, count: int) -> Tensor | None:
        if self._stage is None:
            return None
        width = self.weights.skeleton.embedding[1][1]
        start, self._used = self._used, self._used + count * width
        return self._stage[start : self._used].view(count, width)

    def bring(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Embedding rows on the device, and each token's place among them."""
        weights, form, dtype = self.weights, self.weights.embedding_form, self.weights.dtype
        if rows.reads:
            return self._read(rows), rows.place
        table = weights.table
        assert table is not None
        if rows.ids is None:
            return table, rows.place
        found = table[rows.ids] if form is None else form.packed.decode_rows(table, rows.ids)
        return found.to(dtype), rows.place

    def _read(self, rows: Rows) -> Tensor:
        weights, form = self.weights, self.weights.embedding_form
        if form is None:
            (read,) = rows.reads
            found = weights.gather(read.numbers)
        else:
            found = torch.cat([
                replace(form.packed, rows=len(read.numbers) * ENCODED_ROWS).decode_rows(
                    weights.gather(read.numbers).view(-1), read.inside)
                for read in rows.reads
            ])  # fmt: skip
        if rows.target is None:
            return found.to(weights.dtype)
        return rows.target.copy_(found).to(self.machine.compute, non_blocking=True)

    def close(self) -> None:
        """Forget the locked memory, which `regions` gives back."""
        self._stage = None


def _blocks(ids: Tensor) -> Read:
    blocks, place = torch.unique(ids // ENCODED_ROWS, return_inverse=True)
    return Read(blocks.tolist(), place * ENCODED_ROWS + ids % ENCODED_ROWS)
