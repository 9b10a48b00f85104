"""Names of streams: standard input and output, pipes, devices, and open files (such as /dev/fd/63, from `<(...)`)."""

import errno
import os
import re
import sys

STDIN = "/dev/stdin"
_NUMBERS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_OPEN_FILE = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")


def descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the number of the open file that a path names, such as 3 for /dev/fd/3; None for other paths."""
    name = os.fspath(path)
    match = _OPEN_FILE.fullmatch(name)
    return int(match[1]) if match else _NUMBERS.get(name)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a pipe, a device or an open file: no file that can be replaced or read twice."""
    if descriptor(path) is not None:
        return True
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def output_name(output: str | None) -> str | None:
    """Return the name of an output; None, as if no name was given, for standard output (`-`, /dev/stdout)."""
    return None if output is None or output == "-" or descriptor(output) == 1 else output


def stdout_is_open() -> bool:
    """Return whether standard output can be written to. It cannot after `>&-` in a shell."""
    try:
        os.write(sys.stdout.fileno(), b"")
    except AttributeError:  # Python's own mark of a closed stream: sys.stdout is None
        return False
    except OSError as error:
        return error.errno != errno.EBADF  # None: a stream without a number, such as one in memory; ENOSPC: /dev/full
    return True
