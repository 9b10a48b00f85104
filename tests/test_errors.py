"""Values and names in messages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexengine.errors import shown


class Broken:
    def __repr__(self) -> str:
        raise OSError("no text")


class Table:
    def __repr__(self) -> str:
        return "   a\n0  1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([True, None, "a"], '[true, null, "a"]'),
        ({"a": 1}, '{"a": 1}'),
        ("a\nb", "'a\\nb'"),
        ("crash at 0xdead", "'crash at 0xdead'"),
        ((Path("a"), b"b"), f"[{Path('a')!r}, b'b']"),
        (Table(), "a Table"),
        ([Table()], "[a Table]"),
        ({"a": Table(), 1: Path("a")}, f"{{'a': a Table, 1: {Path('a')!r}}}"),
        (np.zeros((50, 50)), "a ndarray"),
        (Broken(), "a Broken"),
        (object(), "an object"),
        (lambda: None, "a function"),
        (10**5000, "a number too long to print"),
        ("x" * 10**6, f"'{'x' * 75} ..."),
        ([0] * 10**6, f"[{'0, ' * 25} ..."),
    ],
    ids=range(16),
)
def test_a_value_takes_one_line_of_a_message(value: Any, text: str) -> None:
    assert shown(value) == text
    assert len(text) <= 80
