"""flexengine evaluate SCENARIO.yaml ...: evaluate models on local scenarios."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexengine.errors import InvalidInput, shown
from flexengine.job.files import check_not_overwritten
from flexengine.shell.commands import openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands.interrupts import Interrupts
from flexengine.shell.commands.messages import DONE, SOME_FAILED, interruptible, say, table
from flexengine.shell.commands.parser import Parser, check_least

if TYPE_CHECKING:
    from flexengine.apps.evaluate.instances import Built
    from flexengine.apps.evaluate.report import Evaluation
    from flexengine.apps.evaluate.runs import Run
    from flexengine.engine.engine import Engine

_END = """\
The command can be stopped or killed at any time; the same command then continues. docs/evaluate.md describes scenario
files and results.
"""
_OUTPUT = """
-o, --output DIR  folder for results.json, results.csv, results.html, instances.jsonl and throughput.json; its folder
                  jobs holds the rows of each run, from which the same command continues
--restart         delete all earlier results in DIR, also of other runs, and start over
"""
_RUNS = """
-m, --model MODEL ...            directory, .gguf file or hub id (default: the demo model); may be repeated
--run NAME:OPTION=VALUE,... ...  exact, or a name and options from model, weights, compute, cache, sparse-attention,
    flash, sparsify, calibrate (bundled or a file) and dtype, as in 4bit:weights=int4; may be repeated; each is run with
    each --model (default: exact)
--resamples N                    draws of the bootstrap, which gives intervals of 95 %% (default: %(default)s)
"""
STANDING = "interrupted: finished rows are stored; run the same command again to continue"
# From the time at which --restart has deleted the earlier results.
STANDING_RESTARTED = "interrupted: finished rows are stored; run the same command without --restart to continue"


def parser() -> Parser:
    p = Parser("evaluate", "SCENARIO.yaml...", _END, "Scenarios are multiple choice, generation or perplexity.")
    p.add_argument("scenario", nargs="*", type=common.named, metavar="SCENARIO.yaml", help="one or more scenario files")
    p.group("output", common.OptionTable(_OUTPUT, more={"output": {"type": common.file_name}}))
    runs = common.OptionTable(_RUNS, {"model": [], "run": [], "resamples": 1000})
    p.group("runs", runs, about="the first run is the one that the others are compared with")
    p.group("machine", common.MACHINE)
    return p


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Evaluate, print a table and write the results. Return the exit code. Raise FlexError if an option, a scenario or
    a model is refused, scenarios before any model is opened."""
    interrupts.standing = lambda: STANDING
    from flexengine.apps.evaluate.evaluation import evaluate
    from flexengine.apps.evaluate.instances import build
    from flexengine.apps.evaluate.report import write_files
    from flexengine.apps.evaluate.runs import runs_of
    from flexengine.apps.evaluate.scenario import load

    for given, what in ((args.scenario, "scenario"), (args.output, "--output")):
        if not given:
            raise InvalidInput(f"no {what} is given; write flexengine evaluate SCENARIO.yaml --output DIR")
    check_least(args, resamples=1)
    runs, folder = runs_of(args.model, args.run), Path(args.output)
    if wrong := next((each for each in runs if each.dtype not in (None, *common.DTYPES)), None):
        known = ", ".join(common.DTYPES)
        raise InvalidInput(f"--run {wrong.name}: dtype is {shown(wrong.dtype)}; it must be one of {known}")
    runs = [replace(each, dtype=each.dtype or args.dtype) for each in runs]
    scenarios = [build(scenario) for scenario in load(args.scenario)]
    _check_folder(folder, scenarios)
    engine_class = openers.load_libraries()

    def make(each: "Run") -> "Engine":
        options = openers.bare_options(args) | {"dtype": each.dtype}
        return engine_class(each.model, lossy=each.lossy, on_sweep=lambda _: interrupts.check(), **options)

    def restarted() -> None:
        interrupts.standing = lambda: STANDING_RESTARTED

    done = evaluate(scenarios, runs, folder, make, args.resamples, restarted if args.restart else None)
    write_files(done, folder)
    print(text(done))
    for line in failures(done):
        say(line)
    say(f"results are in {folder / 'results.html'}, results.json, results.csv and instances.jsonl")
    return SOME_FAILED if any(figure.errors for figure in done.figures) else DONE


def _check_folder(folder: Path, scenarios: "list[Built]") -> None:
    """Raise InvalidInput if the folder cannot be used, or a scenario reads a file that is replaced."""
    from flexengine.apps.evaluate.evaluation import JOBS, THROUGHPUT
    from flexengine.apps.evaluate.report import RESULTS

    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"--output {folder} is a file; name a folder")
    read = {str(built.scenario.origin.file): built.scenario.origin.file for built in scenarios}
    for built in scenarios:
        read |= {f"{built.scenario.name}: {name}": str(built.scenario.path(name)) for name in built.digests}
    written = {name: str(folder / name) for name in (*RESULTS, THROUGHPUT)}
    for name, path in read.items():
        check_not_overwritten({name: path}, written)
        if (folder / JOBS).resolve() == Path(path).resolve().parent:
            where = f"{name} is in {folder / JOBS}"
            raise InvalidInput(f"{where}, whose files this command replaces; name another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"--output {folder} cannot be made: {error.strerror}; name another folder") from error


def text(evaluation: "Evaluation") -> str:
    """Return the table of the originals, and of the worst over perturbations: a line for each scenario and metric."""
    from flexengine.apps.evaluate.perturb import ORIGINAL
    from flexengine.apps.evaluate.report import WORST

    count = len(evaluation.runs)
    head = ["scenario", "metric", evaluation.runs[0].name]
    for each in evaluation.runs[1:]:
        head += [each.name, "difference"]
    lines = [head]
    figures = evaluation.figures
    for begin in range(0, len(figures), count):
        first, *others = figures[begin : begin + count]
        if first.variant in (ORIGINAL, WORST):
            metric = first.metric if first.variant == ORIGINAL else f"{first.metric}, {WORST}"
            cells = [first.scenario, metric, _with_interval(first.value, first.low, first.high, ".4f")]
            for f in others:
                cells.append(_with_interval(f.value, f.low, f.high, ".4f"))
                cells.append(_with_interval(f.difference, f.difference_low, f.difference_high, "+.4f"))
            lines.append(cells)
    return table(lines, range(2, len(head)))


def failures(evaluation: "Evaluation") -> list[str]:
    """Return a line for each scenario and run with errors, as the table counts such rows without a mark."""
    return [
        f"{built.scenario.name}: {len(errors)} of {len(answers)} instances of run {run.name} have an error; the first:"
        f" {errors[0]}"
        for run, of_run in zip(evaluation.runs, evaluation.answers, strict=True)
        for built, answers in zip(evaluation.scenarios, of_run, strict=True)
        if (errors := [answer.error for answer in answers if answer.error is not None])
    ]


def _with_interval(value: float | None, low: float | None, high: float | None, form: str) -> str:
    value_text, low_text, high_text = ("-" if each is None else format(each, form) for each in (value, low, high))
    return value_text if value is None else f"{value_text} [{low_text}, {high_text}]"


main = interruptible(lambda words, interrupts: run(parser().parse_args(words), interrupts))
