"""Weights that stay in the page cache: the same tokens, no copies, and when they are copied after all."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.engine import core
from flexengine.errors import BadCheckpoint
from flexengine.kernels import load
from flexengine.kernels.cpu import NativeKernels
from flexengine.tier.file import File
from flexengine.worker import in_place
from tests.helpers.families import NEW, Family

cached = in_place._cached
FEW = Policy(gpu_batch_size=2, num_gpu_batches=1)
MANY = Policy(gpu_batch_size=4 * core.FEW_ROWS, num_gpu_batches=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models count as large ones."""
    monkeypatch.setattr(core, "MANY_BYTES", 1)
    monkeypatch.setattr(in_place, "SMALL", 1)
    monkeypatch.setattr(in_place, "_cached", lambda path: True)  # the system may write or drop pages just now


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: Family(name, tmp_path_factory.mktemp(name), torch.bfloat16)
            for name in ("qwen3-moe", "gpt-oss", "llama", "llama-tied")}  # fmt: skip


def tokens(engine: Engine, family: Family) -> list[list[int]]:
    results = engine.generate(family.rows, SamplingParams(NEW, ignore_eos=True, temperature=0))
    return [list(result.token_ids) for result in results]


def own_of(engine: Any) -> Any:
    return engine.core._weights._own


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "llama", "llama-tied"])
def test_tokens_are_those_of_transformers(
    name: str, families: dict[str, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of a mixture are in pieces of the file, all else in one. In decode, layers with them are one call."""
    family, calls, run = families[name], list[int](), NativeKernels.run_items
    monkeypatch.setattr(
        NativeKernels, "run_items", lambda kernel, items: (calls.append(len(items)), run(kernel, items))
    )
    with Engine(family.directory, device="cpu", policy=FEW) as engine:
        assert tokens(engine, family) == family.expected
        own, ledger = own_of(engine), engine.core.machine.device.ledger
        assert sum("proj" in weight for weight in own) >= 16
        assert bool(calls) == (name in ("qwen3-moe", "gpt-oss") and isinstance(load(), NativeKernels))
        assert any(found.apart is not None for found in own.values()) == ("moe" in name)
        assert ledger.entries["weights"] >= sum(x.tensor.nbytes for x in own.values())  # booked, as if copied


def test_a_file_that_is_not_in_the_page_cache_is_read(families: dict[str, Family], monkeypatch: Any) -> None:
    family = families["llama"]
    monkeypatch.setattr(in_place, "_cached", cached)
    monkeypatch.setattr(File, "read_cached", lambda *_: False)
    with Engine(family.directory, device="cpu", policy=FEW) as engine:
        assert tokens(engine, family) == family.expected
        assert not own_of(engine)


@pytest.mark.parametrize("policy", [MANY, None])
def test_many_sequences_or_tokens_get_copies(policy: Policy | None, families: dict[str, Family]) -> None:
    """Also if an earlier job of the engine had few."""
    family = families["qwen3-moe"]
    with Engine(family.directory, device="cpu", policy=MANY) as engine:
        assert tokens(engine, family) == family.expected
        assert not own_of(engine)
    with Engine(family.directory, device="cpu", policy=FEW) as engine:
        assert tokens(engine, family) == family.expected
        first = engine.core._weights
        assert first is not None
        assert first.in_place
        assert first.arrivals.missing < 0.5
        layout = first.layout
        assert engine.core.resident_weights(layout, 100) is first
        if policy is not None:
            layout.policy = policy
        other = engine.core.resident_weights(layout, 100_000 if policy is None else 100)
        assert other is not first
        assert not other.in_place
        assert all("apart" not in vars(m) for m in engine.core.skeleton.model.modules())


def test_many_short_jobs_get_copies(families: dict[str, Family], monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they read the weights as often as a long one. Only jobs with copies correct rates."""
    family, kinds, learned = families["llama"], list[bool](), list[Any]()
    with Engine(family.directory, device="cpu", policy=FEW) as engine:
        engine.core._swept = core.FEW_SWEEPS - 1.5 * len(family.rows) * NEW / FEW.block_size
        monkeypatch.setattr(engine.planner.rates, "learn", learned.append)
        for number in range(3):
            assert tokens(engine, family) == family.expected
            kinds.append(bool(own_of(engine)))
            assert len(learned) == number
    assert kinds == [True, False, False]


def test_a_file_that_has_become_shorter_is_read(tmp_path: Path) -> None:
    """So that the error of the read tells of it."""
    family = Family("llama", tmp_path, torch.bfloat16)
    with Engine(family.directory, device="cpu", policy=FEW) as engine:
        (file,) = tmp_path.glob("*.safetensors")
        os.truncate(file, file.stat().st_size - 8)
        with pytest.raises(BadCheckpoint, match="is truncated: bytes up to"):
            tokens(engine, family)


def test_whole_files_are_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(3 * in_place.STEP + 5))
    found = in_place._mapped({file})
    assert found[file][:] == file.read_bytes()
    torch.frombuffer(found[file], dtype=torch.uint8)[:4] = 0  # a copy of this process
    assert file.read_bytes()[:4] != b"\0\0\0\0"
