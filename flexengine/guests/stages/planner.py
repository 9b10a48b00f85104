"""Plans for pipelines: all stages form the same gpu_batches, and each places its own weights."""

from dataclasses import replace
from typing import Any

from flexengine.activity import message
from flexengine.engine.planner import UNLIMITED, Planner
from flexengine.guests.stages.remote import Driver, RemotePlan
from flexengine.plan.candidates import Options
from flexengine.plan.layout import Layout
from flexengine.plan.prediction import Prediction
from flexengine.plan.search import Search
from flexengine.plan.stages import block_of, for_cohorts, place_weights
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.strategy import Strategy


class PipelinePlanner(Planner):
    """Plans the jobs of a pipeline, for its first stage.

    Every stage chooses the best policy for itself. All stages then take the block of the one with the smallest block,
    and fill their memory with weights.

    Attributes:
        others: plans of the other stages for the last layout.
    """

    def __init__(self, driver: Driver, strategy: Strategy | None, *args: Any) -> None:
        super().__init__(*args)
        self.driver, self.strategy = driver, strategy
        self.others: list[RemotePlan] = []

    def layout(self, workload: Workload, resident: Policy | None = None) -> Layout:
        """Return the layout of the first stage. Raise OutOfMemory if the job does not fit in a stage."""
        layout = super().layout(workload, resident)
        self.others = self.driver.lay_out(layout.policy, workload, self.policy is not None, self.opened.lossy)
        return layout

    def _say_unused(self, searched: Search) -> None:
        message("attention workers are not used: the stages are predicted to be no faster with them")

    def choose(self, workload: Workload, resident: Policy | None = None, limits: Options = UNLIMITED) -> Prediction:
        """Return a policy for all stages, with the weights of the first one, and its prediction for the first stage.
        Arguments and errors as for `Planner.choose`; an error of another stage names the stage."""
        tokens = limits.prefill_tokens or self.prefill_tokens
        if self.strategy is not None and limits.block is None:
            shared = block_of(self.strategy, workload)
            if tokens:
                shared = replace(shared, prefill_tokens=tokens)
        else:  # the policy of the stage with the smallest block, with a gpu_batch for each stage
            others = self.driver.choose(workload, self.opened.lossy, limits.block, tokens)
            own = super().choose(workload, resident, limits).policy
            tightest = min((own, *others()), key=lambda policy: policy.block_size)
            shared = for_cohorts(tightest, self.driver.group.size)
        return place_weights(self.cost(workload), shared, self.machine.capacity, resident)
