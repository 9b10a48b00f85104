"""A plan of a cluster: a case with its stages, formats and price, and the strategy that runs it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flexengine.plan.cluster.case_costs import CaseCosts, Priced, UnitChoice, price
from flexengine.plan.cluster.costs import ClusterTask, Order, cohort_policy
from flexengine.plan.cluster.devices import Device
from flexengine.plan.cluster.job import Shape
from flexengine.plan.cluster.model import Format
from flexengine.policy import thousandths
from flexengine.strategy import StagePlan, Strategy


@dataclass(frozen=True)
class ClusterPlan:
    """Stages of one case.

    Attributes:
        task: what was planned.
        order: devices of the case; some may have no layers.
        shape: micro-batches.
        numbers: costs of the case.
        stage_of, choice_of: by unit, the position of its device in `order`, and its choice.
    """

    task: ClusterTask
    order: Order
    shape: Shape
    numbers: CaseCosts
    stage_of: Sequence[int]
    choice_of: Sequence[int]

    @cached_property
    def priced(self) -> Priced:
        """Return seconds, bytes and cost."""
        return price(self.numbers, self.stage_of, self.choice_of)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that have layers, in order."""
        return tuple(self.order[j] for j in self.priced.used)

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Return (first, end) of the layers of each used device."""
        ranges = []
        for j in self.priced.used:
            units = [i for i, stage in enumerate(self.stage_of) if stage == j]
            ranges.append((self.task.groups[units[0]][0], self.task.groups[units[-1]][-1] + 1))
        return tuple(ranges)

    @cached_property
    def choices(self) -> tuple[UnitChoice, ...]:
        """Return the choice of every layer."""
        return tuple(
            self.numbers.choices[c] for c, unit in zip(self.choice_of, self.task.groups, strict=True) for _ in unit
        )

    @property
    def formats(self) -> tuple[Format, ...]:
        """Return the format of every layer."""
        return tuple(choice.form for choice in self.choices)

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens per second of the job."""
        return self.task.job.rows * self.task.job.output / self.priced.seconds

    def host_share(self, stage: int) -> float:
        """Return the share of a used stage's weights that is on the host."""
        first, end = self.layers[stage]
        model = self.task.models[self.devices[stage].kind]
        sizes = [(model.layers[j].bytes[self.choices[j].form], self.choices[j].host) for j in range(first, end)]
        return sum(size for size, host in sizes if host) / sum(size for size, _ in sizes)

    def strategy(self) -> Strategy:
        """Return the strategy that `flexengine run --strategy` executes."""
        stages = []
        for k, (device, (first, end)) in enumerate(zip(self.devices, self.layers, strict=True)):
            host = self.host_share(k)
            tokens = max(self.shape.prefill * self.task.job.longest_prompt, self.shape.decode)
            policy = replace(cohort_policy(self.shape.decode, tokens), weights=thousandths((1 - host, host, 0.0)))
            stages.append(StagePlan(device.name, (first, end), self.formats[first:end], policy))
        return Strategy(self.task.model.name, len(self.task.model.layers), tuple(stages), self.shape.prefill,
                        self.shape.decode, self.shape.cohorts)  # fmt: skip
