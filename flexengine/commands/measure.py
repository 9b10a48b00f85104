"""flexengine measure: measure this machine's rates, and those of a model on it."""

import argparse
import json
from collections.abc import Sequence

from flexengine.commands.exit_codes import DONE, exit_code
from flexengine.commands.open_engine import load_libraries, machine_kind, machine_options, open_bare
from flexengine.commands.option_text import add_options
from flexengine.commands.options import MODEL, add_machine
from flexengine.commands.parser import Parser
from flexengine.commands.written import check_written, write
from flexengine.errors import InvalidInput
from flexengine.lossy import EXACT
from flexengine.plan.hardware_text import hardware_text

_OUTPUT = """
--again           measure stored rates again, too
--json            print the rates as JSON
--save FILE.json  write a hardware file, for plan --hardware
"""


def parser() -> Parser:
    """Return the argument parser."""
    p = Parser("measure", "Measure this machine's rates, and those of a model's layers on it.", positionals="[MODEL]")
    machine = p.add_argument_group("model and machine")
    p.add_twin(machine, "-m", "--model", **(MODEL | {"help": "measure this model's layers, too (default: none)"}))
    add_machine(machine)
    add_options(p.add_argument_group("output"), _OUTPUT)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0 done, 2 refused, 3 failed, 130 interrupted."""

    def command() -> int:
        measure(parser().parse_args(argv))
        return DONE

    return exit_code(command)


def measure(args: argparse.Namespace) -> None:
    """Measure this machine, and print and save its rates. Raise FlexError if an option is wrong."""
    check_written({"--save": args.save}, {"--config": args.config}, args.model)
    for option in ("trust_remote_code", "allow_symlinks"):
        if args.model is None and getattr(args, option):
            raise InvalidInput(f"--{option.replace('_', '-')} has no effect without a model; remove it")
    load_libraries()
    from flexengine.engine import rates

    opened = open_bare(args, machine_kind(args), EXACT) if args.model is not None else None
    hardware = rates.this_machine(machine_options(args), opened, args.again, args.dtype)
    text = json.dumps(hardware.to_json(), indent=1)
    if args.save:
        write(args.save, text)
    print(text if args.json else hardware_text(hardware))
