"""Attenders: classes that compute decode attention, by place. The compute device ("device") needs no attender."""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name

import torch

from flexengine.places import HOST, WORKERS, place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.tier.machine import Machine
from flexengine.worker.attend.base import Attender
from flexengine.worker.cache import Cache

__all__ = ["ATTENDERS", "Attender", "attender_of"]

# By kind of place, a class, or its module:name, which is imported on first use. Its first argument is the place.
ATTENDERS: dict[str, str | Callable[..., Attender]] = {
    HOST: "flexengine.worker.attend.host:HostAttender",
    WORKERS: "flexengine.guests.attention_workers.attender:RemoteAttender",
}


def attender_of(place: str) -> Callable[[ModelFacts, Layout, Machine, Cache, torch.dtype], Attender]:
    """Return the class of a place's attender. Each attention worker is a place."""
    attender = ATTENDERS[WORKERS if place_of(place).worker else place]
    return partial(resolve_name(attender) if isinstance(attender, str) else attender, place)
