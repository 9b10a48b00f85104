"""pytorch_model*.bin files made safetensors: compared with what they were made from; nothing in them is run."""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)

from flexengine.errors import BadCheckpoint, OutOfMemory
from flexengine.model import pickled
from flexengine.model import shards as shard_files
from flexengine.model.pickled import convert_bin
from flexengine.model.source import resolve
from tests.helpers.prepared import tensors_of
from tests.helpers.tiny_bin import bin_model

pytestmark = pytest.mark.usefixtures("cache")


def prepared_bin(path: Path) -> Path:
    return resolve(str(path)).directory


@pytest.mark.parametrize("shards", [1, 3])
def test_bin_to_safetensors(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 2000)
    model = bin_model(tmp_path / "m", shards)
    found = resolve(str(tmp_path / "m"))
    assert found.name == "m"
    tensors = tensors_of(found.directory)
    assert set(tensors) == set(model.state_dict())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert len(list(found.directory.glob("*.safetensors"))) > 3
    assert sorted(f.name for f in found.directory.iterdir() if "safetensors" not in f.name) == [
        "SHA256SUMS", "config.json", "generation_config.json", "prepared.json", "tokenizer.json",
    ]  # fmt: skip
    ids = torch.arange(8).reshape(1, 8)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(found.directory)(ids).logits, model(ids).logits)
    assert resolve(str(tmp_path / "m")) == found


def test_old_bin_format(tmp_path):
    model = bin_model(tmp_path / "m")
    torch.save(model.state_dict(), tmp_path / "m" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    tensors = tensors_of(prepared_bin(tmp_path / "m"))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_malicious_bin_is_refused_and_never_run(tmp_path, cache, form):
    bin_model(tmp_path / "m")
    canary, file = tmp_path / "canary", tmp_path / "m" / "pytorch_model.bin"
    state = {"a": torch.zeros(2), "b": Payload(canary)}
    if form == "pickle":
        file.write_bytes(pickle.dumps({"b": Payload(canary)}))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(BadCheckpoint, match=str(file)) as caught:
        resolve(str(tmp_path / "m"))
    assert "weights_only" not in str(caught.value)  # torch advises to run the pickle
    assert not canary.exists()
    assert [f.suffix for f in cache.iterdir()] == [".lock"]


def test_bad_bin_files_are_named(tmp_path):
    bin_model(tmp_path / "m", 3)
    shard = tmp_path / "m" / "pytorch_model-00002-of-00003.bin"
    data = shard.read_bytes()
    for content, word in ((data[:200], "refused"), (b"", "refused")):
        shard.write_bytes(content)
        with pytest.raises(BadCheckpoint, match=f"{shard}.*{word}"):
            prepared_bin(tmp_path / "m")
    torch.save([1, 2], shard)
    with pytest.raises(BadCheckpoint, match="dictionary of tensors"):
        prepared_bin(tmp_path / "m")
    torch.save({"x": torch.tensor([1.0, float("inf")])}, shard)
    with pytest.raises(BadCheckpoint, match=f"{shard}: tensor x"):
        prepared_bin(tmp_path / "m")
    shard.unlink()
    with pytest.raises(BadCheckpoint, match="missing"):
        prepared_bin(tmp_path / "m")
    for text in ('{"weight_map": {"a": "../x.bin"}}', '{"weight_map": 3}', "{", '{"weight_map": {"a": "/etc/passwd"}}'):
        (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(text)
        with pytest.raises(BadCheckpoint, match="index"):
            prepared_bin(tmp_path / "m")


MEASURE = """
import resource, sys
from pathlib import Path
import torch, safetensors.torch
from flexengine.model.pickled import convert_bin
for warm in Path(sys.argv[1]).glob("small.bin"):
    convert_bin([warm], [], Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_bin([Path(sys.argv[1]) / "big.bin"], [], Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_conversion_memory_is_bounded(tmp_path):
    """A tensor of 480 MB costs some pieces, and not the pages of the file."""
    (tmp_path / "out").mkdir()
    torch.save({"a": torch.ones(10)}, tmp_path / "small.bin")
    torch.save({"t": torch.ones(12 * 10**7)}, tmp_path / "big.bin")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / "out")], capture_output=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert int(done.stdout) < 3 * shard_files.PIECE_BYTES


def test_an_old_file_must_fit_in_memory(tmp_path):
    torch.save({"a": torch.zeros(100)}, file := tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    limit = file.stat().st_size
    convert_bin([file], [], tmp_path, memory=limit)
    with pytest.raises(
        OutOfMemory, match=r"old.bin of a format that cannot be read in parts needs .*; give the engine"
    ):
        convert_bin([file], [], tmp_path, memory=limit - 1)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (30, 20), (3, 40, 5), (2, 2, 500)])
def test_pieces_are_the_tensor_in_order(monkeypatch, shape):
    monkeypatch.setattr(shard_files, "PIECE_BYTES", 400)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    for tensor in (whole, whole.transpose(0, -1) if whole.dim() > 1 else whole, whole[..., ::2] if shape else whole):
        pieces = [*shard_files.pieces_of(tensor)]
        assert all(piece.is_contiguous() and piece.nbytes <= 400 for piece in pieces)
        assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))


def test_pages_of_the_heap_are_never_dropped(tmp_path):
    """A file may hold tensors that are not mapped."""
    torch.save({"a": torch.zeros(10)}, file := tmp_path / "m.bin")
    state, own = torch.load(file, mmap=True), torch.ones(10**5)
    mapped = pickled._mapping(file)
    assert state["a"].data_ptr() in mapped
    pickled._forget(own, mapped)
    assert bool(own.all())
    assert not pickled._mapping(tmp_path)
