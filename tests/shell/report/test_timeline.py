"""Time lines of sweeps: recorded within bounds, clipped to the sweep, and merged without losing work."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine.places import by_way
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task
from flexengine.shell.report import record
from flexengine.shell.report.record import MOST_KEPT, LaneSpan, SweepSample, line, merged


def task(op: Op, lane: str, sweep: int = 0, layer: int = 0, batch: int = 0) -> Task:
    return Task(op, Cell(sweep, layer, batch), lane, (), ())


def test_lanes_in_the_order_of_the_datas_way() -> None:
    lanes = ["disk_write", "device", "d2h_disk2", "leave", "disk2_read", "h2d", "cpu", "disk_read", "d2h", "enter",
             "h2d_disk2", "disk2_write"]  # fmt: skip
    assert by_way(lanes) == ["enter", "disk_read", "disk2_read", "cpu", "h2d", "h2d_disk2", "device", "d2h",
                             "d2h_disk2", "disk_write", "disk2_write", "leave"]  # fmt: skip
    assert by_way(["new", "leave"]) == ["leave", "new"]


def test_a_sweep_is_clipped_to_its_own_tasks() -> None:
    """Loads that ran ahead are shown from the start of the sweep; loads for the next sweep up to its end."""
    made = line(7, False, [
        (task(Op.LOAD_WEIGHT, "disk_read"), 8.0, 9.0),  # over before the sweep
        (task(Op.LOAD_WEIGHT, "disk_read", layer=1), 9.5, 11.0),
        (task(Op.COMPUTE, "device"), 10.0, 12.0),
        (task(Op.STORE_CACHE, "d2h"), 12.0, 14.0),
        (task(Op.LOAD_WEIGHT, "disk_read", sweep=1), 13.0, 19.0),
        (task(Op.LOAD_WEIGHT, "disk_read", sweep=1, layer=1), 19.0, 20.0),
    ])  # fmt: skip
    assert made is not None
    assert (made.sweep, made.prefill, made.seconds) == (7, False, 4.0)
    assert by_way(made.busy) == ["disk_read", "device", "d2h"]
    assert made.busy == {"disk_read": 2.0, "device": 2.0, "d2h": 2.0}
    assert [(s.lane, s.began, s.end, s.kind) for s in made.spans] == [
        ("disk_read", 0.0, 1.0, "weights"), ("disk_read", 3.0, 4.0, "weights"), ("device", 0.0, 2.0, "compute"),
        ("d2h", 2.0, 4.0, "KV cache"),
    ]  # fmt: skip
    assert line(7, False, [(task(Op.LOAD_WEIGHT, "disk_read"), 8.0, 9.0)]) is None


@st.composite
def lanes_of_spans(draw: st.DrawFn) -> list[LaneSpan]:
    made = []
    for lane in draw(st.lists(st.sampled_from(["disk_read", "device", "d2h"]), unique=True, min_size=1)):
        now = 0.0
        for i in range(draw(st.integers(1, 150))):
            gap, length = draw(st.sampled_from([0.0, 0.001, 0.3])), draw(st.sampled_from([0.001, 0.02, 0.5]))
            op = draw(st.sampled_from(["load weight", "compute"]))
            made.append(LaneSpan(lane, op, "compute", now + gap, now + gap + length, (i, i), (-1, -1), 1, length))
            now += gap + length
    return made


@given(lanes_of_spans(), st.sampled_from([20, 60, 500]))
def test_merged_spans_are_few_and_keep_the_work(spans: list[LaneSpan], most: int) -> None:
    found = merged(spans, most)
    assert len(found) <= max(most, 3 * 11)  # at the coarsest, a lane has about ten boxes
    if len(spans) <= most:
        assert sorted(map(str, found)) == sorted(map(str, spans))
    for lane in {span.lane for span in spans}:
        before, after = ([s for s in each if s.lane == lane] for each in (spans, found))
        assert sum(s.tasks for s in after) == len(before)
        assert sum(s.busy for s in after) == pytest.approx(sum(s.busy for s in before))
        assert (after[0].began, after[-1].end) == (before[0].began, before[-1].end)
        assert all(a.end <= b.began + 1e-12 for a, b in pairwise(after))
        assert all(s.busy <= s.end - s.began + 1e-9 for s in after)


def sample_of(seconds: list[float]) -> SweepSample:
    """Return the sample of a job whose first sweep computed prompts, with one task per sweep of these seconds."""
    sample, now = SweepSample(), 0.0
    for number, lasted in enumerate(seconds, 1):
        sample.add(task(Op.COMPUTE, "device", sweep=number), now, now + lasted)
        sample.add(task(Op.LOAD_WEIGHT, "disk_read", sweep=number + 1), now, now + 2 * lasted)
        now += lasted
        sample.sweep_ended(number, number == 1)
    return sample


def test_the_typical_decode_sweep_is_shown() -> None:
    sample = sample_of([9.0, 1.0, 2.0, 3.0])
    for seconds, sweep in ((1.1, 2), (2.1, 3), (3.3, 4), (9.0, 4)):
        assert (found := sample.typical(seconds)) is not None
        assert (found.sweep, found.prefill) == (sweep, False)
        assert by_way(found.busy) == ["disk_read", "device"]
    assert (only := sample_of([9.0]).typical(1.0)) is not None
    assert only.prefill
    assert SweepSample().typical(1.0) is None


def test_few_sweeps_of_a_long_job_are_recorded() -> None:
    sample = sample_of([1.0] * 1000)
    lines = [line for some in sample._lines.values() for line in some]
    assert {each.sweep for each in lines} <= {1, 64, 128, 256, 512}
    assert len(lines) == MOST_KEPT + 1
    assert sample._recordings == []


def test_a_long_sweep_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_RECORDED", 5)
    sample = SweepSample()
    for i in range(20):
        sample.add(task(Op.COMPUTE, "device"), i, i + 1)
    sample.sweep_ended(1, False)
    assert (found := sample.typical(1.0)) is not None
    assert found.cut
    assert found.seconds == 5.0
    assert not replace(found, cut=False).cut


def test_a_replanned_sweep_is_dropped() -> None:
    sample = SweepSample()
    sample.add(task(Op.COMPUTE, "device"), 0.0, 1.0)
    sample.drop()
    sample.sweep_ended(1, False)
    assert sample.typical(1.0) is None
