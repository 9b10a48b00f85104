"""Tables in memory, read from CSV, TSV, Parquet and Arrow files, and written with further columns."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.apps.tables import read_records
from flexengine.apps.wrangle.prompts import text_of
from flexengine.errors import InvalidInput
from flexengine.job.reading import DELIMITERS, TableRow, other_separator
from flexengine.job.results import encode_fields
from flexengine.job.source import InputFile
from flexengine.job.whole_file import explained, whole_file

_FORMS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_ACCEPTED = ".csv, .tsv, .parquet, .arrow and .feather (.csv and .tsv also with .gz or .zst)"


class Added(NamedTuple):
    """A further column of the output.

    Attributes:
        values: text or numbers, one per row; None is an empty cell.
    """

    name: str
    values: Sequence[Any]
    number: bool = False


@dataclass(frozen=True)
class WrangleTable:
    """A table in memory.

    Attributes:
        name: name of the file, for messages.
        form: csv, tsv, parquet or arrow.
        records: the rows, with cells by column. A row that cannot be read has a fault and no cells.
            Line 0 is a row whose fault names file and line.
        arrow: the pyarrow.Table of a Parquet or Arrow file; None for text.
    """

    name: str
    form: str
    columns: tuple[str, ...]
    records: tuple[TableRow, ...]
    arrow: Any = None

    def place(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        return f"{self.name}, {'row' if self.arrow is not None else 'line'} {self.records[row].line}"

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
        """Return the table as a pyarrow.Table. Cells of text tables become strings."""
        if self.arrow is not None:
            return self.arrow
        import pyarrow as pa

        cells = {c: [record.fields.get(c) for record in self.records] for c in self.columns}
        return pa.table({c: pa.array(values, pa.string()) for c, values in cells.items()})


def read_table(name: str, what: str = "table", limit: int | None = None) -> WrangleTable:
    """Return the table in a file.

    Args:
        what: option or argument that names the file, for messages.
        limit: only the first rows; None is all.

    Raises:
        InvalidInput: the file cannot be read, has no rows, or has unnamed columns or columns of one name; or its suffix
            names no format.
    """
    path = Path(name)
    packed = path.suffix.lower() in (".gz", ".zst")
    form = _FORMS.get(Path(path.stem).suffix.lower() if packed else path.suffix.lower())
    if form is None or (packed and form not in DELIMITERS):
        raise InvalidInput(f"{what} {name} has suffix {path.suffix!r}; accepted are {_ACCEPTED}")
    with closing(InputFile(path, form)) as source:
        columns, records = read_records(source, f"{what} {name}", limit)
        if "" in columns:
            raise InvalidInput(f"{what} {name} has a column without a name, number {columns.index('') + 1}; name it")
        arrow = None if form in DELIMITERS else _whole(source).slice(0, limit)
    return WrangleTable(str(path), form, columns, records, arrow)


def _whole(source: InputFile) -> Any:
    """Return all of a Parquet or Arrow file, which was read once before."""
    import pyarrow as pa

    if source.form == "parquet":
        import pyarrow.parquet as pq

        return pq.read_table(str(source.file))
    with pa.OSFile(str(source.file)) as file:
        try:
            return pa.ipc.open_file(file).read_all()
        except pa.ArrowInvalid:  # the stream format
            file.seek(0)
            return pa.ipc.open_stream(file).read_all()


def check_output(name: str, form: str) -> None:
    """Raise InvalidInput if the suffix of an output names neither JSON lines nor the format of the table."""
    suffix = Path(name).suffix.lower()
    if suffix != ".jsonl" and _FORMS.get(suffix) != form:
        same = " or ".join(s for s, f in _FORMS.items() if f == form)
        raise InvalidInput(
            f"--output {name} has suffix {suffix!r}; the output has the format of the table, {same}, or is .jsonl"
        )


def write_table(name: str, table: WrangleTable, added: Sequence[Added]) -> None:
    """Write a table with further columns. The file appears complete or not at all. name: output file. `.jsonl` is JSON
    lines; else the format is that of the table."""
    with explained(name), whole_file(name) as file:
        _write(file, name, table, added)


def holds_table(name: str, table: WrangleTable, added: Sequence[Added]) -> bool:
    """Return whether a file has the contents that `write_table` would write."""
    made = io.BytesIO()
    _write(made, name, table, added)
    return Path(name).read_bytes() == made.getvalue()


def _write(file: Any, name: str, table: WrangleTable, added: Sequence[Added]) -> None:
    if Path(name).suffix.lower() == ".jsonl":
        for i, record in enumerate(table.records):
            file.write(encode_fields(record.fields | {column.name: column.values[i] for column in added}))
    elif table.form in DELIMITERS:
        file.writelines(_text_lines(table, added))
    else:
        _write_arrow(file, table, added)


def _text_lines(table: WrangleTable, added: Sequence[Added]) -> Iterator[bytes]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=DELIMITERS[table.form], lineterminator="\n")
    writer.writerow((*table.columns, *(column.name for column in added)))
    for i, record in enumerate(table.records):
        cells = [record.fields.get(column) for column in table.columns] + [column.values[i] for column in added]
        writer.writerow([value if isinstance(value, str) else text_of(value) or "" for value in cells])
        yield buffer.getvalue().encode("utf-8", "surrogateescape")
        buffer.seek(0)
        buffer.truncate()


def _write_arrow(file: Any, table: WrangleTable, added: Sequence[Added]) -> None:
    import pyarrow as pa

    made = table.as_arrow()
    for column in added:
        made = made.append_column(column.name, pa.array(column.values, pa.float64() if column.number else pa.string()))
    if table.form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(made, file)
        return
    with pa.ipc.new_file(file, made.schema) as writer:
        writer.write_table(made)
