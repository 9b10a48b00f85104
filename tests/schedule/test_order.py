"""Order of cells, pages, pieces and gpu_batches, against brute force and plain counting."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.schedule.batches import Batch, Piece, form_batches, interleaved, split_prompt
from flexengine.schedule.order import CellPart, cells
from flexengine.schedule.pages import Pool, pages_for
from flexengine.schedule.sweeps import Growing, entrants, peak_pages


def order(batches: list[Batch], units: int, part: CellPart, closed: bool = False, buffers: int = 3) -> str:
    """Return the cells of a sweep as text. The head (the last unit) is whole, layers begin with `part`."""
    names = {CellPart.WHOLE: "C", CellPart.TO_ATTENTION: "P", CellPart.FROM_ATTENTION: "F", CellPart.TO_EXPERTS: "C",
             CellPart.FROM_EXPERTS: "R"}  # fmt: skip

    def begin(layer: int, batch: int) -> tuple[CellPart, int]:
        return (part if layer < units - 1 else CellPart.WHOLE), 1

    steps = cells(7, units, batches, begin, lambda layer: closed, buffers)
    return " ".join(f"{names[step.part]}{step.cell.layer}{step.cell.batch}" for step in steps)


def test_cells_are_layer_major() -> None:
    """The table of FlexGen's zig-zag, in `schedule.order`."""
    batches = [batch(k, "device") for k in range(3)]
    assert order(batches, 3, CellPart.WHOLE) == "C00 C01 C02 C10 C11 C12 C20 C21 C22"


def test_attention_elsewhere_ends_right_before_the_next_layer_of_its_gpu_batch() -> None:
    batches = [batch(k, "host", "host") for k in range(3)]
    assert order(batches, 3, CellPart.TO_ATTENTION) == "P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 C20 F11 C21 F12 C22"
    assert order(batches, 2, CellPart.TO_ATTENTION, closed=True) == "P00 P01 P02 F00 F01 F02 C10 C11 C12"


def test_experts_end_after_the_first_parts_of_all_gpu_batches() -> None:
    batches = [batch(k, "device") for k in range(3)]
    assert order(batches, 3, CellPart.TO_EXPERTS).startswith("C00 C01 C02 R00 R01 R02 C10 C11 C12 R10 R11 R12 C20")
    away = [each._replace(hidden_home="host") for each in batches]
    assert order(away, 2, CellPart.TO_EXPERTS, buffers=2) == "C00 C01 R00 C02 R01 R02 C10 C11 C12"


def test_layers_that_one_call_computes_have_one_cell() -> None:
    batches = [batch(k, "device") for k in range(2)]

    def begin(layer: int, batch: int) -> tuple[CellPart, int]:
        return CellPart.WHOLE, 3 if batch == 0 and layer == 1 else 1

    steps = cells(0, 5, batches, begin, lambda layer: False, 3)
    assert [(*step.cell[1:], step.layers) for step in steps] == [
        (0, 0, 1), (0, 1, 1), (1, 0, 3), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 0, 1), (4, 1, 1)
    ]  # fmt: skip


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
