"""The policies that a search has laid out and priced, and the best of them."""

from dataclasses import dataclass, field
from operator import attrgetter

from flexengine.errors import OutOfMemory
from flexengine.plan.capacity import Capacity
from flexengine.plan.cost import Cost
from flexengine.plan.layout import Layout, lay_out, lay_out_weights
from flexengine.plan.prediction import Prediction
from flexengine.plan.shapes import Shapes, sensible
from flexengine.policy import Policy, Split

BETTER = 0.995  # of the seconds, to be called better


@dataclass
class Tried:
    """capacity: what is planned for. predictions: of the policies that fit, in the order in which they were tried;
    refused: why the others do not."""

    shapes: Shapes
    capacity: Capacity
    predictions: dict[Policy, Prediction] = field(default_factory=dict)
    refused: dict[Policy, OutOfMemory] = field(default_factory=dict)
    _weights: dict[tuple[Split, int], Layout] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """What a policy takes."""
        return self.shapes.cost

    def attempt(self, policy: Policy) -> Prediction | None:
        """Lays a policy out and prices it; None if it does not fit."""
        policy = sensible(policy)
        if policy in self.refused or self.shapes.too_large(policy):
            return None
        if policy not in self.predictions:
            try:
                self.predictions[policy] = self.cost.predict(self.laid_out(policy, self.capacity))
            except OutOfMemory as error:
                self.refused[policy] = error
                return None
        return self.predictions[policy]

    def laid_out(self, policy: Policy, capacity: Capacity) -> Layout:
        """The policy's layout. Raises OutOfMemory if it does not fit."""
        model, key = self.cost.model, (policy.weights, policy.slots)
        if key not in self._weights:
            self._weights[key] = lay_out_weights(model, policy, capacity.staged)
        return lay_out(model, policy, self.cost.workload, capacity, self._weights[key])

    @property
    def keeps_latency(self) -> bool:
        """Whether the best policy so far keeps the latency limit, if there is one."""
        limit = self.shapes.options.latency_limit
        return limit is None or self.leader().latency <= limit

    def on_frontier(self, seconds: float, latency: float) -> bool:
        """Return whether no policy so far is better both in seconds and in latency."""
        return not any(p.total_seconds <= seconds and p.latency <= latency for p in self.predictions.values())

    def leader(self) -> Prediction:
        """The best so far; of those that do not keep the latency limit, if none does, the nearest to it."""
        limit = self.shapes.options.latency_limit
        fast = [p for p in self.predictions.values() if limit is None or p.latency <= limit]
        if not fast:
            return min(self.predictions.values(), key=attrgetter("latency"))
        best = fast[0]
        for prediction in fast[1:]:
            if prediction.total_seconds < BETTER * best.total_seconds:
                best = prediction
        return best
