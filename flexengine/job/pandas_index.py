"""Indexes of pandas in Parquet and Arrow files. pandas stores an index as a column, but a RangeIndex, numbers of one
step, only in the metadata of the schema."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_WITHOUT_NAME = "__index_level_0__"  # pandas' name for the column of an index that has none
_WITHOUT_NAMES = re.compile("_*__index_level_[0-9]+__")
_KEY = b"pandas"  # of the metadata


class RangeColumn(NamedTuple):
    """The column that a RangeIndex becomes."""

    name: str
    start: int  # value of the first row
    step: int

    def value(self, line: int) -> int:
        """Return the value of a row. line: its number, from 1."""
        return self.start + self.step * (line - 1)

    def added_to(self, table: Any) -> Any:
        """Return a pyarrow.Table with this column. pandas then reads it as a column, as no metadata name an index."""
        import pyarrow as pa

        values = range(self.start, self.value(table.num_rows + 1), self.step)
        metadata = {key: value for key, value in table.schema.metadata.items() if key != _KEY}
        return table.append_column(self.name, pa.array(values, pa.int64())).replace_schema_metadata(metadata)


def range_column(schema: Any, count: Callable[[], int]) -> RangeColumn | None:
    """Return the column that the RangeIndex of a file becomes. Return None if the file has none, if it is pandas'
    default, 0, 1, 2, ... without a name, or if it has not one value per row, so that pandas ignores it.

    Args:
        schema: the pyarrow.Schema of the file, whose metadata may be damaged.
        count: return the number of rows.
    """
    try:
        (index,) = json.loads(schema.metadata[_KEY])["index_columns"]
        name, start, stop, step = (index[key] for key in ("name", "start", "stop", "step"))
        default = (name, start, step) == (None, 0, 1)
        if default or index["kind"] != "range" or max(map(abs, (start, stop, step))) >= 2**63:
            return None
        if len(range(start, stop, step)) != count():
            return None
        label = _WITHOUT_NAME if name is None or str(name) in schema.names else str(name)
    except Exception:  # damaged, or an index that is stored as a column
        return None
    while label in schema.names:
        label = f"_{label}"
    return RangeColumn(label, start, step)


def is_nameless(column: str) -> bool:
    """Return whether a column is an index of pandas that has no name."""
    return _WITHOUT_NAMES.fullmatch(column) is not None
