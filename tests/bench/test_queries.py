"""Figures of bench.workers.queries, from times made up here."""

import pytest

from bench.workers.queries import CASES, LAYERS, SEQUENCES, TOKENS, Decoding, figures, virtual
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task


def task(op: Op, sweep: int, lane: str) -> Task:
    return Task(op, Cell(sweep, 0, 0), lane, (), ())


def test_figures_of_sweeps() -> None:
    """Sweep 0 stores a prompt. In sweep 1 attention runs from 1 to 6, keys and values from 2 to 4 and to 5 with their
    copy."""
    found = Decoding()
    found.add(task(Op.STORE_CACHE, 0, "worker1_write"), 0.0, 9.0)
    found.add(task(Op.PROJECT, 1, "device"), 0.0, 1.0)
    found.add(task(Op.ATTEND_CACHED, 1, "worker1"), 1.0, 6.0)
    found.add(task(Op.PROJECT_KEYS, 1, "device"), 2.0, 4.0)
    found.add(task(Op.SEND_KEYS, 1, "worker1_send"), 4.0, 5.0)
    found.add(task(Op.FINISH, 1, "device"), 6.0, 8.0)
    assert found.figures() == {
        "sweeps": [8.0], "busy": {"device": 5 / 8, "worker1": 5 / 8, "worker1_send": 1 / 8}, "overlap_seconds": 3.0,
        "seconds": {"compute up to attention": 1.0, "attend to cached tokens": 5.0, "compute keys and values": 2.0,
                    "send keys and values": 1.0, "compute from attention on": 2.0},
    }  # fmt: skip


def test_the_fastest_turn_of_each_sweep_counts() -> None:
    def run(*sweeps: float) -> dict[str, object]:
        return {"sweeps": list(sweeps), "busy": {"device": 0.5}, "seconds": {"attend": 1.0}, "overlap_seconds": 0.0}

    runs = {"without": [run(2.0, 9.0), run(3.0, 4.0)], "first": [run(1.0, 2.0), run(9.0, 9.0)]}
    found = figures(CASES[-1], {"runs": runs, "same": True})
    assert found["sweep_seconds"] == {"without": 3.0, "first": 1.5}
    assert found["saved"] == 0.5
    assert found["median_seconds"] == {"without": 3.5, "first": 5.5}


def test_virtual_seconds() -> None:
    """With one gpu_batch all tasks of a layer follow each other, except keys and values if queries go first."""
    for case in (case for case in CASES if case.kind == "slowed" and case.batches == 1):
        keys = 2 * case.kv_heads / 16  # of the elements of queries
        product, copy = case.hidden**2 * case.product, 4 * SEQUENCES * case.hidden / case.rate
        attention = SEQUENCES * (case.context + TOKENS / 2) * case.attention
        rest = product * (1 + 3 * case.ffn / case.hidden) + copy + case.latency
        plain = product * (1 + keys) + copy * (1 + keys) + case.latency + attention + rest
        beside = max(copy + case.latency + attention, product * keys + copy * keys + case.latency)
        assert virtual(case, False) == pytest.approx(LAYERS * plain)
        assert virtual(case, True) == pytest.approx(LAYERS * (product + beside + rest))
