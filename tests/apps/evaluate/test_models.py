"""The whole command with a tiny model, against `transformers`; interrupted and refused evaluations."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.apps.evaluate.report import RESULTS
from flexengine.config import Result
from flexengine.job import files
from flexengine.job.journal import Journal
from flexengine.shell.commands import evaluate, openers
from tests.helpers.forked import SlowCommand
from tests.helpers.speaker import make_byte_llama
from tests.helpers.tokenizers import byte_tokenizer

QUESTIONS = [{"q": f"{a} and {b}?", "options": [str(a), f"{a}{b}", "none"], "a": a % 3}
             for a, b in ((1, 2), (5, 3), (7, 7), (2, 9), (6, 4), (3, 8), (9, 1))]  # fmt: skip
SCENARIOS = {
    "choice": ("kind: choice\nprompt: {template: 'Q: {q}\\nA:'}\nchoices: {column: options}\n"
               "label: {column: a, form: index}\nfew_shot: {count: 1, seed: 2}\nperturbations: {lower_case: true}\n"
               "metrics: [accuracy, accuracy_per_token, accuracy_per_byte, accuracy_unconditional, gold_probability]\n",
               QUESTIONS),
    "generation": ("kind: generation\nprompt: {template: '{q}'}\nlabel: {column: q}\n"
                   "generation: {max_tokens: 6, stop: ['e']}\n", QUESTIONS),
    "perplexity": ("kind: perplexity\nprompt: {template: '{t}'}\n",
                   [{"t": "Some words."}, {"t": "Naïve, too."}, {"t": "x" * 700}]),
}  # fmt: skip


class Tiny:
    """A tiny model of a token per byte, with reference answers."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.tokenizer = directory, byte_tokenizer(directory)
        self.model = make_byte_llama(directory, len(self.tokenizer), seed=3, width=32, context=256, spread=0.3)

    @torch.no_grad()
    def logprob(self, context: str, continuation: str) -> float:
        begin = self.tokenizer(context).input_ids
        rest = self.tokenizer(continuation, add_special_tokens=False).input_ids
        logits = self.model(torch.tensor([begin + rest])).logits[0].double().log_softmax(-1)
        return sum(float(logits[len(begin) - 1 + i, token]) for i, token in enumerate(rest))

    @torch.no_grad()
    def text(self, prompt: str, most: int, stop: str) -> str:
        ids, text = self.tokenizer(prompt).input_ids, ""
        begin = len(ids)
        while len(ids) - begin < most and stop not in text and ids[-1] != self.tokenizer.eos_token_id:
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            text = self.tokenizer.decode(ids[begin:], skip_special_tokens=True)
        return text.split(stop)[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def given(tmp_path: Path, one_thread: None) -> list[str]:
    for name, (yaml, rows) in SCENARIOS.items():
        (tmp_path / f"{name}.yaml").write_text(f"data: {{file: {name}.jsonl}}\n{yaml}")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / f"{name}.yaml") for name in SCENARIOS]


def arguments(given: list[str], tiny: Tiny, folder: Path, *more: str) -> list[str]:
    return [*given, "-m", str(tiny.directory), "-o", str(folder), "--resamples", "50", *more]


def lines(folder: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, (folder / "instances.jsonl").read_text().splitlines())


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def test_answers_are_those_of_transformers(
    given: list[str], tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    given_runs = ("--dtype", "float32", "--run", "exact", "--run", "8bit:cache=int8,dtype=auto")
    assert evaluate.main(arguments(given, tiny, folder, *given_runs)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["scenario", "metric", "exact", "8bit", "difference"]
    assert "run exact: " in err
    assert "padded tok/s" in err
    right: dict[str, list[float]] = {}
    for line in lines(folder):
        if line["run"] != "exact":
            continue
        if line["scenario"] == "choice":
            reference = [tiny.logprob(line["context"], f" {choice}") for choice in line["choices"]]
            alone = [tiny.logprob("Answer:", f" {choice}") for choice in line["choices"]]
            assert line["logprobs"] == pytest.approx(reference, abs=1e-4)
            assert line["unconditional_logprobs"] == pytest.approx(alone, abs=1e-4)
            assert line["tokens"] == [1 + len(choice) for choice in line["choices"]]
            if line["variant"] == "original":
                gold = QUESTIONS[line["row"]]["a"]
                pairs = list(zip(reference, alone, line["choices"], strict=True))
                best = {"accuracy": reference, "accuracy_per_byte": [r / len(c) for r, _, c in pairs],
                        "accuracy_unconditional": [r - a for r, a, _ in pairs]}  # fmt: skip
                for name, scores in best.items():
                    right.setdefault(name, []).append(scores.index(max(scores)) == gold)
        elif line["scenario"] == "generation":
            assert line["text"] == tiny.text(line["context"], 6, "e")
        elif len(line["context"]) < 256:
            assert line["logprobs"] == pytest.approx([tiny.logprob("", line["context"])], abs=1e-4)
            assert line["metrics"]["bits_per_byte"][1] == len(line["context"].encode())
    assert len(right["accuracy"]) == len(QUESTIONS) - 1  # one row is the shot
    results = json.loads((folder / "results.json").read_text())
    assert [run["dtype"] for run in results["runs"]] == ["float32", "auto"]
    results = results["results"]
    for name, values in right.items():
        (value,) = [r["value"] for r in results
                    if (r["run"], r["metric"], r["variant"]) == ("exact", name, "original")]  # fmt: skip
        assert value == pytest.approx(sum(values) / len(values))
    (bits,) = [r["value"] for r in results if (r["run"], r["metric"]) == ("exact", "bits_per_byte")]
    texts = [line for line in lines(folder) if (line["run"], line["scenario"]) == ("exact", "perplexity")]
    nats = -sum(line["logprobs"][0] for line in texts)
    assert bits == pytest.approx(nats / sum(len(line["context"].encode()) for line in texts) / math.log(2))


def test_an_interrupted_evaluation_ends_with_the_same_files(
    given: list[str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    assert evaluate.main(arguments(given, tiny, whole, "-q")) == 0
    add, write_whole = Journal.add, files.write_whole
    for stop in (0, 5, 17, "results.csv"):
        folder, count = tmp_path / f"stop-{stop}", 0

        def failing_add(journal: Journal, result: Result, stop: object = stop) -> None:
            nonlocal count
            if count == stop:
                raise KeyboardInterrupt
            count += 1
            add(journal, result)

        def failing_write(path: Path, data: bytes, stop: object = stop) -> None:
            if path.name == stop:
                raise KeyboardInterrupt
            write_whole(path, data)

        monkeypatch.setattr(Journal, "add", failing_add)
        monkeypatch.setattr("flexengine.apps.evaluate.report.write_whole", failing_write)
        assert evaluate.main(arguments(given, tiny, folder, "-q")) == 130
        monkeypatch.undo()
        assert evaluate.main(arguments(given, tiny, folder, "-q")) == 0
        assert contents(folder) == contents(whole)


def test_an_interrupted_restart_is_continued_without_restart(
    given: list[str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder holds finished runs of other rows. The restart is interrupted in its first run."""
    whole, folder = tmp_path / "whole", tmp_path / "out"
    runs = ("-q", "--run", "exact", "--run", "cache=int8")
    rows = (tmp_path / "generation.jsonl").read_text()
    (tmp_path / "generation.jsonl").write_text(rows.splitlines(keepends=True)[0])
    assert evaluate.main(arguments(given, tiny, folder, *runs, "--run", "third:cache=int8")) == 0
    (tmp_path / "generation.jsonl").write_text(rows)
    assert evaluate.main(arguments(given, tiny, whole, *runs)) == 0
    assert evaluate.main(arguments(given, tiny, folder, *runs)) == 2
    assert "give --restart to start over" in capsys.readouterr().err
    add, count = Journal.add, 0

    def failing_add(journal: Journal, result: Result) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        add(journal, result)

    monkeypatch.setattr(Journal, "add", failing_add)
    assert evaluate.main(arguments(given, tiny, folder, *runs, "--restart")) == 130
    monkeypatch.undo()
    assert "run the same command without --restart to continue" in capsys.readouterr().err
    journal = folder / "jobs" / "exact.results.jsonl.journal"
    assert journal.read_bytes().count(b'"index"') == 4
    assert not (folder / "results.json").exists()
    assert evaluate.main(arguments(given, tiny, folder, *runs)) == 0
    assert contents(folder) == contents(whole)
    jobs = sorted((whole / "jobs").iterdir())
    assert [path.name for path in jobs] == sorted(path.name for path in (folder / "jobs").iterdir())


def test_an_interruption_before_the_restart_leaves_the_results(
    given: list[str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "out"
    assert evaluate.main(arguments(given[1:2], tiny, folder, "-q")) == 0
    before = contents(folder)
    monkeypatch.setattr("flexengine.apps.evaluate.evaluation.Journal", stop)
    assert evaluate.main(arguments(given[1:2], tiny, folder, "-q", "--restart")) == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_second_run_is_added_without_computing_the_first_again(
    given: list[str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    assert evaluate.main(arguments(given, tiny, folder, "-q")) == 0
    added = []
    add = Journal.add
    monkeypatch.setattr(Journal, "add", lambda journal, result: (added.append(journal.path.name), add(journal, result)))
    assert evaluate.main(arguments(given, tiny, folder, "-q", "--run", "exact", "--run", "cache=int8")) == 0
    assert set(added) == {"cache_int8.results.jsonl.journal"}


def test_rows_with_errors_give_code_1(given: list[str], tiny: Tiny, tmp_path: Path) -> None:
    with (tmp_path / "generation.jsonl").open("a") as file:
        file.write(json.dumps({"q": "x" * 300}) + "\n")
    assert evaluate.main(arguments(given[1:2], tiny, tmp_path / "out", "-q")) == 1
    (bad,) = [line for line in lines(tmp_path / "out") if line["error"] is not None]
    assert bad["error"].startswith("line 8: ")
    assert "256" in bad["error"]


@pytest.mark.slow
def test_an_evaluation_killed_ten_times_ends_with_the_same_files(given: list[str], tiny: Tiny, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "out"
    generation = tmp_path / "generation.jsonl"
    generation.write_text(generation.read_text() * 12)  # rows enough for ten kills
    assert evaluate.main(arguments(given, tiny, whole, "-q")) == 0
    journal = "jobs/exact.results.jsonl.journal"
    words = ["evaluate", *arguments(given, tiny, folder, "-q")]
    command, rng, done = SlowCommand(words, 0.05, tmp_path, folder / journal), random.Random(1), [0]
    for _ in range(10):
        command.start_and_kill(rng, rows=3)
        done.append(command.rows_done())
    rows = (whole / journal).read_bytes().count(b'"index"')
    assert done[-1] < rows
    assert len(set(done)) > 5
    assert not (folder / "results.json").exists()
    assert evaluate.main(arguments(given, tiny, folder, "-q")) == 0
    assert command.rows_done() == rows
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--run", "4bit"], "--run is '4bit'; it must be exact, or NAME:OPTION=VALUE"),
        (["--run", "a:dtype=float8"], "--run a: dtype is 'float8'; it must be one of auto, float32"),
        (["--resamples", "0"], "--resamples is 0; it must be at least 1"),
        (["-o", "choice.yaml"], "--output choice.yaml is a file; name a folder"),
    ],
)
def test_refused_before_a_model_is_opened(
    given: list[str], tmp_path: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openers, "load_libraries", lambda: pytest.fail("a model is opened"))
    assert evaluate.main([*given, "-o", "out", *more]) == 2
    assert words in capsys.readouterr().err


def test_results_do_not_replace_the_scenarios_own_rows(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(given[1]).read_text().replace("generation.jsonl", "instances.jsonl")
    Path(given[1]).write_text(text)
    (tmp_path / "generation.jsonl").rename(tmp_path / "instances.jsonl")
    assert evaluate.main([given[1], "-o", str(tmp_path)]) == 2
    assert "are one file" in capsys.readouterr().err


def test_rows_in_the_folder_of_jobs_are_refused(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "generation.jsonl").rename(tmp_path / "jobs" / "generation.jsonl")
    Path(given[1]).write_text(Path(given[1]).read_text().replace("generation.jsonl", "jobs/generation.jsonl"))
    assert evaluate.main([given[1], "-o", str(tmp_path)]) == 2
    assert "whose files this command replaces; name another --output" in capsys.readouterr().err


def test_scenarios_and_output_must_be_given(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, what in ((["-o", "out"], "scenario"), (given, "--output")):
        assert evaluate.main(words) == 2
        assert f"no {what} is given; write flexengine evaluate SCENARIO.yaml --output DIR" in capsys.readouterr().err
