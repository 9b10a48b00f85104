"""Checkpoints made to harm: each is refused with one of the package's errors, quickly, in little memory, and no code
of theirs ever runs."""

import contextlib
import io
import json
import math
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flexengine.config import SamplingParams
from flexengine.errors import BadCheckpoint, FlexError, InvalidInput, UnsupportedModel
from flexengine.job.prompts import Row, encode
from flexengine.model import gguf_header
from flexengine.model.checkpoint import read_checkpoint, read_header
from flexengine.model.config import load_config
from flexengine.model.pickled import convert_bin
from flexengine.model.tokenizer import load_tokenizer

# --- configs

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 112,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 601,
         "max_position_embeddings": 256, "head_dim": 16, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
         "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 2}  # fmt: skip
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
from flexengine.model.skeleton import build
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


@pytest.mark.slow
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
    ({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "awq"}, "awq"), ({"quant_method": "fp8"}, "fp8"),
    ({"load_in_4bit": True}, "load_in_4bit"), ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"), ({"quant_method": "gguf"}, "gguf"),
    ("x", "unknown"), ({"quant_method": "mxfp4"}, "mxfp4"),
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


# --- code that comes with a model

CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
Path({canary!r}).touch()
class CanaryConfig(PreTrainedConfig):
    model_type = "stranger"
    num_hidden_layers = 2
    hidden_size = 8
class CanaryTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: Any) -> Path:
    """A file that the Python file in tmp_path / "m" writes when it runs; what transformers copies stays in tmp_path."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "code_of_theirs.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
    return tmp_path / "canary"


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("reference", [f"{place}code_of_theirs.CanaryConfig" for place in ("", "./", "../m/")])
def test_a_models_own_config_class_runs_only_with_the_flag(canary: Path, reference: str) -> None:
    directory = canary.with_name("m")
    write_json(directory / "config.json", {"model_type": "stranger", "auto_map": {"AutoConfig": reference}})
    with pytest.raises(UnsupportedModel, match=r"'stranger' is unknown.*--trust-remote-code"):
        load_config(directory)
    assert not canary.exists()
    if reference == "code_of_theirs.CanaryConfig":
        assert load_config(directory, trust_remote_code=True).num_hidden_layers == 2
        assert canary.exists()


def test_a_known_model_is_read_by_transformers_own_code(canary: Path) -> None:
    directory = canary.with_name("m")
    mapping = {"AutoConfig": "code_of_theirs.CanaryConfig", "AutoTokenizer": [None, "code_of_theirs.CanaryTokenizer"]}
    write_json(directory / "config.json", {**LLAMA, "auto_map": mapping})
    write_tokenizer(directory, {"auto_map": mapping, "tokenizer_class": "PreTrainedTokenizerFast"})
    assert load_config(directory).model_type == "llama"
    assert load_tokenizer(directory)("a b")["input_ids"] == [0, 1]
    assert not canary.exists()


def test_a_tokenizers_own_class_runs_only_with_the_flag(canary: Path) -> None:
    directory = canary.with_name("m")
    code = {"AutoConfig": "code_of_theirs.CanaryConfig"}
    write_json(directory / "config.json", {"model_type": "stranger", "auto_map": code})
    mapping = {"AutoTokenizer": [None, "code_of_theirs.CanaryTokenizer"]}
    write_tokenizer(directory, {"auto_map": mapping, "tokenizer_class": "CanaryTokenizer"})
    with pytest.raises(InvalidInput, match=r"--trust-remote-code"):
        load_tokenizer(directory)
    assert not canary.exists()
    assert load_tokenizer(directory, trust_remote_code=True)("a b")["input_ids"] == [0, 1]
    assert canary.exists()


def write_tokenizer(directory: Path, settings: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", settings)


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ messages.append(1) }}", "{% for x in range(10**9) %}{% endfor %}", "{{ lipsum.__globals__['os'].popen('id') }}",
    "{{ raise_exception('no') }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}",
    "{{ 1/0 }}", "{% if %}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ namespace.__init__.__globals__ }}",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_hostile_chat_template_costs_its_row_only(tmp_path: Path, template: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "config.json", LLAMA)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_tokenizer(tmp_path, {**settings, "chat_template": template.replace("CANARY", str(tmp_path / "canary"))})
    tokenizer = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    found = encode(Row(0, 1, {"messages": messages}), tokenizer, 100, SamplingParams(max_tokens=1))
    assert isinstance(found, Row)
    assert "messages cannot be tokenised" in str(found.error)
    assert messages == [{"role": "user", "content": "a"}]
    assert not (tmp_path / "canary").exists()
    assert not isinstance(encode(Row(1, 2, {"prompt": "a"}), tokenizer, 100, SamplingParams(max_tokens=1)), Row)


@pytest.mark.parametrize("settings", [
    [], 3, {"fast_tokenizer_files": ["tokenizer./../../x.json"]}, {"fast_tokenizer_files": [3]}, {"auto_map": 3},
    {"tokenizer_class": "../x"},
    {"tokenizer_class": 3}, {"added_tokens_decoder": {"x": 1}}, {"chat_template": 3.5},
    {"init_inputs": 5}, {"model_max_length": "x"}, {"extra_special_tokens": 5}, {"eos_token": {"a": 1}},
])  # fmt: skip
def test_odd_tokenizer_settings(tmp_path: Path, settings: Any) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    write_tokenizer(tmp_path, settings)
    refused_or_loaded(lambda: load_tokenizer(tmp_path))


def test_damaged_tokenizers(tmp_path: Path) -> None:
    """tokenizer.json is parsed by a library in Rust, whose panics are no exceptions of Python's usual kind."""
    write_json(tmp_path / "config.json", LLAMA)
    write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"})
    good, rng, refused = (tmp_path / "tokenizer.json").read_bytes(), random.Random(3), 0
    for _ in range(150):
        (tmp_path / "tokenizer.json").write_bytes(damaged(good, rng, len(good)))
        refused += refused_or_loaded(lambda: load_tokenizer(tmp_path))
    assert refused > 50


class PanicException(BaseException):
    """As the Rust library's panics arrive: by this name, and no Exception."""


def test_a_panic_is_an_error_and_an_interrupt_is_not(tmp_path: Path, monkeypatch: Any) -> None:
    write_tokenizer(tmp_path, {})
    cases = ((PanicException("index out of bounds"), InvalidInput), (KeyboardInterrupt(), KeyboardInterrupt))
    for raised, expected in cases:

        def load(*args: Any, raised: BaseException = raised, **kwargs: Any) -> None:
            raise raised

        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
        with pytest.raises(expected):
            load_tokenizer(tmp_path)


def damaged(good: bytes, rng: random.Random, most: int) -> bytes:
    """`good` with one to three changes among its first `most` bytes: bits, bytes, numbers, pieces cut or doubled."""
    data = bytearray(good)
    for _ in range(rng.randrange(1, 4)):
        at, kind = rng.randrange(min(most, len(data))), rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**60, 2**63, 2**64 - 1]))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
    return bytes(data)


def refused_or_loaded(load: Callable[[], Any]) -> bool:
    """Whether it was refused, with one of the package's errors: any other is the test's failure."""
    try:
        load()
    except FlexError:
        return True
    return False


# --- safetensors headers

DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL"}  # those the engine knows


def shard(file: Path, header: Any, data: int = 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return file


def entry(begin: int, end: int, shape: Any = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(("header", "reason"), [
    ({"a": entry(0, 8), "b": entry(0, 8)}, "overlaps"), ({"a": entry(0, 8), "b": entry(4, 8)}, "overlaps"),
    ({"a": entry(4, 8)}, "gap"), ({"a": entry(0, 4)}, "4 bytes after the last"), ({}, "8 bytes after the last"),
    ({"a": entry(0, 0, [0]), "b": entry(4, 8)}, "gap"), ({"a": entry(0, 12)}, "truncated"),
    (b'{"a": %s, "a": %s}' % (json.dumps(entry(0, 4)).encode(), json.dumps(entry(4, 8)).encode()), "twice"),
    (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "twice"),
    ({"a": entry(0, 8, [True, 2])}, "shape"), ({"a": entry(0, 8, [2.0])}, "shape"),
    ({"a": entry(0, 8, [2**63, 0])}, "shape"),
    ({"a": entry(0, 8, [1] * 10**5)}, "shape"), ({"a": entry(0, 8, [10**4000, 0])}, "shape"),
    (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', "NaN"), (b"[" * 10**6, "header"),
    ('{"a": 1}'.encode("utf-16"), "header"), (b"\xff\xfe{}", "header"), (b"[]", "header"), (b"null", "header"),
    (b'{"a": null}', "header"), ({"a": {**entry(0, 8), "dtype": ["F32"]}}, "header"),
])  # fmt: skip
def test_tensors_fill_their_file_one_after_the_other(tmp_path: Path, header: Any, reason: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"x\.safetensors.*{reason}"):
        read_header(shard(tmp_path / "x.safetensors", header))


def test_empty_tensors_are_no_overlap(tmp_path: Path) -> None:
    header = {"a": entry(0, 0, [0]), "b": entry(0, 8), "c": entry(8, 8, [3, 0]), "__metadata__": {"format": "pt"}}
    found = read_header(shard(tmp_path / "x.safetensors", header))
    assert {name: stored.shape for name, stored in found.items()} == {"a": (0,), "b": (2,), "c": (3, 0)}


def library_reads(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as shard_file:
            return {shard_file.get_slice(name).get_dtype() for name in shard_file.keys()} <= DTYPES  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, OverflowError):
        return False


def test_damaged_headers_are_judged_as_the_library_judges_them(tmp_path: Path) -> None:
    """600 damaged headers: those the safetensors library refuses are refused here, and no others."""
    good = tmp_path / "good.safetensors"
    save_file({f"layers.{i}.w": torch.ones(i, 3, dtype=torch.float16) for i in range(8)}, good, {"format": "pt"})
    data, rng, bad, refused = good.read_bytes(), random.Random(11), tmp_path / "x.safetensors", 0
    most = 8 + struct.unpack("<Q", data[:8])[0]
    assert len(read_header(good)) == 8
    for _ in range(600):
        bad.write_bytes(damaged(data, rng, most))
        no = refused_or_loaded(lambda: read_header(bad))
        assert no != library_reads(bad)
        refused += no
    assert 300 < refused < 600


def test_damaged_indexes(families: Any, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    families("llama").model.save_pretrained(directory, max_shard_size="40KB")
    index = directory / "model.safetensors.index.json"
    good, rng, refused = index.read_bytes(), random.Random(12), 0
    assert len(read_checkpoint(directory)) == len(json.loads(good)["weight_map"])
    for _ in range(300):
        index.write_bytes(damaged(good, rng, len(good)))
        refused += refused_or_loaded(lambda: read_checkpoint(directory))
    assert 100 < refused < 300


# --- pickles


class Runs:
    """Writes the canary when it is unpickled."""

    def __init__(self, canary: Path, how: str = "eval") -> None:
        self.how, self.text = how, f"open({str(canary)!r}, 'w').close()"

    def __reduce__(self) -> Any:
        if self.how == "eval":
            return eval, (self.text,)
        if self.how == "exec":
            return exec, (self.text,)
        import os

        return os.system, (f"touch {self.text.split(chr(39))[1]}",)


def tensors_with(payload: Any) -> dict[str, Any]:
    return {"w": torch.ones(2), "payload": payload}


def as_tar(payload: Any, file: Path) -> None:
    """The format of before torch 0.1.10: a tar of pickles."""
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            part = pickle.dumps(payload)
            info = tarfile.TarInfo(name)
            info.size = len(part)
            archive.addfile(info, io.BytesIO(part))


def as_nested_zip(payload: Any, file: Path) -> None:
    inner = io.BytesIO()
    torch.save(tensors_with(payload), inner)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/version", "3")
        archive.writestr("archive/inner.zip", inner.getvalue())


def as_script(payload: Any, file: Path) -> None:
    """What looks like a TorchScript archive, which torch.load hands to another loader."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/constants.pkl", pickle.dumps(payload))
        archive.writestr("archive/version", "3")


FORMS: dict[str, Callable[[Any, Path], None]] = {
    "zip": lambda payload, file: torch.save(tensors_with(payload), file),
    "legacy": lambda payload, file: torch.save(tensors_with(payload), file, _use_new_zipfile_serialization=False),
    "bare pickle": lambda payload, file: file.write_bytes(pickle.dumps(tensors_with(payload))) and None,
    "protocol 0": lambda payload, file: file.write_bytes(pickle.dumps(tensors_with(payload), protocol=0)) and None,
    "protocol 5": lambda payload, file: torch.save(tensors_with(payload), file, pickle_protocol=5),
    "key": lambda payload, file: torch.save({"w": torch.ones(1), "deep": {"er": [(payload,)]}}, file),
    "top": lambda payload, file: torch.save(payload, file),
    "tar": as_tar, "nested zip": as_nested_zip, "script": as_script,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:Weights only load")
@pytest.mark.parametrize("how", ["eval", "exec", "system"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.pt"])
def test_no_pickle_runs(tmp_path: Path, form: str, how: str, name: str) -> None:
    FORMS[form](Runs(tmp_path / "canary", how), tmp_path / name)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadCheckpoint, match=name):
        convert_bin([tmp_path / name], [], tmp_path / "out")
    assert not (tmp_path / "canary").exists()
    assert not list((tmp_path / "out").iterdir())


def test_the_payload_would_run_elsewhere(tmp_path: Path) -> None:
    """The canary works: read without care, the same file writes it."""
    FORMS["zip"](Runs(tmp_path / "canary"), tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(("tensor", "reason"), [
    (torch.zeros(1).expand(10**6, 10**6), "claims 4,000,000,000,000 bytes of a storage of 4"),
    (torch.eye(3).to_sparse(), "sparse"), (torch.empty(3, device="meta"), "meta"),
])  # fmt: skip
def test_tensors_that_are_not_plain(tmp_path: Path, tensor: torch.Tensor, reason: str) -> None:
    torch.save({"w": tensor}, tmp_path / "x.bin")
    with pytest.raises(BadCheckpoint, match=rf"x\.bin is refused.*{reason}"):
        convert_bin([tmp_path / "x.bin"], [], tmp_path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """A thousand times its size could come out of it."""
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "plain.bin")
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, zipfile.ZipFile(tmp_path / "x.bin", "w") as packed:
        for part in plain.infolist():
            packed.writestr(part.filename, plain.read(part), compress_type=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.bin").stat().st_size < 10_000
    with pytest.raises(BadCheckpoint, match=r"x\.bin is refused.*compressed"):
        convert_bin([tmp_path / "x.bin"], [], tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_damaged_pickles(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file, rng, refused = tmp_path / "x.bin", random.Random(13), 0
    for legacy in (False, True):
        torch.save({f"t{i}": torch.ones(i) for i in range(6)}, file, _use_new_zipfile_serialization=not legacy)
        good = file.read_bytes()
        for _ in range(100):
            file.write_bytes(damaged(good, rng, len(good)))
            refused += refused_or_loaded(lambda: convert_bin([file], [], tmp_path / "out"))
    assert refused > 20


# --- GGUF headers


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_info(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_file(tensors: list[bytes], values: list[bytes], counts: Any = None, data: int = 64) -> bytes:
    tensor_count, value_count = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, value_count) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def scalar(key: str, value: int, kind: int = 4) -> bytes:
    return text(key) + struct.pack("<I" + {4: "I", 10: "Q"}[kind], kind, value)


GOOD = [tensor_info("a"), tensor_info("b", offset=32)]
HOSTILE_GGUF = {
    "values 2^60": gguf_file(GOOD, [], (2, 2**60)), "tensors 2^60": gguf_file(GOOD, [], (2**60, 0)),
    "values 2^64-1": gguf_file(GOOD, [], (2, 2**64 - 1)), "many values": gguf_file([], [], (0, 999_999), 10**7),
    "many tensors": gguf_file([], [], (999_999, 0), 10**7),
    "long key": gguf_file(GOOD, [struct.pack("<Q", 2**62) + b"k"]),
    "long name": gguf_file([struct.pack("<Q", 2**63)], []),
    "long text": gguf_file(GOOD, [text("k") + struct.pack("<IQ", 8, 2**63)]),
    "17 MB of text": gguf_file(GOOD, [text("k") + struct.pack("<I", 8) + text("a" * 17 * 2**20)]),
    "long array": gguf_file(GOOD, [text("k") + struct.pack("<IIQ", 9, 4, 2**62)]),
    "long array of texts": gguf_file(GOOD, [text("k") + struct.pack("<IIQ", 9, 8, 2**61)]),
    "nested arrays": gguf_file(GOOD, [text("k") + struct.pack("<IIQ", 9, 9, 1) * 1000]),
    "unknown kind": gguf_file(GOOD, [text("k") + struct.pack("<I", 77)]),
    "same key": gguf_file(GOOD, [scalar("k", 1), scalar("k", 2)]),
    "same name": gguf_file([tensor_info("a"), tensor_info("a", offset=32)], []),
    "overlap": gguf_file([tensor_info("a"), tensor_info("b", offset=28)], []),
    "same place": gguf_file([tensor_info("a"), tensor_info("b")], []),
    "far away": gguf_file([tensor_info("a", offset=2**63)], []), "beyond": gguf_file([tensor_info("a", (17,))], []),
    "no dims": gguf_file([tensor_info("a", ())], []), "5 dims": gguf_file([tensor_info("a", (1, 1, 1, 1, 2))], []),
    "2^32 dims": gguf_file([text("a") + struct.pack("<I", 2**32 - 1)], []),
    "huge dims": gguf_file([tensor_info("a", (2**63, 2**63, 2**63, 2**63))], []),
    "zero dim": gguf_file([tensor_info("a", (0, 2**60))], []), "no type": gguf_file([tensor_info("a", kind=999)], []),
    "half a block": gguf_file([tensor_info("a", kind=2)], []),
    "alignment 0": gguf_file(GOOD, [scalar("general.alignment", 0)]),
    "alignment 3": gguf_file(GOOD, [scalar("general.alignment", 3)]),
    "alignment 2^63": gguf_file(GOOD, [scalar("general.alignment", 2**63, 10)]),
    "alignment text": gguf_file(GOOD, [text("general.alignment") + struct.pack("<I", 8) + text("32")]),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_GGUF)
def test_hostile_gguf_headers_fail_fast(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.gguf").write_bytes(HOSTILE_GGUF[case])
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match=r"x\.gguf"):
            gguf_header.read_header(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_the_harmless_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf_file(GOOD, [scalar("k", 5)]))
    header = gguf_header.read_header(tmp_path / "x.gguf")
    assert header.values == {"k": 5}
    assert [(tensor.name, tensor.shape) for tensor in header.tensors] == [("a", (8,)), ("b", (8,))]
