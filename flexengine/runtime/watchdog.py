"""Tells people when nothing has ended for long: a silent hang is the one failure that nobody is told of."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_PATIENCE = 1.0  # seconds to wait for the thread, whose report may block


class Watchdog:
    """Report a lack of progress while a block runs. It changes nothing: only the user can tell a slow disk from a lost
    one.

    Args:
        quiet: seconds without progress until the first report; the next one comes after twice that, and so on.
    """

    def __init__(self, quiet: float) -> None:
        self._first = quiet
        self._last = 0.0  # progress, in seconds of time.perf_counter

    def progress(self) -> None:
        """Something has ended."""
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def watching(self, lasting: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
        """Watch from a thread of its own while the block runs.

        Args:
            lasting: returns the work under way, in words. Not kept after the block: its owner may own this watchdog,
                and a reference cycle would keep the job's memory until a garbage collection.
            say: receives the reports; it may block.
        """
        self.progress()
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(over, lasting, say), name="flexengine-watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PATIENCE)

    def _watch(self, over: threading.Event, lasting: Callable[[], str], say: Callable[[str], None]) -> None:
        quiet = self._first
        while not over.wait(self._first / 4):
            silent = time.perf_counter() - self._last
            if silent < self._first:
                quiet = self._first
            elif silent >= quiet:
                with contextlib.suppress(Exception):  # that nobody listens is no reason to stop looking
                    say(f"no task has ended for {silent:.0f} s; {lasting()}")
                quiet *= 2
