"""Prompts of each task, written out by hand; rows that become examples; and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from flexengine.apps.wrangle.plan import WranglePlan, make_plan
from flexengine.apps.wrangle.spec import make_spec
from flexengine.errors import InvalidInput
from flexengine.job.row_fields import kept_name
from tests.apps.wrangle.helpers import CITIES, PAIRS, written
from tests.helpers.inputs import arrow_file


def plan_of(tmp_path: Path, task: str, text: str, more: str | None = None, **given: Any) -> WranglePlan:
    tables = [written(tmp_path, "t.csv", text)]
    if more is not None and "examples" in given:
        written(tmp_path, "e.csv", more)
        given["examples"] = str(tmp_path / "e.csv")
    elif more is not None:
        tables.append(written(tmp_path, "u.csv", more))
    return make_plan(make_spec(task, tuple(tables), given))


def test_a_row_of_a_job_has_no_field_of_a_result(tmp_path: Path) -> None:
    """The output would have it under another name, and a message would say so."""
    for given in ({}, {"closed": True}):
        plan = plan_of(tmp_path, "impute", CITIES, column=("city",), evaluate=True, shots=0, **given)
        for row in plan.requests():
            assert not {name for name in row if kept_name(name) != name}


def test_delimiters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One option for the tables of text; a table may state another. One column that looks like several is named."""
    left, right = "name;x\narts deli;1\n", "name,y\narts deli,2\n"
    both = "have no common column.*columns of .*{0}: they seem.*; give --delimiter '{1}', or begin the"
    for option, file, mark in ((";", "u.csv", ","), (None, "t.csv", ";")):
        with pytest.raises(InvalidInput, match=both.format(file, mark)):
            plan_of(tmp_path, "match", left, right, delimiter=option)
    plan = plan_of(tmp_path, "match", f"sep=;\n{left}", right, top=1)
    assert plan.asked.table.columns[:2] == ("left_name", "left_x")
    caplog.set_level("INFO", "flexengine")
    for text, option, told in ((left, None, 1), (left, ";", 0), ("name\na; b\n", None, 0)):
        caplog.clear()
        plan_of(tmp_path, "detect", text, delimiter=option, shots=0)
        assert caplog.text.count("t.csv has one column, 'name;x': it seems to be separated by ';'; give") == told
    for task in ("match", "schema"):
        with pytest.raises(InvalidInput, match="seem to be separated by ';'; give --delimiter ';', or"):
            plan_of(tmp_path, task, PAIRS.replace(",", ";"), shots=0)


def test_a_delimiter_without_a_table_of_text(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = arrow_file(tmp_path / "t.parquet", pa.table({"name": ["a"], "city": ["b"]}))
    with pytest.raises(InvalidInput, match=r"--delimiter is for .csv and .tsv files, and no table is one"):
        make_plan(make_spec("detect", (str(path),), {"delimiter": ";", "shots": 0}))
    plan = make_plan(make_spec("match", (str(path), written(tmp_path, "t.csv", "name;x\na b;1\n")), {"delimiter": ";"}))
    assert plan.asked.table.columns[2:4] == ("right_name", "right_x")


DELI = (
    "Product A is name: arts deli. city: studio city. Product B is name: art's delicatessen. city: studio city. Are"
    " Product A and Product B the same?"
)
SPAGO = (
    "Product A is name: spago. city: hollywood. Product B is name: nan. city: bel air. Are Product A and Product B"
    " the same?"
)


def test_match(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "match", PAIRS, label="same", shots=0)
    assert (plan.prompts[0], plan.prompts[-1], len(plan.prompts)) == (DELI, SPAGO, 5)
    assert [q.answer for q in plan.questions] == ["Yes", "No", "Yes", "No", None]
    assert plan.labelled
    first = next(iter(plan.requests()))
    assert first == {"row": 0, "target": "match", "context": DELI, "choices": [" Yes", " No"]}


def test_match_with_examples(tmp_path: Path) -> None:
    """Only the file of examples has labels."""
    examples = PAIRS.removesuffix("5,spago,hollywood,,bel air,\n")
    table = "left_name,left_city,right_name,right_city\nspago,hollywood,,bel air\n"
    plan = plan_of(tmp_path, "match", table, examples, label="same", examples="", shots=1, noun="Place",
                   instruction="Compare places.")  # fmt: skip
    places = (text.replace("Product", "Place") for text in (DELI, SPAGO))
    assert plan.prompts == ("Compare places.\n\n" + " Yes\n\n".join(places),)
    assert not plan.labelled


def test_match_of_two_tables(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "match", "name,x\narts deli,1\n", "name,y\nzzz,2\narts delicatessen,3\n", top=1)
    assert plan.prompts == (
        "Product A is name: arts deli. Product B is name: arts delicatessen. Are Product A and Product B the same?",
    )


def test_impute(tmp_path: Path) -> None:
    """Empty cells are asked for; filled ones are examples."""
    plan = plan_of(tmp_path, "impute", CITIES, column=["city"], shots=3)
    assert [q.row for q in plan.questions] == [3, 4]
    *shots, question = plan.prompts[0].split("\n\n")
    assert question == "name: spago. phone: 310-652. What is the city?"
    assert sorted(shots) == [
        "name: arts deli. phone: 818-762. What is the city? studio city",
        "name: campanile. phone: 213-938. What is the city? los angeles",
        "name: patina. phone: 213-467. What is the city? los angeles",
    ]
    assert not plan.labelled
    assert next(iter(plan.requests())) == {
        "row": 3, "target": "city", "prompt": plan.prompts[0], "max_tokens": 10, "stop": ["\n"], "temperature": 0,
    }  # fmt: skip


def test_impute_evaluated(tmp_path: Path) -> None:
    """Rows that are examples are not predicted."""
    plan = plan_of(tmp_path, "impute", CITIES, column=["city"], evaluate=True, shots=1, show=["name"])
    assert len(plan.questions) == 4
    shot = plan.prompts[0].split("\n\n")[0]
    (row,) = {0, 1, 2} - {q.row for q in plan.questions}
    assert shot == ["name: arts deli. What is the city? studio city", "name: campanile. What is the city? los angeles",
                    "name: patina. What is the city? los angeles"][row]  # fmt: skip
    assert plan.labelled


def test_impute_a_test_split(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "impute", CITIES, column=["city"], evaluate=True, test=1, shots=2)
    (question,) = plan.questions
    assert question.answer
    assert all(
        f"{name}." not in plan.prompts[0].rpartition("\n\n")[0]
        for name in [["arts deli", "campanile", "patina"][question.row], "spago", "citrus"]
    )
    seeds = {
        plan_of(tmp_path, "impute", CITIES, column=["city"], evaluate=True, test=1, seed=seed).questions[0].row
        for seed in range(12)
    }
    assert seeds == {0, 1, 2}


def test_impute_with_nearest(tmp_path: Path) -> None:
    """Each row has other examples, and never itself."""
    plan = plan_of(tmp_path, "impute", CITIES, column=["city"], evaluate=True, shots=2, pick="nearest")
    for question, prompt in zip(plan.questions, plan.prompts, strict=True):
        shots = prompt.split("\n\n")[:-1]
        assert len(shots) == 2
        assert not any(shot.startswith(question.text) for shot in shots)
    last = plan.prompts[2].split("\n\n")[-2]
    assert last.startswith("name: campanile. phone: 213")


def test_impute_with_truth_in_another_column(tmp_path: Path) -> None:
    text = "name,city,truth\nx,,rome\ny,bern,bern\n"
    plan = plan_of(tmp_path, "impute", text, column=["city"], label="truth")
    assert [(q.row, q.answer) for q in plan.questions] == [(0, "rome")]
    assert plan.prompts == ("name: y. What is the city? bern\n\nname: x. What is the city?",)


def test_the_truth_replaces_a_filled_cell(tmp_path: Path) -> None:
    text = "name,city,truth\nx,rom,rome\ny,bern,\nz,,oslo\n"
    plan = plan_of(tmp_path, "impute", text, column=["city"], label="truth", evaluate=True, shots=0)
    assert [q.answer for q in plan.questions] == ["rome", "bern", "oslo"]
    plan = plan_of(tmp_path, "impute", text, column=["city"], label="truth", shots=2)
    assert sorted(plan.prompts[0].split("\n\n")[:2]) == [
        "name: x. What is the city? rome",
        "name: y. What is the city? bern",
    ]
    message = "line 2: the answer is 'rome'; allowed are bern, rom; correct it, or list the answers by --choice instead"
    with pytest.raises(InvalidInput, match=message):
        plan_of(tmp_path, "impute", text, column=["city"], label="truth", closed=True)


def test_nearest_shots_of_several_cells(tmp_path: Path) -> None:
    """Each prompt has as many examples as --shots, though the row's own cells are left out."""
    text = "a,b,a_l,b_l\n" + "".join(f"{x}{x}{x},{x}{y}{x},{n % 2},1\n" for n, (x, y) in enumerate(["ax", "by", "cz"]))
    given: dict[str, Any] = {"column": ["a", "b"], "label": "l", "pick": "nearest"}
    plan = plan_of(tmp_path, "detect", text, shots=4, **given)
    assert [prompt.count("Is there an error") for prompt in plan.prompts] == [5] * 6
    with pytest.raises(InvalidInput, match="--shots is 5, but there are 4 examples in other rows"):
        plan_of(tmp_path, "detect", text, shots=5, **given)


@pytest.mark.parametrize("given", [{"closed": True}, {"choice": ["los angeles", "studio city"]}])
def test_closed_choices(tmp_path: Path, given: dict[str, Any]) -> None:
    plan = plan_of(tmp_path, "impute", CITIES, column=["city"], pick="balanced", shots=2, **given)
    assert next(iter(plan.requests()))["choices"] == [" los angeles\n", " studio city\n"]


def test_detect_cells(tmp_path: Path) -> None:
    text = "name,city,city_bad\ncampanile,lxs angeles,yes\npatina,,no\n"
    plan = plan_of(tmp_path, "detect", text, column=["city", "name"], shots=0)
    assert plan.prompts[:2] == (
        "name: campanile. city: lxs angeles. city_bad: yes\n\nIs there an error in city: lxs angeles?",
        "name: campanile. city: lxs angeles. city_bad: yes\n\nIs there an error in name: campanile?",
    )
    assert [q.target for q in plan.questions[:2]] == ["city_error", "name_error"]
    alone = plan_of(
        tmp_path, "detect", text, column=["city"], label="bad", alone=True, error="a x spelling error", shots=1
    )
    asked = ["Is there a x spelling error in city: lxs angeles?", "Is there a x spelling error in city: nan?"]
    assert alone.prompts[0] in (f"{asked[0]} Yes\n\n{asked[1]}", f"{asked[1]} No\n\n{asked[0]}")


def test_detect_rows(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "detect", "age,job,bad\n300,clerk,1\n30,clerk,0.0\n", label="bad", shots=0)
    assert plan.prompts[0] == "age: 300. job: clerk\n\nIs there an error in this row?"
    assert [q.answer for q in plan.questions] == ["Yes", "No"]


@pytest.mark.parametrize(("text", "left"), [
    ("left,right\nbirth date,date of birth\n", "birth date"),
    ("left_name,left_about,right_name\nbirth,a date,date of birth\n", "name: birth. about: a date"),
])  # fmt: skip
def test_schema(tmp_path: Path, text: str, left: str) -> None:
    right = "date of birth" if text.startswith("left,") else "name: date of birth"
    plan = plan_of(tmp_path, "schema", text)
    assert plan.prompts == (f"A is {left}. B is {right}. Are A and B the same? Yes or No?",)


@pytest.mark.parametrize("text", [
    'left,right\n"",b\na,\n" ",\na,b\n', 'left_x,left_y,right_x\n"","",b\na,a,\n\u200b,,\n"",a,b\n',
])  # fmt: skip
def test_schema_without_a_side(tmp_path: Path, text: str) -> None:
    plan = plan_of(tmp_path, "schema", text)
    assert [question.row for question in plan.questions] == [3]
    assert list(plan.asked.faults.values()) == [
        f"line {line}: all cells that the question would show of one side are empty" for line in (2, 3, 4)
    ]


def test_schema_of_two_tables(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "schema", "town\nrome\n", "city\nbern\n")
    assert plan.prompts == (
        "A is column: town. values: rome. B is column: city. values: bern. Are A and B the same? Yes or No?",
    )


def test_transform(tmp_path: Path) -> None:
    """An empty cell is not asked for."""
    table, examples = "date,iso\n3 May 2021,2021-05-03\n,\n", "input,output\n1 Jan 2020,2020-01-01\n"
    plan = plan_of(tmp_path, "transform", table, examples, column=["date"], examples="", label="iso")
    assert plan.prompts == ("input:1 Jan 2020\noutput:2020-01-01\n\ninput:3 May 2021\noutput:",)
    assert [q.answer for q in plan.questions] == ["2021-05-03"]


def test_transform_by_group(tmp_path: Path) -> None:
    table = "text,kind\nab,upper\nab,double\n"
    examples = "input,output,kind\nx,X,upper\nx,xx,double\ny,Y,upper\n"
    plan = plan_of(tmp_path, "transform", table, examples, column=["text"], examples="", group="kind")
    assert plan.prompts == (
        "input:x\noutput:X\n\ninput:y\noutput:Y\n\ninput:ab\noutput:",
        "input:x\noutput:xx\n\ninput:ab\noutput:",
    )


def test_bad_rows_are_no_questions(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "match", "left_a,right_a\nx,y\nz\n")
    assert len(plan.questions) == 1
    (fault,) = plan.asked.faults.items()
    assert fault[0] == 1
    assert fault[1].startswith("line 3: has 1 cells, but the header has 2; write quotes around a cell")


BAD = PAIRS.replace("fenix at the argyle,w. hollywood,1", "fenix at the argyle,w. hollywood,maybe")
REFUSED: list[tuple[str, str, str | None, dict[str, Any], str]] = [
    ("match", BAD, None, {"label": "same"}, "t.csv, line 4: same is 'maybe'; a label must be Yes, No, true, false, 1"),
    ("match", PAIRS, None, {"label": "sam"}, "--label 'sam' is no column of"),
    ("match", "left_a,right_b\nx,y\n", None, {}, "have no common column: the first has a, the second has b"),
    ("match", "a\nx\n", "b\ny\n", {}, "have no common column: the first has a, the second has b"),
    ("match", "a\nx\n", "a\ny\n", {"label": "l"}, "--label 'l' names labels of pairs, but two tables are given"),
    ("match", PAIRS, None, {"shots": 3}, "--shots is 3, but there are 0 examples"),
    ("match", PAIRS, None, {"label": "same", "shots": 5}, "--shots is 5, but there are 4 examples"),
    ("match", PAIRS, None, {"label": "same", "test": 5}, "--test is 5, but 4 rows have known answers"),
    ("match", PAIRS, None, {"label": "left_city"}, "line 2: left_city is 'studio city'; a label must be"),
    ("match", "left_a,right_a,l\nx,y,\n", None, {"label": "l"}, "has a label in 'l'; metrics need labels"),
    ("match", "left_a,right_a,match_confidence\nx,y,\n", None, {}, "has a column 'match_confidence', which the output"),
    ("match", PAIRS, PAIRS, {"label": "same", "examples": ""}, "e.csv, line 6: there is no answer for match; give it"),
    ("match", PAIRS, "left_a\nx\n", {"label": "same", "examples": ""}, "have no common column"),
    ("match", PAIRS, "left_name,right_name,same\nx\n", {"label": "same", "examples": ""}, "line 2: has 1 cells"),
    ("match", PAIRS, PAIRS, {"examples": ""}, "--examples needs --label"),
    ("impute", CITIES, None, {"column": ["town"]}, "--column 'town' is no column of"),
    ("impute", CITIES, None, {"column": ["city"], "show": ["city"]}, "--show 'city' is the answer; leave it out"),
    ("impute", CITIES, None, {"column": ["city"], "show": ["x"]}, "--show 'x' is no column of"),
    ("impute", "city\nx\n", None, {"column": ["city"]}, "has no column beside city; a prompt must show at least one"),
    ("impute", "a,city\nx,y\n", None, {"column": ["city"]}, "column 'city' has no empty cell; --evaluate predicts"),
    ("impute", CITIES, None, {"column": ["city"], "choice": ["los angeles", "rome"]},
     "line 2: the answer is 'studio city'; allowed are los angeles, rome"),
    ("impute", "a,city\nx,y\nz,\n", None, {"column": ["city"], "closed": True}, "'city' has 1 value; it must have 2"),
    ("detect", CITIES, None, {"column": ["x"]}, "--column 'x' is no column of"),
    ("detect", CITIES, None, {"column": ["city"], "label": "bad"}, "--label 'city_bad' is no column of"),
    ("schema", "a,b\nx,y\n", None, {}, "has no descriptions of attributes: it must have the columns left and right"),
    ("transform", CITIES, "in,out\na,b\n", {"column": ["city"], "examples": ""}, "column 'input' is no column of"),
    ("transform", CITIES, "input,output\na,b\n", {"column": ["x"], "examples": ""}, "--column 'x' is no column of"),
    ("transform", "a,g\nx,1\ny,2\n", "input,output,g\na,b,1\n", {"column": ["a"], "examples": "", "group": "g"},
     "group '2' has no example"),
    ("transform", "a,l\nx,1\ny,\n", None, {"column": ["a"], "label": "l"}, "transform has no example to show; give"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "text", "more", "given", "message"), REFUSED)
def test_refused(task: str, text: str, more: str | None, given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        plan_of(tmp_path, task, text, more, **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
