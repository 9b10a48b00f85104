"""What tests of measurements share."""

from typing import Any

from flexengine.plan.hardware import Hardware
from flexengine.tier.machine import Links, Machine

MB = 10**6
SLOW = Links(h2d=200 * MB, d2h=100 * MB, disk_read=50 * MB, disk_write=25 * MB)


def books(machine: Machine) -> list[tuple[int, int, dict[str, int]]]:
    ledgers = [machine.tier(tier).ledger for tier in ("device", "host", "disk")]
    return [(ledger.used, ledger.peak, dict(ledger.entries)) for ledger in ledgers]


# What is kept.


def hardware(**fields: Any) -> Hardware:
    table = ((1.0, 2.0), (8.0, 4.0))
    lanes = {"disk_read": table, "disk_write": table, "h2d": table}
    return Hardware("a machine", "cpu", None, None, None, lanes, table, {"float32": table}, table, table,
                    **{"elementwise": 5.0, "measured": True, **fields})  # fmt: skip
