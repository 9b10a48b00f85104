"""Files that processes have open or mapped, from /proc."""

import os
from contextlib import suppress
from pathlib import Path


def open_files() -> set[str]:
    """Return the paths of all files that processes of this user have open or mapped. Other processes are left out if
    the system does not show their files."""
    paths: set[str] = set()
    with suppress(OSError):
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                for number in os.listdir(f"/proc/{process}/fd"):
                    with suppress(OSError):
                        paths.add(os.readlink(f"/proc/{process}/fd/{number}"))
            with suppress(OSError):
                mapped = Path(f"/proc/{process}/maps").read_bytes().split(b"\n")
                parts = (line.split(maxsplit=5) for line in mapped)
                paths |= {os.fsdecode(part[5]) for part in parts if len(part) == 6}
    return paths
