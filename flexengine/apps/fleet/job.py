"""A job of a file that a fleet runs, and its members: engines that run shards, parts of a job that one actor runs in
one call. The journal, the manifest and the output are those of a single engine. Nothing here knows Ray."""

import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any, Protocol, cast

from flexengine.activity import activity, message
from flexengine.apps.fleet.space import ALL, Share
from flexengine.config import Result, SamplingParams
from flexengine.engine.engine import Engine
from flexengine.engine.file_job import CACHE, PREFILL_TOKENS, check_rows, engine_part, settings_of, take_over
from flexengine.engine.options import EngineOptions
from flexengine.engine.summary import JobCounts, JobRows
from flexengine.errors import (
    ONE_SEQUENCE,
    FlexError,
    InvalidInput,
    MemberFailed,
    OutOfMemory,
    RanOut,
    StageFailed,
    StageLost,
    WorkerLost,
)
from flexengine.guests.stages.group import PipelineGroup
from flexengine.job.bounds import most_characters
from flexengine.job.columns import generated
from flexengine.job.journal import decode_record, encode_record, result_of, value_of
from flexengine.job.manifest import LOSSY, Manifest, manifest_of
from flexengine.job.resume import JobStore
from flexengine.job.rows import Row
from flexengine.job.same_job import differences
from flexengine.lossy import Lossy
from flexengine.plan.formatting import count
from flexengine.plan.workload import Workload

COUNTS = ("rows", "failed", "prompt_tokens", "computed_prompt_tokens", "generated_tokens", "scored_tokens", "sweeps",
          "load_seconds", "prefill_seconds", "decode_seconds")  # fmt: skip
PER_ACTOR = 4  # shards of an actor, at least, so that all actors end at about the same time
MOST_ROWS = 2048  # of a shard, as a lost actor repeats its shard


@dataclass(frozen=True)
class Description:
    """The values that a job needs of its engines before it begins."""

    name: str
    # engine, switches: parts of the manifest; see `engine_part` and `Session.switches`.
    engine: Mapping[str, Any]
    switches: Mapping[str, Any]
    settings: Mapping[str, Any]  # see `settings_of`; empty if there is no row to plan with
    lossy: str  # the lossy switches as text
    # Comparisons of the model's files with their checksums; None if they were not requested.
    verified: Mapping[str, Any] | None


@dataclass(frozen=True)
class Recipe:
    """All that a member is made of."""

    options: Mapping[str, Any]  # see EngineOptions, with the model
    # Sampling parameters of rows without fields of these names.
    params: SamplingParams = field(default_factory=SamplingParams)
    chat: bool = False  # whether prompts are run as a user's messages
    agreed: Description | None = None  # what the first member described; None for this member
    began: datetime | None = None  # see JobRows
    folder: str = ""  # working directory of the command, where names of files in the options begin
    secret: str = field(default="", repr=False)  # for connections; "" for that of each machine's environment


@dataclass(frozen=True)
class Failure:
    """An error of a member, in a form that every process can read."""

    member: str  # host and process number
    message: str
    running: bool  # whether the job was running, so that the same command may succeed later
    lost: bool = False  # whether a stage of the member is lost, so that the same shard may succeed on a new member


@dataclass(frozen=True)
class ShardAnswer:
    """The results of a shard."""

    member: str  # host and process number
    results: bytes  # see `results_of`
    counts: Mapping[str, float]  # COUNTS of the engine's summary


def this_member() -> str:
    """Return host and process number of this process."""
    return f"{os.uname().nodename}, process {os.getpid()}"


def failure_of(error: Exception) -> Failure:
    """Return an error as a record."""
    if not isinstance(error, FlexError):
        return Failure(this_member(), f"{type(error).__name__}: {error}", running=True)
    running = isinstance(error, MemberFailed | RanOut | StageFailed | StageLost | WorkerLost)
    return Failure(this_member(), str(error), running, isinstance(error, StageLost))


def shard_rows(rows: int, actors: int) -> int:
    """Return how many rows a shard has. rows: rows to run."""
    return max(1, min(MOST_ROWS, math.ceil(rows / (PER_ACTOR * actors))))


def shards(rows: Iterable[Row], size: int) -> Iterator[bytes]:
    """Yield rows in shards of `size` rows, without the fields that only the output needs. They may be of any type that
    a table can hold, so they are pickled, as Ray pickles whatever it sends."""
    left = (replace(row, fields={}, request={} if row.error else row.request, custom_id=None) for row in rows)
    while part := list(islice(left, size)):
        yield pickle.dumps(part)


def rows_of(shard: bytes) -> list[Row]:
    """Return the rows of a shard."""
    return cast(list[Row], pickle.loads(shard))


def packed(results: Iterable[Result]) -> bytes:
    """Return results as records of a journal, without their prompts."""
    lines = []
    for result in results:
        result.prompt = None  # the output has the row's own fields
        lines.append(encode_record(value_of(result)))
    return b"".join(lines)


def results_of(lines: bytes) -> Iterator[Result]:
    """Yield results that `packed` packed. Raise ValueError if a record is damaged."""
    for line in lines.splitlines(keepends=True):
        value: dict[str, Any] | None = decode_record(line)
        if value is None:
            raise ValueError("a record of an actor's results is damaged")
        yield result_of(value)


def _settings(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Return the settings of a job's plan; none if all its rows are too long. Choose the lossy switches, if allowed."""
    try:
        engine.planner.choose_lossy(workload)
        layout = engine.planner.plan(workload).layout
        return {} if layout is None else settings_of(engine, layout.policy.prefill_tokens)
    except OutOfMemory as error:
        if not error.what.startswith(ONE_SEQUENCE):
            raise
        return {}


class FleetMember:
    """An engine that is opened when it is first used.

    Args:
        group: the processes of a pipeline, of which this one is the first; None for one process.
        share: part of this machine that the engine may use.
    """

    def __init__(self, recipe: Recipe, group: PipelineGroup | None = None, share: Share = ALL) -> None:
        self.recipe, self._group, self._share = recipe, group, share
        self._engine: Engine | None = None

    def describe(self, sample: bytes) -> Description | Failure:
        """Return the values that all members shall share. sample: a shard, from which the engine plans; b"" if there is
        no row to run."""
        try:
            engine, params = self._opened(), self.recipe.params
            engine.reader.check(params)
            engine.reader.check_chat(self.recipe.chat)
            engine.choose_bits()
            own, switches = engine_part(engine, {}), engine.switches
            workload = engine.reader.survey(rows_of(sample), params) if sample else None
            settings = _settings(engine, workload) if workload is not None and workload.count else {}
            verified = vars(engine.core.verifier) if engine.core.verifier else None
            return Description(engine.core.source.name, own, switches, settings, engine.lossy.described, verified)
        except Exception as error:
            return failure_of(error)

    def run(self, shard: bytes) -> ShardAnswer | Failure:
        """Return the results of a shard."""
        try:
            engine, params = self._opened(), self.recipe.params
            own = rows_of(shard)
            counts = JobRows(len(own), began=self.recipe.began)
            results = generated(own, lambda rows: list(engine.results(rows, params, counts)))
            summary = engine.summary
            return ShardAnswer(this_member(), packed(results), {name: getattr(summary, name) for name in COUNTS})
        except Exception as error:
            return failure_of(error)

    def close(self) -> None:
        """Free the memory of the engine, and let the other stages leave."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _opened(self) -> Engine:
        if self._engine is None:
            engine = open_engine(self.recipe, self._group, self._share)
            try:
                if self.recipe.agreed is not None:
                    _agree(engine, self.recipe.agreed)
            except BaseException:
                engine.close()
                raise
            self._engine = engine
        return self._engine


def open_engine(recipe: Recipe, group: PipelineGroup | None, share: Share) -> Engine:
    """Return the engine of a member, or of a further stage of it. Lossy switches are those that the first member
    chose, if it has described itself."""
    options = dict(recipe.options)
    if share.ram and options.get(share.option) is None:
        options[share.option] = share.ram
    if recipe.agreed is not None and recipe.agreed.settings:
        options |= {"lossy": Lossy(**recipe.agreed.settings[LOSSY]), "allow": ()}
    engine = Engine(**options, group=group, sharing=share.engines, worker_sharing=share.fleet)
    engine.reader.most = most_characters(EngineOptions(**recipe.options).given_ram)  # the share is of free RAM
    return engine


def _agree(engine: Engine, agreed: Description) -> None:
    """Take over the choices of the first member. Raise InvalidInput if this engine differs from it."""
    settings, own = agreed.settings, engine_part(engine, dict(agreed.engine))
    known = dict(agreed.engine) | ({CACHE: settings[CACHE]} if settings.get(CACHE) else {})
    if different := differences(known, {name: value for name, value in own.items() if name in known}):
        differs = f"this machine differs from the one that began the job: {'; '.join(different)}"
        raise InvalidInput(f"{differs}; give all machines of the fleet the same model, versions and kind of device")
    take_over(engine, settings)
    engine.planner.keep_prefill(settings.get(PREFILL_TOKENS))


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
        self.about: Description  # what a member said of its engine; set by `open`

    def open(self, store: JobStore) -> str:
        """Take over what a member says of its engine. It plans with the first rows that are not broken."""
        check_rows(store.rows, self.recipe.params)
        rows = islice((row for row in store.rows if row.error is None), MOST_ROWS)
        with activity("opening", "opening the model in an actor"):
            about = self.fleet.describe(self.recipe, next(shards(rows, MOST_ROWS), b""))
        if isinstance(about, Failure):
            raise _error(about, about.running)
        if "allow" in about.switches:
            if not about.settings and store.total:
                none = f"none of the first {MOST_ROWS:,} rows can be run, by which the lossy switches would be chosen"
                raise InvalidInput(f"{none} for all actors; name the switches, or remove these rows")
            message(f"chosen: {about.lossy}")
        self.about = about
        return about.name

    def manifest(self, store: JobStore, known: Manifest) -> Manifest:
        return manifest_of(store.rows, self.recipe.params, self.about.engine, self.about.switches)

    def results(self, store: JobStore, rows: Iterable[Row]) -> Iterator[Result]:
        """Yield the results of rows. Raise MemberFailed if a member failed, or refuses the job."""
        settings = store.settings or self.about.settings
        self.recipe = replace(self.recipe, agreed=replace(self.about, settings=settings), began=store.began)
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
        if not ran:
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


def _error(failure: Failure, running: bool) -> Exception:
    """Return the error of a member. running: whether rows may have been stored."""
    text = f"{failure.member}: {failure.message}"
    if not running:
        return InvalidInput(text)
    return MemberFailed(f"{text}; run the same command again to continue the job")
