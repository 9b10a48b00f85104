"""What all commands share: exit codes, and how an error is told."""

import os
import sys
import traceback
from collections.abc import Callable

from flexengine.errors import FlexError, RanOut

DONE, SOME_FAILED, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


def say(text: str) -> None:
    """Tells people something, beside the results."""
    print(f"flexengine: {text}", file=sys.stderr)


def ended(command: Callable[[], int]) -> int:
    """The exit code of a command: what it returns, or what stands for the error it raises, which is told."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except RanOut as error:  # on the way, with results
        say(" ".join(str(error).split()))
        return FAILED
    except FlexError as error:
        say(" ".join(str(error).split()))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush at exit fails again
        say("whoever reads the results has gone")
        return FAILED
    except OSError as error:
        say(str(error))
        return FAILED
    except Exception as error:  # a fault of ours: not 1, which would say that there are results
        if _of_memory(error):
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            say(f"the system has no more memory{where}; give a smaller --device-mem or --host-mem, or end other"
                " programs, and run the same command again")  # fmt: skip
        else:
            traceback.print_exc()
        return FAILED


def _of_memory(error: Exception) -> bool:
    """Whether an error is Python's or torch's way to say that memory could not be allocated."""
    said = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in said or "out of memory" in said)
    )
