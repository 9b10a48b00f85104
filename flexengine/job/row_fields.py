"""Fields of a file's rows: those that are run, those that are data, and what is said about their names. Templates of
prompts: text with columns in braces, such as "Question: {question}"."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from flexengine.config import Result
from flexengine.errors import InvalidInput, alike, blankness, json_kind
from flexengine.job.chats import TOOLS
from flexengine.job.foreign import FOREIGN, NAMES_HERE, OVERRIDES
from flexengine.job.rows import PROMPT_KINDS, Row

RESULTS = frozenset(f.name for f in fields(Result)) - {"prompt"}  # fields of an output row
KEPT = "input_"  # begins the names of own fields that are named like those of results
OPTIONS = frozenset({*OVERRIDES, *FOREIGN})
_READ = frozenset({*OPTIONS, TOOLS, "tool_choice", "parallel_tool_calls", "response_format"})  # data in tables
_MOST_NAMES = 1000  # names of a file that are looked at, beside those of options and of fields of results
_SHORTEST, _LONGEST = 6, 64  # letters of a name that may be a misspelt option, and of a name that is looked at
_ALIKE, _MOST_MISSING = 0.85, 2  # similarity of a misspelt name, and letters that it has more or less
_BEGUN = 2 / 3  # least part of an option's name that a name of several words has
_WORDS = re.compile("[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_CHAIN = re.compile(f"(?:{KEPT})*")
_BRACES = "write {{ and }} for braces that are text"
_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")  # of a template, beside text


@dataclass(frozen=True)
class RowRules:
    """How the fields of a file's rows become requests.

    Attributes:
        column: field or column that holds the prompt; other prompt fields are then data. One named messages or
            prompt_token_ids is read as such. None reads any of PROMPT_KINDS.
        template: text with columns in braces, the prompt of each row; None takes the row's own prompt. Its columns are
            data, whatever their names.
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
        others = own.keys() - {*PROMPT_KINDS, self.column, *self.columns}
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


@lru_cache(100)
def columns_of(template: str) -> tuple[str, ...]:
    """Return the columns of a template, each once, in order. Raise InvalidInput if a brace is alone, or has no name."""
    return tuple(dict.fromkeys(name for _, name in _parts(template) if name is not None))


@lru_cache(100)
def _parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return pairs of text and the column that follows, None for none. All but braces may be in the name of a column:
    str.format would take a colon in it for the beginning of a format."""
    parts, at = list[tuple[str, str | None]](), 0
    for found in _PARTS.finditer(template):
        mark, name = found[0], found[1]
        if name is None and len(mark) == 1:
            raise InvalidInput(f"a brace is alone (character {found.start() + 1}); {_BRACES}")
        if name == "":
            raise InvalidInput(f"{{}} must have a column's name in it, as in {{question}}; {_BRACES}")
        parts.append((template[at : found.start()] + ("" if name else mark[0]), name))
        at = found.end()
    return (*parts, (template[at:], None))


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return the template with the row's values. Raise InvalidInput if the row lacks a value, or has a text
    without a visible character."""
    return "".join(text + (text_of(row, name) if name is not None else "") for text, name in _parts(template))


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return a value of a row as text: texts as they are, numbers and booleans as in JSON. Raise InvalidInput if the
    row has no such value, or it is a text without a visible character, an array or an object."""
    value = row.get(column)
    lack = blankness(value) if isinstance(value, str) else ""
    if isinstance(value, str) and not lack:
        return value
    if not isinstance(value, bool | int | float):
        raise InvalidInput(f"column {column} is {lack or json_kind(value)}; it must be text or a number")
    return json.dumps(value)


def kept_fields(own: dict[str, Any]) -> dict[str, Any]:
    """Return a row's own fields for its output, under the names of `kept_name`."""
    return {kept_name(name): value for name, value in own.items()}


def kept_name(name: str, results: Iterable[str] = RESULTS) -> str:
    """Return the name that a field of the input has in the output: KEPT and its name, if this is one of `results`, or
    one of them after any number of KEPT. So a field has one name in all rows, whatever other fields they have, and two
    fields never get one name."""
    bare = _CHAIN.sub("", name, count=1) if str(name).startswith(KEPT) else name
    return f"{KEPT}{name}" if bare in results else name


def _meanings() -> dict[str, tuple[str, int]]:
    """Return the options here by the letters of their names, and of their names in other programs, with the words of
    these."""
    names = {**NAMES_HERE, **{name: name for name in OVERRIDES}}
    return {"".join(_words(name)): (ours, len(_words(name))) for name, ours in names.items()}


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


_MEANINGS = _meanings()


@lru_cache(_MOST_NAMES)
def meant_field(name: str, has_prompt: bool = True) -> str | None:
    """Return the option that the name of a field resembles, or, if the row has no prompt, the field for the prompt;
    None for names that are read, and for those that resemble none.

    Names resemble each other if they differ in case and separators (top-p, topP), in a letter or two (max_token), or if
    one of several words is the beginning of the other (max_tok). A name with further words (temperature_max) does not.
    """
    if name in OPTIONS or name in RESULTS or name in PROMPT_KINDS or len(name) > _LONGEST:
        return None
    if not has_prompt and (prompts := alike(name, PROMPT_KINDS, _ALIKE)):
        return prompts[0]
    words = _words(name)
    letters = "".join(words)
    if letters in _MEANINGS or len(letters) < _SHORTEST:
        return _MEANINGS.get(letters, (None, 0))[0]
    near = [each for each in alike(letters, list(_MEANINGS), _ALIKE) if abs(len(each) - len(letters)) <= _MOST_MISSING]
    if len(words) > 1:
        near += [each for each in _MEANINGS if each.startswith(letters) and len(letters) >= _BEGUN * len(each)]
    return next((_MEANINGS[each][0] for each in near if len(words) <= _MEANINGS[each][1]), None)


def misspelt(meant: Mapping[str, str]) -> str:
    """Return what is said about fields that resemble others. meant: the name that each resembles."""
    return f"{subject('field', meant)} data; did you mean {listed(dict.fromkeys(meant.values()))}?"


def data_columns(columns: Sequence[str]) -> str:
    """Return what is said about columns of a table that are named like options, or resemble one; "" if there are none.
    Names in capitals, such as Temperature, are those of data."""
    near = {name: meant_field(name) for name in columns if name.islower()}
    found = [*OPTIONS.intersection(columns), *(f"{name} (did you mean {ours}?)" for name, ours in near.items() if ours)]
    with_it = "with --row-options (row_options=True in Python) columns named like options set them for their rows"
    return f"{subject('column', sorted(found))} data; {with_it}" if found else ""


def subject(kind: str, names: Iterable[str]) -> str:
    """Return the beginning of a sentence: "field a is", or "fields a and b are"."""
    names = list(names)
    return f"{kind} {names[0]} is" if len(names) == 1 else f"{kind}s {listed(names)} are"


class FieldNotes:
    """Messages about the names of a file's fields. asked: whether the user said what sets options."""

    def __init__(self, rules: RowRules, asked: bool) -> None:
        self._rules, self._asked = rules, asked
        self._seen = set[str]()
        self._renamed: dict[str, str] = {}
        self._named = list[str]()  # like options
        self._meant: dict[str, str] = {}  # names that resemble others
        self._filled = list[str]()  # columns of the template that are named like options
        self._missing = set(rules.columns)  # columns of the template that no row has

    def add(self, row: Row) -> None:
        """Note the names of a row's fields that have a value."""
        if row.is_batch or not row.fields:
            return
        if self._missing:
            self._missing.difference_update(row.fields)
        if new := row.fields.keys() - self._seen:
            for name in (each for each in row.fields if each in new):  # in order, so that no chance decides
                known = len(self._seen) < _MOST_NAMES or name in OPTIONS or kept_name(name) != name
                if known and row.fields[name] is not None and len(name) <= _LONGEST:
                    self._seen.add(name)
                    self._note(name, row)

    def _note(self, name: str, row: Row) -> None:
        rules = self._rules
        if (kept := kept_name(name)) != name:
            self._renamed[name] = kept
        if name in rules.columns:
            self._filled += [name] if rules.options and name in OVERRIDES else []
        elif name in OPTIONS and name != rules.column:
            self._named.append(name)
        elif name != rules.column:
            free = rules.options and rules.column is None and not (rules.columns or rules.score)
            if meant := meant_field(name, row.prompt is not None or not free):
                self._meant[name] = meant

    def lines(self, rows: int) -> Iterator[str]:
        """Yield the messages. Raise InvalidInput if the template names a column that no row has. rows: their number."""
        if rows and self._missing:
            raise InvalidInput(unknown_column(sorted(self._missing)[0], sorted(self._seen)))
        if renamed := {name: self._renamed[name] for name in sorted(self._renamed)}:
            yield f"the output has the input's {listed(renamed)} as {listed(renamed.values())}, beside its own fields"
        options = self._rules.options
        if not options:
            if not self._asked and (data := data_columns([*self._named, *self._meant])):
                yield data
            return
        if not self._asked and (named := sorted(name for name in self._named if name in OVERRIDES)):
            are = f"{subject('field', named)} {'an option' if len(named) == 1 else 'options'} of their rows"
            yield f"{are}; rename a field that holds data (row_options=False in Python makes all data)"
        if self._filled:
            yield f"{subject('field', sorted(self._filled))} data, as the template has them, and set no options"
        if self._meant:
            yield misspelt({name: self._meant[name] for name in sorted(self._meant)})


def unknown_column(name: str, known: Iterable[str]) -> str:
    """Return the fault of a template with a column that the input does not have."""
    bare = re.split(r"[:!.\[]", name)[0]  # as in {name:>9}
    braces = "" if re.fullmatch(r"[\w .-]+", name) else f"; {_BRACES}"
    remedy = f"write {{{bare}}} alone" if bare in known else f"choose from {', '.join(known)}{braces}"
    return f"--template names the column {name!r}, which no row has; {remedy}"


def listed(names: Iterable[str]) -> str:
    """Return names as text: "a, b and c"."""
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
