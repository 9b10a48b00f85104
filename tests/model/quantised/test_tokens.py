"""Checkpoints in published quantised forms: greedy tokens of transformers on the numbers that they encode."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flexengine import Engine, Policy, SamplingParams
from flexengine.lossy import Lossy
from flexengine.shell.doctor.probe import model_facts
from flexengine.shell.explain.formats import form_words
from flexengine.worker.open_model import open_model
from tests.helpers.chained import chained
from tests.helpers.families import FAMILIES, POLICIES, make_checkpoint, prompts_of, reference
from tests.helpers.forked import Forked
from tests.helpers.pages import ROOT
from tests.helpers.quantised import (
    MATRICES,
    Array,
    Encoded,
    awq,
    blocks_of_4_bits,
    fp8,
    gptq,
    int8,
    llm_int8,
    mxfp4,
    nvfp4,
    packed,
    quantise,
)

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.slow]
PROMPTS, NEW = prompts_of(601, (5, 17, 1, 9)), 6
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}


def group(**weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}


def mixed_groups(name: str, x: Array) -> Encoded:
    """Three groups by module: the first target that fits by name stands before classes."""
    if "down_proj" in name:
        return int8(x)
    return packed(x, 8, 0, False) if "o_proj" in name else packed(x, 4, 32, True)


def fused_order(name: str, x: Array) -> Encoded:
    order = np.random.default_rng(len(name)).permutation(np.arange(x.shape[1]) // 16)
    return gptq(x, 4, 16, order=order)


# Per scheme: family, settings, and how a matrix is encoded; None leaves it plain.
SCHEMES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "fp8 blocks": ("llama", {"quant_method": "fp8", "weight_block_size": [24, 40],
                             "modules_to_not_convert": ["model.layers.1.self_attn.q_proj"]},
                   lambda n, x: None if "layers.1.self_attn.q_proj" in n else fp8(x, (24, 40))),
    "fp8 blocks, bf16 scales": ("qwen3", {"quant_method": "fp8", "weight_block_size": [128, 128]},
                                lambda n, x: fp8(x, (128, 128), torch.bfloat16)),
    "fp8 blocks, head": ("llama", {"quant_method": "fp8", "weight_block_size": [128, 128]},
                         lambda n, x: fp8(x, (128, 128))),
    "fp8 experts": ("qwen3-moe", {"quant_method": "fp8", "weight_block_size": [32, 32]},
                    lambda n, x: fp8(x, (32, 32), torch.float8_e8m0fnu)),
    "fp8 latent": ("deepseek-v3", {"quant_method": "fp8", "weight_block_size": [16, 16]},
                   lambda n, x: fp8(x, (16, 16))),
    "fp8 rows": ("qwen2", {"quant_method": "fbgemm_fp8"}, lambda n, x: fp8(x, (1, x.shape[1]), suffix="weight_scale")),
    "fp8 matrices": ("phi3", {"quant_method": "fp8", "activation_scheme": "static"},
                     lambda n, x: with_input(fp8(x, x.shape, suffix="weight_scale"))),
    "gptq": ("llama", {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}, lambda n, x: gptq(x, 4, 16)),
    "gptq ordered": ("qwen2", {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": True},
                     fused_order),
    "gptq v2 experts": ("mixtral", {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True,
                                    "checkpoint_format": "gptq_v2"},
                        lambda n, x: gptq(x, 8, x.shape[1], version=2, symmetric=True)),
    "awq": ("llama", {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
            lambda n, x: awq(x, 16)),
    "compressed groups": ("llama", {**CT, "config_groups": {
        "all": group(num_bits=4, group_size=32, strategy="group"),
        "down": {"targets": ["re:.*down_proj$"], "weights": {"type": "int", "num_bits": 8, "strategy": "channel"}},
        "o": {"targets": ["re:.*o_proj"], "weights": dict(type="int", num_bits=8, strategy="channel", symmetric=False)},
    }}, mixed_groups),
    "compressed fp8": ("llama", {**CT, "format": "float-quantized", "config_groups": {"all": {
        "targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}},
        lambda n, x: fp8(x, (1, x.shape[1]), torch.bfloat16, "weight_scale")),
    "nvfp4 compressed": ("llama", {**CT, "format": "nvfp4-pack-quantized", "config_groups": {"all": {
        "targets": ["Linear"], "weights": {"type": "float", "num_bits": 4, "strategy": "tensor_group",
                                           "group_size": 16}}}}, lambda n, x: nvfp4(x, True)),
    "nf4": ("llama", {"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda n, x: blocks_of_4_bits(x)),
    "fp4 nested": ("qwen3", {"quant_method": "bitsandbytes", "load_in_4bit": True},
                   lambda n, x: blocks_of_4_bits(x, "fp4", True)),
    "llm.int8": ("llama", {"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda n, x: llm_int8(x)),
    "nvfp4 modelopt": ("qwen3-moe", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda n, x: nvfp4(x, False)),
}  # fmt: skip


def with_input(made: Encoded) -> Encoded:
    return {**made[0], "input_scale": torch.tensor(0.5)}, made[1]


def quantised(folder: Path, scheme: str) -> tuple[Path, Any]:
    """A checkpoint, and the model of transformers with its numbers."""
    family, settings, encode = SCHEMES[scheme]
    make_checkpoint(family, folder / "made")
    which = MATRICES if "head" not in scheme else f"{MATRICES}|^lm_head"
    plain = quantise(folder / "made", folder / "model", settings, encode, which)
    return folder / "model", transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)


def gpt_oss(folder: Path) -> tuple[Path, Any]:
    """A checkpoint as gpt-oss is published."""
    values = {**FAMILIES["gpt-oss"][1], "intermediate_size": 96}  # blocks have 32 columns
    torch.manual_seed(1)
    config = transformers.GptOssConfig(**values, initializer_range=0.2, eos_token_id=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "made")
    tensors = load_file(folder / "made" / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, numbers = mxfp4(tensors.pop(name).transpose(1, 2).contiguous().numpy())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        model.get_parameter(name).data.copy_(torch.from_numpy(numbers).transpose(1, 2))
    settings = json.loads((folder / "made" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "model").mkdir()
    save_file(tensors, folder / "model" / "model.safetensors")
    (folder / "model" / "config.json").write_text(json.dumps(settings))
    return folder / "model", model


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    with Engine(str(path), **options) as engine:
        rows = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [r.token_ids for r in engine.generate(rows, SamplingParams(max_tokens=NEW, ignore_eos=True))]


@pytest.mark.parametrize("scheme", [*SCHEMES, "mxfp4"])
def test_tokens_are_those_of_transformers_wherever_weights_lie(tmp_path: Path, scheme: str) -> None:
    path, model = gpt_oss(tmp_path) if scheme == "mxfp4" else quantised(tmp_path, scheme)
    expected = reference(model, PROMPTS, NEW)
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    options = [dict(policy=Policy(**policy), device="sim", offload_dir=tmp_path) for policy in POLICIES.values()]
    disks = Policy(gpu_batch_size=4, num_gpu_batches=1, weights=(0, 0, 0.3, 0.7), cache=(1, 0, 0, 0))
    options.append(dict(policy=disks, device="sim", offload_dir=[tmp_path / "a", tmp_path / "b"]))
    for each in (dict(device="cpu"), *options):
        assert tokens_of(path, **each) == expected, each


RESUMED = """
import json, time
from flexengine import Engine, Policy, SamplingParams
from flexengine.job.journal import Journal
add = Journal.add
def slow(journal, result):
    add(journal, result)
    print("now", flush=True)
    time.sleep(100)
Journal.add = slow
model, rows, output = sys.argv[1:]
with Engine(model, device="cpu", policy=Policy(gpu_batch_size=1, num_gpu_batches=1)) as engine:
    engine.run_job(rows, output, SamplingParams(max_tokens=6, ignore_eos=True))
"""


@pytest.mark.parametrize("scheme", ["fp8 experts", "gptq ordered"])
def test_tokens_in_stages_and_of_a_job_that_was_killed(tmp_path: Path, scheme: str) -> None:
    path, model = quantised(tmp_path, scheme)
    expected, params = reference(model, PROMPTS, NEW), SamplingParams(max_tokens=NEW, ignore_eos=True)
    rows = [{"prompt_token_ids": ids} for ids in PROMPTS]
    for name in ("host", "disk"):
        with chained(path, (0, 2, 4), Policy(**POLICIES[name]), device="sim") as chain:
            assert [result.token_ids for result in chain.generate(rows, params)] == expected
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    child = Forked(RESUMED, [str(path), str(given), str(output)], ROOT, tmp_path / "log")
    while "now\n" not in child.said():
        assert child.poll() is None, child.said()
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait(100) == -signal.SIGKILL
    assert not output.exists()
    with Engine(str(path), device="cpu") as engine:
        counts = engine.run_job(given, output, params).job
    assert (counts.done, counts.done_before) == (4, 1)
    assert [json.loads(line)["token_ids"] for line in output.read_text().splitlines()] == expected


def test_a_plan_names_formats_that_torch_decodes(tmp_path: Path) -> None:
    """Blocks whose width is no multiple of 16 are."""
    path, _ = quantised(tmp_path, "fp8 blocks")
    (slow,) = open_model(str(path), None, "cpu").facts.as_modules
    assert "layers run as modules of transformers, which is slower: their weights in FP8 24x40 are decoded in" in slow


def test_scales_may_lie_in_another_file_than_codes(tmp_path: Path) -> None:
    path, model = quantised(tmp_path, "fp8 experts")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + ('scale' in name)}-of-00002.safetensors" for name in tensors}
    for shard in {*shards.values()}:
        save_file({name: tensors[name] for name, own in shards.items() if own == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    expected = reference(model, PROMPTS, NEW)
    for policy in ("resident", "disk"):
        assert tokens_of(path, policy=Policy(**POLICIES[policy]), device="sim", offload_dir=tmp_path) == expected


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    path, _ = quantised(tmp_path, "fp8 experts")
    opened = open_model(str(path), None, "cpu")
    tensors = load_file(path / "model.safetensors")
    assert opened.facts.stored_bytes == sum(tensor.nbytes for tensor in tensors.values())
    kinds = {fact.name.split(".", 3)[-1]: fact.form for fact in opened.facts.layers[0] if fact.encoded}
    assert kinds["self_attn.q_proj.weight"] == kinds["mlp.experts.gate_up_proj"] == "fp8-32x32-e8m0"
    assert opened.facts.as_modules == ()
    found = model_facts(str(path))  # of `flexengine doctor`
    assert (found["layers"], found["formats"]) == (4, ["FP8 32x32 e8m0"])
    assert form_words(opened.facts) == ["weights as in the file: FP8 32x32 e8m0, 8.01 bits (48 %)"]
    assert opened.files == [path / "model.safetensors"]
    assert {name.split(".")[2] for name in open_model(str(path), None, "cpu", layers=(1, 3)).forms} == {"1", "2"}


def test_int4_weights_are_encoded_from_the_numbers_of_the_file(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    for scheme, name in ("gptq ordered", "GPTQ4 16 zeros ordered"), ("fp8 blocks", "FP8 24x40"), ("mxfp4", "MXFP4 32"):
        folder = tmp_path / scheme.replace(" ", "-")
        path, model = gpt_oss(folder) if scheme == "mxfp4" else quantised(folder, scheme)
        model.save_pretrained(folder / "plain")
        options = dict(device="cpu", lossy=Lossy(weights="int4"))
        assert tokens_of(path, **options) == tokens_of(folder / "plain", **options)
        (again,) = [r.getMessage() for r in caplog.records if "again" in r.getMessage()]
        assert again == (
            f"model.safetensors holds weights in {name}, which are encoded again as int4, int8: the errors of both"
            " add up; without weights they stay as they are"
        )
        caplog.clear()
