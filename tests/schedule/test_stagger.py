"""Staggered pipelines on the virtual clock, against the formulas of Lamina and against a brute-force check of times."""

import random
from collections.abc import Callable

import pytest

from bench.simulate import simulate
from bench.stagger.orders import POOL, Stagger, Steady, fixed, interleaved, replica_lane, rotational, steady
from flexengine.places import DIRECT
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task

NS = range(2, 9)
MOVING = {"rotational": rotational, "interleaved": interleaved,
          "interleaved, far apart": lambda n: Stagger(n, n - 1, apart=(n - 1) ** 2)}  # fmt: skip


def costs(slice_seconds: float, attention: float, move: float = 0.0) -> Callable[[Task], float]:
    return lambda task: {Op.COMPUTE: slice_seconds, Op.ATTEND: attention, Op.LEAVE: move}[task.op]


def pace(order: Stagger, slice_seconds: float, attention: float) -> Steady:
    """Return the pace between filling and draining, with moves that attention hides."""
    rounds = order.replicas  # a window of so many layers has equally many slices on each replica
    program = order.program(50 * rounds)
    forecast = simulate(program, costs(slice_seconds, attention, move=0.9 * attention))
    return steady(forecast.spans, 30 * rounds, 40 * rounds)


@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("name", MOVING)
def test_times_never_collide(name: str, n: int) -> None:
    """Slice `number` occupies its replica for n - 1 units from time `number` on, then the pool for one."""
    slices = MOVING[name](n).slices(6 * (n - 1))  # as many on each replica
    for replica in range(n - 1):
        units = [t for s in slices if s.replica == replica for t in range(s.number, s.number + n - 1)]
        assert len(set(units)) == len(units) == len(slices)
    assert len({s.number for s in slices}) == len(slices)
    starts = {s.cell: s.number for s in slices}
    for s in slices:
        if (after := s.cell._replace(layer=s.cell.layer + 1)) in starts:
            assert starts[after] == s.number + n
        j, k = s.cell.layer, s.cell.batch
        assert s.replica == ((j + k) % (n - 1) if name == "rotational" else j % (n - 1))


@pytest.mark.parametrize("n", NS)
def test_an_interleaved_stage_needs_each_layer_once(n: int) -> None:
    """All gpu_batches, in order, in one of its layers after the other: weights can stream."""
    slices = interleaved(n).slices(5 * (n - 1))
    for stage in range(n - 1):
        expected = [(j, k) for j in range(stage, 5 * (n - 1), n - 1) for k in range(n)]
        assert [(s.cell.layer, s.cell.batch) for s in slices if s.replica == stage] == expected


@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("name", MOVING)
def test_all_devices_are_always_busy(name: str, n: int) -> None:
    order = MOVING[name](n)
    found = pace(order, n - 1.0, 1.0)
    assert found.period == pytest.approx(n)
    for lane in [POOL, *map(replica_lane, range(n - 1))]:
        assert found.busy[lane] == pytest.approx(1.0)


@pytest.mark.parametrize("n", NS)
def test_fixed_replicas_wait_for_attention(n: int) -> None:
    assert [(s.replica, s.cell.batch) for s in fixed(n).slices(1)] == [(k, k) for k in range(n - 1)]
    found = pace(fixed(n), n - 1.0, 1.0)
    assert found.busy == {lane: pytest.approx((n - 1) / n) for lane in [POOL, *map(replica_lane, range(n - 1))]}
    slices = {name: make(n).batches / pace(make(n), n - 1.0, 1.0).period for name, make in MOVING.items()}
    for rate in slices.values():
        assert rate / ((n - 1) / found.period) == pytest.approx(n / (n - 1))


@pytest.mark.parametrize("n", NS)
def test_periods_of_other_ratios(n: int) -> None:
    rng = random.Random(n)
    for _ in range(12):
        t_m, t_a = rng.uniform(0.2, 1) * (n - 1), rng.uniform(0.2, 1)
        for make in MOVING.values():
            found = pace(make(n), t_m, t_a)
            assert found.period == pytest.approx(max(n * t_a, n * t_m / (n - 1), t_m + t_a))
            assert found.busy[POOL] == pytest.approx(n * t_a / found.period)
            assert found.busy["replica0"] == pytest.approx(n * t_m / (n - 1) / found.period)
        assert pace(fixed(n), t_m, t_a).period == pytest.approx(max((n - 1) * t_a, t_m + t_a))


def test_two_gpu_batches_on_each_fixed_replica() -> None:
    """They hide attention as moves do, with 2 (n - 1) gpu_batches instead of n."""
    for n in NS:
        twice = Stagger(2 * (n - 1), n - 1)
        assert all(s.replica == s.cell.batch % (n - 1) for s in twice.slices(3))
        assert pace(twice, n - 1.0, 1.0).busy == {lane: pytest.approx(1.0)
                                                  for lane in [POOL, *map(replica_lane, range(n - 1))]}  # fmt: skip


def test_a_long_move_delays() -> None:
    order, seconds = rotational(3), costs(2.0, 1.0, move=2.5)
    found = steady(simulate(order.program(100), seconds).spans, 60, 80)
    assert found.period == pytest.approx(2.0 + 2.5)  # of a gpu_batch: its slice and its move


@pytest.mark.parametrize(("t_m", "t_a"), [(1.0, 1.0), (1.0, 0.7), (0.6, 1.0), (1.0, 0.0), (0.3, 0.9)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_schedule_of_one_device_is_rotational(count: int, t_m: float, t_a: float) -> None:
    """A `Program` whose attention is delegated: the rest of a layer and the start of the next are one slice."""
    layers, routes = 40, DIRECT.between(("device", "disk", "worker1"), staged=False)
    batches = [Batch((Piece(k, 9, 1, True),), "worker1", "device", "worker1") for k in range(count)]
    seconds = {Op.FINISH: 0.7 * t_m, Op.PROJECT: 0.3 * t_m, Op.ATTEND: t_a}
    tasks = Program([()] * (layers + 1), layers, 2, routes).sweep(0, batches, False)
    found = steady(simulate(tasks, lambda task: seconds.get(task.op, 0.0)).spans, 10, 30)
    period = max(count * t_a, count * t_m, t_m + t_a)
    assert found.period == pytest.approx(period)
    assert found.busy["device"] == pytest.approx(count * t_m / period)  # 1 if t_m = t_a and there are two gpu_batches
    assert found.busy["worker1"] == pytest.approx(count * t_a / period)
