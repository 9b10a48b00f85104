"""Slices that take turns on engines: the program on the virtual clock, against Lamina's formulas."""

import random
from math import ceil

import pytest

from bench.simulate import Forecast, simulate
from bench.stagger.orders import steady
from flexengine.places import DIRECT, Routes
from flexengine.plan.turns import engine_shares, layer_period
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task
from flexengine.schedule.turns import Turns

LAYERS = 120
ROUTES = DIRECT.between(("device", "disk", "worker1"), staged=False)


def tasks(order: str, engines: int, batches: int, layers: int = LAYERS, routes: Routes = ROUTES) -> list[Task]:
    """Return the tasks of a sweep in which all gpu_batches decode."""
    made = [Batch((Piece(k, 9, 1, True),), "worker1", "device", "worker1") for k in range(batches)]
    turns = Turns(engines, layers, order)
    return list(Program([()] * (layers + 1), layers, 2, routes, turns=turns.engine).sweep(0, made, False))


def timed(program: list[Task], t_m: float, t_a: float, moving: float = 0.0) -> Forecast:
    seconds = {Op.FINISH: 0.7 * t_m, Op.PROJECT: 0.3 * t_m, Op.TAKE_BACK: t_m, Op.ATTEND: t_a, Op.LEAVE: moving}
    return simulate(program, lambda task: seconds.get(task.op, 0.0))


@pytest.mark.parametrize("order", ["fixed", "rotational"])
@pytest.mark.parametrize("engines", [2, 3, 4])
def test_each_slice_is_computed_once_by_its_engine(order: str, engines: int) -> None:
    for batches in range(1, 6):
        found = dict[tuple[int, int], str]()
        for task in tasks(order, engines, batches, 7):
            if task.op in (Op.PROJECT, Op.TAKE_BACK):
                key = task.cell.layer, task.cell.batch
                assert key not in found
                found[key] = task.lane
        expected = {}
        for j in range(7):
            for k in range(batches):
                engine = 0 if j == 0 else ((j + k) if order == "rotational" else k) % engines
                expected[j, k] = f"replica{engine}" if engine else "device"
        assert found == expected
        shares = engine_shares(engines, 7, order, batches)
        for number, share in enumerate(shares):
            own = [lane for lane in expected.values() if lane == (f"replica{number}" if number else "device")]
            assert share == pytest.approx(len(own) / len(expected))


@pytest.mark.parametrize("engines", [2, 3, 4])
def test_the_program_has_the_period_of_the_formula(engines: int) -> None:
    rng = random.Random(engines)
    cases = [(float(engines), 1.0), (engines * 0.5, 1.0), (engines * 2.0, 1.0)]
    cases += [(rng.uniform(0.2, 1) * engines, rng.uniform(0.2, 1)) for _ in range(5)]
    for t_m, t_a in cases:
        for order in ("fixed", "rotational"):
            for batches in (engines, engines + 1, 2 * engines):
                first, last = 60, 96  # multiples of 2, 3 and 4: gpu_batch 0 begins these on the first engine
                found = steady(timed(tasks(order, engines, batches), t_m, t_a).spans, first, last)
                expected = layer_period(order, engines, batches, t_m, batches * t_a, t_a)
                turns = batches / engines if order == "rotational" else ceil(batches / engines)
                assert expected == max(batches * t_a, turns * t_m, t_m + t_a)
                assert found.period == pytest.approx(expected, rel=5e-3), (order, batches, t_m, t_a)


@pytest.mark.parametrize("n", range(3, 9))
def test_rotational_gains_n_over_n_minus_1(n: int) -> None:
    """On n - 1 engines, with hidden states that move while attention is computed."""
    engines, t_m, t_a = n - 1, n - 1.0, 1.0
    rates = {}
    for order, batches in (("fixed", engines), ("rotational", n)):
        program = tasks(order, engines, batches, 12 * engines)
        spans = timed(program, t_m, t_a, 0.9 * t_a).spans
        rates[order] = batches / steady(spans, 4 * engines, 8 * engines).period
    assert rates["rotational"] / rates["fixed"] == pytest.approx(n / (n - 1))
