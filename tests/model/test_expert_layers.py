"""guests.flash.expert_blocks: which parameters experts and routers are, and that they return to their layers."""

from typing import Any

import pytest
import torch

from flexengine.guests.flash.expert_blocks import find_experts
from flexengine.lossy import EXACT, Lossy
from flexengine.worker.open_model import OpenModel, open_model

# Layers with experts, experts of each, and elements of one expert.
KNOWN = {
    "mixtral": ((0, 1, 2, 3), 4, 3 * 112 * 64), "qwen3-moe": ((0, 2, 3), 6, 3 * 48 * 64),
    "gpt-oss": ((0, 1, 2, 3), 4, 3 * 112 * 64),
}  # fmt: skip


def opened(families: Any, family: str, **options: Any) -> OpenModel:
    return open_model(str(families(family).directory), None, "cpu", **options)


@pytest.mark.parametrize("family", KNOWN)
def test_experts_are_taken_out_and_return(families: Any, family: str) -> None:
    model = opened(families, family)
    before, others = [dict(layer) for layer in model.skeleton.layers], dict(model.skeleton.others)
    facts, wanted = model.facts, model.skeleton.wanted
    layers, experts, elements = KNOWN[family]
    model.use(Lossy(flash="oracle"))
    assert tuple(j for j, found in enumerate(model.flash.experts) if found) == layers
    for j, found in enumerate(model.flash.experts):
        block = model.facts.blocks[j]
        if found is None or block is None:
            assert model.skeleton.layers[j] == before[j]
            continue
        assert (block.neurons, block.record, block.read_bytes) == (experts, 4 * elements, 4 * elements)
        assert found.router is not None
        gone = before[j].keys() - model.skeleton.layers[j].keys()
        assert gone == {*found.matrices, *found.router.names}
        assert set(found.router.names) <= model.skeleton.others.keys()
        assert not any("bias" in name for name in found.matrices)
    model.use(EXACT)
    assert (model.skeleton.layers, model.skeleton.others) == (before, others)
    assert (model.facts, model.skeleton.wanted) == (facts, wanted)


@pytest.mark.parametrize("family", KNOWN)
def test_routers_choose_the_highest_scores(families: Any, family: str) -> None:
    model = opened(families, family)
    torch.manual_seed(0)
    for found in filter(None, find_experts(model.skeleton)):
        assert found.router is not None
        shapes = {name.rpartition(".")[2]: model.skeleton.wanted[name] for name in found.router.names}
        drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, values in drawn.items():
            setattr(found.router.module, name, torch.nn.Parameter(values))
        x = torch.randn(9, 64)
        scores = x.double() @ drawn["weight"].double().T + drawn.get("bias", torch.zeros(1)).double()
        expected = scores.topk(2).indices
        assert torch.equal(found.router.choose(x).sort().values, expected.sort().values)


def test_a_range_of_layers(families: Any) -> None:
    model = opened(families, "qwen3-moe", layers=(1, 3), lossy=Lossy(flash="oracle"))
    assert [found is not None for found in model.flash.experts] == [False, True]
    assert [block is not None for block in model.facts.blocks] == [False, True]


def test_models_without_experts(families: Any) -> None:
    assert find_experts(opened(families, "llama").skeleton) == (None,) * 4
