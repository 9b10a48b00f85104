"""A pipeline in virtual time: every micro-batch on every stage and link, with the simulator of a machine's lanes.

The tasks of `ClusterPlan.simulated_seconds`, with a lane for each stage and each link:

    stage 0   p0 p1 p2 p3 d0 d1 d2 d3 d0 d1 ...
    stage 1      p0 p1 p2 p3 d0 d1 d2 d3 d0 ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.simulate import Forecast, simulate
from flexengine.plan.cluster.costs import ClusterPlan
from flexengine.plan.cluster.devices import DECODE, PREFILL
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task


@dataclass(slots=True)
class PhaseTask(Task):
    """A task of a phase of generation.

    Attributes:
        phase: PREFILL or DECODE.
        seconds: how long it takes.
    """

    phase: str = ""
    seconds: float = 0.0


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
        stages, hops = (self.prefill, self.hop_prefill) if phase == PREFILL else (self.decode, self.hop_decode)
        for stage, seconds in enumerate(stages):
            reads: tuple[tuple[object, ...], ...] = (what,)
            if phase == DECODE and step == 1 and stage == 0:
                reads += tuple(("part", cohort, part) for part in range(self.parts))
            cell = Cell(step, stage, cohort)
            yield PhaseTask(Op.COMPUTE, cell, f"stage {stage}", reads, (what,), phase, seconds)
            if stage < len(hops):
                yield PhaseTask(Op.LEAVE, cell, f"hop {stage}", (what,), (what,), phase, hops[stage])
        if self.back and len(stages) > 1:
            yield PhaseTask(Op.ENTER, Cell(step, stage, cohort), "back", (what,), (what,), phase, self.back)

    def simulate(self) -> Forecast[PhaseTask]:
        """Return the simulated round."""
        return simulate(self.program(), lambda task: task.seconds)
