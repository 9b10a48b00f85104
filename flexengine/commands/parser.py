"""The argument parser of all commands: general options, a file of options, and errors of one line."""

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flexengine import __version__
from flexengine.commands.exit_codes import REFUSED
from flexengine.commands.habits import correct
from flexengine.commands.messages import NORMAL, QUIET, VERBOSE, say_error, set_verbosity
from flexengine.commands.option_text import add_options
from flexengine.config import meant
from flexengine.errors import InvalidInput

_GENERAL = """
-q, --quiet         print no messages but errors
-v, --verbose       print the times of steps and of the command, and more
--config FILE.toml  read options from this file, by the names of this page without dashes (max-tokens = 64); options of
                    the command line replace them
"""
_VERBOSITY = ("quiet", "verbose")
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


def refuse_given(args: argparse.Namespace, defaults: Mapping[str, object], why: str) -> None:
    """Raise InvalidInput if an option has another value than its default.

    Args:
        defaults: default of each option, by attribute.
        why: rest of the message, after the name of the option.
    """
    for name, default in defaults.items():
        if getattr(args, name) != default:
            option = ("no-" if default is True else "") + name.replace("_", "-")
            raise InvalidInput(f"--{option} {why}")


class Parser(argparse.ArgumentParser):
    """Parser of one command. Options must be written in full.

    Every command has -h, --version, -q, -v and --config. An error is one line; for an option of another program, the
    line is the right command (see `habits`).

    Args:
        command: name of the command, such as "run".
        about: description, the first text of --help.
        end: text at the end of --help.
        positionals: the positionals as the usage line shows them, such as "INPUT" or "[MODEL]".
    """

    def __init__(self, command: str, about: str, end: str | None = None, positionals: str = "") -> None:
        usage = " ".join(filter(None, ("flexengine", command, positionals, "[options]")))
        super().__init__(prog=f"flexengine {command}", usage=usage, description=about, epilog=end, allow_abbrev=False)
        self.command = command
        self._file: str | None = None  # the --config file, while its options are parsed
        self.add_argument("-V", "--version", action="version", version=f"flexengine {__version__}")
        add_options(self, _GENERAL)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Return the options, those of --config included, and set the verbosity. Exit with code 2 if an option is
        wrong."""
        words = _without_end(list(sys.argv[1:] if args is None else args))
        try:
            return self._parse(words)
        except _Invalid as error:
            self._refuse(str(error), words)

    def parse_known(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, without those of --config, and the words of other options. Exit with code 2 if an option
        is wrong."""
        try:
            return super().parse_known_args(list(words))
        except _Invalid as error:
            self._refuse(str(error), words)

    def _parse(self, words: list[str]) -> argparse.Namespace:
        given = super().parse_intermixed_args(words, self._unset())
        if given.config is not _UNSET:
            words = self._configured(given, words) + words
        options = super().parse_intermixed_args(words)
        if options.quiet and options.verbose:
            self.error("-q and -v are both given; leave one out")
        set_verbosity(QUIET if options.quiet else VERBOSE if options.verbose else NORMAL)
        return options

    def add_twin(self, group: argparse._ArgumentGroup, *names: str, **options: Any) -> None:
        """Add an option that may also be given as a positional. Both set the attribute of the option's long name.

        Args:
            group: group of the option in --help.
            names: names of the option, the long one last.
            options: as for `add_argument`.
        """
        dest, about = names[-1].removeprefix("--"), f"the same as {names[-1]}"
        kind = options.get("type", str)
        self.add_argument(dest, nargs="?", action=_Twin, metavar=dest.upper(), type=kind, help=about)
        group.add_argument(*names, **options)

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
            known = {name: action for action in self._actions for name in action.option_strings}
            hint = f"{self._near(_plain(message))}; {self.prog} --help lists the options"
            say_error(correct(self.command, known, words, self.accepts) or hint)
        raise SystemExit(REFUSED)

    def _unset(self) -> argparse.Namespace:
        """Return a namespace with which argparse sets no default."""
        lists = argparse._AppendAction  # appends to the present value, which therefore must be None
        return argparse.Namespace(**{a.dest: None if isinstance(a, lists) else _UNSET for a in self._actions})

    def _configured(self, given: argparse.Namespace, words: list[str]) -> list[str]:
        """Return the options of the --config file that are not on the command line, as words.

        Args:
            given: options of the command line.
            words: the command line.
        """
        self._file = given.config
        actions = {_name(a): a for a in self._actions if a.option_strings}
        actions = {name: a for name, a in actions.items() if name not in ("config", "help", "version")}
        more, keys = list[str](), dict[str, str]()
        for key, value in _read(given.config, self.error).items():
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

    def _option(self, action: argparse.Action, key: str, value: Any) -> list[str]:
        name = max(action.option_strings, key=len)
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{key} is {value!r}; it must be true or false")
            return [name] if value else []
        values = value if isinstance(value, list) else [value]
        if len(values) != 1 and not isinstance(action, argparse._AppendAction):
            self.error(f"{key} is a list; it must be one value")
        if any(isinstance(one, (bool, dict, list)) for one in values):
            self.error(f"{key} is {value!r}; it must be text or a number")
        return [f"{name}={one}" for one in values]

    def _near(self, message: str) -> str:
        """Return the message. For an unknown option, name it and the nearest known one."""
        head = "unrecognized arguments: "
        if not message.startswith(head):
            return message
        word = message.removeprefix(head).split()[0]
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        known = [name for action in self._actions for name in action.option_strings]
        return f"there is no option {word}{_nearest(word.partition('=')[0], known)}"


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


def _name(action: argparse.Action) -> str:
    return max(action.option_strings, key=len).removeprefix("--")


def _nearest(word: str, known: Sequence[str]) -> str:
    name = meant(word, known)
    return f"; did you mean {name}?" if name else ""


def _read(path: str, fail: Callable[[str], NoReturn]) -> dict[str, Any]:
    """Return the keys and values of a TOML file. Call `fail` if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        fail(f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # the first also for numbers of thousands of digits
        fail(f"is no TOML file: {error}")
