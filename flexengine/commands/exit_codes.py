"""Exit codes of all commands, and the messages of errors."""

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from flexengine.commands.messages import detail, say_error
from flexengine.commands.progress import displayed
from flexengine.errors import FlexError, MemberFailed, RanOut, StageFailed, StageLost, WorkerLost
from flexengine.job.streams import stdout_is_open
from flexengine.plan.formatting import clock

if TYPE_CHECKING:
    from flexengine.job.interrupt import Interrupts

DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


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
    # While the job ran; the journal has finished rows.
    except (MemberFailed, RanOut, StageFailed, StageLost, WorkerLost) as error:
        say_error(str(error))
        return FAILED
    except FlexError as error:
        say_error(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        say_error("the reader of the output closed it before all was written")
        return FAILED
    except OSError as error:
        if error.errno == errno.EBADF and not stdout_is_open():
            _discard_output()
            say_error("stdout is closed, so the output is lost; open stdout, or send it to a file")
        else:
            say_error(str(error))
        return FAILED
    except Exception as error:  # a bug, whose exit code must not be Python's 1, as 1 means done with row errors
        if _of_memory(error):
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            remedy = "give a smaller --device-mem or --host-mem, or end other programs, and run the same command again"
            say_error(f"the system has no more memory{where}; {remedy}")
        else:
            traceback.print_exc()
        return FAILED


def run_interruptible(command: "Callable[[Interrupts], int]", standing: str | None = None) -> int:
    """Run a command as `exit_code` does. If SIGINT or SIGTERM comes, say how the job stands and return 130 or 143.

    Args:
        standing: the message for an interrupted command, unless the command sets `Interrupts.standing`.
    """
    from flexengine.job.interrupt import Interrupted, Interrupts

    with Interrupts() as interrupts:
        if standing is not None:
            interrupts.standing = lambda: standing

        def finish() -> int:
            try:
                return command(interrupts)
            except KeyboardInterrupt as stop:
                say_error(interrupts.standing())
                return stop.code if isinstance(stop, Interrupted) else INTERRUPTED

        return exit_code(finish)


def raised_in(package: str, error: Exception) -> bool:
    """Return whether a package's own code raised an error, not a library that it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(f"{package}.")


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


def _discard_output() -> None:
    """Send what is left in the buffer of stdout to /dev/null, else Python's flush at exit fails again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_memory(error: Exception) -> bool:
    """Return whether Python or torch raised this error because memory could not be allocated."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )
