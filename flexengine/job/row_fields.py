"""Fields of a file's rows: those that are run, those that are data, and what is said about their names."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flexengine.config import Result
from flexengine.errors import InvalidInput, alike, bracketed, cut, listed, shown
from flexengine.job.foreign import FOREIGN, NAMES_HERE, OVERRIDES, TOOLS
from flexengine.job.rows import CONTEXT, PROMPT_KINDS, SCORED_KINDS, Row

if TYPE_CHECKING:
    from flexengine.job.pandas_index import RangeColumn

RESULTS = frozenset(f.name for f in fields(Result)) - {"prompt"}  # fields of an output row
KEPT = "input_"  # begins the names of own fields that are named like those of results
OPTIONS = frozenset({*OVERRIDES, *FOREIGN})
_READ = frozenset({*OPTIONS, TOOLS, "tool_choice", "parallel_tool_calls", "response_format"})  # data in tables
MOST_NAMES = 1000  # names of a file that are looked at, beside those of options and of fields of results
_SHORTEST, _LONGEST = 6, 64  # letters of a name that may be a misspelt option, and of a name that is looked at
_ALIKE, _MOST_MISSING = 0.86, 2  # similarity of a misspelt name, and letters that it has more or less
_BEGUN = 2 / 3  # least part of an option's name that a name of several words has
_WORDS = re.compile("[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_PLAIN = re.compile("[A-Za-z0-9_ -]+")  # other names are no misspelt options
_CHAIN = re.compile(f"(?:{KEPT})*")


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
            if not self.columns:
                raise InvalidInput("it has no column in braces, so all prompts would be alike; add one, as in {review}")
        except InvalidInput as error:
            raise InvalidInput(f"--template (template in Python): {error}") from error

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the template; () without one."""
        if self.template is None:
            return ()
        from flexengine.job.prompt_template import columns_of  # few jobs have one, here and below

        return columns_of(self.template)

    def request(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the request of a row with the fields `own`: its prompt, unless it is scored, and its options. Raise
        InvalidInput if the field that is to hold the prompt, or a column of the template, has no text."""
        if self.template is not None:
            from flexengine.job.prompt_template import filled

            prompt = {"prompt": filled(self.template, own)}
        elif self.column is None:
            if self.options:
                return own
            prompt = {kind: own[kind] for kind in PROMPT_KINDS if kind in own}
        elif own.get(self.column) is not None:
            prompt = {self.column if self.column in PROMPT_KINDS else "prompt": own[self.column]}
        elif self.score:
            prompt = {}
        elif self.column in own:
            raise InvalidInput(f"{cut(self.column)} is null or NaN, but it is to hold the prompt; give a text")
        else:
            fault = f"has no {shown(self.column)}, which is to hold the prompt"
            raise InvalidInput(f"{fault}; it has {bracketed(sorted(own))}")
        others = own.keys() - {*PROMPT_KINDS, self.column, *self.columns}
        if not self.options:
            others -= _READ if isinstance(prompt.get("prompt"), str) else _READ - {TOOLS}
        return {name: value for name, value in own.items() if name in others} | prompt


def with_numbers(request: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request whose options and messages have the infinities of `given`, which make errors; None is data."""
    return request | {name: given[name] for name in request.keys() & given.keys() & {*_READ, "messages"}}


def kept_name(name: str, results: Iterable[str] = RESULTS) -> str:
    """Return the name that a field of the input has in the output: KEPT and its name, if this is one of `results`, or
    one of them after any number of KEPT. So a field has one name in all rows, whatever other fields they have, and two
    fields never get one name."""
    bare = _CHAIN.sub("", name, count=1) if str(name).startswith(KEPT) else name
    return f"{KEPT}{name}" if bare in results else name


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)] if _PLAIN.fullmatch(name) else []


# Options here, and the words of their names, by the letters of their names here and in other programs.
_MEANINGS = {
    "".join(words): (ours, len(words))
    for name, ours in [*NAMES_HERE.items(), *zip(OVERRIDES, OVERRIDES, strict=True)]
    for words in (_words(name),)
    if len(name) > 1  # names such as N and _n are those of data
}


def meant_field(name: str, has_prompt: bool = True, kinds: Sequence[str] = PROMPT_KINDS) -> str | None:
    """Return the option that the name of a field resembles, or, if the row has no prompt, which of `kinds`; None for
    names that are read, and for those that resemble none.

    Names resemble each other if they differ in case and separators (top-p, topP), in a letter or two (max_token), or if
    one of several words is the beginning of the other (max_tok). A name with further words (temperature_max) does not.
    """
    if name in OPTIONS or name in RESULTS or name in PROMPT_KINDS or len(name) > _LONGEST:
        return None
    if not has_prompt and (prompts := alike(name, kinds, _ALIKE)):
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
    Names that begin with a capital, such as Temperature, are those of data."""
    near = {name: NAMES_HERE.get(name) or meant_field(name) for name in columns if not name[:1].isupper()}
    found = [name for name in columns if name in OVERRIDES]
    found += [f"{name} (did you mean {ours}?)" for name, ours in near.items() if ours]
    with_it = "with --row-options (row_options=True in Python) columns named like options set them for their rows"
    return f"{subject('column', sorted(found))} data; {with_it}" if found else ""


def subject(kind: str, names: Iterable[str]) -> str:
    """Return the beginning of a sentence: "field a is", or "fields a and b are"."""
    names = list(names)
    return f"{kind} {listed(names)} is" if len(names) == 1 else f"{kind}s {listed(names)} are"


class FieldNotes:
    """Messages about the names of a file's fields. asked: whether the user said what sets options. index: that of a
    table, if it is no column of the file."""

    def __init__(self, rules: RowRules, asked: bool, index: "RangeColumn | None" = None) -> None:
        self._rules, self._asked, self._index = rules, asked, index
        self._seen: dict[str, bool] = {}  # names of fields that have a value, and whether their first row has a prompt
        self._missing = set(rules.columns)  # columns of the template that no row has
        self._batch = 0  # first line that is an OpenAI batch line

    def add(self, row: Row) -> None:
        """Note the names of a row's fields that have a value."""
        if row.is_batch or not row.fields:
            self._batch = self._batch or (row.line if row.is_batch and row.fields else 0)
            return
        if self._missing:
            self._missing.difference_update(row.fields)
        if new := row.fields.keys() - self._seen.keys():
            for name in (each for each in row.fields if each in new):  # in order, so that no chance decides
                known = len(self._seen) < MOST_NAMES or name in OPTIONS or kept_name(name) != name
                if known and row.fields[name] is not None and len(name) <= _LONGEST:
                    self._seen[name] = row.prompt is not None

    def lines(self, rows: int) -> Iterator[str]:
        """Yield the messages. Raise InvalidInput if the template names a column that no row has. rows: their number."""
        rules, seen = self._rules, sorted(self._seen)
        if self._batch and rules.template is not None:
            fault = f"line {self._batch} is an OpenAI batch line, whose prompt is in its body; leave the template out"
            raise InvalidInput(f"--template (template in Python) makes the prompt of each row, but {fault}")
        if rows and self._missing:
            from flexengine.job.prompt_template import unknown_column

            raise InvalidInput(unknown_column(sorted(self._missing)[0], seen))
        if rows and self._index:
            yield f"the pandas index, which is no column of the file, is kept as column {shown(self._index.name)}"
        if renamed := {name: kept for name in seen if (kept := kept_name(name)) != name}:
            yield f"the output has the input's {listed(renamed)} as {listed(renamed.values())}, beside its own fields"
        own = [name for name in seen if name not in (rules.column, *rules.columns)]
        if not rules.options:
            if not self._asked and (data := data_columns(own)):
                yield data
            return
        if not self._asked and (named := [name for name in own if name in OVERRIDES]):
            are = f"{subject('field', named)} {'an option' if len(named) == 1 else 'options'} of their rows"
            yield f"{are}; rename a field that holds data (row_options=False in Python makes all data)"
        if of_template := [name for name in seen if name in rules.columns and name in OVERRIDES]:
            yield f"{subject('field', of_template)} data, as the template has them, and set no options"
        kinds: Sequence[str] = () if rules.column or rules.columns else PROMPT_KINDS
        if rules.score:
            kinds = [kind for kind in (CONTEXT, *SCORED_KINDS) if kind not in self._seen]
        if meant := {name: ours for name in own if (ours := meant_field(name, self._seen[name], kinds))}:
            yield misspelt(meant)
