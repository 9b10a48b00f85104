"""Throttled tiers take the time of their link."""

import threading
import time

import pytest
import torch

from flexengine.tier.base import Ledger
from flexengine.tier.memory import MemoryTier
from flexengine.tier.throttled import Throttled


def test_a_throttled_tier_owes_what_is_too_short_to_sleep() -> None:
    """A hundred transfers of 0.05 ms that come one every 0.1 ms, and those at once, take their time in all."""
    tier = Throttled(MemoryTier("host", Ledger("host")), read_rate=2e6)
    home, buffer = tier.allocate(100, "x"), torch.zeros(100, dtype=torch.uint8)
    for gap in (0.0, 1e-4):
        began = now = time.perf_counter()
        for _ in range(100):
            tier.load(home, buffer)
            now = max(now, time.perf_counter()) + gap
            while time.perf_counter() < now:
                pass
        assert time.perf_counter() - began >= 100 * (5e-5 + gap) - 2e-4


def test_throttled_takes_the_time_of_the_link() -> None:
    """Transfers of one direction queue; the other direction has a link of its own."""
    tier = Throttled(MemoryTier("host", Ledger("host")), read_rate=2e6, write_rate=4e6)
    home = tier.allocate(100_000, "x")
    began = time.perf_counter()
    buffers = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(4)]
    threads = [threading.Thread(target=tier.load, args=(home, buffer)) for buffer in buffers[:3]]
    threads.append(threading.Thread(target=tier.store, args=(buffers[3], home)))
    for thread in threads:
        thread.start()
    threads[-1].join()
    written = time.perf_counter() - began
    for thread in threads:
        thread.join()
    read = time.perf_counter() - began
    assert read >= 0.15  # three loads, one after the other; a busy machine may add to it
    assert 0.025 <= written < read  # the store is the last to start, and waits for no load


def test_throttled_reads_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that reads by itself takes the time of the link, too: on a clock that moves by sleeping only."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    tier = Throttled(MemoryTier("host", Ledger("host")), read_rate=2e6)
    for number in range(1, 4):
        tier.read_by(lambda: 100_000)
        assert now[0] == pytest.approx(number * 0.05)
        assert tier.bytes_read == tier.inner.bytes_read == number * 100_000
