"""Odd values and damaged files in a model directory: errors that name the file, the field, the value and the remedy."""

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, GPT2Config, LlamaConfig, OPTConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexengine import Engine
from flexengine.activity import Activity, reporting
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.build import build
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.config import _check_fields, load_config
from flexengine.model.config_faults import odd_sizes
from flexengine.model.gguf_header import read_header
from flexengine.model.pickled import conversion
from flexengine.model.tokenizer import eos_tokens, load_tokenizer, unapplied
from flexengine.shell.commands import plan, run
from flexengine.worker.open_model import open_model
from tests.helpers.published import MODELS
from tests.helpers.speaker import make_byte_llama
from tests.helpers.tokenizers import byte_tokenizer

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
LLAMA = {**LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLM"]}
GPT2 = {**GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=32).to_dict(), "architectures": ["GPT2LMHeadModel"]}
OPT = {**OPTConfig(**SIZES, ffn_dim=64).to_dict(), "architectures": ["OPTForCausalLM"]}
LEAST = ("must be at least 1", "correct it, or download it again")
NO_NUMBERS: tuple[Any, ...] = ("64", None, [64], {}, 1.5, True)
WHOLE = ("it must be a whole number", "correct it, or download it again")


def directory(place: Path, content: Any, name: str = "config.json") -> Path:
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return place


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(InvalidInput) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "key", "value", "parts"),
    [
        *((LLAMA, key, value, LEAST) for key in SIZES for value in (0, -1, False)),
        *((LLAMA, key, value, WHOLE) for key in SIZES for value in NO_NUMBERS),
        *((LLAMA, "num_key_value_heads", value, LEAST) for value in (0, -2)),
        (LLAMA, "num_key_value_heads", "4", ("a whole number or null",)),
        (LLAMA, "head_dim", 0, LEAST),
        (LLAMA, "intermediate_size", -1, ("must be at least 0",)),
        (LLAMA, "max_position_embeddings", 0, LEAST),
        *((OPT, "ffn_dim", value, WHOLE) for value in ("64", None, 64.5, [64], True)),
        (OPT, "ffn_dim", -1, ("must be at least 0",)),
        (OPT, "word_embed_proj_dim", -64, ("must be at least 0",)),
        (GPT2, "n_inner", "64", ("a whole number or null",)),
        (GPT2, "n_inner", -4, ("must be at least 0",)),
        (
            LLAMA,
            "num_attention_heads",
            3,
            ("hidden_size to 64", "hidden_size must be a multiple of num_attention_heads"),
        ),
        (LLAMA, "model_type", ["llama"], ("the name of a family",)),
        (LLAMA, "model_type", None, ("the name of a family",)),
        (LLAMA, "model_type", "lama", ("which the installed transformers does not know; correct it",)),
        (LLAMA, "architectures", "LlamaForCausalLM", ("a list of class names",)),
        (LLAMA, "architectures", [3], ("a list of class names",)),
        (LLAMA, "dtype", [64], ("a name",)),
        (LLAMA, "text_config", 3, ("an object",)),
        (LLAMA, "rope_parameters", 3, ("correct it",)),
        (LLAMA, "tie_word_embeddings", 3, ("it must be true or false",)),
        *((GPT2, key, value, LEAST) for key in ("n_embd", "n_head", "n_layer") for value in (0, -1)),
        *((GPT2, key, value, WHOLE) for key in ("n_embd", "n_head", "n_layer") for value in (None, "4")),
    ],
)
def test_an_odd_value_is_named(tmp_path: Path, base: Any, key: str, value: Any, parts: tuple[str, ...]) -> None:
    said = refusal(lambda: load_config(directory(tmp_path, {**base, key: value}), weights=False))
    for part in (str(tmp_path), "config.json", f"{key} ", json.dumps(value).strip('"'), *parts):
        assert part in said
    assert "Error" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("base", "values", "said"),
    [
        (
            LLAMA,
            {"pad_token_id": 32},
            "sets pad_token_id to 32, but vocab_size to 32; token ids must be below vocab_size",
        ),
        (LLAMA, {"num_key_value_heads": 3}, "4 heads for queries and 3 for keys and values; num_attention_heads in"),
        (GPT2, {"n_head": 3}, "sets n_embd to 64 and n_head to 3; n_embd must be a multiple of n_head; correct it"),
    ],
)
def test_values_that_contradict_each_other_are_named(tmp_path: Path, base: Any, values: Any, said: str) -> None:
    assert said in refusal(lambda: build(directory(tmp_path, {**base, **values}), torch.float32))


@pytest.mark.parametrize(("own", "usual"), [("n_embd", "hidden_size"), ("n_positions", "max_position_embeddings")])
def test_two_names_of_one_value_must_agree(tmp_path: Path, own: str, usual: str) -> None:
    """transformers would take one of them, whichever comes last."""
    assert load_config(directory(tmp_path, {**GPT2, usual: GPT2[own]}), weights=False).to_dict()[own] == GPT2[own]
    said = refusal(lambda: load_config(directory(tmp_path, {**GPT2, usual: 2 * GPT2[own]}), weights=False))
    assert f"config.json: {own} is {GPT2[own]}, but {usual} is {2 * GPT2[own]}, and both name one value: remove" in said


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("mixtral", "num_local_experts", 0), ("gemma2", "query_pre_attn_scalar", 0)],
)
def test_a_size_that_some_models_may_have_is_named_where_it_cannot_be_computed(
    tmp_path: Path, kind: str, key: str, value: int
) -> None:
    small = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    values = {**CONFIG_MAPPING[kind](**SIZES, **small).to_dict(), key: value}
    said = refusal(lambda: build(directory(tmp_path, values), torch.float32))
    assert said.endswith(f"; config.json sets {key} to {value}, which may be why: correct it")


def test_a_window_below_one_is_the_reason(tmp_path: Path) -> None:
    small = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    values = {**CONFIG_MAPPING["gemma2"](**SIZES, **small).to_dict(), "sliding_window": -1, "n_group": 0}
    said = refusal(lambda: build(directory(tmp_path, values), torch.float32))
    assert said.endswith(": config.json sets the window of its attention to -1 tokens; correct it, or set it to null")


def test_entries_of_lists_are_no_sizes() -> None:
    config = CONFIG_MAPPING["llama4_text"](num_hidden_layers=2, moe_layers=[0, 1], num_local_experts=0)
    assert odd_sizes(config) == "; config.json sets num_local_experts to 0, which may be why: correct it"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("glm4_moe_lite", {"head_dim": 256, "qk_rope_head_dim": 64}),
        ("deepseek_v4", {"intermediate_size": 18432, "moe_intermediate_size": 2048}),
        ("zamba2", {"head_dim": 80, "attention_head_dim": 160}),
        ("llama", {"max_window_layers": -1, "rotary_dim": -1, "decoder_sparse_step": -1, "group_size": -1}),
        ("qwen2", {"max_window_layers": -1}),
        ("qwen2_moe", {"decoder_sparse_step": -1}),
    ],
)
def test_values_that_decide_nothing_or_differ_rightly_are_let_in(kind: str, values: dict[str, int]) -> None:
    _check_fields(Path(kind), {"model_type": kind, **values})


def test_sizes_of_known_families_are_not_refused() -> None:
    checked = 0
    for kind in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING))[::6]:
        try:
            values = CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # some defaults contradict themselves
            continue
        _check_fields(Path(kind), json.loads(json.dumps(values, default=str)))
        checked += 1
    assert checked >= 25


FILES = {
    b"null": "holds null; it must be an object",
    b"[]": "holds an array; it must be an object",
    b"3": "holds a number; it must be an object",
    b" \n": "is empty; download it again",
    b'{"a": ': "is not JSON: .* correct it, or download it again",
    b'{"a": "\xff"}': "is not UTF-8 text: byte 7 is wrong; save it as UTF-8",
    codecs.BOM_UTF8 + b"{}": "begins with a byte order mark; save it as UTF-8 without one",
    '{"a": 1}'.encode("utf-16"): "is not UTF-8 text: byte 0 is wrong; save it as UTF-8",
}
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": load_config,
    "generation_config.json": lambda place: eos_tokens(place, LlamaConfig()),
    "tokenizer_config.json": load_tokenizer,
    "tokenizer.json": load_tokenizer,
    "model.safetensors.index.json": read_checkpoint,
    "pytorch_model.bin.index.json": lambda place: conversion(place, False),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", FILES)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    place = directory(tmp_path, content, name)
    index = "is not a shard index: it has no weight_map from tensors to files; download it again"
    fault = index if name.endswith("index.json") and "holds" in FILES[content] else FILES[content]
    with pytest.raises(BadCheckpoint, match=rf"{tmp_path}.*{name} {fault}"):
        READERS[name](place)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/a.jinja", "merges.txt", "vocab.txt"]
)
def test_a_byte_order_mark_that_would_become_text_is_named(tmp_path: Path, name: str) -> None:
    """transformers takes it for the first character of each chat; in other files of text it changes nothing."""
    byte_tokenizer().save_pretrained(tmp_path)
    directory(tmp_path, codecs.BOM_UTF8 + b"MIT License", "LICENSE.txt")
    assert load_tokenizer(tmp_path) is not None
    directory((tmp_path / name).parent, codecs.BOM_UTF8 + b"{{ messages }}", Path(name).name)
    said = refusal(lambda: load_tokenizer(tmp_path))
    remedy = rf"as sed -i '1s/^\xEF\xBB\xBF//' {Path(name).name} does"
    assert said == f"{tmp_path / name} begins with a byte order mark; save it as UTF-8 without one, {remedy}"


def heard(place: Path, values: dict[str, Any]) -> list[str]:
    """Return the messages while a config without weights is read."""
    records = list[Activity]()
    with reporting(records.append):
        load_config(directory(place, values), weights=False)
    return [record.text for record in records]


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"model_type": "opt"}, "num_hidden_layers 12, hidden_size 768, vocab_size 50272, num_attention_heads 12, max"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, "num_hidden_layers 12, vocab_size 50257, max_"),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}},
            "num_hidden_layers 32, h",
        ),
    ],
)
def test_defaults_that_stand_for_sizes_are_named_once(tmp_path: Path, values: dict[str, Any], sizes: str) -> None:
    (said,) = heard(tmp_path, values)
    start = f"{tmp_path / 'config.json'} lacks sizes, for which the defaults of {values['model_type']} in transformers"
    assert said.startswith(f"{start} stand: {sizes}")
    assert said.endswith("; add the model's own")


def test_a_checkpoint_that_does_not_fit_defaults_says_so(tmp_path: Path) -> None:
    make_byte_llama(tmp_path, 32, seed=0, width=32, context=64, spread=0.1)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["num_hidden_layers"]
    directory(tmp_path, values)
    said = refusal(lambda: open_model(str(tmp_path), None, "cpu"))
    assert said.startswith("the checkpoint does not fit its config: missing: model.layers.10")
    assert said.endswith(" the defaults of llama in transformers stand: num_hidden_layers 32; add the model's own")


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
        {"model_type": "bloom", "n_embed": 256, "n_layer": 2},
        {"model_type": "gemma3", "text_config": {"hidden_size": 64, "num_hidden_layers": 2}},
    ],
)
def test_other_sizes_may_be_left_out(tmp_path: Path, values: dict[str, Any]) -> None:
    assert heard(tmp_path, values) == []


def test_published_configs_state_their_sizes(tmp_path: Path) -> None:
    for model in list(MODELS.values())[::4]:
        if not model.refused:
            assert not any("lacks sizes" in text for text in heard(tmp_path, model.fields))


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({}, "it has no weight_map from tensors to files; download it again"),
        ({"a": "x.bin", "b": "y.bin"}, "not there: 2 of 2 are missing, such as x.bin; download these"),
        ({"a": ""}, "names the shard '', which is not a file name in that directory"),
    ],
)
def test_an_index_without_its_shards_is_named(tmp_path: Path, index: str, weight_map: Any, fault: str) -> None:
    place = directory(tmp_path, {"weight_map": weight_map}, index)
    assert fault in refusal(lambda: READERS[index](place))


@pytest.mark.parametrize("value", [True, "2", 1.5, {}, [2, None]])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_that_is_none_is_named_with_its_file(tmp_path: Path, name: str, value: Any) -> None:
    config = LlamaConfig()
    config.__dict__["eos_token_id"] = value
    place = directory(tmp_path, {"eos_token_id": value} if name != "config.json" else {}, "generation_config.json")
    said = refusal(lambda: eos_tokens(place, config))
    assert f"{place / name}: eos_token_id is {json.dumps(value) if value != '2' else repr(value)}; it must be" in said


HEADER = (100).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "has 0 bytes; download it again"),
        (b"abc", "has 3 bytes; download it again"),
        (HEADER + b"{}", "has 10 bytes but a header of 100: it is cut off, or no safetensors file; download it again"),
        ((4).to_bytes(8, "little") + b"null", "its safetensors header is null, not an object; download it again"),
        ((2).to_bytes(8, "little") + b"[]", "its safetensors header is an array, not an object; download it again"),
    ],
)
def test_a_safetensors_file_that_is_cut_off_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    said = refusal(lambda: read_checkpoint(directory(tmp_path, content, "model.safetensors")))
    assert "model.safetensors" in said
    assert fault in said


@pytest.mark.parametrize(
    ("content", "fault"), [(b"", "is empty"), (b"hello", "is not a GGUF file"), (b"GGUF\3\0\0\0", "damaged or cut off")]
)
def test_a_gguf_file_that_is_cut_off_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    said = refusal(lambda: read_header(directory(tmp_path, content, "m.gguf") / "m.gguf"))
    assert f"m.gguf {'is ' if 'cut' in fault else ''}{fault}" in said
    assert "download it again" in said


def test_a_config_is_refused_before_a_conversion(tmp_path: Path) -> None:
    place = directory(directory(tmp_path, {**LLAMA, "hidden_size": None}), b"", "pytorch_model.bin")
    assert "hidden_size to null" in refusal(lambda: conversion(place, False))


@pytest.mark.slow
def test_commands_and_engine_refuse_an_odd_config_alike(tmp_path: Path, capsys: Any) -> None:
    place = directory(directory(tmp_path / "m", {**LLAMA, "num_key_value_heads": 0}), b"", "model.safetensors")
    rows = directory(tmp_path, b'{"prompt": [1]}\n', "in.jsonl") / "in.jsonl"
    fault = f"{place / 'config.json'}: num_key_value_heads is 0; it must be at least 1"
    assert fault in refusal(lambda: Engine(str(place), device="cpu"))
    for main, words in ((plan.main, [str(place)]), (run.main, ["--model", str(place), str(rows)])):
        assert main(words) == 2
        assert fault in (said := capsys.readouterr().err)
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        (
            {"rope_type": "linear", "factor": "4", "rope_theta": "1e4"},
            "factor to '4'; it must be a number of at least 1",
        ),
        ({"rope_type": "yarn", "factor": -4}, "factor to -4; it must be a number of at least 1"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": "32"}, "beta_fast to '32'; it must be a number above 0"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta to 0; it must be a number above 0"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "rope_theta to nan; it must be a number above 0"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor to inf; it must be a number of at least 1"),
        ({"rope_type": "linear", "factor": True}, "factor to true; it must be a number of at least 1"),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": "8"},
            "original_max_position_embeddings to '8'; it must be a number of at least 1",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1, "2"], "long_factor": [1, 2]},
            'short_factor to [1, "2"]; it must be a list of numbers above 0',
        ),
        ({"rope_type": "longrope", "long_factor": 0.5}, "long_factor to 0.5; it must be a list of numbers above 0"),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_wrong_number_of_rotary_positions_is_named(
    tmp_path: Path, key: str, table: dict[str, Any], fault: str
) -> None:
    place = directory(tmp_path, {**LlamaConfig().to_dict(), key: table}, "config.json")
    assert refusal(lambda: load_config(place)).startswith(f"{place / 'config.json'} sets {key}.{fault}: correct it")


def test_usual_numbers_of_rotary_positions_are_accepted(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
    yarn |= {"attention_factor": 0.5, "mscale": 0.707, "beta_slow": 1, "beta_fast": 32, "partial_rotary_factor": 0.5}
    config = {**LlamaConfig().to_dict(), "rope_parameters": yarn}
    assert load_config(directory(tmp_path, config, "config.json")).rope_parameters["factor"] == 4


SETTINGS = {
    "model_max_length": ("abc", "a number"),
    "chat_template": (5, "a string, or a list of objects with name and template"),
    "tokenizer_class": (5, "a string"),
    "padding_side": ("up", "left or right"),
    "bos_token": (5, "a string or an object with its content"),
    "added_tokens_decoder": (5, "an object, as {...}"),
    "model_input_names": (4, "a list of strings"),
    "clean_up_tokenization_spaces": ("x", "true or false"),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_a_wrong_setting_of_the_tokenizer_is_named(tmp_path: Path, key: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    value, must = SETTINGS[key]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    assert refusal(lambda: load_tokenizer(tmp_path)).startswith(f"{file} sets {key} to {text}; it must be {must}: ")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"version": "1.0"}, "tokenizer.json lacks added_tokens, which must be a list"),
        ({"version": "1.0", "added_tokens": []}, "tokenizer.json lacks model, which must be an object, as {...}"),
        ({"added_tokens": [], "model": 5}, "tokenizer.json has a number as model, which must be an object, as {...}"),
    ],
)
def test_a_tokenizer_without_its_parts_is_named(tmp_path: Path, content: dict[str, Any], fault: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    said = refusal(lambda: load_tokenizer(tmp_path))
    assert said == f"the tokenizer in {tmp_path} cannot be loaded: {fault}; download it again"


def test_an_end_token_beyond_the_vocabulary_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ends no text. Some published models have one beside others."""
    place = directory(tmp_path, {"eos_token_id": [2, 300]}, "generation_config.json")
    assert 2 in eos_tokens(place, LlamaConfig(vocab_size=300))
    assert "eos_token_id is [300]; the model has 300 tokens, so it ends no text" in caplog.text
    caplog.clear()
    directory(tmp_path, {"eos_token_id": [2, 299, -1]}, "generation_config.json")
    assert eos_tokens(place, LlamaConfig(vocab_size=300)) >= {2, 299}
    assert not caplog.text


@pytest.mark.parametrize("value", [float("nan"), "1.2", float("inf"), [1]])
def test_a_penalty_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    place = directory(tmp_path, {"repetition_penalty": value}, "generation_config.json")
    assert "sets repetition_penalty to " in (said := refusal(lambda: unapplied(place)))
    assert "it must be a number, such as 1: correct it" in said


def test_only_a_penalty_above_0_has_a_remedy(tmp_path: Path) -> None:
    place = directory(tmp_path, {"repetition_penalty": 1.2}, "generation_config.json")
    assert unapplied(place).endswith("; --repetition-penalty 1.2 applies that one")
    directory(tmp_path, {"repetition_penalty": -1, "num_beams": 4}, "generation_config.json")
    assert unapplied(place).endswith("so tokens may differ")
