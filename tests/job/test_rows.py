"""Rows and the places at the beginning of their errors."""

import pytest

from flexengine.job.rows import Row, without_place


@pytest.mark.parametrize("error", [
    "line 3: is too long", "row 2 (line 3): is too long", "row 2: is too long", "row 2 (line 3): line 3: is too long",
    "is too long", Row(2, 3).refused("is too long").error,
])  # fmt: skip
def test_errors_without_their_place(error: str) -> None:
    assert without_place(error) == "is too long"


def test_places_within_an_error_stay() -> None:
    assert without_place("line 3: invalid JSON, see row 2: x") == "invalid JSON, see row 2: x"
