"""Signals of commands.

On Ctrl-C or SIGTERM finished rows are saved and the job is unwound. The process exits if unwinding takes too long.
"""

import atexit
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 5.0


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number  # exit code, 130 or 143


class Interrupts:
    """Context manager that handles SIGINT and SIGTERM.

    The first signal saves finished rows and raises Interrupted. A second signal exits the process at once. A timer also
    exits the process if the block has not ended PATIENCE_SECONDS after the first signal, as a sweep may take minutes
    and lanes are closed only between tasks. After `end` every signal exits the process at once, without a message.

    A signal that was ignored when the process started (nohup) stays ignored. Outside the main thread signals are not
    handled.
    """

    until_exit = False  # whether the handlers stay after the block, as the process ends then; see `end_with_process`

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._first: int | None = None
        self._ended = False
        self._save: Callable[[], None] = lambda: None
        self.standing: Callable[[], str] = lambda: "interrupted"

    @contextmanager
    def guarding(self, save: Callable[[], None], standing: Callable[[], str]) -> Iterator[None]:
        """Return a context manager in which a signal saves results.

        Args:
            save: write results to the disk. A signal may call this between any two instructions of the main thread.
            standing: return the message for an interrupted job. After the block `self.standing` returns its last
                message.
        """
        self._save, self.standing = save, standing
        try:
            yield
        finally:
            last = standing()
            self._save, self.standing = lambda: None, lambda: last

    def end(self) -> None:
        """Note that the command has ended, and has said how, so that no exception is raised from now on."""
        self._ended = True

    def check(self) -> None:
        """Raise Interrupted if a signal came. Its first Interrupted may be lost, as Python drops exceptions that are
        raised in a finalizer."""
        if self._first is not None:
            raise Interrupted(self._first)

    def __enter__(self) -> "Interrupts":
        try:
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._interrupt)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._leave)
        except ValueError:  # only the main thread may set signal handlers
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self.until_exit:
            return
        if self._first is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if self._first is not None or self._ended:
            self._leave(number, None)
        self._first = number
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
        with suppress(OSError):  # the disk may be full; records written to the journal before stay valid
            self._save()
        raise Interrupted(number)

    def _leave(self, number: int, _: FrameType | None) -> NoReturn:
        try:
            # Not print: the signal may have interrupted a print, whose buffer cannot be used again then.
            if not self._ended:
                os.write(2, f"\nflexengine: {self.standing()}\n".encode())
        finally:
            os._exit(128 + (self._first or number))


def end_with_process() -> None:
    """Handle signals until this process ends, which it does after one command. Python's last steps ignore them, since
    it resets handlers while libraries may still be closing."""
    Interrupts.until_exit = True

    def ignore() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)  # first of all, so it is called last
