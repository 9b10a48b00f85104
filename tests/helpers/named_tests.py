"""Tests that lists of bugs name: as path, names of functions, and these by a case of theirs."""

import importlib
from collections.abc import Iterable
from typing import Any


def _cases(values: Iterable[Any]) -> set[str]:
    """Names of the values of a mark's first parameter."""
    given = [getattr(value, "values", value) if type(value).__name__ == "ParameterSet" else value for value in values]
    parts = [value[0] if isinstance(value, tuple) and not hasattr(value, "name") else value for value in given]
    return {getattr(part, "name", None) or str(part) for part in parts}


def check_tests(places: Iterable[str]) -> None:
    """Fail if a test is missing, or has no such case."""
    for place in places:
        path, _, test = place.partition("::")
        name, _, case = test.rstrip("]").partition("[")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        marks = [mark for mark in getattr(vars(module)[name], "pytestmark", []) if mark.name == "parametrize"]
        assert not case or case in set[str]().union(*(_cases(mark.args[1]) for mark in marks)), place
