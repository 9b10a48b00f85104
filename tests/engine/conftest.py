"""An engine of a tiny model, for the tests of what an engine takes in Python."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flexengine import Engine
from tests.helpers.speaker import SHORT, TEXTS, make_speaker, opened


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny model."""
    made = tmp_path_factory.mktemp("speaker")
    make_speaker(made)
    return made


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    """Its engine, with the `expected` tokens of TEXTS."""
    with opened(directory) as engine:
        engine.expected = [result.token_ids for result in engine.generate(TEXTS, SHORT)]  # type: ignore[attr-defined]
        yield engine
