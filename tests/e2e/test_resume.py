"""Jobs that stop on the way, by an error, a signal or kill -9: the same command goes on, to the same bytes."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from flexengine.commands import run
from flexengine.config import SamplingParams
from flexengine.engine.engine import Engine
from flexengine.engine.planner import Planner
from tests.commands.test_run import Job

ROOT = Path(__file__).parents[2]
SAMPLED = ("--temperature", "1.2", "--n", "2", "--top-k", "50")


@pytest.fixture(autouse=True)
def one_thread_everywhere(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes compute with one thread, too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def job(families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """Eight rows, some of them duplicates."""
    made = Job(tmp_path, families("llama"), capsys)
    rows = made.family.rows
    made.write([{**rows[i], "id": i, "max_tokens": 1 + 2 * i} for i in (0, 1, 1, 3, 4, 1, 6, 0)])
    return made


@pytest.fixture
def whole(job: Job) -> Callable[..., bytes]:
    """The output of the same job left in peace."""

    def get(*more: str) -> bytes:
        output, job.output = job.output, job.folder / "peace.jsonl"
        assert job(*more) in (0, 1)
        job.output = output
        return (job.folder / "peace.jsonl").read_bytes()

    return get


class Watch:
    """Engine.stream with a hand on it: what it was asked, and an error instead of result number `fail_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[int] | None = None
        self.params: SamplingParams | None = None
        self.fail_at: int | None = None
        self.change: Callable[[Any], None] = lambda result: None
        real = Engine.stream

        def stream(engine: Engine, rows: Any, params: SamplingParams) -> Iterator[Any]:
            self.ran, self.params = [row.index for row in rows], params
            assert self.ran == [row.index for row in rows]  # as often as the engine likes
            for count, result in enumerate(real(engine, rows, params)):
                if count == self.fail_at:
                    raise OSError(errno.EIO, "Input/output error")
                self.change(result)
                yield result

        monkeypatch.setattr(Engine, "stream", stream)

    def forget(self) -> None:
        self.ran = self.fail_at = None
        self.change = lambda result: None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def journal_of(job: Job) -> Path:
    return job.output.with_name(job.output.name + ".journal")


def records(job: Job) -> list[Any]:
    return [json.loads(line[9:]) for line in journal_of(job).read_bytes().splitlines()]


def rows_done(job: Job) -> set[int]:
    return {r["index"] for r in records(job) if "index" in r}


def state(job: Job) -> list[Any]:
    return [(p.name, p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes()) for p in sorted(job.folder.iterdir())]


# An error on the way.


@pytest.mark.parametrize(("after", "sampling"), [(0, ()), (3, SAMPLED), (7, ())])
def test_goes_on_where_it_was(job: Job, watch: Watch, whole: Any, after: int, sampling: tuple[str, ...]) -> None:
    expected = whole(*sampling)
    watch.fail_at = after
    assert job(*sampling) == 3
    assert not job.output.exists()
    done = rows_done(job)
    assert len(done) == after
    watch.forget()
    assert job(*sampling) == 0
    assert watch.ran == [i for i in range(8) if i not in done]
    assert (f"{after} of 8 rows were done before" in job.err) == (after > 0)
    shown = [int(n) for n in re.findall(r"(\d+) of 8 rows done, 0 failed", job.err)]
    assert shown[-1] == 8  # with those of the first run
    assert min(shown) >= after
    assert job.output.read_bytes() == expected
    assert sorted(p.name for p in job.folder.glob("out*")) == ["out.jsonl", "out.jsonl.journal"]


def test_other_memory_and_placement_do_not_matter(job: Job, watch: Watch, whole: Any) -> None:
    expected = whole()
    watch.fail_at = 3
    assert job() == 3
    watch.forget()
    policy = job.folder / "policy.json"
    policy.write_text('{"gpu_batch_size": 2, "num_gpu_batches": 1, "weights": [0, 0.5, 0.5], "cache": [0, 1, 0]}')
    assert job("--policy", str(policy), "--device", "sim", "--offload-dir", str(job.folder / "off"),
               "--trace", str(job.folder / "t.json")) == 0  # fmt: skip
    assert job.output.read_bytes() == expected


def test_a_finished_job_is_left_alone(job: Job, watch: Watch) -> None:
    assert job() == 0, job.err
    watch.forget()
    before = state(job)
    assert job("--json") == 0
    assert watch.ran is None
    assert state(job) == before
    assert f"finished already: 8 rows in {job.output} (0 with errors); --restart to run it again" in job.err
    assert json.loads(job.out) == {"job": {"rows": 8, "done": 8, "failed": 0, "done_before": 8}}


def test_a_lost_output_is_put_together_again(job: Job, watch: Watch) -> None:
    assert job(*SAMPLED) == 0
    expected = job.output.read_bytes()
    job.output.unlink()
    watch.forget()
    assert job(*SAMPLED) == 0
    assert watch.ran is None
    assert job.output.read_bytes() == expected
    assert "8 rows done, 0 failed; all of them were in the journal" in job.err


@pytest.mark.parametrize("more", [(), ("--limit", "8"), ("--limit", "2")])
def test_an_output_that_was_edited_is_not_replaced(job: Job, watch: Watch, more: tuple[str, ...]) -> None:
    assert job("--limit", "3") == 0, job.err
    size, expected = job.output.stat().st_size, job.output.read_bytes()
    job.output.write_text("my own words")
    before = state(job)
    watch.forget()
    assert job(*more) == 2
    assert f"output {job.output} has 12 bytes, not the {size:,} that the job wrote; rename it, and" in job.err
    assert watch.ran is None
    assert state(job) == before
    job.output.rename(job.folder / "mine")
    assert job("--limit", "3") == 0
    assert job.output.read_bytes() == expected
    job.output.write_text("my own words")
    assert job("--restart", "--limit", "3") == 0
    assert job.output.read_bytes() == expected


@pytest.mark.parametrize("before", ["write_output", "add_output"])
@pytest.mark.parametrize("limit", ["6", "8"])
def test_an_output_that_was_placed_and_not_noted_is_no_edited_one(
    job: Job, watch: Watch, whole: Any, monkeypatch: pytest.MonkeyPatch, before: str, limit: str
) -> None:
    """An error on either side of the moment at which a larger output takes the place of a smaller one."""
    from flexengine.job import journal, resume

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    expected = b"".join(whole().splitlines(keepends=True)[: int(limit)])
    (job.folder / "peace.jsonl").unlink()
    (job.folder / "peace.jsonl.journal").unlink()
    assert job("--limit", "3") == 0, job.err
    with monkeypatch.context() as patched:
        patched.setattr(*((resume, before) if before == "write_output" else (journal.Journal, before)), fail)
        assert job() == 3
    watch.forget()
    assert job("--limit", limit) == 0, job.err
    assert watch.ran is None
    assert job.output.read_bytes() == expected
    assert {file.name for file in job.folder.iterdir()} == {f.name for f in (job.input, job.output, journal_of(job))}


@pytest.mark.parametrize("more", [(), ("--temperature", "1")])
def test_an_interrupted_restart_replaces_the_old_output(job: Job, watch: Watch, more: tuple[str, ...]) -> None:
    assert job() == 0, job.err
    old = job.output.read_bytes()
    watch.fail_at = 3
    assert job("--restart", *more) == 3
    assert job.output.read_bytes() == old
    watch.forget()
    assert job(*more) == 0, job.err
    assert (job.output.read_bytes() == old) is (not more)


def test_limits(job: Job, watch: Watch, whole: Any) -> None:
    expected = whole().splitlines(keepends=True)
    for limit, ran in ((3, [0, 1, 2]), (6, [3, 4, 5]), (2, None), (8, [6, 7]), (8, None), (10**20, None)):
        watch.forget()
        assert job("--limit", str(limit)) == 0
        assert watch.ran == ran
        assert job.output.read_bytes() == b"".join(expected[:limit])


def test_rows_that_failed_are_run_again_if_asked(job: Job, watch: Watch, whole: Any) -> None:
    expected = whole()

    def fail(result: Any) -> None:
        if result.index in (2, 5):
            result.error = "for now"

    watch.change = fail
    assert job() == 1
    watch.forget()
    assert job() == 1
    assert watch.ran is None
    assert "(2 with errors; --retry-errors to run those again)" in job.err
    assert job("--retry-errors") == 0
    assert watch.ran == [2, 5]
    assert job.output.read_bytes() == expected
    watch.forget()
    assert job("--retry-errors") == 0
    assert watch.ran is None


def test_bad_rows_and_batch_lines_stay_in_their_places(job: Job, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.job import resume

    def batch(i: int) -> dict[str, Any]:
        body = {"prompt": job.family.prompts[i], "max_tokens": 3 + i}
        return {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}

    rows = job.family.rows
    job.write([rows[2], batch(1), "nonsense", batch(3), {"prompt_token_ids": [999]}, batch(5)])
    now = iter(range(1000, 2000))
    monkeypatch.setattr(resume.time, "time", lambda: next(now))
    watch.fail_at = 4
    assert job() == 3
    assert records(job)[0]["created"] == 1000
    watch.forget()
    assert job() == 1
    assert watch.ran is not None
    assert len(watch.ran) == 2
    found = job.rows
    assert ["custom_id" in r for r in found] == [False, True, False, True, False, True]
    assert [found[i]["error"] is None for i in (0, 2, 4)] == [True, False, False]
    assert "invalid JSON" in found[2]["error"]
    for i in (1, 3, 5):
        assert found[i]["custom_id"] == f"c{i}"
        assert found[i]["response"]["body"]["created"] == 1000
        assert found[i]["response"]["body"]["usage"]["completion_tokens"] == 3 + i
    resumed = job.output.read_bytes()
    monkeypatch.setattr(resume.time, "time", lambda: 1000)
    assert job("--restart") == 1
    assert job.output.read_bytes() == resumed


def test_prompts_are_cut_where_the_first_run_cut_them(job: Job, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    real = Planner.plan

    def plan(planner: Planner, *given: Any) -> Any:
        seen.append(planner.prefill_tokens)
        return real(planner, *given)

    monkeypatch.setattr(Planner, "plan", plan)
    watch.fail_at = 3
    assert job() == 3
    assert set(seen) == {None}
    (used,) = (r["settings"]["prefill_tokens"] for r in records(job) if "settings" in r)
    seen.clear()
    watch.forget()
    assert job() == 0, job.err
    assert set(seen) == {used}


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


def test_a_changed_job_is_refused_by_name(job: Job, watch: Watch) -> None:
    assert job() == 0, job.err
    before = state(job)
    for arguments, difference in CHANGES:
        watch.forget()
        assert job(*arguments) == 2
        assert difference in job.err
        assert "--restart to start over" in job.err
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


def test_a_job_that_cannot_fit_is_refused_before_its_model_is_hashed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexengine.engine.manifest.model_files", lambda *_: pytest.fail("the model was hashed"))
    assert job("--device", "cpu", "--device-mem", "4K") == 2
    refused = job.err
    monkeypatch.undo()
    found = re.search(r"set --device-mem (\d+) or more", refused)
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
    """Batch lines carry the model's name: one output has one of them."""
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
    assert "is the input file; results would replace the prompts" in done.stderr
    assert job.input.read_bytes() == text


def test_an_output_that_links_to_itself_is_refused(job: Job) -> None:
    job.output.symlink_to(job.output)
    assert job() == 2
    assert f"output {job.output} cannot be reached: Symlink loop" in job.err


def test_an_output_that_is_not_ours_is_refused(job: Job, watch: Watch) -> None:
    job.output.write_text("my own words")
    assert job() == 2
    assert "exists and would be replaced; name another --output, or --restart to replace it" in job.err
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
    assert f"was damaged: {len(data) - begin:,} bytes at its end dropped, their rows are run again" in job.err
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
    monkeypatch.setattr("flexengine.commands.open_engine.engine_class", pytest.fail)
    assert job() == 2
    assert "'same' (lines 1 and 10)" in job.err
    assert list(job.folder.iterdir()) == [job.input]


@pytest.mark.parametrize("option", ["--restart", "--retry-errors"])
def test_nothing_is_kept_without_an_output(job: Job, option: str) -> None:
    assert run.main([str(job.input), option]) == 2
    assert f"{option} needs --output" in job.capsys.readouterr().err
    assert job("--output", "/dev/null", option) == 2


def test_arguments_arrive(job: Job, watch: Watch) -> None:
    arguments = [x for changed, _ in CHANGES for x in changed if changed[0] not in ("--dtype", "--prompt-column")]
    assert job(*arguments) in (0, 1)
    assert watch.params == SamplingParams(
        max_tokens=5, temperature=1, seed=4, ignore_eos=True, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=2,
        presence_penalty=1, frequency_penalty=1, stop=("a", "b"), stop_token_ids=(3, 4), n=2, logprobs=0,
    )  # fmt: skip


# The disk of the output.


def test_a_disk_that_fills_up_at_any_record(job: Job, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, real = whole(), os.pwrite
    for room in (0, 1, 2, 3, 6, 9, 10, 11):  # manifest, settings, eight rows, the note of the output; then all fit
        written: list[int] = []

        def full(file: int, data: bytes, offset: int, written: list[int] = written, room: int = room) -> int:
            if len(written) >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(offset)
            return real(file, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
        assert job("--restart") == (3 if room < 11 else 0)
        assert ("No space left on device" in job.err) == (room < 11)
        assert ("without --restart again to go on" in job.err) == (0 < room < 11)
        monkeypatch.setattr(os, "pwrite", real)
        assert job() == 0
        assert job.output.read_bytes() == expected


def test_a_disk_that_is_full_at_the_end(job: Job, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert job() == 3
    assert "8 of 8 rows are done; run the same command again to go on" in job.err
    assert sorted(p.name for p in job.folder.glob("out*")) == ["out.jsonl.journal"]
    watch.forget()
    assert job() == 0, job.err
    assert watch.ran is None
    assert len(job.rows) == 8


def test_an_input_that_changes_while_the_job_runs(job: Job, watch: Watch) -> None:
    text = job.input.read_text()
    watch.change = lambda result: job.input.write_text(text + "\n") and None
    assert job() == 3
    assert "the input has changed" in job.err
    assert not job.output.exists()
    watch.forget()
    job.input.write_text(text)
    assert job() == 0, job.err


# Signals.

SLOW = """
import sys, time
from pathlib import Path
from flexengine.runtime.execute import Executor
real, journal = Executor._work, Path(sys.argv[1])
def work(self, task, lane):
    real(self, task, lane)
    if journal.read_bytes().count(b'"index"') > 1:  # a sweep that takes minutes, once rows are done
        time.sleep(1000)
Executor._work = work
from flexengine.commands import run
sys.exit(run.main(sys.argv[2:]))
"""


def start_slow(job: Job, *more: str) -> "subprocess.Popen[str]":
    """The job in a process of its own, after some rows in a sweep without end."""
    weights = [0, 1, 0] if "sim" in more else [1, 0, 0]
    (job.folder / "p.json").write_text(json.dumps({"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": weights}))
    command = [sys.executable, "-c", SLOW, str(journal_of(job)), *job.arguments("--policy", str(job.folder / "p.json"))]
    child = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while not journal_of(job).exists() or len(rows_done(job)) < 2:
        assert child.poll() is None, child.stderr and child.stderr.read()
        time.sleep(0.02)
    time.sleep(0.3)
    return child


def goes_on(job: Job, child: "subprocess.Popen[str]", code: int, expected: bytes) -> str:
    """After the end of `child`: what it said, if the same command finishes the job."""
    assert child.wait(timeout=200) == code  # while the sweep takes 1000 s
    assert child.stderr
    said = child.stderr.read()
    assert "Traceback" not in said
    standing = f"interrupted: {len(rows_done(job))} of 8 rows are done; run the same command again to go on\n"
    assert said.endswith(f"flexengine: {standing}")
    assert not job.output.exists()
    assert job() == 0, job.err
    assert job.output.read_bytes() == expected
    return said


@pytest.mark.slow
@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_long_sweep(job: Job, whole: Any, number: signal.Signals) -> None:
    """Tasks in the main thread; and meanwhile a second process on the same output."""
    expected = whole()
    child = start_slow(job, "--device", "cpu")
    before = journal_of(job).read_bytes()
    assert job() == 2
    assert f"process {child.pid} is writing this output already" in job.err
    assert journal_of(job).read_bytes() == before
    child.send_signal(number)
    goes_on(job, child, 128 + number, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("twice", [False, True])
def test_a_signal_while_a_lane_hangs(job: Job, whole: Any, twice: bool) -> None:
    """A lane cannot be ended within a task: the process leaves without it, at once after a second signal."""
    expected = whole()
    child = start_slow(job, "--device", "sim", "--offload-dir", str(job.folder / "off"))
    child.send_signal(signal.SIGTERM)
    if twice:
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
    goes_on(job, child, 143, expected)


def test_an_ignored_signal_stays_ignored() -> None:
    from flexengine.job.interrupt import Interrupted, Interrupts

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            with pytest.raises(Interrupted) as caught:
                os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_results_are_saved_first_and_a_lost_signal_is_raised_again() -> None:
    from flexengine.job.interrupt import Interrupted, Interrupts

    did: list[str] = []
    with Interrupts() as interrupts, interrupts.guarding(lambda: did.append("saved"), lambda: "half"):
        interrupts.check()
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        assert did == ["saved"]
        with pytest.raises(Interrupted):
            interrupts.check()
    assert interrupts.standing() == "half"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# kill -9. More of the same: python -m bench.faults.kills MODEL --kills 100


@pytest.mark.slow
def test_kills(families: Any) -> None:
    arguments = [str(families("llama").directory), "--kills", "10", "--rows", "24", "--seed", "1"]
    cases = ["--cases", "greedy", "sampled", "two samples", "offloaded"]
    command = [sys.executable, "-m", "bench.faults.kills", *arguments, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["kills"] == 10
    assert tally["identical"] == tally["jobs"] >= 1
    assert tally["forced"] + tally["torn"] >= 1
    assert tally["run_again"] == tally["left_over"] == 0
