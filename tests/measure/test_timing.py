"""Numbers that timings are made into."""

from flexengine.measure import timing


def test_seconds_that_fall_are_pooled() -> None:
    """Seconds of more rows are never less: neighbours that fall get their mean (isotonic regression)."""
    assert timing.without_falls([1.0, 2.0, 5.0]) == [1.0, 2.0, 5.0]
    assert timing.without_falls([1.0, 4.0, 2.0, 5.0]) == [1.0, 3.0, 3.0, 5.0]
