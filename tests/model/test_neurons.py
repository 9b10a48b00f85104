"""Feed-forward blocks are found in the modules of families, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.lossy import EXACT, Lossy
from flexengine.model.neurons import RecordDown, RecordFirst, find
from flexengine.model.skeleton import build
from flexengine.worker.opened import open_model

CASES = {  # activation, gated, sparse; None for families without a block of one row per neuron
    "opt": ("ReLU", False, True), "llama": ("SiLUActivation", True, False),
    "gpt-neox": ("GELUActivation", False, False), "mixtral": None, "phi3": None, "gpt2": None,
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_blocks(families: Any, family: str) -> None:
    skeleton = build(families(family).directory, torch.float32)
    for layer, block in zip(skeleton.layers, find(skeleton), strict=True):
        if CASES[family] is None:
            assert block is None
            continue
        assert block is not None
        assert (block.activation, block.gated, block.sparse) == CASES[family]
        assert (block.neurons, block.width) == (112, 64)
        assert [layer[name].shape for name in block.weights] == [(112, 64)] * (1 + block.gated) + [(64, 112)]
        assert [layer[name].module for name in block.weights] == [m for m in block.modules if m is not None]


def test_a_llama_with_relu_is_sparse(families: Any, tmp_path: Path) -> None:
    for file in families("llama").directory.iterdir():
        text = file.read_bytes()
        (tmp_path / file.name).write_bytes(text.replace(b'"silu"', b'"relu"') if file.name == "config.json" else text)
    assert [block.sparse for block in find(build(tmp_path, torch.float32)) if block] == [True] * 4


def test_blocks_are_taken_out_and_return(families: Any) -> None:
    opened = open_model(str(families("opt").directory), None, "cpu")
    skeleton, facts = opened.skeleton, opened.facts
    before, others = [dict(layer) for layer in skeleton.layers], dict(skeleton.others)
    for lossy in (Lossy(flash="oracle"), Lossy(weights="int4", flash="oracle"), EXACT):
        opened.use(lossy)
        for block, layer, whole in zip(opened.blocks, skeleton.layers, before, strict=bool(lossy.flash)):
            assert block is not None
            assert whole.keys() - layer.keys() == {block.down}  # an oracle computes the first matrix
            assert isinstance(block.modules[0], RecordFirst)
    assert (skeleton.layers, skeleton.others, opened.facts) == (before, others, facts)
    assert {type(slot.module) for layer in before for slot in layer.values()}.isdisjoint({RecordFirst, RecordDown})
