"""Files that docs/architecture.md names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"\b[a-z_0-9]+(?:/[a-z_0-9]+)+\.(?:py|html|cpp|h|md)\b")


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(PATH.findall(text))
    assert len(named) > 80  # the search sees something
    assert {path for path in named if not any((ROOT / base / path).exists() for base in ("", "flexengine"))} == set()
