"""Attention workers on this machine: processes that this one starts, and ends when it closes them.

The stages of a pipeline share them: the process of the first stage starts them, and each listens at a Unix socket for
the others.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from flexengine.activity import activity
from flexengine.attention.client import Client
from flexengine.attention.link import Link
from flexengine.attention.tier import WorkerTier, worker_tiers
from flexengine.errors import InvalidInput, WorkerLost

END_SECONDS = 5.0  # until a process that should end is killed
TAIL_BYTES = 2000  # of a worker's messages, shown if it fails
MOST_PATH = 107  # bytes of the name of a Unix socket
START_SECONDS = 120.0  # until a process must have loaded its libraries and kernels


class LocalWorker(Client):
    """A worker in a process of its own, at the other end of a pair of sockets.

    The process ends by itself when this one ends, as its connection then does. It ignores SIGINT and SIGTERM, which a
    terminal, or `timeout`, sends to all processes.
    """

    def __init__(self, place: str, memory: int, threads: int, path: Path | None = None) -> None:
        """Start the process.

        Args:
            place: name of the worker's place.
            memory: bytes for pages.
            threads: threads that compute.
            path: Unix socket at which it listens for other engines; None for no others.

        Raises:
            WorkerLost: the process did not start.
        """
        own, other = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        listens = [] if path is None else [str(path)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flexengine.attention", str(other.fileno()), str(memory), *listens],
                env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                pass_fds=[other.fileno()], preexec_fn=_ignore_signals,
            )  # fmt: skip
        except BaseException:
            own.close()
            self._log.close()
            raise
        finally:
            other.close()
        try:
            super().__init__(Link(own, first_seconds=START_SECONDS), place, shares=True, threads=threads)
        except BaseException as error:
            self._end(0.0)
            tail = self._tail()
            self._log.close()
            if isinstance(error, WorkerLost) and tail:
                raise WorkerLost(place, place, f"{error.why}; its last messages: {tail}") from error
            raise

    def close(self) -> None:
        super().close()
        self._end(END_SECONDS)
        self._log.close()

    def _end(self, seconds: float) -> None:
        """Wait for the process. Kill it after some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.wait()

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()


class JoinedWorker(Client):
    """A worker that another process of this machine has started."""

    def __init__(self, place: str, path: Path, threads: int, engine: int) -> None:
        """Connect to the worker. Raise WorkerLost if it does not listen.

        Args:
            place: name of the worker's place.
            path: its Unix socket.
            threads: threads that compute.
            engine: number of this engine, as in Client.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise WorkerLost(place, place, f"it does not listen ({error.strerror or error})") from error
        super().__init__(Link(connection), place, shares=True, threads=threads, engine=engine)


def local_workers(count: int, memory: int, engines: int = 1, folder: Path | None = None) -> list[WorkerTier]:
    """Start workers on this machine, and return their tiers. Each gets an equal part of the processors.

    Args:
        count: number of workers.
        memory: bytes for pages of each.
        engines: engines on this machine that share them.
        folder: directory of the sockets for the other engines; None without others.

    Raises:
        WorkerLost: a process did not start.
    """
    start = partial(LocalWorker, memory=memory, threads=_threads(count, engines))
    starts = [start if folder is None else partial(start, path=folder / str(number)) for number in range(count)]
    with activity("starting", "starting the processes of attention workers") if count else contextlib.nullcontext():
        return worker_tiers(starts, engines)


def shared_workers(
    count: int, memory: int, rank: int, engines: int, exchange: Callable[[str], list[str]]
) -> list[WorkerTier]:  # fmt: skip
    """Return the tiers of workers on this machine for several engines: the first one starts them, the others join.

    Args:
        count: number of workers.
        memory: bytes for pages of each, of all engines together.
        rank: number of this engine.
        engines: number of engines.
        exchange: gives text to all engines, and returns the texts of all by their numbers.

    Raises:
        InvalidInput: the directory of temporary files has a too long name.
        WorkerLost: a process did not start.
    """
    if rank == 0:
        folder = Path(tempfile.mkdtemp(prefix="flexengine-"))
        try:
            if (length := len(os.fsencode(folder / str(count)))) > MOST_PATH:
                raise InvalidInput(f"TMPDIR is {tempfile.gettempdir()}, in which the name of a socket has {length}"
                                   f" bytes; at most {MOST_PATH} are possible: set it to a shorter one")  # fmt: skip
            tiers = local_workers(count, memory, engines, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(tiers[0], shutil.rmtree, folder, ignore_errors=True)
        exchange(json.dumps(str(folder)))
        return tiers
    folder = Path(json.loads(exchange("")[0]))
    threads = _threads(count, engines)
    return worker_tiers([partial(JoinedWorker, path=folder / str(number), threads=threads, engine=secrets.randbits(62))
                         for number in range(count)], engines)  # fmt: skip


def _threads(count: int, engines: int) -> int:
    """Return the threads of each worker, of which there are `count` beside some engines."""
    return max(1, len(os.sched_getaffinity(0)) // (count + engines))


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
