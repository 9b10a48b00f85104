"""The cache of the hub's client, which flexengine reads and never clears."""

import os
from pathlib import Path

from flexengine.cachedir.items import measured


def hub_directory() -> Path:
    """Return the directory in which the hub's client keeps downloads."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"), "hub")
    return Path(HF_HUB_CACHE)


def hub_cache() -> tuple[Path, int]:
    """Return the directory and the bytes of all downloads. Links, which lead to files among them, are not counted."""
    directory = hub_directory()
    path = os.path.realpath(directory)
    return directory, measured(None, path)[0] if os.path.isdir(path) else 0
