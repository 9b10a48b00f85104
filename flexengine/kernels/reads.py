"""The native threads that read many records at once: reads.cpp, called through ctypes, which releases the GIL."""

import ctypes
import weakref
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.kernels import load, structs
from flexengine.kernels.cpu import NativeKernels


@dataclass(frozen=True)
class RecordReads:
    """Records of a file to read, each to a row of memory."""

    numbers: Tensor  # int64 [n], rising: record i begins at byte i x bytes of a row
    places: Tensor  # int64 [n], row of each record
    # int64 [requests + 1]: request r takes the records bounds[r] .. bounds[r + 1] - 1 of `numbers`, and what lies
    # between them, by one read.
    bounds: Tensor
    rows: Tensor  # uint8 [room, bytes of a row], contiguous


class Readers:
    """Threads that read at the same time. One call at a time. scratch: uint8 [threads, stride], at an address for
    direct I/O; the last thread is the caller's. A thread takes the bytes of a gap, or a whole request that rows cannot
    take, to its row."""

    def __init__(self, library: ctypes.CDLL, scratch: Tensor) -> None:
        self._scratch, self._read = scratch, library.flex_reads
        library.flex_readers_open.restype = c_void_p
        arguments = c_int64(len(scratch) - 1), c_void_p(scratch.data_ptr()), c_int64(scratch.shape[1])
        self._threads = c_void_p(library.flex_readers_open(*arguments))
        if not self._threads:
            raise MemoryError("no memory for the threads that read records")
        self._finish = weakref.finalize(self, library.flex_readers_close, self._threads)
        self._finish.atexit = False  # a forked process has no such threads to wait for

    def read(self, records: RecordReads, fd: int, align: int, straight: bool) -> Tensor:
        """Return which requests were read in full: uint8 [requests].

        Args:
            records: to read; the caller has checked that all numbers and places exist.
            fd: the file.
            align: file offsets and lengths of reads are multiples of it. 1 for reads through the page cache, which are
                dropped from there.
            straight: whether `rows` can take the bytes from the disk: its address and its rows are multiples of align.
        """
        done = torch.zeros(len(records.bounds) - 1, dtype=torch.uint8)
        tensors = records.numbers, records.places, records.bounds, records.rows, done
        call = structs.Reads(*(t.data_ptr() for t in tensors), len(done), records.rows.shape[1], align, fd, straight)
        self._read(self._threads, ctypes.byref(call))
        return done

    def close(self) -> None:
        """End the threads."""
        self._finish()


def library() -> ctypes.CDLL | None:
    """Return the native kernels' library; None if it cannot be built, or is not chosen."""
    kernels = load()
    return kernels.library if isinstance(kernels, NativeKernels) else None
