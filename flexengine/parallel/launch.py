"""Start the processes of a pipeline on this machine, each with the same command line."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Self

from flexengine.errors import StageLost

LOCAL = "127.0.0.1"
END_SECONDS = 10.0  # until a process that should end is killed
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
TAIL_BYTES = 2000  # of a stage's messages, shown if it fails


class LocalStages:
    """The processes of stages 1 and on. Use as a context manager, in the process of stage 0.

    A process gets its rank by the environment variables of torchrun. Its messages go to a temporary file. It ignores
    SIGINT, which a terminal sends to all processes: the driver ends it.
    """

    def __init__(self, stages: int, argv: Sequence[str]) -> None:
        """Start the processes, and set the environment of this one.

        Args:
            stages: number of stages, with the one of this process.
            argv: arguments of Python.
        """
        with socket.socket() as free:
            free.bind((LOCAL, 0))
            port = free.getsockname()[1]
        threads = max(1, len(os.sched_getaffinity(0)) // stages)
        common = {"WORLD_SIZE": str(stages), "LOCAL_WORLD_SIZE": str(stages), "MASTER_ADDR": LOCAL,
                  "MASTER_PORT": str(port),
                  "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}  # fmt: skip
        own = common | {"RANK": "0", "LOCAL_RANK": "0"}
        self._before = {name: os.environ.get(name) for name in own}
        os.environ |= own
        self._logs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, stages):
                self._start(rank, argv)
        except BaseException as error:  # an interrupt, or no memory for a process: end those that were started
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _start(self, rank: int, argv: Sequence[str]) -> None:
        """Start one process. An interrupt takes effect once `_processes` holds it, so that `__exit__` ends it, too."""
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with _interrupts_wait():
            self._logs.append(log := tempfile.TemporaryFile())  # noqa: SIM115 - closed in __exit__
            self._processes.append(subprocess.Popen(
                [sys.executable, *argv], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=_ignore_interrupts,
            ))  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def look(self) -> None:
        """Raise StageLost if a process has ended."""
        for rank, (process, log) in enumerate(zip(self._processes, self._logs, strict=True), 1):
            if (code := process.poll()) is not None:
                raise StageLost(rank, len(self._processes) + 1, f"process {process.pid}",
                                f"it ended with code {code} before it joined ({_tail(log) or 'no message'})"
                                )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes. Add the last messages of those that failed to the error."""
        for process, log in zip(self._processes, self._logs, strict=False):
            code = process.poll()
            if code is None and error is not None:
                process.kill()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if error is not None and code:
                error.add_note(f"stage {self._processes.index(process) + 1} ended with code {code}: {_tail(log)}")
        for log in self._logs:  # one more than processes if one could not be started
            log.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect at the end of the block. Only the main thread can, and receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()
