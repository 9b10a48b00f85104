"""Files for planning: machines, clusters, models without weights, and FlexGen's published policies."""

import os
from pathlib import Path, PurePath
from typing import Literal

from flexengine.config import meant
from flexengine.errors import InvalidInput

Kind = Literal["hardware", "models", "policies", "clusters"]
_FILE_OF = {"hardware": "hardware file", "models": "model", "policies": "policy file",
            "clusters": "cluster file"}  # fmt: skip
# Folders in `policies/` of the checkout that held the files before: commands with such paths still work.
_FORMER_FOLDERS = {"hardware": "hardware", "models": "models", "policies": "published",
                   "clusters": "clusters"}  # fmt: skip


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all shipped files of a kind."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _folder(kind).iterdir()))


def find(kind: Kind, given: str) -> str:
    """Return the path of the file that the user means: `given` if it exists, else the shipped file of this name.

    A path ending in policies/hardware/NAME.json, policies/models/NAME or policies/published/NAME.json also names the
    shipped file. Other paths do not: facebook/opt-30b is a hub id, and my/t4.json a file of the user.

    Args:
        kind: kind of file.
        given: a path or a name.

    Returns:
        The path; `given` if it names no shipped file.
    """
    *folders, last = PurePath(given).parts or ("",)
    name = last.removesuffix(".json")
    named = not folders or folders[-2:] == ["policies", _FORMER_FOLDERS[kind]]
    exists = os.path.exists if kind == "models" else os.path.isfile
    if exists(given) or not named or name not in names(kind):
        return given
    return str(_folder(kind) / (name if kind == "models" else f"{name}.json"))


def find_file(kind: Kind, given: str) -> str:
    """Return the path of the file that the user means, as `find`. Raise InvalidInput if there is no such file."""
    path = find(kind, given)
    if not os.path.isfile(path):
        name = meant(PurePath(given).name.removesuffix(".json"), names(kind))
        question = f"did you mean {name}? Else " if name else ""
        raise InvalidInput(f"there is no {_FILE_OF[kind]} {given}; {question}give a path, or a name ({listed(kind)})")
    return path


def listed(kind: Kind) -> str:
    """Return the names of all shipped files of a kind as a text for messages."""
    return f"shipped {kind}: {', '.join(names(kind))}"


def _folder(kind: Kind) -> Path:
    return Path(__file__).parent / kind
