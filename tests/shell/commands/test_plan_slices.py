"""flexengine plan --slices: its text and JSON for several kinds of model, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexengine.shell.commands import plan
from tests.helpers.families import FAMILIES
from tests.helpers.tiny_gguf import SHAPE, tiny_gguf


def made(folder: Path, kind: str, values: dict[str, Any]) -> str:
    config = getattr(transformers, f"{kind}Config")(**values)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert plan.main([*words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, made(tmp_path / "gem", *FAMILIES["gemma2"]), "--slices", "--device", "cpu")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "gem in float32: the attentions of 4 layers cut it into 5 slices"
    start = lines.index("layers 0, 2, window of 9 tokens")
    assert lines[start : start + 7] == [
        "layers 0, 2, window of 9 tokens", "to attention q 4 x 32 512", "k 2 x 32 256", "v 2 x 32 256",
        "from attention output 4 x 32 512", "kept hidden states 64 256", "layers 1, 3",
    ]  # fmt: skip
    total = 4 * 128 * 4  # e d L
    assert f"{2 * total:,} bytes to attention, {total:,} from it, {3 * total:,} together" in text
    assert "(2 + 2/G) e d L, with e 4 bytes, d 128, L 4 layers, G 2 query heads per KV head" in text
    assert "Kept while attention runs: at most 256 bytes per token" in text


def test_padded_heads_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM's q and k have an element more than v, for ALiBi; pages have one width."""
    text = printed(capsys, made(tmp_path / "b", *FAMILIES["bloom"]), "--slices", "--device", "cpu")
    moved, padded = 4 * 4 * 4 * (17 + 17 + 16 + 16), 4 * 4 * 4 * 4 * 32
    assert f"{moved:,} together" in text
    assert f"to 32 elements, and moves {padded:,} bytes" in text
    assert " e d L" not in text


@pytest.mark.parametrize("given", [["--dtype", "bfloat16"], ["--hardware", "h100-80gb_512gb"]])
def test_json_of_a_config_in_two_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:  # fmt: skip
    """The dtype is that of the option, or the checkpoint's own on a GPU."""
    model = made(tmp_path / "m", "OPT", FAMILIES["opt"][1] | {"dtype": torch.bfloat16})
    values = json.loads(printed(capsys, model, "--slices", "--json", *given))
    assert (values["model"], values["dtype"], values["slices"]) == ("m", "bfloat16", 5)
    assert (values["sent_bytes"], values["fetched_bytes"]) == (3 * 2 * 64 * 4, 2 * 64 * 4)
    (cut,) = values["cuts"]
    assert cut["layers"] == [0, 1, 2, 3]
    assert [part["name"] for part in cut["sent"]] == ["q", "k", "v"]
    assert cut["kept"] == [{"name": "hidden states", "shape": [64], "bytes": 128}]


def test_a_gguf_file_and_a_shipped_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_gguf(tmp_path / "m.gguf")
    values = json.loads(printed(capsys, str(file), "--slices", "--json", "--device", "cpu"))
    assert values["sent_bytes"] == 2 * 4 * SHAPE["hidden_size"] * SHAPE["num_hidden_layers"]  # G is 2
    values = json.loads(printed(capsys, "opt-30b", "--slices", "--json", "--dtype", "float16"))
    assert values["sent_bytes"] + values["fetched_bytes"] == 4 * 2 * 7168 * 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "x"], "--slices has no effect with --cluster"),
        (["--rows", "3"], "--rows has no effect with --slices, which depends on the model and its dtype"),
        (["--limit", "3"], "--limit has no effect with --slices"),
        (["--policy", "x.json"], "--policy has no effect with --slices"),
        (["--cache", "int8"], "--cache has no effect with --slices"),
        (["--theta", "2"], "--theta is for a plan with --cluster"),
    ],
)
def test_refused_options(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert message in printed(capsys, "--slices", *options, code=2)


def test_a_model_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made(tmp_path / "m", "Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99})
    error = printed(capsys, model, "--slices", "--device", "cpu", code=2)
    assert "MambaForCausalLM (m)" in error.splitlines()[-1]
