"""flexengine convert MODEL OUT: write a checkpoint with 4 bits per weight, which other programs read, too."""

import argparse
import os
from pathlib import Path

from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.model.source import check_local
from flexengine.plan.formatting import count, plain, size
from flexengine.shell.commands.messages import DONE, program, say, verified_line
from flexengine.shell.commands.openers import bare_options, load_libraries
from flexengine.shell.commands.options import MACHINE, MODEL, OptionTable, calibration_of
from flexengine.shell.commands.parser import Parser

INT4 = "int4"
_END = """\
OUT is a new directory in compressed-tensors' format pack-quantized, in groups of 32 columns, with the tokenizer and the
other files of the model. Embedding, head, routers and norms stay as they are. It appears when it is complete; a
conversion that is interrupted starts again.
"""
_OPTIONS = f"""
--weights FORMAT         format of the layers' matrices: {INT4}
--calibrate              first run the exact model over a text, once per model, to measure which errors do harm
--calibration-text FILE  calibrate on this UTF-8 text instead of the bundled one
"""
_VERIFY = "--verify  compare the model's files with their checksums"


def parser() -> Parser:
    p = Parser("convert", "[MODEL] OUT --weights int4", _END)
    p.group("format", OptionTable(_OPTIONS))
    p.group("machine", MODEL, MACHINE, _VERIFY)
    p.add_twin("model")
    p.add_argument("out", metavar="OUT", help="directory to write, which must not exist")
    return p


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what was written. Return the exit code. Raise FlexError if an option is wrong or
    the model cannot be converted."""
    if args.weights != INT4:
        what = f"--weights is {args.weights}" if args.weights else "--weights is missing"
        raise InvalidInput(f"{what}; --weights {INT4} is written, which other programs read in groups of 32 columns")
    if not args.out or "\0" in args.out:
        raise InvalidInput("OUT is empty or has a null character; name a new directory")
    if os.path.lexists(args.out):
        raise InvalidInput(f"{args.out} exists; give another directory, or remove it")
    check_local(args.model, args.allow_symlinks)
    engine_class = load_libraries()
    from flexengine.model.quantised.writing import convert

    lossy = Lossy(weights=INT4 if calibration_of(args) else None, calibrate=calibration_of(args))
    options = bare_options(args)
    with engine_class(args.model, verify=args.verify, prefix_sharing=False, lossy=lossy, **options) as engine:
        core = engine.core
        if core.verifier:
            say(verified_line(vars(core.verifier)))
        opened = core.opened
        model = core.source, opened.skeleton, opened.locations
        made = convert(*model, Path(args.out), lambda: engine.calibrator.importances)
    if made.kept:
        kept = count(len(made.kept), "matrix stays", "matrices stay")
        why = "columns are not a multiple of 32, or rows not of 8, or those of another expert"
        say(f"{kept} as in the model, such as {made.kept[0]}: its {why}")
    matrices = f"{count(made.matrices, 'matrix', 'matrices')} in {INT4}, {size(made.before)} -> {size(made.after)}"
    print(f"wrote {plain(str(made.directory))}: {count(made.files, 'file', 'files')}, {size(made.nbytes)}; {matrices}")
    return DONE


main = program(lambda words: run(parser().parse_args(words)))
