"""Reads of many records of neurons at once, straight into rows of memory, and reads of experts.

A disk answers many small requests at the same time faster than one after the other, and one larger request faster than
two. On a virtual disk with 32 requests in flight, a request of 4 KiB took 14 us, of 16 KiB 25 us and of 64 KiB 50 us;
from 128 KiB on, the disk gave its full rate of 1.2 to 1.3 GB/s. bench/flash/disk.py measures this.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flexengine.codec import records as codec
from flexengine.guests.flash.bundles import Bundle
from flexengine.kernels import reads
from flexengine.kernels.reads import Readers, RecordReads
from flexengine.tier.base import ALIGN, Region, aligned
from flexengine.tier.file import File, memory, read_fully
from flexengine.tier.memory import aligned_buffer
from flexengine.worker.on_demand import DemandReads

T = TypeVar("T")
THREADS = 32  # requests in flight; 16 gave 0.77 to 1.0 of their rate, and one 0.25 to 0.5
# Bytes between two wanted records that are read too. Two requests took 1.1 to 1.2 times as long as one with a gap of
# 8 KiB, 1.0 to 1.1 times with 12 KiB, 0.9 to 1.0 times with 16 KiB and 0.8 to 0.9 times with 24 KiB.
GAP = 12 << 10
MOST = 128 << 10  # bytes of a request; larger ones are no faster, and leave threads without work


def requests(numbers: np.ndarray, nbytes: int, gap: int = GAP, most: int = MOST) -> np.ndarray:
    """Return the bounds of requests, int64 [n + 1]: request r takes numbers[bounds[r]] .. numbers[bounds[r + 1] - 1].

    Args:
        numbers: int64, rising, at least one.
        gap: bytes between two wanted records that are read too, at most.
        most: bytes of a request, at most; a single record may have more.
    """
    far = np.diff(numbers) > 1 + gap // nbytes
    runs = np.concatenate(([0], np.cumsum(far)))
    first = numbers[np.concatenate(([0], np.flatnonzero(far) + 1))]
    part = (numbers - first[runs]) // max(1, most // nbytes)
    ends = np.flatnonzero(far | (np.diff(part) != 0)) + 1
    return np.concatenate(([0], ends, [len(numbers)])).astype(np.int64)


class RecordReader:
    """Context manager that holds the files of bundles open, and the threads that read them. Raise BadCheckpoint if a
    file is missing, or has another size than its records.

    Args:
        threads: requests in flight, at most, with the caller's.
        gap: see `requests`.
    """

    def __init__(self, bundles: Iterable[Bundle], threads: int = THREADS, gap: int = GAP) -> None:
        known, self.gap = list(bundles), gap
        stride = max([MOST, *(bundle.form.nbytes for bundle in known)]) + 2 * ALIGN
        self.nbytes = threads * stride  # of memory that the threads use
        self._scratch = aligned_buffer(self.nbytes).view(threads, stride)
        self._turn = threading.Lock()
        self._ended = ExitStack()
        with self._ended as ended:
            self._files = {bundle.path: ended.enter_context(closing(_BundleFile(bundle))) for bundle in known}
            library = reads.library()
            self._native = ended.enter_context(closing(Readers(library, self._scratch))) if library else None
            self._ahead = ended.enter_context(ThreadPoolExecutor(1, "flexengine-records-ahead"))
            self._pool = ended.enter_context(ThreadPoolExecutor(threads, "flexengine-records"))
            self._ended = ended.pop_all()

    def read(self, bundle: Bundle, numbers: Tensor, target: Tensor, places: Tensor) -> int:
        """Read records of a bundle to rows of `target`. Return the bytes of all requests, with gaps between records.

        The bytes come straight from the disk if the address of `target` and the bytes of a record are multiples of what
        direct I/O of the file needs, 512 or 4096 bytes; else they are copied once. A read that fails is retried.

        Args:
            bundle: one that the reader was made with.
            numbers: int64 [n], the neurons, rising.
            target: uint8 [room, bundle.form.nbytes], contiguous, in RAM.
            places: int64 [n], row of each neuron.

        Raises:
            BadCheckpoint: the file has become shorter.
            OSError: a read failed, and so did its retries.
        """
        _check(bundle, numbers, target, places)
        if not len(numbers):
            return 0
        numbers, nbytes = numbers.contiguous(), bundle.form.nbytes
        bounds = requests(numbers.numpy(), nbytes, self.gap)
        records = RecordReads(numbers, places.contiguous(), torch.from_numpy(bounds), target)
        with self._turn:
            self._read(self._files[bundle.path], records)
        ends = numbers.numpy()
        return int((ends[bounds[1:] - 1] - ends[bounds[:-1]] + 1).sum()) * nbytes

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Begin a call that reads, in a thread of the reader, and return its end. Calls run one after the other."""
        return self._ahead.submit(call)

    def _read(self, file: "_BundleFile", records: RecordReads) -> None:
        """Read by native threads. Without them, and for what they could not read, use threads of Python, which retry.
        Raise the first error after all have ended."""
        missing = list(range(len(records.bounds) - 1))
        if self._native is not None:
            done = self._native.read(records, *file.manner(records.rows))
            missing = torch.nonzero(done == 0).view(-1).tolist()
        if not missing:
            return

        def read(thread: int) -> None:
            for request in missing[thread :: len(self._scratch)]:
                file.read(records, request, self._scratch[thread])

        under_way = [self._pool.submit(read, thread) for thread in range(min(len(missing), len(self._scratch)))]
        wait(under_way)  # for all, even on error: the threads write to the target
        for each in under_way:
            each.result()

    def __enter__(self) -> "RecordReader":
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads and close the files."""
        self._ended.close()


def _check(bundle: Bundle, numbers: Tensor, target: Tensor, places: Tensor) -> None:
    """Raise ValueError if a record or a row does not exist: it would be read to memory of others."""
    if target.dtype != torch.uint8 or target.shape[1:] != (bundle.form.nbytes,) or not target.is_contiguous():
        fault = f"rows must be contiguous uint8 [n, {bundle.form.nbytes}]"
        raise ValueError(f"{fault}, not {target.dtype} {list(target.shape)}")
    if not (numbers.dtype == places.dtype == torch.int64 and numbers.shape == places.shape and numbers.dim() == 1):
        raise ValueError("numbers and places must be int64 [n] both")
    if not len(numbers):
        return
    wanted, rows = numbers.numpy(), places.numpy()
    first, last, low, high = wanted[0], wanted[-1], rows.min(), rows.max()
    if first < 0 or last >= bundle.neurons or low < 0 or high >= len(target):
        raise ValueError(f"records {first} to {last} of {bundle.neurons} for rows {low} to {high} of {len(target)}")
    if not (wanted[1:] > wanted[:-1]).all():
        raise ValueError("the numbers of records must rise")


class _BundleFile:
    """The file of a bundle, held open."""

    def __init__(self, bundle: Bundle) -> None:
        bundle.check()
        self._bundle = bundle
        self._file = File(bundle.path, os.O_RDONLY)
        # Offsets, lengths and addresses of direct reads are multiples of so many bytes; 1 if there are none.
        self.align = self._alignment()
        os.posix_fadvise(self._file.cached, 0, 0, os.POSIX_FADV_RANDOM)

    def _alignment(self) -> int:
        """Return the smallest alignment with which a direct read works."""
        for size in (codec.ALIGN, ALIGN):
            buffer = aligned_buffer(2 * ALIGN)[size : 2 * size]
            with suppress(OSError):  # other errors than EINVAL come again when the records are read
                if self._file.direct is not None:
                    os.preadv(self._file.direct, [memory(buffer)], size)
                    return size
        self._file.direct = None
        return 1

    def manner(self, rows: Tensor) -> tuple[int, int, bool]:
        """Return how native threads read to `rows`: file descriptor, align and straight of `Readers.read`."""
        if (fd := self._file.direct) is None:
            return self._file.cached, 1, True
        return fd, self.align, rows.data_ptr() % self.align == 0 and rows.shape[1] % self.align == 0

    def read(self, records: RecordReads, request: int, buffer: Tensor) -> None:
        """Read one request to `buffer`, and copy the records to their rows. buffer: uint8 [n], at a multiple of ALIGN,
        of at least the bytes of the request and 2 * ALIGN.

        Raises:
            BadCheckpoint: the file is too short.
            OSError: a read failed, and so did its retries.
        """
        low, high = records.bounds[request : request + 2].tolist()
        numbers, nbytes = records.numbers[low:high], records.rows.shape[1]
        start, end = int(numbers[0]) * nbytes, (int(numbers[-1]) + 1) * nbytes
        begin, direct = start // ALIGN * ALIGN, self._file.direct is not None
        got = read_fully(self._file, [memory(buffer[: aligned(end - begin)])], begin, direct)
        if got < end - begin:
            raise self._bundle.fault(f"ends before byte {end:,}")
        if not direct:
            os.posix_fadvise(self._file.cached, begin, end - begin, os.POSIX_FADV_DONTNEED)
        all_read = buffer[start - begin : end - begin].view(-1, nbytes)
        records.rows[records.places[low:high]] = all_read[numbers - numbers[0]]

    def close(self) -> None:
        self._file.close()


PIECE = 16 << 20  # bytes; experts of 352 MB were read at 2.20 GB/s in such pieces, at 2.22 whole, at 1.99 in 8 MiB

Pair = tuple[Region, Tensor]  # source and target of a read


@dataclass(eq=False)
class ExpertRead:
    """One expert that is read."""

    left: deque[list[Pair]]  # pieces that have not begun
    early: bool = False  # whether it was guessed
    # Where it is read to, for the caller: uint8, RAM on the way to a GPU, or a row of the memory.
    buffer: Tensor | int = 0
    # Set when all is read, or a piece failed; never if the read was stopped.
    done: Future[None] = field(default_factory=Future)
    nbytes: int = 0  # bytes of the pieces that have begun


class ExpertReads:
    """Reads in one thread: first experts that a layer needs now, then those that a guess named.

    An early read is done in pieces. Between two pieces it can be stopped, and needed reads go first, so a wrong guess
    costs at most one piece. An early read that proves right goes on, and takes its place among the needed ones.

    Args:
        disk: reads the checkpoint.
        stages: RAM through which experts are read to a GPU; None if they are read straight into the memory.
    """

    def __init__(self, disk: DemandReads, stages: list[Tensor] | None) -> None:
        self.disk, self.stages = disk, stages
        self._needed, self._early, self._lock = deque[ExpertRead](), deque[ExpertRead](), threading.Lock()
        self._thread = ThreadPoolExecutor(1, "flexengine-experts", lambda: torch.set_grad_enabled(False))

    def begin(self, pairs: Iterable[Pair], early: bool = False, buffer: Tensor | int = 0) -> ExpertRead:
        """Begin to read one expert. early, buffer: as in ExpertRead."""
        read = ExpertRead(deque(pieces(pairs)), early, buffer)
        count = len(read.left)
        with self._lock:
            (self._early if early else self._needed).append(read)
        for _ in range(count):  # each reads a piece or more of any read, so there are never too few
            self._thread.submit(self._step)
        return read

    def need(self, read: ExpertRead) -> None:
        """Have an early read go on before other early ones."""
        with self._lock:
            if read in self._early:
                self._early.remove(read)
                self._needed.append(read)

    def stop(self, read: ExpertRead) -> None:
        """Drop what has not begun of an early read, and an error of it.

        A piece may still be read. Its target can be given to another read at once, as that begins after the piece.
        """
        with self._lock, suppress(ValueError):
            self._early.remove(read)

    def _step(self) -> None:
        """Read all that is left of the first needed read, or one piece of the first early one."""
        with self._lock:
            queue = self._needed or self._early
            if not queue:
                return
            read, pairs = queue[0], list[Pair]()
            while read.left and (queue is self._needed or not pairs):
                pairs += read.left.popleft()
            read.nbytes += sum(region.nbytes for region, _ in pairs)
        error = None
        try:
            self.disk.load_all(pairs)
        except BaseException as failure:
            error = failure
        with self._lock:
            for queue in (self._needed, self._early):  # in none if it was stopped
                if read in queue and (error is not None or not read.left):
                    queue.remove(read)
                    if error is None:
                        read.done.set_result(None)
                    else:
                        read.done.set_exception(error)

    def close(self) -> None:
        """Wait for the piece that is read, and drop all others."""
        self._thread.shutdown(cancel_futures=True)


def pieces(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield pairs of at most PIECE bytes together. Longer ones are cut."""
    run, size = list[Pair](), 0
    for region, target in pairs:
        flat, width = target.view(-1), region.dtype.itemsize
        for start in range(0, region.nbytes, PIECE):
            part = region.part(start, min(PIECE, region.nbytes - start))
            if size + part.nbytes > PIECE:
                yield run
                run, size = [], 0
            run.append((part, flat[start // width : (start + part.nbytes) // width]))
            size += part.nbytes
    if run:
        yield run
