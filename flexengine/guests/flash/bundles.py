"""Bundles: one file of records for the feed-forward block of each layer, made once from a checkpoint's matrices.

A record holds all weights of one neuron (codec/records.py), so one read brings them. A file holds nothing else: record
i begins at byte i x bytes of a record. The files lie beside other prepared weights, with their checksums.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexengine.activity import activity, advance
from flexengine.codec.records import CODED, PLAIN, RecordForm
from flexengine.errors import BadCheckpoint, InvalidInput, size
from flexengine.guests.flash.feed_forward import Blocks, FeedForward
from flexengine.model.checkpoint import Origin
from flexengine.model.encoding import decoded_size, in_threads, read_part
from flexengine.model.prepare import directory_for, prepared
from flexengine.model.shards import TensorFiles, TensorPart, check_room
from flexengine.worker.open_model import OpenModel

FORMAT = 1  # part of the key of all bundles; raise it if the bytes of a record change
PIECE = 1 << 20  # stored bytes of the neurons that are bundled at a time
STRIP = 64 << 20  # bytes of `down` that are read at a time: columns of a larger matrix come from parts of its rows
LARGEST = torch.finfo(torch.float16).max  # that an encoded vector can hold


@dataclass(frozen=True)
class Bundle:
    """The records of one layer in a file."""

    path: Path  # the file
    form: RecordForm  # format of the records
    neurons: int  # their number

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.neurons * self.form.nbytes

    def check(self) -> None:
        """Raise BadCheckpoint if the file is missing or has another size than its records."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise self.fault(f"cannot be read: {error.strerror}") from error
        if size != self.nbytes:
            raise self.fault(f"has {size:,} bytes")

    def fault(self, what: str) -> BadCheckpoint:
        """Return the error for a damaged file."""
        key = self.path.parent.name[:8]  # the name of the directory for `flexengine cache`
        return BadCheckpoint(
            f"{self.path} {what}, but {self.neurons:,} neurons of {self.form.nbytes:,} bytes are {self.nbytes:,}"
            f" bytes; remove it with flexengine cache clear {key}, and it will be made again"
        )


def prepare_bundles(model: OpenModel, blocks: Blocks, kind: str = "") -> tuple[Bundle | None, ...]:
    """Return the bundle of each layer, after making the missing ones; None for a layer without a block.

    Reading, bundling and writing overlap, see model.encoding.overlap. In memory are at most two strips of `down`, of
    STRIP bytes each, and model.encoding.DEPTH + 2 pieces of PIECE bytes, stored or as records. An interrupted run
    continues with the first file that is missing.

    Args:
        blocks: the feed-forward block of each layer, see feed_forward.find; at least one.
        kind: format of the vectors, from codec.records; "" for the stored dtype. Weights are never rounded to another
            dtype.

    Raises:
        InvalidInput: the kind is unknown or would round the weights, or the cache cannot be written.
        BadCheckpoint: the checkpoint cannot be read, or a bundle is damaged.
        OutOfMemory: the disk is full.
    """
    works = _works(model, blocks, kind)
    source, what = model.source.directory, _what(works)
    label = f"{'+'.join(dict.fromkeys(work.form.kind for work in works))} bundles"
    directory = prepared(source, model.given, lambda folder: _write(folder, works), what, model.verifier, label)
    made = iter([work.bundle(directory) for work in works])
    found = tuple(next(made) if block else None for block in blocks)
    for bundle in found:
        if bundle is not None:
            bundle.check()
    return found


def made_bundles(model: OpenModel, blocks: Blocks, kind: str = "") -> list[Bundle]:
    """Return the bundles that `prepare_bundles` made before; [] if there are none. Arguments as there."""
    works = _works(model, blocks, kind)
    directory = directory_for(model.given, _what(works))
    return [work.bundle(directory) for work in works] if directory.is_dir() else []


def _works(model: OpenModel, blocks: Blocks, kind: str) -> list["_Layer"]:
    stored = model.locations
    named = [(f"{j:05}", block) for j, block in enumerate(blocks) if block is not None]
    return [_Layer(name, block, record_form(block, stored, kind), stored) for name, block in named]


def _what(works: Sequence["_Layer"]) -> str:
    """Return all that the bytes of the files depend on, besides the checkpoint."""
    keys = [[w.name, w.form.kind, w.block.width, w.block.neurons, *w.block.weights] for w in works]
    return json.dumps(["bundles", FORMAT, keys])


def record_form(block: FeedForward, stored: Mapping[str, Origin], kind: str = "") -> RecordForm:
    """Return the format of a block's records. Raise InvalidInput if it would round the weights to another dtype.
    stored: location of each parameter in the checkpoint. kind: as for `prepare_bundles`."""
    dtype = stored[block.first].dtype
    for name in block.weights:
        dtype = torch.promote_types(dtype, stored[name].dtype)
    name = str(dtype).removeprefix("torch.")
    form = RecordForm(kind or name, block.width, bool(block.up))
    if kind in PLAIN and torch.promote_types(dtype, PLAIN[kind]) != PLAIN[kind]:
        fault = f"bundles of kind {kind} would round {block.first}, whose numbers are {name}"
        raise InvalidInput(f"{fault}; choose {', '.join(k for k in (name, *CODED))}")
    return form


@dataclass(frozen=True)
class _Layer:
    """The bundle of one layer to make."""

    name: str  # of its file
    block: FeedForward
    form: RecordForm
    stored: Mapping[str, Origin]  # location of each parameter in the checkpoint

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored[name].nbytes for name in self.block.weights)

    def bundle(self, directory: Path) -> Bundle:
        return Bundle(directory / f"{self.name}.records", self.form, self.block.neurons)

    def pieces(self) -> Iterator[tuple["_Layer", tuple[Tensor, ...]]]:
        """Yield all neurons in order, in pieces of about PIECE bytes: matrices [n, width], in the order of a record, in
        the stored dtype."""
        neurons, width = self.block.neurons, self.block.width
        step = max(1, PIECE * neurons // self.stored_bytes)
        strip = max(1, STRIP // (width * self.stored[self.block.down].dtype.itemsize) // step) * step
        for left in range(0, neurons, strip):
            columns = _columns(self.stored[self.block.down], left, min(left + strip, neurons))
            for low in range(left, min(left + strip, neurons), step):
                high = min(low + step, left + strip, neurons)
                rows = [_rows(self.stored[name], low, high) for name in self.block.weights[:-1]]
                yield self, (*rows, columns[:, low - left : high - left].t())


def _rows(origin: Origin, low: int, high: int) -> Tensor:
    size = origin.shape[1] * origin.dtype.itemsize
    return read_part(origin, low * size, (high - low) * size).view(-1, origin.shape[1])


def _columns(origin: Origin, low: int, high: int) -> Tensor:
    rows, count = origin.shape
    if high - low == count:
        return read_part(origin, 0, decoded_size(origin)).view(rows, count)
    size, columns = origin.dtype.itemsize, torch.empty(rows, high - low, dtype=origin.dtype)
    for row in range(rows):
        columns[row] = read_part(origin, (row * count + low) * size, (high - low) * size)
    return columns


def _bundled(piece: tuple[_Layer, tuple[Tensor, ...]]) -> TensorPart:
    """Return the records of a piece. Raise BadCheckpoint if an encoded vector cannot hold a number."""
    layer, matrices = piece
    if layer.form.kind in CODED:
        for name, matrix in zip(layer.block.weights, matrices, strict=True):
            if not bool((matrix.abs() <= LARGEST).all()):
                raise BadCheckpoint(f"tensor {name} holds NaN, or values beyond {LARGEST:,.0f}")
    records = layer.form.encode(*matrices)
    advance(sum(matrix.nbytes for matrix in matrices))
    return TensorPart(layer.name, records.view(-1))


class _RecordFiles(TensorFiles):
    def start(self, name: str) -> tuple[bytes, int]:
        (nbytes,) = self.shapes[name]
        return b"", nbytes


def _write(directory: Path, works: Sequence[_Layer]) -> None:
    """Write the files that are missing, each under a temporary name until it is complete."""
    paths = {work.name: work.bundle(directory).path for work in works}
    missing = [work for work in works if not paths[work.name].exists()]
    if not missing:
        return
    sizes = {work.name: (work.bundle(directory).nbytes,) for work in missing}
    read, total = sum(work.stored_bytes for work in missing), sum(size for (size,) in sizes.values())
    check_room(directory, "bundles", total)
    sums = f"{size(read)} become {size(total)}"
    text = f"bundling the neurons of {len(missing)} layers, once for this model and format ({sums})"
    pieces = (piece for work in missing for piece in work.pieces())
    with (
        activity("bundling", text, read, "B", logging.INFO),
        _RecordFiles({work.name: paths[work.name] for work in missing}, sizes) as out,
    ):
        in_threads(pieces, _bundled, out.write)
