"""Tables of CSV, TSV, Parquet and Arrow files, read whole, and written with further columns."""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.errors import InvalidInput, blankness, listed, shown
from flexengine.job.arrow_rows import TableRow
from flexengine.job.files import explained, whole_file
from flexengine.job.inputs import InputFile
from flexengine.job.read_tables import DELIMITERS, arrow_table, csv_table, seeming
from flexengine.job.remedies import Remedies
from flexengine.job.results import encode_fields

_FORMS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_ACCEPTED = ".csv, .tsv, .parquet, .arrow and .feather (.csv and .tsv also with .gz or .zst)"
_REMEDIES = Remedies("give --delimiter {0}, or begin the file with the line sep={1}", "name it .{0}")
_LINE_ENDS = re.compile(r"\s*[\r\n]\s*")


@dataclass(frozen=True)
class FileTable:
    """A table in memory."""

    name: str  # name of the file, for messages
    form: str  # its format, one of `source.FORMATS`
    columns: tuple[str, ...]
    # The rows, with cells by column. A row that cannot be read has a fault; its cells, if it has any, may be those of
    # other columns, and go to the output only. Line 0 is a row whose fault names file and line.
    records: tuple[TableRow, ...]
    arrow: Any = None  # the pyarrow.Table of a Parquet or Arrow file; None for text
    delimiter: str = ""  # the character between cells of text; "" is that of the format
    seeming: str = ""  # what `other_separator` says about the columns
    stated: bool = False  # whether the first line of the file states the delimiter, so that the output's does, too

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
                fault = f"{option} {shown(column)} is no column of {self.name}"
                raise InvalidInput(f"{fault}; its columns are {self.known_columns()}")

    def known_columns(self) -> str:
        """Return the columns, for messages, and whether they seem to have another separator."""
        return f"{listed(self.columns, last=', ')}{self.seeming and f': {self.seeming}'}"

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
    """Return the columns of a CSV, TSV, Parquet or Arrow file, and its rows. Raise InvalidInput if the file cannot be
    read, has no rows, or has columns of one name.

    Args:
        what: name of the file in messages.
        limit: only the first rows; None is all.
    """
    with source.open() as file:
        columns, records = csv_table(file, source) if source.form in DELIMITERS else arrow_table(source, None)
        if double := sorted(name for name, count in Counter(columns).items() if count > 1):
            raise InvalidInput(f"{what} has several columns named {shown(double[0])}; rename them")
        rows = tuple(islice(records, limit))
    if not rows:
        raise InvalidInput(f"{what} has no rows; name a file with at least one")
    return tuple(columns), rows


class Added(NamedTuple):
    """A further column of the output."""

    name: str
    values: Sequence[Any]  # text or numbers, one per row; None is an empty cell
    number: bool = False


def read_table(name: str, what: str = "table", limit: int | None = None, delimiter: str | None = None) -> FileTable:
    """Return the table in a file. Raise InvalidInput if the file cannot be read, has no rows, or has unnamed columns or
    columns of one name; or its suffix names no format.

    Args:
        what: option or argument that names the file, for messages.
        limit: only the first rows; None is all.
        delimiter: as for `InputFile`; files of other formats have none.
    """
    path = Path(name)
    packed = path.suffix.lower() in (".gz", ".zst")
    form = _FORMS.get(Path(path.stem).suffix.lower() if packed else path.suffix.lower())
    if form is None or (packed and form not in DELIMITERS):
        raise InvalidInput(f"{what} {name} has suffix {shown(path.suffix)}; accepted are {_ACCEPTED}")
    delimiter = delimiter if form in DELIMITERS else None
    with closing(InputFile(path, form, delimiter, remedies=_REMEDIES)) as source:
        columns, records = read_records(source, f"{what} {name}", limit)
        filled = any(record.fields.get("") not in (None, "") for record in records)
        if "" in columns and not filled:  # of a separator at each line's end
            columns = tuple(filter(None, columns))
            records = tuple(r._replace(fields={k: v for k, v in r.fields.items() if k}) for r in records)
        if "" in columns:
            raise InvalidInput(f"{what} {name} has a column without a name, number {columns.index('') + 1}; name it")
        arrow = None if form in DELIMITERS else _whole(source)
        if arrow is not None:
            arrow = (source.index.added_to(arrow) if source.index else arrow).slice(0, limit)
        seems, stated = seeming(columns, source), source.delimiter not in (delimiter or DELIMITERS.get(form, ""), "\t")
    return FileTable(str(path), form, columns, records, arrow, source.delimiter, seems, stated)


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
        fault = f"--output {name} has suffix {shown(suffix)}"
        raise InvalidInput(f"{fault}; the output has the format of the table, {same}, or is .jsonl")


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
        _write_text(file, table, added)
    else:
        _write_arrow(file, table, added)


def _write_text(file: Any, table: FileTable, added: Sequence[Added]) -> None:
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    writer = csv.writer(text, delimiter=table.delimiter or DELIMITERS[table.form], lineterminator="\n")
    if table.stated:
        text.write(f"sep={table.delimiter}\n")
    faulty = (record.fields for record in table.records if record.fault)  # they may have more cells than columns
    columns = dict.fromkeys((*table.columns, *chain.from_iterable(faulty)))
    writer.writerow((*columns, *(column.name for column in added)))
    for i, record in enumerate(table.records):
        cells = [record.fields.get(column) for column in columns] + [column.values[i] for column in added]
        writer.writerow([value if isinstance(value, str) else cell_text(value) or "" for value in cells])
    text.detach()  # the file stays open


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


def cell_text(value: Any) -> str | None:
    """Return the text of a cell in one line, as prompts are made of lines; None if the cell is missing: empty,
    blank, null or NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool | list | dict):
        value = json.dumps(value, ensure_ascii=False)
    text = _LINE_ENDS.sub(" ", str(value))
    return None if blankness(text) else text


def serialised(cells: Mapping[str, Any], columns: Iterable[str], missing: str, prefix: str = "") -> str:
    """Return the text of a row, "col: value" joined with ". ".

    Args:
        missing: text of missing cells.
        prefix: the names in `cells` begin with this text, those in `columns` do not.
    """
    texts = ((column, cell_text(cells[prefix + column])) for column in columns)
    return ". ".join(f"{column}: {missing if text is None else text}" for column, text in texts)
