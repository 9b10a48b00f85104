"""Common prefixes of prompts. A stem is a prefix that several sequences share; it is computed once.

    A B C D 1 2         stem A B C D of all three sequences, and under it stem 1 2 of the first two:
    A B C D 1 2 3       a stem begins where the stem above it ends
    A B C D 4

`stems_of` finds the stems of prompts. `Sweeps` computes a stem before the first of its sequences, and keeps its KV
until the last of them has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Optional

import numpy as np

MIN_SHARED_TOKENS = 8  # a shorter common part is computed by each sequence: a stem takes a step and a page of its own

MAX_STEMS = 16  # most stems of one sequence, which its first sweep computes one after the other

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Stem:
    """Tokens start .. end - 1 that several sequences have in common."""

    tokens: Tokens  # token ids from position 0 on, at least `end` of them
    end: int  # position after the last token
    above: Optional["Stem"]  # the stem before this one; None if this one begins at position 0
    sequences: int  # number of sequences with this prefix

    @property
    def start(self) -> int:
        """Position of the first token that the stem adds to the stem above it."""
        return self.above.end if self.above else 0


def order_of(prefixes: Sequence[Tokens], grain: int = 1) -> list[int]:
    """Return the indices of prefixes in an order in which those that share a stem are adjacent.

    Prefixes that share a stem move to the first of them. Otherwise the order does not change. grain: as in `stems_of`.
    """
    by_tokens = sorted(range(len(prefixes)), key=prefixes.__getitem__)
    chains = [stems_above(stem) for stem in stems_of([prefixes[i] for i in by_tokens], grain)]
    first: dict[Stem, int] = {}
    for i, chain in zip(by_tokens, chains, strict=True):
        for stem in chain:
            first[stem] = min(i, first.get(stem, i))
    keys = {i: (*(first[stem] for stem in reversed(chain)), i) for i, chain in zip(by_tokens, chains, strict=True)}
    return sorted(keys, key=keys.__getitem__)


def stems_of(prefixes: Sequence[Tokens], grain: int = 1) -> list[Stem | None]:
    """Return the longest stem of each sequence; None for a sequence without one.

    Args:
        prefixes: by sequence, in the order of `order_of`, the tokens that it may share. Equal ones are shared whole.
            Only adjacent sequences share a stem.
        grain: a stem ends at a multiple of this number of tokens.
    """
    lcp = [common(a, b) // grain * grain for a, b in pairwise(prefixes)]
    lcp.append(0)
    stems: list[Stem | None] = [None] * len(prefixes)
    open_stems: list[tuple[int, int]] = []  # (length of the common part, first sequence), lengths rising
    found: list[tuple[int, int, int]] = []  # (first sequence, last sequence + 1, length)
    for i, length in enumerate(lcp):
        first = i
        while open_stems and open_stems[-1][0] > length:
            most, first = open_stems.pop()
            found.append((first, i + 1, most))
        if length and (not open_stems or open_stems[-1][0] < length):
            open_stems.append((length, first))
    for first, end, length in sorted(found, key=lambda item: (item[0] - item[1], item[0])):  # widest first
        above = stems[first]
        if length - (above.end if above else 0) >= MIN_SHARED_TOKENS and len(stems_above(above)) < MAX_STEMS:
            stems[first:end] = [Stem(prefixes[first], length, above, end - first)] * (end - first)
    return stems


def stems_above(stem: Stem | None) -> list[Stem]:
    """Return a stem and all stems above it, the longest first; [] for None."""
    stems = list[Stem]()
    while stem is not None:
        stems.append(stem)
        stem = stem.above
    return stems


def common(a: Tokens, b: Tokens) -> int:
    """Return the number of tokens at the beginning that two sequences have in common."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return int(np.argmax(np.not_equal(a[:n], b[:n])))
