"""Fault injection: how often does a job survive, how many rows are lost, how many are computed twice?

python -m bench.faults MODEL [--quick] [--only KIND ...] [--out bench/results/faults.jsonl]

MODEL: a directory, best a tiny model without a tokenizer. Prints a line per kind of fault, and appends JSON lines to
--out. The exit code is 1 if rows were lost or repeated, or a fault was not survived. --quick tries a few faults of each
kind, in under a minute. Kinds that this machine does not permit (mounting) are skipped, with the reason.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.faults.campaign import KINDS, Campaign
from bench.faults.trials import Tally
from bench.harness import emit, machine, now, versions


@contextmanager
def _workplace(given: str | None) -> Iterator[Path]:
    work = Path(given or tempfile.mkdtemp(prefix="flexengine-faults-"))
    work.mkdir(exist_ok=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _import(engine: bool) -> None:
    """Import the modules that runs need, so that no fork imports them, or builds kernels, while its time is
    measured."""
    import numpy.ma  # noqa: F401

    import flexengine.engine.file_job
    import flexengine.job.resume
    import flexengine.job.same_job
    import flexengine.shell.commands.run

    if not engine:
        return
    import highspy  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.opt.modeling_opt  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import flexengine.engine.engine
    import flexengine.kernels
    import flexengine.model.gguf

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions once
    flexengine.kernels.load()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.faults", description="Try faults of every kind.")
    p.add_argument("model", type=Path)
    p.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    p.add_argument("--quick", action="store_true", help="a few of each kind")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--work", help="a directory to work in (default: a temporary one); emptied at the end")
    p.add_argument("--out", help="JSON lines are added to this file")
    args = p.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny model is no faster with more threads
    _import(engine=bool(set(args.only) - {"protocol", "crashes", "journal"}))
    bad = 0
    for name in args.only:
        with _workplace(args.work) as work:
            began = time.monotonic()
            for tally in _each(KINDS[name](Campaign(args.model.resolve(), work, args.quick, args.seed))):
                print(tally.line(), flush=True)
                for fault in tally.faults:
                    print(f"    {fault}", file=sys.stderr, flush=True)
                bad += tally.tried - tally.survived + tally.lost + tally.repeated
                seconds, began = time.monotonic() - began, time.monotonic()
                about = {"bench": "faults", "part": name, "quick": args.quick, "seed": args.seed, "time": now(),
                         "machine": machine(), "versions": versions()}  # fmt: skip
                emit({**about, **tally.record(), "seconds": seconds}, args.out)
    return 1 if bad else 0


def _each(tallies: Iterator[Tally]) -> Iterator[Tally]:
    """Yield tallies after they are filled. Each generator yields its tally before it fills it."""
    last: Tally | None = None
    for tally in tallies:
        if last is not None:
            yield last
        last = tally
    if last is not None:
        yield last


if __name__ == "__main__":
    sys.exit(main())
