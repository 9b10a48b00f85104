"""The options of all commands as Markdown tables, made from their parsers.

python -m tests.helpers.command_line    write the tables into docs/command-line.md, between their markers
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from flexengine.shell.commands.main import module_of

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
GENERAL = {"help", "version", "quiet", "verbose", "config"}  # dests of the options of every command
_BLOCK = re.compile(r"(<!-- options: ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.S)


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    made: argparse.ArgumentParser = module_of(command).parser()
    return made


def tables(made: argparse.ArgumentParser) -> str:
    """Return usage, description, a table for each group of options, and the last text of --help."""
    usage = " ".join(made.format_usage().removeprefix("usage:").split())
    parts = [f"`{usage}`", _text(made.description)]
    for group in made._action_groups:
        rows = [_row(made, action) for action in group._group_actions if action.dest not in GENERAL and _shown(action)]
        if rows:
            about = f"{_text(group.description)}\n\n" if group.description else ""
            title = "" if group in made._action_groups[:2] else f"**{group.title}**\n\n"
            parts.append(f"{title}{about}| | |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(filter(None, [*parts, _text(made.epilog)]))


def general() -> str:
    """Return the table of the options of every command."""
    made = parser("run")
    rows = [_row(made, action) for action in made._actions if action.dest in GENERAL]
    return "| | |\n|---|---|\n" + "\n".join(rows)


def updated(text: str) -> str:
    """Return the page with new tables."""

    def block(match: re.Match[str]) -> str:
        made = general() if match[2] == "general" else tables(parser(match[2]))
        return f"{match[1]}{made}\n{match[3]}"

    return _BLOCK.sub(block, text)


def named(text: str) -> list[str]:
    """Return the names of the page's blocks."""
    return [match[2] for match in _BLOCK.finditer(text)]


def _shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS


def _row(made: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = ", ".join(f"`{text}`" for text in _names(action)).replace("|", "\\|")
    help_text = made._get_formatter()._expand_help(action) if action.help else ""
    return f"| {names} | {_text(help_text)} |"


def _names(action: argparse.Action) -> Iterator[str]:
    """Yield the option's names, the last one with its value."""
    value = "" if action.nargs == 0 else str(action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}")
    if not action.option_strings:
        yield value if value != "{}" else action.dest
        return
    *short, name = action.option_strings
    yield from short
    yield f"{name} {value}".strip()


def _text(text: str | None) -> str:
    return re.sub(r"([|<])", r"\\\1", " ".join((text or "").split()))


def main() -> None:
    """Write the page."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
