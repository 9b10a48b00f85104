"""Reading of whole tables by apps."""

from itertools import islice

from flexengine.errors import InvalidInput
from flexengine.job.read_arrow import arrow_table
from flexengine.job.read_csv import csv_table
from flexengine.job.reading import DELIMITERS, TableRow
from flexengine.job.source import InputFile


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
