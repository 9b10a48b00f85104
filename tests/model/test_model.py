"""Checkpoints and skeletons: what is refused, with which words, before any weight is read."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flexengine import Engine, SamplingParams
from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.build import build
from flexengine.model.checkpoint import _extras, read_checkpoint, read_header
from tests.helpers.families import FAMILIES, NEW, make_checkpoint

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


def test_headers_agree_with_the_library(families: Any) -> None:
    from safetensors import safe_open

    directory = families("qwen2").directory
    found = read_checkpoint(directory)
    with safe_open(directory / "model.safetensors", "pt") as theirs:
        assert set(theirs.keys()) == set(found)
        raw = (directory / "model.safetensors").read_bytes()
        for name, stored in found.items():
            tensor = theirs.get_tensor(name)
            (run,) = stored.runs
            data = bytearray(raw[run.start : run.start + run.nbytes])
            assert torch.equal(torch.frombuffer(data, dtype=stored.dtype).view(stored.shape), tensor)


@pytest.mark.parametrize("family", FAMILIES)
def test_skeleton_names_every_parameter(families: Any, family: str) -> None:
    known = families(family)
    skeleton = build(known.directory, torch.float32)
    names = {n: tuple(p.shape) for n, p in known.model.named_parameters()}
    assert skeleton.wanted == names
    assert all(p.is_meta for p in skeleton.model.parameters())
    assert not any(b.is_meta for b in skeleton.model.buffers())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_narrow_checkpoints_are_computed_in_fp32(tmp_path: Path, dtype: torch.dtype, weights: Any) -> None:
    """Wherever they live, fp16 and bf16 weights are decoded to fp32: the reference is the upcast model."""
    from transformers import AutoModelForCausalLM

    from flexengine import Policy
    from tests.helpers.families import prompts_of, reference

    narrow = tmp_path / "narrow"
    make_checkpoint("llama", tmp_path / "wide").to(dtype).save_pretrained(narrow, max_shard_size="100KB")
    assert len(list(narrow.glob("*.safetensors"))) > 1
    prompts = prompts_of(601)[:4]
    # Read back, not model.float(): .to(dtype) has narrowed the rotary frequencies too.
    expected = reference(AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32), prompts)
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, weights=weights)
    rows = [{"prompt_token_ids": p} for p in prompts]
    for device in ("cpu", "sim"):
        with Engine(narrow, policy=policy, device=device) as engine:
            assert [r.token_ids for r in engine.generate(rows, GREEDY)] == expected


def test_names_without_the_base_prefix(families: Any, tmp_path: Path) -> None:
    """Some OPT checkpoints say `decoder.layers...` instead of `model.decoder.layers...`."""
    from safetensors.torch import load_file, save_file

    known = families("opt")
    shutil.copytree(known.directory, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, tmp_path / "m" / "model.safetensors")
    with Engine(tmp_path / "m", device="cpu") as engine:
        assert engine.generate(known.rows[:1], GREEDY)[0].token_ids == known.expected[0]


def broken(families: Any, tmp_path: Path, change: Any) -> Path:
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "m"
    shutil.copytree(families("llama").directory, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_missing_extra_and_misshapen_tensors_are_all_listed(families: Any, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(63)
        tensors["model.layers.9.extra"] = torch.ones(1)

    with pytest.raises(BadCheckpoint) as caught:
        Engine(broken(families, tmp_path, change), device="cpu")
    shape = "model.norm.weight (63,) instead of (64,)"
    remedy = "correct config.json, or download it and the weights again"
    for part in ("missing: model.layers.2.mlp.up_proj.weight", shape, "layers.9.extra", remedy):
        assert part in str(caught.value)


def wrapped(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        tensors[f"_orig_mod.{name}"] = tensors.pop(name)


def with_adapter(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.base_layer.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")


def quantised(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.qweight"] = tensors.pop("model.layers.0.mlp.up_proj.weight").to(torch.int32)


def in_8_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("change", "remedy"), [
    (lambda tensors: tensors.pop("lm_head.weight"), 'put "tie_word_embeddings": true into config.json'),
    (wrapped, "are named with '_orig_mod.' before the names of the model: rename them without it"),
    (with_adapter, "holds an adapter of peft: merge it"), (quantised, "its weights are quantised; take the model's"),
    (in_8_bits, "in 8 bits without scales: model.norm.weight (1); its weights are quantised; take the model's unq"),
    (lambda tensors: tensors.update({"extra.weight": torch.ones(1)}), "if they may be left out, load it with"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_says_what_to_do(
    families: Any, tmp_path: Path, change: Any, remedy: str
) -> None:
    with pytest.raises(BadCheckpoint, match=re.escape(remedy)):
        Engine(broken(families, tmp_path, change), device="cpu")


def test_shards_without_an_index_are_counted_by_their_names(families: Any, tmp_path: Path) -> None:
    for source in families("llama").directory.iterdir():
        shutil.copy(source, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(
        BadCheckpoint, match=r"holds model-00002-of-00003.safetensors, but not model-00001-of-00003.saf"
    ):
        read_checkpoint(tmp_path)
    for name in ("00001", "00003"):
        save_file({name: torch.ones(1)}, tmp_path / f"model-{name}-of-00003.safetensors")
    assert {"00001", "00003", "lm_head.weight"} <= read_checkpoint(tmp_path).keys()


def test_tensors_of_other_uses_are_ignored_with_one_message(families: Any, tmp_path: Path, caplog: Any) -> None:
    """Value heads, classes, scales of an 8-bit KV cache, multi-token prediction, and layers beyond the config's."""
    known = families("llama")
    count = known.model.config.num_hidden_layers

    def change(tensors: dict[str, torch.Tensor]) -> None:
        layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.")}
        tensors |= {n.replace(".0.", f".{count}.", 1): t.clone() for n, t in layer.items()}
        for name in (
            "v_head.summary.weight", "score.weight", "model.layers.0.self_attn.k_scale", "mtp.fc.weight",
            f"model.layers.{count}.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
        ):  # fmt: skip
            tensors[name] = torch.ones(2)

    with caplog.at_level("WARNING"), Engine(broken(families, tmp_path, change), device="cpu") as engine:
        assert engine.generate(known.rows[:1], GREEDY)[0].token_ids == known.expected[0]
    (line,) = [record.getMessage() for record in caplog.records if "are ignored" in record.getMessage()]
    assert line.startswith(f"{4 + len([n for n in known.model.state_dict() if '.layers.0.' in n]) + 1} tensors")
    for what in ("values and classes", "8-bit KV cache", "multi-token prediction", f"beyond the {count} of the config"):
        assert what in line


def test_parts_of_layers_and_layers_of_other_parts_are_not_ignored() -> None:
    ignored = ["v_head.a", "model.score.weight", "model.mtp.fc.weight", "model.layers.9.mlp.up.weight"]
    needed = ["model.layers.0.self_attn.indexer.score.weight", "model.layers.0.mlp.gate.score.bias",
              "model.layers.0.mtp.weight", "vision.encoder.layers.9.mlp.up.weight"]  # fmt: skip
    assert list(_extras(ignored + needed, ["model.layers.0.mlp.up.weight"], 2)) == ignored


def test_truncated_shards_are_refused_at_every_length(families: Any, tmp_path: Path) -> None:
    data = (families("llama").directory / "model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    for length in [0, 4, 8, 9, 100, *range(200, len(data) - 1, len(data) // 40), len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
            read_header(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "Q7", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]},
        [],
        {},
    ],
)
def test_hostile_headers(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(BadCheckpoint):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("shard", ["../out.safetensors", "/etc/passwd", "absent.safetensors", 7])
def test_index_may_only_name_files_beside_it(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "out.safetensors").touch()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(BadCheckpoint):
        read_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("XLM", {"emb_dim": 64, "n_layers": 2, "n_heads": 4}, "reads tensor values"),
        ("Reformer", {"is_decoder": True, "axial_pos_embds": False}, "counts positions itself"),
        ("T5", {"d_model": 64, "num_layers": 2}, "encoder-decoder"),
        ("ViT", {}, "not a causal language model"),
    ],
)
def test_unsupported_models_are_named_with_the_reason(tmp_path: Path, kind: str, values: Any, reason: str) -> None:
    """The directory has no weights, so the refusal must come before they are read."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**values)
    config.architectures = [f"{kind}ForSomething"]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        Engine(tmp_path, device="cpu")
    assert f"{kind}ForSomething" in str(caught.value)


@pytest.mark.parametrize("change", [
    {"num_attention_heads": 3}, {"num_attention_heads": 0}, {"hidden_size": "64"}, {"max_position_embeddings": None},
    {"head_dim": 7}, {"vocab_size": -1}, {"num_hidden_layers": 0}, {"hidden_act": "nope"},
])  # fmt: skip
def test_contradicting_configs_are_refused(families: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    for source in families("llama").directory.iterdir():
        shutil.copy(source, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((UnsupportedModel, BadCheckpoint)):
        Engine(tmp_path)


@pytest.mark.parametrize("content", ["[1]", '{"eos_token_id": [[2]]}', '{"eos_token_id": "x"}', "nonsense"])
def test_unusable_generation_configs(families: Any, tmp_path: Path, content: str) -> None:
    from flexengine.errors import InvalidInput

    for source in families("llama").directory.iterdir():
        shutil.copy(source, tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InvalidInput, match="generation_config"):
        Engine(tmp_path)


def test_settings_of_generate_that_are_not_applied_are_named(families: Any, tmp_path: Path) -> None:
    """A repetition penalty that is given as the message says gives the tokens of generate(do_sample=False)."""
    import transformers

    from flexengine.activity import Activity

    family = families("llama")
    for source in family.directory.iterdir():
        shutil.copy(source, tmp_path)

    def said(content: dict[str, Any] | None) -> list[str]:
        path = tmp_path / "generation_config.json"
        path.unlink(missing_ok=True) if content is None else path.write_text(json.dumps(content))
        heard = list[Activity]()
        with Engine(tmp_path, device="cpu", progress=heard.append) as engine:
            found = [each.text for each in heard if "generate of transformers" in each.text]
            if content and "repetition_penalty" in content:
                ids = [5, 6, 7, 5, 6, 7]
                params = SamplingParams(
                    max_tokens=12, repetition_penalty=content["repetition_penalty"], ignore_eos=True
                )
                ours = engine.generate({"prompt_token_ids": ids}, params).token_ids
                theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generate(
                    torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=None
                )
                assert ours == theirs[0, len(ids) :].tolist()
        return found

    assert said({"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.0, "suppress_tokens": [],
                 "min_length": 0, "num_beams": 1, "token_healing": False}) == []  # fmt: skip
    assert said(None) == []
    (text,) = said({"repetition_penalty": 1.5})
    assert text == (
        f"{tmp_path}/generation_config.json has repetition_penalty 1.5, which generate of transformers applies and this"
        " engine does not, so tokens may differ; repetition_penalty=1.5 applies that one"
    )
    (text,) = said({"forced_bos_token_id": 0, "begin_suppress_tokens": [3], "no_repeat_ngram_size": 2})
    assert "has begin_suppress_tokens [3], forced_bos_token_id 0, no_repeat_ngram_size 2, which" in text
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 3}))
    (text,) = said(None)
    assert f"{tmp_path}/config.json has no_repeat_ngram_size 3" in text


def test_a_model_that_narrows_activations_to_its_weights_is_refused(families: Any, monkeypatch: Any) -> None:
    """16-bit weights must not make it compute in 16 bits: seen on the meta device, before anything is loaded."""
    from transformers.models.llama import modeling_llama

    whole, mlp = modeling_llama.LlamaMLP.forward, modeling_llama.LlamaMLP
    monkeypatch.setattr(mlp, "forward", lambda self, x: whole(self, x.to(self.up_proj.weight.dtype)))
    with pytest.raises(UnsupportedModel, match=r"computes a projection in torch.bfloat16"):
        build(families("llama").directory, torch.float32)


def test_a_head_of_its_own_wins_over_tying(tmp_path: Path) -> None:
    """As in transformers: if the checkpoint holds both and they differ, they are not one."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from tests.helpers.families import prompts_of, reference

    make_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    prompts = prompts_of(601)[:3]
    rows = [{"prompt_token_ids": p} for p in prompts]
    found = []
    for equal in (False, True):
        if equal:
            tensors = load_file(tmp_path / "model.safetensors")
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        expected = reference(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), prompts)
        with Engine(tmp_path, device="cpu") as engine:
            assert engine.core.skeleton.tied == equal
            assert [r.token_ids for r in engine.generate(rows, GREEDY)] == expected
        found.append(expected)
    assert found[0] != found[1]
