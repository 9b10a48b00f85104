"""Jobs that do not go on: what changed is named, and nothing is replaced."""

import json
import re
import shutil
import subprocess
import sys
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from flexengine.config import SamplingParams
from flexengine.errors import size
from flexengine.shell.commands import run
from tests.helpers.job import Job
from tests.helpers.resuming import Watch, journal_of, state

# What does not go on.
CHANGES = [
    (["--max-tokens", "5"], "max_tokens: was 6, now 5"), (["--temperature", "1"], "temperature: was 0.0, now 1.0"),
    (["--seed", "4"], "seed: was 0, now 4"), (["--top-k", "3"], "top_k: was 0, now 3"),
    (["--top-p", "0.5"], "top_p: was 1.0, now 0.5"), (["--min-p", "0.5"], "min_p: was 0.0, now 0.5"),
    (["--repetition-penalty", "2"], "repetition_penalty: was 1.0, now 2.0"),
    (["--presence-penalty", "1"], "presence_penalty: was 0.0, now 1.0"),
    (["--frequency-penalty", "1"], "frequency_penalty: was 0.0, now 1.0"),
    (["--stop", "a", "--stop", "b"], 'stop: was [], now ["a", "b"]'), (["--n", "2"], "n: was 1, now 2"),
    (["--stop-token-id", "3", "--stop-token-id", "4"], "stop_token_ids: was [], now [3, 4]"),
    (["--logprobs", "0"], "logprobs: was null, now 0"),
    (["--dtype", "bfloat16"], 'dtype: was "float32", now "bfloat16"'),
    (["--prompt-column", "prompt_token_ids"], 'prompt_column: was null, now "prompt_token_ids"'),
]  # fmt: skip


@pytest.fixture
def any_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept stop strings, although the model has no tokenizer."""
    monkeypatch.setattr("flexengine.engine.survey.check_edits", lambda *_: None)


@pytest.mark.usefixtures("any_stops")
def test_a_changed_job_is_refused_by_name(job: Job, watch: Watch) -> None:
    assert job() == 0, job.err
    before = state(job)
    for arguments, difference in CHANGES:
        watch.forget()
        assert job(*arguments) == 2
        assert difference in job.err
        assert "give --restart (restart=True in Python) to start over" in job.err
        assert watch.ran is None
        assert state(job) == before


def test_a_changed_input_or_model_is_refused_by_name(job: Job, families: Any) -> None:
    assert job() == 0, job.err
    text = job.input.read_text()
    job.input.write_text(text.replace('"id": 6', '"id": 7'))
    assert job() == 2
    assert f"the input has other contents: was {job.input.name}, SHA-256 " in job.err
    job.input.write_text(text)
    job.family = families("qwen2")
    assert job() == 2
    assert "model file model.safetensors had" in job.err
    assert job("--restart") == 0


def test_a_job_that_cannot_fit_is_refused_before_its_model_is_hashed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.model.identity.marks", lambda *_: pytest.fail("the model was hashed"))
    assert job("--device", "cpu", "--device-mem", "4K") == 2
    refused = job.err
    monkeypatch.undo()
    found = re.search(r"set --device-mem (\S+) or more", refused)
    assert found is not None
    assert job("--device", "cpu", "--device-mem", found[1]) == 0  # the size is enough for the longest row
    assert job("--device", "cpu", "--device-mem", "4K") == 0  # a job that has ended needs no memory
    assert "finished already" in job.err


def test_renamed_input_goes_on(job: Job) -> None:
    assert job() == 0, job.err
    job.input = job.input.rename(job.folder / "other.jsonl")
    assert job() == 0, job.err
    assert "finished already" in job.err


def test_renamed_model_goes_on_under_its_first_name(job: Job, watch: Watch) -> None:
    """Batch lines contain the model's name, and an output must have only one name."""
    prompt = {"method": "POST", "url": "/v1/completions", "body": {"prompt": job.family.prompts[1], "max_tokens": 3}}
    job.write([{"custom_id": f"c{i}", **prompt} for i in range(4)])
    first = Path(shutil.copytree(job.family.directory, job.folder / "first"))
    job.family = copy(job.family)  # the session's own stays where it is
    job.family.directory = first
    watch.fail_at = 2
    assert job() == 3
    watch.forget()
    job.family.directory = first.rename(job.folder / "second")
    assert job() == 0, job.err
    assert watch.ran == [2, 3]
    assert {row["response"]["body"]["model"] for row in job.rows} == {"first"}
    written = job.output.read_bytes()
    for cut in (0, 100, len(written) - 1):
        job.output.write_bytes(written[:cut])
        assert job() == 0, job.err
        assert job.output.read_bytes() == written


def test_the_input_is_not_replaced_through_standard_input(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    text = job.input.read_bytes()
    command = [sys.executable, "-m", "flexengine.run", "-", "--model", str(job.family.directory), "--restart"]
    with job.input.open("rb") as stream:
        done = subprocess.run([*command, "--output", str(job.input)], stdin=stream, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is the input file, whose prompts would be replaced; name another output" in done.stderr
    assert job.input.read_bytes() == text


def test_an_output_that_links_to_itself_is_refused(job: Job) -> None:
    job.output.symlink_to(job.output)
    assert job() == 2
    assert f"output {job.output} cannot be reached: Symlink loop" in job.err


def test_an_output_that_is_not_ours_is_refused(job: Job, watch: Watch) -> None:
    job.output.write_text("my own words")
    assert job() == 2
    assert "exists and would be replaced; name another output, or give --restart" in job.err
    assert "(restart=True in Python) to replace it" in job.err
    assert job.output.read_text() == "my own words"
    assert watch.ran is None
    assert not journal_of(job).exists()
    assert job("--restart") == 0
    assert len(job.rows) == 8


def test_a_damaged_journal_is_used_as_far_as_it_goes(job: Job, watch: Watch, whole: Any) -> None:
    expected = whole()
    assert job() == 0, job.err
    data = journal_of(job).read_bytes()
    lines = data.splitlines(keepends=True)
    begin = sum(map(len, lines[:5]))
    journal_of(job).write_bytes(data[: begin + 30] + b"#" + data[begin + 31 :])
    assert job() == 0, job.err
    assert f"was damaged: {size(len(data) - begin)} at its end dropped, their rows are run again" in job.err
    assert watch.ran == sorted(json.loads(line[9:])["index"] for line in lines[5:10])
    assert job.output.read_bytes() == expected
    journal_of(job).write_bytes(b"#" + data[1:])
    assert job() == 0, job.err
    assert watch.ran == list(range(8))
    assert "the job starts over" in job.err
    assert job.output.read_bytes() == expected


def test_a_refused_job_leaves_no_journal(job: Job) -> None:
    assert job("--model", str(job.folder)) == 2
    assert not journal_of(job).exists()


def test_a_refused_restart_keeps_what_there_is(job: Job) -> None:
    assert job() == 0, job.err
    before = state(job)
    assert job("--restart", "--model", "/nowhere/m") == 2
    assert state(job) == before


def test_duplicate_ids_are_refused_before_a_model_is_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"custom_id": "same", "method": "POST", "url": "/v1/completions", "body": {"prompt": [3]}}
    job.write([line, *job.family.rows, line])
    monkeypatch.setattr("flexengine.shell.commands.openers.load_libraries", pytest.fail)
    assert job() == 2
    assert "'same' (lines 1 and 10)" in job.err
    assert list(job.folder.iterdir()) == [job.input]


@pytest.mark.parametrize("option", ["--restart", "--retry-errors"])
def test_nothing_is_kept_without_an_output(job: Job, option: str) -> None:
    assert run.main([str(job.input), option]) == 2
    in_python = option.removeprefix("--").replace("-", "_") + "=True in Python"
    assert f"{option} ({in_python}) needs an output (--output)" in job.capsys.readouterr().err
    assert job("--output", "/dev/null", option) == 2


def test_arguments_arrive(job: Job, watch: Watch) -> None:
    others = ("--dtype", "--prompt-column", "--stop")  # stop strings need a tokenizer
    assert job(*(x for changed, _ in CHANGES for x in changed if changed[0] not in others)) == 0, job.err
    assert watch.params == SamplingParams(
        max_tokens=5, temperature=1, seed=4, ignore_eos=True, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=2,
        presence_penalty=1, frequency_penalty=1, stop_token_ids=(3, 4), n=2, logprobs=0,
    )  # fmt: skip
