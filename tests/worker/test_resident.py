"""Weights that are read once: bytes in memory and on further disks equal those of the checkpoint's files."""

import random
from pathlib import Path

import pytest
import torch

from flexengine.places import place_names
from flexengine.plan.layout import Layout
from flexengine.policy import Policy
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine, make_machine
from flexengine.worker import resident
from flexengine.worker.regions import Regions
from flexengine.worker.resident import ResidentReads

UNITS = 3


def layout_with(copying: int) -> Layout:
    layout = Layout(Policy(), place_names(2))
    layout.copying = copying
    return layout


def pieces(rng: random.Random, machine: Machine, file: Path, dtype: torch.dtype) -> tuple[list[Region], bytes]:
    """Return one to four stretches of a file in random order, of odd lengths, and their bytes one after the other."""
    found, content, size = [], file.read_bytes(), file.stat().st_size
    for _ in range(rng.randint(1, 4)):
        nbytes = rng.choice([256, 4096, 4098, 10_000, 30_000]) // dtype.itemsize * dtype.itemsize
        start = rng.randrange(0, size - nbytes, dtype.itemsize)
        found.append((start, nbytes))
    regions = [machine.disk.checkpoint(file, *each, dtype) for each in found]  # type: ignore[attr-defined]
    return regions, b"".join(content[start : start + nbytes] for start, nbytes in found)


@pytest.mark.parametrize("seed", range(8))
def test_copies_equal_the_files(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring tensors of odd sizes in small batches: no copy writes beyond its own blocks, no transfer gives up
    direct I/O, and the ledger of RAM holds the buffer that copies pass through and nothing else."""
    rng = random.Random(seed)
    monkeypatch.setattr(resident, "BATCH_BYTES", rng.choice([4096, 9_999, 20_000, 1 << 20]))
    file = tmp_path / "weights"
    file.write_bytes(rng.randbytes(300_001))
    machine = make_machine("cpu", 1 << 26, None, [tmp_path / "a", tmp_path / "b"])
    regions, expected = Regions(machine), list[tuple[Region | torch.Tensor, bytes]]()
    disk = machine.tier("disk2")
    try:
        arrivals = ResidentReads(machine, regions, layout_with(8192))
        probe = regions.take("disk2", 1, "probe")  # opens the spill file
        direct = probe.place.direct
        for _ in range(12):
            dtype, unit = rng.choice([torch.float16, torch.float32]), rng.randrange(UNITS)
            sources, content = pieces(rng, machine, file, dtype)
            if rng.random() < 0.3:
                target = torch.empty(len(content) // dtype.itemsize, dtype=dtype)
                arrivals.into_memory(unit, sources, target)
                expected.append((target, content))
            else:
                region = regions.take("disk2", len(content), "weights", dtype)
                arrivals.onto_disk(unit, sources, disk, region)
                expected.append((region, content))
        arrivals.divide()
        total = sum(len(content) for _, content in expected)
        assert arrivals.missing == 1
        for unit in arrivals.units:
            arrivals.load_resident(unit)
        assert (arrivals.loaded_bytes, arrivals.missing, arrivals.units) == (total, 0, [])
        assert machine.host.ledger.used == 8192
        for target, content in expected:
            if isinstance(target, Region):
                back = torch.empty(len(content) // target.dtype.itemsize, dtype=target.dtype)
                disk.load(target, back)
            else:
                back = target
            assert back.view(torch.uint8).numpy().tobytes() == content
        assert probe.place.direct == direct
    finally:
        regions.free()
        machine.close()


def test_an_interrupted_copy_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed write the batch is still pending; the next call copies all of it."""
    file = tmp_path / "weights"
    file.write_bytes(random.Random(1).randbytes(50_000))
    machine = make_machine("cpu", 1 << 26, None, [tmp_path / "a", tmp_path / "b"])
    regions, disk = Regions(machine), machine.tier("disk2")
    try:
        arrivals = ResidentReads(machine, regions, layout_with(4096))
        source = machine.disk.checkpoint(file, 0, 50_000, torch.float16)  # type: ignore[attr-defined]
        region = regions.take("disk2", 50_000, "weights", torch.float16)
        arrivals.onto_disk(0, [source], disk, region)
        arrivals.divide()
        store, calls = type(disk).store, list[int]()

        def failing(tier: object, data: torch.Tensor, target: Region) -> None:
            calls.append(target.start)
            if len(calls) == 5:
                raise OSError("no space left")
            store(disk, data, target)

        monkeypatch.setattr(type(disk), "store", failing)
        with pytest.raises(OSError, match="no space left"):
            arrivals.load_resident(0)
        assert arrivals.units == [0]
        assert arrivals.missing == 1
        arrivals.load_resident(0)
        back = torch.empty(25_000, dtype=torch.float16)
        disk.load(region, back)
        assert back.view(torch.uint8).numpy().tobytes() == file.read_bytes()
    finally:
        regions.free()
        machine.close()


def test_a_write_within_a_block_is_refused(tmp_path: Path) -> None:
    """A disk pads the last block of a write; from the middle of a block the padding would reach the next region."""
    machine = make_machine("cpu", 1 << 26, None, [tmp_path / "a"])
    regions = Regions(machine)
    try:
        region = regions.take("disk", 8192, "weights")
        with pytest.raises(ValueError, match="must begin at a multiple of 4,096"):
            machine.disk.store(torch.zeros(256, dtype=torch.uint8), region.part(256, 256))
    finally:
        regions.free()
        machine.close()
