"""Tiny configs of every model type, by the names of their fields, and models of random weights that say something."""

import dataclasses
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

SEEDS = 12  # weights to try until the reference is decisive
# Seeds to try first, by model type, where the reference with seed 0 was not decisive. The others are tried after them.
FIRST_SEEDS = {
    "bert": 1, "camembert": 9, "ctrl": 4, "data2vec-text": 7, "electra": 1, "ernie": 1, "fuyu": 1, "gemma2": 3,
    "gemma3": 3, "gemma3_text": 3, "gemma4_text": 3, "gemma4_unified_text": 3, "glm4_moe_lite": 1, "minicpm3": 3,
    "roberta": 7, "roc_bert": 8, "seed_oss": 1, "xlm-roberta": 9,
}  # fmt: skip
WIDTHS = ((1, 1), (1 / 8, 1), (1 / 8, 2), (1, 4))  # factors of the embedding and of other matrices, as seeds go on
MOST_PARAMETERS = 20_000_000  # more means that some size was not shrunk
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, POSITIONS, WINDOW = 4, 64, 4, 2, 32, 112, 601, 256, 9
_BY_SIZE: tuple[tuple[int | float, str], ...] = (
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (HIDDEN, "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim hidden_size_global"
    " backbone_hidden_size attention_hidden_size input_embedding_size output_embedding_size lru_width"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
    " num_encoder_layers num_blocks depth num_experts num_local_experts n_routed_experts moe_num_experts"
    " index_n_heads num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
    " attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads"
    " linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k"
    " moe_top_k num_experts_per_token top_k_experts linear_num_key_heads n_group num_expert_group"),
    (HEAD_DIM, "head_dim kv_channels dim_head swa_head_dim index_head_dim linear_key_head_dim linear_value_head_dim"
    " linear_head_dim mamba_d_head mamba_head_dim mamba_headdim attention_head_dim hidden_size_per_layer_input"),
    (INNER, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff d_inner n_inner d_ff"
    " intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size feed_forward_size"),
    (48, "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"
    " shared_experts_intermediate_size moe_shared_expert_intermediate_size router_hidden_size"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"
    " max_target_positions original_max_position_embeddings"),
    (WINDOW, "sliding_window sliding_window_size local_attention window_size attention_window_size"),
    (24, "kv_lora_rank q_lora_rank o_lora_rank"),
    (16, "qk_nope_head_dim v_head_dim attention_chunk_size mamba_chunk_size mamba_d_state state_size ssm_state_size"
    " laurel_rank chunk_size"),
    (8, "qk_rope_head_dim rotary_dim index_topk mamba_d_conv"),
    (1, "topk_group first_k_dense_replace num_shared_experts n_shared_experts num_dense_layers moe_layer_start_index"),
    (0, "num_nextn_predict_layers"),
    (0.2, "initializer_range init_std init_method_std embedding_initializer_range embed_init_std"),
    (2, "eos_token_id"),
)  # fmt: skip
_SIZES = {name: size for size, names in _BY_SIZE for name in names.split()}
_ON: dict[str, Any] = {  # what defaults leave off or neutral, so that dropping it would not show
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_qk_norm", "qk_layernorm", "use_sliding_window"), True),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling"), 1.5),
    **dict.fromkeys(("routed_scaling_factor", "moe_routed_scaling_factor"), 1.5),
    **dict.fromkeys(("residual_multiplier", "attention_multiplier"), 0.5),
    "clip_qkv": 3.0,
    "max_window_layers": 2,
}
_UNSET = {"n_inner", "q_lora_rank", "num_nextn_predict_layers", "unpadded_vocab_size"}  # None is a way of its own
_AB = ["linear_attention", "full_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "big_bird": dict(rescale_embeddings=True),
    "blt": dict(encoder_hash_byte_group_vocab=400),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={t: dict(rope_type="default", rope_theta=1e4) for t in ("sliding_attention", "full_attention")},
    ),
    "dbrx": dict(attn_config=dict(kv_n_heads=KV_HEADS, clip_qkv=8, rope_theta=1e4)),
    "deepseek_v2": dict(topk_method="group_limited_greedy"),
    "deepseek_v4": dict(
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                     "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"], num_key_value_heads=1, partial_rotary_factor=0.25,
        o_groups=2,
    ),
    "doge": dict(keep_window_size=64),
    "dots3_note_audio_encoder": dict(adapter_input_size=HIDDEN, adapter_out_dim=HIDDEN),
    "dots3_note_text": dict(
        swa_num_attention_heads=HEADS, swa_num_key_value_heads=HEADS, swa_q_lora_rank=24, swa_kv_lora_rank=24,
        swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=16, head_dim=24,
    ),
    "dots3_note_vision_encoder": dict(mlp_bias=False, adapter_in_dim=HIDDEN, adapter_out_dim=HIDDEN),
    "emu3": dict(vocabulary_map={"<image>": 3, "<|extra_200|>": 4, "<|visual token 000000|>": 5}),
    "emu3_vqgan": dict(base_channels=32),
    "falcon_h1": dict(mamba_d_ssm=128),
    "gemma3n_text": dict(num_kv_shared_layers=2),
    "gemma4_text": dict(num_kv_shared_layers=2),
    "glm_moe_dsa": dict(indexer_types=["full", "shared"] * 2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=_AB * 2),
    "helium": dict(head_dim=16),
    "hrm_text": dict(num_hidden_layers=2),
    "inkling_text": dict(rel_extent=24, d_rel=8, log_scaling_n_floor=16, log_scaling_alpha=0.5),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "llama4_text": dict(attention_chunk_size=64, floor_scale=8),
    "longcat_flash": dict(num_layers=2, head_dim=8, num_key_value_heads=HEADS, zero_expert_num=2),
    "mamba2": dict(n_groups=2),
    "marian": dict(scale_embedding=True),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"] * 2, mlp_layer_types=["dense"] * 2 + ["sparse"] * 2,
        index_topk_blocks=4, index_block_size=16, dense_intermediate_size=INNER,
    ),
    "nemotron_h": dict(n_groups=2),
    "qwen4_exp_text": dict(
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=HEAD_DIM, indexer_budget=8, indexer_compress_ratio=4,
        hc_lowrank=8, ngram_vocab_size_base=VOCABULARY, ple_layer_ids=[1, 3], split_ngram_parts=4,
    ),
    "reformer": dict(axial_pos_embds=False, attn_layers=["local", "lsh"] * 2),
    "rwkv": dict(rescale_every=2),
    "xlstm": dict(hidden_size=128, embedding_dim=128),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(layers_block_type=["linear_attention", "hybrid"] * 2, attention_hidden_size=2 * HIDDEN),
    "zamba2": dict(layers_block_type=["linear_attention", "hybrid"] * 2),
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip


def tiny_config(kind: Any, **given: Any) -> Any:
    """An instance of the config class `kind`, every size of it small. given: what to set besides."""
    values = _shrunk(kind)
    values.update(_OWN.get(kind.model_type, {}))
    values.update(given)
    return kind(**values)


def _shrunk(kind: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in names}
    values.update({name: value for name, value in _ON.items() if name in names})
    values.update({n: v for n, v in (("bos_token_id", 1), ("pad_token_id", 0), ("is_decoder", True)) if n in names})
    if "kv_lora_rank" in names:  # latent attention gives every head keys of its own
        values["num_key_value_heads"] = HEADS
    try:
        default = kind()
    except Exception:  # its defaults contradict each other
        return values
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            values[name] = tiny_config(type(value))
        elif name in _UNSET and value is None:
            values.pop(name, None)
        elif isinstance(value, list) and name.endswith("_types") and len(set(map(str, value))) > 1:
            values.setdefault(name, _types(name, value))
    return values


def _types(name: str, value: list[str]) -> list[str]:
    """One type a layer, every type that the list has: A B A B for attention, A A B B for the rest."""
    distinct = list(dict.fromkeys(value))
    if name == "layer_types":
        return [distinct[j % len(distinct)] for j in range(LAYERS)]
    return [distinct[min(j * len(distinct) // LAYERS, len(distinct) - 1)] for j in range(LAYERS)]


class NoReferenceError(Exception):
    """transformers cannot be compared with; the message says why."""


def seeds_of(model_type: str) -> list[int]:
    """Return all seeds in the order of trial."""
    first = FIRST_SEEDS.get(model_type, 0)
    return [first, *(seed for seed in range(SEEDS) if seed != first)]


def blank_model(config: Any, **options: Any) -> Any:
    """The model whose checkpoints carry this config: the causal LM, or the one with more modes that it is a part of."""
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
    wider = transformers.AutoModelForImageTextToText
    if type(model.config) is not type(config) and type(config) in wider._model_mapping:
        model = wider.from_config(config, **options)
    return model


def make_model(config: Any, seed: int) -> Any:
    """A model of random weights, wide enough that greedy tokens vary, and no tensor of it all ones or zeros."""
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in blank_model(config).named_parameters()}
    if sum(sizes.values()) > MOST_PARAMETERS:
        largest = ", ".join(sorted(sizes, key=sizes.__getitem__)[-3:])
        raise NoReferenceError(f"not shrunk: {sum(sizes.values()):,} parameters, most in {largest}")
    embedding, matrices = WIDTHS[seed * len(WIDTHS) // SEEDS]
    torch.manual_seed(seed)
    model = blank_model(config, dtype=torch.float32).eval()
    table, seen = model.get_input_embeddings().weight, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("tid2eid"):  # numbers of experts by token id
            tensor.copy_(torch.rand(len(tensor), LAYERS).argsort(1)[:, : tensor.shape[1]])
        if id(tensor) in seen or not tensor.is_floating_point():
            continue
        seen.add(id(tensor))  # tied tensors have two names
        if tensor.dim() >= 2:
            if not float(tensor.std()) >= 0.05:
                tensor.normal_(0, 0.2)
            tensor.mul_(embedding if tensor is table else matrices)
        elif tensor.dim() == 1 and (isinstance(tensor, torch.nn.Parameter) or "bias" in name):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return model
