"""Rates of kernels and whole machines: counts against brute force, ledgers as they were."""

import json
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import activity
from flexengine.kernels.reference import ReferenceKernels
from flexengine.measure import kernels
from flexengine.measure.machine import measure_machine, quick_rates
from flexengine.plan.hardware import Hardware
from flexengine.tier.machine import Links, Machine
from tests.helpers.listening import listening
from tests.helpers.measuring import MB, books

# Kernels.


class Counting(ReferenceKernels):
    """Counts the calls of the reference kernels, by pairs and pages."""

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self.read: list[int] = []

    def attend_prompt(self, q: Any, k: Any, v: Any, *args: Any) -> Any:
        seen = sum(1 for query in range(q.shape[1]) for key in range(k.shape[1]) if key <= query)
        self.pairs.append(q.shape[0] * q.shape[2] * seen * q.shape[3])
        return super().attend_prompt(q, k, v, *args)

    def decode_attention(self, q: Any, pool: Any, tables: Any, lengths: Any, *args: Any) -> Any:
        self.read.append(sum(int(n) * 2 * pool.shape[2] * pool.shape[4] * pool.element_size() for n in lengths))
        assert int(lengths.max()) <= tables.shape[1] * pool.shape[3]
        return q


def test_counts(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """With every call taking a second, rates are the counts."""

    def second(call: Callable[[int], object], *_: Any) -> float:
        call(0)
        return 1.0

    monkeypatch.setattr(kernels, "seconds_per_call", second)
    machine, counting = at("cpu", 100 * MB), Counting()
    prompts = kernels._prompts(machine, counting, torch.float32)
    assert [rate for _, rate in prompts] == [4 * n for n in counting.pairs]  # a multiply-add for q @ k, one for @ v
    decode = kernels._decode(machine, "device", counting, torch.float32, kernels.LENGTHS)
    assert [rate for _, rate in decode] == counting.read
    products = kernels._products(machine, torch.float32)
    assert set(products) == {"float32", "float16", "bfloat16"}
    assert products["bfloat16"] == tuple((m, 2.0 * m * 128 * 128) for m in kernels.ROWS)
    assert set(kernels._products(machine, torch.bfloat16)) == {"bfloat16"}
    for form, width in (("int4", 128), ("q8_0", 128), ("q6_k", 256), ("q4_k+q6_k", 256)):  # at least a block
        rates = kernels.quick_products(machine, torch.float32, torch.uint8, form)
        assert rates == tuple((m, 2.0 * m * width * width) for m in kernels.QUICK_ROWS)
    assert machine.device.ledger.used == 0


def ends(c: float, d: float, a: float, b: float) -> float:
    """When work of c and transfers of d seconds end that slow each other a and b times while both are there."""
    if c * a <= d * b:
        return c * a + (d - c * a / b)
    return d * b + (c - d * b / a)


def test_crosstalk(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    machine = at("cpu", 100 * MB)
    for _ in range(20):
        a, b = rng.uniform(1, 1.6), rng.uniform(1, 1.6)
        monkeypatch.setattr(kernels, "_slowdowns", lambda *_, a=a, b=b: (a, b))
        found = kernels.measure_crosstalk(machine)
        assert {*found["device"]} == {"disk_read", "disk_write", "h2d"}
        on_read, on_device = found["disk_read"]["device"], found["device"]["disk_read"]
        c, d = rng.uniform(0.1, 2), rng.uniform(0.1, 2)
        assert max(d + on_read * c, c + on_device * d) == pytest.approx(ends(c, d, a, b))
    monkeypatch.setattr(kernels, "_slowdowns", lambda *_: (0.9, 3.0))
    assert kernels.measure_crosstalk(machine)["device"]["h2d"] == 0


def test_crosstalk_of_disks(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttled disks do not slow each other. Two directories on one throttled disk share its rate: then reads of both
    take as long as one after the other. Other programs may disturb a measurement, so one of three must be right."""
    monkeypatch.setattr(kernels, "WINDOW", 0.3)
    monkeypatch.setattr(kernels, "MOVED", 1 << 20)
    slow = Links(disk_read=25 * MB, more_disks=((25 * MB, None),))
    for device, least, most in ((1, 0.0, 0.3), (0, 0.7, 1.0)):
        machine = at("sim", 50 * MB, slow, disks=2)
        machine.disks[1]._lock = machine.disks[device]._lock  # type: ignore[attr-defined]
        machine.disks[1]._free = machine.disks[device]._free  # type: ignore[attr-defined]
        for attempt in range(3):
            measured = kernels.measure_crosstalk(machine)
            assert set(measured) == {"device", "h2d", "disk_read", "disk2_read", "disk_write", "disk2_write"}
            both = (measured["disk_read"]["disk2_read"], measured["disk2_read"]["disk_read"])
            if least <= min(both) and max(both) <= most:
                break
            assert attempt < 2, both


def test_offload_directories_are_assumed_to_slow_computing_as_the_checkpoint_does(
    at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A brief measurement reads the checkpoint beside computing; without one there are assumed shares."""
    opened: Any = SimpleNamespace(dtype=torch.float32, files=[])
    machine, link = at("cpu", 50 * MB), {"device": 0.1}
    for read, to, by in (({"disk_read": 0.5}, 0.5, 0.6), ({}, 0.3, 0.3)):
        found = {"device": {**read, "h2d": 0.2}, "h2d": link, **{lane: {"device": 0.6} for lane in read}}
        monkeypatch.setattr("flexengine.measure.machine.measure_crosstalk", lambda *_, found=found, **__: found)
        talk = quick_rates(machine, opened).crosstalk
        assert talk["device"] == {"disk_read": to, "disk_write": to, "h2d": 0.2}
        assert (talk["disk_read"], talk["disk_write"], talk["h2d"]) == ({"device": by}, {"device": by}, link)


@pytest.mark.parametrize(("kind", "memory"), [("cpu", None), ("sim", 50 * MB)])
def test_a_whole_machine(
    at: Callable[..., Machine], kind: str, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure positive, and the same after a way through JSON. Each step reports itself, and that it goes on."""
    monkeypatch.setattr(activity, "INTERVAL", 0.0)
    machine = at(kind, memory)
    before = books(machine)
    with listening() as heard:
        found = measure_machine(machine, torch.float32, ()).with_capacity(machine.capacity)
    assert books(machine) == before
    parts = ["the rates of disk and memory", "the rates of products and attention",
             "how much computing and transfers slow each other"]  # fmt: skip
    assert [re.sub(r"measuring (.*), for the plan, once for this machine \(about \d+ s\)", r"\1", text)
            for text in heard.begun("measuring")] == parts  # fmt: skip
    running = [record.text for record in heard if record.state == "running"]
    assert all(running.count(text) > 3 for text in heard.begun("measuring"))
    assert found.measured
    assert found.kind == kind
    assert found.capacity == machine.capacity
    assert Hardware.from_json(json.loads(json.dumps(found.to_json())), "found") == found
    tables = [*found.links.values(), *found.products.values(), found.checkpoint_read, found.decode_attention]
    assert all(y > 0 for table in (*tables, found.prompt_attention) for _, y in table)
    positive = ("elementwise", "cell_seconds", "task_seconds", "sweep_seconds", "sequence_seconds")
    assert all(getattr(found, name) > 0 for name in positive)
    assert (found.host_attention > 0) == (kind == "sim")
    assert set(found.crosstalk) == {"disk_read", "disk_write", "h2d", "device"}
