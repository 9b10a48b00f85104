"""Measurement of attention workers: over slow connections, and by several engines."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.guests.attention_workers.attender import FEW, SENT, measure_workers
from flexengine.guests.attention_workers.client import Client
from flexengine.tier.machine import Links, make_machine
from tests.helpers.attention_workers import thread_workers
from tests.helpers.plans import opt

MODEL = opt(2, 64, 4)


def measured(folder: Path, engines: int = 1) -> dict[str, Any]:
    tiers = thread_workers(1, 2 * SENT)
    for tier in tiers:
        tier.engines = engines
    machine = make_machine("sim", 1 << 28, 1 << 28, [folder], Links(), workers=tiers)
    try:
        return measure_workers(machine, MODEL, torch.float32)
    finally:
        machine.close()


def test_few_bytes_are_sent_over_a_slow_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write, sent = Client.write, list[int]()

    def slow(client: Client, handle: int, start: int, source: torch.Tensor) -> None:
        sent.append(source.nbytes)
        time.sleep(0.3)
        write(client, handle, start, source)

    monkeypatch.setattr(Client, "write", slow)
    rate = measured(tmp_path)["worker_links"]["worker1"]
    assert sent == [SENT // FEW]
    assert 0 < rate <= 2 * SENT / FEW / 0.3


def test_engines_count_with_equal_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a clock that counts its readings, all rates are the same in every measurement."""
    ticks = iter(range(1 << 20))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 1000)
    monkeypatch.setattr("flexengine.guests.attention_workers.attender._seconds", lambda *given: given[-1] / 1000)
    alone, shared = measured(tmp_path), measured(tmp_path, engines=4)
    for rates in ("worker_links", "worker_attention"):
        assert shared[rates]["worker1"] == pytest.approx(alone[rates]["worker1"] / 4)
    assert shared["worker_seconds"] == pytest.approx(alone["worker_seconds"] * 4)
