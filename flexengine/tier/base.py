"""What every tier can do. The bytes of a tensor lie in a Home; `load` brings them out, `store` puts them there."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from flexengine.tier.ledger import Ledger

ALIGN = 4096  # bytes; direct I/O wants buffers, offsets and lengths that are multiples of it


def aligned(nbytes: int) -> int:
    """nbytes rounded up to the alignment of regions."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Home:
    """Where bytes lie between uses: `nbytes` bytes at `start` of `place`, holding elements of `dtype`.

    place: a uint8 tensor (memory tiers) or an open file (disk); only the tier that made it looks inside.
    """

    place: Any = field(repr=False)
    start: int
    nbytes: int
    dtype: torch.dtype

    def part(self, start: int, nbytes: int) -> "Home":
        """nbytes at byte `start` of this region."""
        if start < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start}..{start + nbytes} are outside a region of {self.nbytes}")
        return Home(self.place, self.start + start, nbytes, self.dtype)


class Tier(ABC):
    """One memory with its ledger. A handful of methods; wrappers (wrap.py) add throttling without the tier knowing.

    bytes_read, bytes_written: bytes that crossed its link, counted in the region's own encoding.
    """

    name: str
    ledger: Ledger
    bytes_read: int = 0
    bytes_written: int = 0
    _counting = threading.Lock()  # several lanes move data through one tier

    def count(self, read: int = 0, written: int = 0) -> None:
        """Adds to the bytes moved."""
        with self._counting:
            self.bytes_read += read
            self.bytes_written += written

    @abstractmethod
    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Home:
        """Books and takes aligned(nbytes) bytes; contents are undefined. Raises OutOfMemory."""

    @abstractmethod
    def free(self, region: Home, what: str) -> None:
        """Gives back what `allocate` returned."""

    @abstractmethod
    def load(self, region: Home, target: torch.Tensor) -> None:
        """Copies the region's elements into `target` (contiguous, same number of elements), converting dtype."""

    def load_all(self, pairs: Sequence[tuple[Home, torch.Tensor]]) -> None:
        """load() of several (region, target) pairs; a tier that gains from it reads them at the same time."""
        for region, target in pairs:
            self.load(region, target)

    def pick(self, region: Home, rows: torch.Tensor, width: int, target: torch.Tensor) -> None:
        """Copies single rows: bytes rows[i] * width on, `width` of them, of the region to target[i].

        rows: int64, in RAM, rising on a disk; target: uint8 [len(rows), width], contiguous. The bytes asked for are
        counted, whatever is read besides.
        """
        last = torch.nonzero(rows.diff() != 1).flatten().tolist()
        bounds = pairwise([0, *(i + 1 for i in last), len(rows)]) if len(rows) else ()
        plain = replace(region, dtype=torch.uint8)
        self.load_all([
            (plain.part(int(rows[a]) * width, (b - a) * width), target[a:b].view(-1)) for a, b in bounds
        ])  # fmt: skip

    @abstractmethod
    def store(self, source: torch.Tensor, region: Home) -> None:
        """Copies `source` (contiguous, of the region's dtype and number of elements) to the region."""

    def store_all(self, pairs: Sequence[tuple[torch.Tensor, Home]]) -> None:
        """store() of several (source, region) pairs; a tier that gains from it writes them at the same time."""
        for source, region in pairs:
            self.store(source, region)

    def put(self, source: torch.Tensor, region: Home, rows: torch.Tensor) -> None:
        """Copy source[i] to row number rows[i] of the region, which is cut into rows of that many bytes.

        Args:
            source: [n, elements], contiguous; of any dtype, on any device.
            region: any number of bytes; what is left behind its last whole row is not written to.
            rows: int64 [n], in RAM.

        Raises:
            TypeError: this tier cannot be addressed.
        """
        width = source.shape[1] * source.element_size()
        whole = Home(region.place, region.start, region.nbytes // width * width, source.dtype)
        self.view(whole).view(-1, source.shape[1]).index_copy_(0, rows, source.cpu())
        self.count(written=source.nbytes)

    def view(self, region: Home) -> torch.Tensor:
        """The region as a 1-D tensor sharing its memory. Raises TypeError where the tier cannot be addressed."""
        raise TypeError(f"{self.name} cannot be addressed; load from it")

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to close
        """Releases files and buffers."""
