"""Plans for pipelines: all stages form the same gpu_batches, and each places its own weights."""

import json
from dataclasses import replace
from typing import Any

import torch

from flexengine import __version__
from flexengine.activity import message
from flexengine.engine.core import Core
from flexengine.engine.fingerprint import numerics
from flexengine.engine.options import EngineOptions
from flexengine.engine.planner import UNLIMITED, Planner
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.guests.attention_workers.tier import WorkerTier
from flexengine.guests.stages.group import PipelineGroup
from flexengine.guests.stages.messages import LAYOUT
from flexengine.guests.stages.remote import Driver, RemotePlan
from flexengine.lossy import PREDICTORS
from flexengine.model import identity
from flexengine.plan.candidates import Options
from flexengine.plan.layout import Layout
from flexengine.plan.prediction import Prediction
from flexengine.plan.search import Search
from flexengine.plan.stages import block_of, for_cohorts, place_weights
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.strategy import Strategy


class PipelinePlanner(Planner):
    """Plans the jobs of a pipeline, for its first stage. Every stage chooses the best policy for itself. All stages
    then take the block of the one with the smallest block, and fill their memory with weights. `others` are the plans
    of the other stages for the last layout."""

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


def _predictors(core: Core, options: EngineOptions) -> dict[str, str]:
    """Return the name of the predictors of active neurons, if the job may use some. Those that are damaged are none:
    all stages must know of it, and the stage that has them raises the error when it loads them."""
    if core.lossy.flash != PREDICTORS and f"flash-{PREDICTORS}" not in options.allow:
        return {}
    try:
        return {"predictors of neurons": core.opened.flash.latest(core.lossy.sparsity).digest()[:16]}
    except BadCheckpoint:
        return {"predictors of neurons": "damaged"}


def check_alike(core: Core, options: EngineOptions, group: PipelineGroup) -> None:
    """Raise InvalidInput, in all processes, if a stage differs from the first one in version, model, or a switch that
    changes results. Wait for all stages."""
    own: dict[str, Any] = {
        "flexengine": f"{__version__}, frames {LAYOUT}", "python torch": torch.__version__,
        "model": core.source.name, "files of the model": identity.digest(identity.given_files(core.source))[:16],
        **{f"setting {name}": value for name, value in numerics(core).items() if name not in ("torch", "policy")},
        "lossy switches": core.lossy.enabled, "switches to choose from": sorted(options.allow),
        "policy": options.policy.to_json() if options.policy else None,
        "layers": core.skeleton.total,
        "attention workers": [f"{tier.client.name}, number {tier.client.pool}" for tier in core.machine.workers
                              if isinstance(tier, WorkerTier)],
        "strategy": options.strategy.to_json() if options.strategy else None,
        **_predictors(core, options),
    }  # fmt: skip
    every = [json.loads(each) for each in group.exchange("identity", json.dumps(own))]
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other.get(name) != value:
                raise InvalidInput(
                    f"stage {rank} ({group.names[rank]}) has {name} {other.get(name)!r}, but stage 0"
                    f" ({group.names[0]}) has {value!r}; all stages must have the same"
                )
