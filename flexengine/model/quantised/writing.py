"""Writing of a checkpoint in compressed-tensors' `pack-quantized`, with 4 bits per weight of the layers.

A matrix [out, in] of the checkpoint becomes `weight_packed` int32 [out, in / 8], `weight_scale` [out, in / 32] in its
dtype, and `weight_shape`. There are no zero points: vLLM's kernels for experts read none, and transformers 5.24 refuses
packed ones. Source: compressed_tensors/compressors/pack_quantized. Other tensors keep their bytes, and every tensor the
name and the file that it had, so that programs fuse them as they do for the unquantised checkpoint.
"""

import fcntl
import json
import logging
import os
import shutil
import stat
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexengine.activity import activity, advance
from flexengine.codec.symmetric import BITS_OF_4, GROUP_OF_4, fit_symmetric, words_of
from flexengine.config import sync_path
from flexengine.errors import BadCheckpoint, InvalidInput, UnsupportedModel, format_words, size
from flexengine.model.checkpoint import Origin, read_checkpoint
from flexengine.model.encoding import CHUNK, forms, in_threads, read_part
from flexengine.model.files import MODEL_FILES, read_object, regular_file
from flexengine.model.shards import INDEX, PlacedTensors, check_finite, check_room

if TYPE_CHECKING:
    from flexengine.model.encoding import Importances
    from flexengine.model.skeleton import Skeleton
    from flexengine.model.source import ModelSource

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ORIGINAL = "give the model's unquantised checkpoint"
_ROWS_OF_8 = 8  # kernels of other programs need multiples; matrices that they do not encode, such as gates, have 1
_COPIED = 1 << 20  # bytes of other tensors that are in memory at a time
_COMPANIONS: tuple[str, ...] = ("*.json", "tokenizer*", "*.model", "*.txt", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_COMPANIONS += ("*.jinja", "additional_chat_templates/*.jinja")
_MARK = ".converting"  # file in the directory of an unfinished conversion, which says that it may be erased
_OWN = {"config.json", "prepared.json", "places.json", INDEX}  # written anew, or of the cache


class Converted(NamedTuple):
    """What `convert` has written."""

    directory: Path
    files: int
    nbytes: int  # of all files
    matrices: int  # in 4 bits
    before: int  # bytes of these in the checkpoint
    after: int  # and encoded
    kept: list[str]  # matrices of layers that stay as they are


class _TensorPiece(NamedTuple):
    file: str
    name: str  # of the tensor
    first: int  # row of a matrix, or byte of another tensor
    data: Tensor  # rows [n, columns] in the stored dtype, or bytes


class _Place(NamedTuple):
    """The next bytes of a tensor of a file."""

    file: str
    name: str
    start: int
    data: Tensor


def convert(
    source: "ModelSource",
    skeleton: "Skeleton",
    locations: Mapping[str, Origin],
    target: Path,
    importances: Callable[[], "Importances | None"] = lambda: None,
) -> Converted:
    """Write a checkpoint whose layers have 4 bits per weight. Memory: some pieces of matrices, whatever their size.

    Args:
        source, skeleton, locations: of the opened model; location of each parameter.
        target: the directory to write, which must not exist. It appears when it is complete and on the disk; until then
            `target`.writing has its files, config.json as the last one, when all others are on the disk.
        importances: of columns; called once, after all checks.

    Raises:
        InvalidInput: the directory exists or cannot be written, or `target`.writing is not of a conversion.
        UnsupportedModel: the model is a GGUF file, or its matrices have a form that `pack-quantized` lacks.
        BadCheckpoint: a number is not finite, or a file to copy is no regular one of the model.
        OutOfMemory: the disk is too small.
    """
    directory, given = source.directory, source.given
    if any(file.suffix.lower() in MODEL_FILES for file in given):
        raise UnsupportedModel(f"{given[0]} is a GGUF file, whose tensors have names of their own; {_ORIGINAL}")
    tensors = read_checkpoint(directory, given)
    owners = matrices_of(skeleton, locations, tensors)
    fits = {name: owner for name, owner in owners.items() if _fits(tensors[name])}
    if any(parameter in skeleton.experts for name, (parameter, _) in owners.items() if name not in fits):
        # transformers reads only experts of which all matrices are quantised, or none
        fits = {name: owner for name, owner in fits.items() if owner[0] not in skeleton.experts}
    if not fits:
        raise UnsupportedModel(f"no matrix of {directory} has rows of whole groups of {GROUP_OF_4} columns")
    layout = _layout(tensors, fits)
    total = sum(_size(entry) for file in layout.values() for entry in file.values())
    before, after = sum(tensors[name].nbytes for name in fits), sum(map(_size, _entries_of(tensors, fits).values()))
    config, others = read_object(directory / "config.json"), companions(directory)
    try:
        with new_directory(target) as writing:
            check_room(writing, f"the checkpoint {target}", total, "give a directory on a disk with room")
            found = importances()
            text = f"writing {len(fits)} matrices in {BITS_OF_4} bits ({size(before)} become {size(after)})"
            with activity("converting", text, sum(t.nbytes for t in tensors.values()), "B", logging.INFO):
                _write(writing, layout, tensors, fits, found)
            for file in others:
                (copy := writing / file.relative_to(directory)).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
            if layout.keys() != {"model.safetensors"}:
                places = {name: file for file, entries in layout.items() for name in entries}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
                (writing / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            own = {"quantization_config": settings(tensors, fits, skeleton)}
            sync_files(writing)
            (writing / "config.json").write_text(json.dumps(config | own, indent=2) + "\n", encoding="utf-8")
        made = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    except OSError as error:
        if isinstance(error.filename, str) and Path(error.filename).is_relative_to(directory):
            raise BadCheckpoint(f"{directory} cannot be read: {error}") from error
        raise InvalidInput(f"{target} cannot be written: {error}; give a directory on a disk with room") from error
    kept = sorted({*owners} - {*fits})
    return Converted(target, len(made), sum(made), len(fits), before, after, kept)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory, which becomes `target` when the block ends; it is removed if the block raises. Remains
    of a killed process are removed first.

    Raises:
        InvalidInput: `target` exists, another process writes it, or `target`.writing exists and is a file, a link or a
            directory with files that none of these calls has made.
    """
    if os.path.lexists(target):
        raise InvalidInput(f"{target} exists; give another directory, or remove it")
    writing = target.with_name(f"{target.name}.writing")
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        writing.mkdir()
    foreign = f"{writing} exists and is not of a conversion; remove it, or name another OUT"
    if not stat.S_ISDIR(writing.lstat().st_mode):
        raise InvalidInput(foreign)
    descriptor = os.open(writing, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _has_lock(descriptor, writing):
            raise InvalidInput(f"another process writes {target}; wait for it, or give another directory")
        if any(writing.iterdir()) and not os.path.lexists(writing / _MARK):
            raise InvalidInput(foreign)
        try:
            (writing / _MARK).touch()
            _erase_files(writing)
            yield writing
            if os.path.lexists(target):
                raise InvalidInput(f"{target} was made meanwhile; give another directory, or remove it")
            sync_files(writing)
            (writing / _MARK).unlink()
            sync_path(writing)
            writing.rename(target)
            sync_path(target.parent)
        except BaseException:
            with suppress(OSError):
                _erase_files(writing)  # the mark goes last
                shutil.rmtree(writing)
            raise
    finally:
        os.close(descriptor)


def _has_lock(descriptor: int, directory: Path) -> bool:
    """Lock an open directory. Return False if another process has it, or has renamed or removed it before."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), directory.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _erase_files(directory: Path) -> None:
    """Remove all from the directory of a conversion but its mark."""
    for file in list(directory.iterdir()):
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        elif file.name != _MARK:
            file.unlink()


def sync_files(directory: Path) -> None:
    """Let the disk have all files of a directory, and their names."""
    for file in (*directory.rglob("*"), directory):
        sync_path(file)


def matrices_of(
    skeleton: "Skeleton", locations: Mapping[str, Origin], tensors: Mapping[str, Origin]
) -> dict[str, tuple[str, int]]:
    """Return the tensors that the matrices of layers consist of, each with its parameter and the number of the expert.
    Raise UnsupportedModel if a matrix is no tensor [out, in] of its own, or a product reads quantised numbers."""
    by_file: dict[Path, list[tuple[int, str]]] = {}
    for name, origin in tensors.items():
        for run in origin.runs:
            by_file.setdefault(run.path, []).append((run.start, name))
    for starts in by_file.values():
        starts.sort()
    chosen = {name: form for name, form in forms(skeleton, "int4").items() if name in _of_layers(skeleton)}
    owners: dict[str, tuple[str, int]] = {}
    for name, form in chosen.items():
        if (stored := locations[name].form) is not None:
            kinds = format_words(stored.packed.name)
            raise UnsupportedModel(f"{name} is quantised already ({kinds}); {_ORIGINAL}")
        begin, each = 0, locations[name].nbytes // max(1, form.count)
        for run in locations[name].runs:
            starts = by_file[run.path]
            owner = starts[bisect(starts, (run.start, chr(0x10FFFF))) - 1][1]
            if len(tensors[owner].shape) != 2 or form.transposed or not owner.endswith(".weight"):
                shape = f"{owner} {list(tensors[owner].shape)}"
                what = "a stack of experts" if len(tensors[owner].shape) > 2 else "stored as [in, out]"
                raise UnsupportedModel(f"{shape} is {what}, which pack-quantized cannot hold; --weights of run can")
            owners.setdefault(owner, (name, begin // each))
            begin += run.nbytes
    return owners


def _of_layers(skeleton: "Skeleton") -> set[str]:
    return {name for layer in skeleton.layers for name in layer}


def _fits(origin: Origin) -> bool:
    return origin.shape[0] % _ROWS_OF_8 == 0 and origin.shape[1] % GROUP_OF_4 == 0 and origin.dtype in _DTYPES


Entry = tuple[torch.dtype, tuple[int, ...]]


def _entries(name: str, origin: Origin) -> dict[str, Entry]:
    """Return dtype and shape of the tensors that a matrix becomes."""
    rows, columns = origin.shape
    return {
        f"{name}_packed": (torch.int32, (rows, columns * BITS_OF_4 // 32)),
        f"{name}_scale": (origin.dtype, (rows, columns // GROUP_OF_4)),
        f"{name}_shape": (torch.int64, (2,)),
    }


def _entries_of(tensors: Mapping[str, Origin], names: Iterable[str]) -> dict[str, Entry]:
    return {own: entry for name in names for own, entry in _entries(name, tensors[name]).items()}


def _layout(tensors: Mapping[str, Origin], fits: Mapping[str, Any]) -> dict[str, dict[str, Entry]]:
    """Return dtype and shape of all tensors, by file."""
    layout: dict[str, dict[str, Entry]] = {}
    for name, origin in tensors.items():
        entries = _entries(name, origin) if name in fits else {name: (origin.dtype, origin.shape)}
        layout.setdefault(origin.runs[0].path.name, {}).update(entries)
    return layout


def _size(entry: Entry) -> int:
    return torch.Size(entry[1]).numel() * entry[0].itemsize


def _write(
    directory: Path,
    layout: Mapping[str, Mapping[str, Entry]],
    tensors: Mapping[str, Origin],
    fits: Mapping[str, tuple[str, int]],
    importances: "Importances | None",
) -> None:
    """Write the files of weights, one after the other."""
    file: PlacedTensors | None = None
    current = ""

    def write(places: list[_Place]) -> None:
        nonlocal file, current
        for place in places:
            if place.file != current:
                if file is not None:
                    file.close()
                file, current = PlacedTensors(directory / place.file, layout[place.file]), place.file
            assert file is not None
            file.write(place.name, place.start, place.data)

    def change(piece: _TensorPiece) -> list[_Place]:
        advance(piece.data.nbytes)
        if piece.name not in fits:
            return [_Place(piece.file, piece.name, piece.first, piece.data)]
        name, number = fits[piece.name]
        check_finite(piece.name, piece.data)
        matters = importances.of(name, number) if importances is not None else None
        words, scales = encoded_rows(piece.data, matters)
        names = f"{piece.name}_packed", f"{piece.name}_scale"
        rows = zip(names, (words, scales), strict=True)
        places = [_Place(piece.file, own, piece.first * x[0].nbytes, x) for own, x in rows]
        shape = torch.tensor(tensors[piece.name].shape)
        return places if piece.first else [*places, _Place(piece.file, f"{piece.name}_shape", 0, shape)]

    in_threads(_pieces(tensors, fits), change, write)
    if file is not None:
        file.close()


def _pieces(tensors: Mapping[str, Origin], fits: Mapping[str, Any]) -> Iterator[_TensorPiece]:
    """Yield all tensors in pieces, in the order of their files."""
    for name, origin in sorted(tensors.items(), key=lambda item: item[1].runs):
        file, raw = origin.runs[0].path.name, replace(origin, dtype=torch.uint8)
        if name not in fits:
            for start in range(0, origin.nbytes, _COPIED) or [0]:
                yield _TensorPiece(file, name, start, read_part(raw, start, min(_COPIED, origin.nbytes - start)))
            continue
        rows, columns = origin.shape
        step, width = max(1, CHUNK // columns), columns * origin.dtype.itemsize
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield _TensorPiece(file, name, first, read_part(origin, first * width, count * width).view(count, columns))


def encoded_rows(rows: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the words of some rows of a matrix, int32 [n, columns / 8], and their scales, [n, columns / GROUP_OF_4].

    Args:
        rows: [n, columns], in the stored dtype.
        importance: as of `fit_symmetric`.
    """
    codes, scales = fit_symmetric(rows.float(), rows.dtype, importance)
    return words_of(codes), scales


def settings(tensors: Mapping[str, Origin], fits: Iterable[str], skeleton: "Skeleton") -> dict[str, Any]:
    """Return the quantization_config. Modules that stay as they are have both the name that the checkpoint gives them
    and that of transformers."""
    ours = set(fits)
    plain = [n for n, o in tensors.items() if n not in ours and n.endswith(".weight") and len(o.shape) == 2]
    names = {skeleton.head[0], *plain, *(skeleton.loading.target(name)[0] for name in plain)}
    weights = {"num_bits": BITS_OF_4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_OF_4}
    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
        "ignore": sorted(name.removesuffix(".weight") for name in names),
        "kv_cache_scheme": None,
    }


def companions(directory: Path) -> list[Path]:
    """Return the files of a model besides its weights and its config, such as those of its tokenizer. Raise
    BadCheckpoint as `regular_file`; directories are left out."""
    found = {file for pattern in _COMPANIONS for file in directory.glob(pattern) if not file.is_dir()}
    return sorted(
        regular_file(file) for file in found if file.name not in _OWN and not file.name.endswith("index.json")
    )
