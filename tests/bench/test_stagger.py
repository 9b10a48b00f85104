"""bench.stagger: sides that fail are named and end the worker; the case of turns is as long as its docstring says."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.stagger import engines, turns
from flexengine.plan.turns import layer_period

AWAY = turns.ATTENTION + 2 * turns.CROSSING


@pytest.mark.parametrize(("order", "batches"), turns.ORDERS)
def test_the_window_has_the_period_of_the_formula(order: str, batches: int) -> None:
    """So that filling and draining are outside of it."""
    expected = layer_period(order, turns.ENGINES, batches, turns.SLICE, batches * turns.ATTENTION, AWAY)
    assert turns.virtual(order, batches) == pytest.approx(expected, rel=1e-3)


def test_the_case_of_turns_is_short() -> None:
    """Seconds in which slices and attention sleep: prompts on one engine after the other, and decode sweeps."""
    layers, sleeping = turns.SHAPE.layers, 0.0
    for order, batches in turns.ORDERS:
        sleeping += (turns.TOKENS - 1) * layers * turns.virtual(order, batches) + layers * batches * turns.SLICE
    assert sleeping < 45


def test_a_side_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("a\nthe last words\n")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], stdout=subprocess.PIPE, text=True)
    with pytest.raises(RuntimeError, match="one ended with code 7:\na\nthe last words"):
        engines.answer(ended, "one", tmp_path)


@pytest.mark.slow
def test_the_worker_ends_with_an_engine_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[str]]()
    real = engines.start

    def kept(*args: object) -> "subprocess.Popen[str]":
        started.append(real(*args))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(engines, "start", kept)
    job = {"name": "an engine", "model": str(tmp_path / "none"), "rows": [], "tokens": 1, "link": 1e9, "policy": {},
           "address": "127.0.0.1:1"}  # fmt: skip
    with pytest.raises(RuntimeError, match="an engine ended with code"), engines.pool(0.0, tmp_path):
        engines.answer(engines.start(job, tmp_path), "an engine", tmp_path)
    assert [process.poll() is not None for process in started] == [True, True]
