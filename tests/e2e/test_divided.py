"""Layers that adapters change as a whole: tokens of transformers for every placement and in stages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import UnsupportedModel
from flexengine.model import experts
from flexengine.model.adapters import longcat
from flexengine.model.adapters.longcat import stored_name
from flexengine.model.build import build
from flexengine.model.checkpoint import origins, read_checkpoint
from flexengine.model.layer_range import use_range
from flexengine.worker.expert_rows import Experts
from tests.e2e.test_hybrids import POLICIES
from tests.helpers.architectures import config_classes
from tests.helpers.chained import chained
from tests.helpers.families import LENGTHS
from tests.helpers.hybrids import NEW, Hybrid, hybrid_maker
from tests.helpers.tiny_models import blank_model, make_model, tiny_config

KINDS = ("longcat_flash", "minimax_m3_vl_text", "doge", "hrm_text")
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hybrid_maker(tmp_path_factory, LENGTHS)


def generated(known: Hybrid, policy: Policy) -> list[Any]:
    with Engine(known.directory, policy=policy, device="sim", offload_dir=known.directory / "offload") as engine:
        results = engine.generate(known.rows, GREEDY)
        ledgers = {tier: engine.core.machine.tier(tier).ledger.peak for tier in ("device", "host", "disk")}
        assert ledgers == {tier: engine.layout.total(tier) for tier in ledgers}
    assert [r.error for r in results] == [None] * len(results)
    return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_transformers_if_layers_are_changed(models: Any, kind: str, name: str) -> None:
    known = models(kind)
    assert generated(known, POLICIES[name]) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:3])
def test_stages_of_changed_layers(models: Any, kind: str) -> None:
    known = models(kind)
    with chained(known.directory, (0, 1, 3, 4), POLICIES["everywhere"], device="sim") as chain:
        assert [r.token_ids for r in chain.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.slow
def test_experts_before_attention_are_loaded_if_they_are_chosen(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that return their input have no matrices, and are not loaded."""
    known, lacking, missing = models("longcat_flash"), Experts.lacking, list[Any]()

    def noted(experts: Experts, rows: Any, slot: int | None) -> Any:
        missing.append(lacking(experts, rows, slot))
        return missing[-1]

    monkeypatch.setattr(Experts, "lacking", noted)
    policy = Policy(1, 1, weights=(0, 1, 0))
    with Engine(known.directory, policy=policy, device="sim") as engine:
        assert engine.generate([known.rows[2]], GREEDY)[0].token_ids == known.expected[2]
        config = engine.core.skeleton.config
    assert len(missing) == config.num_layers * NEW
    assert {len(each) for each in missing} <= set(range(config.moe_topk + 1))


@pytest.mark.slow
def test_sums_of_experts_have_one_order(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that adds a token's parts at once may add them in any order on a GPU, and copies of tokens take memory:
    there are those of a block at most."""
    known, forward, add, rows = models("longcat_flash"), experts._experts, torch.Tensor.index_add_, list[int]()
    monkeypatch.setattr(longcat, "BLOCK", 16)
    top = json.loads((known.directory / "config.json").read_text())["moe_topk"]

    def noted(module: Any, hidden: Tensor, *args: Any) -> Tensor:
        rows.append(len(hidden))
        return forward(module, hidden, *args)

    def added(out: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        assert len(index.unique()) == len(index)
        return add(out, dim, index, source)

    monkeypatch.setattr(torch.Tensor, "index_add_", added)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, experts.EXPERTS, noted)
    assert generated(known, POLICIES["everywhere"]) == known.expected
    assert 2 * top < max(rows) <= 16 * top


def test_every_tensor_of_a_divided_layer_has_its_place() -> None:
    """transformers saves matrices of some experts that return their input; they are not read."""
    config = tiny_config(config_classes()["longcat_flash"])
    with torch.device("meta"):
        model = blank_model(config)
    count = config.n_routed_experts
    names = [name for name in model.state_dict() if ".experts." not in name]
    assert len({stored_name(name, count) for name in names}) == len(names)
    assert stored_name("model.layers.3.self_attn.1.o_proj.weight", count) == "model.layers.7.self_attn.o_proj.weight"
    assert stored_name("model.layers.3.mlp.experts.5.up_proj.weight", count) is None
    assert stored_name("model.norm.weight", count) == "model.norm.weight"


def test_visits_of_a_layer_have_its_weights(models: Any) -> None:
    """Each visit reads them; the values of the embedding go by the stages, so the model is one of them."""
    known = models("hrm_text")
    skeleton = build(known.directory, torch.float32)
    located = origins(read_checkpoint(known.directory), skeleton.wanted, skeleton.loading)
    places = [[located[name].runs for name in layer] for layer in skeleton.layers]
    config = skeleton.config
    size, high = config.num_layers_per_stack, config.L_cycles * config.num_layers_per_stack
    assert len({str(place) for place in places}) == 2 * size
    assert places == (places[:size] * config.L_cycles + places[high : high + size]) * config.H_cycles
    with pytest.raises(UnsupportedModel, match="only as a whole"):
        use_range(skeleton, (1, 3))


@pytest.mark.parametrize("kind", ["minimax_m3_vl_text", "doge"])
def test_a_row_of_more_tokens_than_a_token_sees_is_an_error(kind: str, tmp_path: Path) -> None:
    config = tiny_config(config_classes()[kind])
    with torch.no_grad():
        make_model(config, 0).save_pretrained(tmp_path)
    with Engine(tmp_path, device="cpu", offload_dir=tmp_path / "offload") as engine:
        rows = [{"prompt_token_ids": [5] * n} for n in (64 - NEW, 65 - NEW)]
        fits, longer = engine.generate(rows, GREEDY)
        assert "context is 64 tokens" in str(engine.score([[5] * 60], [[5] * 6])[0].error)
    assert len(fits.token_ids) == NEW
    assert "more than the model's context of 64" in longer.error
