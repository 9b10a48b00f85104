"""Names of fractions: the share of a kind of data on a place, such as "weights@disk"."""

from functools import lru_cache

from flexengine.places import TIERS

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
