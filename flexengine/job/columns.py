"""Conversion of batches of columns to rows, and of results to columns, for Ray Data and other column stores.

docs/python.md says which columns are read and added, and on what sampling noise depends.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from flexengine.activity import message
from flexengine.config import Result, SamplingParams
from flexengine.errors import ONE_SEQUENCE, InvalidInput, OutOfMemory, cut, json_fault, listed, shown
from flexengine.job.arrow_rows import TableRow, record_of, records_of
from flexengine.job.foreign import TOOLS, VARIABLES
from flexengine.job.results import finite
from flexengine.job.row_fields import OPTIONS, data_columns, kept_name, meant_field, misspelt
from flexengine.job.rows import PROMPT_KINDS, Row
from flexengine.records import as_whole

INDEX = "index"
OBJECTS = ("logit_bias", VARIABLES)  # sampling fields that may be JSON text
READ = (*PROMPT_KINDS, TOOLS, INDEX)
Generate = Callable[[list[Row]], list[Result]]


def answered(batch: Any, params: SamplingParams, generate: Generate, row_options: bool = False) -> Any:
    """Return the batch, in its own type, with the columns of `result_columns`. Own columns of the same names are kept
    under the names of `kept_name`. Raise InvalidInput if the batch is not columns of one length. A row that cannot be
    run has `error` instead.

    Args:
        generate: return the results of rows with different indices, in any order.
        row_options: whether columns named like sampling parameters set them for their row; else they are data.
    """
    pa = _arrow()
    table = isinstance(batch, pa.Table)
    if not table:
        _check_columns(batch)
    names = batch.column_names if table else list(batch)
    if note := _note(tuple(map(str, names)), row_options):
        _say(note)
    rows = rows_of(batch, (*READ, *OPTIONS) if row_options else READ)
    added = result_columns(results_of(rows, generate), json_columns(names if row_options else [], params))
    kept = {name: kept_name(name, added) for name in names}
    if renamed := {name: new for name, new in kept.items() if new != name}:
        _say(f"{listed(renamed)} of the batch are returned as {listed(renamed.values())}, beside the results")
        batch = batch.rename_columns(list(kept.values())) if table else {kept[n]: batch[n] for n in names}
    if not table:
        # Ray would pickle the arrays in cells, or convert them to tensors.
        nested = {name for name, column in batch.items() if getattr(column, "dtype", None) == np.dtype(object)}
        return {n: [_python(v) for v in column] if n in nested else column for n, column in batch.items()} | added
    for name, column in added.items():
        batch = batch.append_column(name, column)
    return batch


_say = cache(message)  # each text once in a process, as there is a batch every few seconds


@lru_cache(16)
def _note(names: tuple[str, ...], row_options: bool) -> str:
    """Return what is said about the names of a batch's columns; "" if nothing."""
    if not row_options:
        return data_columns(names)
    meant = {name: ours for name in names if (ours := meant_field(name))}
    return misspelt(meant) if meant else ""


def _check_columns(batch: object) -> None:
    """Raise InvalidInput if the batch is not a dict of columns of one length."""
    if not isinstance(batch, Mapping):
        raise InvalidInput(
            f"batch is {type(batch).__name__}; it must be a dict of columns or a pyarrow Table"
            ' (of Ray Data: batch_format="numpy" or "pyarrow")'
        )
    for name, column in batch.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise InvalidInput(f"column {cut(str(name))} is {type(column).__name__}; it must be an array or a list")
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidInput(f"columns have the lengths {shown(lengths)}; all columns must have one length")


def rows_of(batch: Any, read: Sequence[str] = (*READ, *OPTIONS)) -> list[Row]:
    """Return the rows of a batch, with the fields `read`. Rows that cannot be run have an error.

    A row's index is its cell in column `index`, or its position in the batch if there is no column or the cell is null.
    Whole numbers may be floats, as in numpy. A column without any is data; beside them, other values are rows' errors.
    """
    cells = ({name: _python(cell) for name, cell in row.items()} for row in _cells(batch, read))
    records = [record_of(0, each, ("prompt",)) for each in cells]
    given = [as_whole(record.fields.pop(INDEX, None)) for record in records]
    rows = [_row(each if type(each) is int else i, records[i]) for i, each in enumerate(given)]
    others = [i for i, each in enumerate(given) if each is not None and type(each) is not int]
    if others and not any(type(each) is int for each in given):
        _say(f"column {INDEX} is data, as it holds no whole numbers; rows are numbered by their places in a batch")
        return rows
    for i in others:
        rows[i] = rows[i].refused(f"{INDEX} is {shown(given[i])}, beside whole numbers; it must be one, too")
    return rows


def results_of(rows: list[Row], generate: Generate) -> list[Result]:
    """Return the results, in the order of rows. Rows that share an index are generated in different rounds, as results
    are matched to rows by index."""
    rounds = defaultdict[int, dict[int, int]](dict)  # by number of the round: row index -> position in the batch
    seen = Counter[int]()
    for position, row in enumerate(rows):
        rounds[seen[row.index]][row.index] = position
        seen[row.index] += 1
    results = {
        positions[result.index]: result
        for positions in rounds.values()
        for result in generated([rows[position] for position in positions.values()], generate)
    }
    return [results[position] for position in range(len(rows))]


def generated(rows: list[Row], generate: Generate) -> list[Result]:
    """Return the results of rows. If every row is too long for the memory, return an error for each instead of raising,
    as rows of another batch may be shorter."""
    try:
        return generate(rows)
    except OutOfMemory as error:
        if not error.what.startswith(ONE_SEQUENCE):
            raise
        return [Result(r.index, error=r.error or r.refused(f"cannot be held: {error}").error) for r in rows]


def json_columns(names: list[str], params: SamplingParams) -> list[str]:
    """Return which of "logprobs" and "samples" a batch's results have: those that `params` or one of the columns
    `names` may request. So batches with equal columns get equal result columns, whatever their rows."""
    logprobs, samples = params.logprobs is not None or "logprobs" in names, params.n > 1 or "n" in names
    return ["logprobs"] * logprobs + ["samples"] * samples


def result_columns(results: list[Result], as_json: list[str]) -> dict[str, Any]:
    """Return pyarrow arrays by name, with one entry per result.

    generated_text, finish_reason and error are strings; token_ids is list<int64>, empty for an error; prompt_tokens and
    completion_tokens are int64; the columns of `as_json`, from `json_columns`, are strings of JSON, or null.
    """
    pa = _arrow()
    text, number = pa.string(), pa.int64()
    types = dict(generated_text=text, token_ids=pa.list_(number), finish_reason=text, prompt_tokens=number,
                 completion_tokens=number, error=text)  # fmt: skip
    columns = {name: pa.array([_utf8(getattr(r, name)) for r in results], kind) for name, kind in types.items()}
    for name in as_json:
        values = [getattr(result, name) for result in results]
        columns[name] = pa.array([None if value is None else json.dumps(finite(value)) for value in values], text)
    return columns


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidInput('columns need pyarrow; pip install "flexengine[ray]" or "flexengine[parquet]"') from error
    return pyarrow


def _cells(batch: Any, read: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each row's cells in the columns `read`. A cell that cannot be converted is the exception instead."""
    if isinstance(batch, Mapping):
        columns = {name: column for name, column in batch.items() if name in read}
        length = len(next(iter(batch.values()), ()))
        yield from ({name: column[i] for name, column in columns.items()} for i in range(length))
        return
    selected = batch.select([name for name in batch.column_names if name in read])
    if not selected.num_columns:
        yield from ({} for _ in range(batch.num_rows))
        return
    for part in selected.to_batches():
        yield from records_of(part)


def _row(index: int, record: TableRow) -> Row:
    given = {**record.fields, **record.numbers}
    row = Row(index, 0, fields := {name: value for name, value in given.items() if value is not None and name != INDEX})
    if record.fault is not None:
        return row.refused(record.fault)
    texts = ("messages", TOOLS) if fields.get("messages") is not None else ()
    for name in (*texts, *OBJECTS):
        try:
            if isinstance(text := fields.get(name), str):
                fields[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            return row.refused(f"{name} is text, but not JSON: {json_fault(error)}")
    return row


def _python(value: Any) -> Any:
    """Return the value with arrays converted to lists and numpy numbers to Python numbers, at any depth."""
    if isinstance(value, np.ndarray | list | tuple):
        return [_python(v) for v in value]
    if isinstance(value, Mapping):
        return {key: _python(v) for key, v in value.items()}
    return value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value


def _utf8(value: Any) -> Any:
    """Return text with halves of surrogate pairs escaped, as UTF-8 cannot encode them. Other values stay unchanged."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
