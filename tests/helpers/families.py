"""Tiny random checkpoints of every family, and the greedy tokens that `transformers` generates with them."""

from pathlib import Path
from typing import Any

import torch

_COMMON = dict(vocab_size=601, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=256)
_GATED = dict(_COMMON, intermediate_size=112, num_key_value_heads=2, tie_word_embeddings=False)
# Policies for four prompts: everything on the device, in RAM, on disk, and in parts.
POLICIES: dict[str, dict[str, Any]] = {
    "resident": dict(gpu_batch_size=4, weights=[1, 0, 0], cache=[1, 0, 0], activations=[1, 0, 0]),
    "host": dict(gpu_batch_size=2, num_gpu_batches=2, weights=[0, 1, 0], cache=[0.5, 0.5, 0], activations=[1, 0, 0]),
    "disk": dict(gpu_batch_size=2, num_gpu_batches=2, weights=[0, 0, 1], cache=[0, 0.5, 0.5], activations=[0, 1, 0]),
    "half": dict(gpu_batch_size=1, num_gpu_batches=4, weights=[0.3, 0.3, 0.4], cache=[1, 0, 0], activations=[1, 0, 0],
                 slots=1),
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", dict(_COMMON, ffn_dim=112, word_embed_proj_dim=64)),
    "opt-350m": ("OPT", dict(_COMMON, ffn_dim=112, word_embed_proj_dim=32, do_layer_norm_before=False)),
    "llama": ("Llama", _GATED),
    "llama-tied": ("Llama", dict(_GATED, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(_GATED, sliding_window=9)),
    "qwen2": ("Qwen2", _GATED),
    "qwen3": ("Qwen3", dict(_GATED, head_dim=32)),
    "gemma2": ("Gemma2", dict(_GATED, head_dim=32, sliding_window=9, query_pre_attn_scalar=24,
                              tie_word_embeddings=True)),
    "gemma3": ("Gemma3Text", dict(_GATED, head_dim=32, sliding_window=9, tie_word_embeddings=True,
                                  layer_types=["sliding_attention", "full_attention"] * 2)),
    "phi3": ("Phi3", dict(_GATED, partial_rotary_factor=0.5, pad_token_id=0, sliding_window=None)),
    "gpt2": ("GPT2", dict(vocab_size=601, n_embd=64, n_layer=4, n_head=4, n_positions=256)),
    "gpt-neox": ("GPTNeoX", dict(_COMMON, intermediate_size=112, rotary_pct=0.5)),
    "olmo2": ("Olmo2", _GATED),
    "mixtral": ("Mixtral", dict(_GATED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": ("Qwen3Moe", dict(_GATED, head_dim=32, num_experts=6, num_experts_per_tok=2,
                                   moe_intermediate_size=48, mlp_only_layers=[1], norm_topk_prob=True)),
    "gpt-oss": ("GptOss", dict(_GATED, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
                               layer_types=["sliding_attention", "full_attention"] * 2)),
    "bloom": ("Bloom", dict(vocab_size=601, hidden_size=64, n_layer=4, n_head=4)),
    "granite": ("Granite", dict(_GATED, residual_multiplier=0.5, attention_multiplier=0.2, embedding_multiplier=1.5)),
    "cohere": ("Cohere", dict(_GATED, pad_token_id=0, bos_token_id=1)),
    "starcoder2": ("Starcoder2", dict(_GATED, sliding_window=None)),
    "glm4": ("Glm4", dict(_GATED, head_dim=16, partial_rotary_factor=0.5, pad_token_id=0)),
}  # fmt: skip
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=48)
_LATENT = dict(_GATED, **_EXPERTS, num_key_value_heads=4, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
               v_head_dim=16, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1)  # fmt: skip
_LOCAL = dict(_GATED, head_dim=32, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2)
# One family for each kind of part that those above do not have.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3", dict(_LATENT, q_lora_rank=24)),
    "deepseek-v2": ("DeepseekV2", dict(_LATENT, q_lora_rank=None, v_head_dim=20, topk_method="greedy")),
    "minicpm3": ("MiniCPM3", dict(_COMMON, intermediate_size=112, num_key_value_heads=4, kv_lora_rank=24,
                                  q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=24)),
    "olmo": ("Olmo", dict(_GATED, clip_qkv=1.0, pad_token_id=1)),
    "olmoe": ("Olmoe", dict(_GATED, num_experts=4, num_experts_per_tok=2, clip_qkv=1.0, pad_token_id=1)),
    "gptj": ("GPTJ", dict(vocab_size=601, n_embd=64, n_layer=4, n_head=4, n_positions=256, rotary_dim=8)),
    "codegen": ("CodeGen", dict(vocab_size=601, n_embd=128, n_layer=4, n_head=8, n_positions=256, rotary_dim=8)),
    "gpt-neo": ("GPTNeo", dict(vocab_size=601, hidden_size=64, num_layers=4, num_heads=4, max_position_embeddings=256,
                               window_size=9, attention_types=[[["global", "local"], 2]])),
    "granitemoeshared": ("GraniteMoeShared", dict(_GATED, num_local_experts=4, num_experts_per_tok=2,
                                                  shared_intermediate_size=48, residual_multiplier=0.5)),
    "mimo": ("MiMoV2Flash", dict(_LOCAL, v_head_dim=16, n_routed_experts=4, attention_value_scale=0.7, n_group=1,
                                 topk_group=1, **_EXPERTS)),
    "afmoe": ("Afmoe", dict(_LOCAL, num_experts=4, num_dense_layers=1, **_EXPERTS)),
    "bitnet": ("BitNet", dict(_GATED, pad_token_id=0)),
    "laguna": ("Laguna", dict(_LOCAL, num_experts=4, shared_expert_intermediate_size=48, **_EXPERTS)),
    "nanochat": ("NanoChat", dict(_GATED, pad_token_id=0)),
}  # fmt: skip
LENGTHS = (5, 17, 1, 40, 29, 8, 33, 17)  # ragged prompts
NEW = 6  # tokens generated: caches grow past a page (29), and prompts past the sliding window (5)


def make_checkpoint(family: str, directory: Path, **save: Any) -> Any:
    """A random model of the family, saved; wide enough weights that the greedy tokens vary."""
    import transformers

    kind, values = FAMILIES.get(family) or KINDS[family]
    config = getattr(transformers, f"{kind}Config")(**values, init_std=0.2, initializer_range=0.2, eos_token_id=2)
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases that are all ones and zeros would hide that they were dropped
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, **save)
    return model


def prompts_of(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def reference(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy continuations by transformers.generate, one prompt at a time, end-of-sequence ignored."""
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


class Family:
    """One tiny checkpoint with prompts and the reference's answers."""

    def __init__(self, name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.directory = name, directory
        self.model = make_checkpoint(name, directory)
        if dtype != torch.float32:  # stored in 16 bits, computed in fp32
            self.model.to(dtype).save_pretrained(directory)
            self.model = type(self.model).from_pretrained(directory, dtype=torch.float32)
        self.prompts = prompts_of(601)
        self.expected = reference(self.model, self.prompts)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": p} for p in self.prompts]
