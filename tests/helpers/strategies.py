"""Strategies of hypothesis that several tests draw from, and the search for a counterexample."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

Drawn = TypeVar("Drawn")
SEEDS = st.integers(0, 2**32 - 1)  # of interleavings and noise, whose draws are too many to be shrunk
RANDOMS = st.randoms(use_true_random=False)  # generators whose every draw is an example's
JUNK = (b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b'"', b"}", b"NaN", b"\\ud800", b"[[", b"\xe2\x82", b",", b"\t")


def refuted(cases: st.SearchStrategy[Drawn], holds: Callable[[Drawn], bool], tries: int = 300) -> bool:
    """Return whether `holds` is false for one of `tries` cases."""
    try:
        find(cases, lambda case: not holds(case), settings=settings(max_examples=tries, phases=[Phase.generate]))
    except NoSuchExample:
        return False
    return True


@st.composite
def flipped(draw: st.DrawFn, data: bytes, start: int = 0) -> bytes:
    """Return `data` with one bit flipped, at byte `start` or after it."""
    at, bit = draw(st.integers(start, len(data) - 1)), draw(st.integers(0, 7))
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@st.composite
def mutated(draw: st.DrawFn, line: bytes) -> bytes:
    """Return `line` cut, shortened, with a flipped bit, doubled, or with junk in it; without line breaks."""
    at = draw(st.integers(0, len(line) - 1))
    cut, shortened = st.just(line[:at]), st.integers(1, 8).map(lambda n: line[:at] + line[at + n :])
    junk = st.tuples(st.sampled_from(JUNK), st.integers(1, 3)).map(lambda x: line[:at] + x[0] * x[1] + line[at:])
    changed = draw(st.one_of(junk, cut, shortened, flipped(line), st.just(line * 2)))
    return changed.replace(b"\n", b" ")
