"""One job, run once for each fault and then again without an injected fault. Does the output equal that of an
undisturbed job, is no row lost or computed twice, and is no file left over?

Every run is a fork of this process, which has imported all modules and computed nothing (OpenMP does not survive a
fork).
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.faults.failing import Failing, Fault
from bench.harness import Record

PATIENCE = 60  # seconds until a run counts as hanging
HUNG = 98
EXIT_CODES = (0, 1, 2, 3)  # exit codes of a run that ended by itself
BATCH_TIME = re.compile(rb'"created": \d+')


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        code: exit code, -9 after SIGKILL, or HUNG.
        made: number of calls of the fault's kinds.
        struck: the call that failed.
        said: printed output.
    """

    code: int
    said: str
    made: int
    struck: str
    seconds: float

    def ended_well(self) -> bool:
        """Return whether the run ended as a command should: by itself, with a message and without a traceback."""
        lines = self.said.strip().splitlines()
        failed = self.code in (2, 3)
        return self.code in EXIT_CODES and "Traceback" not in self.said and not (failed and not _is_message(lines))


def _is_message(lines: Sequence[str]) -> bool:
    return any("flexengine: " in line and len(line) > 25 for line in lines[-3:])


def forked(
    work: Callable[[], int], folders: Sequence[Path], fault: Fault, log: Path, seconds: float = PATIENCE
) -> Ended:
    """Run `work` in a process of its own, while files below `folders` fail, and kill the process if it takes too long.

    Args:
        log: file for its output, outside of `folders`.
    """
    log.unlink(missing_ok=True)
    counts = log.with_suffix(".counts")
    counts.unlink(missing_ok=True)
    began = time.monotonic()
    if not (child := os.fork()):
        code = 99
        try:
            _speak_to(log)
            pen = os.open(counts, os.O_WRONLY | os.O_CREAT, 0o600)
            with Failing(folders, fault, lambda call: _write(pen, json.dumps([fault.number, call]))) as failing:
                code = work()
            os.ftruncate(pen, 0)
            _write(pen, json.dumps([failing.made, failing.struck]))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    code = _waited(child, seconds)
    text = counts.read_text() if counts.exists() else ""
    made, struck = json.loads(text) if text else (0, "")
    said = log.read_text(errors="replace") if log.exists() else ""
    return Ended(code, said, made, struck, time.monotonic() - began)


def _waited(child: int, seconds: float) -> int:
    """Return the exit code of a process. Kill it if it has not ended in time. Time in which this process was itself
    stopped (a machine that sleeps, SIGSTOP) does not count."""
    pause, last = 0.001, time.monotonic()
    while seconds > 0:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        now = time.monotonic()
        seconds, last = seconds - min(now - last, 0.5), now
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


def _write(file: int, text: str) -> None:
    os.pwrite(file, text.encode(), 0)


def _speak_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)


@contextmanager
def own_cache(folder: Path) -> Iterator[Path]:
    """Use a cache, while the block runs, that holds only the compiled kernels of the usual cache."""
    from flexengine.config import cache_root

    kernels = cache_root() / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    (folder / "kernels").symlink_to(kernels)
    before, os.environ["FLEXENGINE_CACHE"] = os.environ.get("FLEXENGINE_CACHE"), str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["FLEXENGINE_CACHE"]
        else:
            os.environ["FLEXENGINE_CACHE"] = before


@dataclass
class Tally:
    """Results of the faults of one kind.

    Attributes:
        survived: faults that the run reported or coped with, after which the next run's output was right and no file
            left.
        lost: rows missing at the end, or finished before the fault and not after it.
        repeated: rows finished more than once.
        points: number of faults by failed call.
        faults: the first few faults that were not survived.
    """

    kind: str
    tried: int = 0
    survived: int = 0
    lost: int = 0
    repeated: int = 0
    slowest: float = 0.0
    points: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, what: str, wrong: list[str], lost: int = 0, repeated: int = 0, seconds: float = 0.0) -> None:
        """Count one fault. `wrong` lists what was not as it should be."""
        self.tried += 1
        self.lost, self.repeated = self.lost + lost, self.repeated + repeated
        self.slowest = max(self.slowest, round(seconds, 2))
        if not wrong and not lost and not repeated:
            self.survived += 1
        elif len(self.faults) < 10:
            self.faults.append(f"{what}: {'; '.join(wrong)}, lost {lost}, repeated {repeated}")

    def record(self) -> Record:
        """Return the tally as a JSON record."""
        return {**vars(self), "points": dict(sorted(self.points.items()))}

    def line(self) -> str:
        """Return the tally as a line of text."""
        return (f"{self.kind:34} tried {self.tried:6,}  survived {self.survived:6,}  lost {self.lost:3}"
                f"  repeated {self.repeated:3}")  # fmt: skip


class Trials:
    """A job that runs again and again in `folder`, which is emptied each time except for the input.

    Attributes:
        command: run the job with these arguments and return the exit code.
    """

    def __init__(
        self, folder: Path, rows: bytes, arguments: Sequence[str], command: Callable[[list[str]], int]
    ) -> None:
        self.folder, self.command = folder, command
        self.job, self.log = folder / "job", folder / "log"
        self.rows, self.given = rows, arguments
        self.input, self.output = self.job / "in.jsonl", self.job / "out.jsonl"
        self.journal, self.offload = self.job / "out.jsonl.journal", self.job / "offload"
        self.watched, self.kept = [self.job], {"in.jsonl", "out.jsonl", "out.jsonl.journal"}
        folder.mkdir(parents=True, exist_ok=True)
        self.fresh()
        ended = self.run(Fault())
        if ended.code not in (0, 1):
            raise RuntimeError(f"the job fails without an injected fault: exit code {ended.code}\n{ended.said[-3000:]}")
        self.expected, self.code = self.bytes(), ended.code
        self.total = len([line for line in rows.splitlines() if line.strip()])

    def arguments(self) -> list[str]:
        return [str(self.input), "--output", str(self.output), "--offload-dir", str(self.offload), *self.given]

    def fresh(self) -> None:
        """Empty the folder except for the input."""
        shutil.rmtree(self.job, ignore_errors=True)
        self.job.mkdir(mode=0o700)
        self.input.write_bytes(self.rows)

    def run(self, fault: Fault) -> Ended:
        return forked(lambda: self.command(self.arguments()), self.watched, fault, self.log)

    def bytes(self) -> bytes:
        """The output, but for the time of the job's start, which batch lines carry."""
        return BATCH_TIME.sub(b'"created": 0', self.output.read_bytes()) if self.output.exists() else b""

    def done(self) -> list[int]:
        """Return the rows with a whole record in the journal, in order and with repetitions, read without flexengine's
        code."""
        whole = self.journal.read_bytes().rpartition(b"\n")[0] if self.journal.exists() else b""
        records = [json.loads(line[9:]) for line in whole.splitlines()]
        return [record["index"] for record in records if "index" in record]

    def left_over(self) -> list[str]:
        """Return files that must not exist after the job has finished."""
        here = [p.name for p in self.job.iterdir() if p.name not in self.kept | {"offload"}]
        open_to_others = [p.name for p in self.job.iterdir() if p.name.endswith(".journal") and p.stat().st_mode & 0o77]
        return [*here, *(p.name for p in self.offload.glob("*")), *open_to_others]

    def judge(self, fault: Fault, ended: Ended, tally: Tally, prepare: Callable[[], None] = lambda: None) -> None:
        """Finish the job after a fault, and record the outcome. `prepare` is called before."""
        wrong, killed = [], ended.code == -signal.SIGKILL
        if not killed and not ended.ended_well():
            wrong.append(f"exit code {ended.code}: {ended.said.strip()[-400:]}")
        if killed is not fault.how.startswith("kill"):
            wrong.append(f"exit code {ended.code}")
        if (there := self.bytes()) and there != self.expected:
            wrong.append("an output that is not whole")
        before = set(self.done())
        prepare()
        again = self.run(Fault())
        done = self.done()
        if again.code != self.code:
            wrong.append(f"then exit code {again.code}: {again.said.strip()[-400:]}")
        if self.bytes() != self.expected:
            wrong.append("then another output")
        if left := self.left_over():
            wrong.append(f"left over: {left}")
        lost, repeated = len((before | set(range(self.total))) - set(done)), len(done) - len(set(done))
        tally.points[f"{fault.how} {ended.struck or fault.kinds[0]}"] += 1
        where = f"{fault.how}{' from' if fault.lasting else ' at'} {ended.struck or fault.kinds} {fault.number}"
        tally.note(where, wrong, lost, repeated, ended.seconds)

    def numbers(self, kinds: tuple[str, ...], most: int | None) -> Iterator[int]:
        """Return an iterator over 1, 2, ... up to the number of such calls in an undisturbed job. If there are
        more than `most`, return evenly spaced ones."""
        self.fresh()
        calls = self.run(Fault(kinds)).made
        step = 1 if most is None else max(1.0, calls / most)
        return iter(sorted({int(1 + i * step) for i in range(int(calls / step) + 1) if 1 + i * step <= calls}))

    def every(self, kinds: tuple[str, ...], hows: Sequence[str], tally: Tally, most: int | None = None,
              lasting: Sequence[bool] = (False,)) -> None:  # fmt: skip
        """Let the n-th call of these kinds fail, for every n, or for `most` of them."""
        for number in self.numbers(kinds, most):
            for how in hows:
                for stays in lasting if how in ("EIO", "ENOSPC") else (False,):
                    fault = Fault(kinds, number, how, stays)
                    self.fresh()
                    self.judge(fault, self.run(fault), tally)


# A job without a model: all of a job except the arithmetic.


class Stub:
    """Stand-in for an Engine that returns results at once: a sweep per block of four rows, which end in another
    order."""

    def __init__(self, on_sweep: Callable[[Any], None]) -> None:
        self.on_sweep = on_sweep
        from flexengine import Summary

        self.summary = Summary("stub", "cpu", "float32")
        self.core = SimpleNamespace(
            source=SimpleNamespace(name="stub"), cache_form="", empty_summary=lambda: self.summary
        )
        self.options = SimpleNamespace(allow=())
        self.planner = SimpleNamespace(
            check=lambda workload: None, keep_prefill=lambda tokens: False, policy=None, prefill_tokens=None
        )
        self.calibrator = SimpleNamespace(importances=None, thresholds=[])
        self.tokenizer = None
        self.reader = SimpleNamespace(check=lambda params: None, check_chat=lambda chat: None)
        self.lossy = SimpleNamespace(enabled={})
        self.layout = SimpleNamespace(policy=SimpleNamespace(prefill_tokens=128))
        self.switches = dict[str, Any]()

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def choose_bits(self) -> None:
        pass

    def fingerprint(self, known_files: Any) -> dict[str, Any]:
        return {"model": "stub", "model_files": {}}

    def results(self, rows: Any, params: Any, counts: Any) -> Iterator[Any]:
        from flexengine.config import Result

        block: list[Any] = []
        for row in [*rows, None]:
            if row is not None:
                ids = row.request.get("prompt_token_ids", [])
                text, answer = "a" * len(ids), [n + 1 for n in ids]
                block.append(Result(row.index, text, answer, "length", len(ids), len(ids), row.error))
            if block and (row is None or len(block) == 4):
                yield from reversed(block)
                block = []
                self.on_sweep(SimpleNamespace(most=0, tokens=0, rows=0, failed=0))


def stub_command(arguments: list[str]) -> int:
    """Run the command line with a Stub for an engine. The journal is synced after every sweep."""
    from flexengine.job import journal
    from flexengine.shell.commands import openers, run

    setattr(openers, "open_engine", lambda args, on_sweep, group: Stub(on_sweep))  # noqa: B010
    journal.SYNC_SECONDS = 0.0
    return run.main(arguments)


def real_command(arguments: list[str]) -> int:
    """Run the command line, with the journal synced after every sweep."""
    from flexengine.job import journal
    from flexengine.shell.commands import run

    journal.SYNC_SECONDS = 0.0
    return run.main(arguments)


def rows_of(count: int) -> bytes:
    """Return prompts of token ids. One in seven rows is bad, one in five is an OpenAI batch line, some are
    duplicates."""
    lines = []
    for i in range(count):
        ids = [3 + (i * i + j) % 500 for j in range(1 + i * 5 % 11)]
        row: Record = {"prompt_token_ids": ids if i % 4 else [7, 8], "max_tokens": 1 + i % 6, "id": i}
        if i % 7 == 2:
            row = {"nothing": i}
        elif i % 5 == 1:
            body = {"prompt": ids, "max_tokens": 1 + i % 3}
            row = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(row))
    return ("\n".join(lines) + "\n").encode()
