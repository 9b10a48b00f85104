"""The argument parser of all commands: general options, a file of options, and errors of one line."""

import argparse
import re
import sys
import tomllib
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flexengine import __version__
from flexengine.errors import InvalidInput, meant, shown
from flexengine.job.prompt_template import typed_escape
from flexengine.shell.commands.habits import correct
from flexengine.shell.commands.main import COMMANDS
from flexengine.shell.commands.messages import NORMAL, QUIET, REFUSED, VERBOSE, say, say_error, set_verbosity
from flexengine.shell.commands.options import OptionTable, add_options

_GENERAL = """
-q, --quiet         print no messages but errors
-v, --verbose       print the times of steps and of the command, and more
--config FILE.toml  read options from this file, by the names of this page without dashes (max-tokens = 64); options of
                    the command line replace them
"""
_VERBOSITY = ("quiet", "verbose")
GENERAL = (*_VERBOSITY, "config")  # options of all commands that may have a value of the user
_UNSET = object()  # value of an option that is not on the command line
# argparse's messages, and the same in this project's words. The first group is the option or argument.
_WORDS = (
    (r"argument (\S+?)(?:/--\S+)?: invalid int value: (.*)", r"{0} is {1}; it must be a whole number"),
    (r"argument (\S+?)(?:/--\S+)?: invalid float value: (.*)", r"{0} is {1}; it must be a number"),
    (r"argument (\S+?)(?:/--\S+)?: invalid choice: (\S+) \(choose from (.*)\)", r"{0} is {1}; choose from {2}"),
    (r"argument (\S+?)(?:/--\S+)?: expected one argument", r"{0} needs a value"),
    (r"argument (\S+?)(?:/--\S+)?: ignored explicit argument (.*)", r"{0} takes no value, but {1} is given"),
    (r"argument (\S+?)(?:/--\S+)?: (.*)", r"{0}: {1}"),
)


def refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise InvalidInput if one of these options has another value than its default. names: attributes of the options.
    why: rest of the message, after the name of the option."""
    if name := next((name for name in names if name in args.changed), None):
        raise InvalidInput(f"{args.changed[name]} {why}")


def check_least(args: argparse.Namespace, **least: float) -> None:
    """Raise InvalidInput if an option is given and less than `least`, by attribute."""
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not low <= value < float("inf"):
            raise InvalidInput(f"--{name.replace('_', '-')} is {value}; it must be at least {low:g}")


class Parser(argparse.ArgumentParser):
    """Parser of one command. Options must be written in full.

    Every command has -h, --version, -q, -v and --config. An error is one line; for an option of another program, the
    line is the right command (see `habits`).

    Args:
        command: name of the command, such as "run".
        positionals: the positionals as the usage line shows them, such as "INPUT" or "[MODEL]".
        end: text at the end of --help.
        more: text after what `flexengine --help` says about the command, which is the first text of its own --help.
    """

    def __init__(self, command: str, positionals: str = "", end: str | None = None, more: str = "") -> None:
        about = f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}. {more}"
        usage = " ".join(filter(None, ("flexengine", command, positionals, "[options]")))
        super().__init__(prog=f"flexengine {command}", usage=usage, description=about, epilog=end, allow_abbrev=False)
        self.command = command
        self._file: str | None = None  # the --config file, while its options are parsed
        self.add_argument("-V", "--version", action="version", version=f"flexengine {__version__}")
        add_options(self, _GENERAL)

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Return the options, those of --config included, and set the verbosity. Exit with code 2 if one is wrong.

        Attributes beside the options: `words`, the command line, and `changed`, the names of the options that have
        another value than their default, by attribute.
        """
        try:
            options = self._parse(_without_end(list(words)))
        except _Invalid as error:
            self._refuse(str(error), words)
        options.words = words
        for action in self._actions:
            given = getattr(options, action.dest, None) if action.metavar == "TEXT" else None
            if mark := typed_escape([given] if isinstance(given, str) else given or ()):
                how = (
                    f"write $'...{mark}...' in the shell, or, in a file of --config, put the text between double quotes"
                )
                say(f"{_long(action)} has {mark}, two characters that stay as they are; for a line break or tab {how}")
        return options

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words of this parser's options, and the other ones."""
        own, rest, left = list[str](), list[str](), deque(words)
        while left:
            word = left.popleft()
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            action = self._option_string_actions.get(name)
            (rest if action is None else own).append(word)
            if action is not None and action.nargs != 0 and word == name and left:
                own.append(left.popleft())
        return own, rest

    def _parse(self, words: list[str]) -> argparse.Namespace:
        given = super().parse_intermixed_args(words, self._unset())
        if given.config is not _UNSET:
            words = self._configured(given, words) + words
        options = super().parse_intermixed_args(words)
        if options.quiet and options.verbose:
            self.error("-q and -v are both given; leave one out")
        set_verbosity(QUIET if options.quiet else VERBOSE if options.verbose else NORMAL)
        values = vars(options)
        options.changed = {
            action.dest: _long(action)
            for action in self._actions
            if action.option_strings and values.get(action.dest, action.default) != action.default
        }
        return options

    def group(self, title: str, *tables: OptionTable | str, about: str | None = None) -> None:
        """Add a group of options, with a title and a description in --help."""
        group = self.add_argument_group(title, about)
        for table in tables:
            add_options(group, table)

    def add_twin(self, dest: str) -> None:
        """Let an option be given as a positional, too. Both set the attribute `dest`."""
        option = next(action for action in self._actions if action.dest == dest)
        about = f"the same as {_long(option)}"
        self.add_argument(dest, nargs="?", action=_Twin, metavar=dest.upper(), type=option.type or str, help=about)

    def accepts(self, words: Sequence[str]) -> bool:
        """Return whether the words are a valid command line."""
        try:
            super().parse_intermixed_args(list(words))
        except _Invalid:
            return False
        return True

    def error(self, message: str) -> NoReturn:
        """Refuse the command line. `parse_args` prints the message."""
        raise _Invalid(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the text of --help or --version. argparse would ignore an error of the stream."""
        (file or sys.stdout).write(message)

    def _refuse(self, message: str, words: Sequence[str]) -> NoReturn:
        """Print one line: the right command if the words have an option of another program, else the message."""
        if self._file is not None:
            say_error(f"{self._file}: {_plain(message)}")
        else:
            known, unknown = self._option_string_actions, "unrecognized arguments: "
            hint = _plain(message)
            if message.startswith(unknown):
                word = message.removeprefix(unknown).split()[0]
                hint = f"{shown(word)} is one argument too many"
                if word.startswith("-"):
                    hint = f"there is no option {word}{_nearest(word.partition('=')[0], list(known))}"
            hint += f"; {self.prog} --help lists the options"
            say_error(correct(self.command, known, words, self.accepts) or hint)
        raise SystemExit(REFUSED)

    def _unset(self) -> argparse.Namespace:
        """Return a namespace with which argparse sets no default."""
        lists = argparse._AppendAction  # appends to the present value, which therefore must be None
        return argparse.Namespace(**{a.dest: None if isinstance(a, lists) else _UNSET for a in self._actions})

    def _configured(self, given: argparse.Namespace, words: list[str]) -> list[str]:
        """Return the options of the --config file that are not on the command line, as words."""
        self._file = given.config
        actions = {_long(a).removeprefix("--"): a for a in self._actions if a.option_strings}
        actions = {name: a for name, a in actions.items() if name not in ("config", "help", "version")}
        more, keys = list[str](), dict[str, str]()
        for key, value in self._read(given.config).items():
            action = actions.get(key.replace("_", "-"))
            if action is None:
                self.error(f"there is no option {key}{_nearest(key, list(actions))}")
            if (first := keys.setdefault(action.dest, key)) != key:
                self.error(f"{first} and {key} are one option; leave one out")
            # -q and -v exclude each other.
            same = _VERBOSITY if action.dest in _VERBOSITY else (action.dest,)
            if all(getattr(given, name) in (_UNSET, None) for name in same):
                more += self._option(action, key, value)
        if {"--quiet", "--verbose"} <= set(more):
            self.error("quiet and verbose are both true; leave one out")
        super().parse_intermixed_args(more + words, self._unset())  # names the file if a value is not allowed
        self._file = None
        return more

    def _read(self, path: str) -> dict[str, Any]:
        try:
            return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            self.error(f"cannot be read: {error.strerror}")
        except (ValueError, RecursionError) as error:  # the first also for numbers of thousands of digits
            self.error(f"is no TOML file: {error}")

    def _option(self, action: argparse.Action, key: str, value: Any) -> list[str]:
        name = _long(action)
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{key} is {value!r:.80}; it must be true or false")
            return [name] if value else []
        values = value if isinstance(value, list) else [value]
        if len(values) != 1 and not isinstance(action, argparse._AppendAction):
            self.error(f"{key} is a list; it must be one value")
        if any(isinstance(one, (bool, dict, list)) for one in values):
            self.error(f"{key} is {value!r:.80}; it must be text or a number")
        return [f"{name}={one}" for one in values]


class _Twin(argparse.Action):
    """A positional that sets the attribute of an option. argparse parses it after all options."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, _: object = None
    ) -> None:
        if value is None:  # it is not given
            return
        option = getattr(namespace, self.dest)
        if option not in (None, _UNSET):
            parser.error(f"{value} and --{self.dest} {option} are both given; leave one out")
        setattr(namespace, self.dest, value)


class _Invalid(Exception):
    """A command line is not valid."""


def _without_end(words: list[str]) -> list[str]:
    """Return the command line without "--", the end of options. A file after it whose name begins with a dash gets ./
    in front, as `parse_intermixed_args` would take it for an option."""
    if "--" not in words:
        return words
    end = words.index("--")
    return words[:end] + [f"./{word}" if word[:1] == "-" and word != "-" else word for word in words[end + 1 :]]


def _plain(message: str) -> str:
    for pattern, words in _WORDS:
        if match := re.fullmatch(pattern, message, re.S):
            return words.format(*match.groups())
    return message


def _long(action: argparse.Action) -> str:
    return max(action.option_strings, key=len)


def _nearest(word: str, known: Sequence[str]) -> str:
    name = meant(word, known)
    return f"; did you mean {name}?" if name else ""
