"""docs/troubleshooting.md quotes messages as the code has them."""

import ast
import inspect
import re

import pytest

from flexengine import Engine, EngineOptions
from tests.helpers.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Placeholders of the page: letters and numbers that stand for a value, and "..." for a part left out.
PLACEHOLDER = re.compile(r"\.\.\.|'[xy]'|'\.y'|OUT\.jsonl(?:\.journal)?|--[xy]\b|\b(?:[xyzNM]|7)\b|line 7: |%s")


def constants() -> str:
    """Return all text constants of the package, one a line. Parts of an f-string are separate constants."""
    found = []
    for path in sorted((ROOT / "flexengine").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(found)


def quoted() -> list[str]:
    """Return the messages in the first column of the tables."""
    cells = re.findall(r"^\| (.+?) \|", PAGE, re.M)
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def code() -> str:
    return constants()


def test_messages_are_those_of_the_code(code: str) -> None:
    messages = quoted()
    assert len(messages) > 60
    missing = []
    for message in messages:
        longest = max(PLACEHOLDER.split(message.replace("\\|", "|")), key=len).strip(" ;:,()")
        if longest not in code:
            missing.append(longest)
    assert missing == []


def test_a_message_that_is_not_in_the_code_is_found(code: str) -> None:
    assert "there is no such message at all" not in code
    assert "is not writable; name another output" in code


def test_names_in_python_exist(code: str) -> None:
    """A message such as "give --restart (restart=True in Python)" names an argument of `run_job` or of `Engine`."""
    named = set(re.findall(r"\((\w+)(?:=[^)]*)? in Python\)", code))
    assert {"restart", "retry_errors", "input_format", "limit", "verify"} <= named
    assert named <= {*inspect.signature(Engine.run_job).parameters, *inspect.signature(EngineOptions).parameters}
