"""Counts, seconds and bytes of a job: `Summary`, and `Progress` and reports while the job runs."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from flexengine.activity import Activity, Listener, RunningActivity, minutes
from flexengine.lossy import EXACT, Lossy
from flexengine.places import disks_of
from flexengine.plan.feedback import PlanReport
from flexengine.plan.formatting import pace, percent, size
from flexengine.plan.hardware import Hardware
from flexengine.policy import Policy


@dataclass(frozen=True)
class Verified:
    """Comparisons of files with their checksums, since the engine was opened."""

    files: int  # number of files
    bytes: int  # bytes of these files
    seconds: float  # seconds of reading and hashing


@dataclass(frozen=True)
class JobCounts:
    """Rows of a job of a file, over all its runs."""

    rows: int  # rows of the input, up to `limit`
    done: int  # rows that have a result without an error
    failed: int  # rows that have a result with an error
    done_before: int  # rows that had a result when this run began


@dataclass(frozen=True)
class Summary:
    """Counts, seconds and bytes of one job. The counts are 0 if no row was run.

    The seconds are periods by the clock, one after the other: `load_seconds`, then sweeps, each of which counts either
    in `prefill_seconds` or in `decode_seconds`.

    Attributes:
        model: name of the model.
        device: cpu, cuda or sim.
        dtype: dtype of the activations, such as float32.
        rows: rows finished without an error.
        failed: rows that have an error.
        prompt_tokens: tokens of the prompts of finished rows.
        computed_prompt_tokens: prompt tokens that were computed: fewer if prompts have common prefixes, more if memory
            ran out and rows started again. Given continuations count as prompts.
        generated_tokens: generated tokens of all samples.
        scored_tokens: tokens of continuations and texts whose log probability was computed.
        sweeps: number of sweeps.
        load_seconds: seconds before the first sweep. Weights are calibrated, encoded and verified in this period, if
            necessary, and memory is allocated.
        prefill_seconds: seconds of the sweeps that computed any prompt. In an engine's first job, and in the first job
            of a layout, the first such sweep also reads the weights that stay in memory, beside computing.
        decode_seconds: seconds of all other sweeps.
        bytes: bytes moved, by link: disk_read, disk_write, h2d, d2h, and disk2_read, ... of further offload
            directories. Weights that stay in memory are not counted.
        busy: share of `total_seconds` in which each lane worked, in [0, 1]. "loading" is the time from the beginning to
            the end of reading the weights that stay in memory, hidden by computing or not; "disk_read" does not
            contain it.
        replanned: one message per plan that was replaced because memory ran out, and per loss of an attention worker.
            `policy` and `peak_bytes` are those of the last plan; `plan` covers the sweeps after the last message.
        peak_bytes: most bytes allocated, by tier: device, host (with a GPU), disk, ...
        lossy: the lossy switches of the job.
        verified: comparisons with checksums; None without `verify`.
        policy: the policy of the job; None if no row could be run.
        plan: predicted against measured seconds; None if no row could be run.
        job: rows of the job over all its runs; None except from `Engine.run_job`.
        stages: for each stage of a pipeline in another process, its layers, policy, plan, busy seconds by lane, bytes
            by link and peak bytes, as JSON values. All other fields are those of the first stage; counts and seconds
            are those of the job.
        as_modules: texts that say which layers run as modules of transformers, not as calls of native kernels, and why.

    Examples:
        >>> summary = engine.run_job("prompts.jsonl", "results.jsonl")
        >>> print(summary.rows, summary.failed, f"{summary.generated_tok_s:.1f} tok/s")
    """

    model: str
    device: str
    dtype: str
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    sweeps: int = 0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    bytes: Mapping[str, int] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    replanned: tuple[str, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    lossy: Lossy = EXACT
    verified: Verified | None = None
    policy: Policy | None = None
    plan: PlanReport | None = None
    job: JobCounts | None = None
    stages: tuple[Mapping[str, Any], ...] = ()
    as_modules: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Return the seconds of all sweeps, without `load_seconds`."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def generated_tok_s(self) -> float:
        """Return generated tokens per second of `total_seconds`; 0 if no sweep was computed."""
        return self.generated_tokens / self.total_seconds if self.total_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values, as `flexengine run --json` prints it. `job`, `stages` and `as_modules`
        are left out if they are empty."""
        counts = [f.name for f in fields(self) if f.type in (str, int, float)] + ["total_seconds", "generated_tok_s"]
        return {
            **{name: getattr(self, name) for name in counts},
            "bytes": dict(self.bytes),
            "busy": dict(self.busy),
            "replanned": list(self.replanned),
            "peak_bytes": dict(self.peak_bytes),
            "lossy": self.lossy.enabled,
            "verified": asdict(self.verified) if self.verified else None,
            "policy": self.policy.to_json() if self.policy else None,
            "plan": self.plan.to_json() if self.plan else None,
            **({"job": asdict(self.job)} if self.job else {}),
            **({"stages": list(self.stages)} if self.stages else {}),
            **({"as_modules": list(self.as_modules)} if self.as_modules else {}),
        }


@dataclass
class Progress:
    """Counts of a job so far, passed to `on_sweep` after every sweep.

    Attributes:
        sweeps: sweeps computed so far.
        rows: rows finished without an error.
        failed: rows that have an error.
        prompt_tokens: prompt tokens of the finished rows.
        computed_prompt_tokens: prompt tokens computed so far, also of rows that are not finished, and computed again
            after a replan.
        tokens: tokens generated so far. A sequence that is scored counts as one token.
        most: tokens of all rows if no further sequence stops before its limit.
        prefill_seconds: seconds of the sweeps that computed a prompt.
        decode_seconds: seconds of the other sweeps. See `Summary` for both.
        scored_tokens: tokens scored so far.
        scored: sequences scored so far.
    """

    sweeps: int = 0
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    tokens: int = 0
    most: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    scored_tokens: int = 0
    scored: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds of all sweeps."""
        return self.prefill_seconds + self.decode_seconds


GENERATING = "generating"  # name of the activity
TOKEN_SECONDS, DISK_SECONDS = 30.0, 5.0  # rates of tokens and of disk reads are means of these times
MIN_SHARE = 0.1  # of all tokens, after which the remaining time is shown in any case
LONG_SWEEP_SECONDS = 2.0  # a longer sweep is shown with its finished share
MIN_RATE_SECONDS = 1.0  # of a job, until rates are shown
MIN_ENDINGS = 3  # reports with further ended rows, until rows per second are shown: a block may end all at once
MIN_DISK_RATE = 1e6  # bytes per second; lower rates are not shown


@dataclass(frozen=True)
class JobRows:
    """Rows of a job of which this engine may run only a part."""

    total: int | None = None  # rows of the whole job; None if it is unknown
    # done, failed: rows that earlier runs finished, without and with an error
    done: int = 0
    failed: int = 0
    with_prompts: bool = True  # whether results have the prompts as they were given
    # local time at which the first run began, which chat templates read; None if this run is the first
    began: datetime | None = field(default=None, compare=False)


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
        self._endings = self._ended = 0
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
            details.append(pace(rate, "tok"))
        if read is not None and read >= MIN_DISK_RATE:
            details.append(f"disk {disk_rate(read, self.best)}")
        ended = p.rows + p.failed - self._finished
        self._endings, self._ended = self._endings + (ended > self._ended), ended
        if self._endings >= MIN_ENDINGS and now - self._began >= MIN_RATE_SECONDS:
            details.append(pace(ended / (now - self._began), "rows"))
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
