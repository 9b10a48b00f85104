"""Code blocks of README.md and docs/, and the way to run them.

A block of a language in RUN is run, in the order of its page, in a folder that holds `examples`. `flexengine` commands
run in this process. A comment of the form <!-- not run: REASON --> on the line above a block exempts the block. After a
block that is run,

* each line of a `text` block must occur in the output of the block before, unless <!-- differs: REASON --> is above;
* a `json` block has rows, which must be those of the job before, without `token_ids`.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from flexengine.shell.commands.main import main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
RUN = ("sh", "bash", "python", "console")
_PLANS: dict[str, str] = {}  # output of commands that only plan for a given machine; pages have some in common
_FENCE = re.compile(r"^(?:<!-- ([\w ]+): ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        kind: language after the fence; "" if there is none.
        text: lines between the fences.
        mark: first words of the comment above: "not run", "differs" or "".
        reason: rest of the comment.
    """

    kind: str
    text: str
    mark: str
    reason: str

    @property
    def runs(self) -> bool:
        """Return whether the block is run."""
        return self.kind in RUN and self.mark != "not run"


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(match[3], match[4], match[1] or "", match[2] or "") for match in found]


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if (line := re.sub(r"\s+#.*", "", line).strip()) and not line.startswith("#"):
            yield line


class Runner:
    """Runs the blocks of a page in the present directory.

    Attributes:
        printed: output of the last block, standard output first.
        rows: rows that the last job wrote, without `token_ids`.
    """

    def __init__(self) -> None:
        self.printed = ""
        self.rows: list[dict[str, Any]] = []
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        """Run a block. Raise AssertionError if a command fails."""
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            with redirect_stdout(out), redirect_stderr(err):
                if block.kind == "python":
                    exec(compile(block.text, "block", "exec"), self._names)
                else:
                    for command in commands(block.text):
                        self._command(command, out)
            self.printed = _written(out) + _written(err)

    def compare(self, block: Block) -> None:
        """Compare a `text` or `json` block with the output of the block before."""
        for line in filter(None, block.text.splitlines()):
            if block.kind == "json":
                assert json.loads(line) in self.rows
            else:
                assert line in self.printed.splitlines()

    def _command(self, command: str, out: IO[str]) -> None:
        words = shlex.split(command)
        if words[0] != "flexengine":
            subprocess.run(command, shell=True, check=True, capture_output=True, timeout=60)
            return
        if command in _PLANS:
            out.write(_PLANS[command])
            return
        began = len(_written(out))
        assert main(words[1:]) == 0, command
        if words[1] == "plan" and "--hardware" in words and "--save" not in words:
            _PLANS[command] = _written(out)[began:]
        if words[1] == "run":
            named = {"-o", "--output"} & set(words)
            text = Path(words[words.index(named.pop()) + 1]).read_text() if named else _written(out)[began:]
            rows = [json.loads(line) for line in text.splitlines()]
            self.rows = [{name: value for name, value in row.items() if name != "token_ids"} for row in rows]


def _written(file: IO[str]) -> str:
    file.flush()
    file.seek(0)
    return file.read()
