"""Reads that computing tasks begin: noted with their cell and times, counted and slowed by the tier."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.lossy import Lossy
from flexengine.places import USED_READ
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task
from flexengine.tier.base import Ledger
from flexengine.tier.memory import MemoryTier
from flexengine.tier.throttled import Throttled
from flexengine.worker.on_demand import DemandReads


def test_reads_are_noted_with_the_cell_in_which_they_began() -> None:
    disk, noted = MemoryTier("disk", Ledger("disk")), list[tuple[Task, float, float]]()
    reads = DemandReads(disk, [lambda *span: noted.append(span)])
    reads.cell = Cell(3, 1, 0)

    def read() -> int:
        reads.cell = Cell(3, 1, 1)  # the device goes on
        return 7

    reads.read_by(read)
    reads.read_by(lambda: 5)
    assert [(task.op, task.lane, task.cell) for task, _, _ in noted] == [
        (Op.READ_USED, USED_READ, Cell(3, 1, 0)), (Op.READ_USED, USED_READ, Cell(3, 1, 1)),
    ]  # fmt: skip
    (_, one, two), (_, three, four) = noted
    assert one <= two <= three <= four
    assert disk.bytes_read == 12


@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_traces_and_links_have_all_reads(
    families: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that pass the link of a sim machine are those that the summary counts, and those of the weights that are
    read once. The trace has reads of every layer."""
    known, waited = families(family), list[int]()
    monkeypatch.setattr(Throttled, "_wait", lambda tier, way, nbytes, _: waited.append(nbytes * (tier.name == "disk")))
    trace, links = tmp_path / "trace.json", Links(disk_read=1e9)
    with Engine(known.directory, device="sim", links=links, policy=Policy(2, 2, neurons=0.5),
                lossy=Lossy(flash="oracle"), trace=trace, offload_dir=tmp_path) as engine:  # fmt: skip
        engine.generate(known.rows, SamplingParams(max_tokens=4, ignore_eos=True))
        assert sum(waited) == engine.core.machine.disk.bytes_read
        layers = len(engine.core.skeleton.layers)
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == Op.READ_USED.value]
    assert {span["args"]["layer"] for span in spans} == set(range(layers))
    assert all(span["dur"] > 0 for span in spans)
