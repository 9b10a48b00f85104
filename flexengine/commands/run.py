"""python -m flexengine.run INPUT: generate results for a file of prompts."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from flexengine import __version__
from flexengine.commands.exit_codes import DONE, INTERRUPTED, SOME_FAILED, exit_code, say
from flexengine.commands.open_engine import open_engine
from flexengine.commands.options import AUTO, add_lossy, add_machine, allowed, lossy_of, named
from flexengine.commands.run_job import run_job
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.lossy import BUNDLED
from flexengine.policy import Policy

if TYPE_CHECKING:
    from flexengine.job.inputs import Rows
    from flexengine.job.interrupt import Interrupts
    from flexengine.job.resume import Job

_DEFAULT = {f.name: f.default for f in fields(SamplingParams)}


def parser() -> argparse.ArgumentParser:
    """Return the argument parser. Defaults come from SamplingParams."""
    p = argparse.ArgumentParser(
        prog="python -m flexengine.run", description="Generate results for a file of prompts.",
        epilog="With --output the job can be stopped or killed at any time; the same command then continues it.",
    )  # fmt: skip
    p.add_argument("input", metavar="INPUT",
                   help=".jsonl with prompt, messages or prompt_token_ids, or OpenAI batch lines;"
                        " .txt, .csv, .tsv, .parquet or .arrow; - is JSON lines from standard input")  # fmt: skip
    p.add_argument("--prompt-column", type=named, metavar="NAME", help="column or field that holds the prompt")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    _add_output(p.add_argument_group("output"))
    _add_sampling(p.add_argument_group("sampling", "defaults for rows without fields of these names"))
    _add_machine(p.add_argument_group("model and machine"))
    add_lossy(p.add_argument_group("lossy", "switches that save time and memory; results then differ from those of the"
                                             " checkpoint's own numbers; python -m flexengine.quality shows by how"
                                             " much"))  # fmt: skip
    p.add_argument("--version", action="version", version=f"flexengine {__version__}")
    return p


def _add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--output", type=named, metavar="OUT.jsonl",
                       help="file for results in input order; finished rows are stored in OUT.jsonl.journal, from which"
                            " the same command continues; without --output, results go to stdout and an interrupted"
                            " job starts over")  # fmt: skip
    group.add_argument("--restart", action="store_true", help="delete the journal of earlier runs, and start over")
    group.add_argument("--retry-errors", action="store_true", help="run rows again that ended with an error")
    group.add_argument("--json", action="store_true", help="print the summary as JSON, as the last line of stdout")
    group.add_argument("--trace", type=named, metavar="FILE.json",
                       help="write a Chrome trace of all lanes, for Perfetto")  # fmt: skip
    group.add_argument("--report", type=named, metavar="FILE.html",
                       help="write a page about the job: placement, time line of a sweep, rates, errors; renewed while"
                            " the job runs (needs matplotlib)")  # fmt: skip


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    def add(name: str, kind: type, text: str, metavar: str = "X") -> None:
        default = _DEFAULT[name.replace("-", "_")]
        text += " (default: %(default)s)"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)

    add("max-tokens", int, "most tokens per prompt", "N")
    add("temperature", float, "0 is greedy")
    add("seed", int, "seed of all sampling noise", "N")
    add("top-k", int, "sample from the K likeliest tokens; 0: from all", "K")
    add("top-p", float, "sample from the fewest likeliest tokens whose probability reaches X")
    add("min-p", float, "drop tokens less likely than X times the likeliest")
    add("repetition-penalty", float, "divide the logits of tokens in prompt and text by X")
    add("presence-penalty", float, "subtract X from the logits of tokens in the text")
    add("frequency-penalty", float, "subtract X once for every time a token is in the text")
    add("n", int, "samples per prompt", "N")
    add("logprobs", int, "log probability of each token, and of the K likeliest", "K")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="text that ends a row, taken literally; may be repeated")  # fmt: skip
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", dest="stop_token_ids",
                       help="token that ends a row; may be repeated")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", type=named, metavar="M",
                       help="directory, .gguf file or hub id (default: the demo model)")  # fmt: skip
    group.add_argument("--verify", action="store_true",
                       help="first compare all files of the model with their checksums (in SHA256SUMS beside them, or"
                            " in the hub cache's file names), and prepared weights with their own")  # fmt: skip
    group.add_argument("--policy", type=named, metavar="FILE.json", default=AUTO,
                       help="block shape and placement; default: auto, the policy with the shortest predicted"
                            " time")  # fmt: skip
    group.add_argument("--dry-run", action="store_true",
                       help="print the plan and its predictions, without loading weights; python -m flexengine.plan"
                            " also plans for other machines")  # fmt: skip
    add_machine(group)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0 done, 1 done with row errors, 2 refused, 3 failed while running,
    130 or 143 interrupted by SIGINT or SIGTERM."""
    from flexengine.job.interrupt import Interrupted, Interrupts

    args = parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    with Interrupts() as interrupts:

        def finish() -> int:
            try:
                return run(args, interrupts)
            except KeyboardInterrupt as stop:
                say(interrupts.standing())
                return stop.code if isinstance(stop, Interrupted) else INTERRUPTED

        return exit_code(finish)


def run(args: argparse.Namespace, interrupts: "Interrupts") -> int:
    """Run the job and return its exit code. Raise FlexError if an option, the input or the model is refused, before
    weights are read where possible."""
    from flexengine.job.inputs import STDIN, Rows
    from flexengine.job.results import check_output

    args.input = STDIN if args.input == "-" else args.input
    check_output(args.output, args.input)
    _check_apart(args)
    if args.report and not args.dry_run:
        from flexengine.report.recorder import check

        check(args.report)
    if args.limit is not None and args.limit < 1:
        raise InvalidInput(f"--limit is {args.limit}; it must be at least 1")
    params = SamplingParams(**{name: getattr(args, name) for name in _DEFAULT})
    args.policy = Policy.load(args.policy) if args.policy != AUTO else None
    args.lossy = lossy_of(args)
    args.allow = allowed(args, args.lossy, args.policy)
    if args.lossy:
        say(f"lossy: {args.lossy}; python -m flexengine.quality shows what that costs")
    if args.dry_run:
        for option in ("json", "trace", "report", "restart", "retry_errors"):
            if getattr(args, option):
                raise InvalidInput(f"--{option.replace('_', '-')} has no effect with --dry-run; remove one of them")
        return _dry_run(args, params)
    with Rows(args.input, args.prompt_column, args.limit) as rows, _open_job(args, rows) as job:
        with interrupts.guarding(job.save, job.standing):
            summary = run_job(args, job, params, interrupts)
        failed = job.failed
    if args.json:
        print(json.dumps(summary), flush=True)
    return SOME_FAILED if failed else DONE


def _dry_run(args: argparse.Namespace, params: SamplingParams) -> int:
    """Print the plan. Write only the measured rates of the machine, to the cache."""
    from flexengine.engine.survey import Refused
    from flexengine.job.inputs import Rows
    from flexengine.plan.explain import report
    from flexengine.plan.fitting import left_out
    from flexengine.plan.whatif import helps, instead

    with Rows(args.input, args.prompt_column, args.limit) as rows, open_engine(args) as engine:
        refused = Refused()
        workload = engine.reader.survey(rows, params, refused)
        refused.report(workload, args.input, say)
        planner = engine.planner
        planner.choose_lossy(workload)
        planner.check(workload)  # raises OutOfMemory before measuring if no row fits
        hardware = planner.hardware()
        plan = planner.plan(workload)
        assert plan.layout is not None
        if message := left_out(workload, plan.largest, plan.refusal):
            print(f"{message}\n")
        prediction = planner.cost(plan.workload).predict(plan.layout)
        ideas = (helps if planner.policy is None else instead)(engine.facts, hardware, plan.workload, prediction)
        print(report(engine.core.source.name, engine.facts, hardware, plan.workload, prediction, ideas))
    return DONE


def _open_job(args: argparse.Namespace, rows: "Rows") -> "Job":
    from flexengine.job.inputs import survey
    from flexengine.job.results import journal_path
    from flexengine.job.resume import JournalJob, PrintedJob

    total = survey(rows)
    if journal_path(args.output) is not None:
        return JournalJob(rows, total, args.output, args.restart, args.retry_errors)
    for option in ("restart", "retry_errors"):
        if getattr(args, option):
            raise InvalidInput(f"--{option.replace('_', '-')} needs --output with the name of a plain file, which has a"
                               " journal; add it")  # fmt: skip
    return PrintedJob(rows, total, args.output)


def _check_apart(args: argparse.Namespace) -> None:
    """Raise InvalidInput if a file that is written is also read, or written a second time."""
    from flexengine.job.results import journal_path, part_path

    policy = None if args.policy == AUTO else args.policy
    text = None if args.calibrate == BUNDLED else args.calibrate
    used = {"INPUT": args.input, "--policy": policy, "--calibrate": text, "--output": args.output,
            "--trace": args.trace, "--report": args.report}  # fmt: skip
    if (journal := journal_path(args.output)) is not None:
        used |= {"--output's unfinished part": part_path(args.output), "--output's journal": journal}
    if args.report:
        used |= {"--report's unfinished part": part_path(args.report)}
    paths = {what: Path(name).resolve() for what, name in used.items() if name}
    for what, other in combinations(paths, 2):
        written = {what, other} - {"INPUT", "--policy", "--calibrate"}
        if written and paths[what] == paths[other] and (paths[what].is_file() or not paths[what].exists()):
            raise InvalidInput(f"{what} and {other} are one file, {used[what]}; give each a file of its own")
