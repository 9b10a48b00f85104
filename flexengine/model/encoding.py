"""Encoded weights: which matrices of a model are encoded, and the files that they are written to, once for a format."""

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexengine.activity import activity, advance, tick
from flexengine.codec.forms import FORMS, WeightFormat, make_form
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.checkpoint import Origin, read_header
from flexengine.model.importance import Importances
from flexengine.model.prepare import fingerprint, prepared
from flexengine.model.shards import TensorFiles, TensorPart, check_room
from flexengine.model.skeleton import Skeleton
from flexengine.model.verify import SUMS, Verifier, digest_of, read_sums
from flexengine.read_retries import opened

FIT = 1  # part of the key of weights that were fitted to importances; raise it if a change yields other codes
EDGE_MATRICES = 2  # most matrices in the format of embedding and output projection
EDGES = "int8"  # format of embedding and output projection if layers are encoded
CHUNK = 1 << 18  # elements encoded at a time, so that they stay in the cache of a core
DEPTH = 32  # pieces that wait between reading and writing
A = TypeVar("A")
B = TypeVar("B")
_ENCODING = threading.Lock()  # torch's number of threads belongs to the process
MOST_ENCODERS = 8  # threads, each with some MB of scratch memory


def forms(skeleton: Skeleton, codecs: str | Sequence[str | None] | None) -> dict[str, WeightFormat]:
    """Return the format of every matrix that is encoded: those of layers in `codecs`, embedding and head in EDGES.

    Routers, which choose the experts of a token, are not encoded: they are small, and a wrong choice does much harm.

    Args:
        skeleton: the model, or a range of its layers.
        codecs: a name in codec.forms.FORMS, or one for each layer of the whole model, of which None encodes nothing
            in its layer; None encodes nothing at all.
    """
    if codecs is None:
        return {}
    formats: dict[str, WeightFormat] = {}
    for number, layer in enumerate(skeleton.layers, skeleton.first):
        codec = codecs if isinstance(codecs, str) else codecs[number]
        if codec is None:
            continue
        experts = {slot.shape[0] for slot in layer.values() if slot.of_experts}
        for name, slot in layer.items():
            if slot.matrix is not None:
                count, rows, columns, turned = slot.matrix
                if count or rows not in experts:
                    formats[name] = WeightFormat(make_form(codec, rows, columns), count, turned)
    for name, shape in (skeleton.embedding, skeleton.head):
        if name in skeleton.wanted:
            formats[name] = WeightFormat(make_form(EDGES, *shape))
    return formats


def encoded(
    source: Path,
    files: Sequence[Path],
    stored: Mapping[str, Origin],
    chosen: Mapping[str, WeightFormat],
    importances: Importances | None = None,
    verifier: Verifier | None = None,
) -> dict[str, Origin]:
    """Return the location of the encoded bytes of every parameter in `chosen`, after writing the missing ones.

    Reading, encoding and writing overlap: a thread reads pieces of the parameters, some threads encode them, a thread
    writes the encoded bytes. A piece has at most max(CHUNK, step x columns) elements. In memory are at most

        (DEPTH + 2) x bytes of a piece, stored or encoded + scratch memory of a piece for each thread

    and, as a matrix that the checkpoint stores transposed is read whole, two such matrices. For matrices of 16 MB and
    more, this is less than DEPTH x the largest parameter by far. An interrupted run continues with the first file that
    is missing.

    Args:
        source: the model directory.
        files, stored: files of the checkpoint, and location of each parameter in them.
        chosen: format of each parameter to encode.
        importances: importances of a calibration; None for equal weights of all columns.
        verifier: see prepare.prepared.

    Raises:
        BadCheckpoint: the checkpoint or the encoded files cannot be read.
        OutOfMemory: the disk is full.
        InvalidInput: the cache cannot be written.
    """
    keys = {name: _key(name, form, importances) for name, form in chosen.items()}

    def build(directory: Path) -> None:
        model = fingerprint(files)
        shared = {name: hashlib.sha256(f"{model}{key}".encode()).hexdigest()[:32] for name, key in keys.items()}
        _write(directory, stored, chosen, importances, shared)

    counts = Counter(form.packed.name for form in chosen.values())
    several = [name for name in FORMS if counts[name] > EDGE_MATRICES] or [*counts][:1]
    label = f"{'+'.join(several)}{', calibrated' if importances else ''}"
    directory = prepared(source, files, build, json.dumps(keys), verifier, label)
    origins: dict[str, Origin] = {}
    for file in directory.glob("*.safetensors"):
        origins.update(read_header(file))
    for name, form in chosen.items():
        if name not in origins or origins[name].shape != form.shape:
            raise BadCheckpoint(f"{directory} lacks {name}; remove the directory, and it will be made again")
    return origins


def _key(name: str, form: WeightFormat, importances: Importances | None) -> str:
    """Return what the bytes of an encoded parameter depend on, besides the checkpoint."""
    packed = form.packed
    fit = [FIT, importances.digest] if importances is not None and packed.uses_importance else None
    return json.dumps([name, packed.name, packed.rows, packed.columns, form.count, form.transposed, fit])


def _write(
    directory: Path,
    stored: Mapping[str, Origin],
    chosen: Mapping[str, WeightFormat],
    importances: Importances | None,
    files: Mapping[str, str],
) -> None:
    """Write one file per parameter. files: their names without suffix, the same for the same bytes. A parameter that
    other encoded weights of the model hold in the same format is linked, so that mixes of formats share bytes."""
    final = {name: directory / f"{file}.safetensors" for name, file in files.items()}
    missing = [name for name in chosen if not final[name].exists() and not _linked(final[name])]
    if not missing:
        return
    total = sum(chosen[name].nbytes for name in missing)
    check_room(directory, "encoded weights", total)
    read = sum(stored[name].nbytes for name in missing)
    text = (
        f"encoding {len(missing)} matrices, once for this model and format ({read / 1e9:.2f} GB become"
        f" {total / 1e9:.2f} GB)"
    )
    pieces = (piece for name in missing for piece in _pieces(name, stored[name], chosen[name]))
    shapes = {name: chosen[name].shape for name in missing}
    with activity("encoding", text, read, "B", logging.INFO), TensorFiles(final, shapes) as out:
        in_threads(pieces, lambda piece: _encoded(piece, importances), out.write)


def in_threads(make: Iterable[A], change: Callable[[A], TensorPart], write: Callable[[TensorPart], None]) -> None:
    """Change pieces of matrices, each in one of some threads, while others are made and written.

    Pieces are too small to be divided among threads: starting and joining them takes half of the time. So each thread
    changes pieces of its own. A thread of the caller's that uses torch for the first time meanwhile gets few threads.
    """
    with _ENCODING:
        threads = torch.get_num_threads()
        workers = min(threads, MOST_ENCODERS)
        try:
            overlap(make, change, write, DEPTH, workers, lambda: torch.set_num_threads(threads // workers))
        finally:
            torch.set_num_threads(threads)  # new threads take the number that was set last, in any thread


def overlap(
    make: Iterable[A],
    change: Callable[[A], B],
    consume: Callable[[B], None],
    depth: int,
    workers: int = 1,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Call `consume(change(item))` for every item of `make`, in order.

    `make` runs in the caller's thread, `change` in `workers` threads, which first call `begin`, and in the caller's
    context (contextvars), `consume` in a thread. At most depth + 2 items exist: one is being made, `depth` wait or are
    being changed, one is being consumed. All threads have ended when this function returns or raises.

    Raises:
        The error that belongs to the earliest item; an interrupt of the caller's thread in any case. All items before
        it are consumed, so that finished work is not lost.
    """
    errors, context, room = list[BaseException](), copy_context(), threading.Semaphore(depth)

    def finish(future: Future[B]) -> None:
        room.release()
        try:
            if not errors:
                consume(future.result())
        except BaseException as error:  # raised by the caller
            errors.append(error)

    changing = ThreadPoolExecutor(workers, "flexengine-changing", begin)
    try:
        with ThreadPoolExecutor(1, "flexengine-consuming") as consuming, changing:
            for item in make:
                future = changing.submit(context.copy().run, change, item)
                del item  # the next item is made without it
                room.acquire()
                if errors:
                    break
                consuming.submit(finish, future)
                del future
    except Exception:
        if not errors:
            raise
    if errors:
        raise errors.pop()


def _linked(file: Path) -> bool:
    """Link a file that another directory of the cache holds under the same name and, if the directory is finished, with
    the listed checksum. Return whether there is one."""
    for other in file.parent.parent.glob(f"*/{file.name}"):
        try:
            sums = other.parent / SUMS
            if not sums.exists() or read_sums(sums).get(file.name) == digest_of(other, lambda _: tick()):
                os.link(other, file)
                return True
        except (OSError, BadCheckpoint):  # removed meanwhile, damaged, or a file system without links
            continue
    return False


class MatrixPiece(NamedTuple):
    """Rows of a matrix to encode."""

    name: str  # of the parameter
    number: int  # of the expert; 0 if there are no experts
    form: WeightFormat
    rows: Tensor  # [rows, columns], in the stored dtype


def _pieces(name: str, origin: Origin, form: WeightFormat) -> Iterator[MatrixPiece]:
    """Yield a parameter in pieces of whole blocks of rows, in the order of its encoded bytes."""
    matrices, size = max(1, form.count), origin.dtype.itemsize
    rows, columns, together = form.packed.rows, form.packed.columns, form.packed.step
    step = max(together, CHUNK // columns // together * together)
    for number in range(matrices):
        start = number * (origin.nbytes // matrices)
        whole = read_part(origin, start, rows * columns * size).view(columns, rows).t() if form.transposed else None
        for low in range(0, rows, step):
            count = min(step, rows - low)
            if whole is None:
                part = read_part(origin, start + low * columns * size, count * columns * size).view(count, columns)
            else:
                part = whole[low : low + count]
            yield MatrixPiece(name, number, form, part)


def _encoded(piece: MatrixPiece, importances: Importances | None) -> TensorPart:
    """Return the encoded bytes of a piece. Raise BadCheckpoint if the codec cannot hold one of its numbers."""
    part = piece.rows.float()
    importance = importances.of(piece.name, piece.number) if importances is not None else None
    if not bool(torch.isfinite(part).all()):
        raise BadCheckpoint(f"tensor {piece.name} holds NaN or infinite values")
    try:
        data = piece.form.packed.with_rows(len(part)).encode(part, importance)
    except InvalidInput as error:
        raise BadCheckpoint(f"tensor {piece.name}: {error}") from error
    advance(piece.rows.nbytes)
    return TensorPart(piece.name, data)


def read_part(origin: Origin, start: int, nbytes: int) -> Tensor:
    """Return nbytes at byte `start` of a parameter, as a flat tensor of its stored dtype."""
    data, begin, done = np.empty(nbytes, dtype=np.uint8), 0, 0
    for run in origin.runs:
        low, high = max(start, begin), min(start + nbytes, begin + run.nbytes)
        if low < high:
            with opened(run.path) as file:
                file.seek(run.start + low - begin)
                if file.readinto(memoryview(data)[done : done + high - low]) != high - low:  # type: ignore[arg-type]
                    raise BadCheckpoint(f"{run.path} ends before byte {run.start + high - begin}")
            done += high - low
        begin += run.nbytes
    return torch.from_numpy(data).view(origin.dtype)
