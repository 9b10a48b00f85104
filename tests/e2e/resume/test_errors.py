"""Jobs that stop by an error: the same command goes on, to the same bytes."""

import errno
import json
from typing import Any

import pytest

from flexengine.engine.engine import Engine
from flexengine.engine.planner import Planner
from flexengine.engine.summary import JobRows
from tests.helpers.job import Job
from tests.helpers.resuming import SAMPLED, Watch, journal_of, records, rows_done, state

# An error on the way.


@pytest.mark.parametrize(("after", "sampling"), [(0, ()), (3, SAMPLED), (7, ())])
def test_goes_on_where_it_was(
    job: Job, watch: Watch, whole: Any, after: int, sampling: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, jobs = whole(*sampling), list[JobRows]()
    results = Engine.results
    monkeypatch.setattr(Engine, "results", lambda *given: (jobs.append(given[-1]), results(*given))[1])
    watch.fail_at = after
    assert job(*sampling) == 3
    assert not job.output.exists()
    done = rows_done(job)
    assert len(done) == after
    watch.forget()
    assert job(*sampling) == 0
    assert watch.ran == [i for i in range(8) if i not in done]
    assert (f"{after} of 8 rows were done before" in job.err) == (after > 0)
    assert jobs[-1].total == 8
    assert (jobs[-1].done, jobs[-1].failed) == (after, 0)  # progress counts the rows of the first run, too
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
    assert f"finished already: 8 rows in {job.output} (0 with errors); --restart runs the job again" in job.err
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


def test_an_output_that_was_edited_is_not_replaced_by_a_continued_job(job: Job, watch: Watch, whole: Any) -> None:
    """Rows that were added after the output was written do not make the job forget its size."""
    expected = whole()
    assert job("--limit", "3") == 0, job.err
    watch.fail_at = 2
    assert job() == 3
    watch.forget()
    job.output.write_bytes(job.output.read_bytes().replace(b'"error": null', b'"error": null, "label": 1'))
    before = state(job)
    assert job() == 2
    assert "not the" in job.err
    assert "that the job wrote; rename it, and" in job.err
    assert state(job) == before
    job.output.rename(job.folder / "mine")
    assert job() == 0
    assert job.output.read_bytes() == expected


def test_a_file_of_another_program_is_not_replaced(job: Job, watch: Watch, whole: Any) -> None:
    """A file that appears between two runs, or while the job runs. --restart replaces it."""
    expected = whole()
    watch.fail_at = 5
    assert job() == 3
    watch.forget()
    job.output.write_text("my own words")
    before = state(job)
    assert job() == 2
    assert f"output {job.output} exists, but this job has not written it; rename it, and the same" in job.err
    assert state(job) == before
    job.output.unlink()
    watch.change = lambda result: job.output.write_text("my own words")
    assert job() == 3
    assert "has been written by another program while the job ran; rename it; 8 of 8 rows are done" in job.err
    assert job.output.read_text() == "my own words"
    watch.forget()
    assert job() == 2
    assert job("--restart") == 0
    assert job.output.read_bytes() == expected


def test_a_killed_restart_may_replace_the_output(job: Job, watch: Watch, whole: Any) -> None:
    expected = whole()
    job.output.write_text("of another job")
    watch.fail_at = 5
    assert job("--restart") == 3
    watch.forget()
    assert job() == 0, job.err
    assert job.output.read_bytes() == expected


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


@pytest.mark.parametrize("before", ["whole_file", "add_output"])
@pytest.mark.parametrize("limit", ["6", "8"])
def test_an_output_that_was_placed_and_not_noted_is_no_edited_one(
    job: Job, watch: Watch, whole: Any, monkeypatch: pytest.MonkeyPatch, before: str, limit: str
) -> None:
    """Errors just before and just after a larger output file replaces a smaller one."""
    from flexengine.job import journal, resume

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    expected = b"".join(whole().splitlines(keepends=True)[: int(limit)])
    (job.folder / "peace.jsonl").unlink()
    (job.folder / "peace.jsonl.journal").unlink()
    assert job("--limit", "3") == 0, job.err
    with monkeypatch.context() as patched:
        patched.setattr(*((resume, before) if before == "whole_file" else (journal.Journal, before)), fail)
        assert job() == 3
    watch.forget()
    if (before, limit) == ("add_output", "6"):
        assert job("--limit", limit) == 2  # the longer output has been placed already
        assert "has 8 rows, and would be replaced by the first 6" in job.err
        job.output.unlink()
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
    for limit, ran in ((3, [0, 1, 2]), (6, [3, 4, 5]), (8, [6, 7]), (8, None), (10**20, None)):
        watch.forget()
        assert job("--limit", str(limit)) == 0
        assert watch.ran == ran
        assert job.output.read_bytes() == b"".join(expected[:limit])
    job.output.rename(
        job.folder / "longer"
    )  # a longer output is not shortened; see tests/shell/commands/test_streams.py
    watch.forget()
    assert job("--limit", "2") == 0
    assert watch.ran is None
    assert job.output.read_bytes() == b"".join(expected[:2])


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
    assert "(2 with errors); --retry-errors runs these rows again, with more memory if they did not fit; " in job.err
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
