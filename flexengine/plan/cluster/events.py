"""A pipeline in virtual time: every micro-batch on every stage and link, with the simulator of a machine's lanes.

Prefill parts of all cohorts flow first, in order. A cohort's first decode step waits for all of its parts, and every
further step for the tokens of the step before, which travel from the last stage back to the first.

    stage 0   p0 p1 p2 p3 d0 d1 d2 d3 d0 d1 ...
    stage 1      p0 p1 p2 p3 d0 d1 d2 d3 d0 ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexengine.plan.cluster.devices import DECODE, PREFILL
from flexengine.plan.cluster.plan import ClusterPlan
from flexengine.schedule.order import Cell
from flexengine.schedule.simulate import Forecast, simulate
from flexengine.schedule.tasks import Op, Task

BACK = "back"


@dataclass(slots=True)
class PhaseTask(Task):
    """A task of a phase of generation. phase: PREFILL or DECODE."""

    phase: str = ""


@dataclass(frozen=True)
class Pipeline:
    """Seconds of one micro-batch on each stage and link, and the number of micro-batches.

    Attributes:
        prefill, decode: seconds by stage.
        hop_prefill, hop_decode: seconds of the link after each stage but the last.
        back: seconds of the link from the last stage to the first.
        parts: prefill micro-batches of a cohort.
        cohorts: decode micro-batches.
        steps: decode steps.
    """

    prefill: Sequence[float]
    decode: Sequence[float]
    hop_prefill: Sequence[float] = ()
    hop_decode: Sequence[float] = ()
    back: float = 0.0
    parts: int = 1
    cohorts: int = 1
    steps: int = 0

    @staticmethod
    def of(plan: ClusterPlan) -> "Pipeline":
        """Return the pipeline of one round of a plan."""
        priced, numbers = plan.priced, plan.numbers
        return Pipeline(priced.prefill, priced.decode, priced.hop_prefill, priced.hop_decode, priced.back,
                        numbers.prefills // numbers.cohorts, numbers.cohorts, numbers.steps)  # fmt: skip

    def seconds(self, task: PhaseTask) -> float:
        """Return the seconds of a task."""
        if task.lane == BACK:
            return self.back
        stage, first = task.cell.layer, task.phase == PREFILL
        if task.lane.startswith("stage"):
            return (self.prefill if first else self.decode)[stage]
        return (self.hop_prefill if first else self.hop_decode)[stage]

    def program(self) -> Iterator[PhaseTask]:
        """Yield the tasks of one round, in program order."""
        for cohort in range(self.cohorts):
            for part in range(self.parts):
                yield from self._pass(PREFILL, 0, cohort, ("part", cohort, part))
        for step in range(1, self.steps + 1):
            for cohort in range(self.cohorts):
                yield from self._pass(DECODE, step, cohort, ("cohort", cohort))

    def _pass(self, phase: str, step: int, cohort: int, what: tuple[object, ...]) -> Iterator[PhaseTask]:
        """Yield the tasks of one micro-batch on its way through the stages."""
        last = len(self.prefill) - 1
        for stage in range(last + 1):
            reads: tuple[tuple[object, ...], ...] = (what,)
            if phase == DECODE and step == 1 and stage == 0:
                reads += tuple(("part", cohort, part) for part in range(self.parts))
            cell = Cell(step, stage, cohort)
            yield PhaseTask(Op.COMPUTE, cell, f"stage {stage}", reads, (what,), phase)
            if stage < last and (self.hop_prefill or self.hop_decode):
                yield PhaseTask(Op.LEAVE, cell, f"hop {stage}", (what,), (what,), phase)
        if self.back and last:
            yield PhaseTask(Op.ENTER, Cell(step, last, cohort), BACK, (what,), (what,), phase)

    def simulate(self) -> Forecast[PhaseTask]:
        """Return the simulated round."""
        return simulate(self.program(), self.seconds)
