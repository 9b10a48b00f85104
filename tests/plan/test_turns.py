"""Plans of several engines that take turns while workers attend."""

from dataclasses import replace
from typing import Any

import pytest

from flexengine.plan.candidates import Options
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.search import Search, search
from flexengine.plan.turns import engine_shares, in_flight
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.explain import text as explain
from tests.helpers.explained import GPU, model

FACTS = model(layers=32)
WEIGHTS = sum(t.stored_bytes for t in FACTS.tensors)
FLOPS = 1e9  # of one row: products read weights, so any number of rows takes the same seconds
WORK = Workload({(2048, 256): 96})


def machine(engines: int, attention: float = 1.0, device_bytes: int = WEIGHTS + (4 << 30)) -> Hardware:
    """Return a machine whose device holds the weights and little KV cache, with one worker. attention: its rate, as a
    multiple of that with which attention of 96 sequences takes as long as a slice."""
    rows = ((1.0, FLOPS), (1e4, 1e4 * FLOPS))
    slice_seconds = 2 * sum(t.elements for t in FACTS.layers[0] if t.matrix) / FLOPS
    tokens = 96 * (2048 + 128)
    return replace(
        GPU, device_bytes=device_bytes, host_bytes=4 << 30, workers=(64 << 30,), engines=engines,
        products={"float16": rows},
        worker_attention={"worker1": attention * tokens * FACTS.kv_token / slice_seconds},
        worker_links={"worker1": 1e12}, links=GPU.links | {"h2d": 1e12, "d2h": 1e12},
    )  # fmt: skip


def found(hardware: Hardware) -> Search:
    return search(FACTS, hardware, WORK, Options(stores_from=float("inf")))


def predicted(hardware: Hardware, **fields: Any) -> Prediction:
    fields = dict(cache={"workers": 1}, prefill_tokens=2048) | fields
    policy = Policy(**fields)
    return Cost(FACTS, hardware, WORK).predict(lay_out(FACTS, policy, WORK, hardware.capacity))


def layer_seconds(prediction: Prediction) -> float:
    return prediction.sweep_seconds["decode"] / len(FACTS.layers)


@pytest.mark.parametrize(("ratio", "period"), [(1.2, {"fixed": 1.6, "rotational": 1.5}), (0.6, {"fixed": 1.3})])
def test_predicted_seconds_are_those_of_the_formula(ratio: float, period: dict[str, float]) -> None:
    """A slice takes t_m whatever its rows, and attention of all gpu_batches ratio t_m."""
    hardware = machine(2, 1 / ratio)
    slice_seconds = 2 * sum(t.elements for t in FACTS.layers[0] if t.matrix) / FLOPS
    for order, expected in period.items():
        batches = 3 if order == "rotational" else 2
        prediction = predicted(hardware, gpu_batch_size=96 // batches, num_gpu_batches=batches, order=order)
        assert in_flight(prediction.policy, hardware) == batches
        assert layer_seconds(prediction) / slice_seconds == pytest.approx(expected, rel=0.05)


def test_the_plan_rotates_where_that_is_faster() -> None:
    """t_m does not depend on rows. Attention of the block takes 1.2 t_m, so two gpu_batches in fixed order take 1.6 t_m
    for a layer, four 2 t_m, and three in rotational order 1.5 t_m."""
    hardware = machine(2, 1 / 1.2)
    searched = found(hardware)
    policy = searched.best.policy
    assert (policy.order, policy.works > 0, policy.num_gpu_batches % 2) == ("rotational", True, 1)
    fixed = min(p.total_seconds for p in searched.tried if p.policy.order == "fixed")
    assert searched.best.total_seconds < fixed
    report = explain.report("toy", FACTS, hardware, WORK, searched.best)
    assert "2 engines take turns, order rotational: slice j of gpu_batch k is computed on engine (j + k) mod 2" in (
        report
    )
    assert "in fixed order" in report


def test_the_plan_stays_fixed_where_rotation_gains_nothing() -> None:
    """With little attention, a layer of two gpu_batches takes little longer than a slice, of three 1.5 slices."""
    policy = found(machine(2, 20.0)).best.policy
    assert (policy.order, policy.works > 0, policy.num_gpu_batches) == ("fixed", True, 2)


def test_one_engine_has_the_same_plan_as_before() -> None:
    one = machine(1)
    assert {p.policy.order for p in found(one).tried} == {"fixed"}


def test_weights_of_several_engines_stay_on_the_device() -> None:
    for prediction in found(machine(2, device_bytes=WEIGHTS // 2)).tried:
        assert not prediction.policy.works or prediction.policy.weights[0] == 1


def test_shares_of_the_slices() -> None:
    """The first engine also begins and ends all gpu_batches, which is one slice of each."""
    layers = 64
    for engines in (2, 3, 4):
        shares = engine_shares(engines, layers, "rotational", engines + 1)
        assert sum(shares) == pytest.approx(1)
        assert all(share == pytest.approx(1 / engines, abs=2 / layers) for share in shares)
    assert engine_shares(2, layers, "fixed", 3)[1] == pytest.approx(1 / 3, abs=1 / layers)


@pytest.mark.parametrize("order", ["fixed", "rotational"])
def test_hidden_states_that_move_between_engines_are_booked(order: str) -> None:
    """Beside the pass, in both orders."""
    policy = Policy(gpu_batch_size=8, num_gpu_batches=4, cache={"workers": 1}, order=order)
    one, two = (lay_out(FACTS, policy, WORK, machine(n).capacity).account["device"]["paused forwards"] for n in (1, 2))
    assert two - one == 32 * FACTS.hidden * FACTS.itemsize
