"""The table that the command prints."""

from dataclasses import replace

from flexengine.apps.evaluate.figures import Draws, Figure
from flexengine.apps.evaluate.report import Evaluation
from flexengine.apps.evaluate.runs import Run
from flexengine.commands.evaluate import text

ONE = Figure("s", "choice", "exact", "original", "accuracy", 0.5, 0.25, 0.75, 4, 0, "as 0", True)


def test_table() -> None:
    other = replace(ONE, run="4bit", difference=-0.25, difference_low=-0.5, difference_high=None)
    typos, worst = (replace(ONE, variant=name, value=None, low=None, high=None) for name in ("typos", "worst"))
    figures = [ONE, other, typos, typos, worst, worst]
    lines = text(Evaluation("1", [Run("exact"), Run("4bit")], [], [], figures, Draws())).splitlines()
    assert [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines] == [
        ["scenario", "metric", "exact", "4bit", "difference"],
        ["s", "accuracy", "0.5000 [0.2500, 0.7500]", "0.5000 [0.2500, 0.7500]", "-0.2500 [-0.5000, -]"],
        ["s", "accuracy, worst", "-", "-", "-"],
    ]
