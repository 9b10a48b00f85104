"""GGUF files that the engine reads in place: their tokens, bytes and faults."""

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

from flexengine import Engine, Policy, SamplingParams
from flexengine.codec.gguf_blocks import BLOCKS
from flexengine.engine import core
from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.kernels import load
from flexengine.kernels.cpu import NativeKernels
from flexengine.lossy import Lossy
from flexengine.model import gguf_header
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.encoding import read_part
from flexengine.model.gguf_places import bad_blocks
from flexengine.model.source import resolve
from flexengine.shell.commands import verify as command
from flexengine.shell.commands.verify import verified
from flexengine.shell.explain.formats import form_words
from flexengine.worker import in_place
from flexengine.worker.open_model import open_model
from tests.helpers.families import POLICIES, prompts_of, reference
from tests.helpers.gguf_blocks import random_blocks, special_blocks
from tests.helpers.prepared import gguf_tensors_of
from tests.helpers.tiny_gguf import FAMILIES, MORE, Q, gguf_of_type, gguf_tensors, tiny_gguf, tiny_model, write_gguf

pytestmark = pytest.mark.usefixtures("cache")
PROMPTS, NEW = prompts_of(96, (5, 17, 1, 9)), 6
# Types by parts of names in the file and in the checkpoint; the first that fits.
TYPES = (
    ("q_norm", "q_norm", Q.F32), ("k_norm", "k_norm", Q.F32), ("router.", "router.", Q.F32),
    ("shexp", "shared_experts", Q.Q4_0), ("gate_inp", "mlp.gate.", Q.F32), ("exps", "experts", Q.Q8_0),
    ("ffn_gate_inp", "mlp.router", Q.F32), ("sinks", "sinks", Q.F32),
    ("shexp", "shared_mlp", Q.Q4_0), ("attn_q_a", "q_a_proj", Q.Q4_0), ("attn_q_b", "q_b_proj", Q.Q4_1),
    ("attn_kv_a", "kv_a_proj", Q.Q5_1), ("attn_kv_b", "kv_b_proj", Q.Q8_0), ("attn_k_b", "kv_b_proj", Q.F32),
    ("attn_v_b", "kv_b_proj", Q.F32), ("attn_q", "q_proj", Q.Q4_0),
    ("attn_k", "k_proj", Q.Q8_0), ("attn_v", "v_proj", Q.Q5_1), ("ffn_gate", "gate_proj", Q.Q4_1),
    ("ffn_up", "up_proj", Q.Q4_1), ("token_embd", "embed_tokens", Q.Q8_0), ("", "", Q.Q5_0),
)  # fmt: skip


def kind_of(name):
    return next(kind for *parts, kind in TYPES if any(part in name for part in parts))


def made(path, family, kind=kind_of):
    """A file, and the model of transformers with its numbers as gguf-py decodes them. Its tokens vary."""
    model = tiny_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() > 1 and not name.endswith("bias")
            parameter.copy_(parameter * 8 if matrix else parameter + torch.randn_like(parameter) * 0.1)
        write_gguf(path, family, gguf_tensors(family, model), kind)
        for name, parameter in model.named_parameters():
            plain = name.endswith("bias") or (family == "deepseek_v3" and "kv_b_proj" in name)
            if parameter.dim() > 1 and not plain:  # moved rows are quantised alike
                rows = parameter.mT if family == "gpt_oss" and parameter.dim() > 2 else parameter
                rows.copy_(torch.from_numpy(dequantize(quantize(rows.contiguous().numpy(), kind(name)), kind(name))))
    return path, model


def tokens_of(path, **options):
    with Engine(path, **options) as engine:
        rows = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [r.token_ids for r in engine.generate(rows, SamplingParams(max_tokens=NEW, ignore_eos=True))]


def tokens_everywhere(path, folder):
    """The tokens with each policy."""
    options = [dict(policy=Policy(**policy), device="sim", offload_dir=folder) for policy in POLICIES.values()]
    disks = Policy(gpu_batch_size=4, num_gpu_batches=1, weights=(0, 0, 0.3, 0.7), cache=(1, 0, 0, 0))
    options.append(dict(policy=disks, device="sim", offload_dir=[folder / "a", folder / "b"]))
    return [tokens_of(path, **each) for each in (dict(device="cpu"), *options)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama-untied", "qwen3", "qwen3moe"])
def test_tokens_are_those_of_transformers_wherever_weights_lie(tmp_path, family):
    path, model = made(tmp_path / "m.gguf", family)
    expected = reference(model, PROMPTS, NEW)
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    assert tokens_everywhere(path, tmp_path) == [expected] * (len(POLICIES) + 2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "first", "last"), [
    ("qwen3moe", Q.Q8_0, Q.Q5_0), ("qwen3moe", Q.BF16, Q.BF16), ("olmoe", Q.Q4_0, Q.Q4_1),
])  # fmt: skip
def test_layers_with_experts_are_one_call(tmp_path, monkeypatch, family, first, last):
    """In decode, also if experts of one layer have other types than those of the next, as in files of llama.cpp."""
    if not isinstance(load(), NativeKernels):
        pytest.skip("no native kernels")
    monkeypatch.setattr(core, "MANY_BYTES", 1)
    monkeypatch.setattr(in_place, "SMALL", 1)
    monkeypatch.setattr(in_place, "_cached", lambda path: True)
    calls, run = [], NativeKernels.run_items
    monkeypatch.setattr(NativeKernels, "run_items", lambda own, items: (calls.append(len(items)), run(own, items)))

    def kind(name):
        if "exps" in name or "experts" in name:
            return first if ".0." in name else last
        return kind_of(name)

    path, model = made(tmp_path / "m.gguf", family, kind)
    policy = Policy(gpu_batch_size=2, num_gpu_batches=1)
    assert tokens_of(path, device="cpu", policy=policy, dtype="float32") == reference(model, PROMPTS, NEW)
    assert max(calls) == 4 * 2  # steps, choice, experts and sum of both layers
    assert len(calls) >= NEW - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Q.F16, Q.BF16])
def test_plain_tensors_are_read_in_place_too(tmp_path, kind):
    path, model = made(tmp_path / "m.gguf", "llama", lambda name: kind)
    expected = reference(model, PROMPTS, NEW)
    options = dict(offload_dir=tmp_path, dtype="float32")
    for policy in POLICIES.values():
        assert tokens_of(path, policy=Policy(**policy), device="sim", **options) == expected, policy


def test_bytes_are_those_of_the_file(tmp_path):
    path, _ = made(tmp_path / "m.gguf", "qwen3moe")
    opened = open_model(str(path), None, "cpu")
    assert opened.facts.stored_bytes == sum(tensor.nbytes for tensor in gguf_header.read_header(path).tensors)
    kinds = {fact.name.split(".")[-2]: fact.form for fact in opened.facts.layers[0] if fact.encoded}
    assert (kinds["q_proj"], kinds["k_proj"], kinds["v_proj"], kinds["experts"]) == ("q4_0", "q8_0", "q5_1", "q8_0")
    assert form_words(opened.facts)[0].startswith("weights as in the file: Q8_0, 8.5 bits (")
    small = resolve(str(path)).directory / "model-00001-of-00001.safetensors"
    assert set(opened.files) == {path, small}
    assert small.stat().st_size < 5000


@pytest.mark.slow
def test_int4_weights_are_encoded_from_the_numbers_of_the_file(tmp_path, caplog):
    caplog.set_level("INFO")
    path, model = made(tmp_path / "m.gguf", "llama")
    model.save_pretrained(tmp_path / "plain")
    options = dict(device="cpu", lossy=Lossy(weights="int4"))
    assert tokens_of(path, **options) == tokens_of(tmp_path / "plain", **options)
    assert [r.getMessage() for r in caplog.records if "again" in r.getMessage()] == [
        "m.gguf holds weights in Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, which are encoded again as int4, int8: the errors of"
        " both add up; without weights they stay as they are"
    ]


@pytest.mark.slow
def test_experts_whose_halves_have_two_formats(tmp_path):
    model = tiny_model("qwen3moe")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 8 if parameter.dim() > 1 else parameter)
        tensors = gguf_tensors("qwen3moe", model)
        path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, lambda n: Q.Q4_1 if "gate_exps" in n else Q.Q8_0)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                both = [dequantize(quantize(parameter.numpy(), kind), kind) for kind in (Q.Q4_1, Q.Q8_0)]
                if "gate_up" in name:
                    both[1][:, : parameter.shape[1] // 2] = both[0][:, : parameter.shape[1] // 2]
                parameter.copy_(torch.from_numpy(both[1]))
    directory = resolve(str(path)).directory
    found, expected = gguf_tensors_of(directory, path), model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    stored = read_checkpoint(directory, [path])["model.layers.0.mlp.experts.gate_up_proj"]
    assert stored.form.packed.name == "q4_1+q8_0"
    rows, width = expected["model.layers.0.mlp.experts.gate_up_proj"].flatten(0, 1), 4 * stored.shape[-1]
    count = stored.shape[1]  # rows of an expert, of which each half has a format
    for first, last in ((0, 1), (count // 2 - 1, count // 2 + 2), (count - 1, count + 3), (0, len(rows))):
        part = read_part(stored, first * width, (last - first) * width)
        assert torch.equal(part.view(-1, stored.shape[-1]), rows[first:last])
    assert tokens_everywhere(path, tmp_path) == [reference(model, PROMPTS, NEW)] * (len(POLICIES) + 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BLOCKS)
def test_tokens_with_every_type(tmp_path, kind):
    path, model = gguf_of_type(tmp_path / "m.gguf", kind)
    expected = reference(model, PROMPTS, NEW)
    assert len({tuple(row) for row in expected}) > 2
    assert tokens_of(path, device="cpu") == expected


def test_switches_on_a_file_of_codes(tmp_path):
    path, _ = made(tmp_path / "m.gguf", "llama")
    opened = open_model(str(path), None, "cpu", lossy=Lossy(compute="int8"))  # rounds activations only
    forms = {fact.form for fact in opened.facts.layers[0] if fact.encoded}
    assert forms == {f"{name} by int8" for name in ("q4_0", "q8_0", "q5_1", "q4_1", "q5_0")}
    assert opened.prepare_weights()[opened.skeleton.embedding[0]].runs[0].path == path
    opened.use(Lossy(weights=(None, "int4")))  # the first layer stays as it is
    first, second = ({fact.form for fact in layer if fact.encoded} for layer in opened.facts.layers)
    assert (len(first), second) == (5, {"int4"})
    assert "15 matrices of m are encoded in its file" in str(opened.refusal(Lossy(flash="oracle")))
    assert "leave them out" in str(opened.refusal(Lossy(sparsify=0.5)))


def split(path, tmp_path, most=8):
    """The parts of a file, as gguf-py's writer makes them."""
    model = tiny_model("llama")

    class Split(GGUFWriter):
        def __init__(self, path, arch):
            super().__init__(path, arch, split_max_tensors=most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.helpers.tiny_gguf.GGUFWriter", Split)
        write_gguf(path, "llama", gguf_tensors("llama", model), kind_of)
    return sorted(tmp_path.glob("m-*.gguf"))


@pytest.mark.slow
def test_a_model_in_several_files(tmp_path):
    parts = split(tmp_path / "m.gguf", tmp_path)
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = tiny_gguf(tmp_path / "whole.gguf", kind=kind_of)
    expected = tokens_of(whole, device="cpu")
    assert [tokens_of(part, device="cpu") for part in parts] == [expected] * 3
    assert resolve(str(parts[1])).given == tuple(parts)
    assert command.main([str(parts[2]), "--write"]) == 0
    assert verified(parts[0], "m").result == "intact"
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"x")
    found = verified(parts[0], "m")
    assert (found.result, [fault["file"] for fault in found.damaged]) == ("damaged", [str(parts[1])])
    odd = parts[0].rename(tmp_path / "m-00004-of-00003.gguf")
    assert gguf_header.gguf_parts(odd) == [odd]


def test_parts_that_are_missing_or_of_other_models_are_refused(tmp_path):
    parts = split(tmp_path / "m.gguf", tmp_path)
    third = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(BadCheckpoint, match=r"is one of 3 parts, but m-00003-of-00003.gguf is missing"):
        resolve(str(parts[0]))
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(BadCheckpoint, match=r"m-00003-of-00003.gguf is not part 3 of 3 by its metadata"):
        resolve(str(parts[0]))
    names = {b"blk.1": b"blk.0"}
    changed = third
    for old, new in names.items():
        changed = changed.replace(old, new)
    parts[2].write_bytes(changed)
    with pytest.raises(BadCheckpoint, match=r"states 20 tensors in all parts, but they hold 20, \d+ by name"):
        resolve(str(parts[0]))
    alone = parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(UnsupportedModel, match=r"alone.gguf is one of 3 parts, but its name counts 1"):
        resolve(str(alone))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "at", "bits"), [
    (Q.Q4_1, 0, 0x7E00), (Q.Q4_1, 2, 0x7C00), (Q.Q8_0, 0, 0xFC00), (Q.Q5_0, 0, 0x7FFF), (Q.MXFP4, 0, 0xFF),
    (Q.F16, 0, 0x7C00), (Q.BF16, 0, 0x7F80), (Q.F32, 2, 0x7F80),
])  # fmt: skip
def test_numbers_that_are_not_finite_are_refused_with_their_place(tmp_path, kind, at, bits):
    path = tiny_gguf(tmp_path / "m.gguf", kind=lambda name: kind)
    resolve(str(path))
    tensor = next(t for t in gguf_header.read_header(path).tensors if t.name == "blk.1.ffn_up.weight")
    row, column = 3, 32
    start = tensor.offset + (row * 64 + column) * tensor.nbytes // (96 * 64) + at
    content = bytearray(path.read_bytes())
    content[start : start + (1 if kind is Q.MXFP4 else 2)] = bits.to_bytes(1 if kind is Q.MXFP4 else 2, "little")
    data = np.frombuffer(content, np.uint8)[tensor.offset : tensor.offset + tensor.nbytes].reshape(96, -1)
    assert not np.isfinite(dequantize(data, kind)[row]).all()
    path.write_bytes(content)
    with pytest.raises(
        BadCheckpoint, match=rf"blk.1.ffn_up.weight holds NaN or infinite .* row {row}, from column {column}"
    ):
        resolve(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_families_that_transformers_does_not_read(tmp_path, family):
    path, model = made(tmp_path / "m.gguf", family)
    expected, wanted = reference(model, PROMPTS, NEW), model.state_dict()
    if family == "gpt_oss":  # whose experts get gates first
        halves = {name: x for name, x in wanted.items() if "gate_up" in name}
        wanted |= {name: torch.cat([x[..., ::2], x[..., 1::2]], -1) for name, x in halves.items()}
    for name, tensor in gguf_tensors_of(resolve(str(path)).directory, path).items():
        # 1 is added to norms of Gemma, and subtracted again
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-7 if family == "gemma" else 0)
    assert len({tuple(row) for row in expected}) > 2
    assert tokens_of(path, device="cpu") == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_that_are_not_finite_are_found(kind):
    """As gguf-py decodes blocks with all kinds of scales, and ordinary ones."""
    blocks = torch.cat([special_blocks(kind), random_blocks(kind, 200)]).numpy()
    bad = ~np.isfinite(dequantize(blocks, Q[kind.upper()])).all(axis=1)
    assert 0 < bad.sum() < len(bad)
    assert np.array_equal(bad_blocks(kind.upper(), BLOCKS[kind].columns, blocks), bad)


def test_quantised_like_the_package(tmp_path):
    """The tests above write what gguf-py quantises; here its bytes are compared."""
    path = tiny_gguf(tmp_path / "m.gguf", kind=kind_of)
    stored = dict(gguf_tensors("llama", tiny_model("llama")))
    opened = read_checkpoint(resolve(str(path)).directory, [path])["model.layers.0.mlp.down_proj.weight"]
    ((file, start, nbytes),) = opened.runs
    assert file == path
    assert path.read_bytes()[start : start + nbytes] == quantize(stored["blk.0.ffn_down.weight"], Q.Q5_0).tobytes()
    assert FAMILIES["llama"][1].intermediate_size == opened.shape[1]
