"""Exit codes of all commands, and messages on standard error."""

import os
import sys
import traceback
from collections.abc import Callable

from flexengine.commands.progress import displayed
from flexengine.errors import FlexError, RanOut

DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


def say(text: str) -> None:
    """Print a message on standard error."""
    print(f"flexengine: {text}", file=sys.stderr)


def exit_code(command: Callable[[], int]) -> int:
    """Run a command, with its progress shown, and return its exit code. If the command raises an error, print the error
    and return its code."""
    try:
        with displayed():
            code = command()
        sys.stdout.flush()
        return code
    except RanOut as error:  # memory ran out while the job was running; finished rows are in the journal
        say(" ".join(str(error).split()))
        return FAILED
    except FlexError as error:
        say(" ".join(str(error).split()))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit fails again
        say("stdout was closed before all results were written")
        return FAILED
    except OSError as error:
        say(str(error))
        return FAILED
    except Exception as error:  # a bug, whose exit code must not be Python's 1, as 1 means done with row errors
        if _of_memory(error):
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            say(f"the system has no more memory{where}; give a smaller --device-mem or --host-mem, or end other"
                " programs, and run the same command again")  # fmt: skip
        else:
            traceback.print_exc()
        return FAILED


def _of_memory(error: Exception) -> bool:
    """Return whether Python or torch raised this error because memory could not be allocated."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )
