"""Predicted numbers of a job under a policy, and names of fractions: the share of a kind of data on a place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from flexengine.places import TIERS, lane_of
from flexengine.plan.layout import Layout
from flexengine.policy import Policy

WEIGHTS, CACHE, HIDDEN = "weights", "cache", "hidden"
KINDS = {WEIGHTS: "weights", CACHE: "cache", HIDDEN: "hidden states"}  # kinds of data, and their names in messages


def fraction(kind: str, place: str) -> str:
    """Return the name of the fraction of a kind of data on a place, such as "weights@disk"."""
    return f"{kind}@{place}"


def kind_of(name: str) -> str:
    """Return the kind of data of a fraction."""
    return name.partition("@")[0]


@lru_cache
def fractions(places: tuple[str, ...] = TIERS) -> tuple[str, ...]:
    """Return the names of all fractions on a list of places: those of the weights, then of the other kinds."""
    return tuple(fraction(kind, place) for kind in KINDS for place in places)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, tokens and lanes of a job under a policy."""

    policy: Policy
    layout: Layout
    seconds: float  # seconds of the whole job without `load_seconds`
    load_seconds: float  # by which the first sweep is longer because resident weights are read in it
    latency: float  # mean seconds from a row's entry to its end
    rows: int  # number of rows of the job
    tokens: int  # number of generated tokens
    alive: float  # sequences in a mean sweep
    counts: dict[str, float]  # number of sweeps by kind ("prefill": sequences enter, "decode": none does)
    sweep_seconds: dict[str, float]  # seconds of a mean sweep by kind
    lanes: dict[str, dict[str, float]]  # seconds of work in a mean sweep, by kind and lane
    busy: dict[str, float]  # seconds of work of the whole job, by lane
    fractions: dict[str, float] = field(default_factory=dict)  # realised fractions, by names such as "cache@disk"

    def shares(self, kind: str) -> dict[str, float]:
        """Return the realised fractions of a kind of data by place."""
        return {place: self.fractions.get(fraction(kind, place), 0.0) for place in self.layout.places}

    @property
    def tok_s(self) -> float:
        """Return the generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def total_seconds(self) -> float:
        """Return the seconds from the start to the last row. The search minimises this number."""
        return self.seconds + self.load_seconds

    @property
    def bottleneck(self) -> str:
        """Return the lane with the most seconds of work. Lanes of one link count together."""
        return busiest(self.busy)


def busiest(lanes: Mapping[str, float]) -> str:
    """Return the lane with the most seconds of work, of seconds by lane. Lanes of one link count together."""
    links: dict[str, float] = {}
    for lane, seconds in lanes.items():
        link = lane_of(lane).link
        links[link] = links.get(link, 0.0) + seconds
    return max(lanes, key=lambda lane: (links[lane_of(lane).link], lanes[lane]))
