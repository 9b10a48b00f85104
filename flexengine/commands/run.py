"""flexengine run INPUT: generate results for a file of prompts."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexengine.commands.exit_codes import DONE, SOME_FAILED, run_interruptible
from flexengine.commands.fleet import add_fleet, check_fleet
from flexengine.commands.habits import command_text
from flexengine.commands.messages import say
from flexengine.commands.open_engine import open_engine, open_rows
from flexengine.commands.options import (
    INPUT,
    MODEL,
    POLICY,
    SAMPLING,
    Group,
    add_lossy,
    add_machine,
    add_rows,
    add_sampling,
    add_workers,
    allowed,
    file_name,
    lossy_of,
    named,
    policy_file,
    policy_of,
)
from flexengine.commands.parser import Parser
from flexengine.commands.pipeline import add_pipeline, pipeline, rank_of, serve, stage_lines
from flexengine.commands.run_job import run_job
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput

if TYPE_CHECKING:
    from flexengine.job.interrupt import Interrupts


def parser() -> Parser:
    """Return the argument parser."""
    p = Parser("run", "Generate results for a file of prompts.",
               "With --output the job can be stopped or killed at any time; the same command then continues"
               " it.", positionals="INPUT")  # fmt: skip
    rows = p.add_argument_group("input")
    p.add_twin(rows, "-i", "--input", **INPUT)
    add_rows(rows)
    _add_output(p.add_argument_group("output"))
    add_sampling(p.add_argument_group("sampling", "defaults for rows without fields of these names"))
    _add_machine(p.add_argument_group("model and machine"))
    add_workers(p.add_argument_group("attention workers"))
    add_pipeline(p.add_argument_group("pipeline"))
    add_fleet(p.add_argument_group("fleet"))
    add_lossy(p.add_argument_group("lossy", "switches that save time and memory; results then differ from those of the"
                                             " checkpoint's own numbers; flexengine quality shows by how"
                                             " much"))  # fmt: skip
    return p


def _add_output(group: Group) -> None:
    group.add_argument("-o", "--output", type=named, metavar="OUT.jsonl",
                       help="file for results in input order; finished rows are stored in OUT.jsonl.journal, from which"
                            " the same command continues; without --output, results go to stdout and an interrupted"
                            " job starts over")  # fmt: skip
    group.add_argument("--restart", action="store_true", help="delete the journal of earlier runs, and start over")
    group.add_argument("--retry-errors", action="store_true", help="run rows again that ended with an error")
    group.add_argument("--json", action="store_true", help="print the summary as JSON, as the last line of stdout")
    group.add_argument(
        "--trace", type=file_name, metavar="FILE.json", help="write a Chrome trace of all lanes, for Perfetto"
    )
    group.add_argument("--report", type=file_name, metavar="FILE.html",
                       help="write a page about the job: placement, time line of a sweep, rates, errors; renewed while"
                            " the job runs (needs matplotlib)")  # fmt: skip


def _add_machine(group: Group) -> None:
    group.add_argument("-m", "--model", **MODEL)
    group.add_argument("--verify", action="store_true",
                       help="first compare all files of the model with their checksums (in SHA256SUMS beside them, or"
                            " in the hub cache's file names), and prepared weights with their own")  # fmt: skip
    group.add_argument("--policy", **POLICY)
    group.add_argument("--dry-run", action="store_true",
                       help="print the plan and its predictions, without loading weights; flexengine plan also plans"
                            " for other machines")  # fmt: skip
    add_machine(group)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0 done, 1 done with row errors, 2 refused, 3 failed while running,
    130 or 143 interrupted by SIGINT or SIGTERM."""

    def command(interrupts: "Interrupts") -> int:
        args = parser().parse_args(argv)
        args.argv = sys.argv[1:] if argv is None else list(argv)
        return run(args, interrupts)

    return run_interruptible(command)


def run(args: argparse.Namespace, interrupts: "Interrupts") -> int:
    """Run the job and return its exit code. Raise FlexError if an option, the input or the model is refused, before
    weights are read where possible."""
    from flexengine.job.results import check_output
    from flexengine.job.resume import open_job
    from flexengine.job.streams import STDIN, output_name

    if args.input is None:
        raise InvalidInput("no input is given; name a file of prompts, as in flexengine run prompts.jsonl")
    _check_no_model(args)
    args.input = STDIN if args.input == "-" else args.input
    args.output = output_name(args.output)
    if args.input == STDIN and sys.stdin is not None and sys.stdin.isatty():
        say("reading rows from the terminal, one JSON object per line; end them with Ctrl-D")
    rank = rank_of(args)
    check_fleet(args)
    check_output(args.output, args.input)
    if args.json or args.dry_run:
        check_output(None)
    _check_files(args)
    if args.report and not args.dry_run:
        from flexengine.report.recorder import check

        check(args.report)
    if args.limit is not None and args.limit < 1:
        raise InvalidInput(f"--limit is {args.limit}; it must be at least 1")
    params = SamplingParams(**{name: getattr(args, name) for name in SAMPLING})
    args.policy = policy_of(args)
    args.lossy = lossy_of(args)
    args.allow = allowed(args, args.lossy, args.policy)
    if args.lossy:
        say(f"lossy: {args.lossy.described}")
    if args.dry_run:
        for option in ("json", "trace", "report", "restart", "retry_errors"):
            if getattr(args, option):
                raise InvalidInput(f"--{option.replace('_', '-')} has no effect with --dry-run; remove one of them")
    args.command = ["run", *args.argv]
    if rank > 0:
        serve(args)
        return DONE
    if args.dry_run:
        return _dry_run(args, params)
    with (
        open_rows(args) as rows,
        open_job(rows, args.output, args.restart, args.retry_errors) as job,
    ):
        with interrupts.guarding(job.save, job.standing):
            summary = run_job(args, job, params, interrupts)
        failed = job.failed
    if args.json:
        print(json.dumps(summary), flush=True)
    return SOME_FAILED if failed else DONE


def _dry_run(args: argparse.Namespace, params: SamplingParams) -> int:
    """Print the plan. Write only the measured rates of the machine, to the cache."""
    from flexengine.engine.survey import Refused
    from flexengine.guests.stages.planner import PipelinePlanner
    from flexengine.plan.explain import report
    from flexengine.plan.min_memory import left_out
    from flexengine.plan.whatif import ideas

    with open_rows(args) as rows, pipeline(args) as group, open_engine(args, group=group) as engine:
        refused = Refused()
        engine.reader.check_chat(rows.chat)
        workload = engine.reader.survey(rows, params, refused)
        refused.report(workload, args.input)
        engine.choose_bits()
        planner = engine.planner
        planner.choose_lossy(workload)
        planner.check(workload)  # raises OutOfMemory before measuring if no row fits
        hardware = planner.rates.measured()
        plan = planner.plan(workload)
        assert plan.layout is not None
        if message := left_out(workload, plan.largest, plan.refusal):
            print(f"{message}\n")
        prediction = planner.cost(plan.workload).predict(plan.layout)
        case = (engine.facts, hardware, plan.workload, prediction)
        better = ideas(*case, chosen=planner.policy is None, thorough=args.verbose)
        stages = isinstance(planner, PipelinePlanner)
        print(report(engine.core.source.name, *case, better, args.verbose, alone=not stages))
        if isinstance(planner, PipelinePlanner):
            shared = planner.machine.capacity.shared
            print(stage_lines(engine.core.skeleton.layer_range, prediction, planner.others, shared))
    return DONE


def _check_no_model(args: argparse.Namespace) -> None:
    """Raise InvalidInput if INPUT is a model."""
    if (args.model is None and (Path(args.input) / "config.json").is_file()) or args.input.endswith(".gguf"):
        raise InvalidInput(
            f"{args.input} is a model, which is given by --model; write"
            f" {command_text('run', ['INPUT', '--model', args.input])}"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Raise InvalidInput if a file that is written is also read, or written a second time."""
    from flexengine.job.overwrite import check_model_kept, check_not_overwritten
    from flexengine.job.results import files_beside
    from flexengine.job.whole_file import part_path

    read = {"INPUT": args.input, "--policy": policy_file(args), "--calibration-text": args.calibration_text,
            "--layer-bits": args.layer_bits, "--config": args.config}  # fmt: skip
    written = {"--output": args.output, "--trace": args.trace, "--report": args.report}
    if args.output:
        written |= files_beside(args.output, "--output")
    if args.report:
        written |= {"the unfinished part of --report": part_path(args.report)}
    check_not_overwritten(read, written)
    check_model_kept(args.model, {"--trace": args.trace, "--report": args.report})
