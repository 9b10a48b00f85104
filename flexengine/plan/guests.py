"""Guests: modules of this package with bytes and seconds of features that a plain job lacks.

A guest is imported when a model, policy or machine first has the feature. Where the layout or the cost model reaches a
guest, it calls a function of this module by name, such as `book` or `terms`.

| guest | used if | adds |
|---|---|---|
| attended | the machine has attention workers | policies to try |
| chosen | attention reads chosen values | loads that the device waits for |
| delegation | the policy delegates attention, or has attention workers | buffers, links, attention, waits |
| experts | the model has experts | experts that no token chose are not loaded; paused forward passes |
| gpu | a GPU computes | scratch memory of kernels |
| neurons | neurons, or experts, are read on demand | records in memory and their bytes in a layout, reads |
"""

from functools import cache
from importlib import import_module
from typing import Any

GUESTS = ("attended", "chosen", "delegation", "experts", "gpu", "neurons")


@cache
def guest(name: str) -> Any:
    """Return a guest, imported on first use."""
    return import_module(f"flexengine.plan.{name}")
