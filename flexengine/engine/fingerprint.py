"""The engine's part of a job's manifest. A resumed job compares it with the engine that continues the job."""

from collections.abc import Mapping
from typing import Any

import torch

from flexengine.engine.calibrator import Calibrator
from flexengine.engine.core import Core
from flexengine.job.same_job import MODEL_FILES
from flexengine.lossy import PREDICTORS
from flexengine.model import identity
from flexengine.model.linear import numerics as product_numerics


def fingerprint(core: Core, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's name and files, and `numerics`. With the lossy switches and a request's own parameters, these
    determine its results. known: marks of the model's files in the manifest of the run that began the job; empty if
    there was none."""
    return {"model": core.source.name, **numerics(core), MODEL_FILES: model_files(core, known)}


def numerics(core: Core) -> dict[str, Any]:
    """Return the settings and versions that decide the last bits of a result, besides the model and the request.
    Switches that the planner has not chosen yet are left out."""
    import transformers

    cuda, policy = core.machine.gpu, core.options.policy
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
    """Return the lossy switches that are set. Texts for calibration and for thresholds are named by a digest of their
    tokens, and predictors by a digest of their files."""
    text, flash = calibrator.text, core.lossy.flash
    named = {"calibrate": text.digest} if text is not None else {}
    if (sparse := calibrator.sparse_text) is not None:
        named["sparsify"] = f"{core.lossy.sparsify} with thresholds of {sparse.digest}"
    if flash == PREDICTORS and (trained := core.opened.flash.trained) is not None:
        named["flash"] = f"{PREDICTORS} {trained.digest[:16]}"
    return core.lossy.enabled | named
