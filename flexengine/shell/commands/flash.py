"""flexengine flash train MODEL: train predictors of active neurons, which flash mode reads weights by."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import texts
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.plan.formatting import plain, size
from flexengine.shell.commands.messages import DONE, program, say, table, verified_line
from flexengine.shell.commands.openers import bare_options, load_libraries
from flexengine.shell.commands.options import MACHINE, MODEL, OptionTable, add_options
from flexengine.shell.commands.parser import Parser, check_least

if TYPE_CHECKING:
    from flexengine.guests.flash.predictors import Trained

TRAIN = "train"
_MORE = """\
Flash mode reads only these neurons. The model must have ReLU activations, or others that --sparsify makes sparse.
"""
_END = """\
Predictors stay in the cache (kind calibrations), with what was measured of them on a part of the text that they were
not trained on.
"""
_TRAINING = f"""
--text FILE              UTF-8 text (default: {", ".join(texts.CALIBRATION)})
--tokens N               tokens that the model reads (default: %(default)s)
--rank N                 rank of all predictors (default: 1/32 to 1/4 of the hidden size, at least 32, by the false
                         alarms of a layer)
--misses SHARE           share of the active neurons that may be missed (default: %(default)s)
--sparsify SHARE         for jobs with --sparsify SHARE (docs/flash.md)
--calibration-text FILE  find the thresholds of --sparsify on this UTF-8 text instead of the bundled one
--threads N              threads that compute (default: one per core)
"""
_VERIFY = "--verify  compare the model's files, and cached predictors, with their checksums"
_HEAD = ("layer", "neurons", "rank", "active", "predicted", "misses", "false alarms", "union of 4", "window of 4")


def parser() -> Parser:
    p = Parser("flash", "train [MODEL]", _END, _MORE)
    p.add_argument("action", nargs="?", choices=(TRAIN,), help="train: train the predictors of a model")
    p.group("training", OptionTable(_TRAINING, {"tokens": 16384, "misses": 0.05}))
    p.group("machine", MODEL, MACHINE, _VERIFY)
    p.add_twin("model")
    add_options(p, "--json  print the numbers as JSON instead of a table")
    return p


def run(args: argparse.Namespace) -> int:
    """Train, or take the predictors from the cache, and print what was measured. Return the exit code. Raise FlexError
    if an option is wrong or the model cannot be trained for."""
    if args.action is None:
        raise InvalidInput("the first word after flexengine flash must be train")
    check_least(args, threads=1, tokens=1)
    if args.calibration_text is not None and args.sparsify is None:
        why = f"--calibration-text {args.calibration_text} is for the thresholds of --sparsify"
        raise InvalidInput(f"{why}; give --sparsify, too, or leave it out")
    lossy = Lossy(sparsify=args.sparsify, calibrate=args.calibration_text)
    content = texts.calibration() if args.text is None else texts.read(args.text)
    trained = _train(args, content, lossy)
    print(json.dumps(as_json(trained)) if args.json else report(trained))
    return DONE


def _train(args: argparse.Namespace, content: str, lossy: Lossy) -> "Trained":
    engine_class = load_libraries()
    import torch

    from flexengine.guests.flash import training

    settings = training.Settings(args.misses, args.rank)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    options = bare_options(args)
    with engine_class(args.model, verify=args.verify, prefix_sharing=False, lossy=lossy, **options) as engine:
        core = engine.core
        if core.verifier:
            say(verified_line(vars(core.verifier)))
        training.sparse_blocks(core)
        name = ", ".join(texts.CALIBRATION) if args.text is None else Path(args.text).name
        text = training.cut(name, content, core.tokenizer, core.skeleton.context_length, args.tokens)
        return training.predictors(engine, text, settings)


def report(trained: "Trained") -> str:
    """Return a table with a line per layer, and a line with the numbers of the model."""
    lines = []
    for number, layer in enumerate(trained.layers):
        if layer is None:
            continue
        predictor, errors = layer.predictor, layer.errors
        unions = layer.predicted.rows[:4][-1], layer.predicted.window[3]  # of predicted neurons, which are read
        shares = (errors.active_share, errors.predicted_share, errors.misses, errors.false_alarms, *unions)
        cells = (number, predictor.neurons, predictor.rank)
        lines.append([*map(str, cells), *(f"{share:.1%}" for share in shares)])
    errors = trained.errors
    found = f"{errors.active_share:.1%} active, {errors.predicted_share:.1%} predicted"
    faults = f"{errors.misses:.1%} misses, {errors.false_alarms:.1%} false alarms"
    where = f"{size(trained.nbytes)} of predictors in {plain(trained.directory)}"
    return f"{table([_HEAD, *lines], right=range(len(_HEAD)))}\n\nall layers: {found}, {faults}; {where}"


def as_json(trained: "Trained") -> dict[str, Any]:
    """Return the numbers as a JSON object."""
    layers: list[dict[str, Any] | None] = []
    for layer in trained.layers:
        if layer is None:
            layers.append(None)
            continue
        predictor, errors = layer.predictor, layer.errors
        values = {"neurons": predictor.neurons, "rank": predictor.rank, "threshold": predictor.threshold}
        values |= {"misses": errors.misses, "false_alarms": errors.false_alarms} | asdict(errors)
        layers.append(values | {"true": asdict(layer.true), "predicted_sharing": asdict(layer.predicted)})
    errors = trained.errors
    return {
        "path": str(trained.directory),
        "bytes": trained.nbytes,
        "misses": errors.misses,
        "false_alarms": errors.false_alarms,
        "active": errors.active_share,
        "predicted": errors.predicted_share,
        "about": dict(trained.about),
        "layers": layers,
    }


main = program(lambda words: run(parser().parse_args(words)))
