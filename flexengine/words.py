"""Words of messages. Messages name options of the command and JSON's values; in Python they name arguments and Python's
values: `--device-mem` is `device_mem`, null is None."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_SWITCHES = "allow-symlinks chat ignore-eos restart retry-errors score trust-remote-code verify"
_NAMES = {
    **{name: f"{name.replace('-', '_')}=True" for name in _SWITCHES.split()},
    "no-thinking": "chat_template_kwargs={'enable_thinking': False}",
    "no-prefix-sharing": "prefix_sharing=False",
    "bad-word": "bad_words",
    "stop-token-id": "stop_token_ids",
    "calibration-text": "calibrate",
    "layer-bits": "weights",
}
# Commands with their options stay as they are, as do the user's own texts: in quotes, and paths. An option may be
# followed by its name in Python, by a number, or by a size, which is text in Python.
_WORDS = re.compile(
    r"(?P<kept>[^\s(]*\bconfig\.json:? [^\n]*?(?=correct it)"  # values of JSON
    r"|(?:flexengine|gguf-split|pip) [a-z-]+(?: (?!or\b|and\b)[^\s;,()]+)*"
    r"|(?<!\w)['\"\[{].{75} \.\.\."  # cut by `errors.shown`
    r"|(?<!\w)'(?:[^'\\]|\\.)*'(?!\w)"
    r'|"(?:[^"\\]|\\.)*"'
    r"|(?<![^\s(])(?!--)[^\s(/]*/\S*)"
    r"|--[a-z][a-z-]*(?: '[^']*'| [^\s();]+)? \((?P<python>[^()]+) in Python\)"
    r"|(?<![\w-])--(?!ulimit|again)(?P<option>[a-z][a-z-]*[a-z])(?P<number> (?=\d)(?P<size>[\d.]+(?:[kMGT]i?B?|B)\b)?)?"
    r"|\b(?P<before>(?:is|are|or|to|be|holds) (?=null\b)|(?:is|to) (?=(?:true(?! or false)|false)\b))"
    r"(?P<value>null|true|false)"
    r"|\btrue or false\b"
)
_VALUES = {"null": "None", "true": "True", "false": "False", None: "True or False"}
_command = ContextVar("whether messages have the words of the command", default=False)


@contextmanager
def command_words() -> Iterator[None]:
    """Let messages have the words of the command and of JSON while the block runs."""
    token = _command.set(True)
    try:
        yield
    finally:
        _command.reset(token)


def rewording() -> Callable[[str], str]:
    """Return the function that changes the messages of this context, also if it is called in other threads."""
    return str if _command.get() else functools.partial(_WORDS.sub, _worded)


def in_python(text: str) -> str:
    """Return a message in the words of Python; unchanged within `command_words`."""
    return rewording()(text)


def _worded(found: re.Match[str]) -> str:
    if (kept := found["kept"] or found["python"]) is not None:
        return kept
    if (name := found["option"]) is not None and found["size"]:
        return f"{name.replace('-', '_')}='{found['size']}'"
    if name is not None:
        return _NAMES.get(name, name.replace("-", "_")) + "=" * bool(found["number"])
    return (found["before"] or "") + _VALUES[found["value"]]


def reword(error: Exception) -> None:
    """Change the message of an error to the words of Python."""
    if error.args and isinstance(error.args[0], str):
        error.args = (in_python(error.args[0]), *error.args[1:])


def python_words(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function of the Python API, with errors in the words of Python. Other functions of the package call it,
    too, and may be called by a command."""

    @functools.wraps(method)
    def worded(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        except Exception as error:
            if type(error).__module__.startswith("flexengine."):
                reword(error)
            raise

    return worded
