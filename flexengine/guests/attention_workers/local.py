"""Attention workers on this machine: processes that this one starts, and ends when it closes them.

The stages of a pipeline share them: the process of the first stage starts them, and each listens at a Unix socket for
the others.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flexengine.activity import activity
from flexengine.engine.guests import ProcessGroup
from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.network import connecting
from flexengine.guests.attention_workers.tier import WorkerTier, worker_tiers
from flexengine.guests.wire.link import Connection
from flexengine.guests.wire.processes import INTERRUPTS, ChildProcess

MOST_PATH = 107  # bytes of the name of a Unix socket
START_SECONDS = 120.0  # until a process must have loaded its libraries and kernels


class LocalWorker(Client):
    """A worker in a process of its own, at the other end of a pair of sockets.

    The process ends by itself when this one ends, as its connection then does. It ignores SIGINT and SIGTERM.
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
        argv = ["-m", __package__, str(other.fileno()), str(memory), *([] if path is None else [str(path)])]
        try:
            self.process = ChildProcess(argv, {"OMP_NUM_THREADS": str(threads)}, INTERRUPTS, [other.fileno()])
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
        try:
            super().__init__(Connection(own, first_seconds=START_SECONDS), place, shares=True, threads=threads)
        except BaseException as error:
            tail = self.process.end(0.0)
            if isinstance(error, WorkerLost) and tail:
                raise WorkerLost(place, place, f"{error.why}; its last messages: {tail}") from error
            raise

    def close(self) -> None:
        super().close()
        self.process.end()


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
        super().__init__(Connection(connection), place, shares=True, threads=threads, engine=engine)


def open_workers(given: int | Sequence[str], memory: int, engines: int, group: ProcessGroup | None) -> list[WorkerTier]:
    """Return the tiers of an engine's attention workers.

    Args:
        given: number of processes to start on this machine, or addresses HOST:PORT of running workers.
        memory: bytes for pages of each process that is started.
        engines: engines that share the workers at the addresses.
        group: processes on this machine that share the started workers; None for this process alone.

    Raises:
        WorkerLost: a worker cannot be started, or does not answer.
    """
    if not isinstance(given, int):
        return worker_tiers(list(map(connecting, given)), engines)
    if group is None:
        return local_workers(given, memory)
    return shared_workers(given, memory, group.rank, group.size, partial(group.exchange, "attention workers"))


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
) -> list[WorkerTier]:
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
                what = f"TMPDIR is {tempfile.gettempdir()}, in which the name of a socket has {length} bytes"
                raise InvalidInput(f"{what}; at most {MOST_PATH} are possible: set it to a shorter one")
            tiers = local_workers(count, memory, engines, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(tiers[0], shutil.rmtree, folder, ignore_errors=True)
        exchange(json.dumps(str(folder)))
        return tiers
    folder = Path(json.loads(exchange("")[0]))
    start = partial(JoinedWorker, threads=_threads(count, engines))
    starts = [partial(start, path=folder / str(n), engine=secrets.randbits(62)) for n in range(count)]
    return worker_tiers(starts, engines)


def _threads(count: int, engines: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // (count + engines))
