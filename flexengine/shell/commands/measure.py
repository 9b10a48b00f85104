"""flexengine measure: measure this machine's rates, and those of a model on it."""

import argparse
import json

from flexengine.lossy import EXACT
from flexengine.shell.commands import openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands.messages import DONE, program
from flexengine.shell.commands.parser import Parser, refuse_given
from flexengine.shell.explain.text import hardware_text

_OUTPUT = """
--again           measure stored rates again, too
--json            print the rates as JSON
--save FILE.json  write a hardware file, for plan --hardware
"""


def parser() -> Parser:
    p = Parser("measure", "[MODEL]")
    p.group("model and machine", "-m, --model MODEL  measure this model's layers, too (default: none)", common.MACHINE)
    p.add_twin("model")
    p.group("output", _OUTPUT)
    return p


def run(args: argparse.Namespace) -> int:
    """Measure this machine, and print and save its rates. Return the exit code. Raise FlexError if an option is
    wrong."""
    common.check_written(args, {"--save": args.save})
    if args.model is None:
        refuse_given(args, ("trust_remote_code", "allow_symlinks"), "has no effect without a model; remove it")
    openers.load_libraries()
    from flexengine.engine import rates

    opened = openers.open_bare(args, EXACT) if args.model is not None else None
    hardware = rates.this_machine(openers.machine_options(args), opened, args.again, args.dtype)
    text = json.dumps(hardware.to_json(), indent=1)
    if args.save:
        common.write(args.save, text)
    print(text if args.json else hardware_text(hardware))
    return DONE


main = program(lambda words: run(parser().parse_args(words)))
