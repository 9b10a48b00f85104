"""Instances made of rows: prompts, choices, labels and shots, and how bad rows and files are treated."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.apps.evaluate.instances import Built, build
from flexengine.apps.evaluate.scenario import load
from flexengine.errors import InvalidInput

QUESTIONS = [{"q": "1+1?", "options": ["2", "3"], "a": 0}, {"q": "2+2?", "options": ["5", "4", "6"], "a": 1},
             {"q": "3+3?", "options": ["6", "7"], "a": 0}]  # fmt: skip
YAML = """kind: choice
data: {file: rows.jsonl}
prompt: {template: "Q: {q}\\nA:"}
choices: {column: options}
label: {column: a, form: index}
"""


def built(folder: Path, yaml: str, *, name: str = "rows.jsonl", rows: Any = QUESTIONS) -> Built:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(text, encoding="utf-8")
    (folder / "s.yaml").write_text(yaml, encoding="utf-8")
    return build(load([str(folder / "s.yaml")])[0])


def refusal(*args: Any, **more: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        built(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_choices_of_a_column(tmp_path: Path) -> None:
    made = built(tmp_path, YAML).instances
    assert [each.context for each in made] == ["Q: 1+1?\nA:", "Q: 2+2?\nA:", "Q: 3+3?\nA:"]
    assert made[1].choices == ("5", "4", "6")
    assert [each.gold for each in made] == [0, 1, 0]
    assert [(each.number, each.line) for each in made] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("name", "mark"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_choices_of_several_columns_of_a_table(tmp_path: Path, name: str, mark: str) -> None:
    rows = "".join(mark.join(cells) + "\n" for cells in (("q", "x", "y", "key"), ("1+1?", "2", "3", "a"),
                                                         ("2+2?", "5", "4", "B")))  # fmt: skip
    yaml = YAML.replace("rows.jsonl", name).replace("column: options", "columns: [x, y]").replace(
        "column: a, form: index", "column: key, form: letter")  # fmt: skip
    made = built(tmp_path, yaml, name=name, rows=rows).instances
    assert [(each.choices, each.gold, each.line) for each in made] == [(("2", "3"), 0, 2), (("5", "4"), 1, 3)]


def test_a_list_in_a_cell_of_a_table(tmp_path: Path) -> None:
    rows = 'q,options,a\n1+1?,"[""2"", ""3""]",2\n2+2?,nothing,4\n'
    yaml = YAML.replace("rows.jsonl", "rows.csv").replace(", form: index", "")
    first, second = built(tmp_path, yaml, name="rows.csv", rows=rows).instances
    assert (first.choices, first.gold) == (("2", "3"), 0)
    assert second.error == "line 3: column options is 'nothing'; it must be a list of texts"


def test_values_of_other_types_are_written_as_in_json(tmp_path: Path) -> None:
    yaml = YAML.replace("{q}", "{n} {b}").replace("column: options", 'values: ["false", "true"]').replace(
        ", form: index", "")  # fmt: skip
    (made,) = built(tmp_path, yaml, rows=[{"n": 1.5, "b": True, "a": True}]).instances
    assert (made.context, made.gold) == ("Q: 1.5 true\nA:", 1)


def test_generation_and_its_answers(tmp_path: Path) -> None:
    yaml = "kind: generation\ndata: {file: rows.jsonl}\nprompt: {template: '{q}'}\nlabel: {column: a}\n"
    made = built(tmp_path, yaml, rows=[{"q": "x", "a": "y"}, {"q": "x", "a": ["y", "z"]}, {"q": "x", "a": 7}]).instances
    assert [each.references for each in made] == [("y",), ("y", "z"), ("7",)]


def test_lines_of_text(tmp_path: Path) -> None:
    yaml = "kind: perplexity\ndata: {file: rows.txt, limit: 2}\nprompt: {template: '{text}'}\n"
    made = built(tmp_path, yaml, name="rows.txt", rows="one two\n\nthree\nfour\n").instances
    assert [(each.context, each.line) for each in made] == [("one two", 1), ("three", 3)]


def test_shots_come_from_rows_that_are_not_evaluated(tmp_path: Path) -> None:
    yaml = YAML + "few_shot: {count: 1, seed: 3}\n"
    whole = built(tmp_path, yaml)
    (shot,) = whole.shots
    row = QUESTIONS[shot]
    before = f"Q: {row['q']}\nA: {row['options'][row['a']]}\n\n"
    others = [q for number, q in enumerate(QUESTIONS) if number != shot]
    assert [each.context for each in whole.instances] == [f"{before}Q: {q['q']}\nA:" for q in others]


def test_shots_of_another_file_with_instructions(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"q": "9-9?", "options": ["1", "0"], "a": 1}) + "\n")
    yaml = YAML.replace('A:"}', 'A:", instructions: Add., separator: " | ", delimiter: ""}')
    made = built(tmp_path, yaml + "few_shot: {count: 1, file: train.jsonl}\n")
    assert len(made.instances) == 3
    assert made.instances[0].context == "Add. | Q: 9-9?\nA:0 | Q: 1+1?\nA:"
    assert set(made.digests) == {"rows.jsonl", "train.jsonl"}


def test_bad_rows_become_instances_with_an_error(tmp_path: Path) -> None:
    bad = [{"options": ["1", "2"], "a": 0}, {"q": "x", "options": ["1"], "a": 0},
           {"q": "x", "options": ["1", "2"], "a": None}, {"q": [], "options": [], "a": 0}]  # fmt: skip
    lines = [*map(json.dumps, QUESTIONS), '{"q": ', *map(json.dumps, bad)]
    made = built(tmp_path, YAML, rows="\n".join(lines)).instances
    assert [each.error for each in made[:3]] == [None] * 3
    assert [each.error for each in made[3:]] == [
        "line 4: invalid JSON: Expecting value at character 7",
        "line 5: column q is missing; it must be text or a number",
        'line 6: the choices are ["1"]; there must be at least 2',
        "line 7: column a is null; it must be text or a number",
        "line 8: column q is an array; it must be text or a number",
    ]


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        (YAML.replace("{q}", "{question}"),
         "s.yaml, line 3: prompt.template names the column 'question', which {}/rows.jsonl does not have;"
         " choose from q, options, a"),
        (YAML.replace("column: options", "columns: [b, c]"), "line 4: choices.columns names the column 'b'"),
        (YAML.replace("column: a,", "column: gold,"), "line 5: label.column names the column 'gold'"),
        (YAML.replace("rows.jsonl", "none.jsonl"), "s.yaml, line 2: data.file: "),
        (YAML.replace("rows.jsonl", "s.yaml"), "s.yaml, line 2: data.file: "),
        (YAML + "few_shot: {count: 4}\n", "line 6: few_shot.count is 4, but {}/rows.jsonl has 3 usable rows"),
        (YAML + "few_shot: {count: 3}\n", "line 6: few_shot takes all 3 rows of {}/rows.jsonl, so none is evaluated"),
        (YAML + "perturbations: {lower_case: true, columns: [a]}\n",
         "line 6: perturbations.columns names 'a', which is not in prompt.template; choose from q"),
    ],
)  # fmt: skip
def test_files_are_refused(tmp_path: Path, yaml: str, words: str) -> None:
    assert words.replace("{}", str(tmp_path)) in refusal(tmp_path, yaml)


@pytest.mark.parametrize("label", [2, -1, "x", "0.5", True])
def test_labels_outside_the_choices_are_refused(tmp_path: Path, label: object) -> None:
    message = refusal(tmp_path, YAML, rows=[*QUESTIONS, {"q": "4+4?", "options": ["8", "9"], "a": label}])
    shown = json.dumps(label).strip('"')
    assert message == (f"{tmp_path}/rows.jsonl, line 4: the label in column a is '{shown}'; with label.form index and 2"
                       " choices it must be one of 0 to 1")  # fmt: skip


def test_a_text_that_is_no_choice_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, YAML.replace(", form: index", ""), rows=[{"q": "?", "options": ["x", "y"], "a": "z"}])
    assert "with label.form text and 2 choices it must be one of 'x', 'y'" in message


def test_a_list_of_labels_is_refused_in_a_choice_scenario(tmp_path: Path) -> None:
    message = refusal(tmp_path, YAML, rows=[*QUESTIONS, {"q": "?", "options": ["x", "y"], "a": [0, 1]}])
    assert message == (f"{tmp_path}/rows.jsonl, line 4: the label in column a is [0, 1]; a choice row has one right"
                       " answer: text or a number")  # fmt: skip


@pytest.mark.parametrize("name", ["./rows.jsonl", "linked.jsonl", "copy.jsonl"])
def test_shots_of_the_scenarios_own_file_are_not_evaluated(tmp_path: Path, name: str) -> None:
    (tmp_path / "linked.jsonl").symlink_to("rows.jsonl")
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    made = built(tmp_path, YAML + f"few_shot: {{count: 1, file: {name}}}\n")
    assert len(made.instances) == 2
    assert not {each.number for each in made.instances} & set(made.shots)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    assert "rows.jsonl has no rows" in refusal(tmp_path, YAML, rows="\n")
    yaml = YAML.replace("rows.jsonl", "rows.csv")
    assert "has several columns named 'q'" in refusal(tmp_path, yaml, name="rows.csv", rows="q,q\n1,2\n")
    assert "has no header line" in refusal(tmp_path, yaml, name="rows.csv", rows="")


def test_perturbed_copies_follow_their_original(tmp_path: Path) -> None:
    yaml = YAML.replace("Q: {q}", "Q: {q} ({tag})")
    yaml += "perturbations: {lower_case: true, contractions: true, columns: q}\n"
    row = {"q": "It is HOT", "tag": "It is ON", "options": ["Yes", "No"], "a": 0}
    made = built(tmp_path, yaml, rows=[row, "no object"]).instances
    assert [(each.variant, each.context) for each in made[:3]] == [
        ("original", "Q: It is HOT (It is ON)\nA:"),
        ("lower_case", "Q: it is hot (It is ON)\nA:"),
        ("contractions", "Q: It's HOT (It is ON)\nA:"),
    ]
    assert all(each.choices == ("Yes", "No") and each.gold == 0 for each in made[:3])
    assert [each.variant for each in made[3:]] == ["original", "lower_case", "contractions"]
    assert all(each.error and each.error.startswith("line 2: ") for each in made[3:])


def test_a_delimiter_of_tables(tmp_path: Path) -> None:
    """That of the tables of text, also of a file of shots."""
    (tmp_path / "more.csv").write_text('q;options;a\n5+5?;"[""10"", ""11""]";0\n')
    yaml = YAML.replace("rows.jsonl", "rows.jsonl, delimiter: ;") + "few_shot: {count: 1, file: more.csv}\n"
    assert built(tmp_path, yaml).instances[0].context == "Q: 5+5?\nA: 10\n\nQ: 1+1?\nA:"
    yaml = YAML.replace("rows.jsonl", "rows.csv, delimiter: ;")
    (row,) = built(tmp_path, yaml, name="rows.csv", rows='q;options;a\n1+1?;"[""2"", ""3""]";1\n').instances
    assert (row.context, row.choices, row.gold) == ("Q: 1+1?\nA:", ("2", "3"), 1)


TABS = r"give data.delimiter: '\t', or begin the file with the line sep=\t"


def test_columns_with_another_separator_are_named(tmp_path: Path) -> None:
    yaml = YAML.replace("rows.jsonl", "rows.csv")
    message = refusal(tmp_path, yaml, name="rows.csv", rows="q\toptions\ta\n1\t2\t3\n")
    assert message.endswith(f"choose from q\toptions\ta: they seem to be separated by tabs; {TABS}")
