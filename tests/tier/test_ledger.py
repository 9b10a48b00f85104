"""The ledger books every byte and refuses what does not fit."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from flexengine.errors import OutOfMemory
from flexengine.tier.base import Ledger

# Ledger.


def test_ledger() -> None:
    ledger = Ledger("host", 100)
    ledger.reserve(60, "a")
    ledger.reserve(40, "b")
    with pytest.raises(OutOfMemory) as caught:
        ledger.reserve(1, "c")
    assert str(caught.value) == "host memory: c needs 1 B, but 100 B of 100 B are taken (1 B too much)"
    ledger.release(20, "a")
    assert (ledger.used, ledger.peak, ledger.entries) == (80, 100, {"a": 40, "b": 40})
    for what, nbytes in (("a", 41), ("unused", 1)):
        with pytest.raises(ValueError, match=f"host: {what} releases {nbytes}"):
            ledger.release(nbytes, what)
    ledger.release(40, "a")
    ledger.release(40, "b")
    ledger.reserve(10, "c")
    assert (ledger.used, ledger.peak, ledger.entries) == (10, 100, {"c": 10})
    ledger.restart_peak()
    assert (ledger.used, ledger.peak) == (10, 10)


def test_ledger_from_many_threads() -> None:
    ledger = Ledger("host", 10_000)
    refused: list[int] = []

    def work(i: int) -> None:
        for _ in range(500):
            try:
                ledger.reserve(1000 + i, f"t{i % 3}")
            except OutOfMemory:
                refused.append(i)
                continue
            assert ledger.used <= 10_000
            ledger.release(1000 + i, f"t{i % 3}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert (ledger.used, ledger.entries) == (0, {})
    assert ledger.peak <= 10_000
