"""flexengine flash train MODEL: train predictors of active neurons, which flash mode reads weights by."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import texts
from flexengine.commands.exit_codes import DONE, exit_code
from flexengine.commands.messages import say
from flexengine.commands.open_engine import bare_options, load_libraries
from flexengine.commands.option_text import add_options
from flexengine.commands.options import MODEL, add_machine
from flexengine.commands.parser import Parser
from flexengine.commands.progress import verified_line
from flexengine.commands.text import table
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.plan.formatting import plain, size

if TYPE_CHECKING:
    from flexengine.guests.flash.trained import LayerPredictor, Trained

TRAIN = "train"
_ABOUT = """\
Train predictors for flash mode, which reads only the neurons that will be active. The model must have ReLU activations,
or others that --sparsify makes sparse.
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
_HEAD = ("layer", "neurons", "rank", "active", "predicted", "misses", "false alarms", "union of 4", "window of 4")


def parser() -> Parser:
    """Return the argument parser."""
    p = Parser("flash", _ABOUT, _END, "train [MODEL]")
    p.add_argument("action", nargs="?", choices=(TRAIN,), help="train: train the predictors of a model")
    add_options(p.add_argument_group("training"), _TRAINING, {"tokens": 16384, "misses": 0.05})
    machine = p.add_argument_group("machine")
    p.add_twin(machine, "-m", "--model", **MODEL)
    add_machine(machine)
    add_options(machine, "--verify  compare the model's files, and cached predictors, with their checksums")
    add_options(p, "--json  print the numbers as JSON instead of a table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0 done, 2 refused, 3 failed, 130 interrupted."""
    return exit_code(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Train, or take the predictors from the cache, and print what was measured. Return the exit code. Raise FlexError
    if an option is wrong or the model cannot be trained for."""
    if args.action is None:
        raise InvalidInput("the first word after flexengine flash must be train")
    if args.threads is not None and args.threads < 1:
        raise InvalidInput(f"--threads is {args.threads}; it must be at least 1")
    if args.tokens < 1:
        raise InvalidInput(f"--tokens is {args.tokens}; it must be at least 1")
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

    from flexengine.guests.flash import training_job as training
    from flexengine.guests.flash.training import Settings

    settings = Settings(args.misses, args.rank)
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
    lines = [_cells(number, layer) for number, layer in enumerate(trained.layers) if layer is not None]
    errors = trained.errors
    shares = f"{errors.active_share:.1%} active, {errors.predicted_share:.1%} predicted"
    faults = f"{errors.misses:.1%} misses, {errors.false_alarms:.1%} false alarms"
    where = f"{size(trained.nbytes)} of predictors in {plain(trained.directory)}"
    return f"{table([_HEAD, *lines], right=range(len(_HEAD)))}\n\nall layers: {shares}, {faults}; {where}"


def _cells(number: int, layer: "LayerPredictor") -> tuple[str, ...]:
    """Return the cells of a layer's line. Unions are those of predicted neurons, which are read."""
    predictor, errors = layer.predictor, layer.errors
    unions = layer.predicted.rows[:4][-1], layer.predicted.window[3]
    shares = (errors.active_share, errors.predicted_share, errors.misses, errors.false_alarms, *unions)
    return str(number), str(predictor.neurons), str(predictor.rank), *(f"{share:.1%}" for share in shares)


def as_json(trained: "Trained") -> dict[str, Any]:
    """Return the numbers as a JSON object."""
    errors = trained.errors
    return {
        "path": str(trained.directory),
        "bytes": trained.nbytes,
        "misses": errors.misses,
        "false_alarms": errors.false_alarms,
        "active": errors.active_share,
        "predicted": errors.predicted_share,
        "about": dict(trained.about),
        "layers": [None if layer is None else _layer_json(layer) for layer in trained.layers],
    }


def _layer_json(layer: "LayerPredictor") -> dict[str, Any]:
    return {
        **{name: getattr(layer.predictor, name) for name in ("neurons", "rank", "threshold")},
        **{name: getattr(layer.errors, name) for name in ("misses", "false_alarms")},
        **asdict(layer.errors),
        "true": asdict(layer.true),
        "predicted_sharing": asdict(layer.predicted),
    }
