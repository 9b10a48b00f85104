"""Tests that lists of bugs name: as path, names of functions, and these by a case of theirs."""

import importlib
from collections.abc import Iterable
from typing import Any


def _cases(values: Iterable[Any]) -> set[str]:
    """Names of the values of a test's parameters."""
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return {getattr(part, "name", None) or str(part) for part in parts}


def check_tests(places: Iterable[str]) -> None:
    """Fail if a test is missing, or has no such case."""
    for place in places:
        path, _, test = place.partition("::")
        name, _, case = test.rstrip("]").partition("[")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        marks = [mark for mark in getattr(vars(module)[name], "pytestmark", []) if mark.name == "parametrize"]
        assert not case or case in set[str]().union(*(_cases(mark.args[1]) for mark in marks)), place
