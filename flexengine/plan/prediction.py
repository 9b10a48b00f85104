"""The numbers that are predicted for a policy."""

from dataclasses import dataclass, field

from flexengine.plan.layout import Layout
from flexengine.policy import Policy


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, tokens and lanes of a job under a policy. Seconds are of the whole job without loading,
    unless noted.

    Attributes:
        load_seconds: by which the first sweep is longer because resident weights are read in it.
        latency: mean seconds from a row's entry to its end.
        rows, tokens: of the job; tokens are generated ones.
        alive: sequences in a mean sweep.
        counts: number of sweeps by kind ("prefill": sequences enter, "decode": none does).
        sweep_seconds: seconds of a mean sweep by kind.
        lanes: by kind and lane, seconds of work in a mean sweep.
        busy: by lane, seconds of work of the whole job.
        fractions: realised fractions by name, such as "cache@disk".
    """

    policy: Policy
    layout: Layout
    seconds: float
    load_seconds: float
    latency: float
    rows: int
    tokens: int
    alive: float
    counts: dict[str, float]
    sweep_seconds: dict[str, float]
    lanes: dict[str, dict[str, float]]
    busy: dict[str, float]
    fractions: dict[str, float] = field(default_factory=dict)

    @property
    def tok_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def total_seconds(self) -> float:
        """Seconds from the start to the last row. The search minimises this number."""
        return self.seconds + self.load_seconds

    @property
    def bottleneck(self) -> str:
        """The lane with the most seconds of work."""
        return max(self.busy, key=lambda lane: self.busy[lane])
