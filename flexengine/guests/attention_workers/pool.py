"""Memory and processors of an attention worker, which all its engines share.

Pages may be in a file: it is mapped to memory, so the system reads pages that attention reads. Lines of a file that is
larger than free RAM are read from disk again and again. So only sequences that find no room in the memory of other
workers are there (Lamina, section 3.6: memory beyond the device's; InstInfer: attention beside a disk).
"""

import mmap
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from flexengine.errors import InvalidInput, size_within
from flexengine.guests.attention_workers.devices import PageDevice

T = TypeVar("T")
MOST_ENGINES = 256  # that are connected at the same time
RECORDS = 128 << 20  # bytes of page tables and questions, unless another limit is given
RECORD_BYTES = 4096  # of a record, beside its body
LEAST_RECORDS, MOST_RECORDS = 16 << 20, 2 << 30  # bytes of --worker-mem that are kept for records
LOOK_SECONDS = 0.2  # between two looks at whether a connection that waits has been replaced
SAY_SECONDS = 2.0  # between two messages to an engine that waits until it may measure
ALONE_SECONDS = 60.0  # for which an engine may measure while others wait
MEASURED = 64 << 20  # bytes that are written and read to measure a disk


class WorkerPool:
    """What engines share. Threads may call all methods at the same time.

    Questions of all engines are computed one after the other, in the order in which they came, so each has all
    processors. Answers are sent by other threads: an engine that does not read them delays no other.

    Attributes:
        memory: most bytes of pages, of all engines together.
        folder: directory of the files that hold pages; None if pages are in memory.
        device: where pages in memory are, and what attends to pages.
        kind: of memory for pages: ram, file or device.
        rate: bytes per second of reads from a file, or of attention on a device; 0 if engines measure it.
        taken: bytes of pages that engines hold.
        records: most bytes of page tables and of questions that wait, of all engines together.
        number: drawn at random; engines compare it, as a worker may have several addresses.
        thread: the thread that computes.
    """

    def __init__(
        self, memory: int, folder: Path | None = None, records: int = RECORDS, device: PageDevice | None = None
    ) -> None:
        """Measure reads from a file, if pages are in files. Raise InvalidInput if there cannot be a file."""
        self.memory, self.taken, self.folder, self.number = memory, 0, folder, secrets.randbits(62)
        self.device = PageDevice() if device is None else device
        self.kind = self.device.kind if folder is None else "file"
        self.rate = self.device.rate if folder is None else read_rate(folder, memory)
        self.records, self._recorded = records, 0
        self._measured = threading.Lock()  # held while an engine measures this worker
        # name of this engine, when it began, and a function that ends its connection
        self._measurer: tuple[str, float, Callable[[str], None]] | None = None
        self._lock = threading.Lock()
        self._members: dict[int, Callable[[], None]] = {}  # by number of the engine
        self.thread = ThreadPoolExecutor(1, "flexengine-attention", self._begin_thread)

    def _begin_thread(self) -> None:
        torch.set_grad_enabled(False)
        self.device.begin_thread()

    def take(self, nbytes: int) -> bool:
        """Take memory. Return False, without taking any, if fewer bytes are free."""
        with self._lock:
            if nbytes > self.memory - self.taken:
                return False
            self.taken += nbytes
            return True

    def record(self, nbytes: int) -> bool:
        """Book bytes of page tables and questions; fewer if the number is negative. Return False, without booking any,
        if they are too many."""
        with self._lock:
            if nbytes > self.records - self._recorded:
                return False
            self._recorded += nbytes
            return True

    def buffer(self, nbytes: int) -> Tensor:
        """Return new memory, uint8, zeros. Raise MemoryError, OSError or RuntimeError if there is none."""
        return self.device.buffer(nbytes) if self.folder is None else new_file(self.folder, nbytes)

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.taken -= nbytes

    def join(self, engine: int, leave: Callable[[], None]) -> bool:
        """Add a connection of an engine, by the number that it has drawn. If the engine has an older one, which is
        lost, the older one ends first. leave: ends the connection, and returns when its memory is given back.
        Return False if MOST_ENGINES others are connected."""
        with self._lock:
            older = self._members.get(engine)
            if older is None and len(self._members) >= MOST_ENGINES:
                return False
            self._members[engine] = leave
        if older is not None:
            older()
        return True

    def part(self, engine: int, leave: Callable[[], None]) -> None:
        """Remove a connection, unless a newer one has replaced it."""
        with self._lock:
            if self._members.get(engine) == leave:
                del self._members[engine]

    def begin_alone(self, name: str, leave: Callable[[str], None], wait: Callable[[str], None]) -> None:
        """Wait until no other engine measures this worker. An engine that measures for too long loses its connection.

        Args:
            name: of the engine.
            leave: ends its connection; gets the reason.
            wait: called again and again, now and then with what the engine waits for, else with ""; may raise an error.
        """
        said = time.monotonic()
        while not self._measured.acquire(timeout=LOOK_SECONDS):
            wait("")
            if (measurer := self._measurer) is not None and time.monotonic() - said > SAY_SECONDS:
                said, (other, began, end) = time.monotonic(), measurer
                wait(f"waiting for {other}, which has measured it for {said - began:.0f} s")
                if said - began > ALONE_SECONDS:
                    end(f"it measured for over {ALONE_SECONDS:g} s while others waited")
        self._measurer = name, time.monotonic(), leave

    def end_alone(self) -> None:
        """Let the next engine measure."""
        self._measurer = None
        self._measured.release()

    def close(self) -> None:
        """End the thread that computes. Work that it has not begun is cancelled."""
        self.thread.shutdown(cancel_futures=True)


class RecordsFull(Exception):
    """Page tables and questions of all engines are too many."""


class Records:
    """Booked bytes of one engine's page tables, sinks, questions and handles."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self._booked = pool, dict[Hashable, int]()

    def __contains__(self, record: Hashable) -> bool:
        return record in self._booked

    def book(self, record: Hashable, nbytes: int) -> None:
        """Book bytes of a record, in place of those that it had. Raise RecordsFull if they are too many."""
        nbytes += RECORD_BYTES
        if not self._pool.record(nbytes - self._booked.get(record, 0)):
            raise RecordsFull(
                f"a message of {size_within(nbytes)} came, but page tables and questions of all engines may have"
                f" {size_within(self._pool.records, up=False)} together; give it a larger --worker-mem"
            )
        self._booked[record] = nbytes

    def drop(self, *records: Hashable) -> None:
        """Give back the bytes of records, if they are booked."""
        self._pool.record(-sum(self._booked.pop(record, 0) for record in records))

    def drop_all(self, kind: type = object) -> None:
        """Give back the bytes of all records whose names are of a type."""
        self.drop(*[record for record in list(self._booked) if isinstance(record, kind)])


def records_of(memory: int) -> int:
    """Return the part of a worker's memory that is kept for page tables and questions: an eighth, within limits."""
    return min(max(memory // 8, min(memory // 2, LEAST_RECORDS)), MOST_RECORDS)


def mapped_file(descriptor: int, nbytes: int) -> Tensor:
    """Return uint8 [nbytes] in a mapping of an open file, which other processes may map too."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def new_file(folder: Path, nbytes: int) -> Tensor:
    """Return uint8 [nbytes], zeros, in a mapping of a new file without a name, which ends with the tensor.

    Raise OSError if the disk has too few free bytes: without space, later writes would end the process.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return mapped_file(file.fileno(), nbytes)


def read_rate(folder: Path, memory: int) -> int:
    """Return the bytes per second of reads from a file in a directory. Raise InvalidInput if it cannot have one of so
    many bytes. memory: most bytes of all files."""
    try:
        if (free := shutil.disk_usage(folder).free) < memory:
            raise InvalidInput(
                f"--worker-mem is {size_within(memory)}, but the disk of {str(folder)!r} has"
                f" {size_within(free, up=False)} free; give less, or a directory of another disk"
            )
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MEASURED))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, MEASURED, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            with closing(mmap.mmap(file.fileno(), MEASURED, prot=mmap.PROT_READ)) as pages:
                pages.read()
            return max(1, round(MEASURED / (time.perf_counter() - began)))
    except OSError as error:
        raise InvalidInput(
            f"directory {str(folder)!r} cannot hold a file of pages ({error.strerror or error});"
            " give a directory of a disk that can be written"
        ) from error
