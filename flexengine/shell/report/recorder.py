"""Collect a job's numbers while it runs, in bounded memory, and write its page from time to time and at the end."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flexengine.config import Completion, Result
from flexengine.engine.summary import JobCounts, Progress
from flexengine.errors import InvalidInput, check_library
from flexengine.job.files import whole_file
from flexengine.job.resume import JobStore
from flexengine.plan.feedback import SweepMonitor
from flexengine.shell.report.record import TIME, Bucket, ReportRecord, SweepRates, SweepSample, machine, planned

if TYPE_CHECKING:  # it imports torch, and `check` comes before the engine is opened
    from flexengine.engine.session import Session

RENEW_SECONDS = 20.0  # between two pages of a running job, at least
FIRST_SECONDS = 5.0  # before the first page
MOST_SHARE = 0.02  # of the job's time that writing pages of a running job may take


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
    check_library("matplotlib.figure", "--report needs matplotlib", "report")


class ReportRecorder:
    """Recorder of a job, which writes the page of its `record`. Use as a context manager around the job.

    A page that cannot be written or drawn does not stop the job: `say` gets the reason, each reason once.

    Args:
        path: file of the page, which `check` has accepted.
        command: words of the command that runs the job.
        rows: counts of the job's rows.
        say: called with messages.
    """

    def __init__(self, path: str, command: Sequence[str], rows: JobStore, say: Callable[[str], None]) -> None:
        self.path, self._rows, self._say = path, rows, say
        self.record, self._sample, self._rates = ReportRecord(shlex.join(command)), SweepSample(), SweepRates()
        self._engine: Session | None = None
        self._watch: SweepMonitor | None = None
        self._decodes, self._taken, self._said = 0, 0, set[str]()
        self._began = time.perf_counter()
        self._next = self._began + FIRST_SECONDS

    def __enter__(self) -> Self:
        return self

    def attach(self, engine: "Session") -> None:
        """Observe an engine, before its job begins."""
        self._engine, self.record.model = engine, engine.core.source.name
        engine.core.sample = self._sample

    def sweep(self, progress: Progress) -> None:
        """Record a sweep that has ended. Write the page if it is time to."""
        last, total = self.record.totals, replace(progress)
        self.record.totals = total
        prefill = total.prefill_seconds > last.prefill_seconds
        tokens = max(0, total.tokens - last.tokens)  # fewer after a replan, as unfinished rows start again
        self._decodes += not prefill
        seconds = total.prefill_seconds - last.prefill_seconds, total.decode_seconds - last.decode_seconds
        prompt_tokens = total.computed_prompt_tokens - last.computed_prompt_tokens
        self._rates.add(Bucket(1, *seconds, prompt_tokens, tokens * (not prefill)))
        assert self._engine is not None
        if self._watch not in (None, self._engine.watch):
            self._sample.drop()
        self._watch = self._engine.watch
        self._sample.sweep_ended(total.sweeps, prefill)
        if time.perf_counter() >= self._next:
            self._write("running")

    def take(self, result: Result) -> None:
        """Record the result of a row."""
        self._taken += 1
        if result.error is not None:
            self.record.errors.add(result.index, result.error)
            return
        self.record.prompts[result.prompt_tokens] += 1
        samples: Sequence[Completion | Result] = result.samples or [result]
        self.record.completions.update(len(sample.token_ids) for sample in samples)
        self.record.endings.update(sample.finish_reason or "none" for sample in samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is None:
            return  # the job was refused
        if self._engine.watch is None and not self._taken:  # refused later, or nothing to do
            if kind is None:
                self._say(f"no row remained to be run, so --report writes no page; {self.path} is left as it is")
        elif kind is None:
            self._write("done")
        elif issubclass(kind, KeyboardInterrupt):
            self._write("interrupted")
        else:
            self._write("failed", str(error) or kind.__name__)

    def _write(self, state: str, error: str = "") -> None:
        from flexengine.shell.report.page import render

        began = time.perf_counter()
        try:
            self._renew(state, error)
            page = render(self.record).encode("utf-8", "backslashreplace")
            with whole_file(self.path) as file:
                file.write(page)
        except Exception as problem:  # the job matters more than its page
            message = f"the report {self.path} is not written: {problem or type(problem).__name__}"
            if message not in self._said:
                self._said.add(message)
                self._say(message)
        end = time.perf_counter()
        self._next = end + max(RENEW_SECONDS, (end - began) / MOST_SHARE)

    def _renew(self, state: str, error: str) -> None:
        """Set the fields of the record that are not counted while the job runs."""
        assert self._engine is not None
        shown, rows, watch = self.record, self._rows, self._engine.watch
        shown.state, shown.error, shown.written = state, error, time.strftime(TIME)
        shown.machine = shown.machine or machine()
        shown.elapsed = time.perf_counter() - self._began
        shown.counts = JobCounts(rows.total, rows.done, rows.failed, rows.resumed)
        shown.rates = self._rates.buckets
        shown.plan = None if watch is None else planned(watch, shown.model)
        shown.sweep = self._sample.typical(shown.totals.decode_seconds / max(1, self._decodes))
        shown.summary = {} if state == "running" else self._engine.summary.to_json()
