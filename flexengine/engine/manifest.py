"""What a job's manifest says of an engine: a resumed job compares it with the engine that continues it."""

from collections.abc import Mapping
from typing import Any

import torch

from flexengine.engine.calibration import Calibrator
from flexengine.engine.core import Core
from flexengine.job.manifest import MODEL_FILES
from flexengine.model import identity
from flexengine.model.linear import numerics as product_numerics


def fingerprint(core: Core, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the results of a request besides its own parameters and the lossy switches: the model's name
    and files, and `numerics`.

    Args:
        known: marks of the model's files in the manifest of the run that began the job; empty if there was none.
    """
    return {"model": core.source.name, **numerics(core), MODEL_FILES: model_files(core, known)}


def numerics(core: Core) -> dict[str, Any]:
    """Return what the last bits of a result depend on besides the model and the request. Switches that the planner has
    yet to choose are not part of it."""
    import transformers

    cuda, policy = core.machine.kind == "cuda", core.options.policy
    return {
        **({"cache": core.cache_form} if core.cache_form else {}),
        "dtype": str(core.dtype).removeprefix("torch."),
        # A GPU's products round differently in batches of another shape.
        "policy": policy.to_json() if policy and cuda else None,
        "device": "cuda" if cuda else "cpu",
        "kernels": product_numerics(core.machine.compute),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def model_files(core: Core, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return marks of the files that the user gave as the model; see `model.identity.marks`."""
    return identity.marks(identity.given_files(core.source), core.opened.files, known)


def switches(core: Core, calibrator: Calibrator) -> dict[str, Any]:
    """Return the lossy switches that are set. A text to calibrate with is given by a digest of its tokens, not by its
    name."""
    text = calibrator.text
    return core.lossy.given | ({"calibrate": text.digest} if text is not None else {})
