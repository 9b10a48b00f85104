"""The course of one job, over all the plans it needed: what is left to do, and what it has taken so far."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexengine.generation import Progress
from flexengine.job.inputs import Row
from flexengine.job.prompts import Request


@dataclass
class Course:
    """What became of a job so far. loaded: seconds before its sweeps; rows: that were under way when the last plan
    failed; before: bytes moved before the job, by link; busy: seconds of work by lane; replanned: what was said each
    time memory ran out."""

    feed: Iterator[Request | Row]
    progress: Progress
    loaded: float = 0.0
    rows: int = 0
    before: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    replanned: list[str] = field(default_factory=list)

    def again(self, unfinished: Sequence[Request], feed: Iterator[Request | Row]) -> None:
        """Puts rows that were under way before those that have not been."""
        self.rows, self.feed = len(unfinished), itertools.chain(unfinished, feed)

    def worked(self, busy: Mapping[str, float]) -> None:
        """Adds seconds of work by lane."""
        for lane, seconds in busy.items():
            self.busy[lane] = self.busy.get(lane, 0.0) + seconds

    def summary(self, moved: Mapping[str, int]) -> dict[str, Any]:
        """Counts, seconds and bytes. moved: bytes by link until now. Seconds by the clock, one after the other:

        load_seconds: before the first sweep: weights calibrated and encoded if they are to be and had not been (and
            what was encoded verified, if that is asked for), and room made in memory. Weights are read here only with
            `load_first`.
        prefill_seconds: of the sweeps that computed any prompt, whatever else they did. Of an engine's first job, or
            its first in a layout, the first of them also reads the weights that stay in memory, beside computing: it
            is longer by what of that took longer than computing.
        decode_seconds: of all other sweeps. total_seconds: of all sweeps, so without load_seconds.

        busy has shares of total_seconds. busy["loading"] is that reading, from its beginning to its end in the lane
        that reads the disk, hidden or not: neither is it in busy["disk_read"], nor its bytes in `bytes`, nor is it what
        would be saved if there were none.

        replanned: what was said each time memory ran out. The engine's policy, plan and peak_bytes are then those of
        the last plan.
        """
        p = self.progress
        seconds = p.prefill_seconds + p.decode_seconds
        return {
            "rows": p.rows,
            "failed": p.failed,
            "prompt_tokens": p.prompt_tokens,
            "generated_tokens": p.tokens,
            "sweeps": p.sweeps,
            "load_seconds": self.loaded,
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "total_seconds": seconds,
            "generated_tok_s": p.tokens / seconds if seconds else 0.0,
            "bytes": {link: n - self.before.get(link, 0) for link, n in moved.items()},
            "busy": {lane: s / seconds for lane, s in self.busy.items()} if seconds else {},
            "replanned": list(self.replanned),
        }
