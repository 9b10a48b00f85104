"""Exit codes of all commands, and the messages of errors."""

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flexengine.errors import FlexError, InvalidInput, MemberFailed, RanOut, StageFailed, StageLost, WorkerLost
from flexengine.job.interrupt import Interrupted, Interrupts
from flexengine.job.streams import stdout_is_open
from flexengine.plan.formatting import clock
from flexengine.shell.commands.messages import detail, say_error
from flexengine.shell.commands.progress import displayed

_NO_MEMORY = re.compile("can't allocate memory|out of memory")  # in errors of torch
_WHILE_RUNNING = (MemberFailed, RanOut, StageFailed, StageLost, WorkerLost)  # the journal has finished rows
DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
Main = Callable[..., int]  # runs a command line, by default that of this process, and returns the exit code


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
