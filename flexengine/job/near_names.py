"""Fields that are missing, and those of a row that are probably meant."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from flexengine.errors import alike, cut, shown

_MISSPELT, _LOOKED_AT = 0.75, 50  # similarity to a name that is missing; names of a row that are compared


def stated(name: str, fields: Mapping[str, Any], written: Callable[[object], str] = shown) -> str:
    """Return "NAME is VALUE", or "NAME is missing" with the field that is probably misspelt. written: of a value."""
    if name in fields:
        return f"{cut(name)} is {written(fields[name])}"
    hint = renamed([name], fields)
    return f"{cut(name)} is missing{hint and f' ({hint})'}"


def renamed(names: Iterable[str], fields: Iterable[object]) -> str:
    """Return "did you mean NAME by FIELD?" for a field whose name resembles one of `names`, in any case and without
    separators; "" for none. fields: names that a user gave, of which the first _LOOKED_AT are looked at."""
    return _renamed(tuple(names), tuple(field for field in islice(fields, _LOOKED_AT) if isinstance(field, str)))


@lru_cache(1000)  # rows of a file have the same fields
def _renamed(names: tuple[str, ...], given: tuple[str, ...]) -> str:
    letters = {re.sub(r"[\W_]", "", field).lower(): field for field in given}
    near = ((alike(re.sub(r"[\W_]", "", name), list(letters), _MISSPELT), name) for name in names)
    return next((f"did you mean {name} by {shown(letters[found[0]])}?" for found, name in near if found), "")


def without_prompt(request: Mapping[str, Any], kinds: Iterable[str]) -> str:
    """Return the end of the fault of a row without a prompt: its fields, and what to do about them. kinds: fields of
    prompts."""
    if not request:
        return ", but it has no fields"
    remedy = "rename one to prompt, or name it by --prompt-column (prompt_column of run_job in Python)"
    if {"role", "content"} <= request.keys():
        remedy = "a message is part of an array: put it into messages, as --chat (engine.chat in Python) does"
    hint = renamed(kinds, request)
    return f" (its fields are {shown(list(request))}; {hint and f'{hint} '}{remedy})"
