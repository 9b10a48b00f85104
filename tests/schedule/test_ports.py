"""Hidden states that enter and leave a range of layers: one task each per gpu_batch, in any order that edges allow."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine.places import DIRECT, STAGED, Routes
from flexengine.schedule.edges import Edges
from flexengine.schedule.frame import AFTER, BEFORE
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op
from tests.helpers.strategies import SEEDS, refuted
from tests.helpers.toy import (
    ROUTES,
    Homes,
    Job,
    Rows,
    Shuffled,
    SomeEdges,
    Toy,
    feed,
    jobs,
    sweeps_of,
    tasks_of,
    uniform,
    weight,
)

BOTH = (BEFORE, AFTER)


def oracle(stages: list[Homes], layers: list[int], rows: Rows) -> dict[int, list[int]]:
    """What each sequence generates, token by token, through the units of one stage after the other."""
    found: dict[int, list[int]] = {}
    for s, (prompt, new) in enumerate(rows):
        kv = {(i, j): 0 for i, count in enumerate(layers) for j in range(count)}
        tokens = [feed(s, t) for t in range(prompt)]
        for at in range(prompt + new - 1):
            h = tokens[at]
            for i, units in enumerate(stages):
                for j, homes in enumerate(units):
                    if (i, j) in kv:
                        kv[i, j] = hash((kv[i, j], h))
                    h = hash((h, kv.get((i, j), 0), j, *(weight(j, home) for home in homes)))
            if at >= prompt - 1:
                tokens.append(h)
        found[s] = tokens[prompt:]
    return found


def outcome(job: Job, cut: int, seed: int, routes: Routes, edges: Any) -> bool:
    """Return whether a job gives what the oracle says if its units are cut into two stages."""
    rng, (streamed, layers, policy, rows), slots = random.Random(seed), job, job.policy.slots
    cut = min(cut, layers - 1)
    parts, counts, between = [streamed[:cut], streamed[cut:]], [cut, layers - cut], dict[int, Any]()
    toys = [Toy(part, n, slots, routes, rows) for part, n in zip(parts, counts, strict=True)]
    toys[0].after = toys[1].before = between
    programs = [Program(part, n, slots, routes, ports=(port,))
                for part, n, port in zip(parts, counts, (AFTER, BEFORE), strict=True)]  # fmt: skip
    lanes = [Shuffled(toy, edges(), rng) for toy in toys]
    sweeps = sweeps_of(policy, rows)
    try:
        while not sweeps.idle:
            batches = sweeps.begin(lambda sequence, pages: None)
            for toy, program, run in zip(toys, programs, lanes, strict=True):
                toy.begin(batches)
                run.run(program.sweep(sweeps.sweep, batches, sweeps.another))
            assert not between
            toys[0].sampled = toys[1].sampled
            for toy in toys:
                toy.end()
            sweeps.advance(batches, set())
    except KeyError:
        return False
    return {s: t[rows[s][0] :] for s, t in toys[1].tokens.items()} == oracle(parts, counts, rows)


@given(data=st.data(), seed=SEEDS, cut=st.integers(1, 3), slots=st.integers(1, 3), routes=st.sampled_from(list(ROUTES)))
def test_every_interleaving_gives_the_sequential_result(
    data: Any, seed: int, cut: int, slots: int, routes: str
) -> None:
    assert outcome(data.draw(jobs(slots)), cut, seed, ROUTES[routes], Edges)


@pytest.mark.slow
def test_no_kind_of_edge_is_spare() -> None:
    every = ("raw", "war", "waw")
    cases = st.tuples(jobs(2), st.integers(1, 3), SEEDS)
    for kind in every:
        others = [k for k in every if k != kind]
        assert refuted(cases, lambda case, others=others: outcome(*case, DIRECT, lambda: SomeEdges(*others))), kind


@pytest.mark.parametrize("hidden", ["device", "host"])
@pytest.mark.parametrize("ports", [(), (BEFORE,), (AFTER,), BOTH])
def test_each_gpu_batch_enters_and_leaves_once_per_sweep(ports: tuple[str, ...], hidden: str) -> None:
    program = Program([("host",)] * 3, 3, 2, DIRECT, ports=ports)
    for tasks in tasks_of(program, uniform(4, "host", hidden), 3):
        cells = {op: [(t.cell.layer, t.cell.batch) for t in tasks if t.op is op] for op in (Op.ENTER, Op.LEAVE)}
        assert cells[Op.ENTER] == [(0, k) for k in range(4)] * (BEFORE in ports)
        assert cells[Op.LEAVE] == [(2, k) for k in range(4)] * (AFTER in ports)
        assert {t.lane for t in tasks if t.op in (Op.ENTER, Op.LEAVE)} == {
            lane for port, lane in ((BEFORE, "enter"), (AFTER, "leave")) if port in ports
        }


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_delegated_cells_leave_after_their_rest(slots: int) -> None:
    """No head comes after the last layer, so that the rests of its cells must be emitted at the end."""
    batches = [batch._replace(attention="host") for batch in uniform(3, "host")]
    program = Program([("host",)] * 3, 3, slots, STAGED, ports=BOTH)
    for tasks in tasks_of(program, batches, 3):
        for k in range(3):
            own = [t.op for t in tasks if t.cell.batch == k]
            assert own[0] is Op.ENTER
            assert own[-2:] == [Op.FINISH, Op.LEAVE]
            assert own.count(Op.FINISH) == 3
        loads = [t for t in tasks if t.op is Op.LOAD_WEIGHT]
        assert len(loads) <= 3 + slots
