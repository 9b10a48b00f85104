"""A file format is one reader and one line in FORMATS."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from flexengine.job.inputs import FORMATS, Format, InputFile, InputRows, ReadRows
from flexengine.job.row_fields import RowRules
from flexengine.job.rows import Row


def open_words(source: InputFile, rules: RowRules) -> ReadRows:
    """Return the reader of a file whose words are prompts."""

    def rows(file: BinaryIO) -> Iterator[Row]:
        for index, word in enumerate(file.read().decode().split()):
            yield Row(index, 1, {"prompt": word})

    return rows


def test_a_format_is_added_without_a_change_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "words", Format("tests.job.test_formats:open_words", (".words",)))
    (tmp_path / "in.words").write_text("one two three")
    with InputRows(tmp_path / "in.words", limit=2, chat=True) as rows:
        assert [(row.prompt, row.chat) for row in rows] == [("one", True), ("two", True)]
        assert rows.scan().total == 2


def test_readers_are_imported_when_a_file_of_their_format_is_opened(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    code = "import sys; from flexengine.job.inputs import InputRows; print(len(list(InputRows(sys.argv[1]))))\n"
    code += "print([name for name in sys.modules if name.startswith('flexengine.job.') and 'read' in name])\n"
    code += "print({'csv', 'pyarrow', 'numpy', 'flexengine.job.openai'} & set(sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "in.jsonl"], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["1", "['flexengine.job.read_json']", "set()"]
