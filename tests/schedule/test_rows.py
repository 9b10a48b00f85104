"""Programs that load rows on demand: against the toy machine of test_delegation, an oracle, and counting."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import simulate
from flexengine.places import DIRECT, Routes
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.edges import Edges
from flexengine.schedule.frame import Demand
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Compute, Copy, Op, Task
from tests.helpers.strategies import SEEDS, refuted
from tests.helpers.toy import (
    MACHINES,
    MACHINES_AND_SLOTS,
    PLACES,
    Homes,
    Job,
    Rows,
    Shuffled,
    SomeEdges,
    arriving_of,
    feed,
    generate,
    jobs,
    kinds,
    weight,
)
from tests.schedule.test_delegation import OWN, DelegatingToy, QueriesFirst, delegating

EXPERTS = 3  # of a toy layer, of which a token uses one of each home


def expert(unit: int, home: str, number: int) -> int:
    return hash((unit, PLACES.index(home), number, 99))


def mixed(unit: int, value: int, found: dict[str, int]) -> int:
    """What a unit's experts make of a value. found: by home, the expert that it uses."""
    return hash((value, unit, *(found[home] for home in sorted(found)))) if found else value


def oracle(demand: Demand, layers: int, rows: Rows) -> dict[int, list[int]]:
    """What each sequence generates, token by token and without any schedule."""
    answers: dict[int, list[int]] = {}
    for s, (prompt, new) in enumerate(rows):
        kv, tokens = [0] * layers, [feed(s, t) for t in range(prompt)]
        for at in range(prompt + new - 1):
            h = tokens[at]
            for unit, homes in enumerate(demand.others):
                if unit < layers:
                    kv[unit] = hash((kv[unit], h))
                h = hash((h, kv[unit] if unit < layers else 0, unit, *(weight(unit, home) for home in homes)))
                h = mixed(unit, h, {home: expert(unit, home, h % EXPERTS) for home in demand.of(unit)})
            if at >= prompt - 1:
                tokens.append(h)
        answers[s] = tokens[prompt:]
    return answers


class RowsToy(DelegatingToy):
    """Also has experts, in slots and staging as narrow as the real ones, and an embedding."""

    def __init__(
        self, demand: Demand, layers: int, slots: int, routes: Routes, rows: Rows, arriving: Iterable[int]
    ) -> None:
        super().__init__(list(demand.others), layers, slots, routes, rows, arriving)
        self.demand = demand
        self.filled: list[dict[tuple[int, str, int], int]] = [{} for _ in range(slots)]  # by unit, home and expert
        self.staged: dict[tuple[int, str], dict[int, int]] = {}  # by slot and disk: experts
        self.there: dict[tuple[int, int], set[int]] = {}  # by unit and slot: experts named so far
        self.missing_rows: dict[int, list[int]] = {}  # by batch
        self.embedded: set[int] = set()
        self.brought: Counter[tuple[int, str]] = Counter()  # experts that were loaded, by unit and home
        self.open: dict[int, tuple[int, str]] = {}

    def begin(self, batches: list[Batch]) -> None:
        super().begin(batches)
        self.embedded, self.open = set(), {}

    def perform(self, task: Task) -> None:
        unit, k = task.cell.layer, task.cell.batch
        if task.op is Op.OPEN:
            self.open[k] = (k, "open")
        elif task.op is Op.LOAD_ROWS and unit < 0:
            assert k in self.open
            if self._is_there(0, task.home):
                self.embedded.add(k)
        elif task.op is Op.LOAD_ROWS:
            self._load_rows(task)
        elif task.op is Op.RESUME:
            self._finish(task, self.near.pop(k, {}))
        elif task.op is Op.LOAD_WEIGHT:
            self._load_unit(task)
        else:
            if unit == 0 and task.op in (Op.COMPUTE, Op.PROJECT) and self.demand.embedding and k not in self.embedded:
                self.tokens = {s: [-77 for _ in t] for s, t in self.tokens.items()}
            super().perform(task)
            self._mix(task)

    def _last(self, task: Copy) -> bool:
        return task.hop == len(self.routes.load[task.home]) - 1

    def _load_unit(self, task: Copy) -> None:
        unit, slot, home = task.cell.layer, task.buffer, task.home
        if home in self.demand.others[unit]:
            self._load_weight(task)
        found = {} if task.by_rows else self._all(unit, home)
        if not self._last(task):
            self.staged[slot, home] = found
            return
        if task.hop and not task.by_rows:
            found = self.staged[slot, home]
        # Experts of other units, from any home, may be on the same bytes.
        kept = {key: value for key, value in self.filled[slot].items() if key[0] == unit and key[1] != home}
        self.filled[slot] = kept | {(unit, home, e): value for e, value in found.items()}
        if task.by_rows:
            self.there[unit, slot] = set()
        else:
            self.there.pop((unit, slot), None)

    def _all(self, unit: int, home: str) -> dict[int, int]:
        return {e: self._at(unit, home, e) for e in range(EXPERTS) if home in self.demand.of(unit)}

    def _at(self, unit: int, home: str, number: int) -> int:
        """An expert as it is at its home; wrong if it is not there yet."""
        return expert(unit, home, number) if self._is_there(unit, home) else -17

    def _load_rows(self, task: Copy) -> None:
        unit, slot, home = task.cell.layer, task.buffer, task.home
        for e in self.missing_rows[task.cell.batch]:
            value = self._at(unit, home, e) if task.hop == 0 else self.staged.get((slot, home), {}).get(e, -11)
            if self._last(task):
                self.filled[slot][unit, home, e] = value
                self.brought[unit, home] += 1
            else:
                self.staged.setdefault((slot, home), {})[e] = value

    def _mix(self, task: Compute) -> None:
        """Behind a unit's other weights: apply its experts, or leave that to RESUME."""
        unit, k = task.cell.layer, task.cell.batch
        if task.op not in (Op.COMPUTE, Op.FINISH) or not self.demand.of(unit):
            return
        away = task.hidden is not None and unit < self.layers - 1
        values = self.hbuf[task.hidden] if away else self.near[k]
        if not task.by_rows:
            self._finish(task, values)
            return
        named = {h % EXPERTS for row in values.values() for h in row}
        self.missing_rows[k] = sorted(named - self.there[unit, task.slot])
        self.there[unit, task.slot] |= named
        self.near[k] = dict(values)

    def _finish(self, task: Compute, values: dict[int, list[int]]) -> None:
        unit, k, homes = task.cell.layer, task.cell.batch, self.demand.of(task.cell.layer)
        slot = self.filled[task.slot]
        after = {s: [mixed(unit, h, {home: slot.get((unit, home, h % EXPERTS), -13) for home in homes}) for h in row]
                 for s, row in values.items()}  # fmt: skip
        if task.hidden is not None and unit < self.layers - 1:
            self.hbuf[task.hidden] = after
        else:
            self.near[k] = after


class Demanding(NamedTuple):
    """A random job, of whose weights some are loaded by rows.

    Attributes:
        streamed: per unit, the tiers that its weights come from, experts included.
    """

    job: Job
    streamed: Homes
    demand: Demand


@st.composite
def demanding(draw: st.DrawFn, slots: int, routes: Routes) -> Demanding:
    """Draw a job, some of which delegate attention, with experts in some layers and an embedding anywhere."""
    job = draw(delegating(slots, routes) | jobs(slots, routes) if routes.attend else jobs(slots, routes))
    experts = [draw(kinds(routes)) if j < job.layers else () for j in range(len(job.streamed))]
    streamed = [tuple(h for h in PLACES if h in (*a, *b)) for a, b in zip(job.streamed, experts, strict=True)]
    table, most = draw(st.sampled_from(["", *routes.load])), draw(st.sampled_from([0, 2, 5, 1000]))
    return Demanding(job, streamed, Demand(table, experts, job.streamed, most))


def outcome(
    case: Demanding,
    seed: int,
    routes: Routes,
    edges: Any,
    altered: Callable[[Task], Task] = lambda task: task,
    kind: type[RowsToy] = RowsToy,
    first: bool = False,
) -> bool:
    """Return whether a job in a random interleaving gives what the oracle says.

    Args:
        altered: changes what tasks read and write before edges are drawn.
        kind: performs the tasks.
        first: delegated queries go first.
    """
    (_, layers, policy, rows), streamed, demand = case
    rng, slots = random.Random(seed), policy.slots
    arriving = arriving_of(rng, layers)
    toy = kind(demand, layers, slots, routes, rows, arriving)
    program = (QueriesFirst if first else Program)(streamed, layers, slots, routes, arriving, demand)
    run = Shuffled(toy, edges, rng).run
    generate(toy, lambda tasks: run(map(altered, tasks)), program, policy, rows)
    return {s: t[rows[s][0] :] for s, t in toy.tokens.items()} == oracle(demand, layers, rows)


def right(*case: Any) -> bool:
    """Return whether a job ends and `outcome` is true. It does not end if a task needs what is not there yet."""
    try:
        return outcome(*case)
    except (KeyError, AssertionError):
        return False


@given(data=st.data(), seed=SEEDS, slots=st.integers(1, 4), first=st.booleans(), own=st.booleans())
@settings(max_examples=80)
def test_any_program(data: Any, seed: int, slots: int, first: bool, own: bool) -> None:
    """All that a program may have: one or two disks, staged or not, delegated attention in lanes of its own or not,
    with queries first or not, rows on demand, weights that stay and weights that arrive in the first sweep."""
    routes = OWN if own else data.draw(st.sampled_from(list(MACHINES.values())))
    assert outcome(data.draw(demanding(slots, routes)), seed, routes, Edges(), first=first)


# The whole grid of slots and machines. The tests above and below find what one of them alone gets wrong.
@pytest.mark.slow
@pytest.mark.parametrize("routes", MACHINES)
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=60)
def test_every_interleaving_gives_the_sequential_result(slots: int, routes: str, data: Any, seed: int) -> None:
    assert outcome(data.draw(demanding(slots, MACHINES[routes])), seed, MACHINES[routes], Edges())


@pytest.mark.slow
@pytest.mark.parametrize(("routes", "slots"), MACHINES_AND_SLOTS)
def test_no_kind_of_edge_is_spare(slots: int, routes: str) -> None:
    every = ("raw", "war", "waw")
    cases = st.tuples(demanding(slots, MACHINES[routes]), SEEDS)
    assert not refuted(cases, lambda case: right(*case, MACHINES[routes], SomeEdges(*every)), 20)
    for kind in every:
        others = [k for k in every if k != kind]
        assert refuted(cases, lambda case, others=others: right(*case, MACHINES[routes], SomeEdges(*others))), kind


def batches_of(count: int, hidden: str = "device") -> list[Batch]:
    return [Batch((Piece(k, 4, 1, True),), "device", hidden) for k in range(count)]


def by_rows(slots: int, batches: int, embedding: str = "", hidden: str = "device") -> list[Task]:
    """Three layers and a head from disk, whose layers have experts there; two sweeps, one after the other."""
    disk: Homes = [("disk",)] * 4
    demand = Demand(embedding, [*disk[:3], ()], disk, batches)
    program = Program(disk, 3, slots, MACHINES["direct, two disks"], demand=demand)
    return [t for n in range(2) for t in program.sweep(n, batches_of(batches, hidden), n == 0)]


@pytest.mark.parametrize(("slots", "hidden", "order"), [
    (1, "device", "C0 C1 C2 C3 R0 R1 R2 R3"), (2, "device", "C0 C1 C2 C3 R0 R1 R2 R3"),
    (1, "host", "C0 R0 C1 R1 C2 R2 C3 R3"), (2, "host", "C0 C1 C2 R0 C3 R1 R2 R3"),
    (3, "disk", "C0 C1 C2 C3 R0 R1 R2 R3"),
])  # fmt: skip
def test_rests_come_behind_as_many_starts_as_have_buffers(slots: int, hidden: str, order: str) -> None:
    names = {Op.COMPUTE: "C", Op.RESUME: "R"}
    tasks = [t for t in by_rows(slots, 4, "", hidden) if t.lane == "device" and t.cell.sweep == 0]
    for j in range(3):
        assert " ".join(f"{names[t.op]}{t.cell.batch}" for t in tasks if t.cell.layer == j) == order
    assert [t.op for t in tasks if t.cell.layer == 3] == [Op.COMPUTE] * 4


def test_a_large_sweep_loads_whole_layers() -> None:
    """And nothing is split: the tasks are those of a program without experts."""
    disk: Homes = [("disk",)] * 4
    demand = Demand("", [*disk[:3], ()], disk, 2)
    large = [t for n in range(2) for t in Program(disk, 3, 2, DIRECT, demand=demand).sweep(n, batches_of(3), n == 0)]
    plain = [t for n in range(2) for t in Program(disk, 3, 2, DIRECT).sweep(n, batches_of(3), n == 0)]
    assert large == plain


def test_loads_run_while_other_batches_compute() -> None:
    """Starts of 1 s and rests of 1 s, loads of 1.5 s: with one batch a layer takes 3.5 s, with three the disk never
    waits but at the layers' ends."""
    seconds = {Op.COMPUTE: 1.0, Op.RESUME: 1.0, Op.LOAD_ROWS: 1.5, Op.LOAD_WEIGHT: 0.0}

    def layer(batches: int) -> float:
        spans = simulate(by_rows(2, batches), lambda task: seconds[task.op]).spans
        ends = [end for t, _, end in spans if t.cell[:2] == (0, 0) and t.op is Op.RESUME]
        return max(ends) - min(start for t, start, _ in spans if t.op is Op.COMPUTE)

    assert layer(1) == 3.5
    assert layer(3) == 1.0 + 3 * 1.5 + 1.0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_embedding_rows_are_read_in_the_lane_of_their_tier(slots: int) -> None:
    for home, lane in (("host", "h2d"), ("disk", "disk_read"), ("disk2", "disk2_read")):
        ahead = 1 if home == "disk" else slots  # weights are read from disk
        tasks = by_rows(slots, 3, home)
        rows = [t for t in tasks if t.op is Op.LOAD_ROWS and t.cell.layer < 0]
        assert [(t.lane, *t.cell) for t in rows] == [(lane, n, -1, k) for n in range(2) for k in range(3)]
        # In one lane, only the next sweep's first unit may be before the rows of that sweep.
        first = tasks.index(rows[3])
        assert sum(t.op is Op.LOAD_WEIGHT for t in tasks[:first]) == 4 + ahead


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_first_layer_is_read_before_embedding_rows_of_later_batches(slots: int) -> None:
    """In the first sweep. In the second one it is there already."""
    lane = [t for t in by_rows(slots, 3, "disk") if t.lane == "disk_read" and t.op in (Op.LOAD_ROWS, Op.LOAD_WEIGHT)]
    first, second = ([(t.op, *t.cell[1:]) for t in lane if t.cell.sweep == n and t.cell.layer <= 0] for n in (0, 1))
    rows = [(Op.LOAD_ROWS, -1, k) for k in range(3)]
    assert first[:4] == [rows[0], (Op.LOAD_WEIGHT, 0, -1), *rows[1:]]
    assert second[:3] == rows
