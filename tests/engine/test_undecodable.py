"""Tokens that a tokenizer cannot decode, or does not share with the model, cost their rows only."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from flexengine import Engine, SamplingParams
from flexengine.shell.commands import run
from tests.helpers.speaker import make_byte_llama, make_speaker
from tests.helpers.tokenizers import byte_tokenizer

PROMPTS = ["one", "two", "three", "four"]


class Panicking:
    """A tokenizer that cannot decode one token."""

    def __init__(self, inner: Any, token: int) -> None:
        self.inner, self.token = inner, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.inner(*texts, **options)

    def decode(self, tokens: list[int], **options: Any) -> str:
        if self.token in tokens:
            raise type("PanicException", (BaseException,), {})("no such token")
        text: str = self.inner.decode(tokens, **options)
        return text


@pytest.mark.parametrize("fields", [{}, {"stop": ["never to be found"]}, {"logprobs": 2}, {"n": 2, "seed": 1}], ids=str)
def test_a_token_that_cannot_be_decoded(tmp_path: Path, fields: dict[str, Any]) -> None:
    make_speaker(tmp_path)
    params = SamplingParams(6, ignore_eos=True, **fields)
    with Engine(tmp_path, device="cpu", device_mem="200M") as engine:
        sound = engine.generate(PROMPTS, params)
        token = sound[1].token_ids[-1]
        engine.reader.tokenizer = engine.core.tokenizer = Panicking(engine.tokenizer, token)
        found = engine.generate(PROMPTS, params)
    assert found[1].error is not None
    assert "cannot be decoded: PanicException: no such token" in found[1].error
    assert found[1].error.startswith("row 1: ")
    for one, other in zip(found, sound, strict=True):
        assert one.error is not None or one == other


def test_a_stop_string_that_the_tokenizer_cannot_look_up(tmp_path: Path) -> None:
    make_speaker(tmp_path)
    with Engine(tmp_path, device="cpu", device_mem="200M") as engine:
        engine.reader.tokenizer = engine.core.tokenizer = Panicking(engine.tokenizer, 5)
        name = engine.tokenizer.convert_ids_to_tokens(5)
        rows = [{"prompt": "a", "stop": [name]}, {"prompt": "a", "stop": ["b"]}]
        bad, good = engine.generate(rows, SamplingParams(max_tokens=1))
    assert "cannot be looked up: PanicException" in str(bad.error)
    assert good.error is None


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows with the additional token have errors, the others are finished, and a retry fails them again."""
    tokenizer = byte_tokenizer()
    make_byte_llama(tmp_path / "model", len(tokenizer), seed=1, width=32, context=96, spread=0.3)
    tokenizer.add_tokens([AddedToken("<note>")])
    tokenizer.save_pretrained(tmp_path / "model")
    lines = {
        "run": [{"prompt": "a <note>"}, {"prompt": "b"}, {"prompt": "<note> c"}, {"prompt": "d"}],
        "score": [{"context": "a", "continuation": "<note>"}, {"context": "a", "continuation": "b"}],
    }
    for kind, rows in lines.items():
        source, output = tmp_path / f"{kind}.jsonl", tmp_path / f"{kind}.out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [str(source), "--model", str(tmp_path / "model"), "--device", "cpu", "--device-mem", "200M", "--output",
                 str(output), "--max-tokens", "3", *["--score"] * (kind == "score")]  # fmt: skip
        for again in ([], ["--retry-errors"]):
            assert run.main([*given, *again]) == 1
            errors = [json.loads(line)["error"] for line in output.read_text().splitlines()]
            assert ["beyond the model's vocabulary" in (error or "") for error in errors] == [
                "<note>" in json.dumps(row) for row in rows
            ]
            assert errors.count(None) == len(rows) // 2
    assert "Traceback" not in capsys.readouterr().err
