"""GGUF files made safetensors: compared with what a file was made from, and with transformers."""

import io
import json
import struct
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, get_tensor_name_map
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, FlexError, OutOfMemory, UnsupportedModel
from flexengine.model import gguf, gguf_header, gguf_places, shards
from flexengine.model.source import resolve
from tests.helpers.prepared import gguf_tensors_of, tensors_of
from tests.helpers.strategies import flipped
from tests.helpers.tiny_gguf import (
    FAMILIES,
    SHAPE,
    Q,
    gguf_tensors,
    permute,
    tiny_gguf,
    tiny_model,
    write_gguf,
)

pytestmark = pytest.mark.usefixtures("cache")


def prepared_gguf(path):
    return resolve(str(path)).directory


def tensors_in(path):
    return gguf_tensors_of(prepared_gguf(path), path)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_back_the_model_it_was_made_from(tmp_path, family):
    model = tiny_model(family)
    path = write_gguf(tmp_path / "m.gguf", family, gguf_tensors(family, model))
    directory, tensors = prepared_gguf(path), tensors_in(path)
    # What no file has as it is needed is written again: an up-projection of latent attention; experts as [in, out].
    share = {"deepseek_v2": 0.2, "deepseek_v3": 0.2, "gpt_oss": 0.9}.get(family, 0.1)
    assert sum(file.stat().st_size for file in directory.glob("*.safetensors")) < path.stat().st_size * share
    expected = model.state_dict()
    assert set(expected) - set(tensors) == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in tensors.items():
        own = expected[name]
        if family == "gpt_oss" and "gate_up" in name:  # gates and ups, which alternate in the model, as in the file
            own = torch.cat([own[..., ::2], own[..., 1::2]], -1)
        assert torch.equal(tensor, own), name
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()
    again.load_state_dict({name: expected[name] for name in tensors}, strict=False)
    ids = torch.arange(12).reshape(1, 12)
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-6)  # eps is a float32 there
    assert again.config.eos_token_id == 7
    assert GenerationConfig.from_pretrained(directory).eos_token_id == 7


def test_quantised_tensors_become_float32_and_half_ones_stay(tmp_path):
    kinds = {"ffn_up": Q.Q4_0, "attn_q": Q.Q8_0, "attn_k": Q.Q4_0, "attn_v": Q.F16, "ffn_down": Q.BF16}

    def kind(name: str) -> Q:
        return next((k for part, k in kinds.items() if part in name), Q.F32)

    model = tiny_model("llama")
    tensors = tensors_in(write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors("llama", model), kind))
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
    directory = prepared_gguf(path := tiny_gguf(tmp_path / "m.gguf", kind=lambda name: kind))
    dtype = {Q.F16: "float16", Q.BF16: "bfloat16"}.get(kind, "float32")
    assert json.loads((directory / "config.json").read_text())["dtype"] == dtype
    kinds = {tensor.dtype for tensor in tensors_in(path).values() if tensor.ndim == 2}
    assert kinds == {getattr(torch, dtype)}


def test_the_same_as_transformers_on_a_quantised_mixture_of_experts(tmp_path):
    path = tiny_gguf(tmp_path / "m.gguf", "qwen3moe-default", kind=lambda name: Q.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).state_dict()
    ours = tensors_in(path)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("family", "kind"), [("llama", Q.Q8_0), ("llama-untied", Q.F16), ("qwen3moe", Q.F32)])
def test_rows_are_converted_in_pieces(tmp_path, monkeypatch, family, kind):
    """Also those that are moved or merged; only norms are read whole. As if products could not read them encoded."""
    whole = tensors_in(path := tiny_gguf(tmp_path / "m.gguf", family, kind=lambda name: kind))
    monkeypatch.setattr(gguf, "_stays", lambda *_: False)
    pieces, read = list[int](), list[str]()
    check, read_whole = shards.check_finite, gguf._read
    monkeypatch.setattr(gguf, "PIECE_BYTES", 1000)
    monkeypatch.setattr(shards, "check_finite", lambda name, x, where: (pieces.append(x.nbytes), check(name, x, where)))
    monkeypatch.setattr(gguf, "_read", lambda tensor: (read.append(tensor.name), read_whole(tensor))[1])
    (tmp_path / "d").mkdir()
    gguf.convert([path], tmp_path / "d", memory=2000)
    tensors = tensors_of(tmp_path / "d")
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert max(pieces) <= 1000
    assert len(pieces) > 200
    assert all("norm" in name for name in read)


def test_only_moves_of_rows_are_recognised():
    matrix, vector = (gguf_header.GgufTensor("x", Q.F32, shape, 0, 4) for shape in ((6, 4), (6,)))

    def rows_of(change, *group):
        return gguf.rows_of([*group], lambda group, weights: change(*map(weights, range(len(group)), group)))

    assert rows_of(lambda x: x[::-1], matrix).ravel().tolist() == [5, 4, 3, 2, 1, 0]
    both = rows_of(lambda x, y: np.stack([x, y], 1), matrix, matrix)
    assert both.shape == (6, 2, 1)
    assert both[1].ravel().tolist() == [1, gguf_places.ROWS + 1]
    changes = (lambda x: x.T, lambda x: x - 1, lambda x: np.log(-x), lambda x: x[:5], lambda x: x.reshape(6, 4))
    assert [rows_of(change, matrix) for change in changes] == [None] * 5
    assert rows_of(lambda x: x, vector) is None


def test_a_tensor_that_is_converted_whole_must_fit(tmp_path):
    path = tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(OutOfMemory, match=r"norm.weight of .*m.gguf, which is converted whole, needs 1.28 kB, but 0 B"
                       r" of 1.00 kB are taken .*; give the engine more"):  # fmt: skip
        resolve(str(path), memory=1000)
    assert not list(cache_root().glob("prepared/*.tmp-*"))


def test_a_vocabulary_that_transformers_reads_must_fit(tmp_path):
    def extra(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"token {i}" for i in range(96)])

    (tmp_path / "d").mkdir()
    with pytest.raises(
        OutOfMemory, match=r"the tokenizer of .*m.gguf, .* needs 288 kB, but .* of 200 kB .*safetensors"
    ):
        gguf.convert([tiny_gguf(tmp_path / "m.gguf", extra=extra)], tmp_path / "d", memory=200_000)
    assert not list((tmp_path / "d").iterdir())


def test_a_tensor_that_is_converted_whole_is_not_in_memory_before_its_pieces_are_read(tmp_path):
    path, kept = tiny_gguf(tmp_path / "m.gguf"), list[weakref.ref]()
    norm = next(tensor for tensor in gguf_header.read_header(path).tensors if tensor.name == "output_norm.weight")

    def made():
        kept.append(weakref.ref(values := gguf._read(norm) + 1))
        return values

    tensor = gguf.whole_tensor(path, "a", torch.float32, made)
    assert (tensor.dtype, tensor.shape) == (torch.float32, (64,))
    assert all(ref() is None for ref in kept)
    assert torch.equal(torch.cat([*tensor.pieces]), torch.from_numpy(gguf._read(norm) + 1))


def test_row_numbers_of_all_tensors_are_not_held_at_once(tmp_path, monkeypatch):
    rows_of, made, held = gguf.rows_of, list[weakref.ref](), list[int]()

    def watched(group, processed):
        held.append(sum(ref() is not None for ref in made))
        found = rows_of(group, processed)
        made.extend([] if found is None else [weakref.ref(found)])
        return found

    monkeypatch.setattr(gguf, "rows_of", watched)
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    (tmp_path / "d").mkdir()
    gguf.convert([tiny_gguf(tmp_path / "m.gguf")], tmp_path / "d")
    assert max(held) <= 2
    assert len(held) > 20


def test_experts_of_which_a_half_is_missing_are_refused(tmp_path):
    tensors = gguf_tensors("qwen3moe", tiny_model("qwen3moe"))
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", [x for x in tensors if x[0] != "blk.1.ffn_up_exps.weight"])
    with pytest.raises(BadCheckpoint, match=r"m.gguf lacks a part of .*1.*gate_up_proj, .* made of .*gate.* and .*up_"):
        prepared_gguf(path)


def test_an_outline_has_no_vocabulary_and_no_weights(tmp_path, monkeypatch):
    tokens = [f"token {i}" for i in range(96)]
    path = tiny_gguf(tmp_path / "m.gguf", extra=lambda writer: writer.add_token_list(tokens))
    monkeypatch.setattr(gguf_header, "_MAX_OUTLINED", 500)
    header = gguf_header.read_header(path, ["tokenizer.ggml.tokens"])
    assert header.values["tokenizer.ggml.tokens"] == tokens
    values = {key: value for key, value in header.values.items() if key != "llama.vocab_size"}
    places = {key: header.places[key] for key in values}
    gguf_header.write_outline(replace(header, values=values, places=places), tmp_path / "o.gguf")
    outline = gguf_header.read_header(tmp_path / "o.gguf")
    assert outline.values == {**{key: values[key] for key in values if key != "tokenizer.ggml.tokens"},
                              "llama.vocab_size": 96}  # fmt: skip
    assert [(x.name, x.shape) for x in outline.tensors] == [(x.name, x.shape) for x in header.tensors]
    assert (tmp_path / "o.gguf").stat().st_blocks * 512 < path.stat().st_size


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


def test_a_single_end_of_a_turn_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "end_tokens", lambda path, values: [5])
    (tmp_path / "d").mkdir()
    gguf.convert([tiny_gguf(tmp_path / "m.gguf")], tmp_path / "d")
    assert json.loads((tmp_path / "d" / "generation_config.json").read_text())["eos_token_id"] == 5


def test_an_array_of_too_many_elements_is_refused():
    for kind in (0, 8):
        with pytest.raises(ValueError, match="has 16777217 elements; the limit is 16777216"):
            gguf_header._value(io.BytesIO(struct.pack("<IQ", kind, 2**24 + 1) + bytes(64)), 9, True)


def test_damaged_gguf_headers_are_refused_cleanly(tmp_path):
    good = tiny_gguf(tmp_path / "m.gguf").read_bytes()
    start = min(tensor.offset for tensor in gguf_header.read_header(tmp_path / "m.gguf").tensors)
    bad, refused = tmp_path / "bad.gguf", list[bool]()

    @given(size=st.integers(0, 64) | st.integers(0, len(good) - 1))
    @settings(max_examples=200)
    def cut_is_refused(size):
        bad.write_bytes(good[:size])
        with pytest.raises(BadCheckpoint, match=r"bad\.gguf"):
            gguf_header.read_header(bad)

    @given(changes=st.lists(st.tuples(st.integers(0, start - 1), st.integers(0, 255)), min_size=1, max_size=3))
    @settings(max_examples=500)
    def changed_is_read_or_refused(changes):
        data = bytearray(good)
        for at, byte in changes:
            data[at] = byte
        bad.write_bytes(data)
        try:
            gguf_header.read_header(bad)
        except FlexError:
            refused.append(True)

    cut_is_refused()
    changed_is_read_or_refused()
    assert len(refused) > 50


@pytest.mark.parametrize(
    ("version", "kind", "fault"),
    [
        (struct.pack("<I", 1), 0, "is of version 1, and only 2 and 3 of the GGUF format are read; convert"),
        (struct.pack("<I", 4), 0, "is of version 4"),
        (struct.pack(">I", 3), 0, "is big-endian, and only little-endian files of the GGUF format are read"),
        (struct.pack("<I", 3), 31, "tensor x has the type 31, which the installed package gguf does not know"),
    ],
)
def test_files_of_other_releases_are_not_called_damaged(tmp_path, version, kind, fault):
    tensor = struct.pack("<Q", 1) + b"x" + struct.pack("<IQIQ", 1, 32, kind, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + version + struct.pack("<QQ", 1, 0) + tensor + bytes(256))
    with pytest.raises(UnsupportedModel, match=fault):
        gguf_header.read_header(tmp_path / "m.gguf")


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
    ours = tensors_in(path)
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


@pytest.mark.parametrize("kind", [q for q in Q if q.name in ("Q8_1", "Q8_K", "Q1_0", "I8")], ids=lambda kind: kind.name)
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
    good, (first, second) = path.read_bytes(), gguf_header.read_header(path).tensors[:2]
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
    """The header is valid, but its values would crash a reader or keep it busy."""
    path = tiny_gguf(tmp_path / "m.gguf")

    def extra(writer):
        writer.kv_data[0].pop(key, None)
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)

    with pytest.raises(FlexError, match=r"m\.gguf"):
        prepared_gguf(tiny_gguf(path, extra=extra))
    assert not list(cache.glob("*.tmp-*"))


@pytest.mark.filterwarnings("ignore")
def test_damaged_gguf_files_convert_or_are_refused(tmp_path, cache):
    path, refused = tmp_path / "m.gguf", list[bool]()
    good = tiny_gguf(path).read_bytes()
    start = min(tensor.offset for tensor in gguf_header.read_header(path).tensors)

    @given(header=flipped(good[:start]).flatmap(flipped))
    @settings(max_examples=60)
    def converts_or_is_refused(header):
        path.write_bytes(header + good[start:])
        try:
            prepared_gguf(path)
        except FlexError:
            refused.append(True)

    converts_or_is_refused()
    assert len(refused) > 20
    assert not list(cache.glob("*.tmp-*"))
