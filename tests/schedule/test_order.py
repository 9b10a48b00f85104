"""Order of cells, pages, pieces and gpu_batches, against brute force and plain counting."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.schedule.admission import Growing, entrants, peak_pages
from flexengine.schedule.order import Batch, Piece, cells, form_batches, interleaved, split_prompt
from flexengine.schedule.pages import Pool, pages_for


def test_cells_are_layer_major() -> None:
    assert [tuple(c) for c in cells(3, 2, 3)] == [(3, 0, 0), (3, 0, 1), (3, 0, 2), (3, 1, 0), (3, 1, 1), (3, 1, 2)]


@pytest.mark.parametrize(
    ("schedule", "free"),
    [("row", {0: 4, 1: 0, 4: 0}), ("zigzag", {0: 12, 1: 0, 11: 0}), ("diagonal", {0: 4, 7: 4, 8: 4, 10: 2, 12: 0}),
     ("continuous", {0: 12, 5: 7, 12: 0})],
)  # fmt: skip
def test_entrants(schedule: str, free: dict[int, int]) -> None:
    assert {live: entrants(schedule, live, 4, 3) for live in free} == free


GROWING = st.builds(Growing, st.integers(1, 60), st.integers(1, 40), st.just(0), st.sampled_from([0, 1]))


@given(page=st.sampled_from([1, 2, 5, 16]), group=st.lists(GROWING, max_size=9))
@settings(max_examples=300)
def test_peak_pages_against_stepping(page: int, group: list[Growing]) -> None:
    held = [sum(-(-(s.tokens + step * s.grows) // page) for s in group if s.sweeps > step) for step in range(41)]
    assert peak_pages(group, Pool(0, page)) == max(held)


@given(start=st.integers(0, 9), count=st.integers(1, 40), budget=st.integers(1, 15))
@settings(max_examples=100)
def test_split_prompt_covers_in_order(start: int, count: int, budget: int) -> None:
    pieces = split_prompt(8, start, count, budget)
    assert [t for p in pieces for t in range(p.start, p.start + p.count)] == list(range(start, start + count))
    assert all(p.sequence == 8 and 1 <= p.count <= budget for p in pieces)
    assert [p.final for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) == -(-count // budget)


@given(
    size=st.integers(1, 4), budget=st.integers(3, 20), page=st.sampled_from([2, 4]),
    prompts=st.lists(st.integers(1, 25), min_size=1, max_size=9), spare=st.none() | st.integers(0, 4),
)  # fmt: skip
@settings(max_examples=200)
def test_form_batches_bounds_and_order(
    size: int, budget: int, page: int, prompts: list[int], spare: int | None
) -> None:
    """spare: pages of a batch above what the largest piece takes, None: without a limit."""
    pieces = [p for s, tokens in enumerate(prompts) for p in split_prompt(s, 0, tokens, budget)]
    room = None if spare is None else max(pages_for(p.start + p.count, page) for p in pieces) + spare
    formed = form_batches(pieces, size, budget, [Pool(0, page, room)])
    assert [p for batch in formed for p in batch] == pieces

    def fits(batch: tuple[Piece, ...]) -> bool:
        pages = sum(-(-(p.start + p.count) // page) for p in batch)
        alone = len({p.sequence for p in batch}) == len(batch)
        within = len(batch) <= size and sum(p.count for p in batch) <= budget
        return alone and within and (room is None or pages <= room)

    assert all(fits(batch) for batch in formed)
    # Greedy: no batch could have taken the first piece of the next.
    assert not any(fits((*batch, after[0])) for batch, after in pairwise(formed))


def test_pieces_of_one_sequence_are_never_together() -> None:
    pieces = [Piece(0, 0, 2, False), Piece(0, 2, 2, True), Piece(1, 0, 1, True)]
    assert form_batches(pieces, 9, 99) == [(pieces[0],), (pieces[1], pieces[2])]


@given(start=st.integers(0, 30), count=st.integers(1, 30), window=st.none() | st.integers(1, 40))
@settings(max_examples=300)
def test_pairs_against_counting(start: int, count: int, window: int | None) -> None:
    queries = range(start, start + count)
    counted = sum(1 for q in queries for k in range(q + 1) if window is None or k > q - window)
    assert Piece(0, start, count, True).pairs(window) == counted


def batch(sequence: int, home: str, attention: str = "device") -> Batch:
    return Batch((Piece(sequence, 4, 1, True),), home, "device", attention)


def test_gpu_batches_of_tiers_alternate() -> None:
    formed = [*(batch(i, "disk") for i in range(2)), *(batch(i, "disk2") for i in range(2, 6))]
    assert [b.cache_home for b in interleaved(formed)] == ["disk2", "disk", "disk2", "disk2", "disk", "disk2"]


@given(st.lists(st.tuples(st.sampled_from(["device", "host", "disk", "disk2"]), st.booleans()), max_size=12))
def test_interleaved_keeps_the_order_of_a_tier(drawn: list[tuple[str, bool]]) -> None:
    """Pieces of one sequence have one tier and must stay in order. Delegated gpu_batches are first. At any point, a
    tier's share of its gpu_batches is within one gpu_batch of the sweep's share."""
    formed = [batch(i, home, "host" if home == "host" and away else "device") for i, (home, away) in enumerate(drawn)]
    done = interleaved(formed)
    assert sorted(b.pieces[0].sequence for b in done) == list(range(len(drawn)))
    delegated = [b.delegated for b in done]
    assert delegated == sorted(delegated, reverse=True)
    rest = [b for b in done if not b.delegated]
    for home in {b.cache_home for b in rest}:
        own = [b.pieces[0].sequence for b in rest if b.cache_home == home]
        assert own == sorted(own)
        for end in range(len(rest) + 1):
            passed = sum(b.cache_home == home for b in rest[:end])
            assert abs(passed - len(own) * end / len(rest)) <= 1 + 1e-9
