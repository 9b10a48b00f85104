"""What the trial of a model tells about halves of its layers, and about the output of its embedding."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from flexengine.plan.facts import ModelFacts
from flexengine.worker.open_model import open_model
from tests.helpers.tiny_models import tiny_config

# By family, the modules of a layer that compute before attention; none if its layers are loaded by experts.
EARLY = {
    "llama": {"input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "opt": {"self_attn_layer_norm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "bloom": {"input_layernorm", "self_attention.query_key_value"},
    "gpt-oss": set[str](),
}  # fmt: skip


def early_modules(facts: ModelFacts) -> set[str]:
    return {t.name.split(".0.", 1)[-1].rpartition(".")[0] for t in facts.layers[0] if t.early}


@pytest.mark.parametrize("family", EARLY)
def test_first_halves_are_what_precedes_attention(families: Any, family: str) -> None:
    facts = open_model(str(families(family).directory), None, "sim", weights=False).facts
    assert early_modules(facts) == EARLY[family]
    assert facts.divisible == bool(EARLY[family])
    assert not facts.embedding_stays


@pytest.mark.parametrize("kind", [transformers.GPTJConfig, transformers.CodeGenConfig])
def test_tables_of_positions_are_no_obstacle(tmp_path: Path, kind: Any) -> None:
    """These models index a buffer that is not on the meta device, as it is no weight."""
    joined = kind is transformers.CodeGenConfig
    name = "CodeGenForCausalLM" if joined else "GPTJForCausalLM"
    tiny_config(kind, architectures=[name]).save_pretrained(tmp_path)
    facts = open_model(str(tmp_path), None, "sim", weights=False).facts
    projections = {"attn.qkv_proj"} if joined else {f"attn.{x}_proj" for x in "qkv"}
    assert early_modules(facts) == {"ln_1", *projections}
    assert facts.divisible
    assert not facts.embedding_stays


def test_layers_that_read_the_embedding_keep_it(tmp_path: Path) -> None:
    tiny_config(transformers.Gemma4TextConfig, architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    assert open_model(str(tmp_path), None, "sim", weights=False).facts.embedding_stays


def test_a_cpu_needs_no_further_trial(families: Any) -> None:
    facts = open_model(str(families("llama").directory), None, "cpu", weights=False).facts
    assert not facts.divisible
    assert facts.embedding_stays
