"""RAM: the host tier, and on a machine without a GPU the device tier too.

A page fault costs as much as computing 4 KiB of activations, so two measures keep them few. Regions are mapped in huge
pages where the kernel gives them. What torch frees between layers stays in this process's heap, if there is room for
that: tensors of up to 32 MB, and 64 MB at the heap's end. With more, the gaps between tensors grew beyond what any plan
allows for. Where a job leaves no room for gaps, blocks of 64 KiB or more get pages of their own: in a job of 120 MB the
gaps took 2 MB then, and not 43, and it was no slower. (From 256 KiB on was not enough: shorter blocks made gaps that
longer ones fell into.)
"""

import contextlib
import ctypes
import mmap
from functools import cache

import torch

from flexengine.kernels import load as load_kernels
from flexengine.tier.base import ALIGN, Home, Tier, aligned
from flexengine.tier.ledger import Ledger

HUGE = 2 << 20  # bytes from which regions are mapped for themselves
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_freed(room: bool = True) -> None:
    """Let malloc keep freed memory for reuse: much if there is room for it, else little. Does nothing without glibc.

    Threads started from now on share the main heap, so that lanes reuse what others freed.

    With little room, a block of 64 KiB or more gets pages of its own unless a gap in the heap holds it. Such pages go
    back to the system when the block is freed. In the heap a block that stays may lie above it; then they do not.
    """
    mapped_from, kept = (32 << 20, 64 << 20) if room else (64 << 10, 1 << 20)
    with contextlib.suppress(OSError, AttributeError):
        libc = _libc()
        libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
        libc.mallopt(_M_TRIM_THRESHOLD, kept)
        libc.mallopt(_M_ARENA_MAX, 1)


def give_back_freed() -> None:
    """Returns what malloc keeps to the system."""
    with contextlib.suppress(OSError, AttributeError):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    """The C library. Cached: every CDLL object is part of a reference cycle."""
    return ctypes.CDLL(None)


def mapped(nbytes: int) -> torch.Tensor:
    """uint8 `[nbytes]`, more than 0, in pages of its own, in huge ones where the kernel gives them."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """uint8 `[nbytes]` in RAM whose address is a multiple of ALIGN."""
    if nbytes >= HUGE:
        return mapped(nbytes)
    room = torch.empty(nbytes + ALIGN, dtype=torch.uint8)
    skip = -room.data_ptr() % ALIGN
    return room[skip : skip + nbytes]


class MemoryTier(Tier):
    """Regions of RAM."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self.ledger = name, ledger

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Home:
        size = aligned(nbytes)
        with self.ledger.booked(size, what):
            return Home(self._buffer(size, what), 0, nbytes, dtype)

    def _buffer(self, nbytes: int, what: str) -> torch.Tensor:
        """The memory of a region of `nbytes`, a multiple of ALIGN. what: for errors."""
        return aligned_buffer(nbytes)

    def free(self, region: Home, what: str) -> None:
        self.ledger.release(aligned(region.nbytes), what)

    def view(self, region: Home) -> torch.Tensor:
        place: torch.Tensor = region.place
        return place[region.start : region.start + region.nbytes].view(region.dtype)

    def load(self, region: Home, target: torch.Tensor) -> None:
        load_kernels().convert(self.view(region), target.view(-1))
        self.count(read=region.nbytes)

    def store(self, source: torch.Tensor, region: Home) -> None:
        load_kernels().convert(source.view(-1), self.view(region))
        self.count(written=region.nbytes)
