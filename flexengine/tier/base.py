"""The interface of all tiers, and the account of each one's memory. A Region is a region of bytes in a tier; `load`
copies from it, `store` copies to it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flexengine.errors import OutOfMemory

ALIGN = 4096  # bytes; direct I/O needs buffers, offsets and lengths that are multiples of ALIGN


def aligned(nbytes: int) -> int:
    """Return nbytes rounded up to a multiple of ALIGN, as all regions are."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Region:
    """A region of bytes in a tier, where a tensor lies between uses."""

    # a uint8 tensor (memory tiers) or an open file (disk); only the tier that made the region reads `place`
    place: Any = field(repr=False)
    start: int  # first byte of the region in `place`
    nbytes: int  # size in bytes
    dtype: torch.dtype  # dtype of the elements in the region

    def part(self, start: int, nbytes: int) -> "Region":
        """Return the nbytes at byte `start` of this region. Raise ValueError if they are not all inside it."""
        if start < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start}..{start + nbytes} are outside a region of {self.nbytes}")
        return Region(self.place, self.start + start, nbytes, self.dtype)


class Ledger:
    """Reservations in one memory. All methods are thread-safe. name: of the memory, for messages. capacity: bytes that
    can be reserved; None for no limit."""

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.name, self.capacity = name, capacity
        self.used = self.peak = 0  # bytes reserved now, and most since the start or the last `restart_peak`
        self.entries: dict[str, int] = {}  # bytes reserved now, by purpose
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, what: str) -> None:
        """Reserve nbytes for `what`. Raise OutOfMemory, without reserving, if they exceed the capacity."""
        with self._lock:
            if self.capacity is not None and self.used + nbytes > self.capacity:
                raise OutOfMemory(self.name, what, nbytes, self.used, self.capacity)
            self.entries[what] = self.entries.get(what, 0) + nbytes
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    @contextmanager
    def booked(self, nbytes: int, what: str) -> Iterator[None]:
        """Reserve nbytes for `what`, and release them if the block, which allocates the memory, raises."""
        self.reserve(nbytes, what)
        try:
            yield
        except BaseException:
            self.release(nbytes, what)
            raise

    def restart_peak(self) -> None:
        """Set `peak` to `used`, so that it measures the time from now on."""
        with self._lock:
            self.peak = self.used

    def release(self, nbytes: int, what: str) -> None:
        """Release nbytes reserved for `what`. Raise ValueError if fewer are reserved."""
        with self._lock:
            if self.entries.get(what, 0) < nbytes:
                raise ValueError(f"{self.name}: {what} releases {nbytes} of {self.entries.get(what, 0)} bytes")
            self.entries[what] -= nbytes
            if not self.entries[what]:
                del self.entries[what]
            self.used -= nbytes


class Tier(ABC):
    """One memory with its ledger. `Throttled` is a wrapper around a tier.

    A subclass has `load` or `load_all`, which call each other, and `store` or `store_all`."""

    name: str  # for messages
    ledger: Ledger  # account of the bytes reserved in this tier
    bytes_read: int = 0  # bytes loaded from regions so far, in the encoding of the regions
    bytes_written: int = 0  # bytes stored to regions so far, in the encoding of the regions
    engines: int = 1  # that share it, if it is an attention worker
    # Bytes of questions to the process that holds the tier and computes attention, and of its answers.
    attention_bytes: tuple[int, int] = 0, 0
    local_bytes: int = 0  # of this machine's RAM that the process of an attention worker may take
    slowed: tuple[dict[str, float | None], float] | None = None  # bytes per second by direction, latency in seconds
    _counting = threading.Lock()  # several lanes move data through one tier

    def count(self, read: int = 0, written: int = 0) -> None:
        """Add to `bytes_read` and `bytes_written`."""
        with self._counting:
            self.bytes_read += read
            self.bytes_written += written

    @abstractmethod
    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        """Reserve aligned(nbytes) bytes in the ledger and allocate them; their contents are undefined. Raise
        OutOfMemory if the ledger or the system has too few bytes left.

        Args:
            nbytes: size of the region, in bytes.
            what: purpose, for the ledger and for errors.
            dtype: dtype of the elements that the region will hold.
        """

    @abstractmethod
    def free(self, region: Region, what: str) -> None:
        """Free a region that `allocate` returned for the same `what`."""

    def receive_reads(self, region: Region) -> None:  # noqa: B027 - most tiers have nothing to do
        """Prepare a new region, not used yet, for many reads from disks, which are faster into huge pages."""

    def load(self, region: Region, target: torch.Tensor) -> None:
        """Copy the region's elements into `target` (contiguous, same number of elements) and convert the dtype."""
        self.load_all([(region, target)])

    def load_all(self, pairs: Sequence[tuple[Region, torch.Tensor]]) -> None:
        """Load several (region, target) pairs. A tier may read them at the same time."""
        for region, target in pairs:
            self.load(region, target)

    def pick(self, region: Region, rows: torch.Tensor, width: int, target: torch.Tensor) -> None:
        """Copy rows of the region: the `width` bytes from byte rows[i] * width on go to target[i].

        Only the bytes of the rows are counted, even if the tier reads bytes between them too.

        Args:
            region: bytes that consist of rows of `width` bytes.
            rows: int64 [n], row numbers, in RAM; ascending if the tier is a disk.
            width: bytes of a row.
            target: uint8 [n, width], contiguous.
        """
        last = torch.nonzero(rows.diff() != 1).flatten().tolist()
        bounds = pairwise([0, *(i + 1 for i in last), len(rows)]) if len(rows) else ()
        plain = replace(region, dtype=torch.uint8)
        self.load_all([(plain.part(int(rows[a]) * width, (b - a) * width), target[a:b].view(-1)) for a, b in bounds])

    def read_by(self, read: Callable[[], int]) -> None:
        """Read by a function that has its own way to the tier's bytes, such as other files of a disk. It returns how
        many bytes it has read, which are counted."""
        self.count(read=read())

    def store(self, source: torch.Tensor, region: Region) -> None:
        """Copy `source` (contiguous, of the region's dtype and number of elements) to the region."""
        self.store_all([(source, region)])

    def store_all(self, pairs: Sequence[tuple[torch.Tensor, Region]]) -> None:
        """Store several (source, region) pairs. A tier may write them at the same time."""
        for source, region in pairs:
            self.store(source, region)

    def put(self, source: torch.Tensor, region: Region, rows: torch.Tensor) -> None:
        """Copy source[i] to row rows[i] of the region, which consists of rows of as many bytes as source[i] has. Raise
        TypeError if the tier is a disk, whose regions are not tensors.

        Args:
            source: [n, elements], contiguous; of any dtype, on any device.
            region: a region of any size; bytes after its last whole row are not written.
            rows: int64 [n], row numbers, in RAM.
        """
        width = source.shape[1] * source.element_size()
        whole = Region(region.place, region.start, region.nbytes // width * width, source.dtype)
        self.view(whole).view(-1, source.shape[1]).index_copy_(0, rows, source.cpu())
        self.count(written=source.nbytes)

    def view(self, region: Region) -> torch.Tensor:
        """Return the region as a 1-D tensor that shares its memory. Raise TypeError if the tier is a disk."""
        raise TypeError(f"regions of tier {self.name} cannot be addressed as tensors; use load and store")

    def checkpoint(self, path: Path, start: int, nbytes: int, dtype: torch.dtype) -> Region:
        """Return a region inside a file of the user. It is only read, and no ledger books it.

        Raises:
            BadCheckpoint: the file cannot be opened, or ends before the region does.
            TypeError: the tier is no disk.
        """
        raise TypeError(f"{self.name} is not a disk; only a disk tier holds checkpoint files")

    def renew(self) -> None:
        """Replace lost memory of another process by new memory. Regions stay, with undefined contents. Raise TypeError
        if the tier has memory of its own."""
        raise TypeError(f"tier {self.name} is not in another process")

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to close
        """Close files and free buffers."""
