"""flexengine run INPUT: generate results for a file of prompts."""

import argparse
import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.files import STDIN, check_model_kept, check_not_overwritten, descriptor, part_path
from flexengine.job.results import check_output, files_beside
from flexengine.shell.commands import distributed, messages, openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands.habits import command_text
from flexengine.shell.commands.interrupts import Interrupts
from flexengine.shell.commands.messages import DONE, NORMAL, SOME_FAILED, detail, interruptible, say, verbosity
from flexengine.shell.commands.parser import Parser, check_least, refuse_given
from flexengine.shell.commands.sampling_options import LENGTHS, SAMPLED, sampling_of

if TYPE_CHECKING:
    from flexengine.engine.summary import Progress
    from flexengine.job.resume import JobStore

_END = """\
With --output the job can be stopped or killed at any time; the same command then continues it.
"""
_OUTPUT = """
-o, --output OUT.jsonl  file for results in input order; finished rows are stored in OUT.jsonl.journal, from which the
                        same command continues; without --output, results go to stdout and an interrupted job starts
                        over
--restart               delete the journal of earlier runs, and start over
--retry-errors          run rows again that ended with an error
--json                  print the summary as JSON, as the last line of stdout
--trace FILE.json       write a Chrome trace of all lanes, for Perfetto
--report FILE.html      write a page about the job: placement, time line of a sweep, rates, errors; renewed while the
                        job runs (needs matplotlib)
"""
_VERIFY = """
--verify  first compare all files of the model with their checksums (in SHA256SUMS beside them, or in the hub cache's
          file names), and prepared weights with their own
"""
_DRY_RUN = """
--dry-run  print the plan and its predictions, and generate nothing; the first time, this converts the model if it must
           be converted, and measures the model's layers for 2 to 6 seconds; flexengine plan also
           plans for other machines
"""
_LOSSY = """\
switches that save time and memory; results then differ from those of the checkpoint's own numbers; flexengine quality
shows by how much"""


def parser() -> Parser:
    p = Parser("run", "INPUT", _END)
    p.group("input", common.INPUT, common.ROWS)
    p.add_twin("input")
    p.group("output", _OUTPUT)
    p.group("sampling", LENGTHS, SAMPLED, about="defaults for rows without fields of these names")
    p.group("model and machine", common.MODEL, _VERIFY, common.POLICY, _DRY_RUN, common.MACHINE)
    p.group("attention workers", common.WORKERS)
    p.group("pipeline", distributed.PIPELINE, common.SECRET)
    p.group("fleet", distributed.FLEET)
    p.group("lossy", common.LOSSY, about=_LOSSY)
    return p


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the job and return its exit code. Raise FlexError if an option, the input or the model is refused, before
    weights are read where possible."""
    from flexengine.job.resume import open_job

    if args.input is None:
        raise InvalidInput("no input is given; name a file of prompts, as in flexengine run prompts.jsonl")
    if (args.model is None and os.path.isfile(Path(args.input) / "config.json")) or args.input.endswith(".gguf"):
        right = command_text("run", ["INPUT", "--model", args.input])
        raise InvalidInput(f"{args.input} is a model, which is given by --model; write {right}")
    args.input = STDIN if args.input == "-" else args.input
    if args.output == "-" or (args.output and descriptor(args.output) == 1):
        args.output = None  # standard output, as if no name was given
    if args.input == STDIN and sys.stdin is not None and sys.stdin.isatty():
        say("reading rows from the terminal, one JSON object per line; end them with Ctrl-D")
    rank = distributed.rank_of(args)
    distributed.check_fleet(args)
    check_output(args.output, args.input)
    if args.json or args.dry_run:
        check_output(None)
    _check_files(args)
    if args.report and not args.dry_run:
        from flexengine.shell.report.recorder import check

        check(args.report)
    check_least(args, limit=1)
    params = sampling_of(args)
    args.policy = common.policy_of(args)
    args.lossy, args.allow = common.lossy_of(args, args.policy)
    if args.lossy:
        say(f"lossy: {args.lossy.described}")
    if args.dry_run:
        names = ("json", "trace", "report", "restart", "retry_errors")
        refuse_given(args, names, "has no effect with --dry-run; remove one of them")
    args.command = ["run", *args.words]
    if rank > 0:
        distributed.serve(args)
        return DONE
    if args.dry_run:
        return _dry_run(args, params)
    with openers.open_rows(args) as rows, open_job(rows, args.output, args.restart, args.retry_errors) as job:
        with interrupts.guarding(job.save, job.standing):
            summary = run_job(args, job, params, interrupts)
        failed = job.failed
    if args.json:
        print(json.dumps(summary), flush=True)
    return SOME_FAILED if failed else DONE


def run_job(
    args: argparse.Namespace, store: "JobStore", params: SamplingParams, interrupts: Interrupts
) -> dict[str, Any]:
    """Run the rows that remain, write the output file, and return the summary as JSON values, of which only `job` is
    returned if no row remained."""
    # Imported here, as it imports numpy, and --help must not.
    from flexengine.engine.file_job import EngineRunner, FileJob

    notes, report = messages.RowNotes(), None
    if args.report:
        from flexengine.shell.report.recorder import ReportRecorder

        report = ReportRecorder(args.report, ["flexengine", *args.command], store, say)

    def sweep_ended(progress: "Progress") -> None:
        interrupts.check()
        if report is not None:
            report.sweep(progress)

    with report or nullcontext():
        with ExitStack() as stack:
            if args.ray is None:
                group = stack.enter_context(distributed.pipeline(args))
                engine = stack.enter_context(openers.open_engine(args, sweep_ended, group))
                if report is not None:
                    report.attach(engine)
                job = FileJob(EngineRunner(engine, params), store)
            else:
                fleet = stack.enter_context(distributed.fleet_runner(args, params, interrupts.check))
                job = FileJob(fleet, store)
            job.begin()
            if args.ray is not None and fleet.about.verified:
                say(messages.verified_line(dict(fleet.about.verified)))
            for result in job.results():
                notes.take(result)
                if report is not None:
                    report.take(result)
        summary = job.end()  # with the engine's memory free, and before the page says how the job ended
    numbers: dict[str, Any] = summary if args.ray is not None else summary.to_json()
    say(messages.last_line(store, args.output, numbers if job.ran else {}))
    if args.ray is None:
        if verbosity() >= NORMAL and (hint := notes.hint(store.rows, engine.tokenizer)):
            say(hint)
        for line in messages.detail_lines(numbers) if job.ran else ():
            detail(line)
    return numbers if job.ran else {"job": numbers["job"]}


def _dry_run(args: argparse.Namespace, params: SamplingParams) -> int:
    """Print the plan. Write only the measured rates of the machine, to the cache."""
    from flexengine.engine.file_job import check_rows
    from flexengine.engine.survey import Refused
    from flexengine.guests.stages.planner import PipelinePlanner
    from flexengine.plan.candidates import Options
    from flexengine.plan.min_memory import left_out
    from flexengine.shell.explain.chain import StageLine, slowest_line, stage_help_lines, stage_lines
    from flexengine.shell.explain.text import report
    from flexengine.shell.explain.whatif import helps, ideas

    with (
        openers.open_rows(args) as rows,
        distributed.pipeline(args) as group,
        openers.open_engine(args, group=group) as engine,
    ):
        if not rows.scan().total:
            say(f"nothing to plan: {rows.path} has no rows")
            return DONE
        refused = Refused()
        engine.reader.check_chat(rows.chat)
        check_rows(rows, params)
        workload = engine.reader.survey(rows, params, refused)
        refused.report(workload, args.input)
        engine.choose_bits()
        planner = engine.planner
        planner.choose_lossy(workload)
        planner.check(workload)  # raises OutOfMemory before measuring if no row fits
        planner.rates.measure_quickly()
        plan, hardware = planner.plan(workload), planner.rates.known()
        assert plan.layout is not None
        if message := left_out(workload, plan.largest, plan.refusal):
            print(f"{message}\n")
        prediction = planner.cost(plan.workload).predict(plan.layout)
        case = (engine.facts, hardware, plan.workload, prediction)
        limits = Options(cohorts=planner.cohorts)
        better = ideas(*case, chosen=planner.policy is None, options=limits, thorough=args.verbose)
        stages = isinstance(planner, PipelinePlanner)
        print(report(engine.core.source.name, *case, better, args.verbose, alone=not stages))
        if isinstance(planner, PipelinePlanner):
            shared = planner.machine.capacity.shared
            layers, policy = engine.core.skeleton.layer_range, prediction.policy
            lines = [StageLine(layers, policy, prediction.total_seconds, prediction.bottleneck)]
            lines += [StageLine(p.layers, p.policy, p.seconds, p.bottleneck) for p in planner.others]
            end = slowest_line(lines, shared)
            print("\nstages (above: stage 0 alone)", *stage_lines(lines, shared), end, sep="\n")
            slowest = max(range(len(lines)), key=lambda rank: lines[rank].seconds)
            if slowest and (found := planner.remote_case(slowest, plan.workload)):  # stage 0 has its changes above
                cost, predicted = found
                changes = helps(cost.model, cost.hardware, cost.workload, predicted, limits)
                print("", *stage_help_lines(slowest, changes), sep="\n")
    return DONE


def _check_files(args: argparse.Namespace) -> None:
    """Raise InvalidInput if a file that is written is also read, or written a second time."""
    written = {"--output": args.output, "--trace": args.trace, "--report": args.report}
    if args.output:
        written |= files_beside(args.output, "--output")
    if args.report:
        written |= {"the unfinished part of --report": part_path(args.report)}
    check_not_overwritten({"INPUT": args.input} | common.files_read(args), written)
    check_model_kept(args.model, {"--trace": args.trace, "--report": args.report})


main = interruptible(lambda words, interrupts: run(parser().parse_args(words), interrupts))
