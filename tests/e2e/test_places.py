"""More than one disk: each offload directory is a place with lanes, rates, capacity and ledger of its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan import layout as plan_layout
from flexengine.plan.rates import assumed
from flexengine.plan.workload import Workload
from flexengine.tier.machine import make_machine
from flexengine.worker import resident
from tests.helpers.families import LENGTHS, NEW

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SECOND = (0, 0, 0, 1)
ALL = (0.1, 0.2, 0.3, 0.4)
# The tiny LLaMA: elements per layer, of the head, and KV bytes of a token in a layer.
HIDDEN, FFN, KV, VOCAB, LAYERS, FP32 = 64, 112, 32, 601, 4, 4
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * FFN + 2 * HIDDEN
POLICIES = [
    dict(gpu_batch_size=8, num_gpu_batches=1, weights=SECOND),
    dict(gpu_batch_size=3, num_gpu_batches=3, weights=(0, 0, 0.5, 0.5), cache=(0, 0, 0.5, 0.5), slots=3),
    dict(gpu_batch_size=2, num_gpu_batches=4, weights=ALL, cache=ALL, activations=ALL),
    dict(gpu_batch_size=2, num_gpu_batches=3, weights=(0, 0, 0, 0.3, 0.7), cache=(0, 0, 0, 0, 1), slots=1),
    dict(gpu_batch_size=3, num_gpu_batches=2, weights=SECOND, cache=SECOND, activations=SECOND, slots=1,
         schedule="diagonal", prefill_tokens=11),
]  # fmt: skip


def directories(folder: Path) -> list[Path]:
    return [folder / "a", folder / "b", folder / "c"]


# Weights of experts, sinks and windows lie at other places than a Llama's, but lanes and devices treat all alike.
CASES = [("llama", device, overlap) for device in ("sim", "cpu") for overlap in (True, False)]


# The quick tests meet each policy once, on a device of its own.
ALL_CASES = [(number, *case) for number in range(len(POLICIES)) for case in (*CASES, ("gpt-oss", "sim", True))]


@pytest.mark.parametrize(("number", "family", "device", "overlap"), [
    pytest.param(*case, marks=[] if i % len(POLICIES) == case[0] % 4 else pytest.mark.slow)
    for i, case in enumerate(ALL_CASES)
])  # fmt: skip
def test_tokens(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, number: int, device: str, overlap: bool
) -> None:
    """Tokens equal those of transformers, and every place holds what the layout books. Tensors are copied block by
    block, in small batches."""
    monkeypatch.setattr(plan_layout, "COPIED", 4096)
    monkeypatch.setattr(resident, "BATCH_BYTES", 20_000)
    known = families(family)
    options = {"device": device, "overlap": overlap, "offload_dir": directories(tmp_path)}
    with Engine(known.directory, policy=Policy(**POLICIES[number]), **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        assert [r.token_ids for r in engine.generate(known.rows[:3], GREEDY)] == known.expected[:3]  # weights stay
        layout = engine.plan(Workload.of((len(p), NEW) for p in known.prompts[:3]))
        peaks = engine.summary.peak_bytes
        assert {"disk", "disk2", "disk3"} < set(peaks)
        for place in ("disk", "disk2", "disk3"):
            assert peaks[place] == layout.total(place)
        engine.close()
        assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())
    assert not [file for folder in directories(tmp_path) if folder.exists() for file in folder.iterdir()]


def test_weights_of_the_second_disk_are_copied_once_and_read_in_every_sweep(families: Any, tmp_path: Path) -> None:
    known, policy = families("llama"), Policy(gpu_batch_size=8, num_gpu_batches=1, weights=SECOND)
    with Engine(known.directory, policy=policy, device="sim", offload_dir=directories(tmp_path)[:2]) as engine:
        engine.generate(known.rows, GREEDY)
        moved = engine.summary.bytes
        first = [t for prompt in known.prompts for t in prompt]
        sweeps = [first, *([answer[i] for answer in known.expected] for i in range(NEW - 1))]
        rows = sum(len(set(ids)) for ids in sweeps)  # of the embedding
        streamed = FP32 * NEW * (LAYERS * LAYER + VOCAB * HIDDEN)
        assert moved["h2d"] == streamed
        assert moved["disk2_read"] == streamed + FP32 * rows * HIDDEN
        assert moved["disk2_write"] == FP32 * (LAYERS * LAYER + 2 * VOCAB * HIDDEN)
        assert moved["disk_read"] == moved["disk_write"] == moved["d2h"] == 0  # the copy's reads are not a sweep's
        engine.generate(known.rows, GREEDY)
        assert engine.summary.bytes["disk2_write"] == 0  # the second job finds the copy


def test_cache_on_two_disks(families: Any, tmp_path: Path) -> None:
    """Half of the sequences' pages cross the lanes of each disk."""
    known, token = families("llama"), 2 * KV * FP32
    policy = Policy(gpu_batch_size=4, num_gpu_batches=2, cache=(0, 0, 0.5, 0.5))
    with Engine(known.directory, policy=policy, device="sim", offload_dir=directories(tmp_path)[:2]) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        moved = engine.summary.bytes
    page = -(-(max(LENGTHS) + NEW - 1) // 16) * 16
    while page * token % 4096:
        page += 16
    count = len(LENGTHS) // 2
    for disk in ("disk", "disk2"):
        assert moved[f"{disk}_read"] == LAYERS * count * (NEW - 1) * page * token
        assert moved[f"{disk}_write"] == LAYERS * count * NEW * page * token


def test_bad_directories(families: Any, tmp_path: Path) -> None:
    model, (a, b, _) = families("llama").directory, directories(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    for given, message in (
        ([a, b, tmp_path / "." / "a"], r"a is given twice; give each directory once"),
        ([a, tmp_path / "file" / "x"], r"file is no directory to write in; set offload_dir"),
        ([tmp_path / str(i) for i in range(9)], "offload_dir is given 9 times; give it at most 8 times"),
        ([a, tmp_path / "dangling"], r"dangling is no directory to write in; set offload_dir"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Engine(model, policy=Policy(), device="cpu", offload_dir=given)
    with (
        Engine(model, policy=Policy(cache=SECOND), device="cpu", offload_dir=a) as engine,
        pytest.raises(InvalidInput, match="share on disk2, but the machine has device, host, disk; give offload_dir"),
    ):
        engine.generate([{"prompt_token_ids": [1, 2]}], GREEDY)


def test_a_full_second_disk_is_named(families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.tier import machine

    def free(directory: Path) -> int:
        return 1 << 30 if directory.name == "a" else 1 << 16

    monkeypatch.setattr(machine, "usable_disk", free)
    known, policy = families("llama"), Policy(gpu_batch_size=4, weights=SECOND)
    with (
        Engine(known.directory, policy=policy, device="sim", offload_dir=directories(tmp_path)[:2]) as engine,
        pytest.raises(OutOfMemory, match=r"disk2 memory: at least .* 32.7 kB are given.*directory of disk2. to one"),
    ):
        engine.generate(known.rows, GREEDY)


def test_the_second_directory_serves_where_the_first_cannot_be_used(families: Any, tmp_path: Path) -> None:
    """All free bytes are then the second disk's, and a job that needs a disk runs."""
    (tmp_path / "file").touch()
    known = families("llama")
    options = {"device": "cpu", "offload_dir": [tmp_path / "file" / "x", tmp_path / "b"]}
    with Engine(known.directory, policy=Policy(4, 2, cache=SECOND, weights=(0, 0, 1)), **options) as engine:
        machine = engine.core.machine
        assert machine.no_offload
        assert machine.capacity.limits["disk"] == 1
        assert (machine.capacity.limits["disk2"] or 0) > shutil.disk_usage(tmp_path).free * 0.9
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


def test_directories_on_one_file_system_share_its_bytes(tmp_path: Path) -> None:
    machine = make_machine("cpu", 1 << 26, None, directories(tmp_path))
    free = shutil.disk_usage(tmp_path).free
    assert all(0.3 * free < (machine.capacity.limits[disk] or 0) < 0.34 * free for disk in ("disk", "disk2", "disk3"))
    assert machine.same_device == [("disk", "disk2"), ("disk", "disk3"), ("disk2", "disk3")]
    assert assumed("cpu", machine.capacity, machine.same_device).crosstalk["disk_read"]["disk3_read"] == 1
    machine.close()


def test_directories_that_a_job_made_are_removed(families: Any, tmp_path: Path) -> None:
    """Also a directory in which the directories of two disks lie."""
    known, folders = families("llama"), [tmp_path / "new" / "a", tmp_path / "new" / "b", tmp_path / "new" / "b" / "c"]
    with Engine(known.directory, policy=Policy(8, 1, cache=(0, 0, 0.3, 0.3, 0.4)), offload_dir=folders) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        assert all(folder.exists() for folder in folders)
    assert not list(tmp_path.iterdir())
