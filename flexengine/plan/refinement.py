"""The neighbours of the best policies: other shapes around them, and their weights moved in small steps."""

from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter

from flexengine.places import TIERS
from flexengine.plan.placement import ON_DEVICE, Choice, Placement
from flexengine.plan.prediction import Prediction
from flexengine.plan.shapes import Shapes
from flexengine.plan.tried import Tried
from flexengine.policy import Policy, thousandths

FINALISTS, ROUNDS = 8, 3  # policies that are refined, and how often those then best are
STEPS = (0.2, 0.1, 0.05, 0.025)  # of weights moved between tiers
VAIN = 2  # steps without a gain before one turns back: tensors are whole, and the first of a kind needs a larger slot
FINE = tuple(k / 500 for k in range(1, 16))  # moved at last, as what rounding to tensors does cannot be foreseen
MOVES = ((2, 0), (2, 1), (1, 0), (0, 1), (0, 2))  # between places, by number: nearer to the device, or away from it


@dataclass
class Refinement:
    """explored: the policies whose neighbours were tried."""

    placement: Placement
    explored: set[Policy] = field(default_factory=set)

    @property
    def tried(self) -> Tried:
        """What was tried, here and before."""
        return self.placement.tried

    @property
    def shapes(self) -> Shapes:
        """The shapes that may be tried."""
        return self.placement.tried.shapes

    def refine(self) -> None:
        """Tries the neighbours of the best policies."""
        tried, placement = self.tried, self.placement
        if not tried.predictions:  # only the least does
            for policy, slots in product(self.shapes.smallest(), (2, 1)):
                tried.attempt(replace(policy, slots=slots))
            for slots in (2, 1):
                placement.place(replace(self.shapes.smallest()[0], slots=slots), Choice(False, False))
        for _ in range(ROUNDS):
            before = tried.leader()
            for prediction in self._finalists():
                self._around(prediction)
            if tried.leader() is before:
                break
        for policy in self.shapes.batches(tried.leader().policy):
            tried.attempt(policy)
        last = tried.leader().policy
        for (source, target), step in product(self._moves, FINE):
            if (moved := _moved(last, source, target, step)) is not None:
                tried.attempt(moved)

    @property
    def _moves(self) -> tuple[tuple[int, int], ...]:
        """Return MOVES and, with further disks, those between each of them and the device or the first disk."""
        further = range(len(TIERS), len(self.placement.places))
        return MOVES + tuple(move for k in further for move in ((k, 0), (k, 2), (2, k), (0, k)))

    def _finalists(self) -> list[Prediction]:
        """The best few that differ in schedule or block size."""
        kinds: dict[tuple[str, int], Prediction] = {}
        limit = self.shapes.options.latency_limit

        def rank(p: Prediction) -> tuple[float, float]:
            return 0.0 if limit is None else max(limit, p.latency), p.total_seconds

        for prediction in sorted(self.tried.predictions.values(), key=rank):
            kinds.setdefault((prediction.policy.schedule, prediction.policy.block_size), prediction)
        return list(kinds.values())[:FINALISTS]

    def _around(self, prediction: Prediction) -> None:
        """Tries the neighbours of a policy, unless that has been done."""
        policy = prediction.policy
        if policy in self.explored:
            return
        self.explored.add(policy)
        cache, hidden = policy.cache != ON_DEVICE, policy.activations != ON_DEVICE
        # Both on the device leave out buffers, which the program counts as soon as either may be away.
        choices = [Choice(cache, hidden, policy.delegate), Choice(False, False)]
        for other, choice in product(self.shapes.neighbours(policy), dict.fromkeys(choices)):
            self.placement.place(other, choice)
        if policy.cache[1] and not hidden and self.placement.delegates:
            self.tried.attempt(replace(policy, delegate=not policy.delegate))
        # Where the weights are.
        same = [self.tried.attempt(replace(policy, prefill_tokens=tokens)) for tokens in self.shapes.tokens]
        self._move_weights(min((p for p in (prediction, *same) if p is not None), key=attrgetter("total_seconds")))

    def _move_weights(self, prediction: Prediction) -> None:
        """Moves shares of the weights as long as that is quicker."""
        best = prediction
        for step in STEPS:
            for source, target in self._moves:
                moved, vain = _moved(best.policy, source, target, step), 0
                while moved is not None and vain < VAIN and (tried := self.tried.attempt(moved)) is not None:
                    best, vain = (tried, 0) if tried.total_seconds < best.total_seconds else (best, vain + 1)
                    moved = _moved(moved, source, target, step)


def _moved(policy: Policy, source: int, target: int, step: float) -> Policy | None:
    """A share of the weights moved from one tier to another; None if there is too little."""
    weights = list(policy.weights) + [0.0] * (max(source, target) + 1 - len(policy.weights))
    if weights[source] <= 1e-9:
        return None
    step = min(step, weights[source])
    weights[source], weights[target] = weights[source] - step, weights[target] + step
    return replace(policy, weights=thousandths(weights))
