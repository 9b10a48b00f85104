"""Attention workers with pages in a file: sequences that find no room in memory go there, whole."""

import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.guests.attention_workers import pool
from flexengine.places import worker_names, workers_in_memory
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool
from flexengine.schedule.place import cache_homes
from flexengine.schedule.sweeps import Sequence, Sweeps
from tests.helpers.attention_workers import listening
from tests.helpers.families import LENGTHS, NEW
from tests.helpers.plans import FLAT, opt

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
ALL = {"workers": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MEASURED", 1 << 20)


def mapped_files(folder: Path) -> int:
    """Number of mappings in this process of files in a directory that have no name any more."""
    return sum(str(folder) in line and "(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("partition", ["requests", "heads"])
def test_tokens_and_the_order_in_which_workers_fill(families: Any, tmp_path: Path, partition: str) -> None:
    """Two workers in memory hold a sequence or two each; the other sequences of the block are in the file. A worker
    that holds a part of every sequence has no use for it."""
    known = families("llama")
    with ExitStack() as stack:
        page = 2 * 2 * 16 * 16 * 4 * 4  # K and V, KV heads, tokens, head_dim, bytes, layers
        room = page * (-(-(max(LENGTHS) + NEW) // 16) + 1) + 4096
        filed = stack.enter_context(listening(1 << 22, tmp_path))[0]
        near = [stack.enter_context(listening(room))[0] for _ in range(2)]
        engine = stack.enter_context(Engine(
            known.directory, policy=Policy(8, 1, cache=ALL, partition=partition), device="cpu",
            attention_workers=[near[0], filed, near[1]],
        ))  # fmt: skip
        assert [worker.name for worker in engine.core.machine.workers] == ["worker1", "worker2", "workerfile1"]
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        peaks, asked = engine.summary.peak_bytes, engine.summary.bytes
        assert 0 < peaks["worker1"] <= room
        assert (peaks["workerfile1"] > 0) == (asked["workerfile1_send"] > 0) == (partition == "requests")
        layout = engine.plan(Workload.of((len(p), NEW) for p in known.prompts))
        assert ("workerfile1" in layout.pools) == (partition == "requests")


def test_pages_are_in_a_file_until_the_engine_ends(families: Any, tmp_path: Path) -> None:
    """A single worker, in a file, is an ordinary worker."""
    known = families("llama")
    with listening(1 << 22, tmp_path) as (address, _):
        with Engine(
            known.directory, policy=Policy(4, 2, cache=ALL), device="sim", attention_workers=[address]
        ) as engine:
            seen = list[int]()
            engine.on_sweep = lambda progress: seen.append(mapped_files(tmp_path))
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
            tier = engine.core.machine.workers[0]
            assert tier.name == "worker1"
            assert engine.planner.rates.known().worker_attention["worker1"] <= tier.client.rate  # type: ignore[attr-defined]
        assert not any(tmp_path.iterdir())
    assert max(seen, default=0) > 0


def test_sequences_enter_files_last() -> None:
    """Each worker in memory has room for two sequences of 32 tokens; the third pair goes to the file."""
    pools = {"worker1": (Pool(4, 16),), "worker2": (Pool(4, 16),), "workerfile1": (Pool(100, 16),)}
    sweeps = Sweeps(Policy(6, 1, cache=ALL), pools)
    for number in range(6):
        sweeps.add(Sequence(number, 20, 10))
    sweeps.begin(lambda sequence, tokens: None)
    homes = [sweeps.live[number].home for number in range(6)]
    assert sorted(homes[:4]) == ["worker1", "worker1", "worker2", "worker2"]
    assert homes[4:] == ["workerfile1", "workerfile1"]


def test_a_file_takes_only_what_is_left_of_the_share() -> None:
    """Of six sequences, four may be at workers. They have room for two, so the file takes two, and the device the rest.
    The cost model divides them in the same way."""
    model, work = opt(2, 64, 2, 512), Workload({(20, 10): 6})
    page = 2 * 16 * model.kv_token  # two layers
    capacity = Capacity(1 << 30, 1 << 30, 1 << 40, shared=False, staged=True, filed=1,
                        workers=(2 * page + 4096, 2 * page + 4096, 1 << 30))  # fmt: skip
    policy = Policy(3, 2, cache={"workers": 4 / 6, "device": 2 / 6})
    layout = lay_out(model, policy, work, capacity)
    sweeps = Sweeps(policy, layout.pools)
    for number in range(6):
        sweeps.add(Sequence(number, 20, 10))
    sweeps.begin(lambda sequence, tokens: None)
    homes = Counter(sequence.home for sequence in sweeps.live.values())
    assert homes == {"worker1": 1, "worker2": 1, "workerfile1": 2, "device": 2}
    found = Cost(model, FLAT.with_capacity(capacity), work).predict(layout).fractions
    assert {place: found[f"cache@{place}"] for place in homes} == pytest.approx(
        {place: n / 6 for place, n in homes.items()}, rel=0.15
    )  # it counts mean tokens, not pages


def test_names_and_shares() -> None:
    places = ("device", "host", "disk", *worker_names(3, 1))
    assert places[3:] == ("worker1", "worker2", "workerfile1")
    assert workers_in_memory(places) == ("worker1", "worker2")
    policy = Policy(5, 1, cache={"workers": 0.8, "device": 0.2})
    assert cache_homes(policy, places) == {"device": 1, "workerfile1": 4, "worker1": 2, "worker2": 2}


def test_directories_that_cannot_hold_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"cannot hold a file of pages \(No such file or directory\)"):
        pool.read_rate(tmp_path / "none", 1)
    with pytest.raises(InvalidInput, match=r"is 100,000 TB, but the disk of .* [\d.]+ [kMGT]?B free; give"):
        pool.read_rate(tmp_path, 10**17)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(OSError, match="No space left"):
        pool.new_file(tmp_path, 2 * free)
    pages = pool.new_file(tmp_path, 8192)
    assert pages.tolist() == [0] * 8192
    pages[:] = 7
    assert mapped_files(tmp_path) == 1
    del pages
    assert mapped_files(tmp_path) == 0
