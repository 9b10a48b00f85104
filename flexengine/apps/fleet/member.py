"""A member of a fleet: an engine that runs shards, parts of a job that one actor runs in one call. Nothing here knows
Ray."""

import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

from flexengine.apps.fleet.space import ALL, Share
from flexengine.config import Result, SamplingParams
from flexengine.engine.engine import Engine
from flexengine.engine.file_job import CACHE, PREFILL_TOKENS, engine_part, settings_of, take_over
from flexengine.engine.summary import JobRows
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
from flexengine.job.columns import generated
from flexengine.job.journal import decode_record, encode_record, result_of, value_of
from flexengine.job.rows import Row
from flexengine.job.same_job import LOSSY, differences
from flexengine.lossy import Lossy
from flexengine.plan.layout import Layout
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
    folder: str = ""  # working directory of the command, where names of files in the options begin


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


def _planned(engine: Engine, workload: Workload) -> Layout | None:
    """Return the layout of a job; None if all its rows are too long. Choose the lossy switches, if it is allowed."""
    try:
        engine.planner.choose_lossy(workload)
        return engine.planner.plan(workload).layout
    except OutOfMemory as error:
        if not error.what.startswith(ONE_SEQUENCE):
            raise
        return None


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
            settings: dict[str, Any] = {}
            workload = engine.reader.survey(rows_of(sample), params) if sample else None
            if workload is not None and workload.count and (layout := _planned(engine, workload)) is not None:
                settings = settings_of(engine, layout.policy.prefill_tokens)
            verified = vars(engine.core.verifier) if engine.core.verifier else None
            return Description(engine.core.source.name, own, switches, settings, engine.lossy.described, verified)
        except Exception as error:
            return failure_of(error)

    def run(self, shard: bytes) -> ShardAnswer | Failure:
        """Return the results of a shard."""
        try:
            engine, params = self._opened(), self.recipe.params
            results = generated(rows_of(shard), lambda rows: list(engine.results(rows, params, JobRows(len(rows)))))
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
    return Engine(**options, group=group, sharing=share.engines, worker_sharing=share.fleet)


def _agree(engine: Engine, agreed: Description) -> None:
    """Take over the choices of the first member. Raise InvalidInput if this engine differs from it."""
    settings, own = agreed.settings, engine_part(engine, dict(agreed.engine))
    known = dict(agreed.engine) | ({CACHE: settings[CACHE]} if settings.get(CACHE) else {})
    if different := differences(known, {name: value for name, value in own.items() if name in known}):
        raise InvalidInput(
            f"this machine differs from the one that began the job: {'; '.join(different)}; give all"
            " machines of the fleet the same model, versions and kind of device"
        )
    take_over(engine, settings)
    engine.planner.keep_prefill(settings.get(PREFILL_TOKENS))
