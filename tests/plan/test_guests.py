"""Guests of the planner: a plan without guests imports none of their modules, and no solver."""

import subprocess
import sys
from importlib import import_module

import pytest

from flexengine.plan import GUESTS, guest

PLAIN = """
import sys
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.hardware import Hardware
from flexengine.plan.search import search
from flexengine.plan.workload import Workload

layers = tuple((TensorFact(f"{j}.matrix", 1 << 16, 2, 2),) for j in range(2))
model = ModelFacts(layers, (), TensorFact("embedding", 1 << 16, 2, 2), None, 256, 256, 256, 4, 4, 64, 2)
hardware = Hardware("toy", "cpu", 1 << 30, None, 1 << 30, {"disk_read": 1e9, "disk_write": 1e9, "h2d": 1e9},
                    1e9, {"float16": 1e12}, 1e12, 1e11, 1e11)
workload = Workload({(8, 4): 2})
best = search(model, hardware, workload).best
SweepMonitor(Cost(model, hardware, workload), best.layout).report()
print(*(name for name in sys.modules if name.startswith("flexengine.plan.")))
"""


def test_a_plain_plan_imports_no_guest() -> None:
    out = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(out.stdout.split())
    assert "flexengine.plan.search" in loaded
    others = ("cluster", "lp", "placement", "problem", "refinement", "stages")
    assert not loaded & {f"flexengine.plan.{name}" for name in (*GUESTS, *others)}


@pytest.mark.parametrize("name", GUESTS)
def test_every_guest_is_found(name: str) -> None:
    assert guest(name) is import_module(f"flexengine.plan.{name}")
