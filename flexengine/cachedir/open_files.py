"""Files that processes have open or mapped, from /proc."""

import os
from contextlib import suppress


def open_files() -> set[str]:
    """Return the paths of all files that processes of this user have open or mapped. Other processes are left out if
    the system does not show their files."""
    paths: set[str] = set()
    with suppress(OSError):
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                paths |= _descriptors(f"/proc/{process}/fd")
            with suppress(OSError):
                paths |= _mapped(f"/proc/{process}/maps")
    return paths


def _descriptors(folder: str) -> set[str]:
    paths = set()
    for number in os.listdir(folder):
        with suppress(OSError):
            paths.add(os.readlink(f"{folder}/{number}"))
    return paths


def _mapped(file: str) -> set[str]:
    with open(file, "rb") as lines:
        parts = (line.split(maxsplit=5) for line in lines)
        return {os.fsdecode(part[5].rstrip(b"\n")) for part in parts if len(part) == 6}
