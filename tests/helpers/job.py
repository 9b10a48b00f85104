"""A job of the run command."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.shell.commands import run
from tests.helpers.families import NEW

Rows = list[dict[str, Any]]
FIELDS = ["index", "generated_text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "error"]


class Job:
    """A prompt file, a model, and the last run's exit code, rows and streams."""

    def __init__(self, folder: Path, family: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.family, self.capsys = folder, family, capsys
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, rows: list[Any]) -> None:
        self.input.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))

    def arguments(self, *more: str) -> list[str]:
        return [str(self.input), "--model", str(self.family.directory), "--output", str(self.output), "--max-tokens",
                str(NEW), "--ignore-eos", *more]  # fmt: skip

    def __call__(self, *more: str) -> int:
        self.capsys.readouterr()
        code = run.main(self.arguments(*more))
        self.out, self.err = self.capsys.readouterr()
        return code

    @property
    def rows(self) -> Rows:
        return [json.loads(line) for line in self.output.read_text().splitlines()]
