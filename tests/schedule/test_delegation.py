"""Programs with delegated attention: against the toy machine, its oracle, and the virtual clock."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import simulate
from flexengine.places import DIRECT, STAGED, Routes
from flexengine.policy import Split
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.edges import Edges
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Compute, Copy, Op, Task
from tests.helpers.strategies import SEEDS, refuted
from tests.helpers.toy import (
    CELLS,
    Homes,
    Job,
    Rows,
    Shuffled,
    SomeEdges,
    Toy,
    arriving_of,
    generate,
    jobs,
    oracle,
    sweeps_of,
    weight,
)

CACHES: list[Split] = [(0, 1, 0), (0.4, 0.6, 0), (0.4, 0.3, 0.3), (0, 0.5, 0.5)]
MORE_CACHES: list[Split] = [(0, 0.4, 0.3, 0.3), (0.2, 0.5, 0, 0.3)]  # on two disks
# "own lanes": a disk that needs no staging, and lanes that carry nothing but questions and answers.
OWN = replace(DIRECT, attend={"host": ("out", "far", "back")})
ROUTES = {"staged": STAGED, "own lanes": OWN}
PARTS = (Op.PROJECT, Op.SEND, Op.ATTEND, Op.FETCH, Op.FINISH)
ADDED = (Op.PROJECT_KEYS, Op.SEND_KEYS, Op.ATTEND_CACHED)  # if queries go first
# Routes, and whether queries go first.
WAYS = {"staged": (STAGED, False), "own lanes": (OWN, False), "queries first": (OWN, True),
        "queries first on one lane": (STAGED, True)}  # fmt: skip


class QueriesFirst(Program):
    """A program whose delegated gpu_batches send queries first, as attention workers get them."""

    def sweep(self, number: int, batches: Sequence[Batch], more: bool) -> Iterator[Task]:
        chosen = [b.delegated and not b.moves_pages and b.hidden_home == "device" for b in batches]
        first = [b._replace(queries_first=goes) for b, goes in zip(batches, chosen, strict=True)]
        return super().sweep(number, first, more)


class DelegatingToy(Toy):
    """Also attends on the host. A layer whose weights change between its start and its end is wrong."""

    def __init__(
        self, streamed: Homes, layers: int, slots: int, routes: Routes, rows: Rows, arriving: Iterable[int] = ()
    ) -> None:
        super().__init__(streamed, layers, slots, routes, rows, arriving)
        self.side: dict[tuple[str, int], dict[int, int]] = {}  # (near, far, or one of them for K and V; batch)
        self.seen: dict[int, dict[int, tuple[int, int]]] = {}  # batch: cached KV and query, by sequence
        self.begun: dict[int, tuple[list[int], dict[int, int]]] = {}  # batch: weights and inputs of its open layer

    def begin(self, batches: list[Batch]) -> None:
        super().begin(batches)
        self.side, self.begun, self.seen = {}, {}, {}

    def perform(self, task: Task) -> None:
        if task.op in ADDED:
            return self._added(task)
        if task.op not in PARTS:
            return super().perform(task)
        unit, k = task.cell.layer, task.cell.batch
        sequences, now = [p.sequence for p in self.batches[k].pieces], dict[int, int]()
        if task.op is Op.PROJECT:
            before = self.hbuf[task.hidden] if task.hidden is not None and unit else self.near.pop(k, {})
            inputs = {p.sequence: self.tokens[p.sequence][p.start] if unit == 0 else before.get(p.sequence, [-5])[0]
                      for p in self.batches[k].pieces}  # fmt: skip
            self.begun[k] = self._weights(task), inputs
            self.side["near", k] = inputs
        elif task.op is Op.ATTEND:
            asked, added = self.side.get(("far", k), {}), self.side.get(("far kv", k))
            staged = None if task.buffer is None else self.staging["c", task.buffer]
            for s in sequences:
                place = (task.home or "host", unit, s)
                old = self.kv.get(place, -7) if staged is None else staged.get(s, -7)
                if added is not None and ((old, asked.get(s)) != self.seen[k].get(s) or added.get(s) != asked.get(s)):
                    asked[s] = -6  # of another layer, or overwritten
                now[s] = hash((old, asked.get(s, -8)))
                if staged is None:
                    self.kv[place] = now[s]
                else:
                    staged[s] = now[s]
            self.side["far", k] = now
        elif task.op is Op.FINISH:
            weights, inputs = self.begun.pop(k, ([], {}))
            if weights != self._weights(task):
                weights = [-9]
            known = self.side.get(("near", k), {})
            after = {s: [hash((inputs.get(s, -1), known.get(s, -1), unit, *weights))] for s in sequences}
            if task.hidden is not None and unit < self.layers - 1:
                self.hbuf[task.hidden] = after
            else:
                self.near[k] = after
        else:
            source, target = ("near", "far") if task.op is Op.SEND else ("far", "near")
            self.side[target, k] = dict(self.side.get((source, k), {}))
        return None

    def _load_cache(self, task: Copy) -> None:
        if not self.batches[task.cell.batch].delegated:
            return super()._load_cache(task)
        known = {p.sequence: self.kv.get((task.home, task.cell.layer, p.sequence), -1)
                 for p in self.batches[task.cell.batch].pieces}  # fmt: skip
        self.staging["c", task.buffer] = known  # pages stay in staging, wherever the leg would lead
        return None

    def _store_cache(self, task: Copy) -> None:
        if not self.batches[task.cell.batch].delegated:
            return super()._store_cache(task)
        value = self.staging.get(("c", task.buffer), {})
        for s in (p.sequence for p in self.batches[task.cell.batch].pieces):
            self.kv[task.home, task.cell.layer, s] = value.get(s, -2)
        return None

    def _added(self, task: Task) -> None:
        """Perform one of the tasks of queries that go first. Keys and values are those of the layer's inputs."""
        unit, k = task.cell.layer, task.cell.batch
        if task.op is Op.PROJECT_KEYS:
            weights, inputs = self.begun.get(k, ([], {}))
            wrong = weights != self._weights(task)
            self.side["near kv", k] = {s: -4 if wrong else x for s, x in inputs.items()}
        elif task.op is Op.SEND_KEYS:
            self.side["far kv", k] = dict(self.side.get(("near kv", k), {}))
        else:
            asked = self.side.get(("far", k), {})
            self.seen[k] = {s: (self.kv.get(("host", unit, s), -7), x) for s, x in asked.items()}


class HalvesToy(DelegatingToy):
    """Loads halves of layers, each to a slot of its own.

    Attributes:
        halves: by half, the tiers of each unit.
    """

    halves: list[Homes]

    def _load_weight(self, task: Copy) -> None:
        unit, homes = task.cell.layer, self.halves[task.buffer or 0][task.cell.layer]
        source = weight(unit, task.home) if self._is_there(unit, task.home) else -7
        value = self._leg(task, self.routes.load, ("w", task.buffer, task.home), source)
        if value is not None:
            self.slots[task.buffer or 0][self._part(homes, task.home)] = [value] * (CELLS // len(homes))

    def _part(self, homes: tuple[str, ...], home: str) -> slice:
        width = CELLS // len(homes)
        return slice(homes.index(home) * width, (homes.index(home) + 1) * width)

    def _weights(self, task: Compute) -> list[int]:
        """The weights of a unit, wrong if one that the task reads is not there."""
        unit, halves = task.cell.layer, {Op.PROJECT: (0,), Op.FINISH: (1,)}.get(task.op, (0, 1))
        found = []
        for home in self.streamed[unit]:
            read = [self.slots[half][self._part(homes, home)] for half in halves
                    if home in (homes := self.halves[half][unit])]  # fmt: skip
            right = all({*part} == {weight(unit, home)} for part in read)
            found.append(weight(unit, home) if right else -3)
        return found if self._at_home(unit) else [-8]


def in_halves(rng: random.Random, streamed: Homes, layers: int) -> list[Homes]:
    """Return the tiers of the halves of each unit. A head is in the second half."""
    first, second = Homes(), Homes()
    for unit, homes in enumerate(streamed):
        where = [rng.choice(((0,), (1,), (0, 1))) if unit < layers else (1,) for _ in homes]
        for half, own in enumerate((first, second)):
            own.append(tuple(home for home, halves in zip(homes, where, strict=True) if half in halves))
    return [first, second]


@st.composite
def delegating(draw: st.DrawFn, slots: int, routes: Routes = STAGED) -> Job:
    """Draw a job that delegates attention."""
    job = draw(jobs(slots, routes))
    caches = CACHES + MORE_CACHES if "disk2" in routes.load else CACHES
    policy = replace(job.policy, cache=draw(st.sampled_from(caches)), delegate=draw(st.sampled_from(["host", "all"])))
    return job._replace(policy=policy, rows=[(prompt, new + 1) for prompt, new in job.rows])


def outcome(job: Job, seed: int, routes: Routes, edges: Any, first: bool = False, halves: bool = False) -> bool:
    """Return whether a job in a random interleaving ends, and gives what the oracle says. first: queries go first.
    halves: halves of layers are loaded apart."""
    rng, (streamed, layers, policy, rows), slots = random.Random(seed), job, job.policy.slots
    arriving = arriving_of(rng, layers)
    toy: DelegatingToy = (HalvesToy if halves else DelegatingToy)(streamed, layers, slots, routes, rows, arriving)
    program = (QueriesFirst if first else Program)(streamed, layers, slots, routes, arriving)
    if halves:
        assert isinstance(toy, HalvesToy)
        toy.halves = in_halves(rng, streamed, layers)
        program = Program(streamed, layers, slots, routes, arriving, halves=toy.halves)
    try:
        generate(toy, Shuffled(toy, edges, rng).run, program, policy, rows)
    except KeyError:  # staging that nothing was brought to yet
        return False
    return {s: t[rows[s][0] :] for s, t in toy.tokens.items()} == oracle(streamed, layers, rows)


# Drawn in test_rows.test_any_program, too.
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=25)
def test_every_interleaving_gives_the_sequential_result(slots: int, way: str, data: Any, seed: int) -> None:
    routes, first = WAYS[way]
    assert outcome(data.draw(delegating(slots)), seed, routes, Edges(), first)


@pytest.mark.slow
@pytest.mark.parametrize("routes", ROUTES)
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=100)
def test_halves_of_layers_give_the_sequential_result(routes: str, data: Any, seed: int) -> None:
    assert outcome(data.draw(delegating(2)), seed, ROUTES[routes], Edges(), halves=True)


@pytest.mark.slow
@pytest.mark.parametrize("routes", ROUTES)
def test_no_kind_of_edge_is_spare_with_halves(routes: str) -> None:
    cases = st.tuples(delegating(2), SEEDS)
    for kind in (every := ("raw", "war", "waw")):
        edges = [k for k in every if k != kind]

        def right(case: Any, edges: Any = edges) -> bool:
            return outcome(*case, ROUTES[routes], SomeEdges(*edges), halves=True)

        assert refuted(cases, right), kind


def test_halves_are_loaded_while_attention_is_computed_elsewhere() -> None:
    """A layer takes its attention, one cell up to attention and one from it on, and no load: the next first half is
    loaded behind the last cell up to attention, the second half behind the last cell of the layer before."""
    seconds = {Op.PROJECT: 1.0, Op.FINISH: 2.0, Op.ATTEND: 6.0, Op.SEND: 0.01, Op.FETCH: 0.01, Op.COMPUTE: 0.1}
    halves = [[("host",)] * 24 + [()], [("host",)] * 25]
    program = Program([("host",)] * 25, 24, 2, STAGED, halves=halves)
    tasks = list(program.sweep(0, batches_of(3), False))

    def price(task: Task) -> float:
        return {0: 1.5, 1: 4.5}[task.buffer or 0] if task.op is Op.LOAD_WEIGHT else seconds[task.op]

    forecast = simulate(tasks, price)
    layer = 3 * seconds[Op.ATTEND] + seconds[Op.PROJECT] + seconds[Op.FINISH]
    assert forecast.seconds == pytest.approx(24 * layer, rel=0.02)
    named = [t for t in tasks if t.op in (Op.LOAD_WEIGHT, Op.PROJECT, Op.FINISH)]
    order = [f"load {'PF'[t.buffer or 0]}" if isinstance(t, Copy) else t.op.name[0] for t in named]
    order = [f"{name}{t.cell.layer}" for name, t in zip(order, named, strict=True)]
    begun = "load P0 load F0 P0 P0 P0 load P1 F0 F0 F0 load F1 P1 P1 P1 load P2 F1"
    assert " ".join(order[:15]) == begun


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_kind_of_edge_is_spare(slots: int, way: str) -> None:
    (routes, first), every = WAYS[way], ("raw", "war", "waw")
    cases = st.tuples(delegating(slots), SEEDS)
    assert not refuted(cases, lambda case: outcome(*case, routes, SomeEdges(*every), first), 20)
    for kind in every:
        edges = [k for k in every if k != kind]
        assert refuted(cases, lambda case, edges=edges: outcome(*case, routes, SomeEdges(*edges), first)), kind


def batches_of(count: int, others: int = 0) -> list[Batch]:
    """Delegated batches, with others on the device between them."""
    found = []
    for k in range(max(count, others)):
        piece = (Piece(k, 4, 1, True),)
        there, here = Batch(piece, "host", "device", "host"), Batch(piece, "device", "device")
        found += [there] * (k < count) + [here] * (k < others)
    return found


def tasks_of(
    streamed: Homes, slots: int, batches: list[Batch], sweeps: int = 3, routes: Routes = STAGED
) -> list[Task]:  # fmt: skip
    program = Program(streamed, len(streamed) - 1, slots, routes)
    return [t for n in range(sweeps) for t in program.sweep(n, batches, n < sweeps - 1)]


@pytest.mark.parametrize(
    ("routes", "lanes"), [("staged", ("d2h", "cpu", "h2d")), ("own lanes", ("out", "far", "back"))]
)
def test_a_cell_is_five_tasks_and_moves_no_pages(routes: str, lanes: tuple[str, str, str]) -> None:
    tasks = tasks_of([()] * 4, 2, batches_of(2), routes=ROUTES[routes])
    cells = Counter((t.op, t.lane) for t in tasks)
    down, there, up = lanes
    assert cells == {
        **dict.fromkeys([(Op.PROJECT, "device"), (Op.SEND, down), (Op.ATTEND, there), (Op.FETCH, up),
                         (Op.FINISH, "device")], 3 * 3 * 2),
        (Op.COMPUTE, "device"): 3 * 2,
    }  # fmt: skip


def test_a_cell_whose_queries_go_first_is_eight_tasks_in_the_order_of_the_docstring() -> None:
    program = QueriesFirst([()] * 4, 3, 2, OWN)
    cell = [t for t in program.sweep(0, batches_of(1), False) if t.cell.layer == 1]
    assert [(t.op, t.lane) for t in cell] == [
        (Op.PROJECT, "device"), (Op.SEND, "out"), (Op.PROJECT_KEYS, "device"), (Op.SEND_KEYS, "out"),
        (Op.ATTEND_CACHED, "far"), (Op.ATTEND, "far"), (Op.FETCH, "back"), (Op.FINISH, "device"),
    ]  # fmt: skip


@pytest.mark.parametrize(("attention", "keys"), [(5.0, 2.0), (1.0, 2.0)])
def test_attention_over_cached_tokens_hides_keys_and_values(attention: float, keys: float) -> None:
    """With one gpu_batch, a layer is shorter by the shorter of two: keys and values and their copy, or the copy of
    queries and attention over cached tokens."""
    send, layers = 0.25, 24
    seconds = {Op.PROJECT: 1.0, Op.FINISH: 3.0, Op.SEND: 2 * send, Op.FETCH: send, Op.COMPUTE: 0.1}
    whole = seconds | {Op.PROJECT: 1.0 + keys, Op.ATTEND: attention}
    parts = seconds | {Op.SEND: send, Op.PROJECT_KEYS: keys, Op.SEND_KEYS: send, Op.ATTEND_CACHED: attention,
                       Op.ATTEND: 0.0}  # fmt: skip
    took = [simulate(made([()] * (layers + 1), layers, 2, OWN).sweep(0, batches_of(1), False),
                     lambda t, by=by: by[t.op]).seconds
            for made, by in ((Program, whole), (QueriesFirst, parts))]  # fmt: skip
    assert took[0] - took[1] == pytest.approx(layers * min(send + attention, keys + send))


def test_the_rest_of_a_layer_comes_right_before_the_next_of_the_same_batch() -> None:
    device = [t for t in tasks_of([()] * 4, 2, batches_of(3), 1) if t.lane == "device"]
    first, last = device[:3], device[-6:]
    assert [(t.op, t.cell.layer, t.cell.batch) for t in first] == [(Op.PROJECT, 0, k) for k in range(3)]
    for t, after in pairwise(device[3:-6]):
        if t.op is Op.FINISH:
            assert (after.op, after.cell) == (Op.PROJECT, t.cell._replace(layer=t.cell.layer + 1))
    assert [(t.op, t.cell.layer) for t in last] == [(Op.FINISH, 2), (Op.COMPUTE, 3)] * 3


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "others"), [(1, 0), (3, 0), (2, 2), (1, 3)])
def test_a_slot_is_filled_behind_all_that_read_it(slots: int, count: int, others: int) -> None:
    rng = random.Random(slots)
    for _ in range(20):
        streamed: Homes = [rng.choice([(), ("host",), ("disk",), ("host", "disk")]) for _ in range(7)]
        batches = batches_of(count, others)
        tasks = tasks_of(streamed, slots, batches, 4)
        held: dict[int, tuple[int, int]] = {}  # slot: (unit, reads to come)
        reads = {j: sum(2 if b.delegated and j < 6 else 1 for b in batches) for j in range(7)}
        loaded: Counter[tuple[int, int]] = Counter()
        for t in tasks:
            if t.op is Op.LOAD_WEIGHT:
                unit, left = held.get(t.buffer, (-1, 0))
                assert left == 0 or unit == t.cell.layer, "a load before the last read of its slot"
                held[t.buffer] = t.cell.layer, reads[t.cell.layer]
                loaded[t.cell.sweep, t.cell.layer] += t.hop == 0
            elif isinstance(t, Compute) and t.slot is not None:
                unit, left = held[t.slot]
                assert unit == t.cell.layer, "a read of another unit's weights"
                held[t.slot] = unit, left - 1
        parts = sum(len(homes) for homes in streamed)
        assert sum(loaded.values()) == 4 * parts
        assert all(left == 0 for _, left in held.values())


@pytest.mark.parametrize("slots", [2, 3])
def test_nothing_changes_for_batches_that_are_not_delegated(slots: int) -> None:
    """In program order and in all they name, next to delegated ones and without."""
    streamed: Homes = [("host",), (), ("disk",), ("host", "disk")]
    mixed = [t for t in tasks_of(streamed, slots, batches_of(1, 3)) if t.op not in PARTS and t.cell.batch >= 0]
    alone = [t for t in tasks_of(streamed, slots, batches_of(0, 4)) if t.op not in PARTS and t.cell.batch > 0]
    kept = [t for t in mixed if t.cell.batch > 0]
    assert [(t.op, t.cell.layer, t.reads) for t in kept] == [(t.op, t.cell.layer, t.reads) for t in alone]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_host_and_device_work_at_the_same_time(count: int) -> None:
    """Two batches that keep either lane as busy as the other leave no gaps but at the ends of a sweep."""
    seconds = {Op.PROJECT: 1.0, Op.FINISH: 2.0, Op.ATTEND: 3.0, Op.COMPUTE: 0.1, Op.SEND: 0.01, Op.FETCH: 0.01}
    tasks = tasks_of([()] * 25, 2, batches_of(count), 1)
    forecast = simulate(tasks, lambda t: seconds[t.op])
    busy = {lane: s / forecast.seconds for lane, s in forecast.busy.items()}
    assert busy["device"] > 0.94
    assert busy["cpu"] > 0.94


@pytest.mark.parametrize("slots", [2, 3])
def test_streamed_weights_overlap_with_delegation(slots: int) -> None:
    """Weights that take as long as computing, and attention nearly so: far from the sum, which is 2.7. With two slots
    the output of attention, which takes the same link, waits behind the next layer's weights."""
    seconds = {Op.PROJECT: 1.0, Op.FINISH: 1.0, Op.ATTEND: 1.5, Op.COMPUTE: 0.1, Op.SEND: 0.01, Op.FETCH: 0.01,
               Op.LOAD_WEIGHT: 8.0}  # fmt: skip
    tasks = tasks_of([("host",)] * 25, slots, batches_of(4), 3)
    forecast = simulate(tasks, lambda t: seconds[t.op])
    assert forecast.seconds < (1.25 if slots == 3 else 1.7) * max(forecast.busy.values())


@given(job=delegating(2), seed=SEEDS)
def test_sweeps_delegate_decoding_sequences_off_the_device_apart_from_prompts(job: Job, seed: int) -> None:
    _, _, policy, rows = job
    rng, sweeps = random.Random(seed), sweeps_of(policy, rows)
    while not sweeps.idle:
        batches = sweeps.begin(lambda sequence, pages: None)
        for batch in batches:
            generated = [sweeps.live[p.sequence].generated > 0 for p in batch.pieces]
            by_cpu = batch.cache_home == "host" or (batch.cache_home != "device" and policy.delegate == "all")
            assert batch.delegated == (by_cpu and any(generated))
            if batch.delegated:
                assert all(generated)
                assert all(p.decodes and p.final for p in batch.pieces)
            assert len(batch.pieces) <= policy.gpu_batch_size
            assert batch.tokens <= policy.prefill_tokens
        sweeps.advance(batches, {s for s in sweeps.live if rng.random() < 0.05})


def delegated(job: Job) -> int:
    """Return the number of delegated gpu_batches in all sweeps of a job."""
    sweeps, count = sweeps_of(job.policy, job.rows), 0
    while not sweeps.idle:
        batches = sweeps.begin(lambda sequence, pages: None)
        count += sum(batch.delegated for batch in batches)
        sweeps.advance(batches, set())
    return count


@given(job=delegating(2))
def test_sweeps_delegate_nothing_where_the_policy_does_not_say_so(job: Job) -> None:
    assert delegated(job._replace(policy=replace(job.policy, delegate="none"))) == 0


def test_some_jobs_delegate_in_several_sweeps() -> None:
    assert refuted(delegating(2), lambda job: delegated(job) < 5)
