"""Hostile configs: refused with one of the package's errors, quickly, in little memory."""

import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.config import load_config
from tests.helpers.hostile import LLAMA

ODD = [-1, 0, 1, 3, 10**6, 10**9, 2**31, 2**63, 10**30, -(10**18), 1.5, 1e308, math.nan, math.inf, "64", "",
       "a" * 10_000, [], [1] * 1000, [[[[]]]], {}, {"x": {"y": 1}}, None, True, False]  # fmt: skip
ODD_TYPES = ["", "nope", 3, None, [], {}, "gpt2", "opt", "mixtral", "mamba", "qwen3_moe", "t5", "gemma3", "deepseek_v3",
             "falcon", "../x", "llama\0", "xglm", "gpt_neox", "jamba"]  # fmt: skip
MORE = [
    {"n_layer": 10**9}, {"num_labels": 10**9}, {"num_local_experts": 10**9}, {"num_nextn_predict_layers": 10**9},
    {"first_k_dense_replace": 10**9}, {"layer_types": ["full_attention"] * 10**5}, {"layer_types": ["x"]},
    {"rope_parameters": {"rope_type": "llama3"}}, {"rope_scaling": {"type": "yarn", "factor": -1}},
    {"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, {"rope_parameters": [1]}, {"rope_theta": 0},
    {"text_config": {"num_hidden_layers": 10**9}}, {"text_config": []}, {"text_config": {"model_type": "nope"}},
    {"auto_map": {"AutoConfig": "x.Y"}}, {"auto_map": 3}, {"auto_map": {"AutoConfig": 3}},
    {"auto_map": {"AutoConfig": "../../x.Y"}}, {"model_type": "nope", "auto_map": {"AutoConfig": "x.Y"}},
    {"dtype": "complex128"}, {"torch_dtype": "os.system"}, {"dtype": 7}, {"hidden_act": "__import__"},
    {"architectures": "x"}, {"architectures": [3]}, {"architectures": []}, {"id2label": {"a": 1}},
    {"pruned_heads": {"0": [1]}},
    {"attn_implementation": "somebody/kernel"}, {"_attn_implementation": {"text_config": "somebody/kernel"}},
    {"configuration_files": ["config.4.0.0.json"]}, {"is_encoder_decoder": True}, {"mlp_bias": "yes"},
    {"_name_or_path": ["x"]}, {"transformers_version": 3}, {"__class__": "x"}, {"to_dict": 1}, {"from_dict": None},
    {"get_text_config": 1}, {"num_hidden_layers": 9999}, {"num_hidden_layers": 10_000, "hidden_size": 10**6},
    {"num_hidden_layers": 100, "num_experts": 10**5, "model_type": "qwen3_moe"},
    {"model_type": "gpt2", "n_positions": 10**9, "n_ctx": 10**9},
    {"model_type": "opt", "max_position_embeddings": 10**9},
    {"model_type": "xglm", "max_position_embeddings": 10**9, "d_model": 64, "num_layers": 2, "attention_heads": 4},
    {"max_position_embeddings": 10**9}, {"head_dim": 10**5}, {"head_dim": 7},
    {"num_attention_heads": 64, "head_dim": 1},
    *({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4}} for kind in ([], {}, ["linear"], None, 7)),
    *({"rope_parameters": rope} for rope in (["linear"], "linear", 7, {"rope_type": "linear", "factor": []})),
]  # fmt: skip


def hostile_configs() -> list[dict[str, Any]]:
    rng = random.Random(5)
    one = [{**LLAMA, key: rng.choice(ODD)} for key in LLAMA for _ in range(5)]
    two = [{**LLAMA, **{rng.choice(list(LLAMA)): rng.choice(ODD) for _ in range(3)}} for _ in range(60)]
    lost = [{k: v for k, v in LLAMA.items() if k != key} for key in LLAMA]
    return [*one, *two, *lost, *({**LLAMA, "model_type": kind} for kind in ODD_TYPES), *({**LLAMA, **m} for m in MORE)]


TRY = """
import json, sys, warnings
from pathlib import Path
import torch
from flexengine.errors import FlexError
from flexengine.model.build import build
warnings.simplefilter("ignore")
place, faults, refused = Path(sys.argv[1]), [], 0
for line in (place / "configs.jsonl").read_text().splitlines():
    (place / "m" / "config.json").write_text(line)
    try:
        with torch.no_grad():
            build(place / "m", torch.float32)
    except FlexError:
        refused += 1
    except BaseException as error:
        faults.append([line[:300], repr(error)[:300]])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
memory = int(peak.split()[1]) * 1024  # of this process alone: ru_maxrss begins with its parent's
print(json.dumps({"faults": faults, "refused": refused, "memory": memory}))
"""


def test_hostile_configs(families: Any, tmp_path: Path) -> None:
    """In a process of its own, whose memory stays below 1 GB (it is 0.4 GB when torch and transformers are there)."""
    shutil.copytree(families("llama").directory, tmp_path / "m")
    configs = hostile_configs()
    (tmp_path / "configs.jsonl").write_text("\n".join(map(json.dumps, configs)))
    done = subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(configs) >= 200
    assert not found["faults"]
    assert 100 < found["refused"] < len(configs)
    assert found["memory"] < 1e9


@pytest.mark.parametrize("change", [
    {"num_hidden_layers": 10**6}, {"num_hidden_layers": 5000}, {"hidden_size": 10**7}, {"vocab_size": 10**9},
    {"num_attention_heads": 10**6}, {"num_hidden_layers": -4}, {"num_hidden_layers": 1e9}, {"hidden_size": 10**30},
    {"text_config": {"deeper": [{"num_layers": 10**6}]}}, {"num_labels": 10**9}, {"first_k_dense_replace": 10**9},
    {"num_hidden_layers": 40, "num_experts": 10**5, "model_type": "qwen3_moe"},
])  # fmt: skip
def test_impossible_sizes_are_named(families: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(families("llama").directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises((UnsupportedModel, BadCheckpoint), match=r"config\.json.*(is -?\d|states)"):
        load_config(tmp_path)


def test_known_sizes_are_within_the_limits(tmp_path: Path) -> None:
    """Every config class of transformers that is a causal language model passes with its own defaults."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from flexengine.model.config import check_limits

    for kind in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)):
        with contextlib.suppress(StrictDataclassError):  # some defaults contradict themselves
            check_limits(tmp_path / kind, CONFIG_MAPPING[kind]().to_dict())
    llama405b = {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256,
                 "rope_theta": 500000.0, "max_position_embeddings": 131072}  # fmt: skip
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "vocab_size": 129280, "intermediate_size": 18432}
    for config in (llama405b, deepseek, {"max_position_embeddings": 10_485_760, "sliding_window": 10**6}):
        check_limits(tmp_path, config)


def test_a_deep_config_is_believed_if_its_tensors_are_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 300}))
    save_file({f"t{i}": torch.ones(1) for i in range(300)}, tmp_path / "model.safetensors")
    assert load_config(tmp_path).num_hidden_layers == 300
    save_file({f"t{i}": torch.ones(1) for i in range(299)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="300 layers, but the checkpoint has only 299 tensors"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", [
    "", "[]", "3", "{", "nonsense", "[" * 10**5, '{"a":' * 10**5, "\x00", '{"x": ' + "1" * 5000 + "}",
    '{"x": "' + "a" * 17 * 2**20 + '"}',
])  # fmt: skip
def test_a_config_is_an_object_of_a_sane_size(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(("settings", "method"), [
    ({"quant_method": "aqlm", "bits": 4}, "aqlm"), ({"quant_method": "hqq"}, "hqq"), ({"bits": 4}, "unknown"),
    ({"quant_method": "gguf"}, "gguf"), ("x", "unknown"), ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
])  # fmt: skip
@pytest.mark.parametrize("where", ["quantization_config", "text_config"])
def test_quantised_checkpoints_are_refused_by_the_method_s_name(
    tmp_path: Path, settings: Any, method: str, where: str
) -> None:
    extra = {where: settings} if where == "quantization_config" else {where: {"quantization_config": settings}}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **extra}))
    with pytest.raises(UnsupportedModel, match=rf"quantised \(quantization_config: {method}\).*GGUF"):
        load_config(tmp_path)


def test_what_a_dequantised_gguf_file_leaves_behind_is_no_quantisation(tmp_path: Path) -> None:
    for found in ({"quant_method": "gguf", "dequantize": True}, {}, None):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": found}))
        assert load_config(tmp_path).hidden_size == 64
