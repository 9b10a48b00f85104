"""The disk tier: checkpoint shards, read in place, and one spill file for tensors that the policy offloads to disk.

The page cache is not a tier: no ledger books it. Files of a checkpoint that are in it are copied from there, and stay.
Others are read with direct I/O, without the page cache. If the disk limits the job, reads through the page cache are
tried, and used if they are faster; each chunk is then dropped from the page cache after its read. The spill file uses
direct I/O if its file system supports direct I/O.

A direct read goes straight into a weight slot where the slot's layout lets it (`plan.sizes.slot_offsets`), so one
system call reads up to 64 MiB, and no thread has to wake in between. Everything else passes through buffers of 4 MiB.
"""

import contextlib
import errno
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.errors import size as size_text
from flexengine.kernels import load as load_kernels
from flexengine.system.limits import usable_cores
from flexengine.tier.base import ALIGN, Ledger, Region, Tier, aligned
from flexengine.tier.disk_reads import CHUNK, Chunk, DiskRead, chunks, disk_reads
from flexengine.tier.file import MOST_PARTS, FasterWay, File, memory, read_fully, write_fully
from flexengine.tier.memory import HUGE, aligned_buffer, mapped

SHORT = CHUNK // 4  # bytes; the helper threads do shorter reads, at the same time
# Bytes; rows at most this far apart share one read. With a read for each, 2,048 rows of 4 KiB in a table of 206 MB took
# 360 ms; with gaps of 64 KiB 219, of 128 157, of 256 136. 500 rows took 65, 67, 57 and 68 ms.
GAP = 128 << 10
HELPERS = 2  # threads that convert chunks, do short reads, and write
READERS, CORES = HELPERS + 1, 4  # most threads that do long reads, each with a buffer; cores for each
DIRECT_READERS = 2  # threads that do long direct reads on few cores
_NO_TMPFILE = (errno.ENOTSUP, errno.EISDIR, errno.ENOENT)  # errors of file systems and kernels without O_TMPFILE

Ring = queue.SimpleQueue[torch.Tensor]


class DiskTier(Tier):
    """Checkpoint files by offset, and a spill file under `directory` that vanishes with the process.

    The spill file never has a name (O_TMPFILE) or loses its name right after it was opened, so no file remains however
    the process ends. Its directory is made if it is missing. `way` selects direct or cached reads for checkpoint files.
    """

    def __init__(
        self, name: str, ledger: Ledger, directory: Path, way: FasterWay | None = None, readers: int | None = None
    ) -> None:
        self.name, self.ledger, self.directory, self.way = name, ledger, directory, way or FasterWay()
        # Threads that do long reads at the same time, by whether these are direct. With few cores one sequential reader
        # of the page cache is fastest, as the kernel reads ahead for it; with many, one thread cannot take what a fast
        # disk or the page cache gives. Of direct reads two are under way also with few cores, so that the disk has work
        # while one of the threads wakes up: layers of 101 MB took 37 instead of 41 ms beside products.
        most = readers or max(1, min(READERS, int(usable_cores()) // CORES))
        self.readers = {False: most, True: readers or max(DIRECT_READERS, most)}
        self._files: dict[Path, File] = {}
        self._spill: File | None = None
        self._end = 0
        self._made: list[Path] = []
        self._free: list[tuple[int, int]] = []  # (start, nbytes) of freed regions
        self._lock = threading.Lock()
        self._local = threading.local()
        self._ring: Ring | None = None
        self._reading, self._counted = 0, 0.0  # threads that read chunks; end of the time that `way` has measured
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        size = aligned(nbytes)
        with self.ledger.booked(size, what), self._lock:
            return Region(*self._place(size, what), nbytes, dtype)

    def _place(self, size: int, what: str) -> tuple[File, int]:
        """Return the spill file and the offset of `size` free bytes in it. Raise InvalidInput if the disk is full."""
        if self._spill is None:
            try:
                self._made = [folder for folder in (self.directory, *self.directory.parents) if not folder.exists()]
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._spill = _nameless(self.directory)
            except OSError as error:
                raise InvalidInput(f"offload directory {self.directory}: {error}; set --offload-dir") from error
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return self._spill, start
        try:
            os.posix_fallocate(self._spill.cached, self._end, max(size, ALIGN))
        except OSError as error:
            error.filename = str(self.directory)
            remedy = "another process may use the space: run the same command again when there is room, or give another"
            fault = f"{self.name}: {self.directory}: no room for {size_text(size)} of {what}: {error}"
            raise InvalidInput(f"{fault}; {remedy} --offload-dir") from error
        self._end += size
        return self._spill, self._end - size

    def free(self, region: Region, what: str) -> None:
        self.ledger.release(aligned(region.nbytes), what)
        with self._lock:
            self._free.append((region.start, aligned(region.nbytes)))
            if not self.ledger.used:
                self._free, self._end = [], 0

    def checkpoint(self, path: Path, start: int, nbytes: int, dtype: torch.dtype) -> Region:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = File(path, os.O_RDONLY)
                except OSError as error:
                    raise BadCheckpoint(f"{path}: {error}") from error
            file = self._files[path]
        size = os.fstat(file.cached).st_size
        if start + nbytes > size:
            raise BadCheckpoint(f"{path} is truncated: bytes up to {start + nbytes:,} are needed, it has {size:,}")
        return Region(file, start, nbytes, dtype)

    def load_all(self, pairs: Sequence[tuple[Region, torch.Tensor]]) -> None:
        """Load several pairs: neighbouring regions share one read, in file order, and helper threads convert chunks.

        The calling thread does the long reads, alone or with others (`readers`). The helper threads do the short reads
        (single embedding rows) at the same time, since each of these waits for the disk.
        """
        reads = disk_reads([(region, target.view(-1)) for region, target in pairs])
        short = [read for read in reads if read.nbytes < SHORT]
        long = [read for read in reads if read.nbytes >= SHORT]
        if len(reads) == 1 == len(short):
            self._read_short(short.pop())
        readers = self.readers[bool(long) and self._reads_direct(long[0].file)]
        shared = chunks(long, self._reads_direct, readers)
        waiting, streams = list[Future[None]](), list[Future[None]]()
        try:
            waiting += (self._helpers().submit(self._read_short, read) for read in short)
            for i in range(1, min(readers, -(-sum(read.nbytes for read in long) // CHUNK))):
                others = self._pool("flexengine-reads", max(self.readers.values()) - 1)
                streams.append(others.submit(self._stream, shared, waiting, i < self.readers[False]))
            self._stream(shared, waiting, True)
        finally:  # wait for all reads even on error: other threads still write to the targets
            streams = [each for each in streams if not each.cancel()]  # threads may be busy with other loads
            wait(streams)
            wait(waiting)
        for done in (*streams, *waiting):
            done.result()
        self.count(read=sum(region.nbytes for region, _ in pairs))

    def pick(self, region: Region, rows: torch.Tensor, width: int, target: torch.Tensor) -> None:
        """Copy rows of the region, see `Tier.pick`. Rows that are at most GAP bytes apart share one read."""
        starts = region.start + rows * width
        parts = [(starts[a:b], target[a:b]) for a, b in _row_ranges(starts, width)]
        self._side_by_side([partial(self._read_rows, region.place, *part) for part in parts])
        self.count(read=target.nbytes)

    def _read_rows(self, file: File, starts: torch.Tensor, target: torch.Tensor) -> None:
        """Read rows, ascending, in this thread by one read of at most SHORT bytes. starts: int64 [n], first byte of
        each row. target: uint8 [n, bytes of a row]."""
        width, end = target.shape[1], int(starts[-1]) + target.shape[1]
        low = int(starts[0]) // ALIGN * ALIGN
        buffer = self._short()[: aligned(end) - low]
        self._read(file, [memory(buffer)], low, end, self._reads_direct(file))
        every = buffer.as_strided((len(buffer) - width + 1, width), (1, 1))  # row i starts at byte i
        torch.index_select(every, 0, starts - low, out=target)

    def _side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run the calls in the helper threads. Raise the first error after all have ended, as they use tensors."""
        under_way = [self._helpers().submit(call) for call in calls]
        wait(under_way)
        for done in under_way:
            done.result()

    def _helpers(self) -> ThreadPoolExecutor:
        return self._pool("flexengine-disk", HELPERS)

    def _pool(self, name: str, threads: int) -> ThreadPoolExecutor:
        with self._lock:
            return self._pools.get(name) or self._pools.setdefault(name, ThreadPoolExecutor(threads, name))

    def _buffers(self) -> Ring:
        """Return the queue of chunk buffers for long reads: one chunk is read while others are converted."""
        with self._lock:
            if self._ring is None:
                ring, count = Ring(), HELPERS + 1
                room = mapped(HUGE + count * CHUNK, huge=True)
                for buffer in room[-room.data_ptr() % HUGE :][: count * CHUNK].view(count, CHUNK):
                    ring.put(buffer)
                self._ring = ring
            return self._ring

    def _next(self, chunks: Iterator[Chunk]) -> Chunk | None:
        with self._lock:  # several threads take chunks, each once
            return next(chunks, None)

    def _stream(self, chunks: Generator[Chunk, None, None], waiting: list[Future[None]], cached: bool) -> None:
        """Read chunks until none is left, or a read of any thread fails. cached: whether to go on after a cached read,
        as `way` may change in a load; if not, the other threads read the rest."""
        try:
            for chunk in iter(partial(self._next, chunks), None):
                self._read_chunk(chunk, waiting)
                if not cached and not chunk.direct:
                    return
        except BaseException:
            with self._lock:
                chunks.close()
            raise

    def _read_chunk(self, chunk: Chunk, waiting: list[Future[None]]) -> None:
        """Read a chunk. Add the conversion of a large buffer, which may still run, to `waiting`."""
        nbytes = chunk.buffered
        if nbytes <= SHORT:
            buffer = self._short() if nbytes else None
            self._noted(chunk, buffer)
            if buffer is not None:
                self._convert(chunk, buffer)
            return
        ring = self._buffers()
        buffer = ring.get()
        try:
            self._noted(chunk, buffer)
        except BaseException:
            ring.put(buffer)
            raise
        waiting.append(self._helpers().submit(self._convert, chunk, buffer, ring))

    def _noted(self, chunk: Chunk, buffer: torch.Tensor | None) -> None:
        """Read a chunk into the targets and the buffer. Add the time to the measurement of `way` if that can choose how
        to read, and the disk was read. Time in which several threads read counts once."""
        file, ended = chunk.read.file, False
        needed, targets = min(chunk.high, chunk.read.end), chunk.targets(buffer)
        call = partial(self._read, file, targets, chunk.low, needed, chunk.direct)
        if file is self._spill or file.direct is None:
            call()
            return
        with self._lock:
            if not self._reading:
                self._counted = time.perf_counter()
            self._reading += 1
        try:
            ended = call()  # False: from the page cache, which tells nothing about the disk
        finally:
            with self._lock:
                self._reading -= 1
                began, self._counted = self._counted, time.perf_counter()
                if ended and chunk.direct is self.way.direct:  # else another thread has changed it meanwhile
                    self.way.note(chunk.high - chunk.low, began, self._counted)

    def _convert(self, chunk: Chunk, buffer: torch.Tensor, ring: Ring | None = None) -> None:
        """Copy what the buffer holds of a chunk to the targets, and put the buffer back into the ring it is from."""
        try:
            for low, high, part in chunk.in_buffer(buffer):
                self._deliver(chunk.read, part, low, high)
        finally:
            if ring is not None:
                ring.put(buffer)

    def _short(self) -> torch.Tensor:
        if not hasattr(self._local, "short"):
            self._local.short = aligned_buffer(SHORT + 2 * ALIGN)
        buffer: torch.Tensor = self._local.short
        return buffer

    def _read_short(self, read: DiskRead) -> None:
        low, high = read.start // ALIGN * ALIGN, aligned(read.end)
        buffer = self._short()[: high - low]
        self._read(read.file, [memory(buffer)], low, read.end, self._reads_direct(read.file))
        self._deliver(read, buffer, low, high)

    def _reads_direct(self, file: File) -> bool:
        return file.direct is not None and (file is self._spill or self.way.direct)

    def _read(self, file: File, targets: Sequence[memoryview], low: int, needed: int, direct: bool) -> bool:
        """Fill buffers from byte `low` of the file on, and return whether the disk was read. Bytes that the page cache
        holds already are copied and stay; of a user's file, others are dropped from it. Raise BadCheckpoint if the file
        ends before byte `needed`."""
        asks = file is not self._spill and not self.way.held  # held: the disk is measured
        if asks and len(targets) <= MOST_PARTS and file.read_cached(targets, low, needed - low):
            return False
        got = read_fully(file, targets, low, direct)
        if got < needed - low:
            missing = needed - low - got
            raise BadCheckpoint(f"{file.path}: the file ended {missing:,} bytes early; another process may have changed"
                                " it: restore the file and start again")  # fmt: skip
        if file is not self._spill and (not direct or file.direct is None):  # None: direct I/O was refused just now
            grid = low // CHUNK * CHUNK
            os.posix_fadvise(file.cached, grid, aligned(low + sum(map(len, targets))) - grid, os.POSIX_FADV_DONTNEED)
        return True

    def _deliver(self, read: DiskRead, buffer: torch.Tensor, low: int, high: int) -> None:
        """Convert the part of each region of `read` that lies in file bytes low .. high, which `buffer` holds."""
        for region, flat, begin, end in read.between(low, high):
            width = region.dtype.itemsize
            source = buffer[begin - low : end - low]
            if source.data_ptr() % width:
                source = source.clone()
            first = (begin - region.start) // width
            load_kernels().convert(source.view(region.dtype), flat[first : first + len(source) // width])

    def store_all(self, pairs: Sequence[tuple[torch.Tensor, Region]]) -> None:
        """Store several pairs: neighbouring regions share one write, and the helper threads make several writes at the
        same time, since each waits for the disk."""
        writes: list[list[tuple[torch.Tensor, Region]]] = []
        for source, region in sorted(pairs, key=lambda pair: (id(pair[1].place), pair[1].start)):
            last = writes[-1][-1][1] if writes else None
            if last and (last.place, last.start + last.nbytes) == (region.place, region.start):
                writes[-1].append((source, region))
            else:
                writes.append([(source, region)])
        if len(writes) == 1:
            self._write(writes[0])
        else:
            self._side_by_side([partial(self._write, write) for write in writes])
        self.count(written=sum(region.nbytes for _, region in pairs))

    def _write(self, pairs: Sequence[tuple[torch.Tensor, Region]]) -> None:
        """Write neighbouring regions."""
        file: File = pairs[0][1].place
        if file is not self._spill:
            raise ValueError(f"{file.path} is a file of the user, which is never written; store to an allocated region")
        parts = list[torch.Tensor]()
        for source, region in pairs:
            if region.start % ALIGN:  # the padding of the last block would overwrite other regions
                raise ValueError(f"a write begins at byte {region.start:,}; it must begin at a multiple of {ALIGN:,}")
            flat = source.view(-1).view(torch.uint8)
            if file.direct is not None and (flat.data_ptr() % ALIGN or flat.numel() % ALIGN):
                padded = aligned_buffer(aligned(region.nbytes))
                padded[: flat.numel()].copy_(flat)
                flat = padded
            parts.append(flat)
        write_fully(file, [memory(part) for part in parts], pairs[0][1].start)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()
        for file in (*self._files.values(), *([self._spill] if self._spill else [])):
            with contextlib.suppress(OSError):
                file.close()
        self._files, self._spill = {}, None
        for folder in self._made:  # rmdir fails, as it should, if another process or disk has files there
            with contextlib.suppress(OSError):
                folder.rmdir()


def _nameless(directory: Path) -> File:
    """Return a new file in `directory` that vanishes when it is closed."""
    try:
        handle = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        handle, path = tempfile.mkstemp(prefix="flexengine-", suffix=".spill", dir=directory)
        os.close(handle)
        file = File(path, os.O_RDWR)
        os.unlink(path)
        return file
    try:
        file = File(f"/proc/self/fd/{handle}", os.O_RDWR)
    finally:
        os.close(handle)
    file.path = directory / "spill"  # for messages
    return file


def _row_ranges(starts: torch.Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Yield (a, b) such that one read takes rows a .. b - 1: gaps of at most GAP bytes, at most SHORT bytes in all."""
    after_gap = torch.nonzero(starts.diff() > GAP + width).flatten() + 1
    bounds = [0, *after_gap.tolist(), len(starts)] if len(starts) else []
    for a, b in pairwise(bounds):
        while a < b:
            within = int(torch.searchsorted(starts[a:b], starts[a] + SHORT - width, right=True))
            yield a, a + within
            a += within
