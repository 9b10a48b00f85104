"""Dataclasses from YAML files. Every fault names the file and the line."""

import dataclasses
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from flexengine.config import shown
from flexengine.errors import InvalidInput

T = TypeVar("T")
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_NODES = {"mapping": "fields", "sequence": "a list"}  # kinds of nodes, in words


@dataclasses.dataclass(frozen=True)
class Origin:
    """A place in a file.

    Attributes:
        lines: line of each field, from 1, by the field's names from the outermost to its own, joined by dots. "" is the
            line of the whole document.
    """

    file: str
    lines: dict[str, int]

    def fault(self, field: str, text: str) -> InvalidInput:
        """Return the error for a field, with the line of the field, or of the group that lacks the field."""
        while field not in self.lines:
            field = field.rpartition(".")[0]
        return InvalidInput(f"{self.file}, line {self.lines[field]}: {text}")


def read(path: Path, kind: type[T]) -> tuple[T, Origin]:
    """Return the record of a YAML file, and the lines of its fields.

    Args:
        kind: a dataclass whose fields are text, numbers, booleans, tuples of text, or such dataclasses.

    Raises:
        InvalidInput: the file cannot be read, is no YAML mapping, or a field is unknown, missing, given twice, or has a
            value of another type.
    """
    origin = Origin(str(path), {})
    try:
        node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise InvalidInput(f"scenario file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"scenario file {path} is not UTF-8 text: byte {error.start} is wrong") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"{path}{_place(error)}: invalid YAML: {_problem(error)}") from error
    origin.lines[""] = 1
    if not isinstance(node, yaml.MappingNode):
        raise origin.fault("", f"the file must hold the fields of one scenario: {', '.join(_names(kind))}")
    record: T = _record(node, kind, "", origin)
    return record, origin


def _record(node: yaml.MappingNode, kind: Any, prefix: str, origin: Origin) -> Any:
    hints, values = get_type_hints(kind), dict[str, Any]()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise InvalidInput(
                f"{origin.file}, line {line}: a field's name is {_NODES[key.id]}; allowed are {', '.join(_names(kind))}"
            )
        name = str(key.value)
        full = f"{prefix}{name}"
        double = full in origin.lines
        origin.lines[full] = line
        if name not in _names(kind):
            raise origin.fault(full, f"there is no field {shown(full)}; allowed are {', '.join(_names(kind))}")
        if double:
            raise origin.fault(full, f"{full} is given twice; remove one")
        values[name] = _value(value, hints[name], full, origin)
    required = [f.name for f in _fields(kind) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise origin.fault(prefix.rstrip("."), f"{prefix}{missing[0]} is missing; give it")
    return kind(**values)


def _value(node: yaml.Node, hint: Any, name: str, origin: Origin) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for record in (kind for kind in kinds if dataclasses.is_dataclass(kind)):
        if not isinstance(node, yaml.MappingNode):
            raise origin.fault(name, f"{name} must hold fields: {', '.join(_names(record))}")
        return _record(node, record, f"{name}.", origin)
    if nested := _nested(node):
        raise origin.fault(name, f"{name} holds {nested}; it must be {_allowed(kinds)}")
    try:
        value = yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise origin.fault(name, f"{name} cannot be read: {_problem(error)}") from error
    return _checked(value, kinds, name, origin)


def _checked(value: Any, kinds: Sequence[Any], name: str, origin: Origin) -> Any:
    """Return the value of a field as one of the types. Whole numbers are numbers, too, and a text is a list of one."""
    for kind in kinds:
        if get_origin(kind) is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return tuple(items)
        elif kind is float and type(value) is int:
            return _float(value)
        elif type(value) is kind:
            return value
    allowed = _allowed(kinds)
    quoted = "; put quotes around a text that YAML reads as another value" if "text" in allowed else ""
    raise origin.fault(name, f"{name} is {shown(value)}; it must be {allowed}{quoted}")


def _float(value: int) -> float:
    """Return a whole number as a float, infinity if it is beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _nested(node: yaml.Node) -> str:
    """Return what a value holds if it is more than a scalar or a list of scalars, else "". Such a value is not built:
    by aliases a short file can hold a list of any size, or one that holds itself."""
    if isinstance(node, yaml.MappingNode):
        return _NODES[node.id]
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    return next((f"{_NODES[item.id]} in a list" for item in inner if not isinstance(item, yaml.ScalarNode)), "")


def _allowed(kinds: Sequence[Any]) -> str:
    """Return the values that a field of some types can have, in words."""
    return " or ".join(_KINDS.get(kind, "a list of texts") for kind in kinds if kind is not type(None))


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields that a file may give."""
    return [field for field in dataclasses.fields(kind) if field.init and field.metadata.get("in_file", True)]


def _names(kind: Any) -> list[str]:
    return [field.name for field in _fields(kind)]


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark is not None else ""


def _problem(error: Exception) -> str:
    context, problem = getattr(error, "context", None), getattr(error, "problem", None) or str(error)
    text = f"{context} {problem}" if context and problem.startswith("but ") else problem
    return text.splitlines()[0]
