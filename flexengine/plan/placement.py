"""What lies where for one block shape: the linear program is asked, and its answer is rounded until it fits."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from flexengine.errors import OutOfMemory
from flexengine.plan.cost import Prediction
from flexengine.plan.layout import Layout
from flexengine.plan.lp import Solution, SolverFailed, solve
from flexengine.plan.memories import memories
from flexengine.plan.problem import FRACTIONS, Memory, Problem
from flexengine.plan.shapes import sensible
from flexengine.plan.tried import Tried
from flexengine.policy import TIERS, Policy, Split

MARGINS = (0.002, 0.008, 0.03, 0.12, 0.3)  # of a memory, when a placement that rounding made too large is asked anew
ON_DEVICE: Split = (1.0, 0.0, 0.0)
_ON_HOST: Split = (0.0, 1.0, 0.0)
_ON_DISK: Split = (0.0, 0.0, 1.0)


@dataclass
class Placement:
    """Asks for placements of one job on one machine; what fits is in `tried`. failed: the solver's last failure."""

    tried: Tried
    failed: SolverFailed | None = None
    _asked: dict[tuple[Policy, bool, bool, bool], Prediction | None] = field(default_factory=dict)
    _corners: dict[Policy, Layout] = field(default_factory=dict)

    @property
    def delegates(self) -> bool:
        """Whether attention may be delegated: there is a host apart from the device, and it is known how fast it is."""
        hardware = self.tried.cost.hardware
        return hardware.host_attention > 0 and not hardware.shared

    def place(self, shape: Policy, cache: bool, hidden: bool, delegate: bool = False) -> Prediction | None:
        """Asks the program what should lie where for a block shape, rounds, and checks that it fits.

        cache, hidden: whether KV cache and hidden states may leave the device; delegate: whether attention does, where
        the cache lies on the host.
        """
        if self.tried.shapes.too_large(shape):
            return None
        shape = _bare(shape)
        asked = (shape, cache, hidden, delegate)
        if asked not in self._asked:
            try:
                self._asked[asked] = self._placed(shape, self.problem(shape, cache, hidden, delegate), delegate)
            except SolverFailed as error:  # other programs may do
                self.failed, self._asked[asked] = error, None
        return self._asked[asked]

    def _placed(self, shape: Policy, problem: Problem, delegate: bool) -> Prediction | None:
        for margin in MARGINS:
            if (solved := _solved(problem)) is None:
                return None
            policy = sensible(_rounded(shape, solved.fractions, delegate))
            if (prediction := self.tried.attempt(policy)) is not None:
                return prediction
            problem = _with_less(problem, self.tried.refused[policy], margin)
        return None

    def problem(self, shape: Policy, cache: bool, hidden: bool, delegate: bool) -> Problem:
        """What the program is asked for a block shape. cache, hidden, delegate: as in `place`."""
        shape = _bare(shape)
        cost, capacity = self.tried.cost, self.tried.capacity
        shared = cost.hardware.shared
        corners = {tier: self._corner(shape, tier, cache, hidden, delegate) for tier in TIERS}
        priced = replace(shape, cache=_ON_HOST, delegate=True) if delegate else shape
        sweeps = cost.sweeps(shape, share=0.5 if cache else 0.0)
        places = "gd" if shared else "gcd"  # where RAM is the device, host RAM serves weights alone
        allowed = {"wg", "wc", "wd", "cg", "hg"}
        if shared and not self._narrow:
            allowed.discard("wc")
        allowed |= {f"c{p}" for p in places if cache} | {f"h{p}" for p in places if hidden}
        return Problem(
            cost.phases(priced, sweeps), memories(corners, self._cache_bytes(shape, cache), capacity),
            cost.slowing(priced), cost.overlaps(shape), frozenset(allowed & set(FRACTIONS)),
            self.tried.shapes.options.latency_limit,
        )  # fmt: skip

    @cached_property
    def _narrow(self) -> bool:
        """Whether weights take fewer bytes as they are stored than as they are held on the device."""
        tensors = self.tried.cost.model.tensors
        stored, held = (sum(t.elements * getattr(t, what) for t in tensors) for what in ("stored", "held"))
        return bool(stored < 0.9 * held)

    def _cache_bytes(self, shape: Policy, cache: bool) -> dict[str, float]:
        """Return, by tier, the bytes of the whole KV cache at its peak if it lies there."""
        cost = self.tried.cost
        token = cost.model.kv_token * len(cost.model.layers)
        device = cost.sweeps(shape).peak * token
        away = cost.sweeps(shape, share=1.0).peak * token if cache else device
        return {"device": device, "host": away, "disk": away}

    def _corner(self, shape: Policy, tier: str, cache: bool, hidden: bool, delegate: bool) -> Layout:
        """The layout with all that may move on one tier, in memory without end."""
        split: Split = tuple(float(t == tier) for t in TIERS)  # type: ignore[assignment]
        policy = replace(shape, weights=split, cache=split if cache else ON_DEVICE,
                         activations=split if hidden else ON_DEVICE, delegate=delegate and tier == "host")  # fmt: skip
        if policy not in self._corners:
            endless = replace(self.tried.capacity, device=None, host=None, disk=None)
            self._corners[policy] = self.tried.laid_out(policy, endless)
        return self._corners[policy]


def _bare(shape: Policy) -> Policy:
    """The shape without what the program decides."""
    return replace(shape, weights=_ON_DISK, cache=ON_DEVICE, activations=ON_DEVICE, delegate=False)


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
