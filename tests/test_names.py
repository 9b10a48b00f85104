"""Class names are unique in the package, and its lines and hand-laid ones only become fewer."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "flexengine"
# The package may not grow beyond these; they are lowered when it has shrunk.
MAX_LINES, MAX_FMT_SKIPS = 72_300, 194


def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))]


def shared_names() -> set[str]:
    """Return the names of classes, also of nested ones, that the package has more than once."""
    nodes = (node for text in sources() for node in ast.walk(ast.parse(text)))
    number = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert len(number) > 300  # the walk sees something
    return {name for name, count in number.items() if count > 1}


def test_class_names_are_unique() -> None:
    """A search for a name finds one class. If this fails, rename the new one."""
    assert shared_names() == set()


def test_the_package_does_not_grow() -> None:
    assert sum(len(text.splitlines()) for text in sources()) <= MAX_LINES


def test_the_formatter_lays_lines_out() -> None:
    assert sum(text.count("# fmt: skip") for text in sources()) <= MAX_FMT_SKIPS
