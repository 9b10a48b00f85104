"""flexengine completion SHELL: print a script that completes commands and options."""

import argparse
from typing import Any

from flexengine import shipped
from flexengine.shell.commands.messages import DONE, program
from flexengine.shell.commands.parser import Parser

SHELLS = ("bash", "zsh", "fish")
_END = """\
bash: flexengine completion bash > ~/.local/share/bash-completion/completions/flexengine; zsh: save the script as
_flexengine in a directory of $fpath; fish: flexengine completion fish > ~/.config/fish/completions/flexengine.fish.
"""
# An option or positional whose metavar begins so is a file.
_FILES = ("INPUT", "FILE", "OUT", "ROWS", "SCENARIO", "MODEL", "CLUSTER")
# Options, by attribute, that also take the name of a shipped file; `model` does in `plan` only.
_SHIPPED: dict[str, shipped.Kind] = {
    "hardware": "hardware",
    "policy": "policies",
    "compare": "policies",
    "cluster": "clusters",
    "model": "models",
}


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
            if action.dest in _SHIPPED and (action.dest != "model" or name == "plan"):
                action.complete = _names_and_files(_SHIPPED[action.dest])
            elif metavar.startswith(_FILES):
                action.complete = shtab.FILE
            elif metavar.startswith("DIR"):
                action.complete = shtab.DIRECTORY
        commands.add_parser(name, parents=[made], add_help=False, help=about)
    text: str = shtab.complete(root, shell)
    return text


def _names_and_files(kind: shipped.Kind) -> dict[str, Any]:
    """Return what shtab writes for a file or the name of a shipped one, by shell."""
    names, function = " ".join(shipped.names(kind)), f"_flexengine_{kind}"
    bash = f'{function}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}'
    zsh = f"{function}() {{ _alternative 'shipped:shipped {kind}:({names})' 'files:file:_files'; }}"
    fish = f"{names} (__fish_complete_path (commandline -ct))"
    return {"bash": function, "zsh": function, "fish": fish, "preamble": {"bash": bash, "zsh": zsh}}


def run(args: argparse.Namespace) -> int:
    """Print the script. Return the exit code."""
    print(script(args.shell))
    return DONE


main = program(lambda words: run(parser().parse_args(words)))
