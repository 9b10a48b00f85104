"""Tables of CSV, TSV, Parquet and Arrow files, read whole, and written with further columns."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.apps.tables import FileTable, read_records
from flexengine.apps.wrangle.prompts import text_of
from flexengine.errors import InvalidInput
from flexengine.job.files import explained, whole_file
from flexengine.job.inputs import InputFile
from flexengine.job.read_tables import DELIMITERS
from flexengine.job.results import encode_fields

_FORMS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_ACCEPTED = ".csv, .tsv, .parquet, .arrow and .feather (.csv and .tsv also with .gz or .zst)"


class Added(NamedTuple):
    """A further column of the output."""

    name: str
    values: Sequence[Any]  # text or numbers, one per row; None is an empty cell
    number: bool = False


def read_table(name: str, what: str = "table", limit: int | None = None) -> FileTable:
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
    return FileTable(str(path), form, columns, records, arrow)


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


def write_table(name: str, table: FileTable, added: Sequence[Added]) -> None:
    """Write a table with further columns. The file appears complete or not at all. name: output file. `.jsonl` is JSON
    lines; else the format is that of the table."""
    with explained(name), whole_file(name) as file:
        _write(file, name, table, added)


def holds_table(name: str, table: FileTable, added: Sequence[Added]) -> bool:
    """Return whether a file has the contents that `write_table` would write."""
    made = io.BytesIO()
    _write(made, name, table, added)
    return Path(name).read_bytes() == made.getvalue()


def _write(file: Any, name: str, table: FileTable, added: Sequence[Added]) -> None:
    if Path(name).suffix.lower() == ".jsonl":
        for i, record in enumerate(table.records):
            file.write(encode_fields(record.fields | {column.name: column.values[i] for column in added}))
    elif table.form in DELIMITERS:
        file.writelines(_text_lines(table, added))
    else:
        _write_arrow(file, table, added)


def _text_lines(table: FileTable, added: Sequence[Added]) -> Iterator[bytes]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=DELIMITERS[table.form], lineterminator="\n")
    writer.writerow((*table.columns, *(column.name for column in added)))
    for i, record in enumerate(table.records):
        cells = [record.fields.get(column) for column in table.columns] + [column.values[i] for column in added]
        writer.writerow([value if isinstance(value, str) else text_of(value) or "" for value in cells])
        yield buffer.getvalue().encode("utf-8", "surrogateescape")
        buffer.seek(0)
        buffer.truncate()


def _write_arrow(file: Any, table: FileTable, added: Sequence[Added]) -> None:
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
