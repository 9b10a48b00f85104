"""Ctrl-C and SIGTERM: what is finished is put on the disk first, then the job unwinds, then the process leaves in time
even if unwinding does not."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 5.0


def _nothing() -> None:
    pass


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first SIGINT or SIGTERM. code: the exit code, 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class Interrupts:
    """While the block runs, the first signal saves and raises Interrupted; a second one leaves the process at once, and
    so does a timer if the block has not ended PATIENCE_SECONDS after the first (a sweep may take minutes, and lanes
    are closed only between tasks).

    A signal that the process was started to ignore (nohup) stays ignored. Does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._first: int | None = None
        self._save: Callable[[], None] = _nothing
        self.standing: Callable[[], str] = lambda: "interrupted"

    @contextmanager
    def guarding(self, save: Callable[[], None], standing: Callable[[], str]) -> Iterator[None]:
        """save: puts results on the disk; called between any two instructions of the main thread. standing: where the
        job stands, for people; its last answer is kept after the block."""
        self._save, self.standing = save, standing
        try:
            yield
        finally:
            last = standing()
            self._save, self.standing = _nothing, lambda: last

    def check(self) -> None:
        """Raises the Interrupted that got lost: Python drops what is raised within a finaliser."""
        if self._first is not None:
            raise Interrupted(self._first)

    def __enter__(self) -> "Interrupts":
        try:
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._interrupt)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._leave)
        except ValueError:  # only the main thread may
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if self._first is not None:
            self._leave(number, None)
        self._first = number
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
        with suppress(OSError):  # a full disk: what is in the journal is there all the same
            self._save()
        raise Interrupted(number)

    def _leave(self, _: int, __: FrameType | None) -> NoReturn:
        number = self._first or signal.SIGTERM
        # Not print: it may be what was interrupted.
        os.write(2, f"\nflexengine: {self.standing()}\n".encode())
        os._exit(128 + number)
