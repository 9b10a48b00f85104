"""Mappings of RAM in huge or small pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from flexengine.tier import memory
from flexengine.tier.base import Ledger


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
def test_regions_use_small_pages_if_the_kernel_reports_free_ones(huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reports_free_pages", lambda: not huge)
    region = memory.aligned_buffer(3 * memory.HUGE)
    assert {"hg", "nh"} & flags(region) == {"hg" if huge else "nh"}
    assert region.data_ptr() % mmap.PAGESIZE == 0


def test_memory_in_huge_pages_is_known_as_long_as_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reports_free_pages", lambda: True)
    tier = memory.MemoryTier("ram", Ledger("ram"))
    region = tier.allocate(3 * memory.HUGE, "weight slots")
    view = tier.view(region)[memory.HUGE :]
    assert not memory.in_huge_pages(view)
    tier.receive_reads(region)
    assert memory.in_huge_pages(view) is ("hg" in flags(view))
    start = region.place.data_ptr()
    del region
    assert start not in memory._huge


@pytest.mark.parametrize(
    ("order", "reports"),
    [("9\n", True), ("0\n", True), ("-1\n", False), ("11\n", False), ("4294967295\n", False), ("", False),
     (None, False)],
)  # fmt: skip
def test_a_kernel_that_reports_free_pages_is_known(
    order: str | None, reports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "REPORTED", file := tmp_path / "page_reporting_order")
    if order is not None:
        file.write_text(order)
    assert memory.reports_free_pages.__wrapped__() is reports
