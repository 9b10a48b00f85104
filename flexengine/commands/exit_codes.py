"""Exit codes of all commands, and the messages of errors."""

import os
import sys
import traceback
from collections.abc import Callable

from flexengine.commands.messages import say_error
from flexengine.errors import FlexError, RanOut

DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. If the command raises an error, print the error and return its code."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except RanOut as error:  # memory ran out while the job was running; finished rows are in the journal
        say_error(str(error))
        return FAILED
    except FlexError as error:
        say_error(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit fails again
        say_error("stdout was closed before all results were written")
        return FAILED
    except OSError as error:
        say_error(str(error))
        return FAILED
    except Exception as error:  # a bug, whose exit code must not be Python's 1, as 1 means done with row errors
        if _of_memory(error):
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            say_error(f"the system has no more memory{where}; give a smaller --device-mem or --host-mem, or end other"
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
