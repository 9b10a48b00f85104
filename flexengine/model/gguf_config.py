"""Metadata of GGUF files that change what a model computes. transformers' GGUF reader drops many of them; here each
agrees with the config, is copied to it, or the file is refused."""

import logging
import math
from typing import Any

from flexengine.activity import message
from flexengine.errors import UnsupportedModel
from flexengine.model.gguf_header import Header

_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_THETA = 1e4  # base of RoPE where a file names none, whatever the family
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of those of 27B, which llama.cpp scales in another way
# Keys that change no numbers, that transformers maps for every family or shapes of tensors show, or that are handled
# by name.
_HANDLED = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.sliding_window"),
    *("rope.scaling.type", "rope.scaling.finetuned", "rope.freq_base", "rope.freq_base_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
    *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "shortconv.l_cache"),
}

# Families whose shares of chosen experts sum to 1, though their configs do not say so.
_NORMALISED = {"ernie4_5_moe", "hunyuan_v1_moe"}
# Keys of latent attention that say in other words what its config has.
_LATENT = {f"attention.{key}_length{end}" for key in ("key", "value") for end in ("", "_mla")}
_LATENT |= {"attention.kv_lora_rank", "attention.q_lora_rank", "rope.dimension_count"}

# Families whose config is made here, by architecture: the config's model_type. Others are read by transformers.
_SAME_NAMES = "gemma olmo2 olmoe granite granitemoe glm4 smollm3 seed_oss ernie4_5 arcee exaone4 cohere2"
_FAMILIES = {name: name for name in _SAME_NAMES.split()}
_FAMILIES |= {"hunyuan-dense": "hunyuan_v1_dense", "command-r": "cohere", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss"}
_FAMILIES |= {"dots1": "dots1", "ernie4_5-moe": "ernie4_5_moe", "hunyuan-moe": "hunyuan_v1_moe"}
_FAMILIES["deepseek2"] = "deepseek_v2"  # or deepseek_v3
_OWN = {*_FAMILIES.values(), "deepseek_v3"}
_LAYERED = ("exaone4", "cohere2")
GATES_FIRST = "gates_first"  # field of a config: whether the first product of experts has all gates, then all ups
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # as llama.cpp and transformers have without a value
# Families whose routers are sigmoids, though their configs do not say so.
_SIGMOID = {"glm4_moe", "deepseek_v3", "dots1"}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_LAYER_NORM = "attention.layer_norm_epsilon"
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

_BIASES = {"attention_bias": "attn_q", "use_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}


def own_family(header: Header) -> str:
    """Return the model_type of a file whose config is made here; "" for others, which transformers reads."""
    if header.architecture == "llama" and header.values.get("llama.expert_count"):
        return "mixtral"
    if header.architecture == "deepseek2" and any(x.name.endswith("exp_probs_b.bias") for x in header.tensors):
        return "deepseek_v3"
    return _FAMILIES.get(header.architecture, "")


def family_config(header: Header) -> Any:
    """Return the config of a file with an `own_family`: sizes, ids and what shapes of tensors show. `carry_values`
    copies all other values. Raise UnsupportedModel if a size is missing or no number."""
    from transformers import AutoConfig

    given = {key.removeprefix(f"{header.architecture}."): value for key, value in header.values.items()}
    fields = {key: field for key, field in _FIELDS.items() if field != "rms_norm_eps" or _LAYER_NORM not in given}
    values: dict[str, Any] = {field: given.get(key) for key, field in fields.items()}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if wrong := [key for key, field in fields.items() if type(values[field]) not in (int, float)]:
        raise UnsupportedModel(f"{header.path} has no single number as {header.architecture}.{wrong[0]}")
    values["num_hidden_layers"] -= given.get("nextn_predict_layers") or 0
    if own_family(header) in _LAYERED:  # every fourth layer sees all tokens; without a window all do
        values["sliding_window"] = given.get("attention.sliding_window") or None
        if values["sliding_window"] is None:
            values |= {"layer_types": ["full_attention"] * values["num_hidden_layers"], "sliding_window_pattern": 1}
    if own_family(header) == "gpt_oss":
        values |= {"sliding_window": given.get("attention.sliding_window"), GATES_FIRST: True}
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": given.get("rope.freq_base", _THETA)}
    if own_family(header) == "ernie4_5_moe":
        values["moe_num_shared_experts"] = given.get("expert_shared_count") or 0
    if own_family(header) == "dots1":
        values["sliding_window"] = None
    if header.architecture == "deepseek2":
        values |= _latent(header, given)
    if given.get("rope.scaling.type") == "yarn":
        whole = {"truncate": False} if own_family(header) == "gpt_oss" else {}
        values["rope_parameters"] = _yarn(header, given) | whole
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    own = given.get("attention.key_length")
    heads: dict[str, Any] = {}
    if header.architecture != "deepseek2":
        heads["head_dim"] = own if type(own) is int else values["hidden_size"] // values["num_attention_heads"]
    if "attention.scale" not in given and heads:
        heads["attention_multiplier"] = heads["head_dim"] ** -0.5
    ids = {field: header.values.get(f"tokenizer.ggml.{key}_token_id") for field, key in _TOKEN_IDS.items()}
    return AutoConfig.for_model(
        own_family(header),
        **values,
        use_qk_norm="blk.0.attn_q_norm.weight" in shapes,
        **ids,
        **{field: f"blk.0.{name}.bias" in shapes for field, name in _BIASES.items()},
        **heads,
        vocab_size=shapes.get("token_embd.weight", (0,))[0],
        tie_word_embeddings="output.weight" not in shapes,
    )


def _latent(header: Header, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention, and of DeepSeek's router where a file has no key. given: values by key.
    Raise UnsupportedModel if a size is missing or no number."""
    newer = "_mla" if "attention.key_length_mla" in given else ""  # where a head has other lengths in llama.cpp's cache
    keys = {"qk_rope_head_dim": "rope.dimension_count", "kv_lora_rank": "attention.kv_lora_rank"}
    keys |= {field: f"attention.{key}_length{newer}" for field, key in (("whole", "key"), ("v_head_dim", "value"))}
    sizes: dict[str, Any] = {field: given.get(key) for field, key in keys.items()}
    if wrong := [keys[field] for field, value in sizes.items() if type(value) is not int]:
        raise UnsupportedModel(f"{header.path} has no single number as {header.architecture}.{wrong[0]}")
    sizes["qk_nope_head_dim"] = sizes.pop("whole") - sizes["qk_rope_head_dim"]
    groups, v3 = given.get("expert_group_count") or 1, own_family(header) == "deepseek_v3"
    # Models of 64 experts or fewer that are no V3 have no groups: DeepSeek-V2-Lite. V2 has 160 experts in 8 groups.
    if "expert_group_count" not in given and (v3 or (given.get("expert_count") or 0) > 64):
        fault = f"{header.path} names no groups of experts: a token chooses among all, as in llama.cpp"
        message(f"{fault}, which the model may not have learned; a newer file names them", logging.WARNING)
    return {
        **sizes,
        "q_lora_rank": given.get("attention.q_lora_rank") or None,
        "num_key_value_heads": given["attention.head_count"],
        "n_group": groups,
        "topk_group": given.get("expert_group_used_count") or 1,
        "topk_method": "noaux_tc" if v3 else "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": bool(given.get("expert_weights_norm")),
        "routed_scaling_factor": 1.0,
    }


def _yarn(header: Header, given: dict[str, Any]) -> dict[str, Any]:
    """Return YaRN's parameters. given: values by key. llama.cpp has one number for DeepSeek's two factors. Raise
    UnsupportedModel if there is no factor."""
    scale = given.get("rope.scaling.yarn_log_multiplier") or 0  # converters write a tenth, in fp32
    both = dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * scale:.6g}")) if scale else {}
    plain = _YARN | {"attn_factor": None}
    values = {key: given.get(f"rope.scaling.yarn_{key}", value) for key, value in plain.items()}
    attention = values.pop("attn_factor")
    if not given.get("rope.scaling.factor"):
        fault = f"{header.path} scales RoPE by YaRN, and has no {header.architecture}.rope.scaling.factor above zero"
        raise UnsupportedModel(f"{fault}; use the safetensors checkpoint")
    return {
        "rope_type": "yarn",
        "rope_theta": given.get("rope.freq_base", _THETA),
        "factor": given["rope.scaling.factor"],
        "original_max_position_embeddings": given.get("rope.scaling.original_context_length", given["context_length"]),
        **both,
        **({} if attention is None else {"attention_factor": attention}),
        **values,
    }


def carry_values(header: Header, config: Any) -> None:
    """Copy the metadata of a file's architecture to the config, and name unknown ones in a message. Raise
    UnsupportedModel if a value that changes numbers has no field there, and is not what the model uses without one."""
    prefix = f"{header.architecture}."
    values = {key.removeprefix(prefix): value for key, value in header.values.items() if key.startswith(prefix)}
    dropped = _LATENT if getattr(config, "kv_lora_rank", None) else set[str]()
    if config.model_type == "ernie4_5_moe":  # shapes show it
        dropped = {"expert_shared_feed_forward_length"}
    if values.get("expert_weights_scale") == 0:  # as without it in llama.cpp
        dropped = dropped | {"expert_weights_scale"}
    values = {key: value for key, value in values.items() if key not in dropped}
    own = config.hidden_size // (getattr(config, "num_attention_heads", 0) or 1)
    width = values.get("attention.key_length", getattr(config, "head_dim", None) or own)
    if hasattr(config, "query_pre_attn_scalar"):
        large = _LARGE_GEMMAS.get(header.architecture) == config.num_hidden_layers
        config.query_pre_attn_scalar = own if large else width
    fields, lost = _fields(config, own, width), list[str]()
    if unknown := sorted(values.keys() - _HANDLED - fields.keys()):
        message(f"{header.path} has metadata that are not read: {', '.join(unknown)}", logging.WARNING)
    for key in values.keys() & fields.keys():
        value, (names, plain) = values[key], fields[key]
        present = [name for name in names if hasattr(config, name) and value is not None]  # None: an array
        for name in (name for name in present if not _same(getattr(config, name), value)):
            setattr(config, name, value)
        if not present and not any(_same(value, other) for other in plain if value is not None):
            lost.append(key)
    lost += _carry_rope_sizes(values, config, width)
    if lost:
        named = ", ".join(
            f"{key} = {'an array' if values[key] is None else values[key]!s:.40}" for key in sorted(lost)[:3]
        )
        fault = f"{header.path} has {named}, which has no place in the config of a {config.model_type}"
        raise UnsupportedModel(f"{fault}; use the safetensors checkpoint")
    _carry_window(header, values.get("attention.sliding_window") or 0, config)


def _fields(config: Any, own: int, width: Any) -> dict[str, tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Return, for each key, the fields of configs that it sets, and the values that the model uses if the config has
    none of these. own, width: columns of a head without and with regard to the file's value."""
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") != "default"
    sigmoid = config.model_type in _SIGMOID or getattr(config, "scoring_func", "") == "sigmoid"
    scaling = {"factor": "factor", "attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast"}
    scaling["yarn_attn_factor"] = "attention_factor"
    scaling |= {"yarn_beta_slow": "beta_slow", "original_context_length": "original_max_position_embeddings"}
    shared, inner = int(config.model_type == "hunyuan_v1_moe"), getattr(config, "intermediate_size", 0)
    normalised = config.model_type in _NORMALISED
    unscaled = (0, 1, getattr(config, "max_position_embeddings", None))
    return {
        "attention.key_length": (("head_dim",), (own,)),
        "attention.value_length": ((), (width,)),
        "attention.layer_norm_rms_epsilon": (_EPSILONS, ()),
        "attention.layer_norm_epsilon": (_EPSILONS, ()),
        "attention.scale": (("attention_multiplier",), (getattr(config, "query_pre_attn_scalar", width) ** -0.5,)),
        "attn_logit_softcapping": (("attn_logit_softcapping",), (0,)),
        "final_logit_softcapping": (("final_logit_softcapping",), (0,)),
        "expert_count": (("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
        "leading_dense_block_count": (("first_k_dense_replace", "moe_layer_start_index"), (0,)),
        "expert_shared_count": (("n_shared_experts", "moe_num_shared_experts"), (0, shared)),
        "interleave_moe_layer_step": (("moe_layer_interval",), (0, 1)),
        "expert_group_count": (("n_group",), (0, 1)),
        "expert_group_used_count": (("topk_group",), (0, 1)),
        "nextn_predict_layers": ((), (0,) if config.model_type not in _OWN else tuple(range(9))),
        "expert_used_count": (("num_experts_per_tok", "moe_topk"), (0,)),
        "expert_feed_forward_length": (("moe_intermediate_size",), (0, inner)),
        "expert_shared_feed_forward_length": (("shared_expert_intermediate_size",), (0, shared and inner)),
        "expert_weights_norm": (("norm_topk_prob",) if config.model_type != "deepseek_v2" else (), (normalised,)),
        "expert_weights_scale": (("routed_scaling_factor",), (0, 1)),
        "expert_gating_func": ((), (0, 3) if config.model_type == "gpt_oss" else (0, 2 if sigmoid else 1)),
        "attention.clamp_kqv": (("clip_qkv",), (0,)),
        "use_parallel_residual": (("use_parallel_residual", "parallel_attn"), (False,)),
        "attention.causal": ((), (True,)),
        "logit_scale": (("logits_scaling", "logit_scale"), (0, 1)),
        "embedding_scale": (("embedding_multiplier",), (0, 1)),
        "residual_scale": (("residual_multiplier",), (0, 1)),
        **dict.fromkeys(("attention.max_alibi_bias", "ssm.dt_b_c_rms"), ((), (0,))),
        "attention.shared_kv_layers": ((), (0,)),
        "rope.scaling.yarn_log_multiplier": ((), (0, rope.get("mscale_all_dim", 0) / 10)),
        "rope.scaling.yarn_ext_factor": ((), (1,) if scaled else (0, 1)),
        **{f"rope.scaling.{key}": ((), (rope.get(of),) if scaled else unscaled) for key, of in scaling.items()},
    }


def _carry_rope_sizes(values: dict[str, Any], config: Any, width: Any) -> list[str]:
    """Copy the bases of RoPE and the columns that it turns to the config. Return the keys that have no place there."""
    rope, lost = dict(getattr(config, "rope_parameters", None) or {}), list[str]()
    for kind, end in (("full_attention", ""), ("sliding_attention", "_swa")):
        part = dict(rope[kind]) if kind in rope else rope
        base, turned = (values.get(f"rope.{key}{end}") for key in ("freq_base", "dimension_count"))
        base = _THETA if base is None and not end and "rope_theta" in part else base
        own = part if kind in rope or not end else {}  # {}: layers with a window turn as all others do
        if base is not None and not _same(part.get("rope_theta"), base):
            lost += [] if "rope_theta" in own else [f"rope.freq_base{end}"]
            part["rope_theta"] = base
        if turned is not None and int(width * part.get("partial_rotary_factor", 1)) != turned:
            lost += [] if "partial_rotary_factor" in own else [f"rope.dimension_count{end}"]
            part["partial_rotary_factor"] = turned / width
        if kind in rope:
            rope[kind] = part
    if rope and not lost:
        config.rope_parameters = rope
    return lost


def _carry_window(header: Header, window: int, config: Any) -> None:
    """Copy the sliding window to the config. Raise UnsupportedModel if it has no place there."""
    old, layered = getattr(config, "sliding_window", None), hasattr(config, "layer_types")
    if 0 < window < config.max_position_embeddings and old != window:
        if not hasattr(config, "sliding_window") or layered:
            raise UnsupportedModel(f"{header.path} has a window of {window}, which transformers' GGUF reader drops")
        config.sliding_window = window
    elif not window and old and not layered:  # the default of the family
        config.sliding_window = None


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as numbers to the precision of a float32."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else one == other
