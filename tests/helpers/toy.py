"""A toy model whose every value is a hash of all that went into it, in memories as narrow as the real ones.

`Toy` performs the tasks of a program, `oracle` computes the same without a schedule, and `Shuffled` runs tasks in any
order that their edges allow.
"""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

from flexengine.places import DIRECT, DISK, STAGED, Routes, place_names
from flexengine.policy import Policy, Split, shares
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.frame import num_buffers
from flexengine.schedule.pages import Pool
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.schedule.tasks import Compute, Copy, Op, Task

Rows = list[tuple[int, int]]  # (prompt tokens, tokens to generate)
Homes = list[tuple[str, ...]]  # per unit, where its off-device weights come from
CELLS = 6  # values a toy weight slot holds
PLACES = place_names(2)
ROUTES = {"staged": STAGED, "direct": DIRECT}  # of machines with one disk
TWO_DISKS = {f"{name}, two disks": Routes.between(PLACES, staged=name == "staged") for name in ROUTES}
MACHINES = ROUTES | TWO_DISKS
# Searches for a counterexample take long, so those with two disks have one number of slots.
MACHINES_AND_SLOTS = [(routes, slots) for routes in ROUTES for slots in (1, 2, 3)]
MACHINES_AND_SLOTS += [(routes, 2) for routes in TWO_DISKS]


def weight(unit: int, home: str) -> int:
    return hash((unit, PLACES.index(home), 77))


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
    """Performs tasks on memories of values: slots, buffers and staging are as few as the real ones, and reused.

    Attributes:
        before: hidden states by batch, which enter; None if the toy begins with tokens.
        after: hidden states by batch, which leave; None if the toy ends with a token.
    """

    before: dict[int, dict[int, list[int]]] | None = None
    after: dict[int, dict[int, list[int]]] | None = None

    def __init__(
        self, streamed: Homes, layers: int, slots: int, routes: Routes, rows: Rows, arriving: Iterable[int] = ()
    ) -> None:
        self.streamed, self.layers, self.routes = streamed, layers, routes
        self.missing = Counter(arriving)  # batches of weights that are not yet where they stay, by unit
        self.slots = [[0] * CELLS for _ in range(slots)]
        self.staging: dict[tuple[Hashable, ...], Any] = {}  # ("w", slot, disk), ("c", number) or ("h", number)
        buffers = num_buffers(slots)
        self.cbuf: list[dict[int, int]] = [{} for _ in range(buffers)]
        self.hbuf: list[dict[int, list[int]]] = [{} for _ in range(buffers)]
        self.inbuf: list[dict[int, list[int]]] = [{} for _ in range(slots)]
        self.outbuf: list[dict[int, list[int]]] = [{} for _ in range(slots)]
        self.kv: dict[tuple[str, int, int], int] = {}  # (tier, layer, sequence)
        self.away: dict[int, dict[int, list[int]]] = {}  # batch -> hidden states in their home
        self.near: dict[int, dict[int, list[int]]] = {}  # batch -> hidden states on the device
        self.tokens = {s: [feed(s, t) for t in range(prompt)] for s, (prompt, _) in enumerate(rows)}
        self.sampled: dict[int, int] = {}
        self.batches: list[Batch] = []

    def begin(self, batches: list[Batch]) -> None:
        self.batches, self.sampled, self.near, self.away = batches, {}, {}, {}

    def _room(self, unit: int, home: str) -> slice:
        """A unit's part from one home. The parts of other units, from any home, may be on the same cells."""
        homes = self.streamed[unit]
        width = CELLS // len(homes)
        return slice(homes.index(home) * width, (homes.index(home) + 1) * width)

    def perform(self, task: Task) -> None:
        {
            Op.LOAD_RESIDENT: lambda task: self.missing.subtract([task.cell.layer]),
            Op.LOAD_WEIGHT: self._load_weight,
            Op.LOAD_CACHE: self._load_cache,
            Op.STORE_CACHE: self._store_cache,
            Op.LOAD_HIDDEN: self._load_hidden,
            Op.STORE_HIDDEN: self._store_hidden,
            Op.COMPUTE: self._compute,
            Op.ENTER: self._enter,
            Op.LEAVE: self._put,
        }[task.op](task)

    def _leg(self, task: Copy, routes: dict[str, tuple[str, ...]], stage: tuple[Hashable, ...], source: Any) -> Any:
        """The value if this is the last leg of its route, else None after leaving it in staging."""
        legs = len(routes[task.home])
        if task.hop > 0:
            source = self.staging.get(stage, -9 if stage[0] == "w" else {})
        if task.hop == legs - 1:
            return source
        self.staging[stage] = source
        return None

    def _load_weight(self, task: Copy) -> None:
        unit = task.cell.layer
        source = weight(unit, task.home) if self._is_there(unit, task.home) else -7
        value = self._leg(task, self.routes.load, ("w", task.buffer, task.home), source)
        if value is not None:
            room = self._room(unit, task.home)
            self.slots[task.buffer][room] = [value] * (room.stop - room.start)

    def _at_home(self, unit: int) -> bool:
        """Of a head: its first chunk brings all of it, or it is the embedding, which the first layer brings."""
        return not any(self.missing[j] for j in ({unit} if unit < self.layers else {0, self.layers}))

    def _is_there(self, unit: int, home: str) -> bool:
        """Whether a unit's weights can be read from a home. The first disk has the checkpoint, the others copies."""
        return home == DISK or self._at_home(unit)

    def _weights(self, task: Compute) -> list[int]:
        """A unit's weights, from the homes that it is streamed from; wrong if its resident weights are not there."""
        unit = task.cell.layer
        read = [self.slots[task.slot][self._room(unit, home)] for home in self.streamed[unit]]
        weights = [part[0] if len(set(part)) == 1 else -3 for part in read]
        return weights if self._at_home(unit) else [-8]

    def _load_cache(self, task: Copy) -> None:
        known = {p.sequence: self.kv.get((task.home, task.cell.layer, p.sequence), -1)
                 for p in self.batches[task.cell.batch].pieces if p.start}  # fmt: skip
        value = self._leg(task, self.routes.load, ("c", task.buffer), known)
        if value is not None:
            self.cbuf[task.buffer] = dict(value)

    def _store_cache(self, task: Copy) -> None:
        value = self._leg(task, self.routes.store, ("c", task.buffer), dict(self.cbuf[task.buffer]))
        if value is not None:
            for s in (p.sequence for p in self.batches[task.cell.batch].pieces):
                self.kv[task.home, task.cell.layer, s] = value.get(s, -2)

    def _load_hidden(self, task: Copy) -> None:
        value = self._leg(task, self.routes.load, ("h", task.buffer), self.away.get(task.cell.batch, {}))
        if value is not None:
            self.hbuf[task.buffer] = dict(value)

    def _store_hidden(self, task: Copy) -> None:
        value = self._leg(task, self.routes.store, ("h", task.buffer), dict(self.hbuf[task.buffer]))
        if value is not None:
            self.away[task.cell.batch] = value

    def _enter(self, task: Task) -> None:
        assert self.before is not None
        self.inbuf[task.cell.batch % len(self.slots)] = self.before.pop(task.cell.batch)

    def _put(self, task: Task) -> None:
        assert self.after is not None
        self.after[task.cell.batch] = dict(self.outbuf[task.cell.batch % len(self.slots)])

    def _compute(self, task: Compute) -> None:
        unit, k = task.cell.layer, task.cell.batch
        batch, weights = self.batches[k], self._weights(task)
        before = self.hbuf[task.hidden] if task.hidden is not None and unit else self.near.pop(k, {})
        if unit == 0 and self.before is not None:
            before = self.inbuf[k % len(self.slots)]
        past = dict(self.cbuf[task.cache]) if task.cache is not None else {}
        if unit < self.layers and task.cache is None:
            past = {p.sequence: self.kv.get(("device", unit, p.sequence), -4) for p in batch.pieces}
        now, after = dict[int, int](), dict[int, list[int]]()
        for p in batch.pieces:
            s = p.sequence
            inputs = before.get(s, [-5] * p.count)
            if unit == 0 and self.before is None:
                inputs = self.tokens[s][p.start : p.start + p.count]
            kv, out = past.get(s, -6) if p.start else 0, []
            for h in inputs:
                kv = hash((kv, h)) if unit < self.layers else 0
                out.append(hash((h, kv, unit, *weights)))
            now[s], after[s] = kv, out
        self._leave(task, batch, now, after)

    def _leave(self, task: Compute, batch: Batch, now: dict[int, int], after: dict[int, list[int]]) -> None:
        unit, k = task.cell.layer, task.cell.batch
        if task.cache is not None:
            self.cbuf[task.cache] = now
        elif unit < self.layers:
            self.kv |= {("device", unit, s): value for s, value in now.items()}
        if unit == self.layers - 1 and self.after is not None:
            self.outbuf[k % len(self.slots)] = after
        elif task.hidden is not None and unit < self.layers - 1:
            self.hbuf[task.hidden] = after
        else:
            self.near[k] = after
        if unit == len(self.streamed) - 1 and self.after is None:
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
    sweeps = Sweeps(policy, {t: (Pool(pages, 4),) for t, share in shares(policy.cache).items() if share})
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


class Job(NamedTuple):
    """A random job of the toy.

    Attributes:
        streamed: per unit, the tiers that its weights come from.
        layers: number of units with a KV cache. The others are heads.
        rows: (prompt tokens, tokens to generate) of each sequence.
    """

    streamed: Homes
    layers: int
    policy: Policy
    rows: Rows


SPLITS: list[Split] = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3), (0, 0.5, 0.5), (0.5, 0, 0.5)]
MORE_SPLITS: list[Split] = [(0, 0, 0, 1), (0, 0, 0.5, 0.5), (0.3, 0.2, 0.2, 0.3)]  # on two disks
KINDS: Homes = [(), ("host",), ("disk",), ("host", "disk")]
MORE_KINDS: Homes = [("disk2",), ("disk", "disk2"), ("host", "disk", "disk2")]


def kinds(routes: Routes) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw the homes of a unit's weights on a machine."""
    return st.sampled_from(KINDS + MORE_KINDS if "disk2" in routes.load else KINDS)


def splits(routes: Routes) -> st.SearchStrategy[Split]:
    """Draw the split of the cache or of the activations on a machine."""
    return st.sampled_from(SPLITS + MORE_SPLITS if "disk2" in routes.load else SPLITS)


def arriving_of(rng: random.Random, layers: int) -> list[int]:
    """Units of up to three batches of resident weights each, once per batch."""
    return [j for j in range(layers + 1) for _ in range(rng.choice((0, 0, 1, 2, 3)))]


@st.composite
def jobs(draw: st.DrawFn, slots: int, routes: Routes = STAGED) -> Job:
    """Draw a job of at most 4 layers, 2 heads and 7 sequences."""
    layers, heads = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    streamed = draw(st.lists(kinds(routes), min_size=layers + heads, max_size=layers + heads))
    policy = Policy(
        draw(st.integers(1, 3)), draw(st.integers(1, 4)), cache=draw(splits(routes)),
        activations=draw(splits(routes)), slots=slots,
        schedule=draw(st.sampled_from(["row", "zigzag", "diagonal", "continuous"])),
        prefill_tokens=draw(st.sampled_from([2, 3, 50])),
    )  # fmt: skip
    rows = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4)), min_size=1, max_size=7))
    return Job(streamed, layers, policy, rows)


def uniform(count: int, cache: str = "device", hidden: str = "device", start: int = 4) -> list[Batch]:
    """Batches of one decoding sequence each."""
    return [Batch((Piece(k, start, 1, True),), cache, hidden) for k in range(count)]


def tasks_of(program: Program, batches: list[Batch], sweeps: int) -> list[list[Task]]:
    return [list(program.sweep(n, batches, n < sweeps - 1)) for n in range(sweeps)]
