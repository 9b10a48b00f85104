"""Files of predictors: what is written is read, and damaged files and those of other checkpoints are refused."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.flash.predictors import Predictor
from flexengine.flash.statistics import Sharing
from flexengine.flash.trained import (
    ABOUT,
    SPARSITY,
    TENSORS,
    LayerPredictor,
    Trained,
    checkpoint_key,
    find,
    load,
    write,
)
from flexengine.flash.training import Errors
from flexengine.model.neurons import FeedForward
from flexengine.model.prepare import prepared

RANK, WIDTH, NEURONS = 4, 16, 24


def layer(seed: int) -> LayerPredictor:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    predictor = Predictor(drawn(RANK, WIDTH).bfloat16(), drawn(NEURONS, RANK).bfloat16(), drawn(NEURONS), seed / 3)
    true, predicted = Sharing(0.1, (0.1, 0.2), (0.1, 0.15, 0.18)), Sharing(0.2, (0.2, 0.3), (0.2, 0.25, 0.28))
    return LayerPredictor(predictor, Errors(100, 10, 20, 1), true, predicted, drawn(NEURONS), drawn(NEURONS))


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
    assert found.errors == Errors(200, 20, 40, 2)
    for mine, theirs in zip(TRAINED.layers, found.layers, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert (mine.errors, mine.true, mine.predicted) == (theirs.errors, theirs.true, theirs.predicted)
        assert mine.predictor.threshold == theirs.predictor.threshold
        for name, tensor in mine.predictor.tensors.items():
            assert torch.equal(tensor, theirs.predictor.tensors[name])
        assert torch.equal(mine.frequency, theirs.frequency)
        assert torch.equal(mine.predicted_frequency, theirs.predicted_frequency)


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


@pytest.mark.parametrize("content", [[], {"version": 99}, {"version": 1}, "text"])
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


def test_predictors_of_sparsified_activations_are_found_by_share_and_text(own_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("weights")
    made = {}
    for sparsity in (None, (0.7, "bundled"), (0.8, "bundled"), (0.7, "a.txt")):
        about = {"text": "a text"} | ({} if sparsity is None else {SPARSITY: list(sparsity)})
        named = Trained(TRAINED.layers, about)
        made[sparsity] = prepared(
            file, [file], lambda path, named=named: write(named, checkpoint_key([file]), path), str(sparsity)  # type: ignore[misc]
        )
    for sparsity, directory in made.items():
        assert find([file], sparsity) == directory
    assert find([file], (0.75, "bundled")) is None
