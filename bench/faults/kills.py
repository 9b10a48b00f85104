"""Jobs that are killed with SIGKILL at random moments and resumed: does the output equal that of an undisturbed job?

python -m bench.faults.kills MODEL --kills 100      (MODEL: a directory, best a tiny model without a tokenizer)

Every run is a fork of this process, which has imported everything and computed nothing (OpenMP does not survive a
fork), so that a kill costs a fraction of a second. After some kills the bench also tears the end of the journal, as a
kill alone rarely interrupts a write. Prints one JSON line; the exit code is 1 if any output differed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
MOST_KILLS_OF_A_JOB = 12
SAMPLED = ("--temperature", "1.3", "--seed", "5")


@dataclass(frozen=True)
class Case:
    """A kind of job: further command line arguments, and the policy's placement of weights, KV and activations."""

    name: str
    arguments: tuple[str, ...]
    away: bool = False

    def policy(self) -> Record:
        split = [0.4, 0.3, 0.3] if self.away else [1, 0, 0]
        return {"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": split, "cache": split, "activations": split}


CASES = (
    Case("greedy", ("--device", "cpu")),
    Case("sampled", (*SAMPLED, "--top-k", "40", "--device", "cpu")),
    Case("two samples", (*SAMPLED, "--n", "2", "--device", "cpu")),
    Case("offloaded", (*SAMPLED, "--device", "sim"), away=True),
    Case("logprobs", (*SAMPLED, "--logprobs", "3", "--device", "cpu")),
)


@dataclass(frozen=True)
class Plan:
    """A campaign: at least one job of `rows` rows, and further jobs until `kills` processes were killed."""

    kills: int
    rows: int
    seed: int
    cases: tuple[Case, ...] = CASES
    signal: int = signal.SIGKILL


@dataclass
class Tally:
    """Counts of a campaign.

    Attributes:
        torn: journals that ended within a record after a kill.
        forced: journals that the bench tore.
        run_again: rows with several records, in journals that the bench did not tear.
        left_over: files beside finished jobs other than input, output and journal.
        slowest_exit: most seconds from a signal to the end of its process.
    """

    kills: int = 0
    jobs: int = 0
    identical: int = 0
    torn: int = 0
    forced: int = 0
    run_again: int = 0
    left_over: int = 0
    slowest_exit: float = 0.0


def write_rows(path: Path, count: int, vocabulary: int, generator: random.Random) -> None:
    """Write prompts of token ids. A third are duplicates, some are OpenAI batch lines, some are bad; lengths and limits
    vary."""
    prompts = [[generator.randrange(3, vocabulary) for _ in range(generator.randrange(1, 24))] for _ in range(count)]
    with path.open("w") as file:
        for index in range(count):
            ids = prompts[generator.randrange(index) if index and generator.random() < 0.33 else index]
            row: Record = {"prompt_token_ids": ids, "max_tokens": generator.randrange(1, 24), "id": index}
            if index % 7 == 2:
                row = {"prompt_token_ids": [vocabulary + 1]}
            elif index % 5 == 1:
                body = {"prompt": ids, "max_tokens": 1 + index % 9}
                row = {"custom_id": f"c{index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")


class Folder:
    """The files of one job, and its runs."""

    def __init__(self, path: Path, case: Case, rows: Path, model: str) -> None:
        path.mkdir()
        self.path, self.rows = path, rows
        self.output, self.journal = path / "out.jsonl", path / "out.jsonl.journal"
        policy = path / "policy.json"
        policy.write_text(json.dumps(case.policy()))
        self.kept = {"out.jsonl", "out.jsonl.journal", "policy.json", "log"}
        self.arguments = [str(rows), "--model", model, "--output", str(self.output), "--policy", str(policy),
                          "--offload-dir", str(path / "offload"), "--ignore-eos", *case.arguments]  # fmt: skip

    def start(self) -> int:
        """Start a run in a process of its own, and return its id."""
        if child := os.fork():
            return child
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
            log = os.open(self.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            from flexengine.shell.commands import run

            code = run.main(self.arguments)
        except KeyboardInterrupt:  # the signal came before the handler was set
            code = 130
        except BaseException:
            code = 99
        os._exit(code)

    def records(self) -> tuple[list[Record], bool]:
        """Return the whole records of the journal, read without flexengine's code, and whether a torn record
        follows."""
        data = self.journal.read_bytes() if self.journal.exists() else b""
        whole, _, rest = data.rpartition(b"\n")
        return [json.loads(line[9:]) for line in whole.splitlines()], bool(rest)

    def size(self) -> int:
        """Return the bytes of the journal."""
        return self.journal.stat().st_size if self.journal.exists() else 0

    def tear(self, generator: random.Random) -> bool:
        """Remove bytes from the end of the journal, but not all of its last record, or append half a record."""
        data = self.journal.read_bytes() if self.journal.exists() else b""
        if data.count(b"\n") < 2 or not data.endswith(b"\n"):
            return False
        last = len(data) - data.rstrip(b"\n").rfind(b"\n") - 1
        if generator.random() < 0.5:
            os.truncate(self.journal, len(data) - generator.randrange(1, last))
        else:
            with self.journal.open("ab") as file:
                file.write(data[-last:][: generator.randrange(1, last)])
        return True

    def bytes(self) -> bytes:
        """The output, with the time of the job's start, which batch lines carry, taken out."""
        return re.sub(rb'"created": \d+', b'"created": 0', self.output.read_bytes())

    def left_over(self) -> int:
        """Return files that must not exist after the job has finished."""
        here = {p.name for p in self.path.iterdir()} - self.kept - {"offload"}
        return len(here) + len(list((self.path / "offload").glob("*")))


def finish(folder: Folder) -> float:
    """Run the job undisturbed, and return its seconds."""
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(folder.start(), 0)[1])
    if code not in (0, 1):
        raise RuntimeError(f"exit code {code}:\n{(folder.path / 'log').read_text()[-3000:]}")
    return time.monotonic() - began


def ended_within(child: int, seconds: float, number: int, tally: Tally) -> bool:
    """Return whether a process ended by itself in time. If not, send it the signal and wait for it."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(min(left, 0.01))
    os.kill(child, number)
    sent = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tally.slowest_exit = max(tally.slowest_exit, round(time.monotonic() - sent, 2))
    if code not in (0, 1, -number, 128 + number):
        raise RuntimeError(f"exit code {code} after signal {number}")
    return code in (0, 1)


def killed_job(folder: Folder, plan: Plan, seconds: float, tally: Tally, generator: random.Random) -> None:
    """Kill a job at random moments, then finish it. `seconds` is the time of an undisturbed run."""
    forced, torn_at = 0, -1
    for _ in range(min(plan.kills - tally.kills, MOST_KILLS_OF_A_JOB)):
        if ended_within(folder.start(), generator.uniform(0.0, 1.1 * seconds), plan.signal, tally):
            break
        tally.kills += 1
        tally.torn += folder.records()[1] and folder.size() != torn_at  # torn_at: torn here, and not repaired yet
        if generator.random() < 0.3 and folder.tear(generator):
            forced, torn_at = forced + 1, folder.size()
    finish(folder)
    tally.forced += forced
    if not forced:
        done = [r["index"] for r in folder.records()[0] if "index" in r]
        tally.run_again += len(done) - len(set(done))


def campaign(model: str, work: Path, plan: Plan) -> Tally:
    """Run jobs of all cases in turn until there were enough kills."""
    generator, tally = random.Random(plan.seed), Tally()
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    write_rows(work / "in.jsonl", plan.rows, vocabulary, generator)
    peace: dict[Case, tuple[bytes, float]] = {}
    while tally.kills < plan.kills:
        case = plan.cases[tally.jobs % len(plan.cases)]
        if case not in peace:
            if not peace:  # the very first run compiles kernels, so its time does not count
                finish(Folder(work / "first", case, work / "in.jsonl", model))
            whole = Folder(work / f"whole-{len(peace)}", case, work / "in.jsonl", model)
            seconds = finish(whole)
            peace[case] = whole.bytes(), seconds
        folder = Folder(work / f"job-{tally.jobs}", case, work / "in.jsonl", model)
        killed_job(folder, plan, peace[case][1], tally, generator)
        tally.jobs += 1
        same = folder.bytes() == peace[case][0]
        tally.identical += same
        tally.left_over += folder.left_over()
        if same:
            shutil.rmtree(folder.path)
        else:
            print(f"{folder.path}: differs from an undisturbed {case.name} job", file=sys.stderr)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.faults.kills", description="Kill jobs and compare their outputs.")
    p.add_argument("model")
    p.add_argument("--kills", type=int, default=100)
    p.add_argument("--rows", type=int, default=40, help="rows of the input (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--cases", nargs="+", choices=[c.name for c in CASES], default=[c.name for c in CASES], metavar="C")
    p.add_argument("--signal", choices=("SIGKILL", "SIGTERM", "SIGINT"), default="SIGKILL")
    p.add_argument("--work", help="directory for the jobs' files (default: a temporary one); kept if outputs differ")
    args = p.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny model is no faster with more threads
    import transformers.models.llama.modeling_llama  # noqa: F401 - here, so that no run has to import anything

    import flexengine.engine.engine
    import flexengine.job.resume  # noqa: F401

    began = time.monotonic()
    work = Path(args.work or tempfile.mkdtemp(prefix="flexengine-kills-"))
    cases = tuple(c for c in CASES if c.name in args.cases)
    tally = campaign(args.model, work, Plan(args.kills, args.rows, args.seed, cases, getattr(signal, args.signal)))
    same = tally.identical == tally.jobs
    if same:
        shutil.rmtree(work)
    seconds = round(time.monotonic() - began, 1)
    given = {"signal": args.signal, "seed": args.seed, "cases": [c.name for c in cases]}
    print(json.dumps({**asdict(tally), "byte_identical": same, **given, "seconds": seconds}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
