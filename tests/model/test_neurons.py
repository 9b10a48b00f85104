"""Feed-forward blocks are found in the modules of families, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from flexengine.guests.flash.feed_forward import RecordDown, RecordFirst, Sparsified, find
from flexengine.lossy import EXACT, Lossy
from flexengine.model.build import build
from flexengine.worker.open_model import open_model

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
        assert (block.activation, bool(block.up), block.sparse) == CASES[family]
        assert (block.neurons, block.width) == (112, 64)
        assert [layer[name].shape for name in block.weights] == [(112, 64)] * (1 + bool(block.up)) + [(64, 112)]
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
        for block, layer, whole in zip(opened.flash.blocks, skeleton.layers, before, strict=bool(lossy.flash)):
            assert block is not None
            assert whole.keys() - layer.keys() == {block.down}  # an oracle computes the first matrix
            assert isinstance(block.modules[0], RecordFirst)
    assert (skeleton.layers, skeleton.others, opened.facts) == (before, others, facts)
    assert {type(slot.module) for layer in before for slot in layer.values()}.isdisjoint({RecordFirst, RecordDown})


RELU = {  # families whose activation function may be ReLU
    "phi": ("Phi", {}), "arcee": ("Arcee", {}), "nemotron": ("Nemotron", {}), "persimmon": ("Persimmon", {}),
    "gpt-neox": ("GPTNeoX", {}), "mistral": ("Mistral", {}), "qwen2": ("Qwen2", {}), "gemma2": ("Gemma2", {}),
    "olmo2": ("Olmo2", {}), "llama": ("Llama", {"mlp_bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("family", RELU)
def test_families_with_relu_are_sparse(family: str, tmp_path: Path) -> None:
    kind, more = RELU[family]
    common = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                  num_key_value_heads=2, head_dim=16)  # fmt: skip
    act = {"hidden_activation": "relu"} if family == "gemma2" else {"hidden_act": "relu"}
    config = getattr(transformers, f"{kind}Config")
    config(**common, **more, **act, architectures=[f"{kind}ForCausalLM"]).save_pretrained(tmp_path)
    assert [block.sparse for block in find(build(tmp_path, torch.float32)) if block] == [True] * 2


def test_a_block_with_a_factor_is_not_known(families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records would be computed without it."""
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(
        self.act_fn(0.5 * self.gate_proj(x)) * self.up_proj(x)))  # fmt: skip
    assert find(build(families("llama").directory, torch.float32)) == (None,) * 4
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(
        self.up_proj(x) * self.act_fn(self.gate_proj(x))))  # fmt: skip
    assert None not in find(build(families("llama").directory, torch.float32))


def test_magnitudes_below_the_threshold_become_zero() -> None:
    act = Sparsified(nn.SiLU())
    x = torch.tensor([-5.0, -1.0, -0.3, 0.0, 0.3, 1.0, 5.0])
    assert torch.equal(act(x), nn.functional.silu(x))  # until a threshold is known
    act.threshold = 0.2
    assert act(x).tolist() == pytest.approx([0, -0.26894, 0, 0, 0, 0.73106, 4.96654], abs=1e-5)
    assert act(x.bfloat16()).dtype == torch.bfloat16


def test_activations_are_put_back(families: Any) -> None:
    skeleton = build(families("gemma2").directory, torch.float32)
    plain = find(skeleton)[0]
    assert plain is not None
    sparse = plain.sparsified(True)
    assert (plain.sparse, sparse.sparse, sparse.relu, sparse.activation) == (False, True, False, "GELUTanh")
    assert find(skeleton)[0] == sparse
    assert sparse.sparsified(False) == plain == find(skeleton)[0]
