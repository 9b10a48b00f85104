"""Tables in memory that apps read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputFile
from flexengine.job.read_tables import DELIMITERS, TableRow, arrow_table, csv_table, other_separator


@dataclass(frozen=True)
class FileTable:
    """A table in memory."""

    name: str  # name of the file, for messages
    form: str  # its format, one of `source.FORMATS`
    columns: tuple[str, ...]
    # The rows, with cells by column. A row that cannot be read has a fault and no cells. Line 0 is a row whose fault
    # names file and line.
    records: tuple[TableRow, ...]
    arrow: Any = None  # the pyarrow.Table of a Parquet or Arrow file; None for text

    def place(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        return f"{self.name}, {'row' if self.form in ('parquet', 'arrow') else 'line'} {self.records[row].line}"

    def readable(self) -> Iterator[tuple[int, TableRow]]:
        """Yield the number and the record of each row that can be read."""
        return ((row, record) for row, record in enumerate(self.records) if not record.fault)

    def check_has(self, columns: Sequence[str], option: str) -> None:
        """Raise InvalidInput if a column does not exist. option: the option that names the columns."""
        for column in columns:
            if column not in self.columns:
                seems = other_separator(self.columns, self.form)
                raise InvalidInput(
                    f"{option} {column!r} is no column of {self.name}; its columns are"
                    f" {', '.join(self.columns)}{seems and f': {seems}'}"
                )

    def as_arrow(self) -> Any:
        """Return the table as a pyarrow.Table. Cells that were not read by pyarrow become strings or floats."""
        if self.arrow is not None:
            return self.arrow
        import pyarrow as pa

        cells = {c: [record.fields.get(c) for record in self.records] for c in self.columns}
        numbers = {c for c, values in cells.items() if values and isinstance(values[0], float)}
        return pa.table({c: pa.array(v, pa.float64() if c in numbers else pa.string()) for c, v in cells.items()})


def read_records(
    source: InputFile, what: str, limit: int | None = None
) -> tuple[tuple[str, ...], tuple[TableRow, ...]]:
    """Return the columns of a CSV, TSV, Parquet or Arrow file, and its rows.

    Args:
        what: name of the file in messages.
        limit: only the first rows; None is all.

    Raises:
        InvalidInput: the file cannot be read, has no rows, or has columns of one name.
    """
    with source.open() as file:
        in_text = source.form in DELIMITERS
        columns, records = csv_table(file, source) if in_text else arrow_table(source, None)
        if double := sorted({name for name in columns if columns.count(name) > 1}):
            raise InvalidInput(f"{what} has several columns named {double[0]!r}; rename them")
        rows = tuple(islice(records, limit))
    if not rows:
        raise InvalidInput(f"{what} has no rows; name a file with at least one")
    return tuple(columns), rows
