"""InputRows of the files that scenarios name."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.read_arrow import arrow_columns, arrow_records
from flexengine.job.read_csv import csv_table
from flexengine.job.rows import Row
from flexengine.job.source import InputFile
from flexengine.job.tables import DELIMITERS, TableRow


@dataclass(frozen=True)
class ScenarioTable:
    """All rows of a file. InputRows that cannot be read have an error.

    Attributes:
        path: the file.
        form: its format, one of `source.FORMATS`.
        columns: all columns, in the order in which they appear.
        rows: the rows, in the order of the file.
        digest: SHA-256 of the file.
    """

    path: Path
    form: str
    columns: tuple[str, ...]
    rows: list[Row]
    digest: str


def read_table(path: Path) -> ScenarioTable:
    """Return the rows of a file. A .txt file has one column, text, with a line in each row.

    Raises:
        InvalidInput: the file cannot be read, has an unknown format, or has no rows.
    """
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is no file; name a .jsonl, .csv, .tsv, .txt, .parquet or .arrow file")
    source = InputFile(path, None)
    try:
        form = source.form
        if form in DELIMITERS:
            columns, rows = _csv(path, source)
        elif form in ("parquet", "arrow"):
            columns = tuple(arrow_columns(source.file, path, form))
            records = arrow_records(source.file, path, form, None)
            rows = [_row(index, record) for index, record in enumerate(records)]
        else:
            rows = list(_lines(path, form))
            columns = tuple(dict.fromkeys(name for row in rows for name in row.fields))
    finally:
        source.close()
    if not rows:
        raise InvalidInput(f"{path} has no rows; name a file with at least one")
    return ScenarioTable(path, form, columns, rows, hashlib.sha256(path.read_bytes()).hexdigest())


def _csv(path: Path, source: InputFile) -> tuple[tuple[str, ...], list[Row]]:
    with source.open() as file:
        columns, records = csv_table(file, path, source.form)
        if double := sorted({name for name in columns if columns.count(name) > 1}):
            raise InvalidInput(f"{path}: several columns are named {double[0]!r}; rename them")
        return tuple(columns), [_row(index, record) for index, record in enumerate(records)]


def _lines(path: Path, form: str) -> Iterator[Row]:
    with InputRows(path, form=form) as rows:
        for row in rows:
            text = form == "txt" and row.error is None
            yield Row(row.index, row.line, {"text": row.fields["prompt"]}) if text else _plain(row)


def _plain(row: Row) -> Row:
    """Return a row of JSON without the errors that only concern prompts: any object is a row here."""
    return Row(row.index, row.line, row.fields, None if row.fields else row.error)


def _row(index: int, record: TableRow) -> Row:
    row = Row(index, record.line, record.fields)
    return row if record.fault is None else row.refused(record.fault)
