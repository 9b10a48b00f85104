"""A batch of columns into rows, and rows' results into columns: for Ray Data and other column stores.

A batch is a dict of equally long columns (numpy arrays, lists) or a pyarrow Table. It is returned with all its columns
and those of its results, which have the same Arrow types in every batch. `Engine.__call__` does this, so that the class
can be given to Ray Data: `ds.map_batches(Engine, batch_format="pyarrow", fn_constructor_kwargs={...},
fn_kwargs={"params": SamplingParams(...)}, ...)` makes one engine per actor; see examples/ray_data.py. pyarrow is better
than numpy there: for numpy, Ray turns nulls among numbers into NaN before the engine sees them, and Ray 2.40 (not 2.60)
infers the types of nested values in every batch anew.

Columns read: the prompt columns (prompt, messages, prompt_token_ids; messages may be JSON text), `index`, and columns
named like sampling fields. All others are passed through. Null, None and NaN mean that a row has no such field.

Columns added: generated_text, token_ids, finish_reason, prompt_tokens, completion_tokens and error. A row that cannot
be run, or is too long for the memory, has `error` and costs no other row. logprobs and samples are added as JSON text
if the sampling parameters, or columns logprobs and n, may request them.

Sampling noise (temperature above 0) depends on seed, row index, sample and token. The row index is that of column
`index` (whole numbers), else the row's place in its batch. Without a column `index`, equal rows at the same place of
different batches get equal noise, and a row's text depends on how Ray cuts batches. A column `seed` with a number per
row prevents the first; an `index` that numbers the rows of the whole job prevents both, and the results are then those
of one `generate` of all rows in that order. Rows of one batch that share an index are generated one after the other, so
give each row its own.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from flexengine.config import Result, SamplingParams, json_fault
from flexengine.errors import ONE_SEQUENCE, InvalidInput, OutOfMemory
from flexengine.job import tables
from flexengine.job.prompts import OVERRIDES
from flexengine.job.rows import PROMPT_KINDS, Row

INDEX = "index"
READ = (*PROMPT_KINDS, *OVERRIDES, INDEX)
Generate = Callable[[list[Row]], list[Result]]


def answered(batch: Any, params: SamplingParams, generate: Generate) -> Any:
    """The batch, a dict or a Table as it came, with the columns of `result_columns`; they win over its own.

    generate: the results of rows whose indices differ, in any order. Raises InvalidInput for a batch that is not
    columns of one length; a row that cannot be run has `error` instead.
    """
    pa = _arrow()
    table = isinstance(batch, pa.Table)
    if not table:
        check_batch(batch)
    names = batch.column_names if table else list(batch)
    ours = result_columns(results_of(rows_of(batch), generate), json_columns(names, params))
    if not table:
        return {name: _kept(column) for name, column in batch.items()} | ours
    for name, column in ours.items():
        at = batch.schema.get_field_index(name)
        batch = batch.append_column(name, column) if at < 0 else batch.set_column(at, name, column)
    return batch


def check_batch(batch: object) -> None:
    """Raises InvalidInput unless the batch is a dict of columns of one length."""
    if not isinstance(batch, Mapping):
        raise InvalidInput(
            f"batch is {type(batch).__name__}; it must be a dict of columns or a pyarrow Table"
            ' (of Ray Data: batch_format="numpy" or "pyarrow")'
        )
    for name, column in batch.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise InvalidInput(f"column {name} is {type(column).__name__}; it must be an array or a list")
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidInput(f"columns must have one length, but have {lengths}")


def rows_of(batch: Any) -> list[Row]:
    """The rows of a batch, those that cannot be run with an error.

    A row's index is that of its `index` column, else (or where that is null) its place in the batch; a column of
    float numbers will do, as numpy makes of whole numbers with gaps.
    """
    return [_row(place, cells) for place, cells in enumerate(_cells(batch))]


def results_of(rows: list[Row], generate: Generate) -> list[Result]:
    """The results, in the order of rows. Rows that share an index are generated one after the other: results are told
    apart by it."""
    rounds: list[dict[int, int]] = []  # row index -> place in the batch
    for place, row in enumerate(rows):
        free = next((taken for taken in rounds if row.index not in taken), None)
        if free is None:
            rounds.append(free := {})
        free[row.index] = place
    found = {
        places[result.index]: result
        for places in rounds
        for result in _generated([rows[place] for place in places.values()], generate)
    }
    return [found[place] for place in range(len(rows))]


def _generated(rows: list[Row], generate: Generate) -> list[Result]:
    """Return the results of rows. If every row is too long for the memory, all of them have an error: rows of another
    batch may be shorter."""
    try:
        return generate(rows)
    except OutOfMemory as error:
        if not error.what.startswith(ONE_SEQUENCE):
            raise
        return [Result(r.index, error=r.error or r.refused(f"cannot be held: {error}").error) for r in rows]


def json_columns(names: list[str], params: SamplingParams) -> list[str]:
    """Which of logprobs and samples a batch's results have: those that `params`, or a column, can ask for. A matter of
    the columns and not of the rows, so that batches with the same columns come back with the same."""
    asked = {"logprobs": params.logprobs is not None or "logprobs" in names, "samples": params.n > 1 or "n" in names}
    return [name for name, wanted in asked.items() if wanted]


def result_columns(results: list[Result], as_json: list[str]) -> dict[str, Any]:
    """pyarrow arrays, one entry per result: generated_text, finish_reason, error: string; token_ids: list<int64>, empty
    for an error; prompt_tokens, completion_tokens: int64; those of `as_json`: string, JSON or null."""
    pa = _arrow()
    text, number = pa.string(), pa.int64()
    types = dict(generated_text=text, token_ids=pa.list_(number), finish_reason=text, prompt_tokens=number,
                 completion_tokens=number, error=text)  # fmt: skip
    columns = {name: pa.array([_utf8(getattr(r, name)) for r in results], kind) for name, kind in types.items()}
    return columns | {name: pa.array([_json(getattr(r, name)) for r in results], text) for name in as_json}


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidInput('columns are made by pyarrow; pip install "flexengine[ray]" or "[parquet]"') from error
    return pyarrow


def _cells(batch: Any) -> Iterator[dict[str, Any]]:
    """Of each row, the cells of READ; a cell that cannot be converted is its exception."""
    if isinstance(batch, Mapping):
        columns = {name: column for name, column in batch.items() if name in READ}
        length = len(next(iter(batch.values()), ()))
        yield from ({name: column[i] for name, column in columns.items()} for i in range(length))
        return
    selected = batch.select([name for name in batch.column_names if name in READ])
    if not selected.num_columns:
        yield from ({} for _ in range(batch.num_rows))
        return
    for part in selected.to_batches():
        yield from tables.rows_of(part)


def _row(place: int, cells: dict[str, Any]) -> Row:
    record = tables.record_of(0, {name: _python(cell) for name, cell in cells.items()}, "prompt")
    fields = {name: tables.whole_number(name, value) for name, value in record.fields.items() if value is not None}
    index = fields.pop(INDEX, place)
    if isinstance(index, float) and index.is_integer():
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        return Row(place, 0, fields).refused(f"{INDEX} is {str(index)[:50]!r}; it must be a whole number")
    row = Row(index, 0, fields)
    if record.fault is not None:
        return row.refused(record.fault)
    if isinstance(messages := fields.get("messages"), str):
        try:
            fields["messages"] = json.loads(messages)
        except (ValueError, RecursionError) as error:
            return row.refused(f"messages is text, but not JSON: {json_fault(error)}")
    return row


def _python(value: Any) -> Any:
    """The value with lists for arrays and Python's numbers for numpy's, to any depth."""
    if isinstance(value, np.ndarray | list | tuple):
        return [_python(v) for v in value]
    if isinstance(value, Mapping):
        return {key: _python(v) for key, v in value.items()}
    return value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value


def _kept(column: Any) -> Any:
    """A column as it came, but arrays within it made lists: Ray would pickle them, or make tensors of them."""
    nested = isinstance(column, np.ndarray) and column.dtype == object
    return [_python(value) for value in column] if nested else column


def _utf8(value: Any) -> Any:
    """Text that may quote what UTF-8 cannot hold (half a surrogate pair) with that escaped; any other value itself."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _json(value: Any) -> str | None:
    """JSON text; a number that JSON has not (the logarithm of 0) becomes null."""
    if value is None:
        return None
    return json.dumps(json.loads(json.dumps(value, default=vars), parse_constant=lambda _: None))
