"""Comparison of the stages before the first job: all must run the same version of the same model."""

import json
from typing import Any

import torch

from flexengine import __version__
from flexengine.engine.core import Core
from flexengine.engine.fingerprint import numerics
from flexengine.engine.options import EngineOptions
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.guests.attention_workers.tier import WorkerTier
from flexengine.guests.stages.group import PipelineGroup
from flexengine.guests.stages.messages import LAYOUT
from flexengine.lossy import PREDICTORS
from flexengine.model import identity


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
