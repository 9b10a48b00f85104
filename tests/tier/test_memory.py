"""Mappings of RAM in huge or small pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from flexengine.tier import memory


def flags(tensor: torch.Tensor) -> set[str]:
    """Return the kernel's flags of the mapping that holds a tensor."""
    address, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(number, 16) for number in found.groups())
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no mapping")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize("huge", [True, False])
def test_regions_use_the_pages_that_are_faster(huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "huge_pages_are_faster", lambda: huge)
    region = memory.aligned_buffer(3 * memory.HUGE)
    assert {"hg", "nh"} & flags(region) == {"hg" if huge else "nh"}
    assert region.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("slow", [True, False])
def test_pages_are_measured(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock shows which kind of pages is written to, and how long that takes."""
    kinds, now = list[bool](), 0.0
    make = memory._mapped

    def mapped(nbytes: int, huge: bool) -> torch.Tensor:
        kinds.append(huge)
        return make(nbytes, huge)

    def clock() -> float:
        nonlocal now
        now += 2.0 if kinds[-1] == slow else 1.0
        return now

    monkeypatch.setattr(memory, "_mapped", mapped)
    monkeypatch.setattr(memory.time, "perf_counter", clock)
    assert memory.huge_pages_are_faster.__wrapped__() is not slow
    assert sorted(kinds) == [False, True]
