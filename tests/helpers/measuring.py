"""What tests of measurements share."""

from typing import Any

import pytest

from flexengine.measure import attention, kernels, links, machine, model, streaming, timing
from flexengine.plan.hardware import Hardware
from flexengine.tier.machine import Links, Machine

MB = 10**6
SLOW = Links(h2d=200 * MB, d2h=100 * MB, disk_read=50 * MB, disk_write=25 * MB)


def books(machine: Machine) -> list[tuple[int, int, dict[str, int]]]:
    ledgers = [machine.tier(tier).ledger for tier in ("device", "host", "disk")]
    return [(ledger.used, ledger.peak, dict(ledger.entries)) for ledger in ledgers]


def measure_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a moment for each figure, and little memory."""
    moments = [(links, "COPY_SECONDS"), (links, "SPILL_SECONDS"), (links, "READ_SECONDS"), (kernels, "SECONDS"),
               (kernels, "WINDOW"), (machine, "SECONDS"), (model, "HEAD_SECONDS"), (attention, "SECONDS"),
               (attention, "QUICK_SECONDS"), (links, "QUICK_SECONDS"), (machine, "QUICK_SECONDS")]  # fmt: skip
    for module, name in moments:
        monkeypatch.setattr(module, name, 0.005)
    monkeypatch.setattr(timing, "NOTICED", 1e9)  # other tests may run beside
    monkeypatch.setattr(model, "LAYER_SECONDS", 0.1)
    monkeypatch.setattr(model, "QUICK", ((64, 1, 16), 0.02, 0.005))
    monkeypatch.setattr(machine, "COPIED", 1 << 20)
    monkeypatch.setattr(streaming, "PASSES_SECONDS", 0.01)
    monkeypatch.setattr(streaming, "DELEGATION_SECONDS", 0.01)
    monkeypatch.setattr(kernels, "SMALL", (128, 1 << 20))
    monkeypatch.setattr(kernels, "TURNS", 1)
    monkeypatch.setattr(kernels, "QUICK_TURNS", 1)
    for name in ("COPIED", "SPILLED", "WRITTEN"):
        monkeypatch.setattr(links, name, 16 << 20)
    for name in ("COPIES", "READS"):
        monkeypatch.setattr(links, name, (64 << 10, 1 << 20, 4 << 20))


# What is kept.


def hardware(**fields: Any) -> Hardware:
    table = ((1.0, 2.0), (8.0, 4.0))
    lanes = {"disk_read": table, "disk_write": table, "h2d": table}
    return Hardware("a machine", "cpu", None, None, None, lanes, table, {"float32": table}, table, table,
                    **{"elementwise": 5.0, "measured": True, **fields})  # fmt: skip
