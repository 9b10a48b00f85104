"""Files that docs/architecture.md, other docs and the first lines of packages name exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"\b[a-z_0-9]+(?:/[a-z_0-9]+)+\.(?:py|html|cpp|h|md)\b")
OF_PACKAGE = re.compile(r"\bflexengine/[a-z_0-9/]+\.(?:py|html|cpp|h|md)\b")
MODULE = re.compile(r"\b[a-z_0-9]+\.py\b")


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(PATH.findall(text))
    assert len(named) > 80  # the search sees something
    assert {path for path in named if not any((ROOT / base / path).exists() for base in ("", "flexengine"))} == set()


def test_files_of_the_package_that_docs_name_exist() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    named = {(name, found) for name, text in texts.items() for found in OF_PACKAGE.findall(text)}
    assert len(named) > 3  # the search sees something
    assert {(name, found) for name, found in named if not (ROOT / found).exists()} == set()


def test_modules_that_the_architecture_and_packages_name_exist() -> None:
    folders = (ROOT / name for name in ("flexengine", "tests", "bench"))
    known = {path.name for folder in folders for path in folder.rglob("*.py")}
    texts = [ROOT / "docs/architecture.md", *(ROOT / "flexengine").rglob("__init__.py")]
    named = {(path.parent.name, found) for path in texts for found in MODULE.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 100  # the search sees something
    assert {(place, found) for place, found in named if found not in known} == set()
