"""Prompts made of the columns of a row: text with columns in braces, such as "Question: {question}"."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from flexengine.errors import InvalidInput, blankness, cut, json_kind, listed, shown
from flexengine.job.near_names import stated

_BRACES = "write {{ and }} for braces that are text"
_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")  # of a template, beside text
_ESCAPE = re.compile(r"\\[nrt]")  # as users type line breaks and tabs, where they are two characters
_NO_ESCAPES = re.compile(r"\\[a-mo-qsu-z]|:\\|[\n\r\t]", re.IGNORECASE)  # in LaTeX, paths, and texts with real ones


def typed_escape(texts: Iterable[str]) -> str:
    """Return the first \\n, \\r or \\t of two characters in texts that seem to mean line breaks or tabs; "" if there is
    none."""
    typed = (_ESCAPE.search(text) for text in texts if not _NO_ESCAPES.search(text))
    return next((found[0] for found in typed if found), "")


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
        fault = stated(column, row, lambda value: lack or json_kind(value))
        raise InvalidInput(f"column {fault}; it must be text or a number")
    return json.dumps(value)


def unknown_column(name: str, known: Iterable[str]) -> str:
    """Return the fault of a template with a column that the input does not have."""
    bare = re.split(r"[:!.\[]", name)[0]  # as in {name:>9}
    braces = "" if re.fullmatch(r"[\w .-]+", name) else f"; {_BRACES}"
    remedy = f"write {{{cut(bare)}}} alone" if bare in known else f"choose from {listed(known, last=', ')}{braces}"
    return f"--template names the column {shown(name)}, which no row has; {remedy}"
