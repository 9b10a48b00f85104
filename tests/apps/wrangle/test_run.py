"""A run with given answers: the output, the report, work files, and SIGKILL at each point."""

import csv
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flexengine.apps.wrangle.plan import WranglePlan, make_plan
from flexengine.apps.wrangle.run import check, finish, job_of, prepare, work_files
from flexengine.apps.wrangle.spec import make_spec
from flexengine.errors import InvalidInput
from tests.apps.wrangle.helpers import CITIES, PAIRS, answer_rows, written
from tests.helpers.forked import Forked
from tests.helpers.inputs import arrow_file

Give = Callable[[Mapping[str, Any]], Any]


def run(output: Path, give: Give, task: str, table: str, **given: Any) -> tuple[WranglePlan, dict[str, Any]]:
    plan = make_plan(make_spec(task, (table,), given))
    check(plan, str(output))
    prepare(plan, str(output))
    answer_rows(job_of(str(output)).rows, job_of(str(output)).results, give)
    summary, failure = finish(plan, str(output))
    return plan, {**summary, "failure": failure}


def rows_of(output: Path) -> list[dict[str, str]]:
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


def test_scored(tmp_path: Path) -> None:
    """Row 4 fails; the row with too few cells has no question."""
    table = written(tmp_path, "t.csv", PAIRS + "6,short\n")
    logprobs: list[Any] = [[-1.0, -2.0], [-3.0, -1.5], [-2.0, -1.0], ["line 4: is too long"], [-0.5, -1.0]]
    _, report = run(tmp_path / "o.csv", lambda row: logprobs[row["row"]], "match", table, label="same", shots=0)
    rows = rows_of(tmp_path / "o.csv")
    found = [(r["match_prediction"], r["match_confidence"], r["match_failure"].split("; write")[0]) for r in rows]
    assert found == [("Yes", "0.731059", ""), ("No", "0.817574", ""), ("No", "0.731059", ""), ("", "", "is too long"),
                     ("Yes", "0.622459", ""), ("", "", "line 7: has 2 cells, but the header has 6")]  # fmt: skip
    assert [r["left_name"] for r in rows] == ["arts deli", "campanile", "fenix", "arts deli", "spago", "short"]
    assert (report["predicted"], report["failed"], report["answers"]) == (4, 2, {"No": 2, "Yes": 2})
    assert report["failure"] == f"{table}, line 5: is too long"
    assert report["metrics"] is not None
    assert (report["metrics"]["precision"], report["metrics"]["recall"], report["metrics"]["failed"]) == (1.0, 0.5, 1)
    assert json.loads(json.dumps(report)) == report
    assert (report["rows"], report["task"]) == (6, "match")


def test_generated_yes_no(tmp_path: Path) -> None:
    """ "Yes." counts as Yes; other texts stay as they are."""
    texts = ["Yes.", " no", "perhaps", "NO", "yes, the same"]
    _, report = run(tmp_path / "o.csv", lambda row: texts[row["row"]], "match", written(tmp_path, "t.csv", PAIRS),
                    label="same", shots=0, generate=True)  # fmt: skip
    rows = rows_of(tmp_path / "o.csv")
    assert [r["match_prediction"] for r in rows] == ["Yes", "No", "perhaps", "No", "Yes"]
    assert {r["match_confidence"] for r in rows} == {"0.472367"}
    assert report["metrics"] is not None
    assert (report["metrics"]["garbage"], report["metrics"]["recall"], report["metrics"]["accuracy"]) == (1, 0.5, 0.75)


def test_imputed(tmp_path: Path) -> None:
    """Filled cells have no prediction, and the report has no metrics without labels."""
    _, report = run(tmp_path / "o.csv", lambda row: f" city {row['row']}" if row["row"] == 3 else " ", "impute",
                    written(tmp_path, "t.csv", CITIES), column=["city"])  # fmt: skip
    assert [r["city_prediction"] for r in rows_of(tmp_path / "o.csv")] == ["", "", "", "city 3", ""]
    assert (report["metrics"], report["empty"], report["failure"]) == (None, 1, None)


def test_cells(tmp_path: Path) -> None:
    """Each checked column has its own columns in the output."""
    table = written(tmp_path, "t.csv", "a,b\nx,y\nz,w\n")
    run(tmp_path / "o.csv", lambda row: [-1.0, -2.0] if row["target"] == "a_error" else [-2.0, -1.0], "detect", table,
        column=["a", "b"])  # fmt: skip
    for row in rows_of(tmp_path / "o.csv"):
        assert (row["a_error_prediction"], row["b_error_prediction"]) == ("Yes", "No")


def test_arrow(tmp_path: Path) -> None:
    numbers = {"left_n": pa.array([1, 2], pa.int8()), "right_n": pa.array([1, 3], pa.int8())}
    name = str(arrow_file(tmp_path / "t.arrow", table := pa.table({**numbers, "l": [True, False]})))
    _, report = run(tmp_path / "o.arrow", lambda row: [-1.0, -2.0], "match", name, label="l", shots=0)
    found = pa.ipc.open_file(str(tmp_path / "o.arrow")).read_all()
    assert found.select(table.column_names).equals(table)
    assert found["match_prediction"].to_pylist() == ["Yes", "Yes"]
    assert report["metrics"] is not None
    assert report["metrics"]["precision"] == 0.5


def test_killed_at_each_point(tmp_path: Path) -> None:
    """The same command then writes the same files."""
    code = "from tests.apps.wrangle import killed; killed.main(int(sys.argv[1]), *sys.argv[2:])"

    def start(point: int, folder: Path) -> Forked:
        log = tmp_path / f"{folder.name}, {point}.log"
        return Forked(code, [str(point), table, str(folder / "o.csv")], tmp_path, log)

    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    table = written(tmp_path, "t.csv", PAIRS)
    (whole := tmp_path / "whole").mkdir()
    child = start(0, whole)
    assert child.wait(60) == 0, child.said()
    points = int(child.said())
    assert points >= 4
    assert set(contents(whole)) == {"o.csv", "o.csv.rows.jsonl", "o.csv.results.jsonl", "o.csv.results.jsonl.journal"}
    for point in range(1, points + 1):
        (folder := tmp_path / str(point)).mkdir()
        assert start(point, folder).wait(60) == -signal.SIGKILL
        child = start(0, folder)
        assert child.wait(60) == 0, child.said()
        assert contents(folder) == contents(whole)


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    table, output = written(tmp_path, "t.csv", PAIRS), tmp_path / "o.csv"
    run(output, lambda row: [-1.0, -2.0], "match", table, shots=0)
    with pytest.raises(InvalidInput, match=r"has rows of a run with another table or other options, in .*rows\.jsonl"):
        run(output, lambda row: [-1.0, -2.0], "match", table, noun="Place")
    prepare(make_plan(make_spec("match", (table,), {"noun": "Place"})), str(output), restart=True)
    assert "Place A" in job_of(str(output)).rows.read_text()
    assert [path.name for path in tmp_path.glob("o.csv*")] == ["o.csv.rows.jsonl"]


def test_rows_of_a_job_that_never_began_are_replaced(tmp_path: Path) -> None:
    """The job begins later than its rows are written."""
    table, output = written(tmp_path, "t.csv", PAIRS), str(tmp_path / "o.csv")
    for noun in ("Product", "Place"):
        plan = make_plan(make_spec("match", (table,), {"noun": noun}))
        check(plan, output)
        prepare(plan, output)
    assert "Place A" in job_of(output).rows.read_text()


def test_a_foreign_output_stays(tmp_path: Path) -> None:
    written(tmp_path, "o.csv", "mine")
    with pytest.raises(InvalidInput, match="exists and would be replaced; name another output, or give --restart"):
        run(tmp_path / "o.csv", lambda row: [-1.0, -2.0], "match", written(tmp_path, "t.csv", PAIRS))
    assert (tmp_path / "o.csv").read_text() == "mine"


def test_work_files_have_names_of_their_own() -> None:
    outputs = ("o.csv", "o.jsonl", "o.tsv", "o.csv.jsonl")
    files = [path for output in outputs for path in work_files(output).values()]
    assert len(files) == len(set(files)) == 24
    assert not {Path(output).resolve() for output in outputs} & set(files)


def test_results_of_retried_rows_replace_the_output(tmp_path: Path) -> None:
    """Also if the run is continued without retry_errors."""
    table, output = written(tmp_path, "t.csv", PAIRS), tmp_path / "o.csv"
    plan, report = run(output, lambda row: ["line 1: no"] if row["row"] == 1 else [-1.0, -2.0], "match", table)
    assert report["failed"] == 1
    check(plan, str(output))
    prepare(plan, str(output), retry_errors=True)
    _, report = run(output, lambda row: [-2.0, -1.0], "match", table)
    assert (report["failed"], report["answers"]) == (0, {"No": 5})
    assert {row["match_prediction"] for row in rows_of(output)} == {"No"}


def test_an_edited_output_is_refused_before_the_job(tmp_path: Path) -> None:
    table, output = written(tmp_path, "t.csv", PAIRS), tmp_path / "o.csv"
    plan, _ = run(output, lambda row: [-1.0, -2.0], "match", table)
    check(plan, str(output))
    whole = output.read_bytes()
    output.write_bytes(whole.replace(b"fenix", b"venix"))
    message = r"o\.csv is not the table that o\.csv\.results\.jsonl gives, so one of them was changed; rename the"
    with pytest.raises(InvalidInput, match=message):
        check(plan, str(output))
    check(plan, str(output), restart=True)
    output.unlink()
    check(plan, str(output))
    finish(plan, str(output))
    assert output.read_bytes() == whole


def test_an_output_that_appears_while_the_job_runs_stays(tmp_path: Path) -> None:
    plan = make_plan(make_spec("match", (written(tmp_path, "t.csv", PAIRS),), {}))
    check(plan, output := str(tmp_path / "o.csv"))
    prepare(plan, output)
    answer_rows(job_of(output).rows, job_of(output).results, lambda row: [-1.0, -2.0])
    written(tmp_path, "o.csv", "mine")
    with pytest.raises(InvalidInput, match=r"o\.csv was written by another program while the job ran; rename it"):
        finish(plan, output)
    assert Path(output).read_text() == "mine"


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow"])
def test_unread_rows_of_two_tables(tmp_path: Path, suffix: str) -> None:
    """They follow the pairs, and are failures that name file and line."""
    left = written(tmp_path, "a.csv", "name,x\narts deli,1\nshort\nfenix,2\n")
    if suffix == "arrow":
        left = str(arrow_file(tmp_path / "a.arrow", pa.table({"name": ["arts deli", "fenix"], "x": [1, 2]})))
    right = written(tmp_path, "b.csv", "name,y\narts delicatessen,3\nthe fenix,4\na,b,c\n")
    plan = make_plan(make_spec("match", (left, right), {"top": 1}))
    prepare(plan, output := str(tmp_path / f"o.{suffix}"))
    answer_rows(job_of(output).rows, job_of(output).results, lambda row: [-1.0, -2.0])
    report, _ = finish(plan, output)
    faults = [f"{right}, line 4: has 3 cells, but the header has 2"]
    if suffix != "arrow":
        faults = [f"{left}, line 3: has 1 cells, but the header has 2", *faults]
    assert (report["predicted"], report["failed"]) == (2, len(faults))
    rows: list[dict[str, Any]]
    if suffix == "arrow":
        rows = pa.ipc.open_file(output).read_all().to_pylist()
        assert [(row["left_x"], row["right_y"]) for row in rows] == [(1, "3"), (2, "4"), (None, "b")]
    else:
        text = Path(output).read_text()
        rows = list(csv.DictReader(text.splitlines())) if suffix == "csv" else list(map(json.loads, text.splitlines()))
        assert (rows[2]["left_name"], rows[3]["right_name"], rows[3]["right_y"]) == ("short", "a", "b")
        assert rows[3]["right_further_cells"] == ('["c"]' if suffix == "csv" else ["c"])
    assert [(row["match_failure"] or "").split("; write quotes")[0] for row in rows] == ["", "", *faults]


def test_cells_without_an_answer_say_why(tmp_path: Path) -> None:
    """Empty cells are not asked about, and an empty answer is none."""
    table = written(tmp_path, "t.csv", "date;note\n7 July;a\n;b\n8 July;c\n")
    _, report = run(tmp_path / "o.csv", lambda row: ["2007", "", " "][row["row"]], "transform", table, column=["date"],
                    delimiter=";", instruction="ISO", shots=0)  # fmt: skip
    assert (tmp_path / "o.csv").read_text().splitlines() == [
        "date;note;date_prediction;date_confidence;date_failure",
        "7 July;a;2007;0.472367;",
        ";b;;;line 3: all cells that the question would show are empty",
        "8 July;c;;0.472367;the model's answer is empty",
    ]
    assert (report["predicted"], report["failed"], report["empty"]) == (2, 1, 1)


def test_rows_with_nothing_to_show_are_not_asked_about(tmp_path: Path) -> None:
    table = written(tmp_path, "t.csv", "name,city\narts deli,\n,\n,filled\npatina,los angeles\n")
    plan, report = run(tmp_path / "o.csv", lambda _: "x", "impute", table, column=["city"])
    assert [question.row for question in plan.questions] == [0]
    assert [bool(row["city_failure"]) for row in rows_of(tmp_path / "o.csv")] == [False, True, False, False]
    assert (report["predicted"], report["failed"]) == (1, 1)
