"""If logits are not finite, only their own row fails, no other row of the batch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from flexengine import Engine, Policy, SamplingParams
from flexengine.shell.commands import messages, run
from tests.helpers.families import NEW

ONE_BATCH = Policy(gpu_batch_size=8, num_gpu_batches=1)
EMBEDDING, LAYER = "model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"
POISON = 597  # a token in no prompt or continuation of the tests
AFTER_NONE = "its logits are not finite after 0 tokens"


def poisoned(family: Any, directory: Path, name: str, row: int, value: float) -> Path:
    """The family's checkpoint with one row of a tensor replaced."""
    shutil.copytree(family.directory, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name][row] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"temperature": 0.7, "seed": 3, "n": 2}], ids=str)
def test_one_row(families: Any, tmp_path: Path, fields: dict[str, Any], value: float) -> None:
    """Two of eight rows of a batch hold a poisoned token: only these fail, the others are as if those were sound."""
    family = families("llama")
    assert all(POISON not in prompt for prompt in family.prompts)
    bad = (1, 4)
    rows = [{"prompt_token_ids": p + [POISON] * (i in bad)} for i, p in enumerate(family.prompts)]
    params = SamplingParams(NEW, ignore_eos=True, **fields)
    with Engine(family.directory, policy=ONE_BATCH, device="cpu", device_mem="1G") as sound:
        expected = sound.generate(rows, params)
    drawn = {t for i, r in enumerate(expected) if i not in bad for s in r.samples or [r] for t in s.token_ids}
    assert POISON not in drawn  # or a sound row would come upon it, too
    model = poisoned(family, tmp_path / "model", EMBEDDING, POISON, value)
    with Engine(model, policy=ONE_BATCH, device="cpu", device_mem="1G") as engine:
        found = engine.generate(rows, params)
        assert engine.summary.failed == 2
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if i in bad:
            assert one.error == f"row {i}: {AFTER_NONE}"
            assert not one.token_ids
        else:
            assert one == other


def test_score(families: Any, tmp_path: Path) -> None:
    """A row that is scored fails if its logits are not finite at one of its tokens. Other rows are scored."""
    family = families("llama")
    model = poisoned(family, tmp_path / "model", EMBEDDING, POISON, float("nan"))
    rows = [([7, 8], [9, 10, 11, 12]), ([7, 8], [9, POISON, 11, 12]), ([7, 8], [9, 10, 11, 12])]
    with Engine(model, policy=ONE_BATCH, device="cpu", device_mem="1G") as engine:
        first, bad, last = engine.score(*zip(*rows, strict=True))
    assert bad.error == "row 1: its logits are not finite"
    assert first.error is last.error is None
    assert first.logprobs == last.logprobs
    assert first.token_ids == [9, 10, 11, 12]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_all_rows(families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    """With a layer that is not finite every row has an error, and the job ends as one with row errors does."""
    family = families("llama")
    model = poisoned(family, tmp_path / "model", LAYER, 3, value)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in family.rows))
    code = run.main([str(source), "--model", str(model), "--device", "cpu", "--device-mem", "1G", "--output",
                     str(output)])  # fmt: skip
    assert code == messages.SOME_FAILED == 1
    told = [json.loads(line)["error"] for line in output.read_text().splitlines()]
    assert told == [f"row {i} (line {i + 1}): {AFTER_NONE}" for i in range(8)]
    assert "Traceback" not in capsys.readouterr().err
