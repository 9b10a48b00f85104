"""Messages, progress, results and exit codes of the commands: how many messages are printed, and their text; tables."""

import errno
import io
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.activity import Activity, listener, message, reporting
from flexengine.activity.display import Display
from flexengine.config import Result
from flexengine.errors import FlexError, InvalidInput, MemberFailed, RanOut, StageFailed, StageLost, WorkerLost, shown
from flexengine.job.chats import chat_fault
from flexengine.job.files import full_disk, stdout_is_open
from flexengine.plan.formatting import clock, count, lane_name, percent, place_name, plain, rate, size
from flexengine.shell.commands.interrupts import Interrupted, Interrupts
from flexengine.words import command_words

if TYPE_CHECKING:
    from flexengine.job.inputs import InputRows
    from flexengine.job.resume import JobStore

_NO_MEMORY = re.compile("can't allocate memory|out of memory")  # in errors of torch
_WHILE_RUNNING = (MemberFailed, RanOut, StageFailed, StageLost, WorkerLost)  # the journal has finished rows
DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
Main = Callable[..., int]  # runs a command line, by default that of this process, and returns the exit code
QUIET, NORMAL, VERBOSE = -1, 0, 1
SHOWN_ERRORS = 5  # errors of rows that are printed while a job runs
SHOWN_CHARACTERS = 600  # of such an error; a row's text may be part of it
_level = NORMAL


def set_verbosity(level: int) -> None:
    """Set how much the process prints: QUIET (errors only), NORMAL or VERBOSE. Each command sets it once, when it has
    read its options."""
    global _level
    _level = level


def verbosity() -> int:
    """Return QUIET, NORMAL or VERBOSE."""
    return _level


def say(text: str) -> None:
    """Print a message, unless -q is given."""
    if _level >= NORMAL:
        _print(text, logging.INFO)


def detail(text: str) -> None:
    """Print a message if -v is given."""
    if _level >= VERBOSE:
        _print(text, logging.DEBUG)


def say_error(text: str) -> None:
    """Print an error as one line."""
    _print(" ".join(text.split()), logging.ERROR)


def _print(text: str, level: int) -> None:
    """Print a line, above the bar if the command shows one. Nothing is printed if stderr is closed."""
    if listener() is not None:
        message(text, level)
    elif sys.stderr is not None:  # print(file=None) would print to stdout
        with suppress(OSError):
            print(f"flexengine: {plain(text)}", file=sys.stderr)


@contextmanager
def displayed() -> Iterator[None]:
    """Show all reports and messages of the block on standard error: with -q errors only, with -v the end of each
    activity, too. Messages of the logger "flexengine", which come from threads that have no listener, are among them.
    """
    display, log = Display(level=logging.DEBUG), logging.getLogger("flexengine")

    def show(record: Activity) -> None:
        display.all_ends = _level >= VERBOSE
        if _level >= NORMAL or record.level >= logging.ERROR:
            display(replace(record, text=plain(record.text)))  # names of files may hold any character

    def emit(record: logging.LogRecord) -> None:
        with reporting(show):
            message(record.getMessage(), record.levelno)

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with reporting(show):
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
    """Return the result of a run in one line. summary: the engine's summary; empty if no row remained to be run."""
    if summary:
        all_runs = f"; {job.done + job.failed} of {job.total} rows with those of earlier runs" if job.resumed else ""
        all_runs += f" ({job.failed} with errors)" if job.resumed and job.failed else ""
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
        speed = rate(s["rows"], s["total_seconds"], "rows")
    else:
        tokens = f"{s['prompt_tokens']} prompt and {s['generated_tokens']} generated tokens"
        speed = rate(s["generated_tokens"], s["total_seconds"], "tok")
    return f"{rows}; {tokens} in {took}{f': {speed}' if speed else ''}"


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


def table(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return the lines as text with aligned columns.

    Args:
        lines: cells of each line. The last cell of a line of fewer cells may be wider than its column.
        right: numbers of the columns that are aligned to the right.
    """
    most = max(map(len, lines))
    columns = ([line[i] for line in lines if i < len(line) - 1 or len(line) == most] for i in range(most))
    widths = [max(map(len, column)) for column in columns]
    sides = [str.rjust if number in right else str.ljust for number in range(most)]
    rows = ([side(cell, width) for side, cell, width in zip(sides, line, widths, strict=False)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in rows)


def ago(when: float) -> str:
    """Return the time since a moment, in seconds since 1970, in words, such as "3 days ago"."""
    seconds = max(0.0, time.time() - when)
    for unit, length in (("day", 24 * 3600), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{count(int(seconds // length), unit, f'{unit}s')} ago"
    return "just now"


# Exit codes.


@command_words()
def exit_code(command: Callable[[], int]) -> int:
    """Run a command, which parses its options, with its progress shown, and return its exit code. If the command raises
    an error, print the error and return its code."""
    _occupy_closed_streams()
    began = time.monotonic()
    try:
        with displayed():
            try:
                code = command()
            except SystemExit:  # of --help, or a wrong command line
                sys.stdout.flush()
                raise
            detail(f"the command took {clock(time.monotonic() - began)}")
        sys.stdout.flush()
        return code
    except FlexError as error:
        say_error(with_room(error))
        return FAILED if isinstance(error, _WHILE_RUNNING) else REFUSED
    except KeyboardInterrupt as stop:
        return stop.code if isinstance(stop, Interrupted) else INTERRUPTED
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and isinstance(error.filename, str):
            from flexengine.job.bad_paths import name_fault  # few names are so long

            if fault := name_fault(error.filename):
                say_error(f"{shown(error.filename)} cannot be a file's name: {fault}; give a shorter name")
                return REFUSED
        text = with_room(error)
        if isinstance(error, BrokenPipeError):
            text = "the reader of the output closed it before all was written"
        elif error.errno == errno.EBADF and not stdout_is_open():
            text = "stdout is closed, so the output is lost; open stdout, or send it to a file"
        # What is left in the buffer goes to /dev/null, else Python's flush at exit fails again.
        if text != str(error) and error.filename in (None, "stdout"):
            with suppress(io.UnsupportedOperation):  # a stream in memory
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say_error(text)
        return FAILED
    except Exception as error:  # a bug, whose exit code must not be Python's 1, as 1 means done with row errors
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            remedy = "give a smaller --device-mem or --host-mem, or end other programs, and run the same command again"
            say_error(f"the system has no more memory{where}; {remedy}")
        else:
            traceback.print_exc()
        return FAILED


def with_room(error: Exception) -> str:
    """Return the message of an error and, if a full disk caused it, what is free there, unless the message says it."""
    cause, text = error if isinstance(error, OSError) else error.__cause__, str(error)
    if not isinstance(cause, OSError) or "the disk of" in text:
        return text
    named = isinstance(cause.filename, str) and cause.filename != "stdout"
    place = Path(cause.filename if named else os.path.realpath("/dev/stdout"))
    place = next(each for each in (place, *place.parents) if os.path.exists(each))  # the file may have been removed
    if not (os.path.isfile(place) or os.path.isdir(place)):
        return text  # a device
    full = full_disk(cause, place if place.is_dir() else place.parent)
    return f"{text}: {full}" if full else text


def program(command: Callable[[Sequence[str]], int]) -> Main:
    """Return the `main` of a command, which runs the words of a command line as `exit_code` does."""
    return lambda argv=None: exit_code(lambda: command(list(sys.argv[1:] if argv is None else argv)))


def interruptible(command: Callable[[Sequence[str], Interrupts], int]) -> Main:
    """Return the `main` of a command that runs a job. If SIGINT or SIGTERM comes, it says how the job stands, which the
    command sets as `Interrupts.standing`, and returns 130 or 143."""

    def main(argv: Sequence[str] | None = None) -> int:
        with Interrupts() as interrupts:

            def finish(words: Sequence[str]) -> int:
                try:
                    return command(words, interrupts)
                except KeyboardInterrupt as stop:
                    say_error(interrupts.standing())
                    return stop.code if isinstance(stop, Interrupted) else INTERRUPTED
                finally:
                    interrupts.end()

            return program(finish)(argv)

    return main


@contextmanager
def foreign_errors(package: str, program: str) -> Iterator[None]:
    """Raise InvalidInput, which names the program, for a ValueError that a package's own code raises in the block, not
    a library that it calls."""
    try:
        yield
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        own = str(frame.f_globals.get("__name__")).startswith(f"{package}.")
        if isinstance(error, FlexError) or not own:
            raise
        raise InvalidInput(f"{program}: {error}") from error


def _occupy_closed_streams() -> None:
    """Open /dev/null in place of standard streams that were closed (`>&-`), so that no file that is opened later gets
    their numbers and receives messages. Reading stdin and writing to stdout still fail, as they are opened the other
    way round; messages on stderr are discarded."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the system returns the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY), True)
        if getattr(sys, name) is None and name != "stdin":
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
