"""The policies that a search has laid out and priced, and the best of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter

from flexengine.activity import tick
from flexengine.errors import OutOfMemory
from flexengine.plan.capacity import Capacity
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.guests import guest
from flexengine.plan.layout import Layout, lay_out, lay_out_weights, left_bytes
from flexengine.plan.prediction import Prediction
from flexengine.plan.shapes import Shapes, sensible
from flexengine.policy import Policy, Split

MAX_TIME_RATIO = 0.995  # a policy replaces the best one if it takes at most this share of its seconds


@dataclass
class Candidates:
    """Policies of one search.

    Attributes:
        capacity: to plan for.
        predictions: predictions of the policies that fit, in the order of the search.
        refused: errors of the policies that do not fit.
    """

    shapes: Shapes
    capacity: Capacity
    predictions: dict[Policy, Prediction] = field(default_factory=dict)
    refused: dict[Policy, OutOfMemory] = field(default_factory=dict)
    _weights: dict[tuple[Split, int, float], Layout] = field(default_factory=dict)
    _best: Prediction | None = None

    @property
    def cost(self) -> Cost:
        """Return the cost model of the job."""
        return self.shapes.cost

    def attempt(self, policy: Policy) -> Prediction | None:
        """Lay a policy out and price it. Return None if it does not fit."""
        given = sensible(policy)
        policy = with_neurons(given, self.cost.model, self.capacity, lambda p: self.laid_out(p, self.capacity))
        if policy in self.refused or self.shapes.too_large(policy):
            self.refused.update({given: self.refused[policy]} if policy in self.refused else {})
            return None
        if policy not in self.predictions:
            tick()
            try:
                prediction = self.cost.predict(self.laid_out(policy, self.capacity))
            except OutOfMemory as error:
                self.refused[policy] = self.refused[given] = error
                return None
            self.predictions[policy] = prediction
            self._compare(prediction)
        return self.predictions[policy]

    def laid_out(self, policy: Policy, capacity: Capacity) -> Layout:
        """Return the policy's layout. Raise OutOfMemory if it does not fit."""
        model, key = self.cost.model, (policy.weights, policy.slots, policy.neurons)
        if key not in self._weights:
            self._weights[key] = lay_out_weights(model, policy, capacity)
        return lay_out(model, policy, self.cost.workload, capacity, self._weights[key])

    @property
    def keeps_latency(self) -> bool:
        """Return whether some policy keeps the latency limit, or there is no limit."""
        return self._best is not None or self.shapes.options.latency_limit is None

    def on_frontier(self, seconds: float, latency: float) -> bool:
        """Return whether no policy so far is better both in seconds and in latency."""
        return not any(p.total_seconds <= seconds and p.latency <= latency for p in self.predictions.values())

    def leader(self) -> Prediction:
        """Return the best policy so far; if none keeps the latency limit, the one with the least latency."""
        return self._best or min(self.predictions.values(), key=attrgetter("latency"))

    def _compare(self, prediction: Prediction) -> None:
        """Make a prediction the best one if it keeps the latency limit and is clearly faster (MAX_TIME_RATIO)."""
        limit = self.shapes.options.latency_limit
        if limit is not None and prediction.latency > limit:
            return
        if self._best is None or prediction.total_seconds < MAX_TIME_RATIO * self._best.total_seconds:
            self._best = prediction


def with_neurons(policy: Policy, model: ModelFacts, capacity: Capacity, laid_out: Callable[[Policy], Layout]) -> Policy:
    """Return the policy with as many neurons in memory as fit, if the model reads neurons on demand.

    Args:
        policy: its share of neurons does not matter.
        model: the model.
        capacity: to plan for.
        laid_out: returns the layout of a policy, or raises OutOfMemory.
    """
    if not model.blocks:
        return policy
    policy = replace(policy, neurons=0.0)
    try:
        free = left_bytes(laid_out(policy), "device", capacity)
    except OutOfMemory:
        return policy
    return replace(policy, neurons=guest("neurons").share_of(model, free))
