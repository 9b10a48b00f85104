"""A look at the tasks of a sweep from time to time: how far they are, and whether any has ended recently."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_PATIENCE = 1.0  # seconds to wait for the thread at the end: `say` and `look` may block
_LOOK_SECONDS = 0.5  # between two calls of `look`


class Watchdog:
    """Report a lack of progress while a block runs. The job goes on: only users can tell a slow disk from a dead one.

    Args:
        quiet: seconds without progress until the first report; the next one comes after twice that, and so on.
    """

    def __init__(self, quiet: float) -> None:
        self._first = quiet
        self._last = 0.0  # progress, in seconds of time.perf_counter

    def progress(self) -> None:
        """Note that a task has ended now."""
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def watching(
        self, lasting: Callable[[], str], say: Callable[[str], None], look: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Watch from a thread of its own while the block runs.

        Args:
            lasting: returns a text that names the running tasks. Not stored, as the owner of `lasting` may own this
                watchdog: the reference cycle would hold the job's memory until a garbage collection.
            say: receives the reports; it may block.
            look: called every _LOOK_SECONDS; it may block. Blocks that are shorter cost nothing.
        """
        self.progress()
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(over, lasting, say, look), name="flexengine-watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PATIENCE)

    def _watch(
        self, over: threading.Event, lasting: Callable[[], str], say: Callable[[str], None],
        look: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        quiet, pause = self._first, self._first / 4
        while not over.wait(pause if look is None else min(pause, _LOOK_SECONDS)):
            if look is not None:
                with contextlib.suppress(Exception):  # the main thread meets a listener's error, too
                    look()
            silent = time.perf_counter() - self._last
            if silent < self._first:
                quiet = self._first
            elif silent >= quiet:
                with contextlib.suppress(Exception):  # keep watching even if `say` fails
                    say(f"no task has ended for {silent:.0f} s; {lasting()}")
                quiet *= 2
