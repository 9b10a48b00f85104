"""python -m flexengine.run INPUT: finishes a file of prompts."""

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import __version__
from flexengine.config import Result, SamplingParams
from flexengine.errors import FlexError, InvalidInput
from flexengine.policy import Policy

if TYPE_CHECKING:
    from flexengine.engine import Engine, Progress

DONE, ROW_ERRORS, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
_DEFAULT = {f.name: f.default for f in fields(SamplingParams)}


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty name; leave the option out or name something")
    return text


def parser() -> argparse.ArgumentParser:
    """The command line; defaults come from SamplingParams."""
    p = argparse.ArgumentParser(prog="python -m flexengine.run", description="Finish a file of prompts.")
    p.add_argument("input", metavar="INPUT", help=".jsonl with prompt, messages or prompt_token_ids; or .txt")
    p.add_argument("--output", type=_named, metavar="OUT.jsonl",
                   help="results in input order; without it they go to stdout")  # fmt: skip
    p.add_argument("--model", type=_named, metavar="M",
                   help="directory, .gguf file or hub id (default: the demo model)")  # fmt: skip
    p.add_argument("--max-tokens", type=int, default=_DEFAULT["max_tokens"], metavar="N",
                   help="most tokens per prompt (default: %(default)s)")  # fmt: skip
    p.add_argument("--policy", type=_named, metavar="FILE.json",
                   help="block shape and placement (default: chosen to fit)")  # fmt: skip
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "sim"))
    p.add_argument("--device-mem", metavar="SIZE", help="device memory to use, e.g. 800M or 16GiB (cpu: RAM)")
    p.add_argument("--host-mem", metavar="SIZE", help="host memory to use beside a GPU")
    p.add_argument("--offload-dir", type=_named, metavar="DIR", help="where KV cache and activations spill to disk")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=_DEFAULT["temperature"], help="0 is greedy")
    p.add_argument("--seed", type=int, default=_DEFAULT["seed"])
    p.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    p.add_argument("--trace", type=_named, metavar="FILE.json", help="Chrome trace of all lanes, for Perfetto")
    p.add_argument("--json", action="store_true", help="the summary as JSON, last line of stdout")
    p.add_argument("--version", action="version", version=f"flexengine {__version__}")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0 done, 1 done with row errors, 2 refused, 3 failed on the way,
    130 interrupted."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except FlexError as error:
        print(f"flexengine: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("flexengine: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails again
        print("flexengine: whoever reads the results has gone", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"flexengine: {error}", file=sys.stderr)
        return FAILED
    except Exception:  # a fault of ours: not 1, which would say that the job is done
        traceback.print_exc()
        return FAILED


def run(args: argparse.Namespace) -> int:
    """The main job. Raises FlexError for what is refused, before weights are read where that can be known."""
    from flexengine.job.prompts import read_rows
    from flexengine.job.results import ResultWriter, check_output

    if args.limit is not None and args.limit < 1:
        raise InvalidInput(f"--limit is {args.limit}; it must be at least 1")
    params = SamplingParams(args.max_tokens, args.temperature, args.seed, args.ignore_eos)
    policy = Policy.load(args.policy) if args.policy else None
    check_output(args.output, args.input)
    _check_apart(args)
    rows = list(read_rows(args.input, args.limit))

    with _Bar() as bar:
        engine = _engine_class()(
            args.model, policy, args.device, args.device_mem, args.host_mem, args.offload_dir, args.dtype,
            trace=args.trace, on_sweep=bar.show,
        )  # fmt: skip
        with engine, ResultWriter(args.output) as writer:
            for result in engine.stream(rows, params):
                writer.write(rows[result.index], result)
                bar.note(result)
            summary = engine.summary
    print(summary_line(summary), file=sys.stderr)
    if args.json:
        print(json.dumps(summary), flush=True)
    return ROW_ERRORS if writer.failed else DONE


def _check_apart(args: argparse.Namespace) -> None:
    """Raises InvalidInput if a file to be written is read or written as something else, too."""
    used = {"INPUT": args.input, "--policy": args.policy, "--output": args.output, "--trace": args.trace}
    used["--output's unfinished part"] = f"{args.output}.part" if args.output else None
    paths = {what: Path(name).resolve() for what, name in used.items() if name}
    for what, other in combinations(paths, 2):
        written = {what, other} & {"--output", "--trace", "--output's unfinished part"}
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
    """Progress in tokens: rate, ETA, rows done and failed."""

    def __init__(self) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread of its own: threads begin with heaps of their own
        self._bar = tqdm(unit="tok", file=sys.stderr, dynamic_ncols=True, mininterval=0.5, smoothing=0.1)
        self._failed = 0

    def show(self, progress: "Progress") -> None:
        self._bar.total = progress.most
        self._bar.set_postfix_str(f"{progress.rows} rows done, {progress.failed} failed", refresh=False)
        self._bar.update(progress.tokens - self._bar.n)

    def note(self, result: Result) -> None:
        if result.error and self._failed < 5:
            self._failed += 1
            self._bar.write(f"row {result.index}: {result.error}"[:300], file=sys.stderr)

    def __enter__(self) -> "_Bar":
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
        f" {s['generated_tok_s']:.1f} tok/s; moved {moved}; peak {peak}; busy {busy}"
    )


if __name__ == "__main__":
    sys.exit(main())
