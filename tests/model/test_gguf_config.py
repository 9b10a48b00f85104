"""Metadata of GGUF files that change numbers: each is in the config, or the file is refused."""

from pathlib import Path

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from flexengine.errors import UnsupportedModel
from flexengine.model.gguf_config import carry_values
from flexengine.model.gguf_header import Header

SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def carried(config: PretrainedConfig, architecture: str = "x", **values: object) -> PretrainedConfig:
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    header = Header(Path("m.gguf"), {"general.architecture": architecture, **named}, (), {}, (0, 0))
    carry_values(header, config)
    return config


def test_bases_and_turned_columns_of_rope_are_copied():
    rope = carried(Starcoder2Config(**SHAPE), rope__freq_base=1e6).rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1e6}
    stable = carried(StableLmConfig(**SHAPE), rope__freq_base=1e6, rope__dimension_count=16)
    assert stable.rope_parameters == {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
    quarter = carried(StableLmConfig(**SHAPE), rope__freq_base=1e4, rope__dimension_count=4)
    assert quarter.rope_parameters == StableLmConfig(**SHAPE).rope_parameters
    gemma = carried(Gemma3TextConfig(**SHAPE, head_dim=16), rope__freq_base=5e5, rope__freq_base_swa=2e4)
    assert [gemma.rope_parameters[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")] == [5e5, 2e4]


@pytest.mark.parametrize(
    ("config", "name", "layers", "scalar"),
    [
        (Gemma2Config, "gemma2", 46, 16),
        (Gemma2Config, "gemma2", 42, 32),
        (Gemma3TextConfig, "gemma3", 62, 16),
        (Gemma3TextConfig, "gemma3", 46, 32),
    ],
)
def test_attention_of_the_large_gemmas_is_scaled_by_the_width_of_the_model(config, name, layers, scalar):
    made = carried(config(**SHAPE, num_hidden_layers=layers), name, attention__key_length=32)
    assert (made.query_pre_attn_scalar, made.head_dim) == (scalar, 32)


def test_values_are_copied_to_the_fields_that_the_model_reads():
    lfm = Lfm2Config(**SHAPE)
    lfm.rms_norm_eps = 1e-3  # as transformers' reader sets it, to no effect
    assert carried(lfm, attention__layer_norm_rms_epsilon=1e-3).norm_eps == 1e-3
    assert carried(NemotronConfig(**SHAPE), attention__layer_norm_epsilon=1e-3).norm_eps == 1e-3
    assert carried(LlamaConfig(**SHAPE), attention__layer_norm_rms_epsilon=9.99999997e-7).rms_norm_eps == 1e-6
    experts = carried(Qwen2MoeConfig(**SHAPE), expert_weights_norm=True, expert_shared_feed_forward_length=48)
    assert (experts.norm_topk_prob, experts.shared_expert_intermediate_size) == (True, 48)
    assert carried(Gemma2Config(**SHAPE), attn_logit_softcapping=20.0).attn_logit_softcapping == 20
    assert carried(MistralConfig(**SHAPE)).sliding_window is None
    assert carried(MistralConfig(**SHAPE), attention__sliding_window=8).sliding_window == 8


@pytest.mark.parametrize(
    "values",
    [
        {"rope__dimension_count": 8},
        {"rope__freq_base_swa": 2e4},
        {"attention__value_length": 8},
        {"logit_scale": 2.0},
        {"attention__scale": 0.5},
        {"rope__scaling__factor": 2.0},
        {"expert_weights_norm": True},
        {"expert_gating_func": 2},
        {"attn_logit_softcapping": 50.0},
        {"attention__scale": None},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_value_without_a_place_is_refused(values):
    with pytest.raises(
        UnsupportedModel, match=r"m\.gguf has \S+ = .*, which has no place in the config of a llama; use"
    ):
        carried(LlamaConfig(**SHAPE), **values)


def test_unknown_keys_are_named(caplog):
    caplog.set_level("WARNING")
    assert carried(LlamaConfig(**SHAPE), never_heard_of=0).to_dict() == LlamaConfig(**SHAPE).to_dict()
    assert "m.gguf has metadata that are not read: never_heard_of" in caplog.text


def test_values_that_change_nothing_are_taken():
    plain = {
        "attention__value_length": 16,
        "attention__scale": 0.25,
        "rope__scaling__factor": 1.0,
        "logit_scale": 1.0,
        "expert_count": 0,
        "attention__causal": True,
        "rope__dimension_count": 16,
        "rope__freq_base_swa": 1e4,
    }
    assert carried(LlamaConfig(**SHAPE), **plain).to_dict() == LlamaConfig(**SHAPE).to_dict()


def test_a_file_without_a_base_of_rope_has_that_of_llama_cpp():
    """10000 (llama-model.cpp: rope_freq_base_train), whatever the family's own default is."""
    assert MixtralConfig(**SHAPE).rope_parameters["rope_theta"] == 1e6
    assert carried(MixtralConfig(**SHAPE)).rope_parameters["rope_theta"] == 1e4
    assert carried(MixtralConfig(**SHAPE), rope__freq_base=5e5).rope_parameters["rope_theta"] == 5e5
    gemma = carried(Gemma3TextConfig(**SHAPE, head_dim=16)).rope_parameters
    assert [gemma[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")] == [1e4, 1e4]
