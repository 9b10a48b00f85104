"""Dataclasses from YAML files. Every fault names the file and the line."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import yaml

from flexengine.activity import message
from flexengine.errors import InvalidInput, shown
from flexengine.job.prompt_template import typed_escape
from flexengine.records import Allowed, allowed, checked

T = TypeVar("T")
_NODES = {"mapping": "fields", "sequence": "a list"}  # kinds of nodes, in words


@dataclasses.dataclass(frozen=True)
class FieldLines:
    """A place in a file."""

    file: str
    # Line of each field, from 1, by the names of its groups and its own, joined by dots. "" is the whole document.
    lines: dict[str, int]

    def fault(self, field: str, text: str) -> InvalidInput:
        """Return the error for a field, with the line of the field, or of the group that lacks the field."""
        while field not in self.lines:
            field = field.rpartition(".")[0]
        return InvalidInput(f"{self.file}, line {self.lines[field]}: {text}")


def read(path: Path, kind: type[T]) -> tuple[T, FieldLines]:
    """Return the record of a YAML file, and the lines of its fields. Raise InvalidInput if the file cannot be read, is
    no YAML mapping, or a field is unknown, missing, given twice, or has a value of another type. kind: a dataclass
    whose fields are text, numbers, booleans, tuples of text, or such dataclasses."""
    origin = FieldLines(str(path), {"": 1})
    try:
        node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise InvalidInput(f"scenario file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"scenario file {path} is not UTF-8 text: byte {error.start} is wrong") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidInput(f"{path}{place}: invalid YAML: {_problem(error)}") from error
    if not isinstance(node, yaml.MappingNode):
        raise origin.fault("", f"the file must hold the fields of one scenario: {', '.join(_rules(kind))}")
    return _record(node, kind, "", origin), origin


def _record(node: yaml.MappingNode, kind: Any, prefix: str, origin: FieldLines) -> Any:
    rules, values = _rules(kind), dict[str, Any]()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            wrong = f"{origin.file}, line {line}: a field's name is {_NODES[key.id]}"
            raise InvalidInput(f"{wrong}; allowed are {', '.join(rules)}")
        name = str(key.value)
        full = f"{prefix}{name}"
        origin.lines[full] = line
        if name not in rules:
            raise origin.fault(full, f"there is no field {shown(full)}; allowed are {', '.join(rules)}")
        if name in values:
            raise origin.fault(full, f"{full} is given twice; remove one")
        values[name] = _value(value, rules[name], full, origin)
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise origin.fault(prefix.rstrip("."), f"{prefix}{missing[0]} is missing; give it")
    return kind(**values)


def _value(node: yaml.Node, rule: Allowed, name: str, origin: FieldLines) -> Any:
    if dataclasses.is_dataclass(record := rule.kinds[0]):
        if not isinstance(node, yaml.MappingNode):
            raise origin.fault(name, f"{name} must hold fields: {', '.join(_rules(record))}")
        return _record(node, record, f"{name}.", origin)
    if nested := _nested(node):
        raise origin.fault(name, f"{name} holds {nested}; it must be {rule.text}")
    texts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if mark := typed_escape(text.value for text in texts if text.style != '"'):
        how = "for a line break or tab put the text between double quotes"
        message(origin.fault(name, f"{name} has {mark}, two characters that stay as they are; {how}").args[0])
    try:
        value = yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise origin.fault(name, f"{name} cannot be read: {_problem(error)}") from error
    try:
        return checked(rule, name, value)
    except InvalidInput as error:
        misread = "text" in rule.text and not isinstance(value, str)
        quotes = "; put quotes around a text that YAML reads as another value" if misread else ""
        raise origin.fault(name, f"{error}{quotes}") from error


def _nested(node: yaml.Node) -> str:
    """Return what a value holds if it is more than a scalar or a list of scalars, else "". Such a value is not built:
    by aliases a short file can hold a list of any size, or one that holds itself."""
    if isinstance(node, yaml.MappingNode):
        return _NODES[node.id]
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    return next((f"{_NODES[item.id]} in a list" for item in inner if not isinstance(item, yaml.ScalarNode)), "")


def _rules(kind: Any) -> dict[str, Allowed]:
    """Return, by name, what the fields that a file may give can have."""
    own = (field for field in dataclasses.fields(kind) if field.metadata.get("in_file", True))
    return {field.name: allowed(field.type) for field in own}


def _problem(error: Exception) -> str:
    context, problem = getattr(error, "context", None), getattr(error, "problem", None) or str(error)
    text = f"{context} {problem}" if context and problem.startswith("but ") else problem
    return text.splitlines()[0]
