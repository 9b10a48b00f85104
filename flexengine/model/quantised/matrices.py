"""Quantised matrices of safetensors checkpoints: the tensors that each consists of, as locations of parameters.

A scheme (a module beside this one) finds the matrices. Their bytes stay as they are: a matrix is the bytes of its
tensors, one after the other, in a format of `codec`. From then on it has the name that an unquantised one would have.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexengine.codec.forms import Form, WeightFormat
from flexengine.codec.mixed import Mixed
from flexengine.codec.scaled import SCALES
from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.checkpoint import ByteRange, Origin
from flexengine.model.files import AGAIN, PLAIN
from flexengine.system.read_retries import opened

ROWS = 1 << 40  # as in model/checkpoint.py: a row is numbered source * ROWS + row
SCALE_KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
SCALE_KINDS |= dict.fromkeys((torch.float8_e8m0fnu, torch.uint8), "e8m0")


class Matrix(NamedTuple):
    """A quantised matrix, or a stack of them, one for each expert."""

    name: str  # of the tensor that an unquantised checkpoint has
    shape: tuple[int, ...]  # of this tensor
    form: WeightFormat
    parts: tuple[str, ...]  # tensors whose bytes it consists of; of stacks, each expert's bytes follow each other
    scales: tuple[str, ...] = ()  # those of the parts whose numbers must be finite
    others: tuple[str, ...] = ()  # tensors that say what the format says, or that exact products do not use


def located(matrix: Matrix, tensors: Mapping[str, Origin]) -> Origin:
    """Return the location of a matrix. Raise BadCheckpoint if its tensors have other bytes than its format."""
    count, runs = max(1, matrix.form.count), list[ByteRange]()
    for number in range(count):
        for part in matrix.parts:
            (run,) = tensors[part].runs
            each = run.nbytes // count
            runs.append(ByteRange(run.path, run.start + number * each, each))
    if sum(run.nbytes for run in runs) != matrix.form.nbytes:
        sizes = ", ".join(f"{part} {list(tensors[part].shape)}" for part in matrix.parts)
        name = matrix.form.packed.name
        raise BadCheckpoint(f"the tensors {sizes} are no matrix {list(matrix.shape)} in {name}; {AGAIN}")
    return Origin(tuple(runs), torch.float32, matrix.shape, matrix.form)


def values_of(origin: Origin) -> Tensor:
    """Return the numbers of a plain tensor, on the CPU. Raise BadCheckpoint if the file ends before."""
    ((path, start, nbytes),) = origin.runs
    with opened(path) as file:
        file.seek(start)
        return _read(file, path, nbytes).view(origin.dtype).view(origin.shape)


def _read(file: Any, path: Any, nbytes: int) -> Tensor:
    data = np.empty(nbytes, dtype=np.uint8)
    if file.readinto(data.data) != nbytes:
        raise BadCheckpoint(f"{path} ends within its tensors; {AGAIN}")
    return torch.from_numpy(data)


def check_scales(names: Iterable[str], tensors: Mapping[str, Origin]) -> None:
    """Raise BadCheckpoint if a scale is infinite or NaN. The tensors are read, in the order of the files."""
    ordered = sorted(names, key=lambda name: tensors[name].runs)
    for path, group in groupby(ordered, key=lambda name: tensors[name].runs[0].path):
        with opened(path) as file:
            for name in group:
                origin = tensors[name]
                file.seek(origin.runs[0].start)
                values = SCALES[SCALE_KINDS[origin.dtype]][1](_read(file, path, origin.nbytes))
                if not bool(values.isfinite().all()):
                    where = int((~values.isfinite()).nonzero()[0])
                    index = [int(i) for i in np.unravel_index(where, origin.shape)] if origin.shape else []
                    fault = f"{path}: tensor {name} holds the scale {float(values[where])} at {index}"
                    raise BadCheckpoint(f"{fault}, and a scale must be finite; {AGAIN}, or {PLAIN}")


def joined(name: str, numbers: Tensor, names: Sequence[str], sources: Sequence[Origin]) -> Origin:
    """Return the location of a parameter that is made of rows of quantised matrices.

    Args:
        name: of the parameter.
        numbers: int64 [rows, 1], or [experts, rows, 1]: the rows that it consists of, each source * ROWS + row.
        names, sources: the matrices.

    Raises:
        BadCheckpoint: only some of the matrices are quantised, or experts have several formats.
        UnsupportedModel: the parameter has a part of rows that are encoded together, or nested scales of experts.
    """
    if plain := [own for own, source in zip(names, sources, strict=True) if source.form is None]:
        raise BadCheckpoint(f"{name} is made of quantised tensors and of {plain[0]}, which is plain; {PLAIN}")
    count = len(numbers) if numbers.dim() > 2 else 0
    forms, runs = dict[Form, int](), list[ByteRange]()
    for own in numbers.reshape(max(1, count), -1):
        parts = list[Form]()
        for number, low, high in _rows(own):
            source = sources[number]
            assert source.form is not None
            packed = source.form.packed
            expert, first = divmod(low, packed.rows)
            last = high - expert * packed.rows
            if first % packed.step or (last % packed.step and last != packed.rows) or source.form.transposed:
                fault = f"{name} has rows {first} to {last} of {names[number]}"
                raise UnsupportedModel(f"{fault}, of which {packed.step} in {packed.name} belong together; {PLAIN}")
            parts.append(packed.with_rows(last - first))
            for start, nbytes in packed.spans(first, last):
                runs += _cut(source.runs, expert * packed.nbytes + start, nbytes)
        rows, columns = sum(part.rows for part in parts), parts[0].columns
        forms.setdefault(parts[0] if len(parts) == 1 else Mixed(rows, columns, tuple(parts)), len(forms))
    if len(forms) > len({form.name for form in forms}):
        fault = f"experts of {name} have nested scales, each with an offset of its own, which is not read"
        raise UnsupportedModel(f"{fault}; {PLAIN}")
    if len(forms) > 1:
        kinds = " and ".join(form.name for form in forms)
        raise BadCheckpoint(f"experts of {name} are in {kinds}; all experts of a layer must have one format; {PLAIN}")
    (form,) = forms
    return Origin(tuple(runs), torch.float32, (*numbers.shape[:-1], form.columns), WeightFormat(form, count))


def _rows(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield source, first row and last row + 1 of each run of rows."""
    breaks = (numbers.diff() != 1).nonzero().view(-1) + 1
    for low, high in pairwise([0, *breaks.tolist(), len(numbers)]):
        source, row = divmod(int(numbers[low]), ROWS)
        yield source, row, row + high - low


def _cut(runs: Iterable[ByteRange], start: int, nbytes: int) -> Iterator[ByteRange]:
    """Yield nbytes at byte `start` of byte ranges that follow each other."""
    begin = 0
    for run in runs:
        low, high = max(start, begin), min(start + nbytes, begin + run.nbytes)
        if low < high:
            yield ByteRange(run.path, run.start + low - begin, high - low)
        begin += run.nbytes


def zero_biases(unused: Iterable[str], tensors: Mapping[str, Origin]) -> dict[str, str]:
    """Return what is known of unused biases of quantised matrices that are 0, by name: AutoGPTQ gives one to each."""
    beside = {name: tensors.get(f"{name.removesuffix('bias')}weight") for name in unused if name.endswith(".bias")}
    found = [name for name, weight in beside.items() if weight is not None and weight.form is not None]
    return {name: "biases of 0" for name in found if not bool(values_of(tensors[name]).any())}


def check_matrices(skeleton: Any, stored: Mapping[str, Origin]) -> None:
    """Raise UnsupportedModel if a quantised parameter is read otherwise than by products, which decode it."""
    slots = {name: slot for layer in skeleton.layers for name, slot in layer.items()}
    for name, origin in stored.items():
        if (form := origin.form) is None:
            continue
        packed, slot = form.packed, slots.get(name)
        own = (form.count, packed.rows, packed.columns, form.transposed)
        apart = name == skeleton.head[0] != skeleton.embedding[0] and packed.step < packed.rows
        if apart or (slot is not None and slot.matrix == own):
            continue
        what = "no matrix of a product of this model"
        if name in (skeleton.embedding[0], skeleton.head[0]):
            what = "the embedding, of which rows are read" if name == skeleton.embedding[0] else "the head, in one part"
        raise UnsupportedModel(f"{name} is quantised ({packed.name}), but it is {what}; {PLAIN}")


def blocks(shape: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
    """Return the number of blocks down the rows and along the columns of a matrix; the last ones may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(shape)
