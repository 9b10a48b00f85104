"""Programs of machines with two disks: each resource that keeps the second disk's data apart is needed."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from bench.simulate import simulate
from flexengine.places import DISK, place_names
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.edges import Edges
from flexengine.schedule.frame import Demand
from flexengine.schedule.order import Cell
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Copy, Op, Task
from tests.helpers.strategies import SEEDS, refuted
from tests.helpers.toy import TWO_DISKS, Homes, tasks_of, uniform, weight
from tests.schedule.test_rows import Demanding, RowsToy, demanding, expert, right

STAGED, DIRECT = TWO_DISKS.values()
SECOND = place_names(2)[-1]
CACHE, ACTIVATIONS = (0, 0, 0.5, 0.5), (0.4, 0, 0.3, 0.3)
COMPUTES = (Op.COMPUTE, Op.PROJECT, Op.FINISH, Op.RESUME)
Named = tuple[Any, ...]  # a resource


def spread(case: Demanding) -> Demanding:
    """Return the job with the embedding on the second disk, and with cache and activations on both disks if the device
    attends."""
    policy = case.job.policy
    if not policy.delegates:
        policy = replace(policy, cache=CACHE, activations=ACTIVATIONS)
    return case._replace(job=case.job._replace(policy=policy), demand=replace(case.demand, embedding=SECOND))


def without(dropped: Callable[[Task, Named], bool]) -> Callable[[Task], Task]:
    """Return a function that drops resources of a task."""

    def kept(task: Task, names: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        return tuple(name for name in names if not (isinstance(name, tuple) and dropped(task, name)))

    return lambda task: replace(task, reads=kept(task, task.reads), writes=kept(task, task.writes))


def is_load(task: Task, op: Op, hop: int) -> bool:
    return isinstance(task, Copy) and (task.op, task.home, task.hop) == (op, SECOND, hop)


# By what is dropped. Staging is used only if routes have two legs.
STAGINGS: dict[str, Callable[[Task, Named], bool]] = {
    "write of weight staging": lambda task, r: r[0] == "wstage" and is_load(task, Op.LOAD_WEIGHT, 0),
    "read of weight staging": lambda task, r: r[0] == "wstage" and is_load(task, Op.LOAD_WEIGHT, 1),
    "read of weight staging by experts": lambda task, r: r[0] == "wstage" and is_load(task, Op.LOAD_ROWS, 1),
    "staging of experts": lambda task, r: r[:2] == ("rowstage", SECOND),
    "read of experts": lambda task, r: r[:2] == ("rows", SECOND) and task.op is Op.RESUME,
    "staging of the cache": lambda task, r: r[0] == "cstage" and getattr(task, "home", "") == SECOND,
    "staging of hidden states": lambda task, r: r[0] == "hstage" and getattr(task, "home", "") == SECOND,
}
OTHERS: dict[str, Callable[[Task, Named], bool]] = {
    "copies of weights": lambda task, r: r[0] == "resident" and is_load(task, Op.LOAD_WEIGHT, 0),
    # OPEN precedes the loads of embedding rows, and reads the same.
    "copy of the embedding": lambda task, r: r[0] == "resident" and task.cell.layer < 0,
    "resident weights": lambda task, r: r[0] == "resident" and task.op in COMPUTES,
    "read of the slot": lambda task, r: r[0] == "w" and r[2] == SECOND and task.op in COMPUTES,
    "write of the slot": lambda task, r: r[0] == "w" and r[2] == getattr(task, "home", "") == SECOND,
    "buffer of the cache": lambda task, r: r[0] == "cbuf" and getattr(task, "home", "") == SECOND,
    "buffer of hidden states": lambda task, r: r[0] == "hbuf" and getattr(task, "home", "") == SECOND,
    "cache": lambda task, r: r[0] == "kv" and getattr(task, "home", "") == SECOND,
    "hidden states": lambda task, r: r[0] == "h" and getattr(task, "home", "") == SECOND,
}
NEEDED = [("staged, two disks", name) for name in STAGINGS]
NEEDED += [(routes, name) for routes in TWO_DISKS for name in OTHERS]


@pytest.mark.parametrize("routes", TWO_DISKS)
def test_jobs_are_right_with_all_resources(routes: str) -> None:
    cases = st.tuples(demanding(2, TWO_DISKS[routes]).map(spread), SEEDS)
    assert not refuted(cases, lambda case: right(*case, TWO_DISKS[routes], Edges()), 50)


@pytest.mark.slow
@pytest.mark.parametrize(("routes", "name"), NEEDED)
def test_no_resource_is_spare(routes: str, name: str) -> None:
    altered = without((STAGINGS | OTHERS)[name])
    cases = st.tuples(demanding(2, TWO_DISKS[routes]).map(spread), SEEDS)
    assert refuted(cases, lambda case: right(*case, TWO_DISKS[routes], Edges(), altered))


class Common(dict[tuple[Hashable, ...], Any]):
    """Staging of which all disks share that of a weight slot."""

    def __setitem__(self, key: tuple[Hashable, ...], value: Any) -> None:
        super().__setitem__(key[:2], value)

    def get(self, key: tuple[Hashable, ...], default: Any = None) -> Any:
        return super().get(key[:2], default)


class SharingToy(RowsToy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.staging = Common()


def shared(task: Task) -> Task:
    """Return the task with one name for the staging of a weight slot from all disks."""
    reads, writes = (
        tuple(name[:2] if isinstance(name, tuple) and name[0] == "wstage" else name for name in names)
        for names in (task.reads, task.writes)
    )
    return replace(task, reads=reads, writes=writes)


def test_disks_need_staging_of_their_own_unless_its_name_is_shared() -> None:
    cases = st.tuples(demanding(2, STAGED), SEEDS)
    assert refuted(cases, lambda case: right(*case, STAGED, Edges(), lambda task: task, SharingToy))
    assert not refuted(cases, lambda case: right(*case, STAGED, Edges(), shared, SharingToy), 50)


def test_parts_of_a_slot_are_read_from_both_disks_at_once() -> None:
    """Reads of 1 s from each disk: a unit takes 1 s. If the disks shared staging, a unit would take longer."""
    seconds = {Op.LOAD_WEIGHT: (1.0, 0.5), Op.COMPUTE: (0.1,)}
    program = Program([(DISK, SECOND)] * 9, 8, 2, STAGED)
    tasks = [task for tasks in tasks_of(program, uniform(2), 3) for task in tasks]

    def cost(task: Task) -> float:
        return seconds[task.op][task.hop if isinstance(task, Copy) else 0]

    own = simulate(tasks, cost)
    assert own.busy["disk_read"] == own.busy["disk2_read"] == pytest.approx(27.0)
    assert own.seconds == pytest.approx(27.0 + 0.5 + 2 * 0.1)
    assert simulate(map(shared, tasks), cost).seconds > 1.15 * own.seconds


def toy_of(home: str) -> RowsToy:
    """One layer and its experts from a home, with one batch of resident weights that is not read yet."""
    homes: Homes = [(home,), ()]
    toy = RowsToy(Demand(experts=homes, others=homes), 1, 1, DIRECT, [(1, 1)], [0])
    toy.begin([Batch((Piece(0, 0, 1, True),), "device", "device")])
    toy.missing_rows[0] = [2]
    return toy


@pytest.mark.parametrize(("home", "copied"), [("disk", False), ("host", True), (SECOND, True)])
def test_weights_off_the_first_disk_are_wrong_before_they_are_copied(home: str, copied: bool) -> None:
    toy, lane = toy_of(home), DIRECT.load[home][0]
    arrival = Task(Op.LOAD_RESIDENT, Cell(0, 0, -1), "disk_read", (), ())
    load = Copy(Op.LOAD_WEIGHT, Cell(0, 0, -1), lane, (), (), home, buffer=0, by_rows=True)
    rows = Copy(Op.LOAD_ROWS, Cell(0, 0, 0), lane, (), (), home, buffer=0, by_rows=True)
    for early in (True, False):
        toy.perform(load)
        toy.perform(rows)
        found = [toy.slots[0][0] == weight(0, home), toy.filled[0][0, home, 2] == expert(0, home, 2)]
        assert found == [not (early and copied)] * 2
        toy.perform(arrival)


@pytest.mark.parametrize("home", ["disk", "host", SECOND])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_only_loads_of_copies_wait_for_the_first_sweeps_reads(slots: int, home: str) -> None:
    """Against lists: a layer's loads read its own resident weights, the head's those of the first layer too."""
    homes: Homes = [(home,)] * 3
    program = Program(homes, 2, slots, STAGED, [0, 1, 1, 2], Demand(home, [*homes[:2], ()], homes, 100))
    for n, tasks in enumerate(tasks_of(program, uniform(2), 2)):
        for task in (t for t in tasks if t.op in (Op.LOAD_WEIGHT, Op.LOAD_ROWS) and t.hop == 0):
            units = {-1: [0], 0: [0], 1: [1], 2: [0, 2]}[task.cell.layer] if home != "disk" and n == 0 else []
            assert [r for r in task.reads if isinstance(r, tuple) and r[0] == "resident"] == [
                ("resident", unit) for unit in units
            ]
