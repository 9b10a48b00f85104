"""Checked records: dataclasses whose annotations say which values are allowed.

What a type cannot say stands beside it in `Annotated`: a range (`Limit`), the allowed names (a tuple or a dict), the
allowed values in words (text, for messages; after a comma, what is allowed besides), or a function that takes (name,
value) and returns the checked value.

    max_tokens: Annotated[int, Limit(1, 2**31 - 1)] = 128
    schedule: Annotated[str, SCHEDULES] = "continuous"
    worker_cores: Mapping[str, Annotated[float, Limit(0, 1), "a share from 0 to 1"]]
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, wraps
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, cast, get_args, get_origin

from flexengine.errors import InvalidInput, bracketed, json_fault, json_kind, meant, shown, size
from flexengine.words import command_words, python_words

T = TypeVar("T")
DEPTH = 8  # of lists and objects in each other that are brought into Python's form
_LARGEST = sys.float_info.max
_OF_PYTHON = frozenset({NoneType, bool, int, float, str, list, tuple, dict})
_TO_PYTHON = ("tolist", "to_list", "to_pylist", "as_py")
_FIELDS = "an object of fields"  # a record, unless other text says that it must be given as one
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Mapping: "an object"}
_MAX_JSON_BYTES = 10_000_000  # of a policy or hardware file; the hardware file of a measured machine has some 50,000


class Limit(NamedTuple):
    """The range of a number, or of the length of text or of a list, with both ends. Default: all finite numbers."""

    low: float = -_LARGEST
    high: float = _LARGEST

    @property
    def text(self) -> str:
        """Return the range in words, such as " of at least 1 and at most 1,000"; "" without ends."""
        ends = (("at least", self.low, -_LARGEST), ("at most", self.high, _LARGEST))
        named = [f"{word} {end:,}" for word, end, none in ends if end != none]
        return " of " * bool(named) + " and ".join(named)


class Allowed(NamedTuple):
    """The values that an annotation allows."""

    kinds: tuple[Any, ...]  # types, without None; tuple stands for a list, Mapping for an object
    optional: bool  # whether None is allowed
    item: "Allowed | None"  # of lists and objects, what their items may be
    own: Callable[[str, Any], Any] | None  # checks the value instead
    limit: Limit
    names: Collection[str] | None
    text: str  # the allowed values in words


def allowed(kind: Any, notes: Sequence[Any] = ()) -> Allowed:
    """Return what an annotation allows. notes: what `Annotated` has beside it."""
    if get_origin(kind) is Annotated:
        kind, *own_notes = get_args(kind)
        notes = [*notes, *own_notes]
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    typed = [member for member in members if member is not NoneType]
    if len(typed) == 1 < len(members):
        return allowed(typed[0], notes)._replace(optional=True)
    typed = [object if member is Any or isinstance(member, str) else member for member in typed]  # not checked
    kinds = tuple(get_origin(member) or member for member in typed)
    own = next((note for note in notes if callable(note)), None)
    limit = next((note for note in notes if isinstance(note, Limit)), Limit())
    names = next((note for note in notes if isinstance(note, tuple | dict) and not isinstance(note, Limit)), None)
    text = next((note for note in notes if isinstance(note, str)), "")
    inner = get_args(typed[0])
    item = allowed(inner[-1] if kinds == (Mapping,) else inner[0]) if kinds in ((Mapping,), (tuple,)) else None
    if text[:1] in ("", ","):
        of_texts = "a list of texts" if item and item.kinds == (str,) else "a list"
        words = of_texts if kinds[0] is tuple else _WORDS.get(kinds[0], _FIELDS)
        text = (f"one of {', '.join(names)}" if names else f"{words}{limit.text}") + text
    return Allowed(kinds, len(typed) < len(members), item, own, limit, names, text)


def checked(rule: Allowed, name: str, value: Any) -> Any:
    """Return a value in the form of its type: 2.0 may become 2 and 2 become 2.0, a list a tuple, an object a record.
    Raise InvalidInput, which begins with `name`, if the value is not allowed."""
    value, kind, (low, high) = plain(value), rule.kinds[0], rule.limit
    if value is None and rule.optional:
        return None
    if rule.own is not None:
        return rule.own(name, value)
    if len(rule.kinds) > 1:
        no_file = Path in rule.kinds and isinstance(value, str | Path) and (not str(value) or "\0" in str(value))
        if isinstance(value, rule.kinds) and (bool in rule.kinds or not isinstance(value, bool)) and not no_file:
            return value
    elif kind is int or kind is float:
        number = as_whole(value) if kind is int else value
        is_number = isinstance(number, (int, kind)) and not isinstance(number, bool) and low <= number <= high
        if is_number and (isinstance(number, kind) or abs(number) <= _LARGEST):  # a larger one is no float
            return number if type(number) is kind else kind(number)
    elif kind is tuple and rule.item is not None:
        items = (value,) if isinstance(value, str) and rule.item.kinds == (str,) else value
        if isinstance(items, list | tuple) and low <= len(items) <= high:
            return tuple(checked(rule.item, f"{name}[{number}]", item) for number, item in enumerate(items))
    elif kind is Mapping and rule.item is not None:
        if isinstance(value, Mapping):
            return {key: checked(rule.item, f"{name} {key}", item) for key, item in value.items()}
    elif isinstance(value, kind) and (rule.names is None or value in rule.names):
        if kind is not str or low <= len(value) <= high:
            return value
    elif is_dataclass(kind) and rule.text == _FIELDS and isinstance(value, Mapping):
        return read(cast(Any, kind), value, name)
    refuse(name, value, rule.text)


def unwrapped(value: Any) -> Any:
    """Return a number, text, array or column of numpy, pandas, polars, pyarrow or torch as Python's; others as they
    are."""
    if type(value) in _OF_PYTHON:
        return value
    way = next((way for way in _TO_PYTHON if callable(getattr(value, way, None))), None)
    return value if way is None else getattr(value, way)()


def as_list(value: Any) -> Any:
    """Return an array, a column or another iterable that has an order as a list; others, and sequences, as they are."""
    value = unwrapped(value)
    return list(value) if isinstance(value, Iterable) and not isinstance(value, Sequence | Set | Mapping) else value


def plain(value: Any, depth: int = DEPTH) -> Any:
    """Return a value `unwrapped`, also in lists and objects, which are taken as they are from a depth on."""
    value = unwrapped(value)
    if type(value) in (list, tuple) and depth:
        return type(value)(plain(each, depth - 1) for each in value)
    if type(value) is dict and depth:
        return {plain(key): plain(each, depth - 1) for key, each in value.items()}
    return value


def as_whole(value: Any) -> Any:
    """Return a float that is a whole number as int, as JSON and pandas do not tell 2.0 from 2; else the value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def named_fields(kind: type[T]) -> type[T]:
    """Return a dataclass whose errors name its fields, if it is made with a field that it does not have, or with an
    object of fields."""
    make: Any = kind.__init__
    known = [each.name for each in fields(cast(Any, kind)) if each.init]

    @wraps(make)
    def made(self: Any, *values: Any, **given: Any) -> None:
        name = type(self).__name__
        check_names(f"{name} has no field", given, known)
        if values and isinstance(values[0], Mapping):
            raise InvalidInput(f"{name} is given {shown(values[0])}; give fields by name, as {name}(**fields)")
        make(self, *values, **given)

    cast(Any, kind).__init__ = made
    return kind


def check_names(fault: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise TypeError for the first given name that is not known. fault: what is wrong with it, for the message."""
    if (name := next((name for name in given if name not in known), None)) is not None:
        question = f"; did you mean {near}?" if (near := meant(name, known)) else ";"
        raise TypeError(f"{fault} {shown(name)[1:-1]}{question} it takes {', '.join(known)}")


def check_argument(name: str, value: object, kind: Any) -> Any:
    """Return the value of an argument as `checked` does. Raise InvalidInput if it is not allowed. kind: its
    annotation."""
    return checked(allowed(kind), name, value)


def check(record: Any, prefix: str = "") -> None:
    """Check all fields of a new dataclass, and bring their values into the form of their types (see `checked`).
    Defaults are taken as they are. Raise InvalidInput if a value is not allowed; the message names the field, its value
    and what is allowed. prefix: text before the names of fields in messages, such as "policy "."""
    for name, rule, default in _rules(cast(Any, type(record))):
        value = getattr(record, name)
        if value is not default:
            made = _checked(rule, prefix + name, value)
            if made is not value:
                object.__setattr__(record, name, made)


_checked = python_words(checked)


@lru_cache
def _rules(kind: Any) -> list[tuple[str, Allowed, Any]]:
    return [(field.name, allowed(field.type), field.default) for field in fields(kind) if field.init]


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file, which may begin with a BOM. Raise InvalidInput if the file cannot be read, is
    too large, or holds no JSON object; the message names the file. what: kind of file, for messages, such as "policy
    file"."""
    _check_path(path, what)
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_JSON_BYTES:
        raise InvalidInput(f"{what} {path} has more than {size(_MAX_JSON_BYTES)}; give the name of a {what}")
    try:
        values = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} {path} is not UTF-8 text: byte {error.start} is wrong") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what} {path} is not JSON: {json_fault(error)}") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"{what} {path} holds {json_kind(values)}; it must be an object of fields")
    return values


@python_words
def _check_path(path: object, what: str, others: str = "") -> None:
    if not isinstance(path, str | os.PathLike):
        refuse(what, path, f"the name of a file{others}")


def load(kind: type[T], path: str | Path, what: str, names: str | None = None) -> T:
    """Return the record in a JSON file.

    Args:
        path: of the file; or the name of a shipped file.
        what: kind of file, for messages; errors as for `read_object` and `read`.
        names: kind of shipped files; None if there are none of this kind.
    """
    if names is not None:
        _check_path(path, what, f", or of a shipped one; {kind.__name__}(**fields) takes fields")
        if os.path.isdir(path) or not os.path.exists(path):
            path = python_words(resolve_name("flexengine.shipped:find_file"))(names, os.fspath(path))
    return read(kind, read_object(path, what), f"{what} {path}")


def read(kind: type[T], values: object, what: str) -> T:
    """Return the record with these fields, as JSON has them. Raise InvalidInput if the values are no object, a name is
    unknown or missing, or a value is not allowed. what: origin of the fields, for messages."""
    needed = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind) if f.init}  # type: ignore[arg-type]
    given = known_fields(values, needed, what)
    missing = sorted(name for name, required in needed.items() if required and name not in given)
    if missing:
        raise InvalidInput(f"{what} lacks fields {missing}; add them")
    try:
        with command_words():  # the values are JSON's
            record = kind(**given)
            if not hasattr(kind, "__post_init__"):
                check(record)
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}") from error
    return record


def known_fields(values: object, known: Collection[str], what: str) -> Mapping[str, Any]:
    """Return the values. Raise InvalidInput if they are no object, or have a name that is not known."""
    if not isinstance(values, Mapping):
        refuse(what, values, _FIELDS)
    unknown = sorted(str(name) for name in values if name not in known)
    if unknown:
        name = meant(unknown[0], sorted(known))
        question = f"; did you mean {name}?" if name else ""
        raise InvalidInput(f"{what} has unknown fields {bracketed(unknown)}; it takes {sorted(known)}{question}")
    return values


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise InvalidInput for a value. allowed: the allowed values in words."""
    raise InvalidInput(f"{name} is {shown(value)}; it must be {allowed}")


def printable(name: str, value: Any) -> str:
    """Return text that a record is called by. Raise InvalidInput unless it is printable, and not empty."""
    if not (isinstance(value, str) and value and value.isprintable()):
        refuse(name, value, "printable text")
    return value
