"""A job of a file that a fleet runs: the journal, the manifest and the output are those of a single engine."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Protocol

from flexengine.activity import activity, message
from flexengine.apps.fleet.member import COUNTS, Agreed, Answer, Description, Failure, Recipe
from flexengine.apps.fleet.shards import MOST_ROWS, results_of, shard_rows, shards
from flexengine.config import Result
from flexengine.engine.agreement import manifest
from flexengine.engine.summary import JobCounts
from flexengine.errors import InvalidInput, MemberFailed
from flexengine.job.resume import Job
from flexengine.job.rows import Row
from flexengine.plan.formatting import count


class Fleet(Protocol):
    """Runs shards with members on some machines."""

    actors: int

    def describe(self, recipe: Recipe, sample: bytes) -> Description | Failure:
        """Return what a member says of its engine; see `Member.describe`."""
        ...

    def answers(self, recipe: Recipe, shards: Iterable[bytes]) -> Iterator[Answer | Failure]:
        """Yield the answers to all shards, in any order, each at least once."""
        ...


class FleetJob:
    """Runs the rows of a job that have no result yet, on a fleet.

    Attributes:
        ran: whether rows were run.
        about: what a member said of its engine; set by `begin`.
    """

    def __init__(self, fleet: Fleet, job: Job, recipe: Recipe, rows_of_shard: int | None = None) -> None:
        """Run a job.

        Args:
            job: an open job.
            recipe: what all members are made of.
            rows_of_shard: None divides the rows evenly.
        """
        self.fleet, self.job, self.recipe = fleet, job, recipe
        self.ran = False
        self._size = rows_of_shard
        self._rows: Iterable[Row] = ()
        self._counts: Counter[str] = Counter()
        self._members: Counter[str] = Counter()  # rows that each finished
        self._seconds = 0.0
        self.about: Description | None = None

    def begin(self) -> bool:
        """Compare this run with the run that began the job, and take over its choices. Return whether rows remain.

        Raises:
            InvalidInput: as for `FileJob.begin`, or a member refuses its options.
        """
        job = self.job
        self._say_note()
        self.about = about = self._described()
        made = manifest(job.rows, self.recipe.params, about.engine, about.switches)
        self._rows = job.begin(lambda _: made, about.name)
        self._say_note()
        if job.resumed:
            message(f"{job.resumed} of {job.total} rows were done before")
        if not self._rows or not job.total:
            return False
        settings = job.settings or about.settings
        self.recipe = replace(self.recipe, agreed=Agreed(about.engine, settings))
        if settings:
            job.save_settings(dict(settings))
        return True

    def results(self, look: Callable[[], None] = lambda: None) -> Iterator[Result]:
        """Run the rows that remain. Yield every result after it was stored, without its prompt.

        Args:
            look: called after each shard; may raise an error.

        Raises:
            MemberFailed: a member failed, or refuses the job.
        """
        if not self._rows or not self.job.total:
            return
        self.ran = True
        job, began = self.job, time.monotonic()
        left = job.total - job.resumed
        parts = shards(self._rows, self._size or shard_rows(left, self.fleet.actors))
        done = set[int]()  # rows of this run: an actor that is lost after its answer may have been repeated
        text = f"running {count(left, 'row', 'rows')} on {count(self.fleet.actors, 'actor', 'actors')}"
        with activity("generating", text, left, "rows") as work:
            for answer in self.fleet.answers(self.recipe, parts):
                if isinstance(answer, Failure):
                    raise _error(answer, running=True)
                fresh = [result for result in results_of(answer.results) if result.index not in done]
                done.update(result.index for result in fresh)
                if fresh:
                    self._counts.update(answer.counts)
                    self._members[answer.member] += len(fresh)
                for result in fresh:
                    job.take(result)
                    work.advance()
                    yield result
                job.save(at_once=False)
                self._seconds = time.monotonic() - began
                look()
        if missing := left - len(done):
            raise MemberFailed(f"{missing} rows have no result although Ray ended the job; run the same command again")

    def end(self) -> dict[str, Any]:
        """Write the output file. Return the summary as JSON values."""
        job = self.job
        if not job.finished:
            with activity("writing", "writing the results", job.total, "rows"):
                job.end()
        counts = JobCounts(job.total, job.done, job.failed, job.resumed)
        if not self.ran:
            return {"job": asdict(counts)}
        assert self.about is not None
        rate = self._counts["generated_tokens"] / self._seconds if self._seconds else 0.0
        return {
            "model": self.about.name, "device": self.about.engine["device"], "dtype": self.about.engine["dtype"],
            "actors": self.fleet.actors, "members": dict(self._members),
            **{name: self._counts[name] for name in COUNTS},
            "total_seconds": self._seconds, "generated_tok_s": rate,
            "lossy": dict(self.recipe.agreed.settings.get("lossy", {})) if self.recipe.agreed else {},
            "verified": self.about.verified, "job": asdict(counts),
        }  # fmt: skip

    def _described(self) -> Description:
        """Return what a member says of its engine. It plans with the first rows that are not broken."""
        rows = islice((row for row in self.job.rows if row.error is None), MOST_ROWS)
        with activity("opening", "opening the model in an actor"):
            about = self.fleet.describe(self.recipe, next(shards(rows, MOST_ROWS), b""))
        if isinstance(about, Failure):
            raise _error(about, about.running)
        if "allow" in about.switches:
            if not about.settings and self.job.total:
                raise InvalidInput(f"none of the first {MOST_ROWS:,} rows can be run, by which the lossy switches"
                                   " would be chosen for all actors; name the switches, or remove these"
                                   " rows")  # fmt: skip
            message(f"chosen: {about.lossy}")
        return about

    def _say_note(self) -> None:
        if note := self.job.take_note():
            message(note)


def _error(failure: Failure, running: bool) -> Exception:
    """Return the error of a member. running: whether rows may have been stored."""
    text = f"{failure.member}: {failure.message}"
    if not running:
        return InvalidInput(text)
    return MemberFailed(f"{text}; run the same command again to continue the job")
