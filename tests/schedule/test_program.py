"""Programs: which tasks a sweep has, in which order, and what they name."""

from collections import Counter

import pytest

from flexengine.places import DIRECT, STAGED
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.order import Cell
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op
from tests.helpers.toy import MACHINES, TWO_DISKS, Homes, tasks_of, uniform


@pytest.mark.parametrize("routes", MACHINES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_streamed_unit_is_loaded_once_per_sweep(count: int, slots: int, routes: str) -> None:
    streamed: Homes = [("host",), (), ("disk",), ("host", "disk"), (), ("disk",)]
    if routes in TWO_DISKS:
        streamed = [("disk2",), (), ("disk", "disk2"), ("host", "disk", "disk2"), (), ("disk",)]
    done = tasks_of(Program(streamed, 5, slots, MACHINES[routes]), uniform(count), 4)
    loads = Counter((t.cell.layer, t.home, t.hop) for tasks in done for t in tasks if t.op is Op.LOAD_WEIGHT)
    legs = {home: range(len(lanes)) for home, lanes in MACHINES[routes].load.items()}
    parts = [(unit, home) for unit, homes in enumerate(streamed) for home in homes]
    assert loads == {(unit, home, hop): 4 for unit, home in parts for hop in legs[home]}
    for n, tasks in enumerate(done):
        assert [t.cell for t in tasks if t.op is Op.COMPUTE] == [Cell(n, j, k) for j in range(6) for k in range(count)]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_stays_comes_in_the_first_sweep_in_the_order_of_use(slots: int) -> None:
    """Each batch once, before its unit's own load and first cell and those of later units, so that nothing it would
    wait for is ahead of it in its lane. No task of a later sweep waits for it."""
    streamed: Homes = [("disk",), (), ("host",), ("disk",), (), (), ("disk", "host"), ()]
    arriving = [0, 0, 1, 2, 4, 4, 4, 5, 6, 7]
    program = Program(streamed, 6, slots, STAGED, arriving)
    first, second = tasks_of(program, uniform(2), 2)
    loads = [i for i, task in enumerate(first) if task.op is Op.LOAD_RESIDENT]
    assert [first[i].cell.layer for i in loads] == arriving
    assert {first[i].lane for i in loads} == {"disk_read"}
    for i in loads:
        j = first[i].cell.layer
        assert all(task.cell.layer < j for task in first[:i] if task.op in (Op.LOAD_WEIGHT, Op.COMPUTE))
    assert not any(task.op is Op.LOAD_RESIDENT or any(r[0] == "resident" for r in task.reads) for task in second)
    resident = Program([()] * 5, 4, slots, STAGED, [0, 2, 4])
    assert [task.op for task in resident.sweep(0, uniform(1), False)][:4] == [Op.LOAD_RESIDENT] * 3 + [Op.COMPUTE]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_loads_run_ahead_only_if_more(slots: int) -> None:
    streamed: Homes = [("host",), ("disk",), ("host",), (), ("disk",)]
    program = Program(streamed, 4, slots, DIRECT)
    for n, more in enumerate([True, False, False, True, True, False]):
        before = program.prefetch.emitted
        loads = [t.cell.layer for t in program.sweep(n, uniform(2), more) if t.op is Op.LOAD_WEIGHT]
        assert program.prefetch.emitted == before + len(loads)
        assert program.prefetch.emitted == 4 * (n + 1) + (slots if more else 0)
        assert loads == [(0, 1, 2, 4)[i % 4] for i in range(before, program.prefetch.emitted)]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_load_is_at_most_slots_units_ahead_and_in_time(slots: int) -> None:
    """When a unit is computed its load was emitted, into the slot it names, and no later load took that slot."""
    streamed: Homes = [("host",), (), ("disk",), ("host",), ("disk",)]
    filled: dict[int, int] = {}
    ahead = 0
    for tasks in tasks_of(Program(streamed, 4, slots, DIRECT), uniform(3), 3):
        for task in tasks:
            if task.op is Op.LOAD_WEIGHT:
                filled[task.buffer] = task.cell.layer
                ahead = max(ahead, len(filled))
            elif streamed[task.cell.layer]:
                assert task.slot is not None
                assert ("w", task.slot, streamed[task.cell.layer][0]) in task.reads
                if slots == 1:
                    assert filled[task.slot] == task.cell.layer
            else:
                assert task.slot is None
    assert ahead == slots


def test_lanes_and_staging_of_a_disk_cell() -> None:
    batch = Batch((Piece(0, 4, 1, True),), "disk", "disk")
    tasks = list(Program([("disk",), ("disk",)], 2, 1, STAGED).sweep(0, [batch], False))
    cell = [(t.op, t.lane, getattr(t, "hop", 0)) for t in tasks if t.cell.layer == 1]
    assert cell == [
        (Op.LOAD_CACHE, "disk_read", 0), (Op.LOAD_CACHE, "h2d", 1), (Op.LOAD_HIDDEN, "disk_read", 0),
        (Op.LOAD_HIDDEN, "h2d", 1), (Op.LOAD_WEIGHT, "disk_read", 0), (Op.LOAD_WEIGHT, "h2d", 1),
        (Op.COMPUTE, "device", 0), (Op.STORE_CACHE, "d2h", 0), (Op.STORE_CACHE, "disk_write", 1),
    ] or set(cell) == {  # the order of loads is the program's business; what they are is not
        (Op.LOAD_CACHE, "disk_read", 0), (Op.LOAD_CACHE, "h2d", 1), (Op.LOAD_HIDDEN, "disk_read", 0),
        (Op.LOAD_HIDDEN, "h2d", 1), (Op.LOAD_WEIGHT, "disk_read", 0), (Op.LOAD_WEIGHT, "h2d", 1),
        (Op.COMPUTE, "device", 0), (Op.STORE_CACHE, "d2h", 0), (Op.STORE_CACHE, "disk_write", 1),
    }  # fmt: skip


def test_lanes_of_a_cell_on_the_second_disk() -> None:
    """All data of the second disk moves in lanes of its own, also if its units alternate with those of the first."""
    batch = Batch((Piece(0, 4, 1, True),), "disk2", "disk2")
    routes = TWO_DISKS["staged, two disks"]
    tasks = list(Program([("disk",), ("disk2",), ()], 3, 1, routes).sweep(0, [batch], False))
    assert {(t.op, t.lane, getattr(t, "hop", 0)) for t in tasks if t.cell.layer == 1} == {
        (Op.LOAD_CACHE, "disk2_read", 0), (Op.LOAD_CACHE, "h2d_disk2", 1), (Op.LOAD_HIDDEN, "disk2_read", 0),
        (Op.LOAD_HIDDEN, "h2d_disk2", 1), (Op.LOAD_WEIGHT, "disk2_read", 0), (Op.LOAD_WEIGHT, "h2d_disk2", 1),
        (Op.COMPUTE, "device", 0), (Op.STORE_CACHE, "d2h_disk2", 0), (Op.STORE_CACHE, "disk2_write", 1),
        (Op.STORE_HIDDEN, "d2h_disk2", 0), (Op.STORE_HIDDEN, "disk2_write", 1),
    }  # fmt: skip
    first = {t.lane for t in tasks if t.cell.layer == 0 and t.op is Op.LOAD_WEIGHT}
    assert first == {"disk_read", "h2d"}


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_buffers_take_turns(slots: int) -> None:
    """Each off-device cell takes the next buffer. Two slots have three, to load, compute and store at the same time; no
    sweep starts anew."""
    count = {1: 1, 2: 3, 3: 4}[slots]
    done = tasks_of(Program([()] * 3, 2, slots, STAGED), uniform(2, "host", "disk"), 3)
    away = [t for tasks in done for t in tasks if t.op is Op.COMPUTE and t.cell.layer < 2]
    for buffers in ([t.cache for t in away], [t.hidden for t in away]):
        assert buffers == [(buffers[0] + i) % count for i in range(12)]
    ends = [t for tasks in done for t in tasks if t.op is Op.COMPUTE and t.cell.layer == 2]
    assert {(t.cache, t.hidden) for t in ends} == {(None, None)}


def test_nothing_moves_that_needs_not() -> None:
    """Resident everything is compute alone; a prompt's first piece loads no cache; the last layer stores no hidden."""
    assert {t.op for t in Program([(), ()], 1, 2, STAGED).sweep(0, uniform(3), True)} == {Op.COMPUTE}
    fresh = list(Program([()] * 4, 3, 2, DIRECT).sweep(0, uniform(2, "host", "host", start=0), False))
    count = Counter((t.op, t.cell.layer) for t in fresh)
    assert [count[Op.LOAD_CACHE, j] for j in range(4)] == [0, 0, 0, 0]
    assert [count[Op.STORE_CACHE, j] for j in range(4)] == [2, 2, 2, 0]
    assert [count[Op.LOAD_HIDDEN, j] for j in range(4)] == [0, 2, 2, 0]
    assert [count[Op.STORE_HIDDEN, j] for j in range(4)] == [2, 2, 0, 0]
