"""Fleets on a Ray of this machine, whose processes are killed with SIGKILL while a job runs.

python -m bench.fleet [--cases actors command stages] [--rows 600] [--out fleet.jsonl]

actors: three actors, of which two are killed, one after the other. command: the command itself is killed three times,
and run again. stages: two groups of two stages, of which the first stage, the second stage and the owner of a group are
killed. Each case has a record; its output must be that of one process, byte by byte, and each row must stand in it
once. Needs flexengine[ray]. Exit code: 1 if an output differs or fewer processes were killed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.harness import Record
from bench.pipeline.models import VOCABULARY, make_model

CPUS = 4  # as Ray counts them: processes of this many actors and stages fit
WAIT_SECONDS = 300.0  # for a process to kill, or for the end of a command
OWNER, FIRST, SECOND = "MapWorker", "_Stage.run", "_Stage.serve"  # in the titles that Ray gives its processes


@dataclass(frozen=True)
class Case:
    """A job that is killed.

    Attributes:
        options: of the fleet.
        victims: parts of the titles of the processes to kill, in order; "" is the command.
    """

    name: str
    options: tuple[str, ...]
    victims: tuple[str, ...]


CASES = (
    Case("actors", ("--actors", "3"), (OWNER, OWNER)),
    Case("command", ("--actors", "3"), ("", "", "")),
    Case("stages", ("--actors", "2", "--stages", "2"), (SECOND, FIRST, OWNER)),
)


@contextmanager
def local_ray() -> Iterator[str]:
    """Start a Ray on this machine. Yield its address."""
    from flexengine.apps.fleet import guard

    guard.prepare(guard.LOCAL)
    import ray

    # Paths of sockets have at most 107 bytes, so the directory has a short name.
    with tempfile.TemporaryDirectory(prefix="fe", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HOME": folder, "OMP_NUM_THREADS": "1"}
        context = ray.init("local", num_cpus=CPUS, include_dashboard=False, object_store_memory=100 << 20,
                           _temp_dir=folder, log_to_driver=False)  # fmt: skip
        try:
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()


def write_job(folder: Path, rows: int) -> list[str]:
    """Write a model and an input. Return the words of a command without its output."""
    make_model(folder / "model", 6, 64)
    rng = random.Random(2)
    lines = [{"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))],
              **({"n": 2} if i % 9 == 0 else {})} for i in range(rows)]  # fmt: skip
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["run", "in.jsonl", "-m", "model", "--max-tokens", "40", "--ignore-eos", "--device-mem", "300M",
            "--temperature", "0.7", "--seed", "3"]  # fmt: skip


def start(words: list[str], folder: Path, output: str) -> "subprocess.Popen[str]":
    """Start a command."""
    return subprocess.Popen([sys.executable, "-m", "flexengine", *words, "-o", output], cwd=folder, text=True,
                            stderr=subprocess.PIPE,
                            env=os.environ | {"PYTHONPATH": f"{harness.REPO}:{os.environ.get('PYTHONPATH', '')}"},
                            )  # fmt: skip


def finished(command: "subprocess.Popen[str]") -> None:
    """Wait for the end of a command. Exit with its messages if it failed."""
    _, said = command.communicate(timeout=WAIT_SECONDS)
    if command.returncode:
        raise SystemExit(f"the command ended with code {command.returncode}:\n{said[-3000:]}")


def titled(part: str) -> list[int]:
    """Return the processes of Ray whose title has a part."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::") and part in title:
            found.append(int(path.parent.name))
    return sorted(found)


def rows_done(journal: Path) -> int:
    """Return the rows in a journal."""
    return journal.read_bytes().count(b'"index"') if journal.exists() else 0


def killed(victim: str, command: "subprocess.Popen[str]", journal: Path, rng: random.Random) -> bool:
    """Kill a process after the next rows have been stored. Return False if the job ended before."""
    before, deadline = rows_done(journal), time.monotonic() + WAIT_SECONDS
    while rows_done(journal) <= before and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    while command.poll() is None and time.monotonic() < deadline:
        if processes := [command.pid] if not victim else titled(victim):
            os.kill(rng.choice(processes), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


def measure(case: Case, rows: int, folder: Path, address: str) -> tuple[Record, bool]:
    """Return the record of a case, and whether the output is that of one process although all victims were killed.

    Args:
        address: of a Ray.
    """
    words, rng = write_job(folder, rows), random.Random(3)
    finished(start(words, folder, "one.jsonl"))
    output, kills, runs, began = folder / "out.jsonl", 0, 1, time.monotonic()
    given = [*words, "--ray", address, "--shard-rows", str(max(1, rows // 60)), *case.options]
    command = start(given, folder, output.name)
    for victim in case.victims:
        if not killed(victim, command, output.with_name("out.jsonl.journal"), rng):
            break
        kills += 1
        print(f"  killed {victim or 'the command'}", file=sys.stderr)
        if not victim:
            command.wait()
            command, runs = start(given, folder, output.name), runs + 1
    finished(command)
    same = output.read_bytes() == (folder / "one.jsonl").read_bytes()
    indices = [json.loads(line)["index"] for line in output.read_text().splitlines()]
    once = indices == list(range(rows))
    fields = {"name": case.name, "options": list(case.options), "rows": rows}
    record = harness.header("fleet", fields, [{"versions": harness.versions()}])
    record |= {"kills": kills, "runs": runs, "same": same, "once": once, "seconds": time.monotonic() - began}
    return record, same and once and kills == len(case.victims)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--out", metavar="FILE", default="fleet.jsonl", help="also append to bench/results/FILE")
    args = parser.parse_args()
    right = True
    with local_ray() as address:
        for case in CASES:
            if case.name in args.cases:
                with tempfile.TemporaryDirectory() as folder:
                    record, equal = measure(case, args.rows, Path(folder), address)
                right = right and equal
                harness.emit(record, args.out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
