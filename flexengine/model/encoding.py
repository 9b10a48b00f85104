"""Encoded weights: which matrices of a model are encoded, the files that they are written to, once for a format, and
the importances of columns that they may be fitted to."""

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from flexengine.activity import activity, advance, message, tick
from flexengine.codec.forms import FORMS, Form, WeightFormat, make_form
from flexengine.errors import BadCheckpoint, InvalidInput, format_words, size
from flexengine.model.checkpoint import Origin, read_header
from flexengine.model.prepare import fingerprint, prepared
from flexengine.model.row_pairs import in_order
from flexengine.model.shards import TensorFiles, TensorPart, check_finite, check_room
from flexengine.model.skeleton import ParamRef, Skeleton
from flexengine.model.verify import SUMS, Verifier, digest_of, read_sums
from flexengine.system.read_retries import opened

FIT = 1  # part of the key of weights that were fitted to importances; raise it if a change yields other codes
EDGE_MATRICES = 2  # most matrices in the format of embedding and output projection
EDGES = "int8"  # format of embedding and output projection if layers are encoded
CHUNK = 1 << 18  # elements encoded at a time, so that they stay in the cache of a core
DEPTH = 32  # pieces that wait between reading and writing
A = TypeVar("A")
B = TypeVar("B")
_ENCODING = threading.Lock()  # torch's number of threads belongs to the process
MOST_ENCODERS = 8  # threads, each with some MB of scratch memory
COARSE, FINE = 2.0**-10, 2.0**-50  # units that squares are split into
SQUARED = 256  # tokens whose squares are in memory at a time
PRIOR = 16  # a prior of this many tokens with equal columns limits the weight of a few tokens


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
        experts = {slot.matrix[0] for slot in layer.values() if slot.matrix is not None}
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
    importances: "Importances | None" = None,
    verifier: Verifier | None = None,
) -> dict[str, Origin]:
    """Return the location of the encoded bytes of every parameter in `chosen`, after writing the missing ones.

    Reading, encoding and writing overlap: a thread reads pieces of the parameters, some threads encode them, a thread
    writes the encoded bytes. A piece has at most max(CHUNK, step x columns) elements. In memory are at most

        (DEPTH + 2) x bytes of a piece, stored or encoded + scratch memory of a piece for each thread

    and, as a matrix that the checkpoint stores transposed, or whose rows are encoded together (GPTQ, AWQ,
    bitsandbytes), is read whole, two such matrices, decoded. For matrices of 16 MB and
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
    keys = dict[str, str]()  # what the bytes of an encoded parameter depend on, besides the checkpoint
    for name, form in chosen.items():
        packed = form.packed
        fit = [FIT, importances.digest] if importances is not None and packed.uses_importance else None
        key = [name, packed.name, packed.rows, packed.columns, form.count, form.transposed, fit]
        own = stored[name].form  # the config decides how the bytes of a quantised checkpoint are read
        keys[name] = json.dumps(key if own is None else [*key, repr(own)])

    def build(directory: Path) -> None:
        """Write one file per parameter, which has the same name for the same bytes: a parameter that other encoded
        weights of the model hold in the same format is linked, so that mixes of formats share bytes."""
        model = fingerprint(files)
        names = {name: hashlib.sha256(f"{model}{key}".encode()).hexdigest()[:32] for name, key in keys.items()}
        final = {name: directory / f"{file}.safetensors" for name, file in names.items()}
        missing = [name for name in chosen if not final[name].exists() and not _linked(final[name])]
        if not missing:
            return
        if again := {format_words(form.packed.name) for name in missing if (form := stored[name].form) is not None}:
            kinds = ", ".join(sorted({form.packed.name for form in chosen.values()}))
            text = f"{files[0].name} holds weights in {', '.join(sorted(again))}, which are encoded again as {kinds}"
            message(f"{text}: the errors of both add up; without --weights they stay as they are")
        total = sum(chosen[name].nbytes for name in missing)
        check_room(directory, "encoded weights", total)
        read = sum(decoded_size(stored[name]) for name in missing)
        sizes = f"{size(read)} become {size(total)}"
        text = f"encoding {len(missing)} matrices, once for this model and format ({sizes})"
        every = (piece for name in missing for piece in pieces(name, stored[name], chosen[name]))
        shapes = {name: chosen[name].shape for name in missing}
        with activity("encoding", text, read, "B", logging.INFO), TensorFiles(final, shapes) as out:
            in_threads(every, lambda piece: _encoded(piece, importances), out.write)

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


def in_threads(make: Iterable[A], change: Callable[[A], B], write: Callable[[B], None]) -> None:
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


def pieces(name: str, origin: Origin, form: WeightFormat) -> Iterator[MatrixPiece]:
    """Yield a parameter in pieces of whole blocks of rows, in the order of its encoded bytes."""
    matrices, size = max(1, form.count), origin.dtype.itemsize
    rows, columns, together = form.packed.rows, form.packed.columns, form.packed.step
    step = max(together, CHUNK // columns // together * together)
    turned = form.transposed and origin.form is None  # encoded matrices are decoded as [out, in]
    parts = [] if origin.form is None else origin.form.packed.matrices()
    apart = any(part.step > step for *_, part in parts)  # more rows than a piece has are decoded together
    for number in range(matrices):
        start, whole = number * (decoded_size(origin) // matrices), None
        if turned or apart:
            whole = read_part(origin, start, rows * columns * size).view((columns, rows) if turned else (rows, columns))
            whole = whole.t() if turned else whole
        for low in range(0, rows, step):
            count = min(step, rows - low)
            if whole is None:
                part = read_part(origin, start + low * columns * size, count * columns * size).view(count, columns)
            else:
                part = whole[low : low + count]
            yield MatrixPiece(name, number, form, part)


def _encoded(piece: MatrixPiece, importances: "Importances | None") -> TensorPart:
    """Return the encoded bytes of a piece. Raise BadCheckpoint if the codec cannot hold one of its numbers."""
    part = piece.rows.float()
    importance = importances.of(piece.name, piece.number) if importances is not None else None
    check_finite(piece.name, part)
    try:
        data = piece.form.packed.with_rows(len(part)).encode(part, importance)
    except InvalidInput as error:
        raise BadCheckpoint(f"tensor {piece.name}: {error}") from error
    advance(piece.rows.nbytes)
    return TensorPart(piece.name, data)


def decoded_size(origin: Origin) -> int:
    """Return the bytes of a parameter in its dtype, decoded."""
    return prod(origin.shape) * origin.dtype.itemsize


def read_part(origin: Origin, start: int, nbytes: int) -> Tensor:
    """Return nbytes at byte `start` of a parameter, as a flat tensor of its dtype: of the decoded numbers, if they are
    encoded."""
    if origin.form is not None:
        width = 4 * origin.form.packed.columns
        low, skipped = divmod(start, width)
        rows = _decoded_rows(origin.raw, origin.form.packed, low, -(-(start + nbytes) // width))
        return rows.view(-1)[skipped // 4 : (skipped + nbytes) // 4]
    data, begin, done = np.empty(nbytes, dtype=np.uint8), 0, 0
    for run in in_order(origin) if origin.pairs else origin.runs:
        low, high = max(start, begin), min(start + nbytes, begin + run.nbytes)
        if low < high:
            with opened(run.path) as file:
                file.seek(run.start + low - begin)
                if file.readinto(memoryview(data)[done : done + high - low]) != high - low:  # type: ignore[arg-type]
                    raise BadCheckpoint(f"{run.path} ends before byte {run.start + high - begin}")
            done += high - low
        begin += run.nbytes
    return torch.from_numpy(data).view(origin.dtype)


def _decoded_rows(raw: Origin, form: Form, low: int, high: int) -> Tensor:
    """Return rows low .. high - 1 of matrices that are encoded one after the other, fp32."""
    parts = list[Tensor]()
    for number in range(low // form.rows, -(-high // form.rows)):
        for first, start, part in form.matrices():
            row, at = number * form.rows + first, number * form.nbytes + start
            begin, end = max(low, row), min(high, row + part.rows)
            if begin < end:
                first = (begin - row) // part.step * part.step
                last = min(part.rows, -(-(end - row) // part.step) * part.step)
                data = torch.cat([read_part(raw, at + offset, nbytes) for offset, nbytes in part.spans(first, last)])
                decoded = part.with_rows(last - first).dequantize(data)
                parts.append(decoded[begin - row - first : end - row - first])
    return torch.cat(parts)


# Importance of each column of a matrix: the mean square of its inputs over the tokens of a text. If the columns of the
# inputs are independent, the mean squared error of an output is the sum, over the columns, of the squared error of the
# weight times the importance of the column.


@dataclass(frozen=True)
class Importances:
    """Importances of all matrices of a model."""

    columns: Mapping[str, Tensor]  # by parameter, fp32 [columns]; for experts [experts, columns]
    digest: str  # of the file that holds the importances

    def of(self, name: str, number: int) -> Tensor | None:
        """Return the importances [columns] of expert `number` (0 for a single matrix), None if no token reached it."""
        columns = self.columns.get(name)
        if columns is None:
            return None
        own = columns[number] if columns.dim() > 1 else columns
        return own if bool(own.any()) else None


def load_importances(path: Path) -> Importances:
    """Read the importances that `Calibration` saved. Raise BadCheckpoint if the file cannot be read."""
    try:
        data = path.read_bytes()
        return Importances(safetensors.torch.load(data), hashlib.sha256(data).hexdigest()[:32])
    except (OSError, safetensors.SafetensorError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; remove its directory to calibrate again") from error


class ImportanceRecorder:
    """Sums of the squared inputs of all matrices in a model's layers. Memory: 16 bytes per column, and some MB.

    The sums are independent of the batches. Each square is split into a multiple of COARSE and a multiple of FINE;
    smaller parts are rounded off. For squares below 2^30, fp64 adds up to 2^13 multiples of either unit exactly.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._slots: dict[str, ParamRef] = {}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, list[int]] = {}
        for name, slot in (item for layer in skeleton.layers for item in layer.items()):
            if slot.matrix is not None:
                experts, _, columns, _ = slot.matrix
                self._slots[name], self._tokens[name] = slot, [0] * max(1, experts)
                self._sums[name] = torch.zeros(2, max(1, experts), columns, dtype=torch.float64)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the inputs of the modules while the block runs. Hooks are installed before and removed after."""
        with ExitStack() as watched:
            for name, slot in self._slots.items():
                if len(slot.shape) == 3:
                    watch = slot.module.__dict__.setdefault("watch", {})
                    watch[slot.name] = partial(self._note, name)
                    watched.callback(slot.module.__dict__.pop, "watch", None)
                else:
                    note = partial(self._note, name, 0)
                    watched.enter_context(slot.module.register_forward_pre_hook(lambda _, args, note=note: note(*args)))
            yield

    def _note(self, name: str, number: int, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        for part in torch.split(rows, SQUARED):
            for sums, units in zip(self._sums[name], exact_parts(part.double().square()), strict=True):
                sums[number] += units.sum(0).cpu()
        self._tokens[name][number] += len(rows)

    def means(self) -> dict[str, Tensor]:
        """Return the importances as in `Importances.columns`; 0 for matrices that no token reached."""
        result = {}
        for name, (coarse, fine) in self._sums.items():
            sums = coarse + fine
            tokens = torch.tensor(self._tokens[name], dtype=torch.float64)[:, None]
            flat = sums.mean(1, keepdim=True) / tokens.clamp(min=1)
            means = ((sums + PRIOR * flat) / (tokens + PRIOR)).float()
            result[name] = means if len(self._slots[name].shape) == 3 else means[0]
        return result


def exact_parts(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return multiples of COARSE and of FINE, fp64, whose sum differs from `squares` by at most FINE / 2."""
    coarse = torch.round(squares / COARSE) * COARSE
    return coarse, torch.round((squares - coarse) / FINE) * FINE
