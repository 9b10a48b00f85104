"""Files of `policies/`: machines, clusters, models without weights, and FlexGen's published policies."""

import os
from pathlib import Path, PurePath
from typing import Literal

from flexengine.errors import InvalidInput, meant

Kind = Literal["hardware", "models", "policies", "clusters"]
_FILE_OF = {"hardware": "hardware file", "models": "model", "policies": "policy file", "clusters": "cluster file"}
_FOLDER_OF = {"hardware": "hardware", "models": "models", "policies": "published", "clusters": "clusters"}
# `policies/` is installed inside the package (setup.cfg); in a checkout, also an editable one, it lies beside it.
_PACKAGE = Path(__file__).parents[1]
FOLDER = (_PACKAGE if (_PACKAGE / "policies").is_dir() else _PACKAGE.parent) / "policies"


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all shipped files of a kind."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _folder(kind).iterdir()))


def find(kind: Kind, given: str) -> str:
    """Return the path of the file that the user means: `given` if it exists, else the shipped file of this name.

    A path as in a checkout (policies/hardware/NAME.json, policies/models/NAME), of this or an earlier version, also
    names the shipped file, from any directory. Other paths do not: facebook/opt-30b is a hub id, and my/t4.json a file
    of the user.

    Args:
        kind: kind of file.
        given: a path or a name.

    Returns:
        The path; `given` if it names no shipped file.
    """
    *folders, last = PurePath(given).parts or ("",)
    name = last.removesuffix(".json")
    named = not folders or folders[-2:] in (["policies", _FOLDER_OF[kind]], ["shipped", kind])
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
    return FOLDER / _FOLDER_OF[kind]
