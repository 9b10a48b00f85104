"""The cache of the hub's client, which flexengine reads and never clears."""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hub:
    """Downloads from the hub.

    Attributes:
        path: directory of the hub's client.
        bytes: bytes of all files in it; 0 if it does not exist.
    """

    path: Path
    bytes: int


def hub_cache() -> Hub:
    """Return the hub's cache directory and its bytes. Links, which lead to files in it, are not counted."""
    path = hub_directory()
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                about = os.lstat(os.path.join(folder, file))
                total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return Hub(path, total)


def hub_directory() -> Path:
    """Return the directory in which the hub's client keeps downloads."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"), "hub")
    return Path(HF_HUB_CACHE)
