"""python -m flexengine.run INPUT: finishes a file of prompts."""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import __version__
from flexengine.command import DONE, INTERRUPTED, SOME_FAILED, ended, say
from flexengine.config import Result, SamplingParams
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.lossy import BUNDLED, Lossy
from flexengine.options import AUTO, add_lossy, add_machine, allowed, lossy_of, named
from flexengine.policy import Policy

if TYPE_CHECKING:
    from flexengine.engine import Engine
    from flexengine.generation import Progress
    from flexengine.job.inputs import Rows
    from flexengine.job.interrupt import Interrupts
    from flexengine.job.resume import Job

_DEFAULT = {f.name: f.default for f in fields(SamplingParams)}
_TOLD = 5  # errors of rows that are shown while a job runs


def parser() -> argparse.ArgumentParser:
    """The command line; defaults come from SamplingParams."""
    p = argparse.ArgumentParser(
        prog="python -m flexengine.run", description="Finish a file of prompts.",
        epilog="With --output the job can be stopped at any time, even killed: the same command goes on where it was.",
    )  # fmt: skip
    p.add_argument("input", metavar="INPUT",
                   help=".jsonl with prompt, messages or prompt_token_ids, or OpenAI batch lines;"
                        " .txt, .csv, .tsv, .parquet or .arrow; - is JSON lines from standard input")  # fmt: skip
    p.add_argument("--prompt-column", type=named, metavar="NAME", help="column or field that holds the prompt")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    _add_output(p.add_argument_group("output"))
    _add_sampling(p.add_argument_group("sampling", "what a row does not say itself"))
    _add_machine(p.add_argument_group("model and machine"))
    add_lossy(p.add_argument_group("lossy", "what may differ from the checkpoint's own numbers, for speed and room;"
                                             " python -m flexengine.quality shows what it costs"))  # fmt: skip
    p.add_argument("--version", action="version", version=f"flexengine {__version__}")
    return p


def _add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--output", type=named, metavar="OUT.jsonl",
                       help="results in input order, and OUT.jsonl.journal to go on from;"
                            " without it results go to stdout and an interrupted job starts anew")  # fmt: skip
    group.add_argument("--restart", action="store_true", help="drop what an earlier run of this output left")
    group.add_argument("--retry-errors", action="store_true", help="run rows again that ended with an error")
    group.add_argument("--json", action="store_true", help="the summary as JSON, last line of stdout")
    group.add_argument("--trace", type=named, metavar="FILE.json", help="Chrome trace of all lanes, for Perfetto")


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    def add(name: str, kind: type, text: str, metavar: str = "X") -> None:
        default = _DEFAULT[name.replace("-", "_")]
        text += " (default: %(default)s)"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)

    add("max-tokens", int, "most tokens per prompt", "N")
    add("temperature", float, "0 is greedy")
    add("seed", int, "of all sampling noise", "N")
    add("top-k", int, "sample from the K likeliest tokens; 0: from all", "K")
    add("top-p", float, "sample from the likeliest tokens that hold this share")
    add("min-p", float, "drop tokens less likely than this share of the likeliest")
    add("repetition-penalty", float, "divides the logits of tokens in prompt and text")
    add("presence-penalty", float, "taken from the logits of tokens in the text")
    add("frequency-penalty", float, "the same, times how often they are in the text")
    add("n", int, "samples per prompt", "N")
    add("logprobs", int, "log probability of each token, and of the K likeliest", "K")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="text that ends a row, taken literally; may be repeated")  # fmt: skip
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", dest="stop_token_ids",
                       help="token that ends a row; may be repeated")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", type=named, metavar="M",
                       help="directory, .gguf file or hub id (default: the demo model)")  # fmt: skip
    group.add_argument("--verify", action="store_true",
                       help="first compare all files of the model with their checksums (SHA256SUMS beside them, or the"
                            " hub cache's names), and prepared weights with theirs")  # fmt: skip
    group.add_argument("--policy", type=named, metavar="FILE.json", default=AUTO,
                       help="block shape and placement; default: auto, predicted to be quickest")  # fmt: skip
    group.add_argument("--dry-run", action="store_true",
                       help="print the plan and what it predicts, without loading weights; python -m flexengine.plan"
                            " does so for other machines too")  # fmt: skip
    add_machine(group)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0 done, 1 done with row errors, 2 refused, 3 failed on the way,
    130 or 143 interrupted by SIGINT or SIGTERM."""
    from flexengine.job.interrupt import Interrupted, Interrupts

    args = parser().parse_args(argv)
    with Interrupts() as interrupts:

        def finish() -> int:
            try:
                return run(args, interrupts)
            except KeyboardInterrupt as stop:
                say(interrupts.standing())
                return stop.code if isinstance(stop, Interrupted) else INTERRUPTED

        return ended(finish)


def run(args: argparse.Namespace, interrupts: "Interrupts") -> int:
    """The main job. Raises FlexError for what is refused, before weights are read where that can be known."""
    from flexengine.job.inputs import STDIN, Rows
    from flexengine.job.results import check_output

    args.input = STDIN if args.input == "-" else args.input
    check_output(args.output, args.input)
    _check_apart(args)
    if args.limit is not None and args.limit < 1:
        raise InvalidInput(f"--limit is {args.limit}; it must be at least 1")
    params = SamplingParams(**{name: getattr(args, name) for name in _DEFAULT})
    args.policy = Policy.load(args.policy) if args.policy != AUTO else None
    args.lossy = lossy_of(args)
    args.allow = allowed(args, args.lossy, args.policy)
    if args.lossy:
        say(f"lossy: {args.lossy}; python -m flexengine.quality shows what that costs")
    if args.dry_run:
        for option in ("json", "trace", "restart", "retry_errors"):
            if getattr(args, option):
                raise InvalidInput(f"--{option.replace('_', '-')} is about running; leave it or --dry-run out")
        return _dry_run(args, params)
    with Rows(args.input, args.prompt_column, args.limit) as rows, _open_job(args, rows) as job:
        with interrupts.guarding(job.save, job.standing):
            summary = _finish(args, job, params, interrupts)
        failed = job.failed
    if args.json:
        print(json.dumps(summary), flush=True)
    return SOME_FAILED if failed else DONE


def _dry_run(args: argparse.Namespace, params: SamplingParams) -> int:
    """Prints the plan; nothing is written but what is measured of the machine."""
    from flexengine.job.inputs import Rows
    from flexengine.plan.explain import report
    from flexengine.plan.fitting import aside
    from flexengine.plan.whatif import helps, instead
    from flexengine.survey import Refused

    with Rows(args.input, args.prompt_column, args.limit) as rows, _engine(args, lambda _: None) as engine:
        refused = Refused()
        workload = engine.reader.survey(rows, params, refused)
        refused.report(workload, args.input, say)
        engine.settle(workload)
        engine.check(workload)  # what cannot be held is refused before anything is measured
        hardware = engine.planner.hardware()
        layout, largest, why = engine.fitting(workload)
        fitting = workload.up_to(largest)
        if left := aside(workload, largest, why):
            print(f"{left}\n")
        prediction = engine.planner.cost(fitting).predict(layout)
        ideas = (helps if engine.policy is None else instead)(engine.facts, hardware, fitting, prediction)
        print(report(engine.source.name, engine.facts, hardware, fitting, prediction, ideas))
    return DONE


def _open_job(args: argparse.Namespace, rows: "Rows") -> "Job":
    from flexengine.job.inputs import survey
    from flexengine.job.results import journal_path
    from flexengine.job.resume import KeptJob, PrintedJob

    total = survey(rows)
    if journal_path(args.output) is not None:
        return KeptJob(rows, total, args.output, args.restart, args.retry_errors)
    for option in ("restart", "retry_errors"):
        if getattr(args, option):
            raise InvalidInput(f"--{option.replace('_', '-')} needs --output with the name of a plain file")
    return PrintedJob(rows, total, args.output)


def _finish(args: argparse.Namespace, job: "Job", params: SamplingParams, interrupts: "Interrupts") -> dict[str, Any]:
    """Runs what is to be run and puts the output in place. Returns the summary."""
    _say_note(job)
    bar = _Bar(job)

    def sweep_ended(progress: "Progress") -> None:
        interrupts.check()
        if engine.layout is not None:
            fitted = {"importances": found.digest} if (found := engine.importances) is not None else {}
            chosen = {"lossy": engine.lossy.given, "cache": engine.cache_form}
            job.keep({"prefill_tokens": engine.layout.policy.prefill_tokens} | chosen | fitted)
        job.save(at_once=False)
        bar.show(progress)

    with _engine(args, sweep_ended) as engine:
        rows = job.begin(lambda known: _manifest(args, job, params, engine, known), engine.source.name)
        _say_note(job)
        if job.resumed:
            say(f"{job.resumed} of {job.total} rows were done before")
        # Where a prompt is cut decides the last bits of its KV; fewer rows, or more memory, must not cut it elsewhere.
        _keep_to(engine, job.settings.get("prefill_tokens"))
        if args.allow and (chosen := job.settings.get("lossy")) is not None:
            engine.use(Lossy(**chosen))
            _check_cache(engine, job.settings.get("cache", ""))
        if rows:
            _check_importances(engine, job.settings.get("importances"))
            with bar:
                for result in engine.stream(rows, params):
                    job.take(result)
                    bar.note(result)
        summary = dict(engine.summary)
    if not job.finished:
        job.end()
    print(_last_line(args, job, summary), file=sys.stderr)
    counts = {"rows": job.total, "done": job.done, "failed": job.failed, "done_before": job.resumed}
    return {**summary, "job": counts}


def _say_note(job: "Job") -> None:
    if job.note:
        say(job.note)
    job.note = ""


def _keep_to(engine: "Engine", began: int | None) -> None:
    """Has prompts cut where the job began to cut them: the last bits of its results depend on it."""
    engine.fixed_prefill, policy = began, engine.policy
    if policy and began and policy.prefill_tokens != began:
        say(f"prefill_tokens stays {began}, with which the job began")
        engine.policy = replace(policy, prefill_tokens=began)


def _check_cache(engine: "Engine", began: str) -> None:
    """Raises InvalidInput if the form that the planner chose for the cache is another now. A form that was given is in
    the manifest."""
    if began and began != engine.cache_form:
        raise InvalidInput(f"this job chose a cache of {began}, which is {engine.cache_form} now; --restart to run it"
                           " again")  # fmt: skip


def _check_importances(engine: "Engine", began: str | None) -> None:
    """Raises InvalidInput if a lost calibration, made again, came out otherwise than that which a job began with."""
    if began is not None and (found := engine.importances) is not None and found.digest != began:
        raise InvalidInput(f"this job began with weights calibrated to {began}, but that is gone from the cache, and"
                           f" calibrating again, with other memory or libraries, gave {found.digest};"
                           " --restart to run it again")  # fmt: skip


def _engine(args: argparse.Namespace, on_sweep: Callable[["Progress"], None]) -> "Engine":
    engine = _engine_class()(
        args.model, args.policy, args.device, args.device_mem, args.host_mem, args.offload_dir, args.dtype,
        trace=args.trace, on_sweep=on_sweep, trust_remote_code=args.trust_remote_code,
        lossy=args.lossy, allow=args.allow, verify=args.verify,
    )  # fmt: skip
    engine.planner.say = say
    if engine.machine.no_offload:
        say(f"nothing is offloaded to disk: {engine.machine.no_offload}")
    if engine.verifier:
        say(f"verified {_verified(vars(engine.verifier))}")
    return engine


def _manifest(
    args: argparse.Namespace, job: "Job", params: SamplingParams, engine: "Engine", known: dict[str, Any]
) -> dict[str, Any]:
    """The job's manifest. known: that of the run that began the job; empty if there was none."""
    from flexengine.job.manifest import INPUT_DIGEST, MODEL_FILES, make_manifest

    if not known and not args.allow:
        _check_memory(engine, job.rows, params)
    given = {"input": Path(args.input).name, INPUT_DIGEST: job.rows.sha256(), "prompt_column": args.prompt_column,
             "output_format": "jsonl"}  # fmt: skip
    made = {"version": __version__, "model": engine.source.name, **engine.numerics,
            MODEL_FILES: engine.model_files(known.get(MODEL_FILES, {}))}  # fmt: skip
    return make_manifest(params, given, made, {"allow": sorted(args.allow)} if args.allow else engine.switches)


def _check_memory(engine: "Engine", rows: "Rows", params: SamplingParams) -> None:
    """Raises OutOfMemory if not even a row of one token and one to generate fits, before all files of the model are
    hashed for the manifest."""
    from flexengine.plan.least import SHORTEST

    try:
        engine.check(SHORTEST)
    except OutOfMemory:
        if (workload := engine.reader.survey(rows, params)).count:
            engine.check(workload)  # its message says what these rows need


def _last_line(args: argparse.Namespace, job: "Job", summary: dict[str, Any]) -> str:
    if summary:
        return summary_line(summary)
    if not job.done and not job.failed:
        return "0 rows done; the input has no rows"
    if not job.finished:
        return f"{job.done} rows done, {job.failed} failed; all of them were in the journal"
    failed = f"{job.failed} with errors" + ("; --retry-errors to run those again" if job.failed else "")
    return f"finished already: {job.total} rows in {args.output} ({failed}); --restart to run it again"


def _check_apart(args: argparse.Namespace) -> None:
    """Raises InvalidInput if a file to be written is read or written as something else, too."""
    from flexengine.job.results import journal_path, part_path

    given = None if args.policy == AUTO else args.policy
    text = None if args.calibrate == BUNDLED else args.calibrate
    used = {"INPUT": args.input, "--policy": given, "--calibrate": text, "--output": args.output, "--trace": args.trace}
    if (journal := journal_path(args.output)) is not None:
        used |= {"--output's unfinished part": part_path(args.output), "--output's journal": journal}
    paths = {what: Path(name).resolve() for what, name in used.items() if name}
    for what, other in combinations(paths, 2):
        written = {what, other} - {"INPUT", "--policy", "--calibrate"}
        if written and paths[what] == paths[other] and (paths[what].is_file() or not paths[what].exists()):
            raise InvalidInput(f"{what} and {other} are one file, {used[what]}; give each a file of its own")


def _engine_class() -> "type[Engine]":
    """Engine, imported without garbage collection: what torch and transformers define is never garbage, and walking
    it over and over takes a quarter of the time of the import."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        from flexengine.engine import Engine
    finally:
        if collecting:
            gc.enable()
    gc.freeze()
    return Engine


class _Bar:
    """Progress in tokens: rate, ETA, rows done and failed, with those of earlier runs of the job."""

    def __init__(self, job: "Job") -> None:
        self._job, self._failed = job, 0

    def show(self, progress: "Progress") -> None:
        self._bar.total = progress.most
        done, failed = self._done_before + progress.rows, self._failed_before + progress.failed
        self._bar.set_postfix_str(f"{done} of {self._job.total} rows done, {failed} failed", refresh=False)
        self._bar.update(progress.tokens - self._bar.n)

    def note(self, result: Result) -> None:
        if not result.error:
            return
        self._failed += 1
        if self._failed <= _TOLD:
            self._bar.write(f"row {result.index}: {result.error}"[:300], file=sys.stderr)
        elif self._failed == _TOLD + 1:
            self._bar.write("more rows failed; their errors are in the output", file=sys.stderr)

    def __enter__(self) -> "_Bar":
        from flexengine.bar import Bar

        self._done_before, self._failed_before = self._job.done, self._job.resumed - self._job.done
        self._bar = Bar(unit="tok", smoothing=0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def summary_line(s: dict[str, Any]) -> str:
    """The summary for people, one line."""
    moved = ", ".join(f"{link} {n / 1e9:.2f} GB" for link, n in s["bytes"].items() if n) or "nothing"
    peak = ", ".join(f"{tier} {n / 1e9:.2f} GB" for tier, n in s["peak_bytes"].items() if n)
    busy = ", ".join(f"{lane} {share:.0%}" for lane, share in s["busy"].items())
    return (
        f"{s['rows']} rows done, {s['failed']} failed; {s['prompt_tokens']} prompt and"
        f" {s['generated_tokens']} generated tokens;"
        f" prefill {s['prefill_seconds']:.2f} s, decode {s['decode_seconds']:.2f} s:"
        f" {s['generated_tok_s']:.1f} tok/s; moved {moved}; peak {peak}; busy {busy}{_foreseen(s.get('plan'))}"
        + (f"; verified {_verified(found)}" if (found := s.get("verified")) else "")
    )


def _foreseen(plan: dict[str, Any] | None) -> str:
    """How well the sweeps' time was predicted, where the rates were this machine's own."""
    if not plan or not plan["measured"]:
        return ""
    off = [f"{lane} {x['predicted'] / x['measured'] - 1:+.0%}" for lane, x in plan["lanes"].items() if x["measured"]]
    return f"; predicted {plan['predicted_seconds']:.1f} s for these sweeps ({plan['error']:+.0%}; {', '.join(off)})"


def _verified(found: dict[str, Any]) -> str:
    return f"{found['files']} files, {found['bytes'] / 1e9:.2f} GB, in {found['seconds']:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
