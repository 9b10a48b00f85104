"""Constants that decide where nothing was measured: a factor of 3 in one chooses no policy that is slower than
streaming all weights.

| constant | decides | measured |
|---|---|---|
| `delegation.PICK_SECONDS` | sparse attention: seconds of gathering a chosen value | no |
| `rates._LOST` | assumed rates of a CPU: how much computing and a disk slow each other | with the machine |
| `rates.DEQUANTIZE_FLOP` | products and attention in formats without a table, with `vector_flops` | with a model |
| `measure.machine.ATTENDED` | quick rates of a GPU: attention's share of the rate of memory | with a model |
| h2d | attention workers of a plan without rates: their links and attention | when workers connect |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from flexengine.plan import delegation, rates
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.rates import assumed
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.plans import opt

MODEL = opt(6, 1024, 16, 4096)
WORK = Workload({(300, 24): 48})


def machine(kind: str, model: ModelFacts) -> Hardware:
    """About half of the weights fit on the device."""
    shared = kind == "cpu"
    device = sum(t.held_bytes for t in model.tensors) // 2 + ((200 if shared else 90) << 20)
    return assumed(kind, Capacity(device, None if shared else 1 << 33, 1 << 36, shared, not shared))


def coded(model: ModelFacts) -> ModelFacts:
    """With matrices of int4 (9 bytes for 16 elements) and a cache of one byte an element."""
    layers = tuple(
        tuple(replace(t, form="int4", encoded=t.elements * 9 // 16) if t.matrix else t for t in j) for j in model.layers
    )
    return replace(model, layers=layers, kv_pieces=4)


def unlike(hardware: Hardware, name: str, factor: float) -> Hardware:
    """The machine as it is believed if the constant is wrong by a factor."""
    slower = ((1.0, hardware.decode_attention[0][1] * factor),)
    link = ((1.0, hardware.links["h2d"][0][1] * factor),)
    changes: dict[str, dict[str, Any]] = {
        "attended": {"decode_attention": slower},
        "lost": {
            "crosstalk": {
                lane: {other: factor * lost for other, lost in others.items()}
                for lane, others in hardware.crosstalk.items()
            }
        },
        "workers": {"worker_attention": {"worker1": link[0][1]}, "worker_links": {"worker1": link[0][1]}},
    }
    return replace(hardware, **changes.get(name, {}))


@contextmanager
def wrong(name: str, factor: float) -> Iterator[None]:
    """Let a constant of a module be wrong by a factor."""
    where = {"pick": (delegation, "PICK_SECONDS"), "dequantize": (rates, "DEQUANTIZE_FLOP")}
    with pytest.MonkeyPatch.context() as patch:
        if name in where:
            module, attribute = where[name]
            patch.setattr(module, attribute, factor * getattr(module, attribute))
        yield


def slower(name: str, factor: float) -> float:
    """The seconds of the policy that is chosen if a constant is wrong, by those of streaming all weights."""
    kind = "cpu" if name in ("lost", "dequantize") else "cuda"
    model = {"pick": replace(MODEL, topk=0.1), "dequantize": coded(MODEL)}.get(name, MODEL)
    hardware = machine(kind, model)
    if name == "dequantize":
        hardware = replace(hardware, vector_flops=4e10)
    elif name == "workers":
        hardware = replace(hardware, workers=(1 << 33,))
    with wrong(name, factor):
        chosen = search(model, unlike(hardware, name, factor), WORK).best.policy
    cost, streamed = Cost(model, hardware, WORK), (0, 0, 1) if kind == "cpu" else (0, 1, 0)
    told = cost.of(chosen, hardware.capacity)
    plain = [cost.of(Policy(8, n, weights=streamed), hardware.capacity) for n in (2, 4, 6)]
    assert told is not None
    return told.total_seconds / min(p.total_seconds for p in plain if p is not None)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1 / 3, 3.0])
@pytest.mark.parametrize("name", ["pick", "lost", "dequantize", "attended", "workers"])
def test_no_policy_is_chosen_that_is_slower_than_streaming(name: str, factor: float) -> None:
    assert slower(name, factor) <= 1


@pytest.mark.slow
def test_a_constant_that_is_wrong_by_thirty_decides_wrongly() -> None:
    """Dequantizing seems to take so long that fewer, larger gpu_batches seem faster than resident weights."""
    assert slower("dequantize", 1) < 0.95
    assert slower("dequantize", 30) > 1
