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
# Commands with their options stay as they are. An option may be followed by its name in Python, or by a number.
_OPTION = re.compile(
    r"(?:flexengine|gguf-split|pip) [a-z-]+(?: (?!or\b|and\b)[^\s;,()]+)*"
    r"|--[a-z][a-z-]*(?: '[^']*'| [^\s();]+)? \(([^()]+) in Python\)|(?<![\w-])"
    r"--(?!ulimit|again)([a-z][a-z-]*[a-z])(?: (?=\d))?"
)
_VALUES = (
    (r"\b(is|are|or|to|be|holds) null\b", r"\1 None"),
    (r"\btrue or false\b", "True or False"),
    (r"\b(is|to) true\b", r"\1 True"),
    (r"\b(is|to) false\b", r"\1 False"),
)
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
    return str if _command.get() else _in_python


def in_python(text: str) -> str:
    """Return a message in the words of Python; unchanged within `command_words`."""
    return rewording()(text)


def _in_python(text: str) -> str:
    text = _OPTION.sub(lambda found: found[1] or (_named(found[0], found[2]) if found[2] else found[0]), text)
    for words, others in _VALUES:
        text = re.sub(words, others, text)
    return text


def _named(option: str, name: str) -> str:
    return _NAMES.get(name, name.replace("-", "_")) + "=" * option.endswith(" ")


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
