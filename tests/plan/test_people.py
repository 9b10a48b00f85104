"""The table "What people run" of docs/models.md: the page has what its command finds."""

import tempfile
from pathlib import Path

import pytest

from tests.helpers.people import PEOPLE, WORDS
from tests.helpers.people_table import ABOUT, PAGE, listed, opened, row, section, table, with_section


def test_the_page_has_all_models_in_order() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = listed(page)
    assert [(cells[0], cells[2]) for cells in rows] == [(name, WORDS[person.form]) for name, person in PEOPLE.items()]
    assert section(page).startswith(ABOUT)
    assert with_section(page, table(rows)) == page
    assert section(with_section(page, "")) == ""
    assert with_section(with_section(page, ""), table(rows)) == page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LFM3-1.7B", "gpt-oss-20b", "Nemotron-3-Nano-30B-A3B"])
def test_the_page_has_what_the_command_finds(name: str) -> None:
    assert row(name) in listed(PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, person in PEOPLE.items() if person.billions])
def test_parameters_are_those_of_the_card(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        facts = opened(name, Path(folder), "cuda").facts
    assert sum(t.elements for t in facts.tensors) / 1e9 == pytest.approx(PEOPLE[name].billions, rel=2e-3)
