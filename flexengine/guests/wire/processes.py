"""Processes of Python that this one starts, with their messages in temporary files."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
END_SECONDS = 10.0  # until a process that should end is killed
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
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; None if the process runs."""
        return self._process.poll()

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
