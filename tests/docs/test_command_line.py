"""docs/command-line.md has every command and option, as the parsers describe them."""

import re
import tomllib

from flexengine.shell.commands.main import COMMANDS
from flexengine.shell.commands.run import parser
from tests.helpers import command_line
from tests.helpers.pages import blocks

TEXT = command_line.PAGE.read_text(encoding="utf-8")


def test_tables_are_those_of_the_parsers() -> None:
    assert command_line.updated(TEXT) == TEXT, "run python -m tests.helpers.command_line"


def test_every_command_and_option_is_on_the_page() -> None:
    """Read from the page's text, not from its blocks."""
    assert set(command_line.named(TEXT)) == {"general", *COMMANDS}
    for name, about in COMMANDS.items():
        assert f"| [`{name}`](#{name}) | {about} |" in TEXT
        section = TEXT.split(f"<!-- options: {name} -->")[1].split("<!-- end of")[0]
        general = TEXT.split("<!-- options: general -->")[1].split("<!-- end of")[0]
        shown = set(re.findall(r"`(--[a-z][a-z-]*)", section + general))
        made = command_line.parser(name)
        assert shown == {o for action in made._actions for o in action.option_strings if o.startswith("--")}


def test_the_file_of_options_is_accepted(tmp_path) -> None:
    (block,) = (block for block in blocks(command_line.PAGE) if block.kind == "toml")
    (path := tmp_path / "options.toml").write_text(block.text)
    options = parser().parse_args(["--config", str(path)])
    values = tomllib.loads(block.text)
    assert {name: getattr(options, name.replace("-", "_")) for name in values} == values
