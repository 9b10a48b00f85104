"""The planner. Modules of features that a plain job lacks are guests, imported when a job first has the feature.

`delegation`: attention at another place, and chosen values. `neurons`: neurons read on demand, and mixtures of experts.
`records`: states beside keys and values. `tables`: rows that are read when tokens use them. `turns`: several engines
that compute while attention workers attend.
Where the layout or the cost model reaches a guest, it calls a function by name, such as `book` or `terms`.
"""

from functools import cache
from importlib import import_module
from typing import Any

GUESTS = ("delegation", "neurons", "records", "tables", "turns")


@cache
def guest(name: str) -> Any:
    """Return a guest, imported on first use."""
    return import_module(f"flexengine.plan.{name}")
