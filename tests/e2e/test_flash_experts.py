"""Experts that are read when they are chosen: greedy tokens equal those of transformers, whatever is in memory."""

from pathlib import Path
from typing import Any

import pytest

from bench.flash.counted import CountedBlock
from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.guests.flash import expert_blocks
from flexengine.guests.flash.expert_blocks import ExpertBlocks
from flexengine.lossy import Lossy
from tests.e2e.test_exactness import GRID
from tests.e2e.test_flash import ORACLE, PREDICTORS, SHARES, tokens
from tests.helpers.arenas import held
from tests.helpers.families import FAMILIES, Family

MODELS = {"mixtral": (4, 4), "qwen3-moe": (3, 6), "gpt-oss": (4, 4)}  # layers with experts, and experts of each


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which a job adds its blocks when it ends."""
    found = list[Any]()
    close = ExpertBlocks.close

    def closing(blocks: ExpertBlocks) -> None:
        found.extend(blocks.blocks)
        close(blocks)

    monkeypatch.setattr(ExpertBlocks, "close", closing)
    monkeypatch.setattr(expert_blocks, "ExpertBlock", CountedBlock)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(GRID)))
@pytest.mark.parametrize("family", MODELS)
def test_grid(families: Any, tmp_path: Path, family: str, case: int) -> None:
    fields, overlap = GRID[case]
    policy = Policy(**fields, neurons=SHARES[(case + len(family)) % len(SHARES)])
    known = families(family)
    assert tokens(known, policy, ORACLE, tmp_path, device="sim", overlap=overlap) == known.expected


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("family", MODELS)
def test_on_a_cpu(families: Any, tmp_path: Path, family: str, share: float) -> None:
    known = families(family)
    assert tokens(known, Policy(3, 2, neurons=share), ORACLE, tmp_path) == known.expected


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_a_shared_expert_is_part_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """It stays among the other weights, also with ReLU, and cannot be sparsified."""
    monkeypatch.setitem(FAMILIES, "shared", ("Qwen2Moe", dict(
        FAMILIES["llama"][1], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, hidden_act=act,
        shared_expert_intermediate_size=80, decoder_sparse_step=1)))  # fmt: skip
    known = Family("shared", tmp_path)
    assert tokens(known, Policy(3, 2, neurons=0.5), ORACLE, tmp_path) == known.expected
    with pytest.raises(InvalidInput, match=r"4 of 4 layers of .* have no feed-forward block"):
        Engine(known.directory, lossy=Lossy(sparsify=0.7))


@pytest.mark.parametrize("family", MODELS)
def test_every_expert_is_read_once_if_all_fit(families: Any, tmp_path: Path, family: str, closed: list[Any]) -> None:
    tokens(families(family), Policy(2, 2, neurons=1.0), ORACLE, tmp_path)
    layers, experts = MODELS[family]
    assert len(closed) == layers
    assert all(0 < block.counts.read == len(held(block.arena)) <= experts for block in closed)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_guesses_change_no_token(
    families: Any, tmp_path: Path, closed: list[Any], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    known, policy = families("mixtral"), Policy(1, 3, neurons=share, schedule="zigzag")
    with_guesses = tokens(known, policy, ORACLE, tmp_path)
    assert all(block.guesses.chosen > 0 for block in closed[1:])
    assert all(0 <= block.guesses.wasted <= block.guesses.early for block in closed)
    assert all(block.guesses.found <= block.guesses.missing <= block.guesses.chosen for block in closed)
    closed.clear()
    monkeypatch.setattr(ExpertBlocks, "guessing", False)
    assert tokens(known, policy, ORACLE, tmp_path) == with_guesses == known.expected
    assert all(block.guesses.chosen == 0 for block in closed)


def test_bytes_read_are_those_of_the_experts(
    families: Any, tmp_path: Path, closed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all other weights in memory, the disk reads experts only."""
    known = families("mixtral")
    monkeypatch.setattr(ExpertBlocks, "guessing", False)
    with Engine(known.directory, policy=Policy(2, 2, neurons=0.5), lossy=ORACLE, offload_dir=tmp_path) as engine:
        engine.generate(known.rows, SamplingParams(max_tokens=4, ignore_eos=True))
        read = engine.summary.bytes["disk_read"]
    expert = 3 * 112 * 64 * 4
    assert read == expert * sum(block.counts.read for block in closed)


def test_refusals(families: Any) -> None:
    with pytest.raises(InvalidInput, match=r"the routers of .* choose its experts exactly, .*; let flash be oracle"):
        Engine(families("mixtral").directory, lossy=PREDICTORS)
    with pytest.raises(InvalidInput, match="so weights cannot be encoded; leave weights and compute out"):
        Engine(families("mixtral").directory, lossy=Lossy(weights="int8", flash="oracle"))
