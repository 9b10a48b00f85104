"""Rates of links, measured against throttles."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.measure import links
from flexengine.measure.machine import measure_machine
from flexengine.tier.machine import Links, Machine
from tests.helpers.measuring import MB, SLOW, books

# Links.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes while the thread sleeps for a throttle, and 0.5 ms at each reading: no other program
    takes any."""
    now = [0.0]

    def pass_by(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(time, "perf_counter", lambda: pass_by(5e-4))
    monkeypatch.setattr(time, "sleep", pass_by)


@pytest.mark.usefixtures("clock")
def test_throttled_links(at: Callable[..., Machine]) -> None:
    machine = at("sim", 50 * MB, SLOW)
    home = machine.device.allocate(5000, "something")
    machine.host.ledger.peak = 12345
    before = books(machine)
    found = links.measure_links(machine)
    assert books(machine) == before
    machine.device.free(home, "something")
    assert set(found["links"]) == {"h2d", "d2h", "disk_read", "disk_write"}
    for name, table in (*found["links"].items(), ("checkpoint_read", found["checkpoint_read"])):
        throttle: float = getattr(SLOW, "disk_read" if name == "checkpoint_read" else name)
        assert all(rate <= throttle * 1.001 for _, rate in table), name
        assert [x for x, _ in table] == sorted({x for x, _ in table})
        assert table[-1][1] >= 0.75 * throttle, name


@pytest.mark.usefixtures("clock")
def test_offload_directories_are_measured_briefly(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that lacks the room, and a directory that cannot be written, are left out."""
    machine = at("sim", None, Links(disk_read=80 * MB, disk_write=40 * MB, more_disks=((None, 20 * MB),)), disks=2)
    before, began = books(machine), time.perf_counter()
    with links.unnoticed(machine):
        found = links.quick_spills(machine)
    assert books(machine) == before
    assert time.perf_counter() - began < 6.0  # of 4 MiB at 20 MB/s, too
    for lane, throttle in dict(disk_read=80 * MB, disk_write=40 * MB, disk2_write=20 * MB).items():
        assert throttle * 0.75 <= found[lane][-1][1] <= throttle * 1.001, lane
    machine.no_offload = "read-only"
    assert set(links.quick_spills(machine)) == {"disk2_read", "disk2_write"}
    monkeypatch.setattr(links, "QUICK_SPILLED", links.room(machine, "disk2") + 1)
    assert not links.quick_spills(machine)


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_every_disk_has_rates_of_its_own(at: Callable[..., Machine]) -> None:
    rates = Links(disk_read=80 * MB, disk_write=80 * MB, more_disks=((40 * MB, 20 * MB), (None, 10 * MB)))
    machine = at("sim", None, rates, disks=3)
    before = books(machine)
    found = links.measure_links(machine)["links"]
    assert books(machine) == before
    for number, disk in enumerate(("disk", "disk2", "disk3")):
        for way, throttle in zip(("read", "write"), rates.of_disk(number), strict=True):
            assert throttle is None or throttle * 0.75 <= found[f"{disk}_{way}"][-1][1] <= throttle * 1.001
    assert set(found) == {"h2d", "d2h"} | {f"{disk}_{way}" for disk in ("disk", "disk2", "disk3")
                                           for way in ("read", "write")}  # fmt: skip


@pytest.mark.usefixtures("clock")
def test_a_slow_link_is_not_measured_for_long(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that would take longer than the patience is left out."""
    monkeypatch.setattr(links, "PATIENCE", 0.1)
    found = links.measure_links(at("sim", None, Links(disk_write=5 * MB)))
    assert [x for x, _ in found["links"]["disk_write"]] == [64 << 10, 256 << 10]


@pytest.mark.parametrize("memory", [40_000, 400_000, 2_000_000])
def test_little_memory(at: Callable[..., Machine], memory: int) -> None:
    """Transfers and kernels are as small as the device, and what cannot be measured there is not known."""
    machine = at("sim", memory)
    found = measure_machine(machine, torch.float32, ())
    assert max(x for x, _ in found.links["h2d"]) <= memory / 2
    assert all(figure > 0 for _, figure in (*found.products["float32"], *found.decode_attention))
    assert machine.device.ledger.peak == 0


def test_shared_memory_has_no_way_back(at: Callable[..., Machine]) -> None:
    assert set(links.measure_links(at("cpu", 100 * MB))["links"]) == {"h2d", "disk_read", "disk_write"}


def test_the_checkpoint_itself_is_read(
    at: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stretch within the files, walked in order; what is too small is not read at all."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    paths[0].write_bytes(bytes(300_001))
    paths[1].write_bytes(bytes(200_000))
    machine = at("cpu", 100 * MB)
    monkeypatch.setattr(links, "MIN_CHECKPOINT_BYTES", 500_000)
    with links.readable(machine, paths) as files:
        assert files == {paths[0]: 300_000, paths[1]: 200_000}
        found = [next(stream) for stream in [links.stretches(machine, files, 100_000)] for _ in range(6)]
        assert [(home.place.path, home.start) for home in found] == [
            (paths[0], 0), (paths[0], 100_000), (paths[0], 200_000), (paths[1], 0), (paths[1], 100_000), (paths[0], 0),
        ]  # fmt: skip
        assert all(home.place.uncached for home in found)  # both were written just now
    assert not any(home.place.uncached for home in found)
    monkeypatch.setattr(links, "MIN_CHECKPOINT_BYTES", 500_001)
    with links.readable(machine, paths) as files:
        assert not set(files) & set(paths)
        assert list(files.values()) == [16 << 20]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("halts", [(), (0,), (1,), (2,)])
def test_one_halt_of_the_disk_decides_no_quick_rate(
    halts: tuple[int, ...], at: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read of 4 MiB waits half a second: the only one of the first turn, or one of a later turn."""
    path, size = tmp_path / "model.safetensors", links.QUICK_READS[1]
    path.write_bytes(bytes(4 * size))
    machine = at("sim", 50 * MB, Links(disk_read=400 * MB))
    load_all, reads = machine.disk.load_all, []

    def loaded(pairs: Any) -> None:
        load_all(pairs)
        if pairs[0][0].nbytes == size:
            time.sleep(0.5 if len(reads) in halts else 0.0)
            reads.append(size)

    monkeypatch.setattr(machine.disk, "load_all", loaded)
    (_, small), (_, large) = links.quick_reads(machine, [path])
    assert 0.75 * 400 * MB <= large <= 400.5 * MB
    assert small <= 400.5 * MB
    assert len(reads) > max(halts, default=0)
