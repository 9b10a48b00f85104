"""Engine.run_job: the command's job from Python. Either continues what the other began, to the same bytes."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, InvalidInput, OutOfMemory, Policy, Progress, SamplingParams, Summary
from flexengine.engine import summary
from flexengine.engine.summary import JobCounts, JobRows
from tests.helpers.families import NEW
from tests.helpers.forked import Forked
from tests.helpers.job import Job
from tests.helpers.listening import Heard
from tests.helpers.resuming import ROOT, SAMPLED, Watch, journal_of, rows_done, state

PARAMS = SamplingParams(NEW, ignore_eos=True)
RANDOM = SamplingParams(NEW, temperature=1.2, n=2, top_k=50, ignore_eos=True)  # as SAMPLED


def opened(job: Job, **options: Any) -> Engine:
    return Engine(job.family.directory, **options)


def run(job: Job, params: SamplingParams = PARAMS, **more: Any) -> Summary:
    with opened(job) as engine:
        return engine.run_job(job.input, job.output, params, **more)


def test_the_same_bytes_as_the_command(job: Job, whole: Callable[..., bytes]) -> None:
    expected = whole()
    summary = run(job)
    assert job.output.read_bytes() == expected
    assert summary.job == JobCounts(rows=8, done=8, failed=0, done_before=0)
    lengths = [1 + 2 * i for i in (0, 1, 1, 3, 4, 1, 6, 0)]
    assert (summary.rows, summary.failed, summary.generated_tokens) == (8, 0, sum(lengths))
    prompts = [json.loads(line)["prompt_token_ids"] for line in job.input.read_text().splitlines()]
    assert summary.prompt_tokens == sum(map(len, prompts))
    before = state(job)
    again = run(job)
    assert again.job == JobCounts(rows=8, done=8, failed=0, done_before=8)
    assert (again.rows, again.sweeps, again.model) == (0, 0, summary.model)
    assert job() == 0
    assert "finished already: 8 rows" in job.err
    assert state(job) == before


def test_the_json_of_a_summary(job: Job) -> None:
    """Python's summary and --json have the same keys; those are pinned."""
    made = run(job).to_json()
    assert job("--json", "--restart") == 0
    printed = json.loads(job.out.splitlines()[-1])
    assert list(made) == list(printed) == [
        "model", "device", "dtype", "rows", "failed", "prompt_tokens", "computed_prompt_tokens", "generated_tokens",
        "scored_tokens", "sweeps", "load_seconds", "prefill_seconds", "decode_seconds", "total_seconds",
        "generated_tok_s", "bytes", "busy", "replanned",
        "peak_bytes", "lossy", "verified", "policy", "plan", "job",
    ]  # fmt: skip
    for name in ("model", "device", "rows", "failed", "generated_tokens", "sweeps", "lossy", "policy", "job"):
        assert made[name] == printed[name], name
    assert list(made["plan"]) == list(printed["plan"]) == [
        "hardware", "measured", "predicted_seconds", "measured_seconds", "error", "lanes"
    ]  # fmt: skip
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(("after", "params", "sampling"), [(0, PARAMS, ()), (3, RANDOM, SAMPLED), (7, PARAMS, ())])
@pytest.mark.parametrize("begins", ["the command", "Python"])
def test_one_goes_on_with_the_others_job(
    job: Job, watch: Watch, whole: Any, begins: str, after: int, params: SamplingParams, sampling: tuple[str, ...]
) -> None:
    expected = whole(*sampling)
    watch.fail_at = after
    if begins == "Python":
        with pytest.raises(OSError, match="Input/output error"):
            run(job, params)
    else:
        assert job(*sampling) == 3
    done = rows_done(job)
    assert len(done) == after
    assert not job.output.exists()
    watch.forget()
    if begins == "Python":
        assert job(*sampling) == 0, job.err
    else:
        assert run(job, params).job == JobCounts(rows=8, done=8, failed=0, done_before=after)
    assert watch.ran == [i for i in range(8) if i not in done]
    assert job.output.read_bytes() == expected


@pytest.mark.usefixtures("sigint")
def test_ctrl_c(job: Job, whole: Any) -> None:
    """The journal can be continued, by the same engine, too, and the engine's own settings are as before."""
    expected = whole()
    seen: list[int] = []

    def on_sweep(progress: Progress) -> None:
        seen.append(progress.rows)
        if progress.rows > 2 and len(set(seen)) < 5:
            signal.raise_signal(signal.SIGINT)

    policy = Policy(gpu_batch_size=2, num_gpu_batches=1, prefill_tokens=64)
    with opened(job, policy=policy, device="cpu", on_sweep=on_sweep) as engine:
        for _ in range(9):
            try:
                summary = engine.run_job(job.input, job.output, PARAMS)
                break
            except KeyboardInterrupt:
                assert not job.output.exists()
                assert engine.on_sweep is on_sweep
                assert engine.planner.policy == policy
                engine.generate({"prompt_token_ids": [5], "max_tokens": 1})  # the engine is free
        assert summary.job is not None
        assert summary.job.done_before > 0
        assert len(seen) > 2
    assert job.output.read_bytes() == expected


def test_all_work_is_reported(job: Job) -> None:
    """Reading the input and the journal, too, which come before the engine computes."""
    heard = Heard()
    with opened(job, device="cpu", progress=heard) as engine:
        job.input.write_text("[" + ", ".join(job.input.read_text().splitlines()) + "]")
        engine.run_job(job.input, job.output, PARAMS)
    assert {"reading", "tokenizing", "writing"} <= {record.name for record in heard}


def test_switches_of_a_job_without_rows_left(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's choice of a job is not taken over if only the output file is missing."""
    allow = ["int8-weights"]
    with monkeypatch.context() as patch, opened(job, device="cpu", allow=allow) as engine:
        patch.setattr("flexengine.job.resume.JournalJob.end", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.run_job(job.input, job.output, PARAMS)
    with opened(job, device="cpu", allow=allow) as engine:
        choices = engine.planner.choices
        summary = engine.run_job(job.input, job.output, PARAMS)
        assert summary.job is not None
        assert (summary.rows, summary.job.done) == (0, 8)
        assert engine.planner.choices == choices
        assert choices


def test_choices_of_a_job_are_not_those_of_the_next(job: Job) -> None:
    """A resumed job cuts its prompts as it began; a job after it is planned as before it."""
    with opened(job, policy=Policy(4, 1, prefill_tokens=16), device="cpu") as engine:
        engine.on_sweep = lambda progress: 1 / 0 if progress.rows else None  # type: ignore[assignment,return-value]
        with pytest.raises(ZeroDivisionError):
            engine.run_job(job.input, job.output, PARAMS)
    own = Policy(4, 1, prefill_tokens=64)
    with opened(job, policy=own, device="cpu") as engine:
        engine.listener = heard = Heard()
        summary = engine.run_job(job.input, job.output, PARAMS)
        assert summary.policy is not None
        assert summary.policy.prefill_tokens == 16
        assert "prefill_tokens stays 16, with which the job began" in heard.messages
        engine.generate(job.family.rows, PARAMS)
        assert engine.summary.policy == own


def test_limit_restart_and_errors(job: Job, whole: Any) -> None:
    job.write([*job.family.rows[:3], "nonsense"])
    assert run(job, limit=2).job == JobCounts(rows=2, done=2, failed=0, done_before=0)
    assert len(job.rows) == 2
    assert run(job).job == JobCounts(rows=4, done=3, failed=1, done_before=2)
    assert run(job, retry_errors=True).job == JobCounts(rows=4, done=3, failed=1, done_before=3)
    with pytest.raises(InvalidInput, match="max_tokens: was 6, now 5"):
        run(job, SamplingParams(5, ignore_eos=True))
    summary = run(job, SamplingParams(5, ignore_eos=True), restart=True)
    assert (summary.rows, summary.failed) == (3, 1)
    assert all(set(row) == {"prompt_token_ids", "index", "generated_text", "token_ids", "finish_reason",
                            "prompt_tokens", "completion_tokens", "error"} for row in job.rows[:3])  # fmt: skip


def test_a_column_and_a_pipe(job: Job) -> None:
    job.write([{"prompt_token_ids": p, "prompt": "data"} for p in job.family.prompts])
    summary = run(job, prompt_column="prompt_token_ids")
    assert summary.failed == 0
    assert [row["token_ids"] for row in job.rows] == job.family.expected
    with opened(job) as engine:
        assert engine.run_job(job.input, os.devnull, PARAMS, prompt_column="prompt_token_ids").rows == 8
        with pytest.raises(InvalidInput, match=r"restart=True needs an output"):
            engine.run_job(job.input, os.devnull, PARAMS, restart=True)


@pytest.mark.parametrize(("more", "message"), [
    ({"input": 3}, "input is 3; it must be the name of a file"), ({"output": ""}, "output is ''"),
    ({"output": None}, "it must be the name of a file"), ({"params": {"n": 2}}, "it must be SamplingParams, or None"),
    ({"prompt_column": 4}, "prompt_column is 4"), ({"limit": 0}, "limit is 0; it must be a whole number of at least 1"),
    ({"limit": True}, "it must be a whole number of at least 1"), ({"restart": 1}, "restart is 1; it must be True or"),
    ({"retry_errors": "no"}, "retry_errors is 'no'"), ({"input": "none.jsonl"}, "input none.jsonl cannot be read"),
    ({"output": "trace.json"}, "trace and output are one file"),
    ({"output": "in.jsonl"}, "output in.jsonl is the input file, whose prompts would be replaced"),
    ({"output": "x" * 300}, "a file's name has at most 255"),
    ({"output": "a\0"}, "it must be the name of a file"), ({"input": Path("a\0")}, "it must be the name of a file"),
])  # fmt: skip
def test_refused(job: Job, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], message: str) -> None:
    monkeypatch.chdir(job.folder)
    with opened(job, trace="trace.json") as engine:
        before = state(job)
        with pytest.raises(InvalidInput) as caught:
            engine.run_job(**{"input": job.input, "output": job.output, "params": PARAMS, **more})
        assert message in str(caught.value)
        assert state(job) == before


def test_a_link_to_itself(job: Job) -> None:
    (loop := job.folder / "loop").symlink_to("loop")
    with opened(job) as engine, pytest.raises(InvalidInput, match="loop cannot be reached"):
        engine.run_job(job.input, loop)


def test_standard_input_is_not_replaced(job: Job) -> None:
    """Also if it is a file that was redirected."""
    before, own = job.input.read_bytes(), os.dup(0)
    with opened(job) as engine, job.input.open("rb") as file:
        os.dup2(file.fileno(), 0)
        try:
            with pytest.raises(InvalidInput, match="is the input file, whose prompts would be replaced"):
                engine.run_job("-", job.input, restart=True)
        finally:
            os.dup2(own, 0)
            os.close(own)
    assert job.input.read_bytes() == before


def test_refused_while_another_job_runs(job: Job) -> None:
    with opened(job) as engine:
        stream = engine.stream(job.family.rows, PARAMS)
        first = next(stream)
        with pytest.raises(InvalidInput, match="generating already"):
            engine.run_job(job.input, job.output, PARAMS)
        rest = [*stream, first]
        assert [r.token_ids for r in sorted(rest, key=lambda r: r.index)] == job.family.expected
    with opened(job, device="sim", device_mem=10_000, host_mem="1G") as small, pytest.raises(OutOfMemory):
        small.run_job(job.input, job.output, PARAMS)
    assert [p.name for p in job.folder.iterdir()] == [job.input.name]


# A process of its own.
SLOW = """
import time
from flexengine import Engine, SamplingParams
def on_sweep(progress):
    if progress.rows > 1:
        print("now", flush=True)
        time.sleep(1000)
model, source, output = sys.argv[1:]
with Engine(model, device="cpu", on_sweep=on_sweep) as engine:
    engine.run_job(source, output, SamplingParams(6, ignore_eos=True))
"""


def test_killed(job: Job, whole: Any) -> None:
    expected = whole()
    words = [str(job.family.directory), str(job.input), str(job.output)]
    child = Forked(SLOW, words, ROOT, job.folder / "log")
    while "now\n" not in child.said():
        assert child.poll() is None, child.said()
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait(100) == -signal.SIGKILL
    assert not job.output.exists()
    assert journal_of(job).exists()
    assert job() == 0, job.err
    assert job.output.read_bytes() == expected


def test_progress_of_the_next_job_does_not_count_this_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[JobRows] = []
    made = summary.SweepReports.__init__

    def counting(*given: Any) -> None:
        counted.append(given[3])
        made(*given)

    monkeypatch.setattr(summary.SweepReports, "__init__", counting)
    with opened(job, device="cpu") as engine:
        engine.run_job(job.input, job.output, PARAMS)
        engine.generate(job.family.rows[:2], PARAMS)
    assert counted == [JobRows(8, with_prompts=False), JobRows(2)]
