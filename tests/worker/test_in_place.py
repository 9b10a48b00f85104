"""Weights that stay in the page cache: the same tokens, no copies, and when they are copied after all."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexengine import Engine, Policy, SamplingParams
from flexengine.engine import core
from flexengine.errors import BadCheckpoint
from flexengine.kernels import load
from flexengine.kernels.cpu import NativeKernels
from flexengine.model.checkpoint import ByteRange, Origin
from flexengine.places import DEVICE
from flexengine.tier.file import File
from flexengine.worker import in_place
from tests.helpers.families import NEW, Family
from tests.helpers.tiny_gguf import Q, tiny_gguf

cached = in_place._cached
FEW = Policy(gpu_batch_size=2, num_gpu_batches=1)
MANY = Policy(gpu_batch_size=4 * in_place.FEW_ROWS, num_gpu_batches=1)


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
    monkeypatch.setattr(in_place, "LEAST", 0.3)  # experts of gpt-oss are held in fp32
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


@pytest.mark.parametrize("other", [r"up_proj", r"\.0\.up_proj", r"[23]\.mlp\.experts\.[0-3]\.up_proj"])
def test_matrices_in_two_files(
    other: str, families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gates in one and ups in another; those of one expert, which is copied; and most of some layers, which are
    read."""
    family = families["qwen3-moe"]
    shutil.copytree(family.directory, tmp_path, dirs_exist_ok=True)
    (whole,) = tmp_path.glob("*.safetensors")
    tensors = load_file(whole)
    whole.unlink()
    names = {name: f"model-0000{1 + bool(re.search(other, name))}-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: x for name, x in tensors.items() if names[name] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    monkeypatch.setattr(in_place, "MOST_COPIED", 6)
    with Engine(tmp_path, device="cpu", policy=FEW) as engine:
        assert tokens(engine, family) == family.expected
        pieces = [len(x.apart.pieces) for name, x in own_of(engine).items() if "gate_up" in name and x.apart]
        assert pieces == {"up_proj": [2] * 3, r"\.0\.up_proj": [1] * 3}.get(other, [1])


def test_a_mixture_of_one_expert_in_two_files(tmp_path: Path) -> None:
    gates, ups = torch.randn(2, 4, 6)
    for name, x in (("gates", gates), ("ups", ups)):
        (tmp_path / name).write_bytes(x.numpy().tobytes())
    runs = tuple(ByteRange(tmp_path / name, 0, gates.nbytes) for name in ("gates", "ups"))
    param: Any = SimpleNamespace(matrix=(1, 8, 6, False))
    skeleton: Any = SimpleNamespace(layers=[{"up": param}], others={})
    layout: Any = SimpleNamespace(homes={"up": DEVICE})
    stored = {"up": Origin(runs, torch.float32, (1, 8, 6))}
    found = in_place.find_in_place(skeleton, layout, stored, {"up": torch.float32})["up"]()
    assert found.tensor.is_meta
    assert found.tensor.shape == (1, 8, 6)
    assert found.apart is not None
    assert torch.equal(found.apart.matrix(0), torch.cat([gates, ups]))


@pytest.mark.parametrize("least", [0.0, in_place.LEAST])
def test_a_router_beside_encoded_experts_is_read(least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If few bytes can stay in the page cache, all are read by lanes, while the first sweep computes."""
    monkeypatch.setattr(in_place, "LEAST", least)
    file = tiny_gguf(tmp_path / "m.gguf", "qwen3moe", kind=lambda name: Q.F32 if "inp" in name else Q.Q8_0)
    with Engine(file, device="cpu", dtype="float32", policy=FEW) as engine:
        (result,) = engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(NEW, ignore_eos=True))
        assert len(result.token_ids) == NEW
        assert bool(own_of(engine)) == (least == 0)


def test_memory_is_booked_before_matrices_are_copied(families: dict[str, Family], monkeypatch: Any) -> None:
    family, booked = families["llama"], list[bool]()

    def placed(*args: Any) -> Any:
        booked.append("weights" in engine.core.machine.device.ledger.entries)
        return place(*args)

    place = in_place._placed
    monkeypatch.setattr(in_place, "_placed", placed)
    with Engine(family.directory, device="cpu", policy=FEW) as engine:
        assert tokens(engine, family) == family.expected
    assert len(booked) > 20
    assert all(booked)


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
