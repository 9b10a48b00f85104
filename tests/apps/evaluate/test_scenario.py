"""Scenario files: what they give, and every refusal with its file and line."""

from pathlib import Path

import pytest

from flexengine.apps.evaluate.scenario import Data, FewShot, Label, load
from flexengine.errors import InvalidInput

CHOICE = """kind: choice
data: {file: rows.jsonl}
prompt:
  template: "{question}"
choices: {values: ["yes", "no"]}
label: {column: answer}
"""


def load_text(folder: Path, text: str, name: str = "s.yaml"):
    (folder / name).write_text(text, encoding="utf-8")
    return load([str(folder / name)])[0]


def test_fields(tmp_path: Path) -> None:
    scenario = load_text(tmp_path, CHOICE + "few_shot: {count: 3, seed: 7, balanced: false}\nmetrics: accuracy\n")
    assert scenario.name == "s"
    assert scenario.data == Data("rows.jsonl")
    assert scenario.prompt.template == "{question}"
    assert scenario.choices.values == ("yes", "no")
    assert scenario.label == Label("answer", "text")
    assert scenario.few_shot == FewShot(3, None, 7, False)
    assert scenario.metrics == ("accuracy",)
    assert scenario.path("rows.jsonl") == tmp_path / "rows.jsonl"


def test_an_escape_outside_double_quotes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flexengine")
    text = CHOICE.replace('"{question}"', r"'Q: {question}\nA:'").replace("kind: choice", "kind: generation")
    text = text.replace('choices: {values: ["yes", "no"]}', r"generation: {stop: [x, \n]}")
    scenario = load_text(tmp_path, text)
    assert (scenario.prompt.template, scenario.generation.stop) == (r"Q: {question}\nA:", ("x", r"\n"))
    assert f"{tmp_path / 's.yaml'}, line 4: prompt.template has \\n, two characters that stay" in caplog.text
    assert "line 5: generation.stop has \\n, two" in caplog.text
    caplog.clear()
    for quoted in ('"{question}\\nA:"', "|\n    {question}\n    A\\n"):
        load_text(tmp_path, CHOICE.replace('"{question}"', quoted))
    assert caplog.text == ""


def test_metrics_that_are_chosen_if_none_is_named(tmp_path: Path) -> None:
    assert load_text(tmp_path, CHOICE).metrics == ("accuracy", "accuracy_per_byte", "gold_probability", "ece")
    assert load_text(tmp_path, CHOICE.replace("label: {column: answer}\n", "")).metrics == ("confidence",)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("prompt:", "promt:", 3, "there is no field 'promt'; allowed are kind, data, prompt"),
        ("template:", "templates:", 4, "there is no field 'prompt.templates'; allowed are template, instructions"),
        ("label: {column: answer}", "label: {column: answer, colour: red}", 6, "'label.colour'; allowed are column"),
        ("label:", "kind: choice\nlabel:", 6, "kind is given twice"),
        ("kind: choice", "kind: choices", 1, "kind is 'choices'; it must be one of choice, generation, perplexity"),
        ("data: {file: rows.jsonl}", "data: rows.jsonl", 2, "data must hold fields: file, limit"),
        ("data: {file: rows.jsonl}", "data: {limit: 3}", 2, "data.file is missing"),
        ("data: {file: rows.jsonl}", "data: {file: a.csv, limit: 0}", 2, "data.limit is 0; it must be a whole number"),
        ("data: {file: rows.jsonl}", "data: {file: a.csv, limit: two}", 2, "limit is 'two'; it must be a whole number"),
        ("rows.jsonl", "a.csv, delimiter: ;;", 2, "data.delimiter: the delimiter is ';;'; it must be one character"),
        ("rows.jsonl", "a.jsonl, delimiter: ;", 2, "data.delimiter is for .csv and .tsv files, and no file is one"),
        ('["yes", "no"]', "[yes, no]", 5, "choices.values[0] is true; it must be text; put quotes"),
        ('["yes", "no"]', '["yes"]', 5, "choices.values has 1 entry; give at least 2"),
        ('["yes", "no"]', '["yes", "yes"]', 5, "holds a text twice"),
        ("choices: {values:", "choices: {column: c, values:", 5, "has values, column of values, column and columns"),
        ('choices: {values: ["yes", "no"]}\n', "", 1, "choices has none of values, column and columns"),
        ('"{question}"', '"question"', 4, "prompt.template has no column in braces"),
        ('"{question}"', '"{question"', 4, "a brace is alone"),
        ('"{question}"', '"{}"', 4, "{} must have a column's name in it"),
        ("answer}", "answer, form: number}", 6, "it must be text or index or letter"),
        ("label: {column: answer}", "few_shot: {count: 1}", 6, "few_shot shows rows with their answers; give label"),
        ("label:", "few_shot: {count: 0}\nlabel:", 6, "few_shot.count is 0; it must be a whole number of at least 1"),
        ("label:", "generation: {max_tokens: 3}\nlabel:", 6, "generation has no effect in a scenario of kind choice"),
        ("label:", "metrics: [accuracy, f1]\nlabel:", 6, "metrics holds 'f1'; for the kind choice choose from acc"),
        ("label: {column: answer}", "metrics: [ece]", 6, "the metric ece needs labels; give label with the column"),
        ("label:", "metrics: [ece, ece]\nlabel:", 6, "metrics names a metric twice"),
        ("label:", "perturbations: {typos: 2}\nlabel:", 6, "typos is 2; it must be a probability above 0"),
        ("label:", "perturbations: {seed: 2}\nlabel:", 6, "none is on; set typos"),
        ('["yes", "no"]', '["", "no"]', 5, "choices.values holds an empty text, which no token stands for; remove it"),
        ("label:", "perturbations: {extra_space: 1000000000}\nlabel:", 6, "extra_space is 1000000000; it must be"),
        ("label:", "---\nlabel:", 6, "invalid YAML: expected a single document in the stream but found another doc"),
        ("label:", "metrics: []\nlabel:", 6, "metrics is an empty list; name at least one, or remove it"),
        ("label:", "perturbations: {typos: 0.1, columns: []}\nlabel:", 6, "perturbations.columns is an empty list"),
        ("label:", f"perturbations: {{typos: {10**400}}}\nlabel:", 6, "...; it must be a probability"),
        ("label:", f"few_shot: {{count: {hex(-(16**6000))}}}\nlabel:", 6, "few_shot.count is a number too long to pr"),
        ("choice\ndata", "{a: b}\ndata", 1, "kind holds fields; it must be one of choice"),
        ('["yes", "no"]', "[a, [b]]", 5, "choices.values holds a list in a list; it must be a list of texts"),
        ('["yes", "no"]', "&a [b, *a]", 5, "choices.values holds a list in a list"),
        ("label:", "[a, b]: c\nlabel:", 6, "a field's name is a list; allowed are kind, data"),
        ("label:", 'name: ""\nname2: x\nlabel:', 7, "there is no field 'name2'"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    assert CHOICE.count(old) == 1 or old == "label:"
    with pytest.raises(InvalidInput) as caught:
        load_text(tmp_path, CHOICE.replace(old, new))
    assert str(caught.value).startswith(f"{tmp_path / 's.yaml'}, line {line}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "line 1: the file must hold the fields of one scenario"),
        ("", "line 1: the file must hold the fields"),
        ("kind: [\n", "line 2: invalid YAML"),
        ("kind: perplexity\ndata: {file: a}\nprompt: {template: '{text}', delimiter: ' '}", "line 3: prompt.delimiter"),
        ("kind: perplexity\ndata: {file: a}\nlabel: {column: a}\nprompt: {template: '{t}'}", "line 3: label has no ef"),
        ("kind: generation\ndata: {file: a}\nprompt: {template: '{t}'}\nmetrics: [f1]", "line 4: the metric f1 needs"),
        ("kind: generation\ndata: {file: a}\nprompt: {template: '{t}'}\ngeneration: {max_tokens: 0}", "line 4: gene"),
    ],
)  # fmt: skip
def test_refused_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_text(tmp_path, text)
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.yaml cannot be read: No such file"):
        load([str(tmp_path / "none.yaml")])
    (tmp_path / "latin.yaml").write_bytes(b"kind: caf\xe9\n")
    with pytest.raises(InvalidInput, match="is not UTF-8 text: byte 9 is wrong"):
        load([str(tmp_path / "latin.yaml")])


def test_two_scenarios_of_one_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "s.yaml").write_text(CHOICE)
    with pytest.raises(InvalidInput, match=r"b/s\.yaml, line 1: the name 's' is that of .*a/s\.yaml, too"):
        load([str(tmp_path / "a" / "s.yaml"), str(tmp_path / "b" / "s.yaml")])


def test_aliases_that_would_grow_are_refused_at_once(tmp_path: Path) -> None:
    """A list of 2**40 texts in 40 lines must not be built, also not for the message."""
    levels = "".join(f"  - &l{i} [*l{i - 1}, *l{i - 1}]\n" for i in range(1, 41))
    with pytest.raises(InvalidInput, match="metrics holds a list in a list"):
        load_text(tmp_path, CHOICE + "metrics:\n  - &l0 [a, b]\n" + levels)
