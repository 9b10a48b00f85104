"""Attention workers on this machine: processes that this one starts, and ends when it closes them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from typing import IO

from flexengine.attention.client import Client
from flexengine.attention.link import Link
from flexengine.attention.tier import WorkerTier, worker_tiers
from flexengine.errors import WorkerLost

END_SECONDS = 5.0  # until a process that should end is killed
TAIL_BYTES = 2000  # of a worker's messages, shown if it fails
START_SECONDS = 120.0  # until a process must have loaded its libraries and kernels


class LocalWorker(Client):
    """A worker in a process of its own, at the other end of a pair of sockets.

    The process ends by itself when this one ends, as its connection then does. It ignores SIGINT, which a terminal
    sends to all processes.
    """

    def __init__(self, place: str, memory: int, threads: int) -> None:
        """Start the process.

        Args:
            place: name of the worker's place.
            memory: bytes for pages.
            threads: threads that compute.

        Raises:
            WorkerLost: the process did not start.
        """
        own, other = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flexengine.attention", str(other.fileno()), str(memory)],
                env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                pass_fds=[other.fileno()], preexec_fn=_ignore_interrupts,
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
            if isinstance(error, WorkerLost) and (tail := self._tail()):
                error.add_note(f"its last messages: {tail}")
            self._log.close()
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


def local_workers(count: int, memory: int) -> list[WorkerTier]:
    """Start workers on this machine, and return their tiers. Each gets an equal part of the processors.

    Args:
        count: number of workers.
        memory: bytes for pages of each.

    Raises:
        WorkerLost: a process did not start.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // (count + 1))
    return worker_tiers([partial(LocalWorker, memory=memory, threads=threads)] * count)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
