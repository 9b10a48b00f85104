"""Tiny GGUF files, written as llama.cpp's convert_hf_to_gguf.py writes them."""

from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flexengine.codec.gguf_blocks import BLOCKS
from tests.helpers.gguf_blocks import random_blocks

Q = GGMLQuantizationType
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "llama": (MODEL_ARCH.LLAMA, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-untied": (MODEL_ARCH.LLAMA, LlamaConfig(**SHAPE)),
    "llama-wide": (  # whose rows are blocks of every type
        MODEL_ARCH.LLAMA,
        LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}),
    ),
    "qwen3": (MODEL_ARCH.QWEN3, Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3moe": (MODEL_ARCH.QWEN3MOE, Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, moe_intermediate_size=32)),
    # transformers 5.23 reads neither head_dim nor the experts' width of this family; these are its defaults
    "qwen3moe-default": (
        MODEL_ARCH.QWEN3MOE,
        Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=128, moe_intermediate_size=768),
    ),
}

_MORE = dict(SHAPE, head_dim=16)
_ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
               n_shared_experts=1, num_hidden_layers=3)  # fmt: skip
_LATENT = dict(SHAPE, **_ROUTED, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16,
               qk_nope_head_dim=32, v_head_dim=32, n_group=1, topk_group=1)  # fmt: skip
# Families whose config flexengine makes itself: architecture of GGUF, and fields that differ from SHAPE.
MORE = {
    "gemma": (MODEL_ARCH.GEMMA, dict(_MORE, head_dim=24, tie_word_embeddings=True)),
    "olmo2": (MODEL_ARCH.OLMO2, _MORE),
    "olmoe": (MODEL_ARCH.OLMOE, dict(SHAPE, num_experts=4, num_experts_per_tok=2, clip_qkv=5.0)),
    "granite": (
        MODEL_ARCH.GRANITE,
        dict(
            SHAPE, residual_multiplier=0.5, attention_multiplier=0.2, embedding_multiplier=1.5, logits_scaling=3.0,
            tie_word_embeddings=True,
        ),
    ),
    "glm4": (MODEL_ARCH.GLM4, dict(_MORE, pad_token_id=0, attention_bias=True)),
    "smollm3": (MODEL_ARCH.SMOLLM3, dict(SHAPE, num_hidden_layers=4, pad_token_id=0)),
    "seed_oss": (MODEL_ARCH.SEED_OSS, dict(_MORE, attention_bias=True)),
    "ernie4_5": (MODEL_ARCH.ERNIE4_5, _MORE),
    "hunyuan_v1_dense": (MODEL_ARCH.HUNYUAN_DENSE, _MORE),
    "arcee": (MODEL_ARCH.ARCEE, dict(SHAPE, hidden_act="relu2")),
    "mixtral": (MODEL_ARCH.LLAMA, dict(SHAPE, num_local_experts=4, num_experts_per_tok=2)),
    "granitemoe": (
        MODEL_ARCH.GRANITE_MOE,
        dict(SHAPE, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.5, embedding_multiplier=1.5),
    ),
    "exaone4": (
        MODEL_ARCH.EXAONE4,
        dict(_MORE, sliding_window=None, sliding_window_pattern=1, layer_types=["full_attention"] * 2),
    ),
    "cohere": (
        MODEL_ARCH.COMMAND_R,
        dict(SHAPE, pad_token_id=0, use_qk_norm=True, logit_scale=0.25, tie_word_embeddings=True),
    ),
    "cohere2": (
        MODEL_ARCH.COHERE2,
        dict(SHAPE, num_hidden_layers=4, pad_token_id=0, logit_scale=0.25, sliding_window=9, tie_word_embeddings=True),
    ),
    "glm4_moe": (
        MODEL_ARCH.GLM4_MOE,
        dict(
            _MORE, pad_token_id=0, attention_bias=True, use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, first_k_dense_replace=1, routed_scaling_factor=1.5, num_hidden_layers=3,
        ),
    ),
    "deepseek_v2": (MODEL_ARCH.DEEPSEEK2, dict(_LATENT, v_head_dim=64, routed_scaling_factor=2.0)),
    "deepseek_v3": (
        MODEL_ARCH.DEEPSEEK2,
        dict(
            _LATENT, q_lora_rank=32, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
            max_position_embeddings=256, rope_parameters={
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 8,
            },
        ),
    ),
    "dots1": (MODEL_ARCH.DOTS1, dict(_MORE, **_ROUTED, sliding_window=None, norm_topk_prob=True)),
    "ernie4_5_moe": (
        MODEL_ARCH.ERNIE4_5_MOE,
        dict(
            SHAPE, moe_num_experts=4, moe_k=2, moe_num_shared_experts=2, moe_layer_start_index=1, num_hidden_layers=3,
            moe_intermediate_size=32, use_bias=False,
        ),
    ),
    "hunyuan_v1_moe": (MODEL_ARCH.HUNYUAN_MOE, dict(_MORE, num_experts=4, moe_topk=2, pad_token_id=0)),
    "gpt_oss": (
        MODEL_ARCH.GPT_OSS,
        dict(
            _MORE, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
            num_hidden_layers=4, initializer_range=0.2,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 32,
            },
        ),
    ),
}  # fmt: skip
FAMILIES |= {
    name: (arch, AutoConfig.for_model(name, **{"tie_word_embeddings": False, "eos_token_id": 7, **fields}))
    for name, (arch, fields) in MORE.items()
}
# As llama.cpp's converters do: families whose rows of q and k are interleaved, and whose norms get 1 more.
PERMUTED = (MODEL_ARCH.LLAMA, MODEL_ARCH.GRANITE, MODEL_ARCH.GRANITE_MOE, MODEL_ARCH.SMOLLM3, MODEL_ARCH.ARCEE)
# Keys of metadata by fields of configs.
KEYS = {
    "attention_multiplier": "attention.scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale", "clip_qkv": "attention.clamp_kqv", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "num_local_experts": "expert_count", "n_routed_experts": "expert_count", "logit_scale": "logit_scale",
    "sliding_window": "attention.sliding_window", "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count", "moe_k": "expert_used_count",
    "moe_num_experts": "expert_count", "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count", "moe_layer_interval": "interleave_moe_layer_step",
    "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank",
}  # fmt: skip


# --- tiny GGUF files, written the way llama.cpp's convert_hf_to_gguf.py writes them
def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp: halves of a head's rows interleaved."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def tiny_model(family: str) -> torch.nn.Module:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][1]).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def gguf_tensors(family: str, model: torch.nn.Module) -> list[tuple[str, np.ndarray]]:
    """(GGUF name, float32 weights as llama.cpp stores them), experts split into gate and up."""
    arch, config = FAMILIES[family]
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    out = []
    for name, tensor in model.state_dict().items():
        weights = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch is MODEL_ARCH.GPT_OSS and ("experts" in name or "sinks" in name):
            out += _of_gpt_oss(name, weights)
            continue
        if name.endswith("experts.gate_up_proj"):
            block, half = name.split(".")[2], weights.shape[1] // 2
            out += [(f"blk.{block}.ffn_up_exps.weight", weights[:, half:]),
                    (f"blk.{block}.ffn_gate_exps.weight", weights[:, :half])]  # fmt: skip
            continue
        if name.endswith(("e_score_correction_bias", "router.weight")):
            tensor_name = "exp_probs_b.bias" if "bias" in name else "ffn_gate_inp.weight"
            out.append((f"blk.{name.split('.')[2]}.{tensor_name}", weights))
            continue
        if name.endswith("experts.down_proj"):
            out.append((f"blk.{name.split('.')[2]}.ffn_down_exps.weight", weights))
            continue
        if family == "deepseek_v3" and "kv_b_proj" in name:
            out += _latent_halves(name, weights, config)
            continue
        if arch in PERMUTED and "q_proj" in name:
            weights = permute(weights, config.num_attention_heads)
        if arch in PERMUTED and "k_proj" in name:
            weights = permute(weights, config.num_key_value_heads)
        if arch is MODEL_ARCH.GEMMA and name.endswith("norm.weight"):
            weights = weights + 1
        stem, dot, suffix = name.rpartition(".")
        out.append((f"{names.get_name(stem)}{dot}{suffix}", weights))
    return out


def _latent_halves(name: str, weights: np.ndarray, config) -> list[tuple[str, np.ndarray]]:
    """DeepseekV2Model of llama.cpp's conversion/deepseek.py: the keys' part transposed, the values' one apart."""
    heads = weights.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    block = f"blk.{name.split('.')[2]}"
    return [(f"{block}.attn_k_b.weight", keys.swapaxes(1, 2)), (f"{block}.attn_v_b.weight", values)]


def _add_latent(writer: GGUFWriter, config) -> None:
    """Lengths of heads: in newer files those of llama.cpp's cache, and of the model as `_mla`."""
    key, rope = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
    newer = config.model_type == "deepseek_v3"
    if newer:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_uint32("deepseek2.expert_gating_func", 2)
    writer.add_head_count_kv(1 if newer else config.num_key_value_heads)
    writer.add_key_length(config.kv_lora_rank + rope if newer else key)
    writer.add_value_length(config.kv_lora_rank if newer else config.v_head_dim)
    writer.add_rope_dimension_count(rope)
    if scale := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _of_gpt_oss(name: str, weights: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """GptOssModel of llama.cpp's conversion/gpt_oss.py: alternating gates and ups apart, matrices as [out, in]."""
    block, bias = f"blk.{name.split('.')[2]}", name.endswith("_bias")
    if "sinks" in name:
        return [(f"{block}.attn_sinks.weight", weights)]
    end, x = ("bias", weights) if bias else ("weight", weights.swapaxes(1, 2))
    if "down_proj" in name:
        return [(f"{block}.ffn_down_exps.{end}", x)]
    return [(f"{block}.ffn_gate_exps.{end}", x[:, ::2]), (f"{block}.ffn_up_exps.{end}", x[:, 1::2])]


def write_gguf(path: Path, family: str, tensors, kind=lambda name: Q.F32, extra=lambda writer: None) -> Path:
    arch, config = FAMILIES[family]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if arch is MODEL_ARCH.DEEPSEEK2:
        _add_latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if arch in (MODEL_ARCH.DEEPSEEK2, MODEL_ARCH.DOTS1):
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if arch is MODEL_ARCH.HUNYUAN_MOE:
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if arch is MODEL_ARCH.ERNIE4_5_MOE:
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned, latent = int(width * config.rope_parameters.get("partial_rotary_factor", 1)), arch is MODEL_ARCH.DEEPSEEK2
    if arch is MODEL_ARCH.LLAMA or turned != width:
        writer.add_rope_dimension_count(turned)
    if arch is not MODEL_ARCH.LLAMA and getattr(config, "head_dim", None) and not latent:
        writer.add_key_length(config.head_dim)
    written = set()
    for field, key in KEYS.items():
        if (value := getattr(config, field, None)) is not None and key not in written:
            written.add(key)
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{MODEL_ARCH_NAMES[arch]}.{key}", value)
    if (rope := config.rope_parameters)["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    extra(writer)
    for name, weights in tensors:
        chosen = Q.F32 if weights.ndim == 1 or name.endswith(".bias") else kind(name)
        stored = weights if weights.dtype == np.uint8 else quantize(np.ascontiguousarray(weights), chosen)
        writer.add_tensor(name, stored, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(path: Path, family: str = "llama", **kwargs) -> Path:
    return write_gguf(path, family, gguf_tensors(family, tiny_model(family)), **kwargs)


def gguf_of_type(path: Path, kind: str) -> tuple[Path, torch.nn.Module]:
    """A file of random blocks of one type, and the model of transformers with its numbers as gguf-py decodes them."""
    model, type_, tensors, decoded = tiny_model("llama-wide"), Q[kind.upper()], [], {}
    for seed, (name, weights) in enumerate(gguf_tensors("llama-wide", model)):
        stored = weights
        if weights.ndim > 1:
            count = weights.size // BLOCKS[kind].columns
            stored = random_blocks(kind, count, seed).numpy().reshape(len(weights), -1)
            decoded[name] = dequantize(stored, type_)
        tensors.append((name, stored))
    write_gguf(path, "llama-wide", tensors, lambda name: type_)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                values = decoded[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
                if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):
                    values = values.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(values.shape)
                parameter.copy_(torch.from_numpy(values))
    return path, model
