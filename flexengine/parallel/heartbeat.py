"""Heartbeats: every process counts up a number in the group's store. A number that stands still shows that its process
has died or hangs."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

BEAT_SECONDS = 1.0  # between two beats of a process
SILENT_SECONDS = 15.0  # without a beat, until a process counts as lost


class Heartbeat:
    """Beats in a thread, and watches the beats of other processes.

    Args:
        store: store of the group. Other threads must not wait in it.
        rank: rank of this process.
        watched: ranks of the processes to watch.
        lost: called once, from the thread, with the rank of a lost process and the reason; the thread then ends.
    """

    def __init__(self, store: Any, rank: int, watched: Iterable[int], lost: Callable[[int, str], None]) -> None:
        self._store, self._rank, self._lost = store, rank, lost
        self._seen = {other: (b"", time.monotonic()) for other in watched}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="flexengine-heartbeat", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            try:
                self._store.set(_key(self._rank), str(beat))
                silent = self._silent()
            except Exception as error:  # the store is in the process of rank 0, or of torchrun
                if not self._ended.is_set():
                    self._lost(0, f"its store does not answer ({type(error).__name__})")
                return
            if silent is not None:
                self._lost(silent, f"it gave no sign of life for {SILENT_SECONDS:g} s")
                return

    def _silent(self) -> int | None:
        """Return the rank of a watched process whose beat stands still; None if there is none."""
        now = time.monotonic()
        for rank, (beat, since) in self._seen.items():
            new = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""
            if new != beat:
                self._seen[rank] = new, now
            elif now - since > SILENT_SECONDS:
                return rank
        return None

    def end(self) -> None:
        """Stop beating. Does not wait for the thread, as the store may not answer."""
        self._ended.set()


def _key(rank: int) -> str:
    return f"beat/{rank}"
