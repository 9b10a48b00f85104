"""Serialised rows, questions and prompts, written out by hand."""

import pytest

from flexengine.apps.wrangle import prompts
from flexengine.apps.wrangle.prompts import serialise, text_of


@pytest.mark.parametrize(("value", "text"), [
    ("a", "a"), ("", None), ("  ", None), (None, None), (float("nan"), None), (0, "0"), (1.5, "1.5"), (True, "true"),
    ("two\r\n lines", "two lines"), (["a", 1], '["a", 1]'), (" a ", " a "),
])  # fmt: skip
def test_text_of(value: object, text: str | None) -> None:
    assert text_of(value) == text


def test_serialise() -> None:
    cells = {"name": "arts deli", "phone": None, "stars": 4, "left out": "x"}
    assert serialise(cells, ["stars", "name", "phone"], "nan") == "stars: 4. name: arts deli. phone: nan"
    assert serialise(cells, ["phone"], "") == "phone: "


def test_questions() -> None:
    assert prompts.match_question("name: a", "name: b", "Product") == (
        "Product A is name: a. Product B is name: b. Are Product A and Product B the same?"
    )
    assert prompts.impute_question("name: a", "city") == "name: a. What is the city?"
    assert prompts.cell_question(None, "city", "xos", "a x spelling error") == (
        "Is there a x spelling error in city: xos?"
    )
    assert prompts.cell_question("name: a", "city", "x", "an error") == "name: a\n\nIs there an error in city: x?"
    assert prompts.row_question("name: a", "an error") == "name: a\n\nIs there an error in this row?"
    assert prompts.schema_question("a", "b") == "A is a. B is b. Are A and B the same? Yes or No?"


def test_prompt() -> None:
    """Examples and question have a blank line between them; a question mark has a space before the answer."""
    shots = [("Is it?", "Yes"), ("input:a\noutput:", "b")]
    assert prompts.prompt("Say it.", shots, "Is it?") == "Say it.\n\nIs it? Yes\n\ninput:a\noutput:b\n\nIs it?"
    assert prompts.prompt(None, [], "Is it?") == "Is it?"
