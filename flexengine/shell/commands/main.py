"""The command `flexengine`: one name for all commands, each in a module of its own."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flexengine import __version__
from flexengine.shell.commands.habits import correct_command
from flexengine.shell.commands.interrupts import end_with_process
from flexengine.shell.commands.messages import DONE, REFUSED, exit_code, say_error

COMMANDS = {
    "run": "generate results for a file of prompts",
    "plan": "choose and explain the policy of a job, for this machine or another, without loading weights",
    "measure": "measure this machine's rates, and those of a model on it",
    "quality": "measure what lossy switches cost a model, on real text",
    "flash": "train predictors of the neurons that will be active, for flash mode",
    "evaluate": "evaluate models on scenarios of your own, side by side",
    "convert": "write a checkpoint with 4 bits per weight, which vLLM and transformers read, too",
    "wrangle": "clean a table: match entities, impute a column, detect errors, match schemas, transform by example",
    "lm-eval": "run tasks of lm-evaluation-harness",
    "helm": "run scenarios of HELM, in this environment or another",
    "serve-attention": "hold KV cache for an engine on another machine, and compute attention over it",
    "verify": "compare a model's files with their checksums",
    "doctor": "show what this machine offers, and what is missing for speed",
    "cache": "list or clear converted models, encoded weights, kernels and measured rates",
    "completion": "print a script that completes commands and options in a shell",
}
_USAGE = "usage: flexengine COMMAND [options]"


def help_text() -> str:
    """Return the text of `flexengine --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {about}" for name, about in COMMANDS.items())
    return f"""{_USAGE}

Generate results for a file of prompts with a language model bigger than memory.

commands:
{commands}

flexengine COMMAND --help lists the options of a command; flexengine --version prints the version.
example: flexengine run prompts.jsonl -m MODEL -o results.jsonl"""


def module_of(command: str) -> Any:
    """Return the module of a command. Its `parser` returns the argument parser, its `main` runs a command line."""
    return import_module(f"flexengine.shell.commands.{command.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return its exit code."""
    if argv is None:
        end_with_process()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words[:2] == ["plan", "measure"]:  # its name before measure was a command
        words = words[1:]
    name = words[0] if words else ""
    if name in COMMANDS:
        code: int = module_of(name).main(words[1:])
        return code
    if name in ("-h", "--help"):
        return exit_code(lambda: _print(help_text()))
    if name in ("-V", "--version"):
        return exit_code(lambda: _print(f"flexengine {__version__}"))
    if not words:
        print(help_text(), file=sys.stderr)
        return REFUSED
    known = f"{name!r} is no command; choose from {', '.join(COMMANDS)}"
    say_error(correct_command(name, words[1:], tuple(COMMANDS)) or known)
    return REFUSED


def _print(text: str) -> int:
    print(text)
    return DONE
