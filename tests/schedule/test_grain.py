"""Pieces and shared prefixes of models whose prompts are cut at multiples of a grain."""

from hypothesis import given
from hypothesis import strategies as st

from flexengine.schedule.batches import split_prompt
from flexengine.schedule.grain import split_on_grid
from flexengine.schedule.pages import RECORD, Pool
from flexengine.schedule.prefixes import stems_above, stems_of
from flexengine.schedule.sweeps import Growing, peak_pages


@given(st.integers(1, 9), st.integers(2, 5), st.integers(0, 6), st.integers(1, 90))
def test_pieces_end_on_the_grid_and_have_more_than_one_token(grain: int, budget: int, first: int, count: int) -> None:
    grain, start, whole = grain + 1, first * (grain + 1), budget * (grain + 1)
    pieces = split_on_grid(grain, 0, start, count, whole, True, None, scored := min(count, 7))
    ends = [start + count - scored, *[p.start + p.count for p in pieces]]
    assert [p.scored for p in pieces] == [max(0, p.start + p.count - max(p.start, ends[0])) for p in pieces]
    assert [p.start for p in pieces] == [start, *[p.start + p.count for p in pieces[:-1]]]
    assert sum(p.count for p in pieces) == count
    assert all(p.start % grain == 0 and 0 < p.count <= whole for p in pieces)
    assert all(p.count > 1 for p in pieces[1:])
    assert [p.final for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_without_a_grain_pieces_are_as_long_as_they_may_be() -> None:
    assert [p.count for p in split_prompt(0, 3, 21, 10)] == [10, 10, 1]
    assert [p.count for p in split_on_grid(5, 0, 0, 21, 10)] == [10, 5, 6]


def test_stems_end_at_multiples_of_the_grain() -> None:
    common = tuple(range(150))
    prefixes = [common[:128], (*common[:100], 9, *common[:27]), common[:128]]
    ends = [[stem.end for stem in stems_above(stem)] for stem in stems_of(sorted(prefixes), 64)]
    assert sorted(ends) == [[64], [128, 64], [128, 64]]


def test_a_record_is_a_page_that_never_fills() -> None:
    pool = Pool(9, RECORD)
    assert [pool.held(n) for n in (1, 64, 10**6)] == [1, 1, 1]
    assert [[*pool.read(n)] for n in (0, 1, 10**6)] == [[], [0], [0]]
    assert [[*pool.written(n, n + 5)] for n in (0, 64)] == [[0], [0]]
    assert pool.num_shared(10**6) == 0
    # A common prefix and three sequences that have it hold a record each.
    assert peak_pages([Growing(64, 9, 0, 0), *[Growing(70, 5, 64)] * 3], pool) == 4
