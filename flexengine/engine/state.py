"""The state of one job across replans: the rows that remain, and totals so far."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flexengine.activity import message
from flexengine.engine.summary import Summary
from flexengine.job.prompts import Request
from flexengine.job.rows import Row


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


@dataclass
class JobState:
    """State of one job across replans."""

    feed: Iterator[Request | Row]  # rows not started. After a replan the unfinished rows come first.
    progress: Progress  # counts and seconds so far
    load_seconds: float = 0.0  # seconds before the first sweep, summed over plans
    rows: int = 0  # rows in flight when the last plan ran out of memory
    bytes_before: dict[str, int] = field(default_factory=dict)  # bytes moved by link when the job began
    busy: dict[str, float] = field(default_factory=dict)  # seconds of work by lane
    replanned: list[str] = field(default_factory=list)  # one message per replan, and per loss of an attention worker
    losses: int = 0  # losses of attention workers since a row was finished last
    _rows_at_loss: int = 0  # finished when a worker was lost last

    def note_loss(self) -> None:
        """Count the loss of an attention worker."""
        self.losses = self.losses + 1 if self.progress.rows == self._rows_at_loss else 1
        self._rows_at_loss = self.progress.rows

    def report(self, text: str) -> None:
        """Report how the job continues."""
        self.replanned.append(text)
        message(text, logging.WARNING)

    def restart(self, unfinished: Sequence[Request], feed: Iterator[Request | Row]) -> None:
        """Put the unfinished rows before the rows that have not started."""
        self.rows, self.feed = len(unfinished), itertools.chain(unfinished, feed)

    def take_busy(self, busy: dict[str, float]) -> None:
        """Add seconds of work by lane, and clear them."""
        for lane, seconds in busy.items():
            self.busy[lane] = self.busy.get(lane, 0.0) + seconds
        busy.clear()

    def summary(self, empty: Summary, moved: Mapping[str, int]) -> Summary:
        """Return `empty` with the counts, seconds and bytes of the job. moved: bytes by link since the engine began."""
        p = self.progress
        seconds = p.prefill_seconds + p.decode_seconds
        same = ["rows", "failed", "prompt_tokens", "computed_prompt_tokens", "scored_tokens", "sweeps"]
        same += ["prefill_seconds", "decode_seconds"]
        return replace(
            empty,
            **{name: getattr(p, name) for name in same},
            generated_tokens=p.tokens - p.scored,
            load_seconds=self.load_seconds,
            bytes={link: n - self.bytes_before.get(link, 0) for link, n in moved.items()},
            busy={lane: s / seconds for lane, s in self.busy.items()} if seconds else {},
            replanned=tuple(self.replanned),
        )
