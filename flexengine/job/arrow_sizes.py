"""Sizes of Arrow arrays as Python objects, which a few compressed bytes may expand to."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from flexengine.job.read_json import MAX_LINE_BYTES, MAX_VALUES

VALUE_BYTES = MAX_LINE_BYTES // MAX_VALUES  # that a value counts beside its text
PART_BYTES = 4 * 2**20  # of rows that are converted at a time


def parts(batch: Any) -> Iterator[tuple[Any, int]]:
    """Yield a record batch in parts of at most PART_BYTES, or of one row, each with its size."""
    size = sum(map(python_bytes, batch.columns))
    if size <= PART_BYTES or batch.num_rows < 2:
        yield batch, size
        return
    for half in (batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2)):
        yield from parts(half)


def python_bytes(array: Any) -> int:
    """Return at least the bytes of the texts of an array, also of those that repeat, and VALUE_BYTES for each value."""
    import pyarrow as pa

    types, kind, count = pa.types, array.type, len(array)
    own = count * VALUE_BYTES
    if isinstance(kind, pa.BaseExtensionType):
        return python_bytes(array.storage)
    if types.is_dictionary(kind):
        return own + count * _largest(array.dictionary)
    if types.is_run_end_encoded(kind):
        return own + count * _largest(array.values)
    if types.is_struct(kind):
        return own + sum(map(python_bytes, array.flatten()))
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        children = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        return own + sum(python_bytes(child.slice(first, last - first)) for child in children)
    if types.is_fixed_size_list(kind):
        return own + python_bytes(array.flatten())
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return own + int(array.sizes.to_numpy(zero_copy_only=False).sum()) * (VALUE_BYTES + _largest(array.values))
    if types.is_union(kind):
        return own + sum(python_bytes(array.field(i)) for i in range(kind.num_fields))
    return own + int(np.sum(_lengths(array)))


def _largest(values: Any) -> int:
    """Return at least the bytes of the largest value."""
    import pyarrow as pa

    if not len(values):
        return 0
    return python_bytes(values) if pa.types.is_nested(values.type) else int(np.max(_lengths(values)))


def _lengths(array: Any) -> Any:
    """Return the bytes of the text of each value; their sum for values of one size."""
    import pyarrow as pa

    types, kind, count = pa.types, array.type, len(array)
    if not count:
        return 0
    if types.is_string_view(kind) or types.is_binary_view(kind):  # a view is 16 bytes, its length first
        return np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[array.offset : array.offset + count, 0]
    wide = types.is_large_string(kind) or types.is_large_binary(kind)
    if wide or types.is_string(kind) or types.is_binary(kind):
        offsets = np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)
        return np.diff(offsets[array.offset : array.offset + count + 1])
    return count * kind.byte_width if types.is_fixed_size_binary(kind) else 0
