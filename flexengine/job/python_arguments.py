"""Prompts, conversations and texts as users of Python give them: tables, columns and rows of pandas, names of files."""

import re
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any

from flexengine.errors import InvalidInput, cut, is_missing, shown
from flexengine.job.rows import PANDAS_ROWS, PROMPT_KINDS, is_series, one_of

_LIBRARIES = {  # how each writes a column as a list, and a table as a file
    "polars": ("to_list", "df.write_ndjson('rows.jsonl')"),
    "pyarrow": ("to_pylist", "pyarrow.parquet.write_table(table, 'rows.parquet')"),
    "": ("tolist", PANDAS_ROWS),
}
_ROW = {  # by argument, what to give for a Series that is a row, and what each cell of a column is
    "prompts": ("series.to_dict()", "prompt"),
    "messages": ("series['messages']", "conversation"),
}
_FILE = re.compile(r"\S{1,200}\.(jsonl|ndjson|csv|tsv|parquet|arrow|feather|txt)(\.gz|\.zst)?")


def argument(name: str, value: Any) -> Any:
    """Return an argument that holds prompts or texts: a row of a pandas table as a dict, a scalar as Python's, others
    as they are. Raise InvalidInput for a table, and for a Series that may be a row as well as a column of one, as all
    cells of a row would be run. name: of the argument."""
    refuse_table(name, value)
    if not is_series(value):
        return one_of(value)
    labels, row = value.index, not set(PROMPT_KINDS).isdisjoint(value.index)
    texts = all(isinstance(each, str | None) or is_missing(each) for each in value)
    if row and name == "prompts" and not (texts and isinstance(value.name, str | None)):  # a row has a number, mostly
        return value.to_dict()
    if not row and value.name in PROMPT_KINDS:
        return value
    if not row and (set(labels.names) != {None} or not any(isinstance(label, str | tuple) for label in labels)):
        return value
    one, cell = _ROW.get(name, (f"series[{name!r}]", "text"))
    remedy = f"give {one} for the row, or series.tolist() for a {cell} in each cell"
    raise InvalidInput(f"{name} is a Series with labels {shown([*map(str, labels[:99])])}, a row or a column; {remedy}")


def refuse_table(name: str, value: Any, file: bool = False) -> None:
    """Raise InvalidInput for a table of pandas, polars or pyarrow: an iteration yields the names of its columns, or the
    columns. name: of the argument. file: it is the name of a file, not a list of prompts."""
    if isinstance(value, str | Mapping) or callable(getattr(value, "columns", callable)):
        return
    listing, writing = _LIBRARIES.get(type(value).__module__.partition(".")[0], _LIBRARIES[""])
    kind, frame = type(value).__name__, "df.collect()" if hasattr(value, "collect") else "df"
    if file:
        writing = "df.to_parquet('rows.parquet')" if _has_index(value) else writing.replace("df", frame)
        must = f"it must be the name of a file: write the table to one, such as {writing}, or give a column to generate"
        raise InvalidInput(f"{name} is a {kind}; {must}")
    names = list(getattr(value, "column_names", value.columns))
    column = next((each for each in ("prompt", "text", *names) if each in names), "prompt")
    texts = f"{frame}[{cut(repr(column))}].{listing}()"
    if name == "messages":
        texts = f'[[{{"role": "user", "content": text}}] for text in {texts}]'
    raise InvalidInput(f"{name} is a {kind} with columns {shown(list(map(str, names)))}; name the column: {texts}")


def _has_index(table: Any) -> bool:
    """Return whether a table has an index as pandas has it, that is not the default 0, 1, 2, ... without a name."""
    index = getattr(table, "index", None)
    names = list(getattr(index, "names", ()))
    return bool(names) and (names, getattr(index, "start", None), getattr(index, "step", None)) != ([None], 0, 1)


def remedy_of(name: str, value: Any) -> str:
    """Return what to give instead of a value that is no list of prompts or messages, as the end of a message. name: of
    the argument."""
    if isinstance(value, PurePath):
        return ": run_job runs the rows of a file"
    if isinstance(value, bytes | bytearray | memoryview):
        return f": give bytes({name}).decode()"
    if isinstance(value, Set):
        return f": give sorted({name})"
    if name == "messages" and isinstance(value, str):
        return ': give [{"role": "user", "content": messages}]'
    if isinstance(value, str | Mapping):
        return f": give [{name}]"
    return ", such as ['A text', {'prompt': 'A row', 'max_tokens': 8}]" if name == "prompts" else ""


def file_note(prompt: Any) -> str:
    """Return a message for a prompt that looks like the name of a file, which is run itself; "" for others."""
    if not isinstance(prompt, str) or not _FILE.fullmatch(prompt):
        return ""
    fault = f"{shown(prompt)} is run as a prompt"
    return f"{fault}; engine.run_job({shown(prompt)}, 'results.jsonl') runs the rows of a file"
