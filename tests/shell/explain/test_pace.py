"""shell.explain.pace: what sets the pace of chains that were made so that it is known."""

from dataclasses import replace

import pytest

from flexengine.errors import InvalidInput
from flexengine.plan.chain import ChainPlan, ChainSearch
from flexengine.plan.cluster.devices import Link
from flexengine.plan.hardware import Hardware
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.explain.pace import job_helps, next_lines, pace_line, pace_of
from tests.helpers.plans import FLAT, opt

MODEL = opt(12, 1024, 16, 4096)
MACHINE = replace(FLAT, device_bytes=2 << 30, host_bytes=8 << 30, disk_bytes=1 << 40)
SLOW = replace(MACHINE, products={name: rate[0][1] / 20 for name, rate in FLAT.products.items()})
THIRDS = [(0, 4), (4, 8), (8, 12)]
NEW = 16


def chain(machines: list[Hardware], rows: int, batches: int, *links: Link, new: int = NEW) -> ChainPlan:
    policy = Policy(rows // batches, batches, weights=(0, 1, 0), schedule="zigzag", prefill_tokens=4096)
    return ChainSearch(MODEL, machines, Workload({(64, new): rows}), links=links).made(policy, THIRDS)


def test_a_slow_stage() -> None:
    plan = chain([MACHINE, SLOW, MACHINE], 96, 6)
    work = [stage.prediction.total_seconds for stage in plan.stages]
    assert pace_of(plan)[:3] == ("stage", 1, work[1])
    assert pace_line(plan).startswith("stage 1 sets the pace: it works ")
    other = 0 if work[0] > work[2] else 2
    assert next_lines(plan)[0].endswith(f", the work of stage {other}")
    assert job_helps(plan) == []


def test_a_slow_link() -> None:
    """Its seconds are those of the hidden states of all tokens but the last ones, so twice the rate halves them."""
    plan = chain([MACHINE] * 3, 48, 6, Link(1e15), Link(1e4, 1e-4), Link(1e15))
    seconds = 48 * (64 + NEW - 1) * MODEL.hidden * MODEL.itemsize / 1e4
    part, number, found, _ = pace_of(plan)
    assert (part, number, found) == ("link", 1, pytest.approx(seconds))
    assert pace_line(plan).startswith("the link from stage 1 to 2 sets the pace: it works ")
    assert next_lines(plan)[0].endswith(", the work of the link from stage 1 to 2")
    (only,) = job_helps(plan)  # half the latency gains nothing
    assert only.label == "links of twice the bandwidth"
    assert only.ratio == pytest.approx(2, rel=0.02)
    assert not only.searched


def test_slow_messages() -> None:
    """A token of the only cohort passes three links of 50 s for each step, whatever their bandwidth."""
    plan = chain([MACHINE] * 3, 1, 1, *[Link(1e15, 50.0)] * 3)
    assert plan.seconds == pytest.approx(3 * NEW * 50, rel=0.1)
    (only,) = job_helps(plan)
    assert only.label == "links of half the latency"
    assert only.ratio == pytest.approx(2, rel=0.1)


def test_one_sequence_passes_stages_in_turn() -> None:
    plan = chain([MACHINE] * 3, 1, 1, new=2000)  # so long that loading does not count
    assert plan.cohorts == 1
    assert pace_of(plan).part == "turns"
    line = pace_line(plan)
    assert line.startswith("stages wait for each other: stage ")
    assert line.endswith("; the block has 1 cohort for 3 stages")


def test_one_more_stage() -> None:
    """Its speedup is that of the plan with it, and is left out if none fits or if it gains little."""
    slow, fast = chain([MACHINE, SLOW, MACHINE], 96, 6), chain([MACHINE] * 3, 96, 6)

    def refused() -> ChainPlan:
        raise InvalidInput("too few layers")

    (found,) = job_helps(slow, lambda: fast)
    assert (found.label, found.searched) == ("one more stage", True)
    assert found.ratio == slow.seconds / fast.seconds > 1.5
    assert job_helps(fast, lambda: slow) == job_helps(slow, refused) == []
