"""Options: which task takes which, and what is refused."""

from typing import Any

import pytest

from flexengine.apps.wrangle.spec import MATCH, NEAREST, TASKS, Spec, make_spec
from flexengine.errors import InvalidInput


def test_defaults() -> None:
    spec = make_spec("match", ("a.csv", "b.csv"), {"shots": None, "closed": False, "choice": None, "show": []})
    assert spec == Spec(MATCH, ("a.csv", "b.csv"))
    assert (spec.picks, spec.scored) == ("random", True)
    assert make_spec("match", ("a.csv",), {"examples": "e.csv"}).picks == "given"


@pytest.mark.parametrize(("task", "given", "scored"), [
    ("detect", {}, True), ("detect", {"generate": True}, False), ("impute", {"column": ["c"]}, False),
    ("impute", {"column": ["c"], "choice": ["a", "b"]}, True), ("impute", {"column": ["c"], "closed": True}, True),
    ("transform", {"column": ["c"], "examples": "e.csv"}, False),
])  # fmt: skip
def test_known_answers_are_scored(task: str, given: dict[str, Any], scored: bool) -> None:
    assert make_spec(task, ("a.csv",), given).scored is scored


def test_zero_shots_are_given() -> None:
    assert make_spec("match", ("a.csv",), {"shots": 0}).shots == 0


REFUSED: list[tuple[str | None, int, dict[str, Any], str]] = [
    (None, 1, {}, "no task is given; write flexengine wrangle match|impute|"),
    ("frob", 1, {}, "no task is given"),
    ("match", 0, {}, "match has 0 tables; it takes a table of pairs, or two tables"),
    ("match", 3, {}, "match has 3 tables"),
    ("impute", 2, {"column": ["c"]}, "impute has 2 tables; it takes one table"),
    ("match", 1, {"top": 3}, "--top makes pairs from two tables"),
    ("schema", 1, {"values": 3}, "--values makes pairs from two tables"),
    ("match", 2, {"top": 0}, "--top is 0; it must be at least 1"),
    ("match", 1, {"shots": -1}, "--shots is -1; it must be at least 0"),
    ("match", 1, {"limit": 0}, "--limit is 0; it must be at least 1"),
    ("impute", 1, {}, "no column is given; name the column to impute"),
    ("impute", 1, {"column": ["a", "b"]}, "--column is given 2 times; impute takes one column; leave out the others"),
    ("transform", 1, {}, "no column is given; name the column to transform"),
    ("match", 1, {"column": ["a"]}, "--column has no effect on match; it is for impute and detect and transform"),
    ("impute", 1, {"column": ["a"], "noun": "x"}, "--noun has no effect on impute; it is for match"),
    ("match", 1, {"noun": "Product", "evaluate": True}, "--evaluate has no effect on match"),
    ("transform", 1, {"column": ["a"]}, "transform needs examples or an instruction; give --examples FILE"),
    ("transform", 1, {"column": ["a"], "label": "l", "shots": 0}, "transform with --shots 0 needs an instruction;"),
    ("transform", 1, {"column": ["a"], "missing": "x"}, "--missing has no effect on transform"),
    ("impute", 1, {"column": ["a"], "generate": True}, "--generate has no effect on impute"),
    ("detect", 1, {"column": ["a", "a"]}, "--column 'a' is given twice; give it once"),
    ("match", 1, {"show": ["a", "b", "a"]}, "--show 'a' is given twice"),
    ("detect", 1, {"alone": True}, "--alone shows single cells, but no --column"),
    ("detect", 1, {"alone": True, "column": ["a"], "show": ["b"]}, "--alone hides the row"),
    ("impute", 1, {"column": ["a"], "choice": ["x", "y"], "closed": True}, "--choice lists the answers, and --closed"),
    ("impute", 1, {"column": ["a"], "choice": ["x", "x"]}, "each choice must be given once"),
    ("impute", 1, {"column": ["a"], "choice": ["x", " "]}, "must not be empty"),
    ("impute", 1, {"column": ["a"], "choice": ["x"]}, "--choice 'x' is the only one; give at least two"),
    ("match", 1, {"max_tokens": 3}, "--max-tokens has no effect, as the known answers are scored; leave it out, or"),
    ("match", 1, {"test": 3}, "--test draws rows with known answers; give --label COLUMN"),
    ("impute", 1, {"column": ["a"], "test": 3}, "give --label COLUMN or --evaluate"),
    ("match", 1, {"shots": 0, "examples": "e.csv"}, "--examples has no effect with --shots 0"),
    ("match", 1, {"shots": 0, "pick": "random"}, "--pick has no effect with --shots 0"),
    ("match", 1, {"pick": "given"}, "--pick given takes the first rows of a file; give it by --examples"),
    ("impute", 1, {"column": ["a"], "pick": "balanced"}, "--pick balanced needs known answers"),
    ("transform", 1, {"column": ["a"], "pick": "balanced"}, "--pick balanced needs known answers; pick random"),
    ("match", 1, {"examples": "e.csv", "seed": 3}, "--seed has no effect, as nothing is drawn at random"),
    ("match", 1, {"pick": NEAREST, "seed": 3}, "--seed has no effect"),
    ("match", 1, {"similarity": "token"}, "--similarity has no effect without two tables or --pick nearest"),
    ("schema", 2, {"similarity": "token"}, "--similarity has no effect without --top or --pick nearest; leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "tables", "given", "message"), REFUSED)
def test_refused(task: str | None, tables: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        make_spec(task, tuple(f"t{i}.csv" for i in range(tables)), given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_task_has_a_refusal() -> None:
    assert {task for task, *_ in REFUSED} > set(TASKS)


def test_where_similarity_has_an_effect() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [("match", {}), ("schema", {"top": 1}), ("schema", {"pick": NEAREST})]
    for task, given in cases:
        spec = make_spec(task, ("a.csv", "b.csv"), {"similarity": "token", **given})
        assert spec.similarity == "token"
