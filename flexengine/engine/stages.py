"""Stages: parts of a model that compute a sweep one after the other. A single machine is a chain of one stage."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from flexengine.errors import InvalidInput
from flexengine.plan.feedback import Watch
from flexengine.plan.layout import Layout
from flexengine.runtime.execute import Executor
from flexengine.schedule import sweeps
from flexengine.schedule.order import Batch
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sweeps
from flexengine.worker.worker import Text, Worker

# Policy fields that must be equal in all stages of a chain, which compute the same gpu_batches.
SHARED = ("gpu_batch_size", "num_gpu_batches", "cache", "activations", "schedule", "prefill_tokens", "delegate")


@dataclass(frozen=True)
class Stage:
    """The resources that `Core.stage` allocates for a range of layers under one layout.

    Attributes:
        worker: performs tasks on tensors.
        program: the tasks of a sweep.
        executor: runs tasks on lanes.
        watch: compares sweeps with their prediction.
    """

    worker: Worker
    program: Program
    executor: Executor
    watch: Watch

    @property
    def layout(self) -> Layout:
        """The layout under which memory is allocated."""
        return self.watch.layout

    def cells(self, batches: Sequence[Batch]) -> int:
        """Return the number of cells of a sweep of this stage."""
        return len(self.program.streamed) * len(batches)

    def sweep(self, batches: list[Batch], sweeps: Sweeps, texts: Mapping[int, Text]) -> float:
        """Compute one sweep of this stage. Return its seconds.

        Args:
            batches: gpu_batches of the sweep.
            sweeps: after `Sweeps.begin` for this sweep.
            texts: tokens, by sequence id.
        """
        began = time.perf_counter()
        self.worker.begin(batches, texts, sweeps.stems)
        self.worker.weights.machine.synchronize()
        self.executor.run(self.program.sweep(sweeps.sweep, batches, sweeps.another))
        return time.perf_counter() - began


class JobResources:
    """The resources of a job: admission, and the stages that compute. As a context manager, it starts and ends lanes.

    Attributes:
        stages: in the order of their layers.
        sweeps: admission, and the gpu_batches of each sweep.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Chain stages. Raise InvalidInput as `check_chain`."""
        self.stages = tuple(stages)
        check_chain(self.stages)
        layouts = [stage.layout for stage in self.stages]
        pools = {tier: tuple(pool for each in layouts for pool in each.pools[tier]) for tier in layouts[0].pools}
        self.sweeps = Sweeps(layouts[0].policy, pools)
        self._lanes = contextlib.ExitStack()

    def __enter__(self) -> "JobResources":
        for stage in self.stages:
            self._lanes.enter_context(stage.executor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lanes.__exit__(kind, error, trace)

    @property
    def cuda(self) -> bool:
        """Whether a stage computes on a CUDA GPU."""
        return any(stage.worker.weights.machine.kind == "cuda" for stage in self.stages)

    @property
    def pending_bytes(self) -> int:
        """Bytes of weights that the first sweep reads into memory."""
        return sum(stage.worker.weights.pending_bytes for stage in self.stages)

    def watch(self, look: Callable[[int], None]) -> None:
        """Call `look` during sweeps; see `Executor`."""
        for stage in self.stages:
            stage.executor.look = look

    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        """Take KV pages in every stage until the sequence can hold `tokens` tokens."""
        for stage in self.stages:
            stage.worker.cache.claim(sequence, tokens)

    def release(self, sequence: sweeps.Sequence) -> None:
        """Return the sequence's KV pages of every stage to the pools."""
        for stage in self.stages:
            stage.worker.cache.release(sequence)

    def abandon(self) -> None:
        """Start no further task, and end unfinished forward passes."""
        for stage in self.stages:
            stage.executor.abandon("device", stage.worker.drop)

    def close(self) -> None:
        """Free the job's memory in every stage. Weights stay for the next job."""
        for stage in self.stages:
            stage.worker.close()


def check_chain(stages: Sequence[Stage]) -> None:
    """Raise InvalidInput if the stages do not hold each layer of one model once, in order, or if their policies form
    different gpu_batches."""
    skeletons = [stage.worker.skeleton for stage in stages]
    ranges = [skeleton.layer_range for skeleton in skeletons]
    total = skeletons[0].total
    ends = [0, *(end for _, end in ranges)]
    if [first for first, _ in ranges] != ends[:-1] or ends[-1] != total or {s.total for s in skeletons} != {total}:
        held = ", ".join(f"{first}..{end - 1} of {s.total}" for (first, end), s in zip(ranges, skeletons, strict=True))
        raise InvalidInput(f"the stages hold layers {held}; together they must hold each layer of one model once, in"
                           " order")  # fmt: skip
    policies = [stage.layout.policy for stage in stages]
    for name in SHARED:
        values = [getattr(policy, name) for policy in policies]
        if any(value != values[0] for value in values):
            raise InvalidInput(f"the stages' policies have {name} {', '.join(map(str, values))}; all stages of a chain"
                               " must have the same")  # fmt: skip
