"""Output of a command on standard error: progress, messages, row errors, and the result of a run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexengine.activity import Activity, message, reporting
from flexengine.activity.terminal import Display
from flexengine.config import Result
from flexengine.job.rows import chat_fault
from flexengine.plan.formatting import clock, count, digits, lane_name, percent, place_name, plain, size
from flexengine.shell.commands.messages import NORMAL, VERBOSE, verbosity

if TYPE_CHECKING:
    from flexengine.job.inputs import InputRows
    from flexengine.job.resume import JobStore

SHOWN_ERRORS = 5  # errors of rows that are printed while a job runs
SHOWN_CHARACTERS = 600  # of such an error; a row's text may be part of it


class CommandDisplay(Display):
    """Display of a command, with the plan of a job. With -q it prints errors only, with -v the end of each activity,
    too."""

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)

    def __call__(self, record: Activity) -> None:
        self.all_ends = verbosity() >= VERBOSE
        if verbosity() >= NORMAL or record.level >= logging.ERROR:
            super().__call__(replace(record, text=plain(record.text)))  # names of files may hold any character


@contextmanager
def displayed() -> Iterator[None]:
    """Show all reports and messages of the block on standard error, as far as -q allows. Messages of the logger
    "flexengine", which come from threads that have no listener, are among them."""
    display, log = CommandDisplay(), logging.getLogger("flexengine")

    def emit(record: logging.LogRecord) -> None:
        with reporting(display):
            message(record.getMessage(), record.levelno)

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with reporting(display):
            yield
    finally:
        log.removeHandler(handler)


class RowNotes:
    """Prints the first errors of rows while a job runs, and counts the rows and those whose text is empty."""

    def __init__(self) -> None:
        self._rows = self._failed = self._empty = 0

    def take(self, result: Result) -> None:
        """Count a row. Print its error, if it has one, up to SHOWN_ERRORS errors."""
        self._rows += 1
        self._empty += result.error is None and result.generated_text == ""
        if not result.error:
            return
        self._failed += 1
        if self._failed <= SHOWN_ERRORS:
            message(f"row {result.index}: {result.error}"[:SHOWN_CHARACTERS], logging.ERROR)
        elif self._failed == SHOWN_ERRORS + 1:
            message("more rows failed; their errors are in the output", logging.ERROR)

    def hint(self, rows: "InputRows", tokenizer: Any) -> str:
        """Return a line that names --chat; "" unless at least half of the texts are empty, all prompts of the input
        were continued as they stand, and the model has a chat template."""
        if not self._empty or 2 * self._empty < self._rows or rows.chat or not rows.scan().only_texts:
            return ""
        if chat_fault(tokenizer) is not None:
            return ""
        empty = f"{self._empty} of {count(self._rows, 'text is', 'texts are')} empty"
        return f"{empty}; --chat runs each prompt as a user's message, through the model's chat template"


def last_line(job: "JobStore", output: str | None, summary: dict[str, Any]) -> str:
    """Return the result of a run in one line.

    Args:
        summary: the engine's summary; empty if no row remained to be run.
    """
    if summary:
        all_runs = f"; {job.done + job.failed} of {job.total} rows with those of earlier runs" if job.resumed else ""
        return summary_line(summary) + all_runs + (f"; results are in {output}" if output else "")
    if not job.done and not job.failed:
        return f"0 rows done: {job.rows.path} has no rows"
    if not job.finished:
        return f"{_rows(job.done)} done, {job.failed} failed; all of them were in the journal; results are in {output}"
    retry = "--retry-errors runs these rows again, with more memory if they did not fit; " if job.failed else ""
    finished = f"finished already: {_rows(job.total)} in {output} ({job.failed} with errors)"
    return f"{finished}; {retry}--restart runs the job again"


def _rows(number: int) -> str:
    return count(number, "row", "rows")


def summary_line(s: dict[str, Any]) -> str:
    """Return the rows of a summary and, if there was a sweep, tokens, seconds and rate."""
    rows = f"{_rows(s['rows'])} done, {s['failed']} failed"
    if not s["sweeps"]:
        return rows
    took = clock(s["total_seconds"])
    if s["scored_tokens"] and not s["generated_tokens"]:
        tokens = f"{s['scored_tokens']} tokens scored, {s['computed_prompt_tokens']} computed"
        return f"{rows}; {tokens} in {took}: {digits(s['rows'] / s['total_seconds'])} rows/s"
    tokens = f"{s['prompt_tokens']} prompt and {s['generated_tokens']} generated tokens"
    return f"{rows}; {tokens} in {took}: {digits(s['generated_tok_s'])} tok/s"


def detail_lines(s: dict[str, Any]) -> list[str]:
    """Return the other numbers of a summary, for -v."""
    shared = s["device"] == "cpu"
    shares = sorted(s["busy"].items(), key=lambda item: -item[1])
    busy = ", ".join(f"{_lane(lane, shared)} {percent(share)}" for lane, share in shares)
    moved = ", ".join(f"{_lane(lane, shared)} {size(n)}" for lane, n in s["bytes"].items() if n)
    peak = ", ".join(f"{place_name(place, shared)} {size(n)}" for place, n in s["peak_bytes"].items() if n)
    decode = f"{clock(s['decode_seconds'])} in {'the other sweeps' if s['prefill_seconds'] else 'sweeps'}"
    prefill = f"{clock(s['prefill_seconds'])} in sweeps with prompts"
    lines = [
        f"time: {clock(s['load_seconds'])} before the first sweep, {prefill}, {decode}",
        f"lanes were busy: {busy or 'none'}",
        f"moved: {moved or 'nothing'}",
        f"most memory: {peak}",
        prediction_words(s),
    ]
    return list(filter(None, lines))


def prediction_words(s: dict[str, Any]) -> str:
    """Return how well the time of a job was predicted; "" if rates were not measured or the job was too short."""
    from flexengine.plan.feedback import MAX_RELATIVE_ERROR, MIN_JOB_SECONDS, MIN_JOB_SWEEPS

    plan = s.get("plan")
    if not plan or not plan["measured"] or s["sweeps"] < MIN_JOB_SWEEPS or s["total_seconds"] < MIN_JOB_SECONDS:
        return ""
    took, predicted = plan["measured_seconds"], plan["predicted_seconds"]
    text = f"took {clock(took)}, predicted {clock(predicted)}"
    if abs(predicted / took - 1) <= MAX_RELATIVE_ERROR:
        return text
    sign = 1 if took > predicted else -1
    lanes = {lane: x for lane, x in plan["lanes"].items() if x["measured"] or x["predicted"]}
    worst = max(lanes, key=lambda lane: sign * (lanes[lane]["measured"] - lanes[lane]["predicted"]), default=None)
    if worst is None or sign * (lanes[worst]["measured"] - lanes[worst]["predicted"]) <= 0:
        return text
    times = f"{clock(lanes[worst]['measured'])}, predicted {clock(lanes[worst]['predicted'])}"
    return f"{text}: the largest difference is in {_lane(worst, s['device'] == 'cpu')}, which took {times}"


def _lane(lane: str, shared: bool) -> str:
    return "reading weights into memory" if lane == "loading" else lane_name(lane, shared)


def verified_line(checked: dict[str, Any]) -> str:
    """Return the files, bytes and seconds of checksum comparisons as text."""
    files, nbytes = count(checked["files"], "file", "files"), size(checked["bytes"])
    return f"verified {files}, {nbytes}, in {clock(checked['seconds'])}"
