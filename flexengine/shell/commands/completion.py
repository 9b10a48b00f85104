"""flexengine completion SHELL: print a script that completes commands and options."""

import argparse

from flexengine.shell.commands.messages import DONE, program
from flexengine.shell.commands.parser import Parser

SHELLS = ("bash", "zsh")
_END = """\
bash: flexengine completion bash > ~/.local/share/bash-completion/completions/flexengine; zsh: save the script as
_flexengine in a directory of $fpath.
"""
_FILES = ("INPUT", "FILE", "OUT")  # an option or positional whose metavar begins so is a file


def parser() -> Parser:
    p = Parser("completion", "SHELL", _END)
    p.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return p


def script(shell: str) -> str:
    """Return the completion script of a shell: that of a parser that has each command's parser as a sub-command."""
    import shtab

    from flexengine.shell.commands.main import COMMANDS, module_of

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
    text: str = shtab.complete(root, shell)
    return text


def run(args: argparse.Namespace) -> int:
    """Print the script. Return the exit code."""
    print(script(args.shell))
    return DONE


main = program(lambda words: run(parser().parse_args(words)))
