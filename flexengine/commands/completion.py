"""flexengine completion SHELL: print a script that completes commands and options."""

import argparse
from collections.abc import Sequence

from flexengine.commands.exit_codes import DONE, exit_code
from flexengine.commands.parser import Parser

SHELLS = ("bash", "zsh")
_END = """\
bash: flexengine completion bash > ~/.local/share/bash-completion/completions/flexengine; zsh: save the script as
_flexengine in a directory of $fpath.
"""
_FILES = ("INPUT", "FILE", "OUT")  # an option or positional whose metavar begins so is a file


def parser() -> Parser:
    """Return the argument parser."""
    p = Parser("completion", "Print a script that completes commands and options in a shell.", _END, "SHELL")
    p.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code."""

    def command() -> int:
        print(script(parser().parse_args(argv).shell))
        return DONE

    return exit_code(command)


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    import shtab

    text: str = shtab.complete(_all_commands(), shell)
    return text


def _all_commands() -> argparse.ArgumentParser:
    """Return one parser that has the parser of each command as a sub-command."""
    import shtab

    from flexengine.commands.main import COMMANDS, module_of

    root = argparse.ArgumentParser(prog="flexengine")
    commands = root.add_subparsers()
    for name, about in COMMANDS.items():
        made = module_of(name).parser()
        for action in made._actions:
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            if metavar.startswith(_FILES):
                action.complete = shtab.FILE
            elif metavar.startswith("DIR"):
                action.complete = shtab.DIRECTORY
        commands.add_parser(name, parents=[made], add_help=False, help=about)
    return root
