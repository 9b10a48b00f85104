"""flexengine: generates results for a file of prompts with a language model bigger than memory.

The names in `__all__` are public. All others are internal, and may change in any version.
"""

import gc
import os
from typing import TYPE_CHECKING, Any

# Idle OpenMP threads that spin starve the I/O lanes (one busy thread more slows a run 5-15x on two cores), so they wait
# briefly and then sleep. Read once by libgomp when torch is imported, hence here.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from flexengine.activity import Activity
    from flexengine.config import Completion, Result, SamplingParams, Score
    from flexengine.engine.engine import Engine
    from flexengine.engine.options import EngineOptions
    from flexengine.engine.summary import Progress, Summary
    from flexengine.errors import (
        BadCheckpoint,
        FlexError,
        InvalidInput,
        ModelNotFound,
        OutOfMemory,
        RanOut,
        TooLittle,
        UnsupportedModel,
    )
    from flexengine.lossy import Lossy
    from flexengine.plan.hardware import Hardware
    from flexengine.policy import Policy
    from flexengine.tier.machine import Links

__version__ = "0.1.0"
__all__ = [
    "Activity",
    "BadCheckpoint",
    "Completion",
    "Engine",
    "EngineOptions",
    "FlexError",
    "Hardware",
    "InvalidInput",
    "Links",
    "Lossy",
    "ModelNotFound",
    "OutOfMemory",
    "Policy",
    "Progress",
    "RanOut",
    "Result",
    "SamplingParams",
    "Score",
    "Summary",
    "TooLittle",
    "UnsupportedModel",
    "__version__",
]

_HOMES = {
    "Activity": "activity",
    "Completion": "config",
    "Engine": "engine.engine",
    "EngineOptions": "engine.options",
    "Hardware": "plan.hardware",
    "Links": "tier.machine",
    "Lossy": "lossy",
    "Policy": "policy",
    "Progress": "engine.summary",
    "Result": "config",
    "SamplingParams": "config",
    "Score": "config",
    "Summary": "engine.summary",
}  # all other public names are errors


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import flexengine` and `--help` stay quick.

    Garbage collection is off meanwhile: the collector would traverse all objects that torch and transformers define,
    find no garbage, and take a quarter of the import's time.
    """
    if name not in __all__:
        raise AttributeError(f"module 'flexengine' has no attribute {name!r}")
    from importlib import import_module

    collecting = gc.isenabled()
    gc.disable()
    try:
        value = globals()[name] = getattr(import_module(f"flexengine.{_HOMES.get(name, 'errors')}"), name)
    finally:
        if collecting:
            gc.enable()
    return value


def __dir__() -> list[str]:
    """Return the public names, so that editors complete those that are not imported yet."""
    return sorted(__all__)
