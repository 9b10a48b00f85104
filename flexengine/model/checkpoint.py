"""Locations of the tensors of a checkpoint, read from safetensors headers, which are checked, and of each parameter.

No data is read, except by `differ`. transformers renames tensors, stacks experts and cuts fused projections when it
loads a checkpoint. Here its conversions run on row numbers instead of weights: the numbers 0 .. a*b-1 in shape
[a, b, 1] represent a tensor of shape [a, b, c]. The result gives the rows of which tensors a parameter consists of, and
so its byte ranges, and weights can be streamed from the user's own files. A conversion that changes the order inside
rows (a transpose) is refused.
"""

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from logging import WARNING
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch

from flexengine.activity import message
from flexengine.codec.forms import WeightFormat
from flexengine.errors import BadCheckpoint, UnsupportedModel, json_kind
from flexengine.model.files import (
    ADAPTER_WEIGHTS,
    AGAIN,
    PLACES,
    PLAIN,
    check_complete,
    check_content,
    indexed_files,
    regular_file,
)
from flexengine.system.read_retries import opened

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_MAX_DIMENSIONS = 64  # torch's limit
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
# Buffers that old checkpoints contain, although models compute them.
_BUFFERS = (
    r"(rotary|rotary_emb|rotary_pos_emb|rope)\.(inv_freq|freqs|cos_cached|sin_cached)$",
    r"\.(attn|attention)\.(bias|masked_bias)$",
    r"(^|\.)position_ids$",
)
# Tensors of other uses of a model, which generation without them does not read.
_EXTRAS = {
    "heads for values and classes": r"^(\w+\.)?(v_head|value_head|reward_head|score|classifier|classification_head|"
    r"regression_head|qa_outputs|pooler)\.",
    "scales of an 8-bit KV cache": r"\.([kvq]|kv|prob)_(scale|zero_point)$|\.[kv]_proj\.output_scale$",
    "layers and heads for multi-token prediction": r"^(\w+\.)?(mtp(_\w+)?|medusa_heads?)\.",
}
_TOWERS = r"(^|\.)(vision|visual|audio|multi_modal)\w*\."  # names of parts for images and sound
_LAYER = re.compile(r"(.*?(?:^|\.)(?:layers|h|blocks))\.(\d+)\.(.+)")
_WITHOUT = "left out: "
_PIECE = 1 << 24  # bytes compared at a time
_ROWS = 1 << 40  # more than any tensor has; a row is numbered source * _ROWS + row


class ByteRange(NamedTuple):
    """The nbytes at byte `start` of the file `path`."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Origin:
    """Location of a tensor or parameter in the checkpoint: byte ranges whose concatenation it is."""

    runs: tuple[ByteRange, ...]
    dtype: torch.dtype  # of the stored numbers or, if they are encoded, of decoded ones
    shape: tuple[int, ...]
    form: WeightFormat | None = None  # format in which the numbers are encoded; None if they are plain
    pairs: tuple[int, int] | None = None  # heads, and rows of a head, if rows lie in pairs (row_pairs.py)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored parameter."""
        return sum(run.nbytes for run in self.runs)

    @property
    def raw(self) -> "Origin":
        """The same bytes as a parameter of their own: uint8 in the shape of the format, if the numbers are encoded."""
        return self if self.form is None else replace(self, dtype=torch.uint8, shape=self.form.shape, form=None)


def read_header(path: Path) -> dict[str, Origin]:
    """Return the tensors of one safetensors file by name.

    The rules of the safetensors library apply: no name occurs twice, and the tensors fill the data of the file without
    overlaps or gaps. Raise BadCheckpoint if the file breaks a rule or cannot be read."""
    regular_file(path)
    try:
        size = os.path.getsize(path)
        with opened(path) as f:
            start = f.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                check_content(path)
                fault = f"has {size:,} bytes but a header of {length:,}: it is cut off, or no safetensors file"
                raise BadCheckpoint(f"{path} {fault if len(start) == 8 else f'has {size} bytes'}; {AGAIN}")
            header = json.loads(f.read(length).decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        if not isinstance(header, dict):
            raise BadCheckpoint(f"{path}: its safetensors header is {json_kind(header)}, not an object; {AGAIN}")
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except BadCheckpoint:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: unreadable safetensors header: {error!r}; {AGAIN}") from error
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].runs):
        first = stored.runs[0].start
        if first != end:
            fault = "overlaps another" if first < end else "lies after a gap"
            raise BadCheckpoint(f"{path}: tensor {name} at byte {first} {fault} (expected at {end})")
        end += stored.nbytes
    if end != size:
        raise BadCheckpoint(f"{path}: {size - end} bytes after the last tensor belong to no tensor; {AGAIN}")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return entries


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> Origin:
    begin, end = entry["data_offsets"]
    shape: tuple[int, ...] = tuple(entry["shape"])
    if entry["dtype"] not in DTYPES:
        fault = f"{path}: tensor {name} has dtype {entry['dtype']}, which is not supported"
        raise BadCheckpoint(fault + f"; {PLAIN}" * (str(entry["dtype"])[:2] in ("F8", "F6", "F4")))
    dtype = DTYPES[entry["dtype"]]
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape)):
        raise BadCheckpoint(f"{path}: tensor {name} has offsets {begin}..{end} and shape {shape[:_MAX_DIMENSIONS]}")
    if end - begin != math.prod(shape) * dtype.itemsize or base + end > size:
        place = f"{path}: tensor {name} of shape {shape} lies at bytes {begin}..{end} of a file of {size}"
        raise BadCheckpoint(f"{place}: the file is truncated or its header wrong; {AGAIN}")
    return Origin((ByteRange(path, base + begin, end - begin),), dtype, shape)


def read_checkpoint(directory: Path, given: Sequence[Path] = ()) -> dict[str, Origin]:
    """Return all tensors of a model directory by name, from model.safetensors or the shards of its index, and those
    that stay in the files `given` (`source.ModelSource`). Raise BadCheckpoint if a file is missing or damaged, or two
    files hold the same tensor."""
    tensors: dict[str, Origin] = {}
    for shard in _shards(directory):
        for name, stored in read_header(shard).items():
            if name in tensors:
                raise BadCheckpoint(
                    f"{directory}: tensor {name} is in both {tensors[name].runs[0].path.name} and {shard.name}"
                )
            tensors[name] = stored
    if given and (directory / PLACES).is_file():
        tensors |= resolve_name("flexengine.model.gguf_places:in_place")(directory, given)
    return tensors


def _shards(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if os.path.lexists(single):  # if both exist, transformers reads this one
        return [single]
    if os.path.lexists(index):
        return indexed_files(index)
    if shards := sorted(set(directory.glob("*.safetensors")) - {directory / ADAPTER_WEIGHTS}):
        check_complete(shards)
        return shards
    raise BadCheckpoint(f"{directory} holds no .safetensors file")


class Loading:
    """Renames and conversions that transformers applies when it loads a model, taken from the meta model. Must be made
    before the model's modules are replaced."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model)
        parameters: dict[str, torch.Tensor] = model.state_dict()
        # Stand-in of the model for conversions: its config and the shapes of its parameters.
        self.outline = SimpleNamespace(config=model.config, get_parameter=parameters.__getitem__)
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
        self.prefix: str = model.base_model_prefix
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self.shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        # From each parameter to the one it shares its tensor with.
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        # New name of a stored tensor, or None, if an adapter has left layers out or divided them (adapters/longcat.py).
        self.stored_name: Callable[[str], str | None] | None = getattr(model, "stored_name", None)
        ignored = [*_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        # Parameters that the checkpoint may store as integers, which fp32 represents.
        ends = getattr(model, "small_integers", ())
        self.integers = {name for name in self.shapes if ends and name.endswith(ends)}
        self.has_towers = any(re.search(_TOWERS, name) for name in self.shapes)
        self.ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))  # tensors that are not loaded

    def unused(self, name: str) -> bool:
        """Return whether a stored tensor belongs to nothing that generation reads."""
        return self.ignored.search(name) is not None or self.target(name)[0].startswith(_WITHOUT)

    def target(self, name: str) -> tuple[str, str | None]:
        """Return the parameter (of several, the first) of a stored tensor, and its converter's pattern or None."""
        from transformers.core_model_loading import rename_source_key

        if self.stored_name is not None:
            if (new := self.stored_name(name)) is None:
                return _WITHOUT + name, None
            name = new
        renamed, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.shapes)
        if renamed not in self.shapes and name in self.shapes:
            return name, None
        return renamed, pattern


def origins(
    tensors: Mapping[str, Origin], wanted: Mapping[str, tuple[int, ...]], loading: Loading
) -> dict[str, Origin]:
    """Return the location of every wanted parameter.

    Args:
        tensors: tensors of the checkpoint, by name.
        wanted: shape of each parameter to locate, by name.

    Raises:
        BadCheckpoint: a parameter is missing, has another shape or is no floating point, or a tensor is not used; the
            message lists them.
        UnsupportedModel: a conversion changes the order inside rows.
    """
    located: dict[str, Origin] = {}
    used: set[str] = set()
    for key, names in _groups(tensors, loading).items():
        for name, origin in _convert(key, names, tensors, loading).items():
            located[name] = origin
            if name in wanted or name in loading.shapes:
                used.update(names)
    for name in set(wanted) - set(located):  # tied parameters: the checkpoint may hold any of their names
        source = loading.tied.get(name, name)
        same = {source, *(target for target, origin in loading.tied.items() if origin == source)}
        if other := next((o for o in same if o in located), None):
            located[name] = located[other]
    unused = sorted(n for n in tensors if n not in used and not loading.unused(n))
    extras = _extras(unused, used, loading.layers)
    if not loading.has_towers:  # the class is the text part of a larger one
        extras |= {name: "parts for images and sound" for name in unused if re.search(_TOWERS, name)}
    if any(origin.form for origin in tensors.values()):
        extras |= resolve_name("flexengine.model.quantised.matrices:zero_biases")(unused, tensors)
    _check(located, wanted, [name for name in unused if name not in extras], loading.integers)
    if extras:
        some, kinds = ", ".join(list(extras)[:3]) + " ..." * (len(extras) > 3), ", ".join(sorted({*extras.values()}))
        message(f"{len(extras)} tensors are ignored, as generation does not use them: {some} ({kinds})", WARNING)
    return {name: located[name] for name in wanted}


def _extras(unused: Iterable[str], used: Iterable[str], layers: int) -> dict[str, str]:
    """Return what is known of unused tensors that may be ignored, by name: `_EXTRAS`, and layers beyond `layers` whose
    tensors are named as those of a layer that is used."""
    inside = {match.group(1, 3) for name in used if (match := _LAYER.match(name))}
    beyond = {match.group(1, 2) for name in unused if (match := _LAYER.match(name)) and match.group(1, 3) in inside}
    found = {}
    for name in unused:
        match = _LAYER.match(name)
        if match and int(match[2]) >= layers and match.group(1, 2) in beyond:
            found[name] = f"layers beyond the {layers} of the config"
        elif what := next((what for what, pattern in _EXTRAS.items() if re.search(pattern, name)), None):
            found[name] = what
    return found


def differ(tensors: Mapping[str, Origin], skeleton: Any) -> bool:
    """Return whether the checkpoint holds an embedding and a head with different contents.

    transformers then does not tie them, whatever the config states. The tensors are read, in pieces, only if the
    checkpoint holds both.
    """
    targets = {skeleton.loading.target(name)[0]: stored for name, stored in tensors.items()}
    one, other = targets.get(skeleton.embedding[0]), targets.get(skeleton.head[0])
    if one is None or other is None or one == other:
        return False
    if (one.nbytes, one.dtype) != (other.nbytes, other.dtype):
        return True
    if one.form != other.form or len(one.runs) > 1:  # the head is encoded, or both are, each in its own tensors
        return True
    ((path, start, _),), ((other_path, other_start, _),) = one.runs, other.runs
    with opened(path) as first, opened(other_path) as second:
        first.seek(start)
        second.seek(other_start)
        sizes = (min(_PIECE, one.nbytes - offset) for offset in range(0, one.nbytes, _PIECE))
        return any(first.read(size) != second.read(size) for size in sizes)


def _groups(tensors: Mapping[str, Origin], loading: Loading) -> dict[str, dict[str, str | None]]:
    """Return the stored tensors of each parameter (of several that are made together, the first) and patterns."""
    from transformers.core_model_loading import dot_natural_key

    groups = dict[str, dict[str, str | None]]()
    for name in sorted(tensors, key=dot_natural_key):  # transformers stacks experts in this order
        key, pattern = loading.target(name)
        if key in loading.shapes:
            groups.setdefault(key, {})[name] = pattern
    return groups


def _joins(converter: Any, sources: list[Origin]) -> bool:
    """Return whether a converter puts plain tensors of one pattern one behind the other, as those of a table."""
    from transformers.core_model_loading import Concatenate

    (operation, *others), patterns = converter.operations, converter.source_patterns
    one = type(operation) is Concatenate and operation.dim == 0 and not others and len(patterns) == 1
    return one and not any(s.form or not s.shape or s.shape[1:] != sources[0].shape[1:] for s in sources)


def _convert(
    key: str, group: Mapping[str, str | None], tensors: Mapping[str, Origin], loading: Loading
) -> dict[str, Origin]:
    names, sources = list(group), [tensors[name] for name in group]
    if (first := next(filter(None, group.values()), None)) is None:  # a rename
        if len(names) > 1:
            raise BadCheckpoint(f"the tensors {', '.join(names)} are all {key}")
        return {key: sources[0]}
    vector = len(sources[0].shape) == 1
    rows = {(source.dtype, source.shape[-1] if len(source.shape) > 1 else 1) for source in sources}
    if len(rows) > 1:
        raise BadCheckpoint(f"the tensors that make up {key} differ in dtype or row length: {names[:4]}")
    ((dtype, row),) = rows
    converter = deepcopy([c for c in loading.converters if first in c.source_patterns][-1])
    if _joins(converter, sources):  # without numbers: tables have hundreds of millions of rows
        shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
        return {key: Origin(tuple(run for source in sources for run in source.runs), dtype, shape)}
    for i, (pattern, stored) in enumerate(zip(group.values(), sources, strict=True)):
        if pattern is not None:  # the converter gets row numbers, of a vector numbers of elements
            places = stored.shape if len(stored.shape) < 2 else (*stored.shape[:-1], 1)
            converter.collected_tensors[pattern].append((torch.arange(math.prod(places)) + i * _ROWS).view(places))
    try:
        made = converter.convert(key, model=loading.outline, config=loading.outline.config)
    except Exception as error:
        raise BadCheckpoint(f"the tensors {names[:4]} cannot be made into {key}: {error}") from error
    result = {}
    for name, numbers in made.items():
        numbers = numbers[0] if isinstance(numbers, list) else numbers
        if not vector and (numbers.dim() < 2 or numbers.shape[-1] != 1):
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise UnsupportedModel(f"{name} is made by {operations} on load, which reorders single numbers")
        shape = tuple(numbers.shape) if vector else (*numbers.shape[:-1], row)
        if any(source.form for source in sources):
            result[name] = resolve_name("flexengine.model.quantised.matrices:joined")(name, numbers, names, sources)
            continue
        result[name] = Origin(_runs(numbers.reshape(-1), sources, row * dtype.itemsize), dtype, shape)
    return result


def _runs(numbers: torch.Tensor, sources: list[Origin], nbytes: int) -> tuple[ByteRange, ...]:
    """Return the byte ranges of rows, with neighbouring rows of one source joined. nbytes: of one row."""
    breaks = (numbers.diff() != 1).nonzero().view(-1) + 1
    ends = [0, *breaks.tolist(), len(numbers)]
    runs = []
    for low, high in pairwise(ends):
        source, row = divmod(int(numbers[low]), _ROWS)
        (run,) = sources[source].runs
        runs.append(ByteRange(run.path, run.start + row * nbytes, (high - low) * nbytes))
    return tuple(runs)


def _check(
    located: Mapping[str, Origin], wanted: Mapping[str, tuple[int, ...]], unused: Iterable[str], integers: set[str]
) -> None:
    """Raise BadCheckpoint if a wanted parameter is missing or unfit, or a tensor is unused."""
    have = {name: located[name] for name in wanted if name in located}
    faults = {
        "missing": sorted(set(wanted) - set(have)),
        "of another shape": [f"{n} {o.shape} instead of {wanted[n]}" for n, o in have.items() if o.shape != wanted[n]],
        "not floating point": sorted(n for n, o in have.items() if not (o.dtype.is_floating_point or n in integers)),
        "in 8 bits without scales": [n for n, o in have.items() if o.dtype.is_floating_point and o.dtype.itemsize < 2],
        "not used by the model": list(unused),
    }
    if any(faults.values()):
        lines = (f"{what}: {', '.join(n[:8])}{' ...' * (len(n) > 8)} ({len(n)})" for what, n in faults.items() if n)
        from flexengine.model.misfits import remedy_of  # few checkpoints are refused

        remedy = remedy_of(faults, wanted, {origin.shape for origin in have.values()})
        raise BadCheckpoint(f"the checkpoint does not fit its config: {'; '.join(lines)}; {remedy}")
