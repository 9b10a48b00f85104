"""Readers of tables: of CSV and TSV files; of Parquet files, and of Arrow IPC files and streams
(.arrow, .feather version 2), with pyarrow, which is optional.
"""

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints
from unicodedata import category, normalize

from flexengine.activity import message
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, bracketed, cut, json_fault, json_kind, meant, shown
from flexengine.job import read_json
from flexengine.job.arrow_rows import TableRow, first_line
from flexengine.job.csv_records import csv_records
from flexengine.job.delimiters import other_separator
from flexengine.job.foreign import TOOLS
from flexengine.job.inputs import FORMATS, InputFile, ReadRows
from flexengine.job.prompt_template import unknown_column
from flexengine.job.row_fields import KEPT, RowRules, with_numbers
from flexengine.job.rows import CONTEXT, PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.table_process import table_rows

DELIMITERS = {name: kind.delimiter for name, kind in FORMATS.items() if kind.delimiter}  # by format
_AS_UTF8 = "save the file as UTF-8"
_OF_EXCEL = f"{_AS_UTF8} (Excel: CSV UTF-8), or convert it: iconv -f WINDOWS-1252 -t UTF-8"
# Cells that are JSON, by the column of the prompt.
_AS_JSON = {"messages": ("messages", TOOLS), "prompt_token_ids": ("prompt_token_ids",)}
_MESSAGES = re.compile(r"\[\s*\{\s*['\"](role|content)['\"]")  # in JSON, or as Python prints them
_SAMPLE = 100  # rows in which the column with the longest text is searched
FURTHER = "further_cells"  # field with the cells of a row that has more than the header
_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,4000})(\.0*)?\s*", re.ASCII)
_LONGEST_NAME = 100  # characters of a column that is proposed
_BEGINNING = 1000  # characters of a cell by which it is text or not
_WORD = re.compile(r"[^\w/@]*([가-힣]|[^\W\d_]{2,})(['’\u200c\u200d-][^\W\d_]+)*[^\w/@]*")
_NO_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]{2}")
_OF_DATES = re.compile(
    r"((mon|tue(s)?|wed(nes)?|thu(rs)?|fri|sat(ur)?|sun)(day)?|jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?"
    r"|aug(ust)?|sept?(ember)?|(octo?|nov(em)?|dec(em)?)(ber)?|[ap]m|utc|gmt|ces?t|[ecmp][sd]t)\W*",
    re.IGNORECASE,
)


def _kinds(hint: Any) -> frozenset[Any]:
    """Return the types in a type hint: tuple and str for tuple[str, ...], int and NoneType for int | None."""
    return frozenset({get_origin(hint) or hint}).union(*map(_kinds, get_args(hint)))


SAMPLING_TYPES = {name: _kinds(hint) for name, hint in get_type_hints(SamplingParams).items()}


def check_columns(
    source: InputFile, columns: list[str], wanted: tuple[str, ...], rules: RowRules, rows: Iterator[TableRow]
) -> None:
    """Raise InvalidInput if two columns share a name, none of the columns `wanted` exists, or one of the template does
    not. rows: those of the table, whose first are read for a proposal."""
    if double := sorted(name for name, count in Counter(columns).items() if count > 1):
        which = f"named {bracketed(double)}; rename them" if double != [""] else "without a name; name them"
        raise InvalidInput(f"input {source.name} has several columns {which}")
    if absent := [name for name in rules.columns if name not in columns]:
        seems = seeming(columns, source)
        raise InvalidInput(f"input {source.name}: {unknown_column(absent[0], columns)}{seems and f': {seems}'}")
    if rules.columns or set(wanted) & set(columns):
        return
    lacks = f"input {source.name} has no column {' or '.join(map(cut, wanted))}; its columns are {bracketed(columns)}"
    if seems := seeming(columns, source):
        raise InvalidInput(f"{lacks}: {seems}")
    alike = [column for column in columns if column.lower() in PROMPT_KINDS]
    if (
        not rules.column
        and alike
        and alike[0] in _AS_JSON
        and source.form in DELIMITERS
        and _first_cell(alike[0], rows)[:1] != "["
    ):
        raise InvalidInput(f"{lacks}: {_texts_of(alike[0])}")
    guess = alike[0] if alike else longest_text(columns, islice(rows, _SAMPLE))
    name = (meant(rules.column, columns) if rules.column else guess) or ""
    name = name if 0 < len(name) <= _LONGEST_NAME else "NAME"
    option = f"--prompt-column {quote(name)} (prompt_column={name!r} in Python)"
    raise InvalidInput(f"{lacks}: name the one with the prompts: {option}, or make them of columns by --template")


def _first_cell(column: str, rows: Iterator[TableRow]) -> str:
    """Return the text of the next row in a column, without spaces before it; "" if there is none."""
    row = next(rows, None)
    return "" if row is None else str(row.fields.get(column, "")).lstrip()


def _texts_of(column: str) -> str:
    return f"if its cells are texts, give --template '{{{column}}}' (template='{{{column}}}' in Python)"


def seeming(columns: Sequence[str], source: InputFile) -> str:
    """Return what `other_separator` says about the columns of a table."""
    return other_separator(source.delimiter.join(columns), source.delimiter, source.remedies)


def longest_text(columns: Sequence[str], rows: Iterable[TableRow]) -> str | None:
    """Return the column whose cells have the longest texts; None if no column has such texts."""
    sizes = Counter[str]()
    for row in rows:
        for name in columns:
            if isinstance(cell := row.fields.get(name), str) and _is_text(cell):
                sizes[name] += len(cell)
    return sizes.most_common(1)[0][0] if sizes else None


def _is_text(cell: str) -> bool:
    """Return whether a cell has several words, no date, number, identifier or address. In Chinese, Japanese, Thai, Lao,
    Burmese and Khmer, which write no spaces, two letters are words. Marks that do not combine with a letter to one, as
    vowels of Hindi and Arabic, count as letters."""
    given = normalize("NFC", cell[:_BEGINNING]).split()
    parts = [part for part in given if "://" not in part and not _OF_DATES.fullmatch(part)]
    spelt = ("".join("a" if category(each) in ("Mn", "Mc") else each for each in part) for part in parts)
    return any(map(_NO_SPACES.search, parts)) or sum(_WORD.fullmatch(part) is not None for part in spelt) > 1


def open_table(source: InputFile, rules: RowRules) -> ReadRows:
    """Return the reader of a table. pyarrow opens Parquet and Arrow files by their path."""
    given, score = rules, rules.score
    if (in_text := source.form in DELIMITERS) and rules.template is None:
        rules = replace(rules, column=rules.column or "prompt")
    texts = (rules.column or "prompt", *rules.columns, *((CONTEXT, *SCORED_KINDS) if score else ()))
    convert = _scored_cell if score else parsed_cell
    as_json = _AS_JSON.get(rules.column or "", ())

    def table(file: BinaryIO) -> tuple[list[str], Iterator[TableRow]]:
        return csv_table(file, source) if in_text else arrow_table(source, texts)

    def row_of(index: int, record: TableRow) -> Row:
        row = Row(index, record.line, record.fields)
        try:
            if record.fault is not None:
                raise InvalidInput(record.fault)
            request = with_numbers(rules.request(record.fields), record.numbers)
            if in_text:
                request = {n: (json_cell if n in as_json else convert)(n, cell) for n, cell in request.items()}
            return replace(row, request=request)
        except InvalidInput as error:
            return row.refused(str(error))

    prompts = PROMPT_KINDS if rules.column is None else (rules.column,)
    with source.open() as file:
        columns, records = table(file)
        check_columns(source, columns, (*SCORED_KINDS, *prompts) if score else prompts, given, records)
        if in_text and rules.column and not as_json and _MESSAGES.match(_first_cell(rules.column, records)):
            remedy = "rename it to messages, and give --prompt-column messages (prompt_column='messages' in Python)"
            message(f"column {rules.column} holds messages in JSON, which are run as text; for chats {remedy}")
    opened = [] if in_text else [records]  # another process has opened the file, and is used at the first reading
    return lambda file: map(row_of, count(), opened.pop() if opened else table(file)[1])


def csv_table(file: BinaryIO, source: InputFile) -> tuple[list[str], Iterator[TableRow]]:
    """Return the names of the columns of a CSV or TSV file, and its rows, which are read as they are iterated. Raise
    InvalidInput if the file has no header. Several columns without a name at the end, as Excel writes them (;;), are
    none: their empty cells are left out, and a row with other cells there has more cells than the header."""
    found = csv_records(file, source.delimiter, read_json.MAX_LINE_BYTES)
    records = ((line, cells, fault and fault.replace(_AS_UTF8, _OF_EXCEL)) for line, cells, fault in found)
    line, columns, fault = next(records, (0, [], "it is empty"))
    if fault:
        fault = f"line {line} {fault}" if line else fault
        with source.open() as again:
            header = re.sub(r'"[^"]*"', "", again.readline(_BEGINNING).decode(errors="replace"))
        if seems := other_separator(header, source.delimiter, source.remedies):
            fault += f"; its columns {seems.removeprefix('they ')}"
        raise InvalidInput(f"input {source.name} has no header line that names the columns: {fault}")

    unnamed, width = columns.count("") > 1 and not columns[-1], len(columns)
    while unnamed and columns and not columns[-1]:
        columns.pop()
    if not columns:
        raise InvalidInput(f"{source.name} has no header line that names the columns: line {line} has empty cells only")
    further_name = FURTHER
    while further_name in columns:
        further_name = KEPT + further_name

    other = source.remedies.delimiter.format("CHARACTER", "CHARACTER")
    remedy = f"write quotes around a cell that holds {source.delimiter!r}, and double its own quotes"
    remedy += f"; if another character separates the cells, {other}"

    def named() -> Iterator[TableRow]:
        for line, cells, fault in records:
            fields: dict[str, Any] = dict(zip(columns, cells, strict=False))
            further = cells[len(columns) :]
            if further and (any(further) or not unnamed):
                fields[further_name] = further
            if unnamed and any(further):
                place = next(place for place, cell in enumerate(further, len(columns) + 1) if cell)
                fault = f"has a cell in column {place}, which has no name"
            elif fault is None and (len(cells) < len(columns) or further_name in fields):
                fault = f"has {len(cells)} cells, but the header has {width}; {remedy}"
            yield TableRow(line, fields, fault)

    return columns, named()


def _scored_cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell of a row that is scored or generates: an empty cell is no value, and choices are a
    JSON list. Other cells are as for `parsed_cell`."""
    if not cell and name in ("prompt", CONTEXT, *SCORED_KINDS):
        return None
    return json_cell(name, cell) if name == "choices" else parsed_cell(name, cell)


def json_cell(name: str, cell: str) -> Any:
    """Return the JSON list in a CSV cell; None if it is empty. Raise InvalidInput if it holds none."""
    try:
        value = json.loads(cell or "null")
        if isinstance(value, list | None):
            return value
        fault = f"it is {json_kind(value)}"
    except (ValueError, RecursionError) as error:
        fault = json_fault(error)
    texts = f"; {_texts_of(name)}" if name in PROMPT_KINDS else ""
    remedy = "; write it with json.dumps" if cell[:1] in "[{" else texts
    raise InvalidInput(f"{name} is {shown(cell)}, which is no JSON list: {fault}{remedy}")


def parsed_cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell.

    In a column named like a sampling field this is the number, boolean or list in the text, or None, for the default,
    if the cell is empty. In other columns it is the text itself. Whole numbers may end in .0 (pandas writes them so),
    booleans are true and false, lists and objects are JSON, and a list of one may be its element alone. Raise
    InvalidInput if the text is no value of this sampling field.
    """
    kinds = SAMPLING_TYPES.get(name)
    if kinds is None:
        return cell
    if not cell:
        return None
    try:
        if Mapping in kinds:
            return json.loads(cell)
        if tuple in kinds:
            return json.loads(cell) if cell.startswith("[") else [cell if str in kinds else _whole(cell)]
        if bool in kinds:
            return {"true": True, "false": False}[cell.strip().lower()]
        return float(cell) if float in kinds else _whole(cell)
    except (ValueError, KeyError, RecursionError) as error:
        wanted = "true or false" if bool in kinds else "a number" if float in kinds else "a whole number"
        wanted = "a JSON object" if Mapping in kinds else wanted
        if tuple in kinds:
            wanted = "a JSON list" if str in kinds else "a JSON list of whole numbers, or one whole number"
        fault = f"column {name} is {cell[:50]!r}"
        remedy = f"as a sampling field it must be {wanted} (rename the column if it holds data)"
        raise InvalidInput(f"{fault}; {remedy}") from error


def _whole(cell: str) -> int:
    if (match := _WHOLE.fullmatch(cell)) is None:
        raise ValueError(cell)
    return int(match[1])


def arrow_table(source: InputFile, texts: Container[str] | None) -> tuple[list[str], Iterator[TableRow]]:
    """Return the names of the columns of a Parquet or Arrow file, and its rows, which are read as they are iterated.

    Values are those that JSON can hold (see `_plain`). A `RangeColumn` is the last column. Iterating raises
    InvalidInput if the file is damaged. Raise InvalidInput if the file cannot be opened. texts: as for `record_of`.
    """
    name, form = source.name, source.form
    if find_spec("pyarrow") is None:
        raise InvalidInput(f'input {name}: reading .{form} files needs pyarrow; pip install "flexengine[parquet]"')
    found = table_rows(source, texts)
    try:
        names, source.index = next(found)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"input {name} cannot be read as .{form}: {first_line(error)}") from error
    if (index := source.index) is None:
        return names, _records(found, name)
    rows = _records(found, name)
    return [*names, index.name], (r._replace(fields={**r.fields, index.name: index.value(r.line)}) for r in rows)


def _records(found: Iterator[TableRow], name: Path) -> Iterator[TableRow]:
    line = 0
    try:
        for row in found:
            line = row.line
            yield row
    except (OSError, ValueError) as error:
        raise InvalidInput(f"input {name} is damaged after row {line}: {first_line(error)}") from error
