"""Processes of their own for what a hostile file or template may exhaust or end, and their limits."""

import os
import resource
import subprocess
import sys
from typing import IO

_MAX_ERROR = 1000


def started(
    module: str, *words: str, stdin: int | IO[bytes], stderr: int | IO[bytes], **environment: str
) -> "subprocess.Popen[bytes]":
    """Start a module of the package as a program, and return the process, whose output is a pipe.

    Args:
        words: its arguments.
        stdin, stderr: as for `subprocess.Popen`.
        environment: variables beside those of this process.
    """
    # A session of its own gets no Ctrl-C. Not the current directory but sys.path is searched for modules. Its output is
    # buffered: see `files.whole_stdout`.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""} | environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )


def last_line(errors: IO[bytes]) -> str:
    """Return the last line that a process wrote to its stderr, of at most _MAX_ERROR bytes; "" for none."""
    errors.seek(0)
    return errors.read()[-_MAX_ERROR:].decode("utf-8", "replace").strip().rpartition("\n")[2]


def set_limit(limit: int, most: int) -> None:
    """Set a limit of this process, but not above what it may set. limit: as for `resource.setrlimit`."""
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (hard if most < 0 or 0 <= hard < most else most, hard))
