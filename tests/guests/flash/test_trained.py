"""Files of predictors: what is written is read, and damaged files and those of other checkpoints are refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from flexengine import Engine
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.guests.flash import predictors as trained
from flexengine.guests.flash.feed_forward import FeedForward
from flexengine.guests.flash.predictors import (
    ABOUT,
    SPARSITY,
    TENSORS,
    Latest,
    LayerPredictor,
    PredictionErrors,
    Predictor,
    Trained,
    checkpoint_key,
    find,
    load,
    write,
)
from flexengine.guests.flash.traces import NeuronSharing
from flexengine.model.prepare import prepared
from tests.helpers.relu import LAYERS, make_relu
from tests.helpers.relu import NEURONS as MANY
from tests.helpers.relu import WIDTH as WIDE

RANK, WIDTH, NEURONS = 4, 16, 24


def layer(seed: int) -> LayerPredictor:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    predictor = Predictor(drawn(RANK, WIDTH).bfloat16(), drawn(NEURONS, RANK).bfloat16(), drawn(NEURONS), seed / 3)
    true, predicted = (
        NeuronSharing(0.1, (0.1, 0.2), (0.1, 0.15, 0.18)),
        NeuronSharing(0.2, (0.2, 0.3), (0.2, 0.25, 0.28)),
    )
    return LayerPredictor(predictor, PredictionErrors(100, 10, 20, 1), true, predicted)


TRAINED = Trained((layer(1), None, layer(2)), {"text": "a text", "misses": 0.05})


def block(neurons: int = NEURONS) -> FeedForward:
    return FeedForward("first", "", "down", cast(Any, (None, None, None)), neurons, WIDTH, nn.ReLU(), nn.Identity())


BLOCKS = (block(), None, block())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(TRAINED, "key", tmp_path)
    return tmp_path


def test_what_is_written_is_read(directory: Path) -> None:
    found = load(directory, "key", BLOCKS)
    assert (found.about, found.directory, found.nbytes) == (TRAINED.about, directory, TRAINED.nbytes)
    assert found.errors == PredictionErrors(200, 20, 40, 2)
    for mine, theirs in zip(TRAINED.layers, found.layers, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert (mine.errors, mine.true, mine.predicted) == (theirs.errors, theirs.true, theirs.predicted)
        assert mine.predictor.threshold == theirs.predictor.threshold
        for name, tensor in mine.predictor.tensors.items():
            assert torch.equal(tensor, theirs.predictor.tensors[name])


def test_the_name_of_a_text_need_not_be_utf_8(tmp_path: Path) -> None:
    named = Trained(TRAINED.layers, {"text": os.fsdecode(b"\xff.txt")})
    write(named, "key", tmp_path)
    assert load(tmp_path, "key", BLOCKS).about == named.about


def test_predictors_of_some_layers(directory: Path) -> None:
    found = load(directory, "key", BLOCKS[1:], slice(1, 3))
    first, last = found.layers
    assert first is None
    assert last is not None
    assert torch.equal(last.predictor.a, TRAINED.known[1].predictor.a)  # type: ignore[arg-type]
    assert found.digest == load(directory, "key", BLOCKS).digest


def test_the_digest_of_the_latest_is_that_of_its_files(own_cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("weights")
    assert Latest([weights]).digest() == ""
    made = prepared(weights, [weights], lambda path: write(TRAINED, checkpoint_key([weights]), path), "one")
    assert Latest([weights]).digest() == load(made, checkpoint_key([weights]), BLOCKS).digest
    (tmp_path / "config.json").write_text('{"hidden_act": "relu"}')
    assert Latest([weights]).digest() == ""


def test_tensors_are_views_of_the_file(directory: Path) -> None:
    found = load(directory, "key", BLOCKS)
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
             if line.endswith(str(directory / TENSORS))]  # fmt: skip
    ranges = [range(int(low, 16), int(high, 16)) for low, high in spans]
    for each in found.known:
        copy = each.predictor.to(torch.device("cpu"))
        for name, tensor in each.predictor.tensors.items():
            assert any(tensor.data_ptr() in inside for inside in ranges)
            assert not any(copy.tensors[name].data_ptr() in inside for inside in ranges)
            assert torch.equal(copy.tensors[name], tensor)


def test_predictors_of_another_checkpoint(directory: Path) -> None:
    with pytest.raises(InvalidInput, match=r"another checkpoint.*flexengine flash train MODEL"):
        load(directory, "other", BLOCKS)


@pytest.mark.parametrize("blocks", [(block(), block(), block()), (block(), None), (block(32), None, block())])
def test_predictors_of_another_shape(directory: Path, blocks: Any) -> None:
    with pytest.raises(InvalidInput, match="are of another model"):
        load(directory, "key", blocks)


@pytest.mark.parametrize("name", [ABOUT, TENSORS])
@pytest.mark.parametrize("fault", ["truncated", "flipped", "empty", "missing"])
def test_damaged_files(directory: Path, name: str, fault: str) -> None:
    """A flipped bit of a number leaves valid JSON."""
    file = directory / name
    data = bytearray(file.read_bytes())
    digit = data.index(b'"total": 1') + len('"total": ') if name == ABOUT else len(data) - 5
    data[digit] ^= 1
    file.write_bytes({"truncated": data[:-7], "flipped": data, "empty": b"", "missing": b""}[fault])
    if fault == "missing":
        file.unlink()
    with pytest.raises(BadCheckpoint, match=name) as error:
        load(directory, "key", BLOCKS)
    assert "train again" in str(error.value)


@pytest.mark.parametrize("content", [[], {"version": 99}, {"version": 2}, "text", {"version": 2, "a": float("nan")}])
def test_other_json(directory: Path, content: Any) -> None:
    (directory / ABOUT).write_text(json.dumps(content))
    with pytest.raises(BadCheckpoint, match=ABOUT):
        load(directory, "key", BLOCKS)


def test_the_newest_predictors_of_a_checkpoint_are_found(own_cache: Path, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.write_text("weights")
    other.write_text("other weights")
    assert find([mine]) is None
    made = [
        prepared(file, [file], lambda path, file=file: write(TRAINED, checkpoint_key([file]), path), what)  # type: ignore[misc]
        for file, what in [(mine, "first"), (mine, "second"), (other, "first")]
    ]
    assert find([mine]) == made[1]
    assert find([other]) == made[2]
    (made[1] / ABOUT).write_text("{")
    assert find([mine]) == made[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that searched and loaded predictors."""
    called = list[str]()

    def counted(name: str) -> None:
        real = getattr(trained, name)
        monkeypatch.setattr(trained, name, lambda *args: (called.append(name), real(*args))[1])

    for name in ("find", "load"):
        counted(name)
    return called


def test_the_latest_predictors_are_loaded_once(own_cache: Path, tmp_path: Path, calls: list[str]) -> None:
    weights = tmp_path / "weights"
    weights.write_text("weights")
    latest = Latest([weights])
    assert latest.find() is latest.load(BLOCKS) is None
    calls.clear()

    def write_one(directory: Path) -> None:
        write(TRAINED, checkpoint_key([weights]), directory)

    first = prepared(weights, [weights], write_one, "first")
    tensors = (first / TENSORS).read_bytes()
    (first / TENSORS).write_bytes(b"damaged")
    with pytest.raises(BadCheckpoint):
        latest.load(BLOCKS)
    (first / TENSORS).write_bytes(tensors)
    found = latest.load(BLOCKS)
    assert found is not None
    assert found is latest.load(BLOCKS)
    assert found.directory == latest.find() == first
    assert calls == ["find", "load"] * 2
    assert Latest([]).find() is None


def test_an_engine_loads_predictors_once(own_cache: Path, tmp_path: Path, calls: list[str]) -> None:
    """Also if the planner tries several switches that use predictors."""
    make_relu(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))

    def made(seed: int) -> LayerPredictor:
        predictor = Predictor(torch.ones(2, WIDE), torch.ones(MANY, 2), torch.zeros(MANY))
        return replace(layer(seed), predictor=predictor)

    given = Trained(tuple(made(seed) for seed in range(LAYERS)), {})
    prepared(tmp_path, files, lambda path: write(given, checkpoint_key(files), path), "toy")
    with Engine(tmp_path, allow=["flash-oracle", "flash-predictors", "int8-cache"]) as engine:
        assert engine.generate([{"prompt_token_ids": [5], "max_tokens": 2}])[0].error is None
    assert calls == ["find", "load"]


def test_files_of_an_older_version_are_not_found(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.write_text("weights")
    with monkeypatch.context() as patch:
        patch.setattr(trained, "VERSION", 1)
        old = prepared(weights, [weights], lambda path: write(TRAINED, checkpoint_key([weights]), path), "old")
        assert find([weights]) == old
    assert find([weights]) is None
    remedy = rf"is not of version 2; remove it with flexengine cache clear {old.name[:8]}, and train again"
    with pytest.raises(BadCheckpoint, match=remedy):
        load(old, checkpoint_key([weights]), BLOCKS)


def test_predictors_of_sparsified_activations_are_found_by_share_and_text(own_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("weights")
    made = {}
    for sparsity in (None, (0.7, "bundled"), (0.8, "bundled"), (0.7, "a.txt")):
        about = {"text": "a text"} | ({} if sparsity is None else {SPARSITY: list(sparsity)})
        named = Trained(TRAINED.layers, about)
        made[sparsity] = prepared(
            file,
            [file],
            lambda path, named=named: write(named, checkpoint_key([file]), path),
            str(sparsity),  # type: ignore[misc]
        )
    for sparsity, directory in made.items():
        assert find([file], sparsity) == directory
    assert find([file], (0.75, "bundled")) is None
