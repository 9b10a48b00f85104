"""An evaluation with an engine that computes no model: rows of the job, figures, files, throughput and refusals."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexengine.apps.evaluate.evaluation import answers_of, evaluate, rows_of
from flexengine.apps.evaluate.instances import Built, build
from flexengine.apps.evaluate.report import Evaluation, write_files
from flexengine.apps.evaluate.runs import Run
from flexengine.apps.evaluate.scenario import load
from flexengine.apps.rows_job import RowsJob
from flexengine.engine.summary import JobCounts, Summary
from flexengine.errors import InvalidInput
from flexengine.job.journal import Journal
from tests.helpers.pages import ROOT

SCENARIOS = {
    "c": ("kind: choice\ndata: {file: c.jsonl}\nprompt: {template: '{q}'}\nchoices: {column: o}\n"
          "label: {column: a, form: index}\nmetrics: [accuracy, accuracy_unconditional, ece]\n"
          "perturbations: {lower_case: true}\n",
          [{"q": "A", "o": ["x", "yy"], "a": 0}, {"q": "B", "o": ["x", "yy"], "a": 1}, {"q": "C", "a": 0}]),
    "g": ("kind: generation\ndata: {file: g.jsonl}\nprompt: {template: '{q}'}\nlabel: {column: a}\n"
          "generation: {max_tokens: 5, stop: ['.', ';']}\nmetrics: [exact_match, generated_tokens]\n",
          [{"q": "D", "a": "d"}, {"q": "E", "a": "x"}, {"q": "long", "a": "x"}]),
    "p": ("kind: perplexity\ndata: {file: p.jsonl}\nprompt: {template: '{t}'}\n", [{"t": "abcd"}, {"t": "efgh"}]),
}  # fmt: skip


class Fake:
    """Answers rows by rule. `shift` is added to the log probability of each second choice.

    A scored choice has the log probability -1 per character and 1 token per character; a capital letter in the context
    adds 2 to the second choice. A prompt is answered by itself in lower case; the prompt "long" is too long.
    """

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift
        self.calls: list[Path] = []

    def __enter__(self) -> "Fake":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run_job(self, input: Path, output: Path, params: Any = None, *, score: bool, row_options: bool) -> Any:
        assert score
        self.calls.append(input)
        rows = [json.loads(line) for line in input.read_text().splitlines()]
        output.write_text("".join(json.dumps({**row, **self.answer(row)}) + "\n" for row in rows))
        return summary(2.0, len(rows), 0)

    def answer(self, row: dict[str, Any]) -> dict[str, Any]:
        if row.get("prompt") == "long":
            return {"error": "line 8: has 900 tokens; the model's context is 100 tokens, so shorten the row"}
        if "prompt" in row:
            return {"generated_text": row["prompt"].lower(), "prompt_tokens": 1, "completion_tokens": 2, "error": None}
        if "text" in row:
            return {"scores": [score_of(row["text"], 0)], "prompt_tokens": 1, "error": None}
        capital = 2.0 if row["context"].isupper() else 0.0
        scores = [
            score_of(choice.strip(), number * (capital + self.shift)) for number, choice in enumerate(row["choices"])
        ]
        return {"scores": scores, "prompt_tokens": len(row["context"]), "error": None}


def summary(seconds: float, rows: int, before: int) -> Summary:
    return Summary("m", "cpu", "float32", load_seconds=seconds / 4, prefill_seconds=seconds * 3 / 4,
                   job=JobCounts(rows, rows, 0, before))  # fmt: skip


def score_of(text: str, more: float) -> dict[str, Any]:
    return {"logprob": more - len(text), "tokens": len(text), "is_greedy": False}


@pytest.fixture
def scenarios(tmp_path: Path) -> list[Built]:
    for name, (yaml, rows) in SCENARIOS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [build(scenario) for scenario in load([str(tmp_path / f"{name}.yaml") for name in SCENARIOS])]


RUNS = [Run("exact"), Run("other")]


def evaluated(scenarios: list[Built], folder: Path, make: Callable[[Run], Fake] | None = None) -> Evaluation:
    return evaluate(scenarios, RUNS, folder, make or (lambda run: Fake(-9.0 if run.name == "other" else 0.0)), 50)


def test_rows_of_the_job(scenarios: list[Built]) -> None:
    rows = [row for built in scenarios for row in rows_of(built)]
    assert rows[0] == {"scenario": "c", "row": 0, "variant": "original", "context": "A", "choices": [" x", " yy"]}
    assert [row["context"] for row in rows[:5]] == ["A", "a", "B", "b", "Answer:"]  # one for all equal choices
    assert "variant" not in rows[4]
    assert rows[5] == {"scenario": "g", "row": 0, "variant": "original", "prompt": "D", "max_tokens": 5,
                       "stop": [".", ";"]}  # fmt: skip
    assert rows[8:] == [
        {"scenario": "p", "row": number, "variant": "original", "text": text}
        for number, text in enumerate(("abcd", "efgh"))
    ]


def test_figures(scenarios: list[Built], tmp_path: Path) -> None:
    done = evaluated(scenarios, tmp_path / "out")
    found = {(f.scenario, f.metric, f.variant, f.run): f for f in done.figures}
    # Row 0 wants choice 0, row 1 choice 1, and row 2 has an error. Capital letters prefer choice 1, small ones choice
    # 0; the other run always prefers choice 0.
    values = {key[2:]: f.value for key, f in found.items() if key[:2] == ("c", "accuracy")}
    assert values == {
        ("original", "exact"): pytest.approx(1 / 3), ("lower_case", "exact"): pytest.approx(1 / 3),
        ("worst", "exact"): 0.0, ("original", "other"): pytest.approx(1 / 3),
        ("lower_case", "other"): pytest.approx(1 / 3), ("worst", "other"): pytest.approx(1 / 3),
    }  # fmt: skip
    worst = found["c", "accuracy", "worst", "other"]
    assert worst.difference == pytest.approx(1 / 3)
    assert (worst.instances, worst.errors, worst.errors_counted) == (3, 1, "as 0")
    # Less the unconditional scores (-1, -2 and in the other run -1, -11), small letters leave both choices equal.
    assert found["c", "accuracy_unconditional", "lower_case", "exact"].value == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert found["c", "accuracy_unconditional", "original", "other"].value == pytest.approx((0 + 1 + 0) / 3)
    assert not [key for key in found if key[1:3] == ("ece", "worst")]
    assert found["c", "ece", "original", "exact"].errors_counted == "left out"
    assert found["g", "exact_match", "original", "exact"].value == pytest.approx(1 / 3)
    assert found["g", "generated_tokens", "original", "exact"].value == 2
    assert found["p", "word_perplexity", "original", "exact"].value == pytest.approx(2.718281828**4)
    assert all(f.difference is None for f in done.figures if f.run == "exact")
    assert all(f.low <= f.value <= f.high for f in done.figures)


def test_files(scenarios: list[Built], tmp_path: Path) -> None:
    done = evaluated(scenarios, folder := tmp_path / "out")
    write_files(done, folder)
    results = json.loads((folder / "results.json").read_text())
    assert [run["name"] for run in results["runs"]] == ["exact", "other"]
    assert [(s["name"], s["instances"], s["unusable"]) for s in results["scenarios"]] == [
        ("c", 6, 2), ("g", 3, 0), ("p", 2, 0)]  # fmt: skip
    with (folder / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [{k: "" if v is None else str(v) for k, v in each.items()} for each in results["results"]] == lines
    answers = [json.loads(line) for line in (folder / "instances.jsonl").read_text().splitlines()]
    assert len(answers) == 2 * (6 + 3 + 2)
    first, bad = answers[0], answers[4]
    assert first["logprobs"] == [-1.0, 0.0]
    assert (first["gold"], first["metrics"]["accuracy"], first["unconditional_logprobs"]) == (0, 0.0, [-1.0, -2.0])
    assert bad["error"] == "line 3: column o is null; it must be a list of texts"
    assert [each["error"] for each in answers[6:9]] == [
        None, None, "line 3: has 900 tokens; the model's context is 100 tokens, so shorten the row"]  # fmt: skip
    page = (folder / "results.html").read_text()
    assert "exact" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<h2>") == 3


def test_the_worst_of_a_row_with_an_error_in_one_variant(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        SCENARIOS["g"][0].replace("g.jsonl", "s.jsonl") + "perturbations: {lower_case: true}\n"
    )
    (tmp_path / "s.jsonl").write_text('{"q": "LONG", "a": "long"}\n{"q": "B", "a": "b"}\n')
    done = evaluated([build(load([str(tmp_path / "s.yaml")])[0])], tmp_path / "out")
    matches = {f.variant: (f.value, f.errors) for f in done.figures if (f.metric, f.run) == ("exact_match", "exact")}
    assert matches == {"original": (1.0, 0), "lower_case": (0.5, 1), "worst": (0.5, 1)}


def test_names_are_escaped_on_the_page(scenarios: list[Built], tmp_path: Path) -> None:
    done = evaluate(scenarios[2:], [Run("<script>x")], tmp_path / "out", lambda run: Fake(), 10)
    write_files(done, tmp_path / "out")
    assert "<script>" not in (tmp_path / "out" / "results.html").read_text()


def test_throughput(scenarios: list[Built], tmp_path: Path) -> None:
    evaluated(scenarios, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "throughput.json").read_text())
    # c: 4 rows of 1 + (1 + 2) tokens, and "Answer:" of 7 + (1 + 2); g: 2 of 1 + 2; p: 2 of 4.
    assert told["exact"]["useful_tokens"] == 4 * 4 + 10 + 2 * 3 + 2 * 4
    # Each choice is a sequence: c: 8 of 1 + 2, 2 of 7 + 2; g: 2 of 1 + 2; p: 2 of 4.
    assert told["exact"]["padded_tokens"] == 8 * 3 + 2 * 9 + 2 * 3 + 2 * 4
    assert told["exact"]["seconds"] == 2.0
    assert told["exact"]["useful_tok_s"] == told["exact"]["useful_tokens"] / 2
    assert told["exact"]["rows"] == 9
    assert set(told) == {"exact", "other"}


def test_throughput_of_a_continued_run_is_not_claimed(scenarios: list[Built], tmp_path: Path) -> None:
    class Continued(Fake):
        def run_job(self, *args: Any, **options: Any) -> Any:
            super().run_job(*args, **options)
            return summary(0.1, 9, 3)

    evaluated(scenarios, tmp_path / "out")
    before = (tmp_path / "out" / "throughput.json").read_bytes()
    evaluated(scenarios, tmp_path / "out", lambda run: Continued())
    assert (tmp_path / "out" / "throughput.json").read_bytes() == before
    (tmp_path / "out" / "throughput.json").unlink()
    evaluated(scenarios, tmp_path / "out", lambda run: Continued())
    exact = json.loads((tmp_path / "out" / "throughput.json").read_text())["exact"]
    assert exact["seconds"] is None
    assert exact["useful_tok_s"] is None


def test_throughput_of_other_scenarios_is_replaced(scenarios: list[Built], tmp_path: Path) -> None:
    class Continued(Fake):
        def run_job(self, *args: Any, **options: Any) -> Any:
            super().run_job(*args, **options)
            return summary(0.1, 9, 3)

    evaluated(scenarios, folder := tmp_path / "out")
    shutil.rmtree(folder / "jobs")
    evaluate(scenarios[:2], RUNS[:1], folder, lambda run: Continued(), 10)
    entries = json.loads((folder / "throughput.json").read_text())
    assert entries["exact"]["useful_tokens"] == 4 * 4 + 10 + 2 * 3
    assert entries["exact"]["seconds"] is None


def test_a_restart_deletes_the_files_of_all_runs_first(scenarios: list[Built], tmp_path: Path) -> None:
    evaluated(scenarios, folder := tmp_path / "out")
    for name in ("other", "third"):
        with Journal(folder / "jobs" / f"{name}.results.jsonl.journal") as journal:
            journal.begin({}, 0)
    (folder / "jobs" / "notes.jsonl").write_text("kept\n")
    left: list[set[str]] = []

    def restarted() -> None:
        left.append({str(path.relative_to(folder)) for path in folder.rglob("*")})

    evaluate(scenarios[:2], RUNS[:1], folder, lambda run: Fake(), 10, restarted)
    assert left == [{"jobs", "jobs/notes.jsonl"}]
    assert set(json.loads((folder / "throughput.json").read_text())) == {"exact"}
    evaluated(scenarios[:2], folder)  # the other run is added, as its old rows are gone


def test_a_restart_beside_another_process_deletes_nothing(scenarios: list[Built], tmp_path: Path) -> None:
    evaluated(scenarios, folder := tmp_path / "out")
    with Journal(folder / "jobs" / "other.results.jsonl.journal"):
        before = {path: path.stat().st_size for path in folder.rglob("*")}
        with pytest.raises(InvalidInput, match="is writing this output already"):
            evaluate(scenarios, RUNS[:1], folder, lambda run: Fake(), 10, lambda: None)
        assert {path: path.stat().st_size for path in folder.rglob("*")} == before


def test_rows_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    job = RowsJob.named(tmp_path / "rows")
    job.write([{"text": "a"}])
    before = job.rows.stat()
    job.write([{"text": "a"}])
    assert (job.rows.stat().st_ino, job.rows.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_places_of_errors_and_impossible_choices(scenarios: list[Built]) -> None:
    rows = rows_of(scenarios[0])
    results = [
        {**row, "error": None, "scores": [{"logprob": None, "tokens": 1}, {"logprob": -2.0, "tokens": 1}]}
        for row in rows
    ]
    results[2]["error"] = "row 2 (line 3): line 3: memory ran out"
    (answers,) = answers_of(scenarios[:1], results)
    assert answers[2].error == "line 2: memory ran out"
    assert answers[0].logprobs == answers[0].unconditional == (-math.inf, -2.0)


def test_changed_scenarios_are_refused_until_restart(scenarios: list[Built], tmp_path: Path) -> None:
    evaluated(scenarios, folder := tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"jobs/exact\.jsonl was written for other scenarios: .* give --restart"):
        evaluated(scenarios[:2], folder)
    fake = Fake()
    evaluate(scenarios[:2], RUNS[:1], folder, lambda run: fake, 10, restarted=lambda: None)
    assert fake.calls == [folder / "jobs" / "exact.jsonl"]


def test_engines_that_cannot_be_opened_are_refused_before_a_job(scenarios: list[Built], tmp_path: Path) -> None:
    fake = Fake()

    def make(run: Run) -> Fake:
        if run.name == "other":
            raise InvalidInput("this model cannot have these switches")
        return fake

    with pytest.raises(InvalidInput, match="these switches"):
        evaluated(scenarios, tmp_path / "out", make)
    assert fake.calls == []


def test_rows_that_all_have_errors_are_refused(scenarios: list[Built], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"t": ""}\n')
    empty = build(load([str(tmp_path / "p.yaml")])[0])
    with pytest.raises(InvalidInput, match="no row of any scenario can be run; the first: line 1: column t is empty"):
        evaluated([empty], tmp_path / "out")


def test_the_examples_can_be_built() -> None:
    files = sorted((ROOT / "examples" / "scenarios").glob("*.yaml"))
    made = [build(scenario) for scenario in load(list(map(str, files)))]
    assert {each.scenario.kind for each in made} == {"choice", "generation", "perplexity"}
    assert not [each for built in made for each in built.instances if each.error]
