"""Byte ranges of a checkpoint that make up each parameter, after the renames and merges of transformers.

transformers renames tensors, stacks experts and cuts fused projections when it loads a checkpoint. Here its conversions
run on row numbers instead of weights: the numbers 0 .. a*b-1 in shape [a, b, 1] represent a tensor of shape [a, b, c].
The result gives the rows of which tensors a parameter consists of, and so its byte ranges, and weights can be streamed
from the user's own files. A conversion that changes the order inside rows (a transpose) is refused.
"""

import math
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.checkpoint import ByteRange, Origin
from flexengine.read_retries import opened

# Buffers that old checkpoints contain, although models compute them.
_BUFFERS = (r"rotary_emb\.inv_freq$", r"\.attn\.bias$", r"\.attn\.masked_bias$")
_PIECE = 1 << 24  # bytes compared at a time
_ROWS = 1 << 40  # more than any tensor has; a row is numbered source * _ROWS + row


class Loading:
    """Renames and conversions that transformers applies when it loads a model, taken from the meta model.

    Must be made before the model's modules are replaced.

    Attributes:
        outline: stand-in of the model for conversions: its config and the shapes of its parameters.
        converters: conversions of tensors.
        renamings: renames without conversion.
        prefix: name of the base model.
        shapes: shape of every parameter, by name.
        tied: parameter to the one it shares its tensor with.
        ignored: pattern of tensor names that are not loaded.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model)
        parameters: dict[str, torch.Tensor] = model.state_dict()
        self.outline = SimpleNamespace(config=model.config, get_parameter=parameters.__getitem__)
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
        self.prefix: str = model.base_model_prefix
        self.shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        ignored = [*_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        self.ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))

    def target(self, name: str) -> tuple[str, str | None]:
        """Return the parameter (of several, the first) of a stored tensor, and its converter's pattern or None."""
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.shapes)
        if renamed not in self.shapes and name in self.shapes:
            return name, None
        return renamed, pattern


@dataclass
class _Group:
    """Stored tensors that one conversion turns into parameters. converter: None for a rename without conversion."""

    converter: Any = None
    names: list[str] = field(default_factory=list)


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
    for key, group in _groups(tensors, loading).items():
        for name, origin in _convert(key, group, tensors, loading).items():
            located[name] = origin
            if name in wanted or name in loading.shapes:
                used.update(group.names)
    for name in set(wanted) - set(located):  # tied parameters: the checkpoint may hold any of their names
        source = loading.tied.get(name, name)
        same = {source, *(target for target, origin in loading.tied.items() if origin == source)}
        if other := next((o for o in same if o in located), None):
            located[name] = located[other]
    unused = sorted(n for n in tensors if n not in used and not loading.ignored.search(n))
    _check(located, wanted, unused)
    return {name: located[name] for name in wanted}


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
    ((path, start, _),), ((other_path, other_start, _),) = one.runs, other.runs
    with opened(path) as first, opened(other_path) as second:
        first.seek(start)
        second.seek(other_start)
        sizes = (min(_PIECE, one.nbytes - offset) for offset in range(0, one.nbytes, _PIECE))
        return any(first.read(size) != second.read(size) for size in sizes)


def _groups(tensors: Mapping[str, Origin], loading: Loading) -> dict[str, _Group]:
    """Return the stored tensors of each parameter; of several that are made together, by the first."""
    from transformers.core_model_loading import dot_natural_key

    by_pattern = {pattern: c for c in loading.converters for pattern in c.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=dot_natural_key):  # transformers stacks experts in this order
        key, pattern = loading.target(name)
        if key not in loading.shapes:
            continue
        group = groups.setdefault(key, _Group())
        if pattern is not None:
            if group.converter is None:
                group.converter = deepcopy(by_pattern[pattern])
            group.converter.collected_tensors[pattern].append(_numbers(tensors[name], len(group.names)))
        group.names.append(name)
    return groups


def _numbers(stored: Origin, source: int) -> torch.Tensor:
    """Return the row numbers of a stored tensor; for a vector, its element numbers."""
    shape = stored.shape if len(stored.shape) < 2 else (*stored.shape[:-1], 1)
    return (torch.arange(math.prod(shape)) + source * _ROWS).view(shape)


def _convert(key: str, group: _Group, tensors: Mapping[str, Origin], loading: Loading) -> dict[str, Origin]:
    names, converter = group.names, group.converter
    sources = [tensors[name] for name in names]
    first = sources[0]
    if converter is None:
        if len(names) > 1:
            raise BadCheckpoint(f"the tensors {', '.join(names)} are all {key}")
        return {key: first}
    vector = len(first.shape) == 1
    rows = {(source.dtype, source.shape[-1] if len(source.shape) > 1 else 1) for source in sources}
    if len(rows) > 1:
        raise BadCheckpoint(f"the tensors that make up {key} differ in dtype or row length: {names[:4]}")
    ((dtype, row),) = rows
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


def _check(located: Mapping[str, Origin], wanted: Mapping[str, tuple[int, ...]], unused: Iterable[str]) -> None:
    """Raise BadCheckpoint if a wanted parameter is missing or unfit, or a tensor is unused."""
    have = {name: located[name] for name in wanted if name in located}
    faults = {
        "missing": sorted(set(wanted) - set(have)),
        "of another shape": [f"{n} {o.shape} instead of {wanted[n]}" for n, o in have.items() if o.shape != wanted[n]],
        "not floating point": sorted(n for n, o in have.items() if not o.dtype.is_floating_point),
        "not used by the model": list(unused),
    }
    if any(faults.values()):
        lines = "; ".join(
            f"{what}: {', '.join(names[:8])}{' ...' * (len(names) > 8)} ({len(names)})"
            for what, names in faults.items()
            if names
        )
        raise BadCheckpoint(f"the checkpoint does not fit its config: {lines}")
