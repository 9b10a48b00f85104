"""Attenders: classes that compute decode attention, by place. The compute device ("device") needs no attender."""

from collections.abc import Callable
from functools import partial

import torch

from flexengine.places import is_worker
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.tier.machine import Machine
from flexengine.worker.attend.base import Attender
from flexengine.worker.attend.host import HostAttender
from flexengine.worker.attend.remote import RemoteAttender
from flexengine.worker.cache import Cache

__all__ = ["ATTENDERS", "Attender", "HostAttender", "RemoteAttender", "attender_of"]

Make = Callable[[ModelFacts, Layout, Machine, Cache, torch.dtype], Attender]
ATTENDERS: dict[str, Make] = {"host": HostAttender}


def attender_of(place: str) -> Make:
    """Return the class of a place's attender. Each attention worker is a place."""
    return partial(RemoteAttender, place) if is_worker(place) else ATTENDERS[place]
