"""Tells people when nothing has ended for long: a silent hang is the one failure that nobody is told of."""

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

_PATIENCE = 1.0  # seconds


class Watchdog:
    """While a `with` block runs, a thread of its own asks whether there was progress; outside of it nobody looks.

    quiet: seconds without progress until `say` is told, then twice that, and so on. lasting: what is under way, in
    words. It changes nothing: whether a disk is slow or gone only the user can tell.
    """

    def __init__(self, quiet: float, lasting: Callable[[], str], say: Callable[[str], None]) -> None:
        self._first, self._lasting, self._say = quiet, lasting, say
        self._last = 0.0  # progress, in seconds of time.perf_counter
        self._over = threading.Event()

    def progress(self) -> None:
        """Something has ended."""
        self._last = time.perf_counter()

    def __enter__(self) -> "Watchdog":
        self.progress()
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, name="flexengine-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_PATIENCE)  # whoever is told may be slow to listen

    def _watch(self) -> None:
        quiet = self._first
        while not self._over.wait(self._first / 4):
            silent = time.perf_counter() - self._last
            if silent < self._first:
                quiet = self._first
            elif silent >= quiet:
                with contextlib.suppress(Exception):  # that nobody listens is no reason to stop looking
                    self._say(f"no task has ended for {silent:.0f} s; {self._lasting()}")
                quiet *= 2
