"""Configs of models that many people run, without weights: the fields of their published config.json that matter for a
plan, and the number of parameters of their model cards, in billions, or why the engine refuses them.

Fields of Qwen3, Qwen3.5, Llama 3.1 and 4, DeepSeek, gpt-oss, Mixtral, MiniMax and Kimi-K2 were compared with the files
in the repository ai-dynamo/aiconfigurator. The others are checked by their numbers of parameters only.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model. Either `billions` or `refused` is set."""

    fields: dict[str, Any]
    billions: float = 0.0  # parameters
    refused: str = ""  # pattern of the reason


def _config(kind: str, name: str, shape: str, **more: Any) -> dict[str, Any]:
    """Return a config. shape: hidden and FFN width, layers, query heads, KV heads, vocabulary and context."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    sizes = dict(zip(keys, map(int, shape.split()), strict=True))
    return (
        {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": kind,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "rope_theta": 1e6,
        }
        | sizes
        | more
    )


def _llama(shape: str, factor: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return the config of a Llama. factor: of its RoPE, 0 without scaling."""
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return _config("llama", "Llama", shape, rope_theta=5e5, rope_scaling=scaling if factor else None, **more)


def _deepseek(shape: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    scaling = {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }
    return _config(
        kind,
        name,
        shape,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        moe_intermediate_size=2048,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rope_scaling=scaling,
        rope_theta=10000,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_group=4,
        v_head_dim=128,
        quantization_config={"quant_method": "fp8"},
        **more,
    )


def _moe(shape: str, width: int, **more: Any) -> dict[str, Any]:
    return _config(
        "qwen3_moe",
        "Qwen3Moe",
        shape,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **more,
    )


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    fields = _config(
        "gpt_oss",
        "GptOss",
        f"2880 2880 {layers} 64 8 201088 131072",
        head_dim=64,
        attention_bias=True,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        rope_theta=150000,
        rope_scaling=scaling,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        swiglu_limit=7.0,
        quantization_config={"quant_method": "mxfp4"},
    )
    del fields["torch_dtype"]  # its config has none
    return fields


_QWEN3 = {"head_dim": 128}
_TIED = {"tie_word_embeddings": True}
_GEMMA2 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    **_TIED,
}
_LONG_FACTORS = [
    1,
    1.118320672,
    1.250641126,
    1.398617824,
    1.564103225,
    1.74916897,
    1.956131817,
    2.187582649,
    2.446418898,
    2.735880826,
    3.059592084,
    3.421605075,
    3.826451687,
    4.279200023,
    4.785517845,
    5.351743533,
    5.984965424,
    6.693110555,
    7.485043894,
    8.370679318,
    9.36110372,
    10.4687158,
    11.70738129,
    13.09260651,
    14.64173252,
    16.37415215,
    18.31155283,
    20.47818807,
    22.90118105,
    25.61086418,
    28.64115884,
    32.03,
    32.1,
    32.13,
    32.23,
    32.6,
    32.61,
    32.64,
    32.66,
    32.7,
    32.71,
    32.93,
    32.97,
    33.28,
    33.49,
    33.5,
    44.16,
    47.77,
]
_QWEN35 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
}
_GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "vocab_size": 202048,
    },
}
_OWN_STATE = "keeps state|accepts no registered attention"

MODELS = {
    "Llama-3.2-1B": Published(_llama("2048 8192 16 32 8 128256 131072", 32.0, head_dim=64, **_TIED), 1.236),
    "Llama-3.2-3B": Published(_llama("3072 8192 28 24 8 128256 131072", 32.0, head_dim=128, **_TIED), 3.213),
    "Llama-3.1-8B": Published(_llama("4096 14336 32 32 8 128256 131072", 8.0), 8.030),
    "Llama-3.3-70B": Published(_llama("8192 28672 80 64 8 128256 131072", 8.0), 70.55),
    "Llama-3.1-405B": Published(_llama("16384 53248 126 128 8 128256 131072", 8.0), 405.9),
    "Qwen2.5-0.5B": Published(_config("qwen2", "Qwen2", "896 4864 24 14 2 151936 32768", **_TIED), 0.494),
    "Qwen2.5-7B": Published(_config("qwen2", "Qwen2", "3584 18944 28 28 4 152064 131072"), 7.616),
    "Qwen2.5-32B": Published(_config("qwen2", "Qwen2", "5120 27648 64 40 8 152064 131072"), 32.76),
    "Qwen2.5-72B": Published(_config("qwen2", "Qwen2", "8192 29568 80 64 8 152064 131072"), 72.71),
    "Qwen3-0.6B": Published(_config("qwen3", "Qwen3", "1024 3072 28 16 8 151936 40960", **_QWEN3, **_TIED), 0.596),
    "Qwen3-8B": Published(_config("qwen3", "Qwen3", "4096 12288 36 32 8 151936 40960", **_QWEN3), 8.191),
    "Qwen3-32B": Published(_config("qwen3", "Qwen3", "5120 25600 64 64 8 151936 40960", **_QWEN3), 32.76),
    "Qwen3-30B-A3B": Published(_moe("2048 6144 48 32 4 151936 40960", 768), 30.53),
    "Qwen3-235B-A22B": Published(_moe("4096 12288 94 64 4 151936 40960", 1536), 235.1),
    "DeepSeek-V3": Published(_deepseek("7168 18432 61 128 128 129280 163840", "deepseek_v3", "DeepseekV3"), 671.0),
    "gpt-oss-20b": Published(_gpt_oss(24, 32), 20.91),
    "gpt-oss-120b": Published(_gpt_oss(36, 128), 116.8),
    "Mixtral-8x7B": Published(
        _config("mixtral", "Mixtral", "4096 14336 32 32 8 32000 32768", num_local_experts=8, num_experts_per_tok=2),
        46.70,
    ),
    "MiniMax-M2.5": Published(
        _config(
            "minimax_m2",
            "MiniMaxM2",
            "3072 1536 62 48 8 200064 196608",
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            rope_theta=5000000,
            rotary_dim=64,
            use_qk_norm=True,
            scoring_func="sigmoid",
            quantization_config={"quant_method": "fp8"},
        ),
        228.7,
    ),
    "Mistral-7B-v0.3": Published(
        _config("mistral", "Mistral", "4096 14336 32 32 8 32768 32768", sliding_window=None), 7.248
    ),
    "Mistral-Small-24B": Published(
        _config("mistral", "Mistral", "5120 32768 40 32 8 131072 32768", head_dim=128, sliding_window=None), 23.57
    ),
    "gemma-2-9b": Published(_config("gemma2", "Gemma2", "3584 14336 42 16 8 256000 8192", **_GEMMA2), 9.242),
    "gemma-3-1b-it": Published(
        _config(
            "gemma3_text",
            "Gemma3",
            "1152 6912 26 4 1 262144 32768",
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_local_base_freq=10000,
            **_TIED,
        ),
        1.000,
    ),
    "gemma-3-27b-it": Published(_GEMMA3, 27.43),
    "Phi-3-mini-4k": Published(
        _config(
            "phi3",
            "Phi3",
            "3072 8192 32 32 32 32064 4096",
            sliding_window=2047,
            original_max_position_embeddings=4096,
            rope_theta=10000.0,
        ),
        3.821,
    ),
    "phi-4": Published(
        _config(
            "phi3",
            "Phi3",
            "5120 17920 40 40 10 100352 16384",
            sliding_window=None,
            original_max_position_embeddings=16384,
            rope_theta=250000,
        ),
        14.66,
    ),
    "OLMo-2-7B": Published(_config("olmo2", "Olmo2", "4096 11008 32 32 32 100352 4096", rope_theta=500000), 7.299),
    "OLMoE-1B-7B": Published(
        _config(
            "olmoe",
            "Olmoe",
            "2048 1024 16 16 16 50304 4096",
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
            rope_theta=10000.0,
        ),
        6.919,
    ),
    "GLM-4-9B-0414": Published(
        _config(
            "glm4",
            "Glm4",
            "4096 13696 40 32 2 151552 32768",
            head_dim=128,
            partial_rotary_factor=0.5,
            rope_theta=10000.0,
        ),
        9.40,
    ),
    "GLM-4.5-Air": Published(
        _config(
            "glm4_moe",
            "Glm4Moe",
            "4096 10944 46 96 8 151552 131072",
            head_dim=128,
            attention_bias=True,
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=128,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            partial_rotary_factor=0.5,
            routed_scaling_factor=1.0,
            topk_group=1,
            use_qk_norm=False,
        ),
        106.9,
    ),
    "SmolLM2-1.7B": Published(_llama("2048 8192 24 32 32 49152 8192", **_TIED), 1.711),
    "SmolLM3-3B": Published(
        _config(
            "smollm3",
            "SmolLM3",
            "2048 11008 36 16 4 128256 65536",
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            use_sliding_window=False,
            **_TIED,
        ),
        3.075,
    ),
    "granite-3.3-8b": Published(
        _config(
            "granite",
            "Granite",
            "4096 12800 40 32 8 49159 131072",
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            residual_multiplier=0.22,
            **_TIED,
        ),
        8.171,
    ),
    "c4ai-command-r-v01": Published(
        _config("cohere", "Cohere", "8192 22528 40 64 64 256000 8192", logit_scale=0.0625, use_qk_norm=False, **_TIED),
        34.98,
    ),
    "c4ai-command-r7b": Published(
        _config(
            "cohere2",
            "Cohere2",
            "4096 14336 32 32 8 256000 8192",
            head_dim=128,
            logit_scale=0.25,
            sliding_window=4096,
            **_TIED,
        ),
        8.028,
    ),
    "Falcon3-7B": Published(_llama("3072 23040 28 12 4 131072 32768", head_dim=256), 7.456),
    "starcoder2-7b": Published(
        _config(
            "starcoder2", "Starcoder2", "4608 18432 32 36 4 49152 16384", use_bias=True, sliding_window=4096, **_TIED
        ),
        7.174,
    ),
    "pythia-6.9b": Published(
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "rotary_pct": 0.25,
            "intermediate_size": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
            "torch_dtype": "float16",
            "use_parallel_residual": True,
        },
        6.857,
    ),
    "opt-6.7b": Published(
        {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "hidden_size": 4096,
            "ffn_dim": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 4096,
            "do_layer_norm_before": True,
            "torch_dtype": "float16",
        },
        6.658,
    ),
    "bloom-7b1": Published(
        {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "hidden_size": 4096,
            "n_layer": 30,
            "n_head": 32,
            "vocab_size": 250880,
            "torch_dtype": "float16",
        },
        7.069,
    ),
    "gpt2": Published(
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "n_ctx": 1024,
            "vocab_size": 50257,
        },
        0.1244,
    ),
    "falcon-7b": Published(
        {
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
            "torch_dtype": "bfloat16",
        },
        6.922,  # head and embedding are one tensor; files that hold both have 7.217
    ),
    "Phi-4-mini": Published(
        _config(
            "phi3",
            "Phi3",
            "3072 8192 32 24 8 200064 131072",
            original_max_position_embeddings=4096,
            rope_theta=10000.0,
            partial_rotary_factor=0.75,
            sliding_window=262144,
            rope_scaling={"type": "longrope", "long_factor": _LONG_FACTORS, "short_factor": [1.0] * 48},
            **_TIED,
        ),
        3.836,
    ),
    "Llama-4-Scout-17B-16E": Published(_SCOUT, 107.8),  # without the parts for images, 0.9
    "Qwen3.5-35B-A3B": Published(_QWEN35, 34.66),  # without the parts for images and the layer that drafts
    "Kimi-K2": Published(
        _deepseek(
            "7168 18432 61 64 64 163840 131072",
            "kimi_k2",
            "DeepseekV3",
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        ),
        refused="--trust-remote-code",
    ),
}
