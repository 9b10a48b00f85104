"""Series in bounded memory: nothing is lost when buckets or bins are merged."""

from hypothesis import given
from hypothesis import strategies as st

from flexengine.shell.report.record import MOST_CHARACTERS, MOST_KINDS, Bucket, ErrorCounts, LengthCounts, SweepRates

sweeps = st.builds(Bucket, st.just(1), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99), st.integers(0, 9))


@given(st.lists(sweeps, max_size=100), st.integers(2, 9))
def test_rates_keep_all_sums_in_few_buckets(made: list[Bucket], most: int) -> None:
    rates = SweepRates(most)
    for sweep in made:
        rates.add(sweep)
    assert len(rates.buckets) <= most
    for name in vars(Bucket()):
        assert sum(getattr(b, name) for b in rates.buckets) == sum(getattr(sweep, name) for sweep in made)
    sizes = [b.sweeps for b in rates.buckets]
    assert set(sizes[:-1]) <= {max(sizes, default=0)}  # all but the last are equally full
    assert max(sizes, default=1) <= max(1, 2 * len(made) // (most - 1))
    start = 0  # each bucket holds sweeps in a row
    for bucket in rates.buckets:
        part = made[start : start + bucket.sweeps]
        assert bucket.prompt_tokens == sum(sweep.prompt_tokens for sweep in part)
        start += bucket.sweeps


@given(st.lists(st.integers(0, 10**7), max_size=60), st.sampled_from([2, 8, 40]))
def test_bins_count_every_length_once(values: list[int], most: int) -> None:
    counts = LengthCounts(values)
    bins = counts.bins(most)
    assert len(bins) <= most
    assert sum(n for _, _, n in bins) == len(values)
    for low, high, n in bins:
        assert n == sum(low <= value <= high for value in values)
    if values:
        assert counts.mean == sum(values) / len(values)
        assert bins[0][2]
        assert bins[-1][2]
        width = bins[0][1] - bins[0][0] + 1
        assert width == 1 or 2 * max(values) >= width * most


def test_errors_of_one_kind_differ_in_numbers_and_quotes() -> None:
    errors = ErrorCounts()
    said = ["max_tokens is 0; it must be at least 1", "max_tokens is -7; it must be at least 1", "prompt is 'a b'",
            "prompt is \"it's\"", "line 3: prompt is 'c'", "row 9 (line 10): prompt is 'd'", "holds [1, 2"]  # fmt: skip
    for row, message in enumerate(said):
        errors.add(row, message)
    found = [(kind.count, kind.row, kind.message) for kind in errors.kinds.values()]
    assert found == [(1, 0, said[0]), (1, 1, said[1]), (4, 2, said[2]), (1, 6, said[6])]


def test_errors_are_bounded() -> None:
    errors = ErrorCounts()
    for row in range(1000):
        errors.add(row, f"{'x' * row}{'z' * 10_000}")
    assert len(errors.kinds) <= MOST_KINDS
    assert sum(kind.count for kind in errors.kinds.values()) + errors.others == 1000
    assert max(len(kind.message) for kind in errors.kinds.values()) <= MOST_CHARACTERS
    assert max(map(len, errors.kinds)) <= MOST_CHARACTERS
