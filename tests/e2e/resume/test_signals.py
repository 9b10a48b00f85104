"""Jobs that end by a full disk, a signal or kill -9: the same command goes on, to the same bytes."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import Forked
from tests.helpers.job import Job
from tests.helpers.resuming import ROOT, Watch, journal_of, rows_done

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
        again = "the same command without --restart (restart=True in Python) again to continue"
        assert (again in job.err) == (0 < room < 11)
        monkeypatch.setattr(os, "pwrite", real)
        assert job() == 0
        assert job.output.read_bytes() == expected


def test_a_disk_that_is_full_at_the_end(job: Job, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert job() == 3
    assert "8 of 8 rows are done; run the same command again to continue" in job.err
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
import time
from pathlib import Path
from flexengine.runtime.execute import Executor
real, journal = Executor._work, Path(sys.argv[1])
def work(self, task, lane):
    real(self, task, lane)
    if journal.read_bytes().count(b'"index"') > 1:  # a sweep that takes minutes, once rows are done
        time.sleep(1000)
Executor._work = work
from flexengine.shell.commands import run
sys.exit(run.main(sys.argv[2:]))
"""


def start_slow(job: Job, *more: str) -> Forked:
    """Start the job in a process of its own, and wait until it is in an endless sweep after some rows."""
    weights = [0, 1, 0] if "sim" in more else [1, 0, 0]
    (job.folder / "p.json").write_text(json.dumps({"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": weights}))
    words = [str(journal_of(job)), *job.arguments("--policy", str(job.folder / "p.json")), *more]
    child = Forked(SLOW, words, ROOT, job.folder / "log")
    while not journal_of(job).exists() or len(rows_done(job)) < 2:
        assert child.poll() is None, child.said()
        time.sleep(0.02)
    time.sleep(0.3)
    return child


def goes_on(job: Job, child: Forked, code: int, expected: bytes) -> None:
    """Wait for the end of `child`, and check that the same command finishes the job."""
    assert child.wait(timeout=200) == code  # while the sweep takes 1000 s
    said = child.said()
    assert "Traceback" not in said
    standing = f"interrupted: {len(rows_done(job))} of 8 rows are done; run the same command again to continue"
    standing += "; rows that were under way begin anew\n"
    assert said.endswith(f"flexengine: {standing}")
    assert not job.output.exists()
    assert job() == 0, job.err
    assert job.output.read_bytes() == expected


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_long_sweep(job: Job, whole: Any, number: signal.Signals) -> None:
    """With tasks in the main thread, and a second process that starts on the same output."""
    expected = whole()
    child = start_slow(job, "--device", "cpu")
    before = journal_of(job).read_bytes()
    assert job() == 2
    assert f"process {child.pid} is writing this output already" in job.err
    assert journal_of(job).read_bytes() == before
    child.send_signal(number)
    goes_on(job, child, 128 + number, expected)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("twice", [False, True])
def test_a_signal_while_a_lane_hangs(job: Job, whole: Any, twice: bool) -> None:
    """A lane cannot be stopped within a task: the process exits anyway, and at once after a second signal."""
    expected = whole()
    child = start_slow(job, "--device", "sim", "--offload-dir", str(job.folder / "off"))
    child.send_signal(signal.SIGTERM)
    if twice:
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
    goes_on(job, child, 143, expected)


def test_an_ignored_signal_stays_ignored() -> None:
    from flexengine.shell.commands.interrupts import Interrupted, Interrupts

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
    from flexengine.shell.commands.interrupts import Interrupted, Interrupts

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
def test_kills(families: Any, tmp_path: Path) -> None:
    arguments = [str(families("llama").directory), "--kills", "10", "--rows", "24", "--seed", "1"]
    cases = ["--cases", "greedy", "sampled", "two samples", "offloaded"]
    code = "from bench.faults import kills; sys.exit(kills.main(sys.argv[1:]))"
    done = Forked(code, [*arguments, *cases], ROOT, tmp_path / "log")
    assert done.wait(300) == 0, done.said()
    tally = json.loads(done.said().splitlines()[-1])
    assert tally["kills"] == 10
    assert tally["identical"] == tally["jobs"] >= 1
    assert tally["forced"] + tally["torn"] >= 1
    assert tally["run_again"] == tally["left_over"] == 0
