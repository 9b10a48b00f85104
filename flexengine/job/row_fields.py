"""Fields of a file's rows: those that are run, those that are data, and what is said about their names. Templates of
prompts: text with columns in braces, such as "Question: {question}"."""

import json
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flexengine.config import Result
from flexengine.errors import InvalidInput, alike, json_kind
from flexengine.job.chats import TOOLS
from flexengine.job.foreign import FOREIGN, OVERRIDES
from flexengine.job.rows import PROMPT_KINDS, Row

RESULTS = frozenset(f.name for f in fields(Result)) - {"prompt"}  # fields of an output row
KEPT = "input_"  # begins the names of own fields that are named like those of results
OPTIONS = frozenset({*OVERRIDES, *FOREIGN})
_READ = frozenset({*OPTIONS, TOOLS, "tool_choice", "parallel_tool_calls", "response_format"})  # data in tables
_MOST_NAMES = 1000  # names of a file that are looked at
_SHORTEST, _LONGEST = 4, 64  # characters of a name that may be a misspelt option, and of a name that is looked at
_ALIKE = 0.85  # similarity of a misspelt name
_BRACES = "write {{ and }} for braces that are text"


@dataclass(frozen=True)
class RowRules:
    """How the fields of a file's rows become requests.

    Attributes:
        column: field or column that holds the prompt; other prompt fields are then data. One named messages or
            prompt_token_ids is read as such. None reads any of PROMPT_KINDS.
        template: text with columns in braces, the prompt of each row; None takes the row's own prompt.
        score: see `Row`.
        options: whether fields named like sampling parameters set them, and those of other programs are refused; else
            both are data.
    """

    column: str | None = None
    template: str | None = None
    score: bool = False
    options: bool = True

    def __post_init__(self) -> None:
        if self.template is None:
            return
        if other := "--prompt-column (prompt_column" if self.column else "--score (score" if self.score else None:
            raise InvalidInput(f"--template makes the prompt of each row; leave {other} in Python) out")
        try:
            if not columns_of(self.template):
                raise InvalidInput("it has no column in braces, so all prompts would be alike; add one, as in {review}")
        except InvalidInput as error:
            raise InvalidInput(f"--template (template in Python): {error}") from error

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the template; () without one."""
        return () if self.template is None else columns_of(self.template)

    def request(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the request of a row with the fields `own`: its prompt, unless it is scored, and its options. Raise
        InvalidInput if the field that is to hold the prompt, or a column of the template, has no text."""
        if self.template is not None:
            prompt = {"prompt": filled(self.template, own)}
        elif self.column is None:
            if self.options:
                return own
            prompt = {kind: own[kind] for kind in PROMPT_KINDS if kind in own}
        elif own.get(self.column) is not None:
            prompt = {self.column if self.column in PROMPT_KINDS else "prompt": own[self.column]}
        elif self.score:
            prompt = {}
        else:
            raise InvalidInput(_no_prompt(self.column, own))
        others = own.keys() - {*PROMPT_KINDS, self.column}
        if not self.options:
            others -= _READ if isinstance(prompt.get("prompt"), str) else _READ - {TOOLS}
        return {name: value for name, value in own.items() if name in others} | prompt


def with_numbers(request: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request whose options are those of `given`: with infinities, which `request` has as None. They are
    refused as options, and null as data."""
    return request | {name: given[name] for name in request.keys() & given.keys() & OPTIONS}


def _no_prompt(column: str, own: Mapping[str, Any]) -> str:
    if column in own:
        return f"{column} is null or NaN, but it is to hold the prompt; give a text"
    return f"has no {column!r}, which is to hold the prompt; it has {sorted(own)}"


def columns_of(template: str) -> tuple[str, ...]:
    """Return the columns of a template, each once, in order. Raise InvalidInput if a brace is alone, or a column has a
    conversion or a format."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidInput(f"a brace is alone ({error}); {_BRACES}") from error
    for _, name, form, conversion in parts:
        if name == "" or form or conversion:
            what = f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
            raise InvalidInput(f"{what} must be a column's name alone, as in {{question}}; {_BRACES}")
    return tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return the template with the row's values. Raise InvalidInput if the row lacks a value, or has an empty text."""
    parts = string.Formatter().parse(template)
    return "".join(literal + (text_of(row, name) if name is not None else "") for literal, name, _, _ in parts)


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return a value of a row as text: texts as they are, numbers and booleans as in JSON. Raise InvalidInput if the
    row has no such value, or it is an empty text, an array or an object."""
    value = row.get(column)
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, bool | int | float):
        kind = "empty" if value == "" else json_kind(value)
        raise InvalidInput(f"column {column} is {kind}; it must be text or a number")
    return json.dumps(value)


def kept_fields(own: dict[str, Any]) -> dict[str, Any]:
    """Return a row's own fields for its output. Those in RESULTS get KEPT before their names, again if another field
    has that name."""
    return {kept_name(name, own): value for name, value in own.items()}


def kept_name(name: str, others: Iterable[str], results: Iterable[str] = RESULTS) -> str:
    """Return the name that a field of the input has in the output. others: names of all fields of the row."""
    kept = name
    while kept in results or (kept != name and kept in others):
        kept = KEPT + kept
    return kept


class FieldNotes:
    """Messages about the names of a file's fields. asked: whether the user said what sets options."""

    def __init__(self, rules: RowRules, asked: bool) -> None:
        self._rules, self._asked = rules, asked
        self._seen = set[str]()
        self._renamed: dict[str, str] = {}
        self._named = list[str]()  # like options
        self._misspelt: dict[str, list[str]] = {}  # other names, each with the option that it resembles
        self._missing = set(rules.columns)  # columns of the template that no row has

    def add(self, row: Row) -> None:
        """Note the names of a row's fields that have a value."""
        if row.is_batch or not row.fields:
            return
        if self._missing:
            self._missing.difference_update(row.fields)
        for name in row.fields.keys() - self._seen:
            if row.fields[name] is not None and len(name) <= _LONGEST and len(self._seen) < _MOST_NAMES:
                self._seen.add(name)
                self._note(name, row)

    def _note(self, name: str, row: Row) -> None:
        if name in RESULTS:
            self._renamed[name] = kept_name(name, row.fields)
        if name == self._rules.column or name in self._rules.columns:
            return
        if name in OPTIONS:
            self._named.append(name)
        elif self._rules.options and len(name) >= _SHORTEST:
            self._misspelt[name] = alike(name, OVERRIDES, _ALIKE)

    def lines(self, rows: int) -> Iterator[str]:
        """Yield the messages. Raise InvalidInput if the template names a column that no row has. rows: their number."""
        if rows and self._missing:
            raise InvalidInput(unknown_column(sorted(self._missing)[0], sorted(self._seen)))
        if renamed := {name: self._renamed[name] for name in sorted(self._renamed)}:
            of_results = f"{'a field' if len(renamed) == 1 else 'fields'} {listed(renamed)}"
            yield f"results have {of_results}, so the output has those of the input as {listed(renamed.values())}"
        options = self._rules.options
        named = () if self._asked else sorted(n for n in self._named if not options or n in OVERRIDES)
        if named and options:
            are = f"field {named[0]} is an option" if len(named) == 1 else f"fields {listed(named)} are options"
            yield f"{are} of their rows; rename a field that holds data (row_options=False in Python makes all data)"
        elif named:
            are = f"column {named[0]} is data" if len(named) == 1 else f"columns {listed(named)} are data"
            yield f"{are}; --row-options (row_options=True in Python) makes such columns options of their rows"
        for name in sorted(name for name, near in self._misspelt.items() if near):
            yield f"field {name} is data, not an option; did you mean {self._misspelt[name][0]}?"


def unknown_column(name: str, known: Iterable[str]) -> str:
    """Return the fault of a template with a column that the input does not have."""
    return f"--template names the column {name!r}, which no row has; choose from {', '.join(known)}"


def listed(names: Iterable[str]) -> str:
    """Return names as text: "a, b and c"."""
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
