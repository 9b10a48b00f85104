"""flexengine wrangle with a random model, against transformers; and what is refused before the model is opened."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.shell.commands.main import main
from flexengine.shell.commands.wrangle import parser
from tests.apps.wrangle.helpers import CITIES, PAIRS, written
from tests.helpers.speaker import make_byte_llama
from tests.helpers.tokenizers import byte_tokenizer

NEW_LINE, MOST = "\n", 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """The directory of a checkpoint, the model of transformers, and the tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(folder)
    made = make_byte_llama(folder, len(tokenizer), seed=5, width=32, context=400, spread=0.3)
    return str(folder), made, tokenizer


def test_help_says_what_a_confidence_is() -> None:
    """A probability, as the reference computes it below, not its logarithm."""
    text = " ".join(parser().format_help().split())
    assert "confidence (the answer's probability, as its share if the possible answers are known)" in text


def reference_logprob(made: Any, ids: list[int], answer: list[int]) -> float:
    """Log probability of the answer's tokens after `ids`, in one pass."""
    with torch.inference_mode():
        logits = made(torch.tensor([ids + answer])).logits[0].double()
    logprobs = logits.log_softmax(-1)
    return float(sum(logprobs[len(ids) + i - 1, token] for i, token in enumerate(answer)))


def reference_text(made: Any, tokenizer: Any, prompt: str) -> tuple[str, float]:
    """The greedy answer up to a line end, and its log probability with the line end."""
    ids, answer = tokenizer(prompt).input_ids, list[int]()
    while len(answer) < MOST and NEW_LINE not in tokenizer.decode(answer):
        with torch.inference_mode():
            answer.append(int(made(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        if answer[-1] == made.config.eos_token_id:
            break
    text = tokenizer.decode(answer, skip_special_tokens=True).partition(NEW_LINE)[0]
    return text.strip(), reference_logprob(made, ids, answer)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("one_thread")
def test_match(model: tuple[str, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that is longer than the model's context is an error row, and one of the report."""
    folder, made, tokenizer = model
    long = f"6,{'x' * 400},a,b,c,no\n"
    table, output = written(tmp_path, "t.csv", PAIRS + long), tmp_path / "o.csv"
    words = ["wrangle", "match", table, "-o", str(output), "-m", folder, "--label", "same", "--shots", "0", "--json"]
    assert main(words) == 1
    out = capsys.readouterr().out
    rows = rows_of(output)
    true, answers = ["Yes", "No", "Yes", "No"], list[str]()
    for row in rows[:5]:
        cells = {name: value or "nan" for name, value in row.items()}
        prompt = (f"Product A is name: {cells['left_name']}. city: {cells['left_city']}. Product B is name:"
                  f" {cells['right_name']}. city: {cells['right_city']}. Are Product A and Product B the"
                  " same?")  # fmt: skip
        ids = tokenizer(prompt).input_ids
        scores = {a: reference_logprob(made, ids, tokenizer(f" {a}").input_ids[1:]) for a in ("Yes", "No")}
        answers.append(max(scores, key=scores.__getitem__))
        assert row["match_prediction"] == answers[-1]
        assert float(row["match_confidence"]) == pytest.approx(
            1 / (1 + math.exp(min(scores.values()) - max(scores.values()))), abs=1e-4
        )
    assert (rows[5]["match_prediction"], "400" in rows[5]["match_failure"]) == ("", True)
    metrics = json.loads(out)["metrics"]
    assert metrics["accuracy"] == sum(a == b for a, b in zip(true, answers, strict=False)) / 5
    before = output.read_bytes()
    assert main(words) == 1
    assert capsys.readouterr().out == out
    assert output.read_bytes() == before


@pytest.mark.usefixtures("one_thread")
def test_impute(model: tuple[str, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, made, tokenizer = model
    table, output = written(tmp_path, "t.csv", CITIES), tmp_path / "o.jsonl"
    words = ["wrangle", "impute", table, "-o", str(output), "-m", folder, "--column", "city", "--evaluate", "--shots",
             "1", "--pick", "nearest", "--max-tokens", str(MOST), "--metrics", str(tmp_path / "m.json")]  # fmt: skip
    assert main(words) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    prompts = [json.loads(line)["prompt"] for line in Path(f"{output}.rows.jsonl").read_text().splitlines()]
    names = ("campanile. phone: 213-938", "patina. phone: 213-467")
    one, other = (f"name: {name}. What is the city?" for name in names)
    assert prompts[1:3] == [f"{other} los angeles\n\n{one}", f"{one} los angeles\n\n{other}"]
    for row, prompt in zip(rows, prompts, strict=True):
        text, logprob = reference_text(made, tokenizer, prompt)
        assert row["city_prediction"] == text
        assert row["city_confidence"] == pytest.approx(math.exp(logprob), rel=1e-4)
    metrics = json.loads((tmp_path / "m.json").read_text())["metrics"]
    assert (metrics["rows"], metrics["accuracy"]) == (3, 0.0)
    out, err = capsys.readouterr()
    assert "accuracy 0.0000 (3 labelled answers)" in out
    assert "input_" not in err + Path(f"{output}.results.jsonl").read_text()  # no field of a row is one of the results


@pytest.mark.parametrize(("words", "message"), [
    (["match"], "match has 0 tables"),
    (["match", "t.csv"], "no output is given; name a file for the table with predictions, as in --output t-match.csv"),
    (["match", "t.csv", "-o", "o.parquet"], "the output has the format of the table, .csv, or is .jsonl"),
    (["match", "t.csv", "-o", "t.csv"], "table t.csv and --output are one file"),
    (["match", "t.csv", "-o", "o.csv", "--metrics", "o.csv.rows.jsonl"], "are one file"),
    (["match", "t.csv", "-o", "no/o.csv"], "there is no directory"),
    (["match", "t.csv", "-o", "o.csv", "--label", "sam"], "--label 'sam' is no column of t.csv"),
    (["match", "t.csv", "-o", "o.csv", "--metrics", "m.json"], "--metrics m.json needs labels"),
    (["match", "t.csv", "-o", "o.csv", "--noun", "X", "--closed"], "--closed has no effect on match"),
    (["match", "none.csv", "-o", "o.csv"], "none.csv cannot be read"),
    (["frob", "t.csv", "-o", "o.csv"], "task is 'frob'; choose from"),
    (["match", "t.csv", "-o", "o.csv", "--pick", "best"], "--pick is 'best'; choose from"),
    (["match", "t.csv", "-o", "o.csv", "--policy", "x.json", "--quality", "near"], "x.json"),
])  # fmt: skip
def test_refused_before_the_model_is_opened(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "t.csv", PAIRS)
    try:
        code = main(["wrangle", *words, "-m", "missing-model"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv"]


def test_options_in_a_file(tmp_path: Path) -> None:
    text = 'choice = ["a", "b"]\ncolumn = "city"\nshots = 3\n'
    args = parser().parse_args(["impute", "t.csv", "--config", written(tmp_path, "w.toml", text)])
    assert (args.choice, args.column, args.shots, args.tables) == (["a", "b"], ["city"], 3, ["t.csv"])
