"""A job of a file that a fleet runs: the journal, the manifest and the output are those of a single engine."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Protocol

from flexengine.activity import activity, message
from flexengine.apps.fleet.member import (
    COUNTS,
    MOST_ROWS,
    Description,
    Failure,
    Recipe,
    ShardAnswer,
    results_of,
    shard_rows,
    shards,
)
from flexengine.config import Result
from flexengine.engine.summary import JobCounts
from flexengine.errors import InvalidInput, MemberFailed
from flexengine.job.resume import JobStore
from flexengine.job.rows import Row
from flexengine.job.same_job import Manifest, manifest_of
from flexengine.plan.formatting import count


class Fleet(Protocol):
    """Runs shards with members on some machines."""

    actors: int

    def describe(self, recipe: Recipe, sample: bytes) -> Description | Failure:
        """Return what a member says of its engine; see `FleetMember.describe`."""
        ...

    def answers(self, recipe: Recipe, shards: Iterable[bytes]) -> Iterator[ShardAnswer | Failure]:
        """Yield the answers to all shards, in any order, each at least once."""
        ...


class FleetRunner:
    """Computes the rows of a job with a fleet; see `RowRunner`.

    Args:
        shard_rows: rows of a shard; None divides the rows evenly.
        look: called after each shard; may raise an error.
    """

    def __init__(
        self, fleet: Fleet, recipe: Recipe, shard_rows: int | None = None, look: Callable[[], None] = lambda: None
    ) -> None:
        self.fleet, self.recipe = fleet, recipe
        self._shard_rows, self._look = shard_rows, look
        self._counts: Counter[str] = Counter()
        self._members: Counter[str] = Counter()  # rows that each finished
        self._seconds = 0.0
        self.about: Description | None = None  # what a member said of its engine; set by `open`

    def open(self, store: JobStore) -> str:
        self.about = self._described(store)
        return self.about.name

    def manifest(self, store: JobStore, known: Manifest) -> Manifest:
        assert self.about is not None
        return manifest_of(store.rows, self.recipe.params, self.about.engine, self.about.switches)

    def results(self, store: JobStore, rows: Iterable[Row]) -> Iterator[Result]:
        """Yield the results of rows. Raise MemberFailed if a member failed, or refuses the job."""
        assert self.about is not None
        settings = store.settings or self.about.settings
        self.recipe = replace(self.recipe, agreed=replace(self.about, settings=settings))
        if settings:
            store.save_settings(dict(settings))
        began, left = time.monotonic(), store.total - store.resumed
        parts = shards(rows, self._shard_rows or shard_rows(left, self.fleet.actors))
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
                    yield result
                    work.advance()
                store.save(at_once=False)
                self._seconds = time.monotonic() - began
                self._look()
        if missing := left - len(done):
            raise MemberFailed(f"{missing} rows have no result although Ray ended the job; run the same command again")

    def summary(self, counts: JobCounts, ran: bool) -> dict[str, Any]:
        """Return the summary as JSON values, of which only `job` is returned if no row was run."""
        job = {"job": asdict(counts)}
        if not ran or self.about is None:
            return job
        return {
            "model": self.about.name,
            "device": self.about.engine["device"],
            "dtype": self.about.engine["dtype"],
            "actors": self.fleet.actors,
            "members": dict(self._members),
            **{name: self._counts[name] for name in COUNTS},
            "total_seconds": self._seconds,
            "generated_tok_s": self._counts["generated_tokens"] / self._seconds if self._seconds else 0.0,
            "lossy": dict(self.recipe.agreed.settings.get("lossy", {})) if self.recipe.agreed else {},
            "verified": self.about.verified,
            **job,
        }

    def _described(self, store: JobStore) -> Description:
        """Return what a member says of its engine. It plans with the first rows that are not broken."""
        rows = islice((row for row in store.rows if row.error is None), MOST_ROWS)
        with activity("opening", "opening the model in an actor"):
            about = self.fleet.describe(self.recipe, next(shards(rows, MOST_ROWS), b""))
        if isinstance(about, Failure):
            raise _error(about, about.running)
        if "allow" in about.switches:
            if not about.settings and store.total:
                raise InvalidInput(
                    f"none of the first {MOST_ROWS:,} rows can be run, by which the lossy switches would be chosen for"
                    " all actors; name the switches, or remove these rows"
                )
            message(f"chosen: {about.lossy}")
        return about


def _error(failure: Failure, running: bool) -> Exception:
    """Return the error of a member. running: whether rows may have been stored."""
    text = f"{failure.member}: {failure.message}"
    if not running:
        return InvalidInput(text)
    return MemberFailed(f"{text}; run the same command again to continue the job")
