"""Writing of files that appear complete or not at all."""

import os
from pathlib import Path

from flexengine.job.results import part_path, sync_directory


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it and rename it."""
    part = part_path(path)
    part.unlink(missing_ok=True)  # it may be left from a killed process
    with part.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_directory(path.parent)
