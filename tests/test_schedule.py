"""Order, edges, programs, sweeps and the virtual clock, against a toy machine, brute force and plain counting."""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from flexengine.policy import TIERS, Policy
from flexengine.schedule.edges import Edges
from flexengine.schedule.order import (
    Batch,
    Cell,
    Growing,
    Piece,
    cells,
    entrants,
    form_batches,
    peak_pages,
    split_prompt,
)
from flexengine.schedule.pages import Pool, pages_for
from flexengine.schedule.program import DIRECT, STAGED, Op, Program, Routes, Task
from flexengine.schedule.simulate import simulate
from flexengine.schedule.sweeps import Sequence, Sweeps

Rows = list[tuple[int, int]]  # (prompt tokens, tokens to generate)
Homes = list[tuple[str, ...]]  # per unit, where its off-device weights come from
CELLS = 4  # values a toy weight slot holds
ROUTES = {"staged": STAGED, "direct": DIRECT}


# The toy: a "model" whose every value is a hash of all that went into it, in memories as narrow as the real ones.


def weight(unit: int, home: str) -> int:
    return hash((unit, len(home), 77))


def feed(sequence: int, place: int) -> int:
    return hash((sequence, place, 5))


def oracle(streamed: Homes, layers: int, rows: Rows) -> dict[int, list[int]]:
    """What each sequence generates, token by token and without any schedule."""
    found: dict[int, list[int]] = {}
    for s, (prompt, new) in enumerate(rows):
        kv = [0] * layers
        tokens = [feed(s, t) for t in range(prompt)]
        for at in range(prompt + new - 1):
            h = tokens[at]
            for unit, homes in enumerate(streamed):
                if unit < layers:
                    kv[unit] = hash((kv[unit], h))
                h = hash((h, kv[unit] if unit < layers else 0, unit, *(weight(unit, home) for home in homes)))
            if at >= prompt - 1:
                tokens.append(h)
        found[s] = tokens[prompt:]
    return found


class Toy:
    """Performs tasks on memories of values: slots, buffers and staging are as few as the real ones, and reused."""

    def __init__(
        self, streamed: Homes, layers: int, slots: int, routes: Routes, rows: Rows, arriving: Iterable[int] = ()
    ) -> None:
        self.streamed, self.layers, self.routes = streamed, layers, routes
        self.missing = Counter(arriving)  # batches of weights that are not yet where they stay, by unit
        self.slots = [[0] * CELLS for _ in range(slots)]
        self.staging: dict[tuple[str, int], Any] = {}  # ("w" | "c" | "h", number)
        self.cbuf: list[dict[int, int]] = [{} for _ in range(slots)]
        self.hbuf: list[dict[int, list[int]]] = [{} for _ in range(slots)]
        self.kv: dict[tuple[str, int, int], int] = {}  # (tier, layer, sequence)
        self.away: dict[int, dict[int, list[int]]] = {}  # batch -> hidden states in their home
        self.near: dict[int, dict[int, list[int]]] = {}  # batch -> hidden states on the device
        self.tokens = {s: [feed(s, t) for t in range(prompt)] for s, (prompt, _) in enumerate(rows)}
        self.sampled: dict[int, int] = {}
        self.batches: list[Batch] = []

    def begin(self, batches: list[Batch]) -> None:
        self.batches, self.sampled, self.near, self.away = batches, {}, {}, {}

    def _room(self, unit: int, home: str) -> slice:
        """A unit's part from one home; another unit may have the other home's part on the same cells."""
        homes = self.streamed[unit]
        width = CELLS // len(homes)
        return slice(homes.index(home) * width, (homes.index(home) + 1) * width)

    def perform(self, task: Task) -> None:
        {
            Op.SETTLE: lambda task: self.missing.subtract([task.cell.layer]),
            Op.LOAD_WEIGHT: self._load_weight,
            Op.LOAD_CACHE: self._load_cache,
            Op.STORE_CACHE: self._store_cache,
            Op.LOAD_HIDDEN: self._load_hidden,
            Op.STORE_HIDDEN: self._store_hidden,
            Op.COMPUTE: self._compute,
        }[task.op](task)

    def _leg(self, task: Task, routes: dict[str, tuple[str, ...]], kind: str, number: int, source: Any) -> Any:
        """The value if this is the last leg of its route, else None after leaving it in staging."""
        legs = len(routes[task.home])
        if task.hop > 0:
            source = self.staging.get((kind, number), -9)
        if task.hop == legs - 1:
            return source
        self.staging[kind, number] = source
        return None

    def _load_weight(self, task: Task) -> None:
        unit = task.cell.layer
        there = task.home == "disk" or self._at_home(unit)
        value = self._leg(task, self.routes.load, "w", task.slot, weight(unit, task.home) if there else -7)
        if value is not None:
            room = self._room(unit, task.home)
            self.slots[task.slot][room] = [value] * (room.stop - room.start)

    def _at_home(self, unit: int) -> bool:
        """Of a head: its first chunk brings all of it, or it is the embedding, which the first layer brings."""
        return not any(self.missing[j] for j in ({unit} if unit < self.layers else {0, self.layers}))

    def _load_cache(self, task: Task) -> None:
        known = {p.sequence: self.kv.get((task.home, task.cell.layer, p.sequence), -1)
                 for p in self.batches[task.cell.batch].pieces if p.start}  # fmt: skip
        value = self._leg(task, self.routes.load, "c", task.cache, known)
        if value is not None:
            self.cbuf[task.cache] = dict(value)

    def _store_cache(self, task: Task) -> None:
        value = self._leg(task, self.routes.store, "c", task.cache, dict(self.cbuf[task.cache]))
        if value is not None:
            for s in (p.sequence for p in self.batches[task.cell.batch].pieces):
                self.kv[task.home, task.cell.layer, s] = value.get(s, -2)

    def _load_hidden(self, task: Task) -> None:
        value = self._leg(task, self.routes.load, "h", task.hidden, self.away.get(task.cell.batch, {}))
        if value is not None:
            self.hbuf[task.hidden] = dict(value)

    def _store_hidden(self, task: Task) -> None:
        value = self._leg(task, self.routes.store, "h", task.hidden, dict(self.hbuf[task.hidden]))
        if value is not None:
            self.away[task.cell.batch] = value

    def _compute(self, task: Task) -> None:
        unit, k = task.cell.layer, task.cell.batch
        batch = self.batches[k]
        read = [self.slots[task.slot][self._room(unit, home)] for home in self.streamed[unit]]
        weights = [part[0] if len(set(part)) == 1 and self._at_home(unit) else -3 for part in read]
        weights += [] if self._at_home(unit) else [-8]
        before = self.hbuf[task.hidden] if task.hidden >= 0 and unit else self.near.pop(k, {})
        past = dict(self.cbuf[task.cache]) if task.cache >= 0 else {}
        if unit < self.layers and task.cache < 0:
            past = {p.sequence: self.kv.get(("device", unit, p.sequence), -4) for p in batch.pieces}
        now, after = dict[int, int](), dict[int, list[int]]()
        for p in batch.pieces:
            s = p.sequence
            inputs = self.tokens[s][p.start : p.start + p.count] if unit == 0 else before.get(s, [-5] * p.count)
            kv, out = past.get(s, -6) if p.start else 0, []
            for h in inputs:
                kv = hash((kv, h)) if unit < self.layers else 0
                out.append(hash((h, kv, unit, *weights)))
            now[s], after[s] = kv, out
        self._leave(task, batch, now, after)

    def _leave(self, task: Task, batch: Batch, now: dict[int, int], after: dict[int, list[int]]) -> None:
        unit, k = task.cell.layer, task.cell.batch
        if task.cache >= 0:
            self.cbuf[task.cache] = now
        elif unit < self.layers:
            self.kv |= {("device", unit, s): value for s, value in now.items()}
        if task.hidden >= 0 and unit < self.layers - 1:
            self.hbuf[task.hidden] = after
        else:
            self.near[k] = after
        if unit == len(self.streamed) - 1:
            self.sampled |= {p.sequence: after[p.sequence][-1] for p in batch.pieces if p.final}

    def end(self) -> None:
        for s, token in self.sampled.items():
            self.tokens[s].append(token)


class SomeEdges:
    """Edges written anew from the textbook, with a choice of kinds."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.writer: dict[Hashable, Any] = {}
        self.readers: dict[Hashable, list[Any]] = {}

    def add(self, reads: Iterable[Hashable], writes: Iterable[Hashable], done: Any) -> list[Any]:
        reads, writes = list(reads), list(writes)
        after: list[Any] = []
        if "raw" in self.kinds:
            after += [self.writer[r] for r in reads if r in self.writer]
        if "war" in self.kinds:
            after += [reader for w in writes for reader in self.readers.get(w, [])]
        if "waw" in self.kinds:
            after += [self.writer[w] for w in writes if w in self.writer]
        for w in writes:
            self.writer[w], self.readers[w] = done, []
        for r in reads:
            self.readers.setdefault(r, []).append(done)
        return after


class Shuffled:
    """Lanes on one thread: any lane whose first task is free to run may be next; how eager a lane is is random."""

    def __init__(self, toy: Toy, edges: Any, rng: random.Random) -> None:
        self.toy, self.edges, self.rng = toy, edges, rng
        self.eager: dict[str, float] = {}
        self.queues: dict[str, list[tuple[Task, list[list[bool]], list[bool]]]] = {}

    def run(self, program: Iterable[Task]) -> None:
        for task in program:
            done = [False]
            self.queues.setdefault(task.lane, []).append((task, self.edges.add(task.reads, task.writes, done), done))
            self.eager.setdefault(task.lane, 10 ** self.rng.uniform(-2, 2))
        while any(task.op is not Op.LOAD_WEIGHT for queue in self.queues.values() for task, _, _ in queue):
            free = [name for name, q in self.queues.items() if q and all(d[0] for d in q[0][1])]
            assert free, "deadlock"
            name = self.rng.choices(free, [self.eager[n] for n in free])[0]
            task, _, done = self.queues[name].pop(0)
            self.toy.perform(task)
            done[0] = True


def sweeps_of(policy: Policy, rows: Rows, pages: int = 10**6) -> Sweeps:
    sweeps = Sweeps(policy, {t: (Pool(pages, 4),) for t, share in zip(TIERS, policy.cache, strict=True) if share})
    for s, (prompt, new) in enumerate(rows):
        sweeps.add(Sequence(s, prompt, new))
    return sweeps


def generate(toy: Toy, run: Callable[[Iterator[Task]], None], program: Program, policy: Policy, rows: Rows) -> None:
    sweeps = sweeps_of(policy, rows)
    while not sweeps.idle:
        batches = sweeps.begin(lambda sequence, pages: None)
        toy.begin(batches)
        run(program.sweep(sweeps.sweep, batches, sweeps.another))
        toy.end()
        sweeps.advance(batches, set())


def random_case(rng: random.Random, slots: int) -> tuple[Homes, int, Policy, Rows]:
    layers, heads = rng.randint(2, 4), rng.randint(1, 2)
    kinds: Homes = [(), ("host",), ("disk",), ("host", "disk")]
    streamed = [rng.choice(kinds) for _ in range(layers + heads)]
    splits = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3), (0, 0.5, 0.5), (0.5, 0, 0.5)]
    policy = Policy(rng.randint(1, 3), rng.randint(1, 4), cache=rng.choice(splits), activations=rng.choice(splits),
                    slots=slots, schedule=rng.choice(["row", "zigzag", "diagonal", "continuous"]),
                    prefill_tokens=rng.choice([2, 3, 50]))  # fmt: skip
    return streamed, layers, policy, [(rng.randint(1, 7), rng.randint(1, 4)) for _ in range(rng.randint(1, 7))]


def outcome(seed: int, slots: int, routes: Routes, edges: Any) -> bool:
    """Whether a random job in a random interleaving gives what the oracle says."""
    rng = random.Random(seed)
    streamed, layers, policy, rows = random_case(rng, slots)
    arriving = [j for j in range(layers + 1) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    toy = Toy(streamed, layers, slots, routes, rows, arriving)
    generate(toy, Shuffled(toy, edges, rng).run, Program(streamed, layers, slots, routes, arriving), policy, rows)
    assert not any(toy.missing.values())
    return {s: t[rows[s][0] :] for s, t in toy.tokens.items()} == oracle(streamed, layers, rows)


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_interleaving_gives_the_sequential_result(slots: int, routes: str) -> None:
    wrong = [seed for seed in range(60) if not outcome(seed, slots, ROUTES[routes], Edges())]
    assert not wrong


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_kind_of_edge_is_spare(slots: int, routes: str) -> None:
    every = ("raw", "war", "waw")
    assert all(outcome(seed, slots, ROUTES[routes], SomeEdges(*every)) for seed in range(20))
    for kind in every:
        others = SomeEdges, [k for k in every if k != kind]
        assert not all(outcome(seed, slots, ROUTES[routes], others[0](*others[1])) for seed in range(60)), kind


def test_edges_order_every_conflict_and_nothing_else() -> None:
    """The transitive closure of `add`'s answers equals that of all pairs that conflict."""
    rng = random.Random(3)
    for _ in range(40):
        edges: Edges[int] = Edges()
        done: list[tuple[set[int], set[int]]] = []
        closed: list[set[int]] = []
        wanted: list[set[int]] = []
        for i in range(25):
            reads, writes = set(rng.sample(range(6), rng.randint(0, 3))), set(rng.sample(range(6), rng.randint(0, 2)))
            after = edges.add(sorted(reads), sorted(writes), i)
            conflicts = {e for e, (r, w) in enumerate(done) if reads & w or writes & (r | w)}
            closed.append(set(after).union(*(closed[e] for e in after)))
            wanted.append(conflicts.union(*(wanted[e] for e in conflicts)))
            assert closed[i] == wanted[i]
            done.append((reads, writes))


# What a program holds.


def uniform(count: int, cache: str = "device", hidden: str = "device", start: int = 4) -> list[Batch]:
    """Batches of one decoding sequence each."""
    return [Batch((Piece(k, start, 1, True),), cache, hidden) for k in range(count)]


def tasks_of(program: Program, batches: list[Batch], sweeps: int) -> list[list[Task]]:
    return [list(program.sweep(n, batches, n < sweeps - 1)) for n in range(sweeps)]


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_streamed_unit_is_loaded_once_per_sweep(count: int, slots: int, routes: str) -> None:
    streamed: Homes = [("host",), (), ("disk",), ("host", "disk"), (), ("disk",)]
    done = tasks_of(Program(streamed, 5, slots, ROUTES[routes]), uniform(count), 4)
    loads = Counter((t.cell.layer, t.home, t.hop) for tasks in done for t in tasks if t.op is Op.LOAD_WEIGHT)
    legs = {home: range(len(lanes)) for home, lanes in ROUTES[routes].load.items()}
    parts = [(unit, home) for unit, homes in enumerate(streamed) for home in homes]
    assert loads == {(unit, home, hop): 4 for unit, home in parts for hop in legs[home]}
    for n, tasks in enumerate(done):
        assert [t.cell for t in tasks if t.op is Op.COMPUTE] == [Cell(n, j, k) for j in range(6) for k in range(count)]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_stays_comes_in_the_first_sweep_in_the_order_of_use(slots: int) -> None:
    """Each batch once, before its unit's own load and first cell and those of later units, so that nothing it would
    wait for is ahead of it in its lane. Nobody waits for it in later sweeps."""
    streamed: Homes = [("disk",), (), ("host",), ("disk",), (), (), ("disk", "host"), ()]
    arriving = [0, 0, 1, 2, 4, 4, 4, 5, 6, 7]
    program = Program(streamed, 6, slots, STAGED, arriving)
    first, second = tasks_of(program, uniform(2), 2)
    settled = [i for i, task in enumerate(first) if task.op is Op.SETTLE]
    assert [first[i].cell.layer for i in settled] == arriving
    assert {first[i].lane for i in settled} == {"disk_read"}
    for i in settled:
        j = first[i].cell.layer
        assert all(task.cell.layer < j for task in first[:i] if task.op in (Op.LOAD_WEIGHT, Op.COMPUTE))
    assert not any(task.op is Op.SETTLE or any(r[0] == "home" for r in task.reads) for task in second)
    resident = Program([()] * 5, 4, slots, STAGED, [0, 2, 4])
    assert [task.op for task in resident.sweep(0, uniform(1), False)][:4] == [Op.SETTLE] * 3 + [Op.COMPUTE]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_loads_run_ahead_only_if_more(slots: int) -> None:
    streamed: Homes = [("host",), ("disk",), ("host",), (), ("disk",)]
    program = Program(streamed, 4, slots, DIRECT)
    for n, more in enumerate([True, False, False, True, True, False]):
        before = program.issued
        loads = [t.cell.layer for t in program.sweep(n, uniform(2), more) if t.op is Op.LOAD_WEIGHT]
        assert program.issued == before + len(loads)
        assert program.issued == 4 * (n + 1) + (slots if more else 0)
        assert loads == [(0, 1, 2, 4)[i % 4] for i in range(before, program.issued)]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_load_is_at_most_slots_units_ahead_and_in_time(slots: int) -> None:
    """When a unit is computed its load was emitted, into the slot it names, and no later load took that slot."""
    streamed: Homes = [("host",), (), ("disk",), ("host",), ("disk",)]
    filled: dict[int, int] = {}
    ahead = 0
    for tasks in tasks_of(Program(streamed, 4, slots, DIRECT), uniform(3), 3):
        for task in tasks:
            if task.op is Op.LOAD_WEIGHT:
                filled[task.slot] = task.cell.layer
                ahead = max(ahead, len(filled))
            elif streamed[task.cell.layer]:
                assert task.slot >= 0
                assert ("w", task.slot, streamed[task.cell.layer][0]) in task.reads
                if slots == 1:
                    assert filled[task.slot] == task.cell.layer
            else:
                assert task.slot == -1
    assert ahead == slots


def test_lanes_and_staging_of_a_disk_cell() -> None:
    batch = Batch((Piece(0, 4, 1, True),), "disk", "disk")
    tasks = list(Program([("disk",), ("disk",)], 2, 1, STAGED).sweep(0, [batch], False))
    cell = [(t.op, t.lane, t.hop) for t in tasks if t.cell.layer == 1]
    assert cell == [
        (Op.LOAD_CACHE, "disk_read", 0), (Op.LOAD_CACHE, "h2d", 1), (Op.LOAD_HIDDEN, "disk_read", 0),
        (Op.LOAD_HIDDEN, "h2d", 1), (Op.LOAD_WEIGHT, "disk_read", 0), (Op.LOAD_WEIGHT, "h2d", 1),
        (Op.COMPUTE, "device", 0), (Op.STORE_CACHE, "d2h", 0), (Op.STORE_CACHE, "disk_write", 1),
    ] or set(cell) == {  # the order of loads is the program's business; what they are is not
        (Op.LOAD_CACHE, "disk_read", 0), (Op.LOAD_CACHE, "h2d", 1), (Op.LOAD_HIDDEN, "disk_read", 0),
        (Op.LOAD_HIDDEN, "h2d", 1), (Op.LOAD_WEIGHT, "disk_read", 0), (Op.LOAD_WEIGHT, "h2d", 1),
        (Op.COMPUTE, "device", 0), (Op.STORE_CACHE, "d2h", 0), (Op.STORE_CACHE, "disk_write", 1),
    }  # fmt: skip


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_buffers_take_turns(slots: int) -> None:
    """Each off-device cell takes the next buffer, so that `slots` of them are under way; no sweep starts anew."""
    done = tasks_of(Program([()] * 3, 2, slots, STAGED), uniform(2, "host", "disk"), 3)
    away = [t for tasks in done for t in tasks if t.op is Op.COMPUTE and t.cell.layer < 2]
    for buffers in ([t.cache for t in away], [t.hidden for t in away]):
        assert buffers == [(buffers[0] + i) % slots for i in range(12)]
    ends = [t for tasks in done for t in tasks if t.op is Op.COMPUTE and t.cell.layer == 2]
    assert {(t.cache, t.hidden) for t in ends} == {(-1, -1)}


def test_nothing_moves_that_needs_not() -> None:
    """Resident everything is compute alone; a prompt's first piece loads no cache; the last layer stores no hidden."""
    assert {t.op for t in Program([(), ()], 1, 2, STAGED).sweep(0, uniform(3), True)} == {Op.COMPUTE}
    fresh = list(Program([()] * 4, 3, 2, DIRECT).sweep(0, uniform(2, "host", "host", start=0), False))
    count = Counter((t.op, t.cell.layer) for t in fresh)
    assert [count[Op.LOAD_CACHE, j] for j in range(4)] == [0, 0, 0, 0]
    assert [count[Op.STORE_CACHE, j] for j in range(4)] == [2, 2, 2, 0]
    assert [count[Op.LOAD_HIDDEN, j] for j in range(4)] == [0, 2, 2, 0]
    assert [count[Op.STORE_HIDDEN, j] for j in range(4)] == [2, 2, 0, 0]


# The virtual clock.


def costs(rng: random.Random) -> Callable[[Task], float]:
    """A constant per op, home and lane, as of equal layers and equal batches."""
    known: dict[tuple[Op, str, str], float] = {}
    return lambda t: known.setdefault((t.op, t.home, t.lane), rng.uniform(0.2, 1) * (4 if t.cell.batch < 0 else 1))


def program_of(streamed: Homes, slots: int, routes: Routes, batches: list[Batch], sweeps: int) -> list[Task]:
    program = Program(streamed, len(streamed) - 1, slots, routes)
    return [t for tasks in tasks_of(program, batches, sweeps) for t in tasks]


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("slots", [2, 3])
def test_overlap_reaches_the_busiest_lane(slots: int, routes: str) -> None:
    rng = random.Random(11)
    for _ in range(20):
        streamed: Homes = [rng.choice([("host",), ("disk",)])] * 9
        tasks = program_of(streamed, slots, ROUTES[routes], uniform(4), 12)
        forecast = simulate(tasks, costs(rng))
        assert max(forecast.busy.values()) <= forecast.seconds <= 1.15 * max(forecast.busy.values())


@pytest.mark.parametrize("routes", ROUTES)
def test_without_overlap_the_clock_adds_up(routes: str) -> None:
    rng = random.Random(12)
    for _ in range(20):
        streamed: Homes = [rng.choice([(), ("host",), ("disk",), ("host", "disk")]) for _ in range(7)]
        cost, batches = costs(rng), uniform(3, rng.choice(TIERS), rng.choice(TIERS))
        tasks = program_of(streamed, rng.randint(1, 3), ROUTES[routes], batches, 6)
        total = sum(map(cost, tasks))
        assert simulate(tasks, cost, overlap=False).seconds == pytest.approx(total)
        forecast = simulate(tasks, cost)
        assert sum(forecast.busy.values()) == pytest.approx(total)
        assert max(forecast.busy.values()) <= forecast.seconds + 1e-9 <= total + 2e-9


@pytest.mark.parametrize("routes", ROUTES)
def test_more_slots_are_never_slower(routes: str) -> None:
    """For weights from one home. With two, a lane that is first come first served may lose a few per cent."""
    rng = random.Random(14)
    for _ in range(30):
        streamed: Homes = [rng.choice([("host",), ("disk",)])] * 7
        cost, batches = costs(rng), uniform(rng.randint(1, 4))
        one, two, three = (
            simulate(program_of(streamed, slots, ROUTES[routes], batches, 6), cost).seconds for slots in (1, 2, 3)
        )
        assert two < 0.999 * one
        assert three <= two + 1e-9


def test_no_span_overlaps_what_it_waits_for() -> None:
    rng = random.Random(13)
    streamed: Homes = [("host",), ("disk",), ("host", "disk"), (), ("disk",)]
    forecast = simulate(program_of(streamed, 2, STAGED, uniform(3, "disk", "host"), 4), costs(rng))
    spans = forecast.spans
    for i, (task, start, _) in enumerate(spans):
        for earlier, _, end in spans[:i]:
            conflict = set(task.reads) & set(earlier.writes) or set(task.writes) & {*earlier.reads, *earlier.writes}
            if conflict or task.lane == earlier.lane:
                assert start >= end - 1e-9, (earlier, task)


# Order.


def test_cells_are_layer_major() -> None:
    assert [tuple(c) for c in cells(3, 2, 3)] == [(3, 0, 0), (3, 0, 1), (3, 0, 2), (3, 1, 0), (3, 1, 1), (3, 1, 2)]


@pytest.mark.parametrize(
    ("schedule", "free"),
    [("row", {0: 4, 1: 0, 4: 0}), ("zigzag", {0: 12, 1: 0, 11: 0}), ("diagonal", {0: 4, 7: 4, 8: 4, 10: 2, 12: 0}),
     ("continuous", {0: 12, 5: 7, 12: 0})],
)  # fmt: skip
def test_entrants(schedule: str, free: dict[int, int]) -> None:
    assert {live: entrants(schedule, live, 4, 3) for live in free} == free


def test_peak_pages_against_stepping() -> None:
    rng = random.Random(4)
    for _ in range(300):
        page = rng.choice([1, 2, 5, 16])
        group = [Growing(rng.randint(1, 60), rng.randint(1, 40)) for _ in range(rng.randint(0, 9))]
        held = [sum(-(-(s.tokens + step) // page) for s in group if s.sweeps > step) for step in range(41)]
        assert peak_pages(group, Pool(0, page)) == max(held)


def test_split_prompt_covers_in_order() -> None:
    rng = random.Random(5)
    for _ in range(100):
        start, count, budget = rng.randint(0, 9), rng.randint(1, 40), rng.randint(1, 15)
        pieces = split_prompt(8, start, count, budget)
        assert [t for p in pieces for t in range(p.start, p.start + p.count)] == list(range(start, start + count))
        assert all(p.sequence == 8 and 1 <= p.count <= budget for p in pieces)
        assert [p.final for p in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len(pieces) == -(-count // budget)


def test_form_batches_bounds_and_order() -> None:
    rng = random.Random(6)
    for _ in range(200):
        size, budget, page = rng.randint(1, 4), rng.randint(3, 20), rng.choice([2, 4])
        pieces = [p for s in range(rng.randint(1, 9)) for p in split_prompt(s, 0, rng.randint(1, 25), budget)]
        room = rng.choice([None, max(pages_for(p.start + p.count, page) for p in pieces) + rng.randint(0, 4)])
        formed = form_batches(pieces, size, budget, [Pool(0, page, room)])
        assert [p for batch in formed for p in batch] == pieces

        bounds = size, budget, page, room or 10**9

        def fits(batch: tuple[Piece, ...], bounds: tuple[int, int, int, int] = bounds) -> bool:
            size, budget, page, room = bounds
            pages = sum(-(-(p.start + p.count) // page) for p in batch)
            alone = len({p.sequence for p in batch}) == len(batch)
            return alone and len(batch) <= size and sum(p.count for p in batch) <= budget and pages <= room

        assert all(fits(batch) for batch in formed)
        # Greedy: no batch could have taken the first piece of the next.
        assert not any(fits((*batch, after[0])) for batch, after in pairwise(formed))


def test_pieces_of_one_sequence_are_never_together() -> None:
    pieces = [Piece(0, 0, 2, False), Piece(0, 2, 2, True), Piece(1, 0, 1, True)]
    assert form_batches(pieces, 9, 99) == [(pieces[0],), (pieces[1], pieces[2])]


# Sweeps.


def random_job(rng: random.Random, schedule: str) -> tuple[Policy, dict[str, tuple[Pool, ...]], Rows]:
    cache = rng.choice([(1, 0, 0), (0.5, 0.5, 0), (0.4, 0.3, 0.3), (0, 0, 1)])
    hidden, budget = rng.choice([(1, 0, 0), (0.5, 0.25, 0.25)]), rng.choice([3, 8, 64])
    policy = Policy(rng.randint(1, 4), rng.randint(1, 4), cache=cache, schedule=schedule, activations=hidden,
                    prefill_tokens=budget)  # fmt: skip
    rows = [(rng.randint(1, 30), rng.randint(1, 15)) for _ in range(rng.randint(1, 30))]
    pools = {}
    for tier, share in zip(TIERS, cache, strict=True):
        if share:
            page = rng.choice([2, 4, 16])
            longest = max(pages_for(p + n - 1, page) for p, n in rows)
            pages, most = longest + rng.randint(0, 3 * longest), rng.choice([None, longest + rng.randint(0, 9)])
            pools[tier] = (Pool(pages, page, most),)
    return policy, pools, rows


class Watched:
    """Runs Sweeps and checks at every step what must hold; ends sequences early at random."""

    def __init__(
        self, rng: random.Random, policy: Policy, pools: dict[str, tuple[Pool, ...]], rows: Rows, early: float
    ) -> None:
        self.rng, self.policy, self.pools, self.rows, self.early = rng, policy, pools, rows, early
        self.held: dict[int, int] = {}  # sequence -> pages
        self.done: dict[int, int] = {}  # sequence -> tokens computed
        self.left: Counter[int] = Counter()
        self.sweeps = Sweeps(policy, pools)
        for s, (prompt, new) in enumerate(rows):
            self.sweeps.add(Sequence(s, prompt, new))

    def claim(self, sequence: Sequence, tokens: int) -> None:
        pages = -(-tokens // self.pools[sequence.home][0].page_tokens)
        self.held[sequence.id] = max(pages, self.held.get(sequence.id, 0))

    def step(self) -> None:
        sweeps, live = self.sweeps, set(self.sweeps.live)
        batches = sweeps.begin(self.claim)
        self.check_entry(live, set(sweeps.live) - live)
        self.check_pages()
        for batch in batches:
            self.check_batch(batch)
        self.check_pieces([p for b in batches for p in b.pieces])
        ended = {s for s in sweeps.live if self.rng.random() < self.early}
        foreseen = sweeps.another
        gone = sweeps.advance(batches, ended)
        assert {s.id for s in gone} >= ended
        for sequence in gone:
            self.left[sequence.id] += 1
            del self.held[sequence.id]
            assert sequence.id in ended or sequence.generated == self.rows[sequence.id][1]
        assert foreseen or sweeps.idle  # weight loads ahead were not missed
        assert foreseen is not True or ended or not sweeps.idle  # nor for nothing

    def check_entry(self, before: set[int], entered: set[int]) -> None:
        size, block = self.policy.gpu_batch_size, self.policy.block_size
        assert before or entered, "nobody alive"
        assert len(before | entered) <= block
        if self.policy.schedule in ("row", "zigzag"):
            assert not (before and entered)
        if self.policy.schedule in ("row", "diagonal"):
            assert len(entered) <= size
        per_tier = Counter(s.home for s in self.sweeps.live.values())
        assert all(per_tier[t] <= self.sweeps.places[t] for t in per_tier)

    def check_pages(self) -> None:
        for tier, (pool,) in self.pools.items():
            there = [s for s in self.sweeps.live.values() if s.home == tier]
            for s in there:
                assert self.held[s.id] * pool.page_tokens >= s.cached + s.pending
            assert sum(self.held[s.id] for s in there) <= pool.pages

    def check_batch(self, batch: Batch) -> None:
        (pool,) = self.pools[batch.cache_home]
        assert 1 <= len(batch.pieces) <= self.policy.gpu_batch_size
        assert batch.tokens == sum(p.count for p in batch.pieces) <= self.policy.prefill_tokens
        assert len({p.sequence for p in batch.pieces}) == len(batch.pieces)
        assert all(self.sweeps.live[p.sequence].home == batch.cache_home for p in batch.pieces)
        if pool.batch_pages is not None:
            assert sum(-(-(p.start + p.count) // pool.page_tokens) for p in batch.pieces) <= pool.batch_pages
        assert batch.hidden_home in ("device", *(t for t, x in zip(TIERS, self.policy.activations, strict=True) if x))

    def check_pieces(self, pieces: list[Piece]) -> None:
        """Every live sequence gets exactly its next tokens, in order, the last piece final."""
        last: dict[int, Piece] = {}
        for p in pieces:
            assert p.start == self.done.get(p.sequence, 0)
            self.done[p.sequence] = p.start + p.count
            assert p.sequence not in last or not last[p.sequence].final
            last[p.sequence] = p
        assert set(last) == set(self.sweeps.live)
        for s, p in last.items():
            assert p.final
            assert self.done[s] == self.rows[s][0] + self.sweeps.live[s].generated


@pytest.mark.parametrize("early", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["row", "zigzag", "diagonal", "continuous"])
def test_random_workloads(schedule: str, early: float) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        watched = Watched(rng, *random_job(rng, schedule), early)
        for _ in range(1000):
            if watched.sweeps.idle:
                break
            watched.step()
        assert watched.left == dict.fromkeys(range(len(watched.rows)), 1)
        if not early:
            assert watched.done == {s: p + n - 1 for s, (p, n) in enumerate(watched.rows)}


def test_rows_enter_in_order_and_fill_free_places() -> None:
    """Continuous: a place is filled in the sweep after it is left; zigzag and row: only after the last has left."""
    rows = [(4, 1), (4, 3), (4, 2), (4, 2)]
    entered = {}
    for schedule in ("row", "zigzag", "diagonal", "continuous"):
        sweeps, came = sweeps_of(Policy(1, 2, schedule=schedule), rows), dict[int, int]()
        while not sweeps.idle:
            batches = sweeps.begin(lambda sequence, pages: None)
            for s in sweeps.live:
                came.setdefault(s, sweeps.sweep)
            sweeps.advance(batches, set())
        entered[schedule] = [came[s] for s in range(4)]
    assert entered["row"] == [0, 1, 4, 6]
    assert entered["zigzag"] == [0, 0, 3, 3]
    assert entered["diagonal"] == [0, 1, 2, 4]
    assert entered["continuous"] == [0, 0, 1, 3]


def test_admission_is_not_worst_case_reservation() -> None:
    """Two sequences whose longest lengths together exceed the pool share it, as one leaves before the other grows."""
    sweeps = Sweeps(Policy(2, 1), {"device": (Pool(10, 1),)})
    sweeps.add(Sequence(0, 5, 1))
    sweeps.add(Sequence(1, 1, 10))  # longest 10, alone as much as the pool
    sweeps.begin(lambda sequence, pages: None)
    assert set(sweeps.live) == {0, 1}
    sweeps = Sweeps(Policy(2, 1), {"device": (Pool(10, 1),)})
    sweeps.add(Sequence(0, 5, 6))
    sweeps.add(Sequence(1, 1, 10))
    sweeps.begin(lambda sequence, pages: None)
    assert set(sweeps.live) == {0}


def test_pairs_against_counting() -> None:
    rng = random.Random(1)
    for _ in range(300):
        piece = Piece(0, rng.randint(0, 30), rng.randint(1, 30), True)
        window = rng.choice([None, rng.randint(1, 40)])
        queries = range(piece.start, piece.start + piece.count)
        counted = sum(1 for q in queries for k in range(q + 1) if window is None or k > q - window)
        assert piece.pairs(window) == counted
