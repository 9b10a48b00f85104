"""Code, templates and tokenizers that come with a model: none runs that was not allowed."""

import random
from pathlib import Path
from typing import Any

import pytest

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.job.rows import Row, encode
from flexengine.model.config import load_config
from flexengine.model.tokenizer import load_tokenizer
from tests.helpers.hostile import LLAMA, damaged, refused_or_loaded, write_json

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
