"""Collect a job's numbers while it runs, in bounded memory, and write its page from time to time and at the end."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from flexengine.config import Completion, Result
from flexengine.engine.summary import JobCounts, Progress
from flexengine.errors import InvalidInput
from flexengine.job.files import part_path
from flexengine.job.resume import JobStore
from flexengine.plan.feedback import SweepMonitor
from flexengine.shell.report.base import NoReport
from flexengine.shell.report.record import (
    DONE,
    FAILED,
    INTERRUPTED,
    RUNNING,
    Bucket,
    ErrorCounts,
    Lengths,
    ReportRecord,
    SweepRates,
    machine,
    planned,
)
from flexengine.shell.report.timeline import SweepSample

if TYPE_CHECKING:  # it imports torch, and `check` comes before the engine is opened
    from flexengine.engine.session import Session

Say = Callable[[str], None]
Clock = Callable[[], float]
RENEW_SECONDS = 20.0  # between two pages of a running job, at least
FIRST_SECONDS = 5.0  # before the first page
MOST_SHARE = 0.02  # of the job's time that writing pages of a running job may take
TIME = "%Y-%m-%d %H:%M:%S %z"
INSTALL = "pip install 'flexengine[report]'"


def check(path: str) -> None:
    """Raise InvalidInput if a page cannot be written to `path`. Called before all work."""
    target = Path(path).resolve()
    if target.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(f"--report is {path}; it must end with .html, as the report is a page; change the name")
    if target.exists() and not target.is_file():
        kind = "a directory" if target.is_dir() else "no plain file"
        raise InvalidInput(f"--report {path} is {kind}; name a plain file")
    if not target.parent.is_dir():
        raise InvalidInput(f"--report {path}: the directory {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK):
        raise InvalidInput(f"--report {path}: {target.parent} is not writable; name another file")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"--report needs matplotlib ({error}); {INSTALL}") from error


class ReportRecorder(NoReport):
    """Recorder of a job, which writes the page. Use as a context manager around the job.

    A page that cannot be written or drawn does not stop the job: `say` gets the reason, each reason once.
    """

    def __init__(self, path: str, command: Sequence[str], rows: JobStore, say: Say, clock: Clock = time.perf_counter):
        """Record a job for the page `path`, which `check` has accepted.

        Args:
            command: words of the command that runs the job.
            rows: counts of the job's rows.
            say: called with messages.
        """
        self.path, self._command, self._rows, self._say, self._clock = path, command, rows, say, clock
        self.sample, self._rates, self._errors, self._lengths = SweepSample(), SweepRates(), ErrorCounts(), Lengths()
        self._engine: Session | None = None
        self._watch: SweepMonitor | None = None
        self._totals, self._decodes, self._taken, self._said = Progress(), 0, 0, set[str]()
        self._began, self._since = time.localtime(), clock()
        self._next = self._since + FIRST_SECONDS

    def attach(self, engine: "Session") -> None:
        self._engine = engine
        engine.core.sample = self.sample

    def sweep(self, progress: Progress) -> None:
        last, self._totals = self._totals, replace(progress)
        now = self._totals
        prefill = now.prefill_seconds > last.prefill_seconds
        tokens = max(0, now.tokens - last.tokens)  # fewer after a replan, as unfinished rows start again
        self._decodes += not prefill
        seconds = now.prefill_seconds - last.prefill_seconds, now.decode_seconds - last.decode_seconds
        prompt_tokens = now.computed_prompt_tokens - last.computed_prompt_tokens
        self._rates.add(Bucket(1, *seconds, prompt_tokens, tokens * (not prefill)))
        assert self._engine is not None
        if self._engine.watch is not self._watch:
            if self._watch is not None:
                self.sample.drop()
            self._watch = self._engine.watch
        self.sample.sweep_ended(now.sweeps, prefill)
        if self._clock() >= self._next:
            self._write(RUNNING)

    def take(self, result: Result) -> None:
        self._taken += 1
        if result.error is not None:
            self._errors.add(result.index, result.error)
            return
        self._lengths.prompts[result.prompt_tokens] += 1
        samples: Sequence[Completion | Result] = result.samples or [result]
        self._lengths.completions.update(len(sample.token_ids) for sample in samples)
        self._lengths.endings.update(sample.finish_reason or "none" for sample in samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is None:
            return  # the job was refused
        if self._engine.watch is None and not self._taken:  # refused later, or nothing to do
            if kind is None:
                self._say(f"no row remained to be run, so --report writes no page; {self.path} is left as it is")
            return
        if kind is None:
            self._write(DONE)
        elif issubclass(kind, KeyboardInterrupt):
            self._write(INTERRUPTED)
        else:
            self._write(FAILED, str(error) or kind.__name__)

    def record(self, state: str, error: str = "") -> ReportRecord:
        """Return the job so far. Arguments as in ReportRecord."""
        assert self._engine is not None
        name, watch = self._engine.core.source.name, self._engine.watch
        mean = self._totals.decode_seconds / max(1, self._decodes)
        return ReportRecord(
            model=name,
            state=state,
            error=error,
            began=time.strftime(TIME, self._began),
            written=time.strftime(TIME),
            elapsed=self._clock() - self._since,
            command=shlex.join(self._command),
            folder=os.getcwd(),
            counts=JobCounts(self._rows.total, self._rows.done, self._rows.failed, self._rows.resumed),
            totals=self._totals,
            lengths=self._lengths,
            errors=self._errors,
            rates=self._rates.buckets,
            plan=planned(watch, name) if watch is not None else None,
            sweep=self.sample.typical(mean),
            summary=self._engine.summary.to_json() if state != RUNNING else {},
            machine=machine(),
        )

    def _write(self, state: str, error: str = "") -> None:
        from flexengine.shell.report.page import render

        began, part = self._clock(), part_path(self.path)
        try:
            text = render(self.record(state, error))
            part.unlink(missing_ok=True)  # if `part` is a link, the page must not be written to the link's target
            with part.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            os.replace(part, Path(self.path).resolve())
        except Exception as problem:  # the job matters more than its page
            message = f"the report {self.path} is not written: {problem or type(problem).__name__}"
            if message not in self._said:
                self._said.add(message)
                self._say(message)
            with suppress(OSError):
                part.unlink(missing_ok=True)
        now = self._clock()
        self._next = now + max(RENEW_SECONDS, (now - began) / MOST_SHARE)
