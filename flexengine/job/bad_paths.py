"""Why a file cannot be reached by the name that a user gave. Imported when that has failed."""

import errno
import os
from contextlib import suppress
from glob import has_magic
from pathlib import Path

from flexengine.errors import InvalidInput, meant, shown

_A_PROMPT = "a prompt goes in a file, or `echo ... | flexengine run - --input-format txt`"


def name_fault(path: str | os.PathLike[str]) -> str:
    """Return how many bytes of a name are too many for the file system, as a clause; "" if there are none."""
    most = {"PC_NAME_MAX": 255, "PC_PATH_MAX": 4096}
    with suppress(OSError, ValueError):
        most = {what: os.pathconf("/", what) for what in most}
    whole = os.fsencode(path)
    part = max(map(len, whole.split(b"/")))
    if part > most["PC_NAME_MAX"]:
        what = "it" if part == len(whole) else "a name in it"
        return f"{what} has {part:,} bytes; a file's name has at most {most['PC_NAME_MAX']:,}"
    limit = most["PC_PATH_MAX"]
    return f"it has {len(whole):,} bytes; a path has fewer than {limit:,}" if len(whole) >= limit else ""


def long_output(path: str | os.PathLike[str], target: Path) -> InvalidInput:
    """Return the error of an output whose name, or that of its journal beside it, is too long."""
    fault = name_fault(target) or f"with .journal, {name_fault(f'{target}.journal')}"
    return InvalidInput(f"output {shown(os.fspath(path))} cannot be a file's name: {fault}; give a shorter name")


def check_input(name: Path) -> None:
    """Raise InvalidInput if an input's name is too long: some users type a prompt there."""
    if fault := name_fault(name):
        raise InvalidInput(f"input {shown(str(name))} cannot be a file's name: {fault}; {_A_PROMPT}")


def unreadable(name: Path, error: OSError, stream: bool, accepted: str) -> InvalidInput:
    """Return the error of an input that cannot be opened, with what to give instead.

    Args:
        name: the input.
        error: of opening it.
        stream: whether it is a stream.
        accepted: names of inputs that are read, for the message.
    """
    reason, remedy, known = str(error.strerror), f"give a file: {accepted}", None
    if not stream:
        with suppress(OSError):
            known = meant(name.name, [each for each in os.listdir(name.parent) if each != name.name])
    if has_magic(str(name)) and not stream:
        remedy = "a job has one input, and this is a pattern that no shell has expanded: leave the quotes out"
    elif error.errno == errno.ELOOP:
        reason, remedy = f"{reason}: its links lead back to it", "give the file itself"
    elif os.path.islink(name) and not os.path.exists(name):
        reason, remedy = f"it is a link to {os.readlink(name)}, which does not exist", "correct the link, or " + remedy
    elif known:
        remedy = f"did you mean {name.with_name(known)}?"
    return InvalidInput(f"input {name} cannot be read ({reason}); {remedy}")
