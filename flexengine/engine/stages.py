"""Stages: parts of a model that compute a sweep one after the other. A single machine is a chain of one stage."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Self

from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.model.sample import Sampled
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor, TaskFailed, cause_of, shortage
from flexengine.schedule import sweeps
from flexengine.schedule.batches import Batch
from flexengine.schedule.pages import Pool
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sweeps
from flexengine.worker.hidden import Ports
from flexengine.worker.row_sequence import RowSequence
from flexengine.worker.worker import Worker


class Sweep(NamedTuple):
    """A sweep of one cohort, as all stages compute it."""

    number: int
    batches: list[Batch]  # its gpu_batches
    stems: Mapping[int, Sequence[int]]  # tokens of each trunk that the sweep computes, by its number
    another: bool  # whether another sweep follows, of any cohort


class StageResult(NamedTuple):
    """A sweep that a stage has computed."""

    seconds: float  # seconds that the stage computed
    sampled: Mapping[int, Sampled]  # by sequence id, the sampled token; empty unless the stage ends with the head
    scored: Mapping[int, list[Sampled]]  # by sequence id, the scored targets; empty unless the stage ends with the head


class Stage(ABC):
    """A range of layers that computes sweeps, in this process or in another one."""

    layers: tuple[int, int, int]  # first layer, last layer + 1, and layers of the whole model
    policy: Policy
    pools: Mapping[str, tuple[Pool, ...]]  # KV pages, by tier and group of layers
    cuda: bool  # whether it computes on a CUDA GPU

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: Any) -> None:
        """End the threads that compute."""

    @abstractmethod
    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        """Take KV pages until the sequence can hold `tokens` tokens."""

    @abstractmethod
    def release(self, sequence: sweeps.Sequence) -> None:
        """Return the sequence's KV pages to the pools."""

    @abstractmethod
    def start(self, sweep: Sweep, members: Mapping[int, RowSequence]) -> None:
        """Compute a sweep, or let another process compute it. sweep: the sweep. Its pages are claimed. members:
        sequences that are not finished, by id."""

    @abstractmethod
    def result(self) -> StageResult:
        """Return the result of the first sweep that was started and whose result was not returned yet."""

    @abstractmethod
    def abandon(self) -> None:
        """Start no further task, and end unfinished forward passes."""

    @abstractmethod
    def close(self) -> None:
        """Free the job's memory. Weights stay for the next job."""


class LocalStage(Stage):
    """The resources that `Core.stage` allocates for a range of layers under one layout."""

    def __init__(self, worker: Worker, program: Program, executor: Executor, watch: SweepMonitor) -> None:
        self.worker, self.program, self.executor, self.watch = worker, program, executor, watch
        self.layers = (*worker.skeleton.layer_range, worker.skeleton.total)
        self.policy, self.pools = watch.layout.policy, watch.layout.pools
        self.cuda = worker.weights.machine.gpu
        self._results: deque[StageResult] = deque()

    def __enter__(self) -> Self:
        self.executor.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.executor.__exit__(*error)

    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        self.worker.cache.claim(sequence, tokens)

    def release(self, sequence: sweeps.Sequence) -> None:
        self.worker.cache.release(sequence)

    def start(self, sweep: Sweep, members: Mapping[int, RowSequence]) -> None:
        """Compute a sweep in this thread.

        Raises:
            Shortage: a task ran out of memory.
            Exception: the error of a task, with the task in a note.
        """
        began, worker = time.perf_counter(), self.worker
        worker.begin(sweep.batches, members, sweep.stems)
        worker.weights.machine.synchronize()
        error: Exception | None = None
        try:
            self.executor.run(self.program.sweep(sweep.number, sweep.batches, sweep.another))
        except TaskFailed as failed:
            error = shortage(failed, self.cuda) or cause_of(failed)
        if error is not None:  # outside of `except`: else the TaskFailed, with its traceback, would stay its context
            raise error
        self._results.append(StageResult(time.perf_counter() - began, worker.sampled, worker.scored))

    def result(self) -> StageResult:
        return self._results.popleft()

    def abandon(self) -> None:
        self.executor.abandon("device", self.worker.drop)

    def close(self) -> None:
        self.worker.close()


class JobResources:
    """The resources of a job: admission, and the stages that compute. A context manager that starts and ends lanes."""

    def __init__(self, own: LocalStage, others: Sequence[Stage] = (), cohorts: int | None = None) -> None:
        """Chain stages. Raise InvalidInput as `check_chain`. cohorts: None for one per stage."""
        self.own, self.stages = own, (own, *others)  # in the order of their layers; that of this process is the first
        check_chain(self.stages)
        pools = {tier: tuple(pool for each in self.stages for pool in each.pools[tier]) for tier in own.pools}
        self.sweeps = Sweeps(own.policy, pools, cohorts or len(self.stages))
        self._lanes = contextlib.ExitStack()

    def __enter__(self) -> "JobResources":
        for stage in self.stages:
            self._lanes.enter_context(stage)
        return self

    def __exit__(self, *error: Any) -> None:
        self._lanes.__exit__(*error)

    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        """Take KV pages in every stage until the sequence can hold `tokens` tokens."""
        for stage in self.stages:
            stage.claim(sequence, tokens)

    def release(self, sequence: sweeps.Sequence) -> None:
        """Return the sequence's KV pages of every stage to the pools."""
        for stage in self.stages:
            stage.release(sequence)

    def abandon(self) -> None:
        """Start no further task, and end unfinished forward passes."""
        for stage in self.stages:
            stage.abandon()

    def close(self) -> None:
        """Free the job's memory in every stage. Weights stay for the next job."""
        for stage in self.stages:
            stage.close()


def check_chain(stages: Sequence[Stage]) -> None:
    """Raise InvalidInput if the stages do not hold each layer of one model once, in order, or if their policies form
    different gpu_batches."""
    ranges = [stage.layers for stage in stages]
    total = ranges[0][2]
    ends = [0, *(end for _, end, _ in ranges)]
    if [first for first, _, _ in ranges] != ends[:-1] or ends[-1] != total or {n for _, _, n in ranges} != {total}:
        held = ", ".join(f"{first}..{end - 1} of {n}" for first, end, n in ranges)
        raise InvalidInput(f"the stages hold layers {held}; together they must hold each layer of one model once, in"
                           " order")  # fmt: skip
    policies = [stage.policy for stage in stages]
    for name in (field.name for field in fields(Policy) if field.name not in ("weights", "slots", "neurons")):
        values = [getattr(policy, name) for policy in policies]
        if any(value != values[0] for value in values):
            raise InvalidInput(f"the stages' policies have {name} {', '.join(map(str, values))}; all stages of a chain"
                               " must have the same")  # fmt: skip


class ProcessGroup(ABC):
    """The processes of a pipeline, from the view of one of them."""

    rank: int  # number of this process, and of its stage
    size: int  # number of processes
    local_size: int  # number of processes on this machine
    local_rank: int  # number of this process among them
    names: list[str]  # host and process number of each, for messages

    @abstractmethod
    def exchange(self, key: str, value: str) -> list[str]:
        """Return the values that all processes give, in the order of their ranks. Wait for all of them."""


class StageDriver(ABC):
    """The other stages of a pipeline, from the view of the first one."""

    ports: Ports  # ports of the first stage
    lost: list[str]  # places of attention workers that all stages replace before they prepare the next job
    measured: dict[int, dict[str, Any]]  # by stage, what it measured in the last job, as JSON values

    @abstractmethod
    def prepare(self, policy: Policy, workload: Workload, given: bool, lossy: Lossy) -> Callable[[], Sequence[Stage]]:
        """Let every other stage allocate the memory of a job. Return a function that waits for the stages.

        Args:
            policy: policy of the first stage.
            workload: sizes of the rows.
            given: whether the user gave the policy, so that weights are placed as it says in all stages.
            lossy: the lossy switches.
        """

    @abstractmethod
    def end(self) -> None:
        """End the present job in all stages, early or not. Wait until they have freed its memory."""

    @abstractmethod
    def report(self) -> tuple[dict[str, Any], ...]:
        """Return what the other stages measured in the last job, without spans, in their order."""

    @abstractmethod
    def spans(self) -> dict[str, list[list[Any]]]:
        """Return the rows of the other stages in a trace, by name."""

    @abstractmethod
    def leave(self) -> None:
        """End the processes of the other stages."""
