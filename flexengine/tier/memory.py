"""RAM: the host tier, and on a machine without a GPU the device tier too.

A page fault takes as long as computing 4 KiB of activations, so two measures keep page faults rare:

* Regions are mapped in huge pages, except where the kernel reports free pages to the host of a virtual machine. The
  host takes these pages away. In such a machine, first writes to a KV cache of 470 MB took 0.44 s of system time in
  small pages, and 1.28 s in huge ones. Pinned memory has huge pages always, as they are locked faster (`cuda.py`).
  Memory that a disk often writes to has them always too (`receive_reads`).
* Memory that torch frees between layers stays in the heap of the process: tensors of up to 32 MiB, and 64 MiB at the
  heap's end. With larger limits, the gaps between tensors outgrew the memory that plans reserve for them.

A job that leaves no memory for gaps gives every block of 64 KiB or more its own pages: in a job of 120 MB the gaps then
took 2 MB instead of 43 MB, at equal speed. A limit of 256 KiB was too high: smaller blocks still made gaps.
"""

import contextlib
import ctypes
import mmap
import weakref
from functools import cache
from pathlib import Path

import torch

from flexengine.kernels import load as load_kernels
from flexengine.tier.base import ALIGN, Ledger, Region, Tier, aligned

HUGE = 2 << 20  # bytes; regions of this size or more are mappings of their own
REPORTED = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from glibc's malloc.h


def keep_freed(room: bool = True) -> None:
    """Make malloc keep freed memory for reuse: much if `room` is true, else little. Does nothing without glibc.

    Threads started later share the main heap, so that a lane can reuse memory that another lane freed.

    If `room` is false, a block of 64 KiB or more gets its own pages, unless it fits in a gap of the heap. Its own pages
    return to the system when the block is freed. Pages inside the heap do not while a live block lies above them.
    """
    mapped_from, heap_end = (32 << 20, 64 << 20) if room else (64 << 10, 1 << 20)
    with contextlib.suppress(OSError, AttributeError):
        libc = _libc()
        libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
        libc.mallopt(_M_TRIM_THRESHOLD, heap_end)
        libc.mallopt(_M_ARENA_MAX, 1)


def give_back_freed() -> None:
    """Return freed memory that malloc holds to the system."""
    with contextlib.suppress(OSError, AttributeError):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library. Cached: every CDLL object is part of a reference cycle."""
    return ctypes.CDLL(None)


def mapped(nbytes: int, huge: bool | None = None) -> torch.Tensor:
    """Return uint8 [nbytes] in a mapping of its own; nbytes is not 0. huge: use huge pages; None uses them unless
    `reports_free_pages`."""
    huge = not reports_free_pages() if huge is None else huge
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
    if huge:
        use_huge_pages(room)
    elif hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return room


_huge = dict[int, int]()  # by first address of a mapping in huge pages: the address after its end


def use_huge_pages(room: torch.Tensor) -> None:
    """Let the system use huge pages for a mapping whose memory is not used yet."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        start = room.data_ptr()
        if not _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(room.nbytes), mmap.MADV_HUGEPAGE):
            _huge[start] = start + room.nbytes
            weakref.finalize(room, _huge.pop, start, None)


def in_huge_pages(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is in a mapping for which huge pages were requested.

    A disk needs one request to read 4 MiB into such memory. The small pages of other memory are apart, so the kernel
    makes 8 requests of 128 pages, which took 2.5 times as long on a virtual disk (1.0 and 2.5 GB/s).
    """
    address = tensor.data_ptr()
    return any(start <= address < end for start, end in _huge.copy().items())  # other threads change it


@cache
def reports_free_pages() -> bool:
    """Return whether the kernel reports free pages to a host.

    It reports blocks of at least 2^n small pages, and a file holds n, which is 9 for huge pages of 2 MiB. If nothing is
    reported, n is -1. Linux 5.14 to 6.0 then has 11 or more, the order above the largest block.
    """
    try:
        order = int(REPORTED.read_text())
    except (OSError, ValueError):
        return False
    return order >= 0 and mmap.PAGESIZE << order <= HUGE


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] in RAM at an address that is a multiple of ALIGN."""
    if nbytes >= HUGE:
        return mapped(nbytes)
    room = torch.empty(nbytes + ALIGN, dtype=torch.uint8)
    skip = -room.data_ptr() % ALIGN
    return room[skip : skip + nbytes]


class MemoryTier(Tier):
    """Regions of RAM."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self.ledger = name, ledger

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        size = aligned(nbytes)
        with self.ledger.booked(size, what):
            return Region(self._buffer(size, what), 0, nbytes, dtype)

    def receive_reads(self, region: Region) -> None:
        if region.place.nbytes >= HUGE:
            use_huge_pages(region.place)

    def _buffer(self, nbytes: int, what: str) -> torch.Tensor:
        """Return the memory of a region. nbytes is a multiple of ALIGN; `what` is for errors."""
        return aligned_buffer(nbytes)

    def free(self, region: Region, what: str) -> None:
        self.ledger.release(aligned(region.nbytes), what)

    def view(self, region: Region) -> torch.Tensor:
        place: torch.Tensor = region.place
        return place[region.start : region.start + region.nbytes].view(region.dtype)

    def load(self, region: Region, target: torch.Tensor) -> None:
        load_kernels().convert(self.view(region), target.view(-1))
        self.count(read=region.nbytes)

    def store(self, source: torch.Tensor, region: Region) -> None:
        load_kernels().convert(source.view(-1), self.view(region))
        self.count(written=region.nbytes)


def keep(value: object) -> None:
    """Let an object live until the process has ended, beyond Python's own end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
