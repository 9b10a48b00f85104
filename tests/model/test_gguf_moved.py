"""GGUF files whose parameters lie otherwise than in the model: experts of gpt-oss, and latent attention."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import UnsupportedModel
from flexengine.kernels import load
from flexengine.kernels.cpu import NativeKernels
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.gguf_config import carry_values, family_config
from flexengine.model.gguf_header import read_header
from flexengine.model.source import resolve
from flexengine.shell.explain.formats import form_words
from flexengine.worker.open_model import open_model
from tests.helpers.families import POLICIES, prompts_of, reference
from tests.helpers.prepared import tensors_of
from tests.helpers.quantised import mxfp4
from tests.helpers.tiny_gguf import FAMILIES, KEYS, MORE, Q, gguf_tensors, tiny_model, write_gguf

pytestmark = pytest.mark.usefixtures("cache")
PROMPTS, NEW = prompts_of(96, (5, 17, 40, 9)), 6  # one is longer than YaRN's original context
Tensors = list[tuple[str, np.ndarray[Any, Any]]]


def drawn() -> Any:
    """The tiny gpt-oss, whose biases and sinks are no zeros, in fp32."""
    model: Any = tiny_model("gpt_oss")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def repacked(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray[Any, Any]:
    """Bytes of GGUF from those of the published checkpoint, where byte b of a block has the columns 2 b and 2 b + 1."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    bytes_ = torch.cat([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
    return bytes_.flatten(-2).numpy()


def as_published(model: Any) -> Tensors:
    """The file's tensors, with experts in MXFP4; the model gets the numbers of the published checkpoint's bytes."""
    tensors = [(name, x) for name, x in gguf_tensors("gpt_oss", model) if not name.endswith("exps.weight")]
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        blocks, scales, numbers = mxfp4(parameter.detach().mT.contiguous().numpy())
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(numbers).mT)
        block = f"blk.{name.split('.')[2]}.ffn"
        if name.endswith("down_proj"):
            tensors.append((f"{block}_down_exps.weight", repacked(blocks, scales)))
            continue
        for kind, first in (("gate", 0), ("up", 1)):
            tensors.append((f"{block}_{kind}_exps.weight", repacked(blocks[:, first::2], scales[:, first::2])))
    return tensors


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    with Engine(str(path), **options) as engine:
        rows = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [r.token_ids for r in engine.generate(rows, SamplingParams(max_tokens=NEW, ignore_eos=True))]


def experts_in(kind: Any) -> Any:
    return lambda name: kind if "exps" in name else Q.F32


@pytest.mark.slow
def test_gpt_oss_from_the_bytes_of_the_published_checkpoint(tmp_path: Path) -> None:
    model = drawn()
    path = write_gguf(tmp_path / "m.gguf", "gpt_oss", as_published(model), experts_in(Q.MXFP4))
    expected = reference(model, PROMPTS, NEW)
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    options: list[dict[str, Any]] = [dict(device="cpu"), dict(device="cpu", dtype="float32")]
    options += [dict(policy=Policy(**each), device="sim", offload_dir=tmp_path) for each in POLICIES.values()]
    for each in options:
        assert tokens_of(path, **each) == expected, each
    stored = read_checkpoint(resolve(str(path)).directory, [path])
    gate_up = stored["model.layers.1.mlp.experts.gate_up_proj"]
    numbers = model.model.layers[1].mlp.experts.gate_up_proj.mT.detach().numpy()
    runs = [dequantize(np.frombuffer(read(run), np.uint8).reshape(96, -1), Q.MXFP4) for run in gate_up.runs]
    assert np.array_equal(np.stack(runs), np.concatenate([[x[::2], x[1::2]] for x in numbers]))
    opened = open_model(str(path), None, "cpu")
    assert form_words(opened.facts)[0].startswith("weights as in the file: MXFP4, 4.25 bits (")
    if isinstance(load(), NativeKernels):
        assert opened.facts.as_modules == ()


def read(run: Any) -> bytes:
    with Path(run.path).open("rb") as file:
        file.seek(run.start)
        return file.read(run.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Q.F16, Q.Q5_0, Q.MXFP4], ids=lambda kind: kind.name)
def test_gates_and_ups_in_one_tensor(tmp_path: Path, kind: Any) -> None:
    """As of `--fuse-gate-up-exps`. Plain experts, which the model has as [in, out], are written again."""
    model, made, halves = drawn(), Tensors(), dict[str, Any]()
    if kind is Q.F16:
        model = model.half().float()
    for name, x in as_published(model) if kind is Q.MXFP4 else gguf_tensors("gpt_oss", model):
        if "_gate_exps" in name or "_up_exps" in name:
            both = halves.setdefault(re.sub("_(gate|up)_exps", "_gate_up_exps", name), {})
            both["gate" if "_gate_" in name else "up"] = x
        else:
            made.append((name, x))
    made += [(name, np.concatenate([both["gate"], both["up"]], axis=1)) for name, both in halves.items()]
    path = write_gguf(tmp_path / "m.gguf", "gpt_oss", made, experts_in(kind))
    if kind is Q.Q5_0:
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                rows = parameter.data.mT
                rows.copy_(torch.from_numpy(dequantize(quantize(rows.contiguous().numpy(), kind), kind)))
    assert tokens_of(path, device="cpu") == reference(model, PROMPTS, NEW)
    assert {tensor.name for tensor in read_header(path).tensors} >= {*halves}
    written = tensors_of(resolve(str(path)).directory)
    assert ("model.layers.0.mlp.experts.down_proj" in written) == (kind is Q.F16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.F16, Q.Q4_1], ids=lambda kind: kind.name)
def test_latent_attention_whose_keys_are_transposed(tmp_path: Path, kind: Any) -> None:
    """Quantised blocks lie across the rows that products read: these numbers are decoded once, and are those of the
    file. All else stays in it."""
    model = tiny_model("deepseek_v3")
    config, made = model.config, Tensors()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 8 if parameter.dim() > 1 else parameter)
        for name, x in gguf_tensors("deepseek_v3", model):
            latent = any(part in name for part in (".attn_k_b.", ".attn_v_b."))
            made.append((name, dequantize(quantize(np.ascontiguousarray(x), kind), kind) if latent else x))
        parts = dict(made)
        for number, layer in enumerate(model.model.layers):
            keys, values = (torch.from_numpy(parts[f"blk.{number}.attn_{half}_b.weight"]) for half in "kv")
            joined = torch.cat([keys.mT, values], 1)
            assert joined.shape == (4, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
            layer.self_attn.kv_b_proj.weight.copy_(joined.flatten(0, 1))
    stored = [kind if "_b.weight" in name and "attn_q" not in name else Q.F32 for name, _ in made]
    kinds = dict(zip((name for name, _ in made), stored, strict=True))
    path = write_gguf(tmp_path / "m.gguf", "deepseek_v3", made, kinds.__getitem__)
    assert tokens_of(path, device="cpu") == reference(model, PROMPTS, NEW)
    written = tensors_of(resolve(str(path)).directory)
    for number, layer in enumerate(model.model.layers):
        found = written[f"model.layers.{number}.self_attn.kv_b_proj.weight"]
        assert found.dtype == (torch.float16 if kind is Q.F16 else torch.float32)
        assert torch.equal(found.float(), layer.self_attn.kv_b_proj.weight)
    names = ("norm", "kv_b_proj", "e_score_correction_bias")
    assert all(any(part in name for part in names) for name in written)


@pytest.mark.slow
def test_keys_and_values_that_a_file_has_twice_are_read_once(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v2")
    tensors = gguf_tensors("deepseek_v2", model)
    path = write_gguf(tmp_path / "one.gguf", "deepseek_v2", tensors)
    more = [(f"blk.{n}.attn_{half}_b.weight", np.zeros((4, 32, 32), np.float32)) for n in range(3) for half in "kv"]
    twice = write_gguf(tmp_path / "two.gguf", "deepseek_v2", [*tensors, *more])
    assert tokens_of(twice, device="cpu") == tokens_of(path, device="cpu")


@pytest.mark.parametrize("family", MORE)
def test_configs_are_those_of_the_models(tmp_path: Path, family: str) -> None:
    """All fields but those of initialisation, and of no use here, to the precision of a float32."""
    path = write_gguf(tmp_path / "m.gguf", family, gguf_tensors(family, tiny_model(family)))
    found = AutoConfig.from_pretrained(resolve(str(path)).directory).to_dict()
    ignored = {"initializer_range", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    ignored |= {"architectures", "_name_or_path"} | ({"head_dim"} if family == "mixtral" else set())
    for key, value in FAMILIES[family][1].to_dict().items():
        if key not in ignored:
            assert found.get(key) == (pytest.approx(value, rel=1e-6) if type(value) is float else value), key
    assert found.get("gates_first", False) == (family == "gpt_oss")


def test_a_file_without_groups_of_experts_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("WARNING")
    model = tiny_model("deepseek_v3")
    tensors = gguf_tensors("deepseek_v3", model)
    monkeypatch.setattr("tests.helpers.tiny_gguf.KEYS", {k: v for k, v in KEYS.items() if "group" not in k})
    path = write_gguf(tmp_path / "m.gguf", "deepseek_v3", tensors)
    config = json.loads((resolve(str(path)).directory / "config.json").read_text())
    assert (config["n_group"], config["topk_group"]) == (1, 1)
    assert "m.gguf names no groups of experts: a token chooses among all, as in llama.cpp" in caplog.text
    assert "which the model may not have learned" in caplog.text


@pytest.mark.slow
def test_groups_of_experts_of_deepseek_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, config = FAMILIES["deepseek_v2"]
    fields = config.to_dict() | {"n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"}
    monkeypatch.setitem(FAMILIES, "deepseek_v2", (arch, AutoConfig.for_model(**fields)))
    model = tiny_model("deepseek_v2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 8 if parameter.dim() > 1 else parameter)
    path = write_gguf(tmp_path / "m.gguf", "deepseek_v2", gguf_tensors("deepseek_v2", model))
    expected = reference(model, PROMPTS, NEW)
    assert tokens_of(path, device="cpu") == expected
    greedy = AutoModelForCausalLM.from_config(config).eval()
    greedy.load_state_dict(model.state_dict())
    assert reference(greedy, PROMPTS, NEW) != expected


def config_of(path: Path, family: str, without: tuple[str, ...] = (), **given: Any) -> Any:
    """The config of a header with a family's values, less the keys `without` and with others."""
    header = read_header(path if path.exists() else write_gguf(path, family, gguf_tensors(family, tiny_model(family))))
    prefix = header.architecture
    values = {key: value for key, value in header.values.items() if key.removeprefix(f"{prefix}.") not in without}
    values |= {f"{prefix}.{key.replace('__', '.')}": value for key, value in given.items()}
    changed = replace(header, values=values)
    config = family_config(changed)
    carry_values(changed, config)
    return config


def test_factors_of_yarn_that_converters_write(tmp_path: Path) -> None:
    path, factor = tmp_path / "m.gguf", {"rope__scaling__yarn_attn_factor": 1.25}
    plain = config_of(path, "gpt_oss").rope_parameters
    assert "attention_factor" not in plain
    rope = config_of(path, "gpt_oss", **factor, rope__scaling__yarn_ext_factor=1.0).rope_parameters
    assert rope == {**plain, "attention_factor": 1.25}
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.yarn_ext_factor = 0\.5, which has no place"):
        config_of(path, "gpt_oss", rope__scaling__yarn_ext_factor=0.5)
    longer = config_of(path, "gpt_oss", ("rope.scaling.original_context_length",)).rope_parameters
    assert longer["original_max_position_embeddings"] == 128
    for without, value in ((("rope.scaling.factor",), {}), ((), {"rope__scaling__factor": 0.0})):
        with pytest.raises(UnsupportedModel, match=r"YaRN, and has no gpt-oss\.rope\.scaling\.factor above zero"):
            config_of(path, "gpt_oss", without, **value)


def test_a_gpt_oss_without_yarn_turns_as_the_file_says(tmp_path: Path) -> None:
    path, scaling = tmp_path / "m.gguf", ("type", "factor", "original_context_length")
    config = config_of(path, "gpt_oss", tuple(f"rope.scaling.{key}" for key in scaling))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e4}
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.factor = 4"):
        config_of(path, "gpt_oss", rope__scaling__type="linear")


def test_values_that_a_file_lacks_are_those_of_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert config_of(path, "deepseek_v3").routed_scaling_factor == 2.5
    assert config_of(path, "deepseek_v3", ("expert_weights_scale",)).routed_scaling_factor == 1
    assert config_of(path, "deepseek_v3", expert_weights_scale=0.0).routed_scaling_factor == 1
    ernie = tmp_path / "e.gguf"
    assert config_of(ernie, "ernie4_5_moe").moe_num_shared_experts == 2
    assert config_of(ernie, "ernie4_5_moe", ("expert_shared_count",)).moe_num_shared_experts == 0


def test_a_deepseek_v2_of_many_experts_without_groups_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    groups = ("expert_group_count", "expert_group_used_count")
    assert config_of(tmp_path / "m.gguf", "deepseek_v2", groups).topk_method == "greedy"
    assert "names no groups" not in caplog.text
    config_of(tmp_path / "m.gguf", "deepseek_v2", groups, expert_count=160)
    assert "m.gguf names no groups of experts" in caplog.text
