"""A command on a pseudo-terminal, and what its screen shows."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import NamedTuple


class Screen(NamedTuple):
    """Output of a process on a terminal.

    Attributes:
        code: exit code.
        frames: texts that were drawn from the left edge on, in order.
        lines: texts that remain: those that a line feed ended.
    """

    code: int
    frames: list[str]
    lines: list[str]


def on_terminal(command: list[str], columns: int, **options: str) -> Screen:
    """Run a command whose standard error is a terminal. options: environment variables."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=follower,
        env={**os.environ, **options},
    )  # fmt: skip
    os.close(follower)
    data = bytearray()
    with contextlib.suppress(OSError):  # EIO: the process has ended
        while part := os.read(leader, 1 << 16):
            data += part
    os.close(leader)
    return Screen(child.wait(timeout=60), *shown(data.decode().replace("\r\n", "\n")))


def shown(text: str) -> tuple[list[str], list[str]]:
    """Return the frames and the lines of a `Screen` that a text was written to."""
    rows = [[frame for frame in row.split("\r") if frame.strip()] for row in text.split("\n")]
    return [frame for row in rows for frame in row], [row[-1] for row in rows[:-1] if row]
