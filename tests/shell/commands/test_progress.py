"""What a run shows on standard error: the lines of a first run, with -q, with -v, and on a terminal."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexengine.activity import activity
from flexengine.shell.commands import messages, run
from flexengine.shell.commands.messages import detail_lines, displayed, prediction_words
from tests.helpers.families import NEW
from tests.helpers.job import Job
from tests.helpers.terminal import on_terminal, shown
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    yield
    messages.set_verbosity(messages.NORMAL)


def test_a_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With an empty cache, in a pipe: a line before each step that is done once, then the plan and the result."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLEXENGINE_KERNELS", "reference")
    model, source = tiny_gguf(tmp_path / "m.gguf"), tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [3, 4, 5]}\n{"prompt_token_ids": [99999]}\n')
    words = [str(source), "--model", str(model), "--max-tokens", "2", "--device", "cpu", "--weights", "int8",
             "--output", str(tmp_path / "out.jsonl")]  # fmt: skip
    assert run.main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    wanted = [
        r"lossy: weights int8; flexengine quality shows what that costs",
        r"preparing m\.gguf, once for this file \(\S+ kB beside the weights in it\)",
        r"converting: done in (\d:\d\d|\d\.\d\d s)",
        r"plan: weights \S+ kB \(RAM\); KV cache \S+ kB \(RAM\); block of 1 sequence \(1 gpu_batch\); bottleneck: .*",
        r"encoding \d+ matrices, once for this model and format \(\S+ kB become \S+ kB\)",
        r"encoding: done in (\d:\d\d|\d\.\d\d s)",
        r"row 1: .*99999.*",
        r"1 row done, 1 failed; 3 prompt and 2 generated tokens in \S+ s: \S+ tok/s; results are in .*out\.jsonl",
    ]  # fmt: skip
    assert all(line.startswith("flexengine: ") for line in lines)
    told = [line.removeprefix("flexengine: ") for line in lines if "no tokenizer" not in line]
    assert len(told) == len(wanted), told
    for line, want in zip(told, wanted, strict=True):
        assert re.fullmatch(want, line), (want, line)


def test_one_row_has_no_rate() -> None:
    counts = {"failed": 0, "sweeps": 3, "total_seconds": 197.0, "scored_tokens": 90, "computed_prompt_tokens": 80}
    counts |= {"generated_tokens": 0, "prompt_tokens": 80}
    said = "row done, 0 failed; 90 tokens scored, 80 computed in 0:03:17"
    assert messages.summary_line(counts | {"rows": 1}) == f"1 {said}"
    assert messages.summary_line(counts | {"rows": 4, "total_seconds": 2.0}).endswith("in 2.00 s: 2.00 rows/s")
    assert messages.summary_line(counts | {"rows": 1, "generated_tokens": 1}).endswith("1 generated tokens in 0:03:17")


def test_quiet(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but errors: of rows, and of the job."""
    assert job("-q", "--device", "cpu", "--weights", "int8") == 0
    assert job.err == ""
    job.write([*job.family.rows, {"prompt_token_ids": []}])
    assert job("-q", "--device", "cpu", "--restart") == 1
    (line,) = job.err.splitlines()
    assert line.startswith("flexengine: row 8: line 9: ")
    assert job("-q", "--device", "cpu", "--model", str(job.folder / "none"), "--restart") == 2
    assert job.err.count("\n") == 1


def test_verbose(job: Job) -> None:
    policy = job.folder / "policy.json"
    policy.write_text('{"gpu_batch_size": 4, "num_gpu_batches": 2, "weights": [0, 0, 1], "cache": [0, 1, 0]}')
    machine = ("--device", "sim", "--offload-dir", str(job.folder / "off"))
    assert job("-v", "--policy", str(policy), *machine, "--json") == 0
    summary = json.loads(job.out)
    told = [line.removeprefix("flexengine: ") for line in job.err.splitlines()]
    starts = ("time: ", "lanes were busy: ", "moved: disk read ", "most memory: device ")
    assert all(any(line.startswith(start) for line in told) for start in starts)
    *told, took = told
    assert told[-len(starts) :] == detail_lines(summary)
    assert "loading" not in "".join(told)
    assert re.fullmatch(r"the command took \S+ s", took)
    assert any(re.fullmatch(r"tokenizing all prompts, .*: done in \S+ s", line) for line in told)


def test_a_refusal_is_one_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing remains of bars on a terminal, and there is none of a job that does not run."""
    monkeypatch.setattr("flexengine.activity.display.is_terminal", lambda: True)
    assert job("--device-mem", "1k", "--device", "cpu") == 2
    frames, lines = shown(job.err)
    (line,) = lines
    assert line.startswith("flexengine: device")
    names = {frame.split()[0] for frame in frames} - {"flexengine:"}
    assert "opening" in names
    assert "generating" not in names


@pytest.mark.slow
def test_a_run_on_a_terminal(job: Job) -> None:
    screen = on_terminal(["-m", "flexengine.run", *job.arguments("--device", "cpu")], 60)
    assert screen.code == 0
    assert [line.partition(":")[0] for line in screen.lines] == ["flexengine"] * 2
    assert screen.lines[0].startswith("flexengine: plan: ")
    assert f"8 rows done, 0 failed; 150 prompt and {8 * NEW} generated tokens" in screen.lines[1]
    bars = [frame.rstrip() for frame in screen.frames if not frame.startswith("flexengine: ")]
    assert {bar.split()[0] for bar in bars} >= {"starting", "opening", "hashing", "tokenizing", "generating"}
    assert max(map(len, bars)) < 60
    assert sum(bar.startswith("starting") for bar in bars) > 1  # the time goes on while libraries are imported


def summary(predicted: float, took: float, lanes: dict[str, tuple[float, float]], **other: Any) -> dict[str, Any]:
    return {"plan": {"measured": True, "predicted_seconds": predicted, "measured_seconds": took,
                     "lanes": {lane: {"predicted": x, "measured": y} for lane, (x, y) in lanes.items()}},
            "sweeps": 100, "total_seconds": took, "device": "cpu"} | other  # fmt: skip


def test_a_prediction_in_words() -> None:
    lanes = {"device": (2.0, 2.5), "disk_read": (1.0, 10.5)}
    assert prediction_words(summary(2.3, 11.0, lanes)) == (
        "took 11.0 s, predicted 2.30 s: the largest difference is in disk read, which took 10.5 s, predicted 1.00 s"
    )
    faster = {"device": (20.0, 12.0), "disk_read": (1.0, 1.5)}
    assert prediction_words(summary(21.0, 12.0, faster)) == (
        "took 12.0 s, predicted 21.0 s: the largest difference is in compute, which took 12.0 s, predicted 20.0 s"
    )
    assert prediction_words(summary(10.0, 11.0, lanes)) == "took 11.0 s, predicted 10.0 s"
    assert prediction_words(summary(20.0, 11.0, {"device": (9.0, 9.5)})) == "took 11.0 s, predicted 20.0 s"


def test_no_words_about_short_or_unmeasured_jobs() -> None:
    lanes = {"device": (2.0, 9.0)}
    assert prediction_words(summary(2.0, 9.0, lanes)) == ""
    assert prediction_words(summary(2.0, 90.0, lanes, sweeps=3)) == ""
    assert prediction_words(summary(2.0, 90.0, lanes, plan=None)) == ""
    unmeasured = summary(2.0, 90.0, lanes)
    unmeasured["plan"]["measured"] = False
    assert prediction_words(unmeasured) == ""


def test_a_message_is_above_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without display, a message would be printed at the end of the bar's line."""
    monkeypatch.setattr("flexengine.activity.display.is_terminal", lambda: True)
    with displayed(), activity("planning", "planning", 4) as work:
        work.update(2)
        messages.say("news")
    frames, lines = shown(capsys.readouterr().err)
    assert lines == ["flexengine: news"]
    assert any(frame.startswith("planning") for frame in frames)


def test_messages_of_threads_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Threads without a listener write to the logger."""
    log = logging.getLogger("flexengine.system.read_retries")
    with displayed():
        log.warning("%s failed", "a read")
        log.info("too much")
    assert capsys.readouterr().err == "flexengine: a read failed\n"
    assert not logging.getLogger("flexengine").handlers
    messages.set_verbosity(messages.QUIET)
    with displayed():
        log.warning("a read failed")
    assert capsys.readouterr().err == ""
