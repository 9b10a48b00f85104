"""The table "What people run" of docs/models.md: the page has what its command finds."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flexengine import shipped
from flexengine.plan.hardware import Hardware
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from tests.helpers.people import PEOPLE, WORDS
from tests.helpers.people_table import (
    ABOUT,
    GPU,
    NEW,
    PAGE,
    PROMPT,
    ROWS,
    listed,
    opened,
    row,
    section,
    table,
    with_section,
)


def test_the_page_has_all_models_in_order() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = listed(page)
    assert [(cells[0], cells[2]) for cells in rows] == [(name, WORDS[person.form]) for name, person in PEOPLE.items()]
    assert section(page).startswith(ABOUT)
    for cells in rows:  # with the least memory, and with all
        for rates in (cells[7], cells[9]):
            slow, fast = (0.0 if rate == "-" else float(rate) for rate in rates.split(", "))
            assert fast >= slow, cells
    assert with_section(page, table(rows)) == page
    assert section(with_section(page, "")) == ""
    assert with_section(with_section(page, ""), table(rows)) == page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LFM3-1.7B", "gpt-oss-20b", "Nemotron-3-Nano-30B-A3B"])
def test_the_page_has_what_the_command_finds(name: str) -> None:
    """Rates are those of the best plan that a search finds in limited time, so they are compared roughly."""
    found, (page,) = row(name), [cells for cells in listed(PAGE.read_text(encoding="utf-8")) if cells[0] == name]
    assert (*found[:7], found[8]) == (*page[:7], page[8])
    for column in (7, 9):
        pairs = zip(found[column].split(", "), page[column].split(", "), strict=True)
        assert all(0.5 < float(own) / float(written) < 2 for own, written in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, person in PEOPLE.items() if person.billions])
def test_parameters_are_those_of_the_card(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        facts = opened(name, Path(folder), "cuda").facts
    assert sum(t.elements for t in facts.tensors) / 1e9 == pytest.approx(PEOPLE[name].billions, rel=2e-3)


@pytest.mark.slow
def test_more_memory_makes_no_slower_plan() -> None:
    """Of a model of which the device holds one layer at a time: with a little more memory it also holds the cache of
    one sequence, which is slower than the cache of several in RAM."""
    with tempfile.TemporaryDirectory() as folder:
        facts = opened("GLM-5-FP8", Path(folder), "cuda").facts
    hardware = replace(Hardware.load(shipped.find_file("hardware", GPU)), disk_bytes=None)
    seconds = [
        search(facts, replace(hardware, device_bytes=int(room)), Workload({(PROMPT, NEW): ROWS})).best.total_seconds
        for room in (12e9, 15.4e9)
    ]
    assert seconds[1] <= 1.03 * seconds[0]
