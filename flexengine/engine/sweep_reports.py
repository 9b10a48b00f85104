"""Reports of a running job: rows, tokens, rates, remaining time, and how far the present sweep is."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from flexengine.activity import Activity, Listener, RunningActivity
from flexengine.activity.terminal import minutes
from flexengine.engine.state import Progress
from flexengine.places import disks_of
from flexengine.plan.formatting import digits, percent, size
from flexengine.plan.hardware import Hardware

GENERATING = "generating"  # name of the activity
TOKEN_SECONDS, DISK_SECONDS = 30.0, 5.0  # rates of tokens and of disk reads are means of these times
MIN_SHARE = 0.1  # of all tokens, after which the remaining time is shown in any case
LONG_SWEEP_SECONDS = 2.0  # a longer sweep is shown with its finished share
MIN_RATE_SECONDS = 1.0  # of a job, until rates are shown
MIN_DISK_RATE = 1e6  # bytes per second; lower rates are not shown


@dataclass(frozen=True)
class JobRows:
    """Rows of a job of which this engine may run only a part."""

    total: int | None = None  # rows of the whole job; None if it is unknown
    # done, failed: rows that earlier runs finished, without and with an error
    done: int = 0
    failed: int = 0
    with_prompts: bool = True  # whether results have the prompts as they were given


class Rate:
    """A rate over the last seconds of a window."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._seen: deque[tuple[float, float]] = deque()  # seconds and value

    def __call__(self, now: float, value: float) -> float | None:
        """Add a value and return its change per second; None at first."""
        self._seen.append((now, value))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window:
            self._seen.popleft()
        began, first = self._seen[0]
        return (value - first) / (now - began) if now - began >= MIN_RATE_SECONDS else None


class SweepReports:
    """Reports of the sweeps of a job. `look` may be called by another thread than the other methods.

    Args:
        rows: number of rows of the job, and of those done before.
        bytes_read: returns the bytes read so far from all disks.
        best: highest measured bytes per second of reads from all disks; None if it was not measured.
        loading: bytes of weights that the first sweep reads into memory.
    """

    def __init__(
        self, listener: Listener | None, progress: Progress, rows: JobRows, bytes_read: Callable[[], int] = lambda: 0,
        best: float | None = None, loading: int = 0,
    ) -> None:  # fmt: skip
        self.progress, self.rows, self.bytes_read, self.best = progress, rows, bytes_read, best
        self._began = self._swept = time.monotonic()
        self._finished = progress.rows + progress.failed
        self._tokens, self._bytes = Rate(TOKEN_SECONDS), Rate(DISK_SECONDS)
        self._cells = self._expected = 0
        self._loading, self._read_before = loading, bytes_read()
        self._work = RunningActivity(listener, Activity(GENERATING, f"generating at most {progress.most:,} tokens",
                                             total=progress.most, unit="tokens"))  # fmt: skip

    def begin_sweep(self, cells: int, tokens: int) -> None:
        """Note the start of a sweep of so many cells, which generates so many tokens."""
        self._swept = time.monotonic()
        self._cells, self._expected = cells, tokens

    def look(self, cells: int) -> None:
        """Report a sweep under way. cells: that are computed."""
        share = min(1.0, cells / max(1, self._cells))
        self._update(self.progress.tokens + share * self._expected, share)

    def end_sweep(self) -> None:
        """Report a finished sweep."""
        self._loading = 0
        if not self._is_steady:
            self._tokens = Rate(TOKEN_SECONDS)
        if self._work.due:
            self._update(self.progress.tokens, None)

    def tokens_lost(self) -> None:
        """Measure the rate of tokens anew, as there are fewer than before."""
        self._tokens = Rate(TOKEN_SECONDS)

    def end(self, failed: bool) -> None:
        """Report the end of the job."""
        self._work.end(failed)

    @property
    def _is_steady(self) -> bool:
        """Return whether tokens come at a rate from which the remaining time follows. The first sweeps compute prompts,
        and generate few tokens in a long time."""
        return self.progress.decode_seconds > 0 or self.progress.tokens >= MIN_SHARE * self.progress.most

    def _update(self, tokens: float, share: float | None) -> None:
        now, p, nbytes = time.monotonic(), self.progress, self.bytes_read()
        rows = self.rows.done + p.rows + (failed := self.rows.failed + p.failed)
        details = [f"{rows:,} rows" if self.rows.total is None else f"{rows:,} of {self.rows.total:,} rows"]
        details += [f"{failed:,} failed"] if failed else []
        rate, read = self._tokens(now, tokens), self._bytes(now, nbytes)
        if self._loading and (loaded := (nbytes - self._read_before) / self._loading) < 1:
            details.append(f"reading weights {percent(loaded)}")
        if rate and self._is_steady:
            details.append(f"{minutes(max(0.0, p.most - tokens) / rate)} left")
            details.append(f"{digits(rate)} tok/s")
        if read is not None and read >= MIN_DISK_RATE:
            details.append(f"disk {disk_rate(read, self.best)}")
        if (ended := p.rows + p.failed - self._finished) and now - self._began >= MIN_RATE_SECONDS:
            details.append(f"{digits(ended / (now - self._began))} rows/s")
        if share is not None and now - self._swept >= LONG_SWEEP_SECONDS:
            details.append(f"sweep {p.sweeps + 1}: {percent(share)}")
        self._work.update(tokens, p.most, tuple(details))


def disk_rate(rate: float, best: float | None) -> str:
    """Return a rate in bytes per second, with the best one if it is known and higher, such as 1.20 of 1.61 GB/s."""
    text = f"{size(rate)}/s"
    if best is None or best < rate:
        return text
    number, unit = text.split()
    most, other = f"{size(best)}/s".split()
    return f"{number} of {most} {unit}" if unit == other else f"{text} of {most} {other}"


def best_read_rate(hardware: Hardware) -> float | None:
    """Return the highest measured bytes per second of reads from all disks together; None if they are not measured."""
    if not hardware.measured:
        return None
    lanes: list[str] = [disk.lanes[0] for disk in disks_of(hardware.places)]
    best = {lane: max(rate for _, rate in hardware.links[lane]) for lane in lanes if hardware.links[lane]}
    if hardware.checkpoint_read:
        best["disk_read"] = max(best.get("disk_read", 0.0), *(rate for _, rate in hardware.checkpoint_read))
    return sum(best.values()) or None
