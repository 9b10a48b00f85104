"""The models of the table "What people run": where their configs are from, and the form of the published checkpoint."""

from typing import Any, NamedTuple

from tests.helpers.published import MODELS

FP8, MXFP4, INT4 = "fp8-128x128", "mxfp4-32", "w4-32"
WORDS = {"": "bf16", FP8: "FP8, blocks of 128 x 128", MXFP4: "experts in MXFP4", INT4: "experts in packed INT4"}


class Person(NamedTuple):
    """A published model.

    Attributes:
        kind: model_type of a config class whose defaults are this model's; "" if `fields` are all.
        fields: fields of config.json that differ from the defaults, or all.
        form: format of its encoded matrices; "" if none is.
        billions: parameters on its card, without parts for images and layers that draft; 0 if no card is known.
    """

    kind: str
    fields: dict[str, Any] = {}
    form: str = ""
    billions: float = 0.0


def _layers(pattern: str) -> list[str]:
    """Return layers_block_type of a Nemotron from its hybrid_override_pattern."""
    return [{"M": "linear_attention", "E": "moe", "*": "full_attention"}[kind] for kind in pattern]


# As a published test of llama.cpp's converter has Qwen3.8-Flash-Next's config.json; without the layer that drafts.
_FLASH_NEXT = {
    "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "vocab_size": 248320, "hc_count": 4, "hc_lowrank": 320, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4, "ple_layer_ids": [2],
    "ple_embed_dim": 2560, "eos_token_id": 248044,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
# As NVIDIA-Nemotron-3-Nano-30B-A3B's config.json has them.
_NANO = {
    "hidden_size": 2688, "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "layers_block_type": _layers("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"), "mamba_num_heads": 64,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "chunk_size": 128, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "num_hidden_layers": 52,
}  # fmt: skip
# As granite-4.0-h-small's config.json has them.
_GRANITE = {
    "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 100352, "num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768,
    "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "tie_word_embeddings": True,
    "layer_types": ["full_attention" if j % 10 == 5 else "linear_attention" for j in range(40)],
}  # fmt: skip
# As LFM2-8B-A1B's config.json has them.
_LFM2 = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
    "num_dense_layers": 2, "vocab_size": 65536, "tie_word_embeddings": True,
    "layer_types": ["full_attention" if j in (2, 6, 10, 14, 18, 21) else "conv" for j in range(24)],
}  # fmt: skip
# As Falcon-H1-7B-Instruct's config.json has them.
_FALCON = {
    "hidden_size": 3072, "num_hidden_layers": 44, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 130048, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
    "mamba_d_state": 256, "mamba_n_groups": 1,
}  # fmt: skip
# Layers 4, 8, ... 24 and 27 of Kimi-Linear-48B-A3B attend, as its config.json counts them from 1.
_KIMI = {
    "layer_types": ["full_attention" if j in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for j in range(27)],
}  # fmt: skip


def _published(name: str, form: str = "") -> Person:
    return Person("", MODELS[name].fields, form, MODELS[name].billions)


PEOPLE = {
    "Qwen3.5-35B-A3B": _published("Qwen3.5-35B-A3B"),
    "Qwen3.5-35B-A3B-FP8": _published("Qwen3.5-35B-A3B", FP8),
    "Qwen3.5-9B": Person("qwen3_5_text"),
    "Qwen3-Next-80B-A3B": Person("qwen3_next", billions=79.7),
    "Qwen3.8-Flash-Next": Person("qwen4_exp_text", _FLASH_NEXT),
    "Kimi-Linear-48B-A3B": Person("kimi_linear", _KIMI, billions=49.1),
    "Nemotron-3-Nano-30B-A3B": Person("nemotron_h", _NANO, billions=31.6),
    "Granite-4.0-H-Small": Person("granitemoehybrid", _GRANITE, billions=32.2),
    "LFM2-8B-A1B": Person("lfm2_moe", _LFM2, billions=8.34),
    "LFM3-1.7B": Person("lfm3"),
    "Falcon-H1-7B": Person("falcon_h1", _FALCON, billions=7.59),
    "DeepSeek-V3": _published("DeepSeek-V3", FP8),
    "DeepSeek-V3.2": Person("deepseek_v32", form=FP8, billions=671.9),
    "GLM-5-FP8": Person("glm_moe_dsa", form=FP8, billions=744.0),
    "Llama-4-Scout-17B-16E": _published("Llama-4-Scout-17B-16E"),
    "Gemma-3n-E4B": Person("gemma3n_text"),
    "gpt-oss-20b": _published("gpt-oss-20b", MXFP4),
    "gpt-oss-120b": _published("gpt-oss-120b", MXFP4),
    "MiniMax-M2.5": _published("MiniMax-M2.5", FP8),
}
