"""Checkpoints that `flexengine convert` writes: their bits, decoded from the format's specification, and tokens."""

import fcntl
import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flexengine import Engine, Policy, SamplingParams
from flexengine.codec.symmetric import fit_symmetric
from flexengine.errors import BadCheckpoint, InvalidInput, OutOfMemory, UnsupportedModel
from flexengine.guests import calibration
from flexengine.lossy import BUNDLED, Lossy
from flexengine.model.encoding import read_part
from flexengine.model.quantised import writing
from flexengine.model.quantised.writing import convert
from flexengine.shell.commands.convert import main
from flexengine.worker.open_model import open_model
from tests.helpers.calibrated import TOKENS
from tests.helpers.families import FAMILIES, POLICIES, make_checkpoint, prompts_of, reference
from tests.helpers.forked import Forked
from tests.helpers.pages import ROOT
from tests.helpers.quantised import codes_of
from tests.helpers.tiny_gguf import tiny_gguf
from tests.helpers.tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("cache")
PROMPTS, NEW = prompts_of(601, (5, 17, 1, 9)), 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some models, each with a converted one beside it; one has several files, one experts and bf16 numbers."""
    folder = tmp_path_factory.mktemp("made")
    make_checkpoint("qwen2", folder / "qwen2", max_shard_size="150KB")
    kind, values = FAMILIES["qwen3-moe"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "qwen3-moe", (kind, dict(values, moe_intermediate_size=64)))
        model = make_checkpoint("qwen3-moe", folder / "plain")
    model.bfloat16().save_pretrained(folder / "qwen3-moe")
    (folder / "qwen2" / "LICENSE").write_text("free")
    (folder / "qwen2" / "additional_chat_templates").mkdir()
    (folder / "qwen2" / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    for name in ("qwen2", "qwen3-moe"):
        converted(folder / name, folder / f"{name}-4")
    return folder


def converted(model: Path, target: Path, importances: Any = None) -> Any:
    opened = open_model(str(model), None, "cpu")
    return convert(opened.source, opened.skeleton, opened.locations, target, lambda: importances)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(directory.glob("*.safetensors")) for name, x in load_file(file).items()}


def decoded(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors by the names that an unquantised checkpoint has: code i of a word in bits 4 i on, less 8."""
    stored = tensors_of(directory)
    found = {name: x for name, x in stored.items() if not name.endswith(("_packed", "_scale", "_shape"))}
    for name in [n.removesuffix("_packed") for n in stored if n.endswith("_packed")]:
        rows, columns = stored[f"{name}_shape"].tolist()
        codes = codes_of(np.ascontiguousarray(stored[f"{name}_packed"].numpy().T), 4, columns).T
        scales = stored[f"{name}_scale"].float().numpy().repeat(32, 1)
        assert codes.shape == scales.shape == (rows, columns)
        found[name] = torch.from_numpy((codes - 8).astype(np.float32) * scales)
    return found


def plain_copy(directory: Path, target: Path) -> Path:
    """A plain fp32 checkpoint with the numbers of a converted one."""
    target.mkdir()
    save_file({name: x.float().contiguous() for name, x in decoded(directory).items()}, target / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return target


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_layers_are_near_and_all_else_is_as_it_was(made: Path, name: str) -> None:
    before, after = tensors_of(made / name), decoded(made / f"{name}-4")
    assert before.keys() == after.keys()
    changed = {n for n, x in before.items() if not torch.equal(x.float(), after[n].float())}
    expected = {n for n in before if "proj.weight" in n and before[n].shape[1] % 32 == 0}
    assert changed == expected != set()
    for n in changed:
        x, mean = before[n].float(), before[n].float().square().mean()
        assert float((after[n] - x).square().mean() / mean) < 0.012  # of the best 16 steps for a normal distribution
    files = {file.name for file in (made / name).iterdir()}
    assert {file.name for file in (made / f"{name}-4").iterdir()} == files
    if name == "qwen2":
        index = json.loads((made / "qwen2-4" / "model.safetensors.index.json").read_text())["weight_map"]
        assert len({*index.values()}) > 2
        assert index.keys() == tensors_of(made / "qwen2-4").keys()
        templates = "additional_chat_templates/tools.jinja"
        assert (made / "qwen2-4" / templates).read_text() == (made / "qwen2" / templates).read_text()


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_they_are_read_back_bit_for_bit(made: Path, tmp_path: Path, name: str) -> None:
    opened, right = open_model(str(made / f"{name}-4"), None, "cpu"), decoded(made / f"{name}-4")
    plain = transformers.AutoModelForCausalLM.from_pretrained(plain_copy(made / f"{name}-4", tmp_path / "plain"))
    assert opened.stored_forms
    for own, form in opened.stored_forms.items():
        origin, expected = opened.locations[own], plain.get_parameter(own)
        assert form.packed.name == ("w4-32" if name == "qwen3-moe" else "w4-32-f32")
        assert torch.equal(read_part(origin, 0, 4 * expected.numel()).view(expected.shape), expected), own
    stored = [path.stat().st_size for path in (made / f"{name}-4").glob("*.safetensors")]
    assert opened.facts.stored_bytes <= sum(stored) < sum(x.nbytes for x in right.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_tokens_are_those_of_transformers_on_the_numbers_of_the_files(made: Path, tmp_path: Path, name: str) -> None:
    path = plain_copy(made / f"{name}-4", tmp_path / "plain")
    expected = reference(transformers.AutoModelForCausalLM.from_pretrained(path), PROMPTS, NEW)
    original = transformers.AutoModelForCausalLM.from_pretrained(made / name, dtype=torch.float32)
    assert expected != reference(original, PROMPTS, NEW)
    places = [dict(policy=Policy(**policy), device="sim", offload_dir=tmp_path) for policy in POLICIES.values()]
    for options in (dict(device="cpu"), *places):
        with Engine(str(made / f"{name}-4"), **options) as engine:
            rows = [{"prompt_token_ids": ids} for ids in PROMPTS]
            results = engine.generate(rows, SamplingParams(max_tokens=NEW, ignore_eos=True))
        assert [result.token_ids for result in results] == expected, options


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_transformers_reads_them(made: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(made / f"{name}-4", dtype=torch.float32)
    logits, path = model(torch.tensor(PROMPTS[:1])).logits, plain_copy(made / f"{name}-4", tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    for own, x in model.named_parameters():  # decoded by the call
        if not own.endswith(("_scale", "_shape")):
            expected = plain.get_parameter(own)
            if ".experts." in own and name == "qwen3-moe":  # which are decoded in the type of the scales
                expected = expected.bfloat16()
            assert torch.equal(x.float(), expected.float()), own
    if name == "qwen2":
        assert torch.equal(logits, plain(torch.tensor(PROMPTS[:1])).logits)


def test_experts_stay_as_they_are_if_some_of_their_matrices_must(tmp_path: Path) -> None:
    """transformers 5.24 leaves the others as random numbers."""
    make_checkpoint("qwen3-moe", tmp_path / "model")  # 48 columns of down_proj are no whole groups
    told = converted(tmp_path / "model", tmp_path / "out")
    packed = {name for name in tensors_of(tmp_path / "out") if name.endswith("_packed")}
    assert len(packed) == told.matrices == 4 * 4 + 2
    assert not [name for name in packed if "experts" in name]
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in told.kept
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.experts.0.up_proj" in ignored


def test_embeddings_that_are_the_head_are_ignored_by_both_names(tmp_path: Path) -> None:
    """Readers look for the module, which is the head, or for the tensor, which has the embedding's name."""
    make_checkpoint("llama-tied", tmp_path / "model")
    converted(tmp_path / "model", tmp_path / "out")
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.embed_tokens"} <= {*ignored}


def test_a_file_of_another_name_has_an_index(tmp_path: Path) -> None:
    make_checkpoint("llama", model := tmp_path / "model")
    (model / "model.safetensors").rename(model / "weights.safetensors")
    converted(model, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(tensors_of(tmp_path / "out"), "weights.safetensors")
    transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert open_model(str(tmp_path / "out"), None, "cpu").stored_forms


# Codes.


def best_scale(x: np.ndarray[Any, Any]) -> float:
    """The least squared error of a group over a fine grid of scales."""
    top = float(np.abs(x).max())
    scales = np.linspace(-top / 5, top / 5, 4001)
    scales = scales[scales != 0][:, None]
    codes = np.clip(np.round(x / scales), -8, 7)
    return float(((codes * scales - x) ** 2).sum(1).min())


def test_errors_are_near_the_least_ones() -> None:
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(64, 32)).astype(np.float32))
    codes, scales = fit_symmetric(x, torch.float32)
    errors = (((codes.float() - 8) * scales - x) ** 2).sum(1)
    least = np.array([best_scale(row) for row in x.numpy()])
    assert 1 <= float(errors.sum()) / least.sum() < 1.05
    x[0], x[1], x[2, 5] = 0.0, -3.0, 1000.0
    codes, scales = fit_symmetric(x, torch.float16)
    assert (float(scales[0, 0]), set(codes[0].tolist())) == (0.0, {8})
    assert torch.allclose((codes[1].float() - 8) * scales[1].float(), x[1], rtol=1e-3)
    assert float((codes[2, 5].float() - 8) * scales[2].float()) == pytest.approx(1000, rel=1e-3)


def test_importance_moves_errors_to_other_columns() -> None:
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(256, 64)).astype(np.float32))
    matters = torch.where(torch.arange(64) % 4 == 0, 50.0, 1.0)
    errors = []
    for importance in (None, matters):
        codes, scales = fit_symmetric(x, torch.float32, importance)
        away = (codes.float() - 8).view(256, 2, 32) * scales[..., None]
        errors.append((away.flatten(1) - x).square().mean(0))
    assert float((errors[1] * matters).sum()) < 0.9 * float((errors[0] * matters).sum())
    assert float(errors[1][::4].sum()) < float(errors[0][::4].sum())
    assert float(errors[1].sum()) > float(errors[0].sum())


def test_importances_reach_the_matrices(made: Path, tmp_path: Path) -> None:
    importances = Importance()
    converted(made / "qwen3-moe", tmp_path / "out", importances)
    numbers = {(name.split(".")[-1], number) for name, number in importances.asked if "experts" in name}
    assert numbers == {(name, number) for name in ("gate_up_proj", "down_proj") for number in range(6)}
    names = {name for name, _ in importances.asked if "experts" not in name}
    assert names == {name.removesuffix("_packed") for name in tensors_of(made / "qwen3-moe-4")
                     if name.endswith("_packed") and "experts" not in name}  # fmt: skip
    plain, fitted = tensors_of(made / "qwen3-moe-4"), tensors_of(tmp_path / "out")
    assert plain.keys() == fitted.keys()
    name = "model.layers.0.self_attn.o_proj.weight_packed"
    assert not torch.equal(plain[name], fitted[name])


class Importance:
    """Importances of which every second 16 are large."""

    def __init__(self) -> None:
        self.asked = set[tuple[str, int]]()

    def of(self, name: str, number: int) -> torch.Tensor:
        self.asked.add((name, number))
        columns = 128 if "o_proj" in name else 64
        return torch.where(torch.arange(columns) % 32 < 16, 100.0, 1.0)


# Faults.


def test_a_full_disk_leaves_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.model import shards

    def full(file: Any, path: Path, data: memoryview) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_append", full)
        with pytest.raises(InvalidInput, match=r"out cannot be written: .*No space left on device"):
            converted(made / "qwen2", tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfMemory, match=r"out needs .*; give a directory on a disk with room"):
        converted(made / "qwen2", tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
from flexengine.model.quantised import writing
from flexengine.worker.open_model import open_model
model, target = sys.argv[1:]
rows, seen = writing.encoded_rows, []
def slow(*given):
    seen.append(given)
    if len(seen) > 9:
        print("now", flush=True)
        time.sleep(100)
    return rows(*given)
writing.encoded_rows = slow
opened = open_model(model, None, "cpu")
writing.convert(opened.source, opened.skeleton, opened.locations, Path(target))
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_looks_finished(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    child = Forked(KILLED, [str(made / "qwen2"), str(target)], ROOT, tmp_path / "log")
    while "now\n" not in child.said():
        assert child.poll() is None, child.said()
        time.sleep(0.02)
    with pytest.raises(InvalidInput, match="another process writes"):
        converted(made / "qwen2", target)
    child.send_signal(signal.SIGKILL)
    assert child.wait(100) == -signal.SIGKILL
    assert not target.exists()
    (left,) = tmp_path.glob("out*")
    assert not (left / "config.json").exists()
    converted(made / "qwen2", target)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    right = tensors_of(made / "qwen2-4")
    assert all(torch.equal(x, right[name]) for name, x in tensors_of(target).items())


def test_remains_are_erased_and_other_directories_are_kept(tmp_path: Path) -> None:
    def write() -> None:
        with writing.new_directory(tmp_path / "out") as directory:
            assert [path.name for path in directory.iterdir()] == [".converting"]
            (directory / "new").touch()

    foreign = tmp_path / "out.writing"
    fault = re.escape(f"{foreign} exists and is not of a conversion; remove it, or name another OUT")
    (tmp_path / "mine").mkdir()
    foreign.symlink_to(tmp_path / "mine")  # to an empty directory, too
    with pytest.raises(InvalidInput, match=fault):
        write()
    (tmp_path / "mine" / "x").write_text("dear")
    with pytest.raises(InvalidInput, match=fault):
        write()
    foreign.unlink()
    (tmp_path / "mine").rename(foreign)
    with pytest.raises(InvalidInput, match=fault):
        write()
    assert (foreign / "x").read_text() == "dear"
    assert [path.name for path in foreign.iterdir()] == ["x"]
    (foreign / ".converting").touch()  # as in what a killed conversion leaves
    (foreign / "part").mkdir()
    (foreign / "part" / "y").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "z").touch()
    (foreign / "link").symlink_to(tmp_path / "other")
    write()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert (tmp_path / "other" / "z").exists()
    (tmp_path / "out" / "new").unlink()
    (tmp_path / "out").rename(foreign)  # an empty directory
    write()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    foreign.touch()
    (tmp_path / "out").rename(tmp_path / "away")
    with pytest.raises(InvalidInput, match=fault):
        write()


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_on_a_directory_that_has_moved_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Another process ends between the opening of its directory and the lock, and a third one may begin."""
    lock = fcntl.flock

    def late(descriptor: int, flags: int) -> None:
        (tmp_path / "out.writing").rename(tmp_path / "out")
        if again:
            (tmp_path / "out.writing").mkdir()
        lock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InvalidInput, match="another process writes"), writing.new_directory(tmp_path / "out"):
        raise AssertionError
    assert (tmp_path / "out.writing").exists() is again


def test_an_existing_target_is_noticed_first(made: Path, tmp_path: Path) -> None:
    def asked() -> None:
        raise AssertionError

    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    opened = open_model(str(made / "qwen2"), None, "cpu")
    with pytest.raises(InvalidInput, match=r"out exists; give another directory, or remove it"):
        convert(opened.source, opened.skeleton, opened.locations, tmp_path / "out", asked)
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "cache"}


def test_companions_are_checked_first_and_directories_are_left_out(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "qwen2", model := tmp_path / "model")
    (model / "tokenizer_old").mkdir()
    (model / "notes.txt").mkdir()
    converted(model, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (made / "qwen2").iterdir()}
    (model / "vocab.txt").symlink_to(tmp_path / "out" / "config.json")
    with pytest.raises(BadCheckpoint, match=r"vocab.txt is a link"):
        converted(model, tmp_path / "deep" / "other")
    assert not (tmp_path / "deep").exists()


def test_the_config_is_written_when_all_else_is_on_the_disk(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = writing.sync_files, list[set[str]]()

    def kept(directory: Path) -> None:
        synced.append({path.name for path in directory.iterdir()})
        sync(directory)

    monkeypatch.setattr(writing, "sync_files", kept)
    converted(made / "qwen2", tmp_path / "out")
    names = {path.name for path in (made / "qwen2").iterdir()}
    assert synced == [names - {"config.json"} | {".converting"}, names | {".converting"}]


def test_a_directory_that_is_made_meanwhile_is_kept(tmp_path: Path) -> None:
    def make() -> None:
        with writing.new_directory(tmp_path / "out") as directory:
            (directory / "x").touch()
            (tmp_path / "out").mkdir()

    with pytest.raises(InvalidInput, match="was made meanwhile"):
        make()
    assert [path.name for path in tmp_path.rglob("out*")] == ["out"]


def test_damaged_numbers_are_refused(made: Path, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    tensors = tensors_of(tmp_path / "model")
    tensors["model.layers.2.mlp.gate_proj.weight"][7, 9] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"layers.2.mlp.gate_proj.weight holds NaN"):
        converted(tmp_path / "model", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("gpt2", r"is stored as \[in, out\]"),
        ("gpt-oss", "is a stack of experts"),
        ("quantised", "is quantised already"),
    ],
)
def test_models_without_such_a_form_are_refused(made: Path, tmp_path: Path, family: str, fault: str) -> None:
    path = made / "qwen2-4"
    if family != "quantised":
        make_checkpoint(family, path := tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=fault):
        converted(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf, out = tmp_path / "tiny.gguf", tmp_path / "out"
    tiny_gguf(gguf)

    def said(*words: object) -> tuple[int, str]:
        code = main([*map(str, words)])
        return code, "".join(capsys.readouterr())

    assert said(gguf, out, "--weights", "int4")[1].count("is a GGUF file") == 1
    code, text = said(made / "qwen2", out, "--weights", "int4")
    assert (code, {path.name for path in out.iterdir()}) == (0, {path.name for path in (made / "qwen2-4").iterdir()})
    assert f"wrote {out}: " in text
    assert "; 24 matrices in int4, " in text
    assert "4 matrices stay as in the model, such as model.layers.0.mlp.down_proj.weight" in text
    code, text = said(made / "qwen2", out, "--weights", "int4")
    assert (code, "exists; give another directory" in text) == (2, True)
    for words in ([], ["--weights", "int3"]):
        code, text = said(made / "qwen2", tmp_path / "other", *words)
        assert (code, "--weights int4 is written" in text) == (2, True)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_command_calibrates(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOKENS", TOKENS)
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(made / "qwen2", model)
    byte_tokenizer(model)
    assert main([str(model), str(out), "--weights", "int4", "--calibrate"]) == 0
    with Engine(str(model), lossy=Lossy(weights="int4", calibrate=BUNDLED)) as engine:
        importances = engine.calibrator.importances  # kept in the cache
    assert importances is not None
    exact, errors = tensors_of(model), dict[str, float]()
    for name, directory in (("calibrated", out), ("plain", made / "qwen2-4")):
        away = {n: (x - exact[n]).square() * importances.columns[n] for n, x in decoded(directory).items()
                if n in importances.columns}  # fmt: skip
        errors[name] = sum(float(x.sum()) for x in away.values())
    assert errors["calibrated"] < 0.99 * errors["plain"]
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_other_checkpoints_become_the_same(made: Path, tmp_path: Path) -> None:
    """A .bin file is converted to safetensors in the cache first, whose own files are not copied."""
    (tmp_path / "model").mkdir()
    torch.save(tensors_of(made / "qwen2"), tmp_path / "model" / "pytorch_model.bin")
    for file in ("config.json", "generation_config.json", "LICENSE"):
        shutil.copy(made / "qwen2" / file, tmp_path / "model")
    converted(tmp_path / "model", tmp_path / "out")
    found, right = tensors_of(tmp_path / "out"), tensors_of(made / "qwen2-4")
    assert found.keys() == right.keys()
    assert all(torch.equal(x, right[name]) for name, x in found.items())
    others = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert others - {"model.safetensors.index.json"} <= {"config.json", "generation_config.json", "LICENSE"}
