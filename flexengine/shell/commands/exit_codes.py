"""Exit codes of all commands, the messages of errors, and signals.

On Ctrl-C or SIGTERM finished rows are saved and the job is unwound. The process exits if unwinding takes too long.
"""

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from flexengine.errors import FlexError, InvalidInput, MemberFailed, RanOut, StageFailed, StageLost, WorkerLost
from flexengine.job.files import stdout_is_open
from flexengine.plan.formatting import clock
from flexengine.shell.commands.messages import detail, say_error
from flexengine.shell.commands.progress import displayed

_NO_MEMORY = re.compile("can't allocate memory|out of memory")  # in errors of torch
_WHILE_RUNNING = (MemberFailed, RanOut, StageFailed, StageLost, WorkerLost)  # the journal has finished rows
DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 5.0
Main = Callable[..., int]  # runs a command line, by default that of this process, and returns the exit code


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number  # exit code, 130 or 143


class Interrupts:
    """Context manager that handles SIGINT and SIGTERM.

    The first signal saves finished rows and raises Interrupted. A second signal exits the process at once. A timer also
    exits the process if the block has not ended PATIENCE_SECONDS after the first signal, as a sweep may take minutes
    and lanes are closed only between tasks.

    A signal that was ignored when the process started (nohup) stays ignored. Outside the main thread signals are not
    handled.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._first: int | None = None
        self._save: Callable[[], None] = lambda: None
        self.standing: Callable[[], str] = lambda: "interrupted"

    @contextmanager
    def guarding(self, save: Callable[[], None], standing: Callable[[], str]) -> Iterator[None]:
        """Return a context manager in which a signal saves results.

        Args:
            save: write results to the disk. A signal may call this between any two instructions of the main thread.
            standing: return the message for an interrupted job. After the block `self.standing` returns its last
                message.
        """
        self._save, self.standing = save, standing
        try:
            yield
        finally:
            last = standing()
            self._save, self.standing = lambda: None, lambda: last

    def check(self) -> None:
        """Raise Interrupted if a signal came. Its first Interrupted may be lost, as Python drops exceptions that are
        raised in a finalizer."""
        if self._first is not None:
            raise Interrupted(self._first)

    def __enter__(self) -> "Interrupts":
        try:
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._interrupt)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._leave)
        except ValueError:  # only the main thread may set signal handlers
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if self._first is not None:
            self._leave(number, None)
        self._first = number
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
        with suppress(OSError):  # the disk may be full; records written to the journal before stay valid
            self._save()
        raise Interrupted(number)

    def _leave(self, _: int, __: FrameType | None) -> NoReturn:
        number = self._first or signal.SIGTERM
        # Not print: the signal may have interrupted a print, whose buffer cannot be used again then.
        os.write(2, f"\nflexengine: {self.standing()}\n".encode())
        os._exit(128 + number)


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
        say_error(str(error))
        return FAILED if isinstance(error, _WHILE_RUNNING) else REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        text = str(error)
        if isinstance(error, BrokenPipeError):
            text = "the reader of the output closed it before all was written"
        elif error.errno == errno.EBADF and not stdout_is_open():
            text = "stdout is closed, so the output is lost; open stdout, or send it to a file"
        if text != str(error):  # what is left in the buffer goes to /dev/null, else Python's flush at exit fails again
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


def program(command: Callable[[Sequence[str]], int]) -> Main:
    """Return the `main` of a command, which runs the words of a command line as `exit_code` does."""
    return lambda argv=None: exit_code(lambda: command(list(sys.argv[1:] if argv is None else argv)))


def interruptible(command: Callable[[Sequence[str], Interrupts], int], standing: str | None = None) -> Main:
    """Return the `main` of a command that runs a job. If SIGINT or SIGTERM comes, it says how the job stands and
    returns 130 or 143.

    Args:
        standing: the message for an interrupted command, unless the command sets `Interrupts.standing`.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with Interrupts() as interrupts:
            if standing is not None:
                interrupts.standing = lambda: standing

            def finish(words: Sequence[str]) -> int:
                try:
                    return command(words, interrupts)
                except KeyboardInterrupt as stop:
                    say_error(interrupts.standing())
                    return stop.code if isinstance(stop, Interrupted) else INTERRUPTED

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
