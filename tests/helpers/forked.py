"""Programs in processes of their own, forked from a process that has imported all libraries.

Importing torch and transformers takes seconds, which a test that kills a program many times would spend each time.
"""

import functools
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.helpers.pages import ROOT

_IMPORTED = (
    "tqdm", "transformers.models.llama.modeling_llama", "flexengine.engine.engine", "flexengine.job.resume",
    "flexengine.runtime.execute", "flexengine.shell.commands.run", "flexengine.shell.commands.evaluate",
    "flexengine.apps.evaluate.evaluation", "flexengine.shell.commands.wrangle", "flexengine.apps.wrangle.run",
    "flexengine.apps.wrangle.plan", "tests.apps.wrangle.killed",
)  # fmt: skip
SLOW = """
import time
from flexengine.job.journal import Journal
add = Journal.add
def slow(journal, result):
    add(journal, result)
    time.sleep({seconds})
Journal.add = slow
from flexengine.shell.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


class Forked:
    """A process that executes code, as `python -c` does, with one thread and the environment of this process.

    Args:
        code: statements. `sys` is imported.
        arguments: `sys.argv[1:]` of the code.
        folder: working directory.
        log: file to which all that the process prints is appended.
    """

    def __init__(self, code: str, arguments: Sequence[str], folder: Path, log: Path) -> None:
        log.touch()
        self.log = log
        self._code: int | None = None
        words = {"code": code, "argv": ["-c", *arguments], "folder": str(folder), "log": str(log)}
        self.pid: int = _ask({**words, "environment": dict(os.environ)})

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, or None while the process runs."""
        if self._code is None:
            self._code = _ask({"ended": self.pid})
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code of the process. Wait at most `timeout` seconds for its end."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def said(self) -> str:
        """Return all that was printed."""
        return self.log.read_text()


def children(pid: int) -> list[int]:
    """Return the processes that the main thread of a process has started, and that have not ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """Return the process that forks. It computes nothing, as OpenMP does not survive a fork."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _ask(request: dict[str, Any]) -> Any:
    stdin, stdout = _server().stdin, _server().stdout
    assert stdin
    assert stdout
    stdin.write(json.dumps(request) + "\n")
    stdin.flush()
    return json.loads(stdout.readline())


def _serve() -> str:
    """Answer requests from standard input. Return the code to execute in each child, and nothing at the end."""
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            ended, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif not (answer := os.fork()):
            _become(request)
            return str(request["code"])
        print(json.dumps(answer), flush=True)
    return ""


def _become(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    sys.argv = request["argv"]


class SlowCommand:
    """A `flexengine` command that pauses after each finished row, so that it can be killed in between.

    Args:
        words: command line, from the command's name on.
        seconds: length of the pause.
        folder: working directory.
        journal: journal of the command's job.
    """

    def __init__(self, words: Sequence[str], seconds: float, folder: Path, journal: Path) -> None:
        self.words, self.seconds, self.folder, self.journal = words, seconds, folder, journal

    def rows_done(self) -> int:
        """Return the number of records of rows in the journal."""
        return self.journal.read_bytes().count(b'"index"') if self.journal.exists() else 0

    def start_and_kill(self, rng: random.Random, rows: int) -> None:
        """Start the command, and kill it within a second of its start, or after up to `rows` further rows are done."""
        child = Forked(SLOW.format(seconds=self.seconds), self.words, self.folder, self.folder / "log")
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 1))
        else:
            wanted, deadline = self.rows_done() + rng.randrange(1, rows + 1), time.monotonic() + 120
            while self.rows_done() < wanted and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 2 * self.seconds))
        child.send_signal(signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL, child.said()


if __name__ == "__main__":
    if program := _serve():
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__", "sys": sys})
