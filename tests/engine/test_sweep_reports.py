"""Reports of a running job: what an engine tells its listener."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from flexengine import Policy, SamplingParams, activity
from flexengine.activity import Activity
from flexengine.engine import summary as module
from flexengine.engine.engine import Engine
from flexengine.engine.summary import GENERATING, JobRows, Progress, Rate, SweepReports, best_read_rate, disk_rate
from flexengine.errors import InvalidInput
from flexengine.plan.hardware import Capacity
from flexengine.plan.rates import assumed
from flexengine.schedule.tasks import Op
from flexengine.worker.worker import Worker
from tests.helpers.families import NEW
from tests.helpers.listening import Heard
from tests.helpers.patience import PATIENCE

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])  # of all modules
    return now


def test_the_numbers_of_a_sweep(clock: list[float]) -> None:
    """A sweep of 40 cells that generates 10 tokens, 5 of 20 rows were done before."""
    heard, read, progress = Heard(), [0], Progress(most=100)
    reports = SweepReports(heard, progress, JobRows(20, 4, 1), lambda: read[0], 50e6, loading=100_000_000)
    reports.begin_sweep(40, 10)
    clock[0] += 1.0
    read[0] = 20_000_000
    reports.look(15)
    assert heard[-1] == Activity(GENERATING, "generating at most 100 tokens", 3.75, 100, "tokens",
                                 ("5 of 20 rows", "1 failed", "reading weights 20 %"), "running")  # fmt: skip
    clock[0] += 1.0
    read[0] = 60_000_000
    reports.look(32)
    assert heard[-1].done == 8.0
    assert heard[-1].details == ("5 of 20 rows", "1 failed", "reading weights 60 %",
                                 "disk 40.0 of 50.0 MB/s", "sweep 1: 80 %")  # fmt: skip
    progress.tokens, progress.rows, progress.sweeps = 10, 3, 1
    clock[0] += 1.0
    reports.end_sweep()
    assert heard[-1].done == 10
    assert heard[-1].details == ("8 of 20 rows", "1 failed", "0:29 left", "3.12 tok/s", "disk 20.0 of 50.0 MB/s")
    for rows, shown in ((3, False), (6, False), (6, False), (9, True)):  # a rate needs rows that end at several times
        progress.rows = rows
        clock[0] += 1.0
        reports.end_sweep()
        assert (heard[-1].details[-1] == "1.29 rows/s") == shown
        assert any("rows/s" in detail for detail in heard[-1].details) == shown
    reports.end(failed=False)
    assert heard[-1].state == "done"


def test_lost_tokens_are_no_rate(clock: list[float]) -> None:
    """An attention worker takes tokens with it: the rate is that of the tokens that follow."""
    heard, progress = Heard(), Progress(most=100, tokens=50, decode_seconds=1.0)
    reports = SweepReports(heard, progress, JobRows())
    for tokens in (60, 70):
        progress.tokens = tokens
        clock[0] += 1.0
        reports.end_sweep()
    assert heard[-1].details[-1] == "10.0 tok/s"
    progress.tokens = 20
    reports.tokens_lost()
    for tokens in (25, 30):
        progress.tokens = tokens
        clock[0] += 1.0
        reports.end_sweep()
    assert heard[-1].details == ("0 rows", "0:14 left", "5.00 tok/s")


def test_no_estimate_before_tokens_come_at_a_steady_rate(clock: list[float]) -> None:
    """A sweep that computes prompts takes 50 s and gives 200 of 10,000 tokens; the next ones take 1 s each."""
    heard, progress = Heard(), Progress(most=10_000)
    reports = SweepReports(heard, progress, JobRows(200))
    shown = []
    for seconds, prefill in ((50.0, True), (1.0, False), (1.0, False), (1.0, False)):
        reports.begin_sweep(10, 200)
        clock[0] += seconds / 2
        reports.look(5)
        shown.append([text for text in heard[-1].details if "left" in text])
        clock[0] += seconds / 2
        progress.tokens += 200
        progress.sweeps += 1
        if prefill:
            progress.prefill_seconds += seconds
        else:
            progress.decode_seconds += seconds
        reports.end_sweep()
    assert shown[:2] == [[], []]
    assert shown[-1] == ["0:46 left"]  # 9,300 tokens at 200 per second


def test_rates_forget() -> None:
    rate = Rate(30.0)
    assert rate(0.0, 0.0) is None
    assert rate(10.0, 100.0) == 10.0
    for second in range(11, 100):
        found = rate(float(second), 100.0)
    assert found == 0.0


@pytest.mark.parametrize(
    ("rate", "best", "text"),
    [(1.2e9, 1.61e9, "1.20 of 1.61 GB/s"), (120e6, 1.61e9, "120 MB/s of 1.61 GB/s"), (1.7e9, 1.6e9, "1.70 GB/s"),
     (2e6, None, "2.00 MB/s")],
)  # fmt: skip
def test_disk_rates(rate: float, best: float | None, text: str) -> None:
    assert disk_rate(rate, best) == text


def test_the_best_rate_of_all_disks() -> None:
    hardware = assumed("cpu", Capacity(None, None, None, shared=True, staged=False))
    assert best_read_rate(hardware) is None  # not measured
    links = {"disk_read": ((1.0, 5.0), (2.0, 7.0)), "disk2_read": ((1.0, 3.0),), "h2d": ((1.0, 99.0),)}
    links |= {"disk_write": links["h2d"], "disk2_write": links["h2d"]}
    known = replace(hardware, measured=True, links=links, checkpoint_read=((1.0, 8.0),), more_disks=(None,))
    assert best_read_rate(known) == 11.0


def test_an_engine_reports_all_its_work(families: Any) -> None:
    known, heard = families("llama"), Heard()
    with Engine(known.directory, device="cpu", progress=heard) as engine:
        results = engine.generate(known.rows, GREEDY)
    assert [r.token_ids for r in results] == known.expected
    assert {"opening", "tokenizing", "planning", "allocating", GENERATING} <= {r.name for r in heard}
    ends = [r for r in heard if r.state in ("done", "failed") and r.name != activity.MESSAGE]
    assert len(ends) == len(heard.begun())
    assert {r.state for r in ends} == {"done"}
    (plan,) = heard.messages
    assert plan.startswith("plan: weights ")
    assert "; KV cache " in plan
    assert "predicted" not in plan  # rates are not measured
    assert heard.last("tokenizing").done == len(known.rows)


def test_a_caller_without_a_listener_sees_nothing(families: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for progress in (False, None):  # standard error is no terminal
        with Engine(families("llama").directory, device="cpu", progress=progress) as engine:
            engine.generate(families("llama").rows, GREEDY)
    assert capfd.readouterr() == ("", "")


def test_a_job_that_fails_ends_its_activity(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known, heard = families("llama"), Heard()

    def failing(worker: Worker, task: Any) -> None:
        raise ArithmeticError("broken")

    monkeypatch.setattr(Worker, "perform", failing)
    with Engine(known.directory, device="cpu", progress=heard) as engine, pytest.raises(ArithmeticError):
        engine.generate(known.rows, GREEDY)
    assert heard.last(GENERATING).state == "failed"


@pytest.mark.parametrize("overlap", [True, False], ids=["threads", "inline"])
def test_a_long_sweep_is_reported_while_it_lasts(families: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """A cell waits until a report says how many cells are done: 2 gpu_batches, and the third layer begins. The first
    report after it began may have been made before it."""
    known, seen, found, cells = families("llama"), threading.Event(), list[str](), list[Any]()
    monkeypatch.setattr("flexengine.runtime.execute._LOOK_SECONDS", 0.01)
    monkeypatch.setattr(activity, "INTERVAL", 0.0)
    monkeypatch.setattr(module, "LONG_SWEEP_SECONDS", 0.0)
    real, waiting = Worker.perform, list[bool]()

    def perform(worker: Worker, task: Any) -> None:
        if task.op is Op.COMPUTE and task.cell.sweep == 0:
            cells.append(task.cell)
            waiting.extend([True] * (task.cell[1:] == (2, 0)))
            assert not waiting or seen.wait(PATIENCE)
        real(worker, task)

    def listen(record: Activity) -> None:
        if waiting and record.name == GENERATING and record.details and record.details[-1].startswith("sweep 1: "):
            found.append(record.details[-1])
            if len(found) == 2:
                seen.set()

    monkeypatch.setattr(Worker, "perform", perform)
    policy = Policy(4, 2, weights=(0, 1, 0))
    with Engine(known.directory, policy=policy, device="sim", overlap=overlap, progress=listen) as engine:
        engine.generate(known.rows, GREEDY)
    assert found[1] == f"sweep 1: {4 / len(cells):.0%}".replace("%", " %")


@pytest.mark.parametrize("wrong", ["yes", 1.5, []])
def test_wrong_listeners(families: Any, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=f"progress is {type(wrong).__name__}; it must be True, False, None or a"):
        Engine(families("llama").directory, progress=wrong)
