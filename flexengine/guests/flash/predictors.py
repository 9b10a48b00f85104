"""Predictors of active neurons: a low-rank product in place of the first matrix of a feed-forward block; what was
measured of them, their files, and the search for them in the cache.

predictors.safetensors    per layer L.a, L.b (bf16), L.bias (fp32 [neurons])
predictors.json           the checkpoint, the settings, thresholds, errors and statistics, a digest of the other file
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.guests.flash.feed_forward import Blocks
from flexengine.guests.flash.traces import NeuronSharing
from flexengine.model.files import config_digest
from flexengine.model.linear import Product
from flexengine.model.prepare import fingerprint, hold
from flexengine.model.shards import check_finite, save

VERSION = 2  # of the files; those of other versions are not found, and trained again
TENSORS, ABOUT = "predictors.safetensors", "predictors.json"
# In `about`, both left out without sparsified activations: `Lossy.sparsity` as a list, and the digest of its text.
SPARSITY, THRESHOLDS_TEXT = "sparsify", "thresholds_text_sha256"


@dataclass(frozen=True)
class Predictor:
    """Predicts which neurons of one layer are active, from the input of its feed-forward block.

    The scores are b (a x) + bias. A neuron is predicted active if its score is above the threshold. On a CPU the scores
    of a token are bitwise independent of the other tokens.
    """

    a: Tensor  # [rank, width]
    b: Tensor  # [neurons, rank]
    bias: Tensor  # [neurons], fp32 on a CPU
    threshold: float = 0.0  # the same for all neurons

    @property
    def neurons(self) -> int:
        return len(self.b)

    @property
    def width(self) -> int:
        """Elements of an input."""
        return self.a.shape[1]

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return len(self.a)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, by name."""
        return {"a": self.a, "b": self.b, "bias": self.bias}

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Return a copy of the predictor on a device, in a dtype; None keeps the dtypes, as on a CPU."""
        moved: dict[str, Any] = {name: tensor.to(device, dtype, copy=True) for name, tensor in self.tensors.items()}
        return replace(self, **moved)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores [tokens, neurons] in x's dtype. x: [tokens, width], input of the block."""
        product = Product(x.dtype)
        return product(product(x, self.a), self.b, self.bias)

    def active(self, x: Tensor) -> Tensor:
        """Return the predicted neurons, bool [tokens, neurons]. x: [tokens, width], input of the block."""
        return self.scores(x) > self.threshold


@dataclass(frozen=True)
class PredictionErrors:
    """Counts of the predictions for some tokens, in neurons."""

    total: int  # tokens times neurons
    active: int  # of these, the active ones
    predicted: int  # those predicted active
    missed: int  # active, but predicted inactive

    def __add__(self, other: "PredictionErrors") -> "PredictionErrors":
        return PredictionErrors(*map(add, astuple(self), astuple(other)))

    @property
    def misses(self) -> float:
        """Missed neurons per active one."""
        return self.missed / self.active if self.active else 0.0

    @property
    def false_alarms(self) -> float:
        """Share of the inactive neurons that are predicted active."""
        inactive = self.total - self.active
        return (self.predicted - self.active + self.missed) / inactive if inactive else 0.0

    @property
    def active_share(self) -> float:
        return self.active / self.total if self.total else 0.0

    @property
    def predicted_share(self) -> float:
        return self.predicted / self.total if self.total else 0.0


@dataclass(frozen=True)
class LayerPredictor:
    """The predictor of one layer, with what was measured on text that it was not trained on."""

    predictor: Predictor  # on the CPU
    errors: PredictionErrors  # misses and false alarms
    # true, predicted: statistics of the active neurons, and of those that are predicted active.
    true: NeuronSharing
    predicted: NeuronSharing


@dataclass(frozen=True)
class Trained:
    """The predictors of a model."""

    layers: tuple[LayerPredictor | None, ...]  # by layer; None for one without a sparse feed-forward block
    about: Mapping[str, Any]  # settings and text
    directory: Path | None = None  # of the files; None before they are saved
    digest: str = ""  # of the files; "" before they are saved

    @property
    def thresholds_text(self) -> str | None:
        """Digest of the text for the thresholds of sparsified activations; None without any."""
        return self.about.get(THRESHOLDS_TEXT)

    @property
    def known(self) -> list[LayerPredictor]:
        """The layers that have a predictor."""
        return [layer for layer in self.layers if layer is not None]

    @property
    def errors(self) -> PredictionErrors:
        """Errors of all layers."""
        return sum((layer.errors for layer in self.known), PredictionErrors(0, 0, 0, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of all predictors."""
        return sum(layer.predictor.nbytes for layer in self.known)


def checkpoint_key(files: Sequence[Path]) -> str:
    """Return the key of the checkpoint that predictors belong to. files: as for `model.prepare.prepared`."""
    return fingerprint(files, f"predictors {config_digest(files)}")


class _Stored(msgspec.Struct, frozen=True):
    """A layer in ABOUT."""

    threshold: float
    errors: PredictionErrors
    true: NeuronSharing
    predicted: NeuronSharing


def write(trained: Trained, checkpoint: str, directory: Path) -> None:
    """Write the files of predictors. Raise OSError if that fails. checkpoint: its `checkpoint_key`."""
    tensors = {f"{number}.{name}": tensor.contiguous() for number, layer in enumerate(trained.layers) if layer
               for name, tensor in layer.predictor.tensors.items()}  # fmt: skip
    save(tensors, directory / TENSORS)
    layers = [layer and _Stored(layer.predictor.threshold, layer.errors, layer.true, layer.predicted)
              for layer in trained.layers]  # fmt: skip
    body = {
        "version": VERSION, "checkpoint": checkpoint, "about": dict(trained.about),
        "layers": msgspec.to_builtins(layers), "tensors_sha256": _size_and_digest(directory / TENSORS)[1],
    }  # fmt: skip
    (directory / ABOUT).write_text(json.dumps({**body, "sha256": _digest(body)}), encoding="utf-8")


def load(directory: Path, checkpoint: str, blocks: Blocks, layers: slice = slice(None)) -> Trained:
    """Read the predictors of a model.

    Their tensors are views of the file: they take page cache, which no ledger books. `Predictor.to` copies them.

    Args:
        directory: that `write` wrote.
        checkpoint: `checkpoint_key` of the model's files.
        layers: the layers of the model that `blocks` are of.

    Raises:
        BadCheckpoint: a file is missing, damaged or truncated.
        InvalidInput: the predictors are those of another checkpoint.
    """
    content, file = _content(directory), directory / TENSORS
    nbytes, digest = _size_and_digest(file)
    if content["checkpoint"] != checkpoint:
        fault = f"the predictors in {directory} were trained for another checkpoint, or its files have changed since"
        raise InvalidInput(f"{fault}; train them for this one: flexengine flash train MODEL")
    if digest != content["tensors_sha256"]:
        raise _damaged(file, f"is not the file that was written ({nbytes:,} bytes): it is truncated or damaged")
    tensors = load_file(file)
    try:
        known = list(enumerate(msgspec.convert(content["layers"], list[_Stored | None])))[layers]
        found = tuple(None if about is None else _layer(tensors, number, about) for number, about in known)
    except BadCheckpoint:
        raise
    except (KeyError, ValueError) as error:
        raise _damaged(directory / ABOUT, f"is damaged: {error!r}") from error
    shapes = [None if layer is None else (layer.predictor.neurons, layer.predictor.width) for layer in found]
    expected = [(b.neurons, b.width) if b is not None and b.sparse else None for b in blocks]
    if shapes != expected:
        fault = f"the predictors in {directory} have (neurons, width) {shapes} by layer, but the model has {expected}"
        raise InvalidInput(f"{fault}; they are of another model: flexengine flash train MODEL")
    return Trained(found, content["about"], directory, _digest(content))


def _layer(tensors: Mapping[str, Tensor], number: int, about: _Stored) -> LayerPredictor:
    a, b, bias = (tensors[f"{number}.{name}"] for name in ("a", "b", "bias"))
    predictor = Predictor(a, b, bias, about.threshold)
    for name, tensor in predictor.tensors.items():
        check_finite(f"{number}.{name}", tensor)
    return LayerPredictor(predictor, about.errors, about.true, about.predicted)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()


def _size_and_digest(path: Path) -> tuple[int, str]:
    try:
        with path.open("rb") as file:
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error}") from error


def _damaged(path: Path, what: str) -> BadCheckpoint:
    key = path.parent.name[:8]  # the name of the directory for `flexengine cache`
    fault = f"{path} {what}; remove it with flexengine cache clear {key}, and train again"
    return BadCheckpoint(f"{fault}: flexengine flash train MODEL")


def _content(directory: Path) -> dict[str, Any]:
    """Return the content of ABOUT, without its digest. Raise BadCheckpoint if it is damaged or of another version."""
    about = directory / ABOUT
    try:
        content = json.loads(about.read_bytes())  # msgspec refuses names of files that are not UTF-8
        known = content.pop("sha256", None) if isinstance(content, dict) else None
        digest = _digest(content)  # refuses NaN and infinities, which `write` never writes
    except OSError as error:
        raise _damaged(about, f"cannot be read: {error}") from error
    except ValueError as error:
        raise _damaged(about, f"is truncated or damaged: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise _damaged(about, f"is not of version {VERSION}")
    if known != digest:
        raise _damaged(about, "is damaged: its content does not have its digest")
    return content


def find(files: Sequence[Path], sparsity: tuple[float, str] | None = None) -> Path | None:
    """Return the directory of the predictors that were trained last for a checkpoint; None if there are none.

    The directory is locked for use until this process ends, so `flexengine cache clear` does not remove it.

    Args:
        files: as for `model.prepare.prepared`.
        sparsity: as `Lossy.sparsity`. Predictors of other sparsified activations are not found.
    """
    key, wanted = checkpoint_key(files), None if sparsity is None else list(sparsity)
    found = list[tuple[float, Path]]()
    for about in (cache_root() / "prepared").glob(f"*/{ABOUT}"):
        if about.parent.suffix:  # unfinished
            continue
        try:
            content = _content(about.parent)
            if content["checkpoint"] == key and content["about"].get(SPARSITY) == wanted:
                found.append((about.stat().st_mtime, about.parent))
        except (BadCheckpoint, OSError):
            continue
    for _, directory in sorted(found, reverse=True):
        if hold(directory):
            return directory
    return None


class Latest:
    """The predictors of a checkpoint that were trained last, searched and loaded once. Arguments as for `find`."""

    def __init__(self, files: Sequence[Path], sparsity: tuple[float, str] | None = None) -> None:
        self._files, self._sparsity = files, sparsity
        self._directory: Path | None = None
        self._loaded: Trained | None = None

    def find(self) -> Path | None:
        """Return the directory of the predictors; None if there are none."""
        if self._directory is None and self._files:
            self._directory = find(self._files, self._sparsity)
        return self._directory

    def digest(self) -> str:
        """Return `Trained.digest` of the predictors; "" if there are none. Raise BadCheckpoint if they are damaged."""
        return _digest(_content(directory)) if (directory := self.find()) else ""

    def load(self, blocks: Blocks, layers: slice = slice(None)) -> Trained | None:
        """Return the predictors; None if there are none. Arguments and errors as in `load`."""
        if self._loaded is None and (directory := self.find()) is not None:
            self._directory = None  # after an error they are searched again, as they may be trained again
            self._loaded = load(directory, checkpoint_key(self._files), blocks, layers)
            self._directory = directory
        return self._loaded
