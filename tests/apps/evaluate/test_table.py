"""The table that the command prints."""

from dataclasses import replace

from flexengine.apps.evaluate.instances import Built
from flexengine.apps.evaluate.metrics import InstanceAnswer
from flexengine.apps.evaluate.report import Evaluation, Figure
from flexengine.apps.evaluate.runs import Run
from flexengine.apps.evaluate.scenario import Data, Prompt, Scenario
from flexengine.shell.commands.evaluate import failures, text

ONE = Figure("s", "choice", "exact", "original", "accuracy", 0.5, 0.25, 0.75, 4, 0, "as 0", True)


def test_table() -> None:
    other = replace(ONE, run="4bit", difference=-0.25, difference_low=-0.5, difference_high=None)
    typos, worst = (replace(ONE, variant=name, value=None, low=None, high=None) for name in ("typos", "worst"))
    figures = [ONE, other, typos, typos, worst, worst]
    lines = text(Evaluation([Run("exact"), Run("4bit")], [], [], figures, 1000)).splitlines()
    assert [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines] == [
        ["scenario", "metric", "exact", "4bit", "difference"],
        ["s", "accuracy", "0.5000 [0.2500, 0.7500]", "0.5000 [0.2500, 0.7500]", "-0.2500 [-0.5000, -]"],
        ["s", "accuracy, worst", "-", "-", "-"],
    ]


def test_errors_are_named() -> None:
    built = [Built(Scenario("choice", Data("f"), Prompt("{q}"), name=name), (), (), {}) for name in ("s", "t")]
    good, bad = InstanceAnswer(text="x"), InstanceAnswer(error="line 4: column q is null")
    answers = [[[good, bad, bad], [good]], [[good] * 3, [bad]]]
    done = Evaluation([Run("exact"), Run("4bit")], built, answers, [], 1000)
    assert failures(done) == [
        "s: 2 of 3 instances of run exact have an error; the first: line 4: column q is null",
        "t: 1 of 1 instances of run 4bit have an error; the first: line 4: column q is null",
    ]
