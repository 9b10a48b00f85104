"""Processes of Python that this one starts, with their messages in temporary files: attention workers, and the stages
of a pipeline. No torch here."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from flexengine.errors import InvalidInput, StageLost

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
END_SECONDS = 10.0  # until a process that should end is killed
LOCAL = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # network interface of gloo
SECRET, SECRET_FILE = "FLEXENGINE_SECRET", "FLEXENGINE_SECRET_FILE"  # environment variables
STAGES_SECRET = "FLEXENGINE_STAGES_SECRET"  # environment variable: secret of stages that one process starts
TAIL_BYTES = 2000  # of a process's messages, shown if it fails


class ChildProcess:
    """A process, with its number `pid`."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        ignored: Sequence[signal.Signals],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Args:
            argv: arguments of Python.
            environment: variables that the process has beside those of this one.
            ignored: signals that it ignores, as a terminal or `timeout` sends them to all processes.
            pass_fds: files that stay open in it.
        """

        def ignore() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        try:
            self._process = subprocess.Popen(
                [sys.executable, *argv],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=pass_fds,
                preexec_fn=ignore,
            )
        except BaseException:
            self._log.close()
            raise
        self.pid, self.poll = self._process.pid, self._process.poll  # poll: returns the exit code; None while it runs

    def tail(self) -> str:
        """Return the last messages."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()

    def end(self, seconds: float = END_SECONDS) -> str:
        """Wait for the process, and kill it after some seconds. Return its last messages."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        self._process.wait()
        if self._log.closed:  # by an earlier call
            return ""
        with self._log:
            return self.tail()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect at the end of the block. Only the main thread can, and receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) without torchrun.

    Raises:
        InvalidInput: the variables are no numbers, or the rank is not below the number of processes.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise InvalidInput(
            f"the environment has RANK={rank} and WORLD_SIZE={size}, which torchrun sets to a"
            " number below the number of processes; unset both to run one process"
        )
    return int(rank), int(size)


@contextlib.contextmanager
def local_stages(stages: int, argv: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Run the processes of stages 1 and on, each with arguments of Python, in the process of stage 0. Yield a function
    that raises StageLost if a process has ended.

    A process gets its rank by the environment variables of torchrun, of which this one gets those of rank 0. It ignores
    SIGINT: the driver ends it. After an error, processes are killed, and the last messages of those that failed are
    added to the error.
    """
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        port = free.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // stages)
    variables = {
        **{"WORLD_SIZE": str(stages), "LOCAL_WORLD_SIZE": str(stages), "RANK": "0", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": LOCAL, "MASTER_PORT": str(port), STAGES_SECRET: secrets.token_hex(32)},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    before, processes = {name: os.environ.get(name) for name in variables}, list[ChildProcess]()
    os.environ |= variables

    def look() -> None:
        for rank, process in enumerate(processes, 1):
            if (code := process.poll()) is not None:
                why = f"it ended with code {code} before it joined ({process.tail() or 'no message'})"
                raise StageLost(rank, len(processes) + 1, f"process {process.pid}", why)

    try:
        for rank in range(1, stages):
            with interrupts_wait():  # until `processes` holds the process, so that it is ended, too
                processes.append(ChildProcess(argv, {"RANK": str(rank), "LOCAL_RANK": str(rank)}, [signal.SIGINT]))
        yield look
        for process in processes:
            process.end()
    except BaseException as error:
        for rank, process in enumerate(processes, 1):
            code = process.poll()
            messages = process.end(0.0 if code is None else END_SECONDS)
            if code:
                error.add_note(f"stage {rank} ended with code {code}: {messages}")
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
