"""Attenders: classes that compute decode attention, by place. The compute device ("device") needs no attender."""

from collections.abc import Callable

import torch

from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.tier.machine import Machine
from flexengine.worker.attend.base import Attender
from flexengine.worker.attend.host import HostAttender
from flexengine.worker.cache import Cache

__all__ = ["ATTENDERS", "Attender", "HostAttender"]

ATTENDERS: dict[str, Callable[[ModelFacts, Layout, Machine, Cache, torch.dtype], Attender]] = {"host": HostAttender}
