"""Options described as --help shows them, one paragraph each:

-o, --output OUTPUT  file for results; lines that are indented
    continue the description
--stop TEXT ...      the dots after the value's name: may be repeated
--json               an option without a value is a switch
"""

import argparse
import re
from collections.abc import Callable, Mapping
from textwrap import dedent
from typing import Any


def named(text: str) -> str:
    """Return the text. Raise ArgumentTypeError if it is empty or has a null character."""
    if not text or "\0" in text:
        fault = "has a null character" if text else "is empty"
        raise argparse.ArgumentTypeError(f"the name {fault}; give a name or leave the option out")
    return text


def file_name(text: str) -> str:
    """Return the name of a file to write. Raise ArgumentTypeError if it is empty, or is "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError("- stands for a stream, but this option takes a file; name one")
    return named(text)


# Types by the name of the value. Values of other names, such as SIZE, are text.
TYPES: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("N", "K", "ID"), int),
    **dict.fromkeys(("X", "SHARE", "SECONDS"), float),
    **dict.fromkeys(("FILE", "DIR", "NAME", "MODEL", "OUT.jsonl"), named),
    **dict.fromkeys(("FILE.json", "FILE.html", "OUTPUT"), file_name),
}


def add_options(
    group: argparse._ActionsContainer,
    text: str,
    defaults: Mapping[str, object] | None = None,
    /,
    **more: dict[str, Any],
) -> None:
    """Add options to a parser or a group.

    Args:
        text: the options, as at the top of this file.
        defaults: default of each option by attribute, such as those of a dataclass; None for the others.
        more: further arguments of `add_argument` by attribute.
    """
    for paragraph in re.split(r"\n(?=\S)", dedent(text).strip()):
        words, about = re.split(r"\s{2,}", paragraph, maxsplit=1)
        names = [word.rstrip(",") for word in words.split() if word.startswith("-")]
        values = [word for word in words.split() if not word.startswith("-")]
        attribute = names[-1].lstrip("-").replace("-", "_")
        given: dict[str, Any] = {"help": " ".join(about.split())}
        if values or "choices" in more.get(attribute, {}):
            given["default"] = (defaults or {}).get(attribute)
        else:
            given["action"] = "store_true"
        if values:
            given |= {"metavar": values[0], "type": TYPES.get(values[0], str)}
        if values[1:] == ["..."]:
            given["action"] = "append"
        group.add_argument(*names, **(given | more.get(attribute, {})))
