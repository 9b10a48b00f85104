"""Chains of cores in one process, each with a range of a model's layers, that generate together."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexengine import Policy, SamplingParams
from flexengine.config import Result
from flexengine.engine.core import Core
from flexengine.engine.generation import Generation
from flexengine.engine.options import EngineOptions
from flexengine.engine.planner import Planner
from flexengine.engine.stages import JobResources
from flexengine.engine.summary import JobRows, Progress, SweepReports
from flexengine.engine.survey import Arrangement, PromptReader
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.worker.hidden import Port, Ports


class RamPort(Port):
    """Port between two stages of one process that run one after the other. Holds hidden states in RAM.

    `take` raises KeyError if the stage before has not put the gpu_batch.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def put(self, batch: int, hidden: Tensor) -> None:
        self._held[batch] = torch.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)

    def take(self, batch: int, target: Tensor) -> None:
        target.copy_(self._held.pop(batch))


@dataclass
class Chain:
    """Cores with the layers cuts[0] .. cuts[1] - 1, cuts[1] .. cuts[2] - 1, ... of a model, one policy for each."""

    cores: list[Core]
    policies: Sequence[Policy]

    def layouts(self, workload: Workload) -> list[Layout]:
        planners = [self._planner(core, policy) for core, policy in zip(self.cores, self.policies, strict=True)]
        return [planner.layout(workload) for planner in planners]

    def _planner(self, core: Core, policy: Policy) -> Planner:
        return Planner(core.machine, core.opened, policy=policy)

    def generate(self, rows: Iterable[Any], params: SamplingParams) -> list[Result]:
        rows = list(rows)
        last = self.cores[-1]
        reader = PromptReader(last.tokenizer, last.skeleton, True)
        workload = reader.survey(rows, params)
        between = [RamPort() for _ in self.cores[1:]]
        stages = []
        for i, (core, policy) in enumerate(zip(self.cores, self.policies, strict=True)):
            planner = self._planner(core, policy)
            ports = Ports(between[i - 1] if i else None, between[i] if i < len(between) else None)
            stages.append(core.stage(planner.watch(workload, planner.layout(workload)), ports=ports))
        resources = JobResources(stages[0], stages[1:], 1)
        reports = SweepReports(None, Progress(), JobRows())
        arrangement = Arrangement(reader.requests(rows, params), True)
        generation = Generation(resources, arrangement, last.tokenizer, last.eos, reports)
        try:
            with resources:
                return sorted(generation.run(None), key=lambda result: result.index)
        finally:
            resources.close()


@contextmanager
def chained(
    directory: Any, cuts: Sequence[int], policies: Policy | Sequence[Policy], **options: Any
) -> Iterator[Chain]:
    """Yield a chain of cores. options: of EngineOptions, for each of them."""
    ranges = list(pairwise(cuts))
    each = [policies] * len(ranges) if isinstance(policies, Policy) else policies
    with ExitStack() as stack:
        cores = []
        for layers, policy in zip(ranges, each, strict=True):
            cores.append(Core(EngineOptions(model=directory, policy=policy, **options), layers=layers))
            stack.callback(cores[-1].close)
        yield Chain(cores, each)
