"""Machines: their tiers, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.tier import cuda, machine
from flexengine.tier.base import ALIGN
from flexengine.tier.machine import Links, make_machine

# Machines.
_FREED = """
import torch
from flexengine.tier.memory import give_back_freed, keep_freed
def anonymous(): return int(open("/proc/self/smaps_rollup").read().split("Anonymous:")[1].split()[0]) * 1024
keep_freed(room=False)
torch.ones(100)
give_back_freed()  # what importing left: some blocks below may lie in it
before = anonymous()
short = [torch.ones(6 << 10) for _ in range(200)]  # of 24 KiB: in the heap, its gaps first
blocks = [torch.ones(24 << 10) for _ in range(1000)]  # of 96 KiB
short += [torch.ones(6 << 10) for _ in range(20)]
held = anonymous() - before
del blocks
print(held, anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_with_little_room_freed_blocks_leave_the_process_whatever_was_made_after_them() -> None:
    """In the heap they stayed below a block that was made later and kept: a job took 1.13 of its memory."""
    found = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True)
    assert not found.stderr
    held, kept = map(int, found.stdout.split())
    assert held > 90_000_000
    assert kept < 10_000_000


@pytest.mark.parametrize(
    ("kind", "host", "links", "message"),
    [
        ("tpu", None, None, "device is 'tpu'; it must be one of auto, cpu, cuda, sim"),
        ("cpu", 1 << 20, None, "host memory cannot be set for device 'cpu'.*use --device-mem"),
        ("cpu", None, Links(h2d=1.0), "link rates can be set for device 'sim' only, not 'cpu'"),
        ("cuda", None, None, "torch sees no CUDA GPU; use --device cpu"),
    ],
)
def test_machine_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, host: int | None, links: Links | None, message: str
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    with pytest.raises(InvalidInput, match=message):
        make_machine(kind, None, host, [tmp_path], links)


@pytest.mark.parametrize(
    ("kind", "device", "host", "message"),
    [
        ("cpu", 101, None, "--device-mem: 101 B are given, but the machine, or the cgroup .* has 100 B;"),
        ("sim", 101, None, "--device-mem: 101 B are given, but the machine, or the cgroup .* has 100 B;"),
        ("sim", None, 101, "--host-mem: 101 B are given, but the machine, or the cgroup .* has 100 B;"),
        ("sim", 60, 41, "--device-mem and --host-mem together: 101 B are given"),
        ("cuda", 51, None, "--device-mem: 51 B are given, but the GPU has 50 B;"),
        ("cuda", 50, 101, "--host-mem: 101 B are given, but the machine, or the cgroup .* has 100 B;"),
    ],
)
def test_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, device: int | None, host: int | None, message: str
) -> None:
    """Otherwise a plan would use memory that does not exist, and the system would kill the job."""
    monkeypatch.setattr(machine, "total_memory", lambda: 100)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda, "memory", lambda: (50, 50))
    with pytest.raises(InvalidInput, match=message):
        make_machine(kind, device, host, [tmp_path])


def test_cpu_machine_is_one_memory(tmp_path: Path) -> None:
    made = make_machine("cpu", 10 * ALIGN, None, [tmp_path])
    made.device.allocate(6 * ALIGN, "weights")
    with pytest.raises(OutOfMemory):
        made.host.allocate(5 * ALIGN, "cache")
    assert made.capacity.shared
    assert not made.capacity.staged
    made.close()


def test_sim_machine_is_three(tmp_path: Path) -> None:
    made = make_machine("sim", 10 * ALIGN, 5 * ALIGN, [tmp_path], Links(h2d=1e9, disk_write=1e9))
    assert (made.capacity.device, made.capacity.host, made.capacity.staged) == (10 * ALIGN, 5 * ALIGN, True)
    made.device.allocate(10 * ALIGN, "weights")
    home = made.host.allocate(5 * ALIGN, "weights")
    spilled = made.disk.allocate(300, "cache")
    made.host.load(home, torch.zeros(5 * ALIGN, dtype=torch.uint8))
    made.disk.store(torch.zeros(300, dtype=torch.uint8), spilled)
    assert made.traffic() == {"disk_read": 0, "disk_write": 300, "h2d": 5 * ALIGN, "d2h": 0}
    made.close()


def test_rates_of_further_disks_are_pairs() -> None:
    assert Links(more_disks=[[1, None]]).more_disks == ((1.0, None),)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"more_disks is 5; it must be a list with a pair \(read, write\) of rates"):
        Links(more_disks=5)  # type: ignore[arg-type]
