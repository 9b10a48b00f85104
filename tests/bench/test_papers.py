"""Tables of the papers: their text, and that a far figure needs a reason."""

import sys
from pathlib import Path

import pytest

from bench.papers import __main__ as command
from bench.papers.tables import Figure, PaperTable


def table(*figures: Figure) -> PaperTable:
    return PaperTable("small", "A small table", "a paper, Table 1", "tokens/s", "By the planner.", figures)


@pytest.mark.parametrize(("figures", "status"), [
    ((Figure("near", 1.1, 1.0), Figure("new", 5.0)), 0),
    ((Figure("far", 1.2, 1.0),), 1),
    ((Figure("far", 1.2, 1.0, "Links are faster."), Figure("also far", 3.0, 1.0, "Links are faster.")), 0),
])  # fmt: skip
def test_far_figures_need_a_reason(
    figures: tuple[Figure, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    page = tmp_path / "page.md"
    monkeypatch.setattr(command, "MAKERS", {"small": lambda: table(*figures)})
    monkeypatch.setattr(sys, "argv", ["papers", "--page", str(page), "--out", str(tmp_path / "records.jsonl")])
    assert command.main() == status
    shown, text = capsys.readouterr().out, page.read_text()
    for line in table(*figures).lines():
        assert line in shown
        assert line in text
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == len(figures)


def test_lines() -> None:
    lines = list(table(Figure("a", 1234.5, 1000.0, "W."), Figure("b", 0.12345), Figure("c", 2.0, 1.0, "W.")).lines())
    assert lines[-5:] == [
        "| a | 1,234 | 1,000 | 1.23 |",
        "| b | 0.123 |  |  |",
        "| c | 2 | 1 | 2.00 |",
        "",
        "* a, c: W.",
    ]
