"""Templates of prompts: text with columns in braces, such as "Question: {question}"."""

import json
import string
from collections.abc import Mapping
from typing import Any

from flexengine.errors import InvalidInput, json_kind


def columns_of(template: str) -> tuple[str, ...]:
    """Return the columns of a template, each once, in order. Raise InvalidInput if a brace is alone, or a column has a
    conversion or a format."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidInput(f"a brace is alone ({error}); write {{{{ and }}}} for braces that are text") from error
    names: list[str] = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name or form or conversion:
            what = f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
            raise InvalidInput(
                f"{what} must be a column's name alone, as in {{question}}; write {{{{ and }}}} for"
                " braces that are text"
            )
        names.append(name)
    return tuple(dict.fromkeys(names))


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return the template with the row's values. Raise InvalidInput if the row lacks a value."""
    parts = string.Formatter().parse(template)
    return "".join(literal + (text_of(row, name) if name is not None else "") for literal, name, _, _ in parts)


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return a value of a row as text: texts as they are, numbers and booleans as in JSON. Raise InvalidInput if the
    row has no such value, or it is an array or an object."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    if value is None or not isinstance(value, bool | int | float):
        raise InvalidInput(f"column {column} is {json_kind(value)}; it must be text or a number")
    return json.dumps(value)
