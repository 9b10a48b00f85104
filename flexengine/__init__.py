"""flexengine: finishes a file of prompts with a language model bigger than memory."""

import os
from typing import TYPE_CHECKING, Any

# Idle OpenMP threads that spin starve the I/O lanes (one busy thread more slows a run 5-15x on two cores), so they wait
# briefly and then sleep. Read once by libgomp when torch is imported, hence here.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from flexengine.config import Result, SamplingParams
    from flexengine.engine.engine import Engine
    from flexengine.lossy import Lossy
    from flexengine.policy import Policy

__version__ = "0.1.0"
__all__ = ["Engine", "Lossy", "Policy", "Result", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": "engine.engine",
    "Lossy": "lossy",
    "Policy": "policy",
    "Result": "config",
    "SamplingParams": "config",
}


def __getattr__(name: str) -> Any:
    """Imports the public names on first use, so that `import flexengine` and `--help` stay quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flexengine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"flexengine.{_HOMES[name]}"), name)
