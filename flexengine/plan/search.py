"""Which policy? An outer search over block shapes and switches around the linear program over placements.

For every block size worth trying, and with KV cache and hidden states allowed off the device or not, the program says
what lies where; the answer is rounded to tensors and sequences, laid out to the byte, and priced again. The best few
are then tried with other gpu_batches, micro-batches, slots and schedules, and their weights moved in small steps.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Capacity, Layout, ModelFacts, Workload, delegated, lay_out, lay_out_weights
from flexengine.plan.least import capacity_for, smallest, smallest_layout
from flexengine.plan.lp import FRACTIONS, Memory, Problem, Solution, solve
from flexengine.plan.memories import memories
from flexengine.plan.solver import SolverFailed
from flexengine.plan.words import upward
from flexengine.policy import TIERS, Policy, Split

BLOCK = 1024  # most sequences alive: what more would gain, the bookkeeping of each takes
GPU_BATCH = 64  # sequences of a gpu_batch, to begin with
GPU_BATCHES = (16, 32, 64, 128, 256)  # and what else is tried
FEW, MOST_BATCHES = (2, 4, 8), 32
SMALLER = (32, 16, 4)  # where buffers for that many do not fit
TOKENS = (2048, 1024, 512, 256, 128)  # micro-batches on a GPU
TOKENS_CPU = (512, 2048, 1024, 256, 128)  # and on a CPU
FINALISTS, ROUNDS = 8, 3  # policies that are refined, and how often those then best are
STEPS = (0.2, 0.1, 0.05, 0.025)  # of weights moved between tiers
VAIN = 2  # steps without a gain before one turns back: tensors are whole, and the first of a kind needs a larger slot
FINE = tuple(k / 500 for k in range(1, 16))  # moved at last, as what rounding to tensors does cannot be foreseen
MOVES = ((2, 0), (2, 1), (1, 0), (0, 1), (0, 2))  # between tiers: nearer to the device, or away to make room
MARGINS = (0.002, 0.008, 0.03, 0.12, 0.3)  # of a memory, when a placement that rounding made too large is asked anew
BETTER = 0.995  # of the seconds, to be called better
WAITING = 10.0  # seconds of loading, from which on a short job may rather stream its weights than keep them
_ON_DEVICE: Split = (1.0, 0.0, 0.0)
_ON_HOST: Split = (0.0, 1.0, 0.0)
_ON_DISK: Split = (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Options:
    """What the search must keep to. prefill_tokens: of the micro-batches; latency_limit: seconds from a row's entry to
    its end, in the mean; placed: a policy whose weights, cache, hidden states and slots stay as they are; overlap: as
    in `Cost`; block: most sequences alive, None for as many as pay."""

    prefill_tokens: int | None = None
    latency_limit: float | None = None
    placed: Policy | None = None
    overlap: bool = True
    block: int | None = None


@dataclass(frozen=True)
class Search:
    """best: of all that were laid out and priced, `tried`."""

    best: Prediction
    tried: tuple[Prediction, ...]


def search(model: ModelFacts, hardware: Hardware, workload: Workload, options: Options | None = None) -> Search:
    """The policy with which the job ends first. Raises TooLittle, with the numbers, where nothing fits, and
    InvalidInput where no policy keeps the latency limit, and NoSolver where one is needed and not installed."""
    options = options or Options()
    found = _Searching(Cost(model, hardware, workload, options.overlap), options)
    _ = found.capacity  # raises where nothing fits
    if found.options.placed is not None:
        found.reshape(found.options.placed)
    elif not found.resident() or found.hurried():
        found.streamed()
        found.refine()
        if found.failed is not None:
            warnings.warn(f"the plan may not be the best: {found.failed}", RuntimeWarning, stacklevel=2)
    return Search(found.best(), tuple(found.tried.values()))


def check(model: ModelFacts, workload: Workload, capacity: Capacity, prefill_tokens: int | None = None) -> Layout:
    """Return a layout in which a job runs, without a search. Raises TooLittle, as `search`, if there is none.

    prefill_tokens: as in `Options`.
    """
    return smallest_layout(model, smallest(prefill_tokens or min(TOKENS), capacity.shared), workload, capacity)


def frontier(found: Search) -> list[Prediction]:
    """The policies that no other beats both in latency and in throughput, by rising latency."""
    kept: list[Prediction] = []
    for prediction in sorted(found.tried, key=lambda p: (p.latency, p.seconds)):
        if not kept or prediction.seconds < kept[-1].seconds:
            kept.append(prediction)
    return kept


@dataclass
class _Searching:
    """What has been tried so far."""

    cost: Cost
    options: Options
    tried: dict[Policy, Prediction] = field(default_factory=dict)
    refused: dict[Policy, OutOfMemory] = field(default_factory=dict)
    explored: set[Policy] = field(default_factory=set)
    weights: dict[tuple[Split, int], Layout] = field(default_factory=dict)
    corners: dict[Policy, Layout] = field(default_factory=dict)
    asked: dict[tuple[Policy, bool, bool, bool], Prediction | None] = field(default_factory=dict)
    failed: SolverFailed | None = None  # the last failure of the solver

    @cached_property
    def capacity(self) -> Capacity:
        """What is planned for. Raises TooLittle where nothing fits."""
        return capacity_for(self.cost.model, self.smallest(), self.cost.workload, self.cost.hardware.capacity)

    def best(self) -> Prediction:
        """Raises InvalidInput if there is none within the latency limit."""
        if not self.tried:
            for policy in self.smallest():
                self.attempt(policy)
        best, limit = self.leader(), self.options.latency_limit
        if limit is not None and best.latency > limit:
            least = upward(best.latency)
            raise InvalidInput(f"latency limit is {limit} s; the least found here is {least} s, set it higher")
        return best

    def leader(self) -> Prediction:
        """The best so far; of those that do not keep the latency limit, if none does, the nearest to it."""
        limit = self.options.latency_limit
        fast = [p for p in self.tried.values() if limit is None or p.latency <= limit]
        if not fast:
            return min(self.tried.values(), key=attrgetter("latency"))
        best = fast[0]
        for prediction in fast[1:]:
            if prediction.total_seconds < BETTER * best.total_seconds:
                best = prediction
        return best

    # What may be tried.

    @property
    def tokens(self) -> tuple[int, ...]:
        """Micro-batches worth trying, the preferred one first."""
        if self.options.prefill_tokens is not None:
            return (self.options.prefill_tokens,)
        return TOKENS_CPU if self.cost.hardware.kind != "cuda" else TOKENS

    def blocks(self) -> list[int]:
        """Block sizes worth trying, falling: as many rows as there are, then by a factor of about 1.4."""
        size = float(max(1, min(self.options.block or BLOCK, self.cost.workload.count)))
        found = []
        while size >= 1:
            found.append(round(size))
            size /= 1.4142
        return list(dict.fromkeys([*found, 1]))

    def shaped(self, block: int, batch: int = GPU_BATCH) -> Policy:
        """A policy of that block, everything on the device."""
        batches = -(-block // batch)
        return Policy(-(-block // batches), batches, prefill_tokens=self.tokens[0])

    def smallest(self) -> tuple[Policy, ...]:
        """What takes least memory, the fastest first."""
        policies = smallest(min(self.tokens), self.cost.hardware.shared)
        placed = self.options.placed
        return policies if placed is None else (_placed_like(policies[0], placed),)

    @property
    def delegates(self) -> bool:
        """Whether attention may be delegated: there is a host apart from the device, and it is known how fast it is."""
        return self.cost.hardware.host_attention > 0 and not self.cost.hardware.shared

    # How it is tried.

    def attempt(self, policy: Policy) -> Prediction | None:
        """Lays a policy out and prices it; None if it does not fit."""
        policy = _meant(policy)
        if policy in self.refused or self._too_large(policy):
            return None
        if policy not in self.tried:
            try:
                self.tried[policy] = self.cost.predict(self._laid_out(policy, self.capacity))
            except OutOfMemory as error:
                self.refused[policy] = error
                return None
        return self.tried[policy]

    def _too_large(self, policy: Policy) -> bool:
        return self.options.block is not None and policy.block_size > self.options.block

    def _laid_out(self, policy: Policy, capacity: Capacity) -> Layout:
        model, key = self.cost.model, (policy.weights, policy.slots)
        if key not in self.weights:
            self.weights[key] = lay_out_weights(model, policy, capacity.staged)
        return lay_out(model, policy, self.cost.workload, capacity, self.weights[key])

    def resident(self) -> bool:
        """Tries everything on the device; whether that holds as many sequences as may be alive, so that no sweep can be
        quicker with anything elsewhere."""
        whole, largest = False, self.blocks()[0]
        for block in self.blocks():
            for tokens in self.tokens[:1] if whole else self.tokens:  # smaller blocks are for the latency alone
                prediction = self.attempt(replace(self.shaped(block), prefill_tokens=tokens))
                if prediction is not None and block == largest:
                    whole = whole or self._holds(prediction.layout)
        quickest = sorted(self.tried.values(), key=attrgetter("total_seconds"))
        for some in (quickest, [p for p in quickest if p.policy.block_size >= largest]):
            if some:
                self._batches_of(some[0].policy)
        return whole

    def hurried(self) -> bool:
        """Whether the job is so short that reading the weights beforehand is a large part of it."""
        best = self.leader()
        return best.load_seconds > max(WAITING, best.seconds / 2)

    def _holds(self, layout: Layout) -> bool:
        """Whether the pools are as large as a block ever needs."""
        room = sum(pool.pages * pool.page_tokens for pool in layout.pools.values())
        return bool(room >= 0.98 * self.cost.sweeps(layout.policy).peak)

    def _batches_of(self, policy: Policy) -> None:
        """The same block in other gpu_batches."""
        for batch in GPU_BATCHES:
            if batch < 2 * policy.block_size:
                batches = -(-policy.block_size // batch)
                self.attempt(replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches))

    def reshape(self, placed: Policy) -> None:
        """Every block shape, with everything where it lies already."""
        for block in self.blocks():
            for tokens in self.tokens:
                self.attempt(_placed_like(replace(self.shaped(block), prefill_tokens=tokens), placed))

    def streamed(self) -> None:
        """Asks the program about every block, with and without cache and hidden states off the device, and with and
        without attention on the host."""
        away = [(False, False), (False, True), (True, False), (True, True)]
        choices = [(*pair, False) for pair in away] + ([(True, False, True)] if self.delegates else [])
        for block, choice in product(self.blocks(), choices):
            for shape in dict.fromkeys(self.shaped(block, batch) for batch in (GPU_BATCH, *SMALLER)):
                if self.place(shape, *choice) is not None:
                    self.place(replace(shape, schedule="diagonal"), *choice)
                    self.place(replace(self._even(block), schedule="diagonal"), *choice)
                    break

    def _even(self, block: int) -> Policy:
        """A block of cohorts so small that one enters in every sweep, and prompts keep the device busy throughout."""
        sweeps = self.cost.tokens / max(1, self.cost.workload.count)  # that a mean sequence lives
        return self.shaped(block, max(1, round(block / max(1.0, sweeps))))

    def refine(self) -> None:
        """Tries the neighbours of the best policies."""
        if not self.tried:  # only the least does
            for policy, slots in product(self.smallest(), (2, 1)):
                self.attempt(replace(policy, slots=slots))
            for slots in (2, 1):
                self.place(replace(self.smallest()[0], slots=slots), False, False)
        for _ in range(ROUNDS):
            before = self.leader()
            for prediction in self._finalists():
                self._around(prediction)
            if self.leader() is before:
                break
        self._batches_of(self.leader().policy)
        last = self.leader().policy
        for (source, target), step in product(MOVES, FINE):
            if (moved := _moved(last, source, target, step)) is not None:
                self.attempt(moved)

    def _finalists(self) -> list[Prediction]:
        """The best few that differ in schedule or block size."""
        kinds: dict[tuple[str, int], Prediction] = {}
        limit = self.options.latency_limit

        def rank(p: Prediction) -> tuple[float, float]:
            return 0.0 if limit is None else max(limit, p.latency), p.total_seconds

        for prediction in sorted(self.tried.values(), key=rank):
            kinds.setdefault((prediction.policy.schedule, prediction.policy.block_size), prediction)
        return list(kinds.values())[:FINALISTS]

    def _around(self, prediction: Prediction) -> None:
        """Tries the neighbours of a policy, unless that has been done."""
        policy = prediction.policy
        if policy in self.explored:
            return
        self.explored.add(policy)
        cache, hidden = policy.cache != _ON_DEVICE, policy.activations != _ON_DEVICE
        # Both on the device leave out buffers, which the program counts as soon as either may be away.
        choices = [(cache, hidden, policy.delegate), (False, False, False)]
        for other, choice in product(self._neighbours(policy), dict.fromkeys(choices)):
            self.place(other, *choice)
        if policy.cache[1] and not hidden and self.delegates:
            self.attempt(replace(policy, delegate=not policy.delegate))
        same = [self.attempt(replace(policy, prefill_tokens=tokens)) for tokens in self.tokens]  # where the weights are
        self._move_weights(min((p for p in (prediction, *same) if p is not None), key=attrgetter("total_seconds")))

    def _neighbours(self, policy: Policy) -> Iterator[Policy]:
        """Other micro-batches, schedules and slots, and blocks a little larger and smaller."""
        yield from (replace(policy, prefill_tokens=tokens) for tokens in self.tokens if tokens != policy.prefill_tokens)
        yield replace(policy, schedule="diagonal" if policy.schedule == "continuous" else "continuous")
        for batch in (*FEW, *GPU_BATCHES):  # buffers for few leave more room for weights
            batches = -(-policy.block_size // batch)
            if batch < policy.block_size and batches <= MOST_BATCHES:
                yield replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches)
        yield replace(policy, slots=1)
        for factor in (0.85, 1, 1.2):
            block = max(1, min(round(policy.block_size * factor), self.blocks()[0]))
            yield replace(self.shaped(block), prefill_tokens=policy.prefill_tokens, schedule=policy.schedule)
            yield replace(self._even(block), prefill_tokens=policy.prefill_tokens, schedule="diagonal")

    def place(self, shape: Policy, cache: bool, hidden: bool, delegate: bool = False) -> Prediction | None:
        """Asks the program what should lie where for a block shape, rounds, and checks that it fits.

        cache, hidden: whether KV cache and hidden states may leave the device; delegate: whether attention does, where
        the cache lies on the host.
        """
        if self._too_large(shape):
            return None
        # The program's to say.
        shape = replace(shape, weights=_ON_DISK, cache=_ON_DEVICE, activations=_ON_DEVICE, delegate=False)
        asked = (shape, cache, hidden, delegate)
        if asked not in self.asked:
            try:
                self.asked[asked] = self._placed(shape, self._problem(shape, cache, hidden, delegate), delegate)
            except SolverFailed as error:  # other programs may do
                self.failed, self.asked[asked] = error, None
        return self.asked[asked]

    def _placed(self, shape: Policy, problem: Problem, delegate: bool) -> Prediction | None:
        for margin in MARGINS:
            if (solved := _solved(problem)) is None:
                return None
            policy = _meant(_rounded(shape, solved.fractions, delegate))
            if (prediction := self.attempt(policy)) is not None:
                return prediction
            problem = _with_less(problem, self.refused[policy], margin)
        return None

    def _problem(self, shape: Policy, cache: bool, hidden: bool, delegate: bool) -> Problem:
        cost, shared = self.cost, self.cost.hardware.shared
        corners = {tier: self._corner(shape, tier, cache, hidden, delegate) for tier in TIERS}
        priced = replace(shape, cache=_ON_HOST, delegate=True) if delegate else shape
        sweeps = cost.sweeps(shape, share=0.5 if cache else 0.0)
        places = "gd" if shared else "gcd"  # where RAM is the device, host RAM serves weights alone
        allowed = {"wg", "wc", "wd", "cg", "hg"}
        if shared and not self._narrow:
            allowed.discard("wc")
        allowed |= {f"c{p}" for p in places if cache} | {f"h{p}" for p in places if hidden}
        return Problem(
            cost.phases(priced, sweeps), memories(corners, self._cache_bytes(shape, cache), self.capacity),
            cost.slowing(priced), cost.overlaps(shape), frozenset(allowed & set(FRACTIONS)), self.options.latency_limit,
        )  # fmt: skip

    @cached_property
    def _narrow(self) -> bool:
        """Whether weights take fewer bytes as they are stored than as they are held on the device."""
        tensors = self.cost.model.tensors
        stored, held = (sum(t.elements * getattr(t, what) for t in tensors) for what in ("stored", "held"))
        return bool(stored < 0.9 * held)

    def _cache_bytes(self, shape: Policy, cache: bool) -> dict[str, float]:
        """Return, by tier, the bytes of the whole KV cache at its peak if it lies there."""
        token = self.cost.model.kv_token * len(self.cost.model.layers)
        device = self.cost.sweeps(shape).peak * token
        away = self.cost.sweeps(shape, share=1.0).peak * token if cache else device
        return {"device": device, "host": away, "disk": away}

    def _corner(self, shape: Policy, tier: str, cache: bool, hidden: bool, delegate: bool) -> Layout:
        """The layout with all that may move on one tier, in memory without end."""
        split: Split = tuple(float(t == tier) for t in TIERS)  # type: ignore[assignment]
        policy = replace(shape, weights=split, cache=split if cache else _ON_DEVICE,
                         activations=split if hidden else _ON_DEVICE, delegate=delegate and tier == "host")  # fmt: skip
        if policy not in self.corners:
            endless = replace(self.capacity, device=None, host=None, disk=None)
            self.corners[policy] = self._laid_out(policy, endless)
        return self.corners[policy]

    def _move_weights(self, prediction: Prediction) -> None:
        """Moves shares of the weights as long as that is quicker."""
        best = prediction
        for step in STEPS:
            for source, target in MOVES:
                moved, vain = _moved(best.policy, source, target, step), 0
                while moved is not None and vain < VAIN and (tried := self.attempt(moved)) is not None:
                    best, vain = (tried, 0) if tried.total_seconds < best.total_seconds else (best, vain + 1)
                    moved = _moved(moved, source, target, step)


def _placed_like(shape: Policy, placed: Policy) -> Policy:
    return _meant(replace(shape, weights=placed.weights, cache=placed.cache, activations=placed.activations,
                          slots=placed.slots, schedule=placed.schedule, delegate=placed.delegate))  # fmt: skip


def _meant(policy: Policy) -> Policy:
    """The policy without delegation if none of its block has its cache on the host."""
    return policy if not policy.delegate or delegated(policy) else replace(policy, delegate=False)


def _rounded(shape: Policy, fractions: dict[str, float], delegate: bool) -> Policy:
    """The policy of these fractions, in thousandths."""

    def split(kind: str) -> Split:
        device, host = (min(1.0, max(0.0, round(fractions[kind + place], 3))) for place in "gc")
        host = min(host, round(1 - device, 3))
        return (device, host, max(0.0, round(1 - device - host, 3)))

    cache = split("c")
    return replace(shape, weights=split("w"), cache=cache, activations=split("h"), delegate=delegate and cache[1] > 0)


def _solved(problem: Problem) -> Solution | None:
    """Without the latency limit where nothing keeps it: so that it can be said what there is."""
    found = solve(problem)
    if found is None and problem.latency_limit is not None:
        found = solve(replace(problem, latency_limit=None))
    return found


def _with_less(problem: Problem, error: OutOfMemory, margin: float) -> Problem:
    """The problem with less of the memory that did not suffice, by what was missing and a share of the whole."""
    missing = error.needed + error.used - error.capacity

    def cut(memory: Memory) -> Memory:
        if memory.label != error.tier:
            return memory
        return replace(memory, capacity=memory.capacity - max(missing, 0) - memory.capacity * margin)

    return replace(problem, memories=tuple(cut(m) for m in problem.memories))


def _moved(policy: Policy, source: int, target: int, step: float) -> Policy | None:
    """A share of the weights moved from one tier to another; None if there is too little."""
    weights = list(policy.weights)
    if weights[source] <= 1e-9:
        return None
    step = min(step, weights[source])
    weights[source], weights[target] = weights[source] - step, weights[target] + step
    device, host = round(weights[0], 3), round(weights[1], 3)
    return replace(policy, weights=(device, host, max(0.0, round(1 - device - host, 3))))
