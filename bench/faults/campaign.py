"""The kinds of faults of bench.faults. Each is a generator of tallies."""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compare import gguf_files
from bench.faults import bits, budgets, damage, kills
from bench.faults.failing import CRASHES, PROTOCOL, Fault
from bench.faults.trials import Tally, Trials, own_cache, real_command, rows_of, stub_command

_SPLIT = [0.4, 0.3, 0.3]
AWAY = json.dumps(dict(gpu_batch_size=2, num_gpu_batches=2, weights=_SPLIT, cache=_SPLIT, activations=_SPLIT))
ERRORS = ("EIO", "ENOSPC", "EINTR", "short", "slow")
FULL = ("write", "allocate", "create", "mkdir", "fsync")


@dataclass(frozen=True)
class Campaign:
    """Settings of a campaign.

    Attributes:
        model: directory of the model.
        work: an empty directory.
        quick: try only a few faults of each kind.
    """

    model: Path
    work: Path
    quick: bool
    seed: int

    def several(self, quick: int, full: int) -> int:
        return quick if self.quick else full


Kind = Callable[[Campaign], Iterator[Tally]]


def _stub(c: Campaign, rows: int) -> Trials:
    return Trials(c.work / "stub", rows_of(rows), ["--model", "stub"], stub_command)


def protocol_errors(c: Campaign) -> Iterator[Tally]:
    """Let every call on journal, output and input fail, once and from then on. A stub replaces the engine."""
    job = _stub(c, c.several(3, 12))
    yield (tally := Tally("protocol: failed writes"))
    job.every(PROTOCOL, ("EIO", "short") if c.quick else ERRORS, tally,
              lasting=(False,) if c.quick else (False, True))  # fmt: skip
    yield (tally := Tally("protocol: failed reads"))
    job.every(("read", "open"), ("EIO",) if c.quick else ("EIO", "EINTR", "short"), tally)
    yield (tally := Tally("protocol: disk full from n-th write"))
    job.every(FULL, ("ENOSPC",), tally, lasting=(True,))


def protocol_crashes(c: Campaign) -> Iterator[Tally]:
    """SIGKILL before, within and after every call that changes a file."""
    job = _stub(c, c.several(5, 12))
    yield (tally := Tally("protocol: SIGKILL at every point"))
    job.every(PROTOCOL, CRASHES[:2] if c.quick else CRASHES, tally)


def damaged_journals(c: Campaign) -> Iterator[Tally]:
    """Cut a finished job's journal at every byte, and flip bits in it, with the output deleted."""
    job, generator = _stub(c, c.several(8, 12)), random.Random(c.seed)
    job.fresh()
    job.run(Fault())
    whole = job.journal.read_bytes()
    yield (tally := Tally("journal cut at every byte"))
    step = len(whole) // 25 if c.quick else 1
    for length in range(0, len(whole), step):
        job.journal.touch(mode=0o600)
        job.output.unlink(missing_ok=True)
        job.journal.write_bytes(whole[:length])
        _finished(job, f"cut at {length}", tally)
    yield (tally := Tally("journal with a flipped bit"))
    for _ in range(c.several(25, 1000)):
        place = generator.randrange(8 * len(whole))
        hurt = bytearray(whole)
        hurt[place // 8] ^= 1 << place % 8
        job.output.unlink(missing_ok=True)
        job.journal.touch(mode=0o600)
        job.journal.write_bytes(hurt)
        _finished(job, f"bit {place}", tally)


def _finished(job: Trials, what: str, tally: Tally) -> None:
    ended = job.run(Fault())
    wrong = [] if ended.code == job.code else [f"exit code {ended.code}: {ended.said[-300:]}"]
    if job.bytes() != job.expected:
        wrong.append("another output")
    done = job.done()
    lost, repeated = job.total - len(set(done)), len(done) - len(set(done))
    tally.note(what, [*wrong, *job.left_over()], lost, repeated, ended.seconds)


def engine_errors(c: Campaign) -> Iterator[Tally]:
    """Run a whole job with weights, cache and activations on disk, and let the n-th call on these files fail."""
    policy = c.work / "policy.json"
    policy.write_text(AWAY)
    model = c.work / "model"
    if not model.exists():
        shutil.copytree(c.model, model)
    given = ["--model", str(model), "--policy", str(policy), "--device", "sim", "--ignore-eos"]
    job = Trials(c.work / "engine", rows_of(8), given, real_command)
    most = c.several(3, 150)
    lasting = (False,) if c.quick else (False, True)  # failed reads are retried for two seconds
    job.watched = [job.offload]
    yield (tally := Tally("offload: failed writes"))
    job.every(("write", "allocate", "create", "mkdir", "unlink"), ("EIO", "ENOSPC", "short")[: c.several(2, 3)], tally,
              most, (True,))  # fmt: skip
    yield (tally := Tally("offload: failed reads"))
    job.every(("read",), ("EIO", "short"), tally, most, lasting)
    job.watched = [model]
    yield (tally := Tally("checkpoint: failed reads"))
    job.every(("read", "open"), ("EIO", "short"), tally, most, lasting)
    yield (tally := Tally("memory: failed allocations"))
    job.every(("memory",), ("ENOMEM",), tally, c.several(2, 60))
    if not c.quick:
        job.watched = [job.job]
        yield (tally := Tally("whole job: SIGKILL at every point"))
        job.every(PROTOCOL, CRASHES, tally, most)


def prepared_errors(c: Campaign) -> Iterator[Tally]:
    """Encode weights into the cache, and let the n-th call fail or kill the process."""
    with own_cache(c.work / "cache") as cache:
        given = ["--model", str(c.model), "--weights", "int8", "--device", "cpu", "--ignore-eos"]
        job = _Preparing(c.work / "encoded", rows_of(5), given, real_command)
        job.watched = [cache / "prepared"]
        yield (tally := Tally("prepared weights: failed calls"))
        job.every((*PROTOCOL, "open", "read"), ("EIO", "ENOSPC"), tally, c.several(4, 80))
        yield (tally := Tally("prepared weights: SIGKILL"))
        job.every(PROTOCOL, CRASHES[:1] if c.quick else CRASHES, tally, c.several(4, 40))


class _Preparing(Trials):
    """A job that prepares its weights again each time."""

    def fresh(self) -> None:
        super().fresh()
        shutil.rmtree(Path(os.environ["FLEXENGINE_CACHE"]) / "prepared", ignore_errors=True)

    def left_over(self) -> list[str]:
        prepared = Path(os.environ["FLEXENGINE_CACHE"]) / "prepared"
        names = {p.name for p in prepared.iterdir() if not p.name.endswith(".lock")}
        odd = [name for name in names if "." in name]
        modes = [p.name for p in prepared.rglob("*") if p.stat().st_mode & 0o77]
        return [*super().left_over(), *odd, *modes]


def random_kills(c: Campaign) -> Iterator[Tally]:
    """Send SIGKILL, SIGTERM and SIGINT at random moments: see bench.faults.kills."""
    for number, full in ((signal.SIGKILL, 200), (signal.SIGTERM, 50), (signal.SIGINT, 50)):
        tally = Tally(f"{number.name} at random")
        yield tally
        if c.quick and number is not signal.SIGTERM:
            continue
        work = c.work / number.name
        work.mkdir()
        rows = c.several(12, 40)
        found = kills.campaign(str(c.model), work, kills.Plan(c.several(2, full), rows, c.seed, signal=number))
        right = found.jobs == found.identical and not found.left_over and found.slowest_exit <= 10
        tally.tried, tally.survived = found.kills, found.kills if right else 0
        tally.repeated, tally.slowest = found.run_again, found.slowest_exit
        tally.points.update({"journals torn by hand": found.forced, "journals torn": found.torn, "jobs": found.jobs})
        if not right:
            tally.faults.append(str(found))


def real_disks(c: Campaign) -> Iterator[Tally]:
    """Use file systems that really are full or read-only."""
    policy = c.work / "policy.json"
    policy.write_text(AWAY)
    given = ["--model", str(c.model), "--policy", str(policy), "--device", "sim", "--ignore-eos"]
    job = Trials(c.work / "mounted", rows_of(8), given, real_command)
    for kind, place, options in (
        ("tmpfs for the offload directory", job.offload, [f"size={n * 4096}" for n in range(1, c.several(3, 80))]),
        ("tmpfs for the output", job.job, [f"size={n * 4096}" for n in range(2, c.several(4, 12))]),
        ("read-only offload directory", job.offload, ["ro"]),
        ("read-only output", job.job, ["ro"]),
    ):
        yield (tally := Tally(kind))
        for option in options:
            job.fresh()
            place.mkdir(mode=0o700, exist_ok=True)
            refusal = _mounted(job, place, option, tally)
            if refusal:
                tally.faults.append(f"skipped: {refusal}")
                break


def _mounted(job: Trials, place: Path, option: str, tally: Tally) -> str:
    """Run with a file system mounted at `place`, of which only the finished output remains, and then without. Return
    why this was not possible, or None."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", str(place)], capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip() or "mounting is not allowed"
    kept: dict[str, bytes] = {}
    try:
        if place == job.job and option != "ro":
            job.input.write_bytes(job.rows)
        else:
            (job.folder / "rows.jsonl").write_bytes(job.rows)
        inside, job.input = job.input, job.input if job.input.exists() else job.folder / "rows.jsonl"
        ended = job.run(Fault())
        job.input = inside
        kept = {p.name: p.read_bytes() for p in job.job.iterdir() if p.is_file()}
    finally:
        subprocess.run(["umount", str(place)], check=True)

    def put_back() -> None:
        job.input.write_bytes(job.rows)
        for name, data in kept.items():
            (job.job / name).write_bytes(data)
            (job.job / name).chmod(0o600)

    for name, data in kept.items():
        (job.job / name).write_bytes(data)
    if option == "ro" and (ended.code not in (2, 3) or ended.seconds > 5):
        tally.note(option, [f"exit code {ended.code} after {ended.seconds:.1f} s: {ended.said[-300:]}"])
        return ""
    job.judge(Fault((option,)), ended, tally, put_back)
    return ""


def shared_directory(c: Campaign) -> Iterator[Tally]:
    """Run pairs of jobs on one offload directory, started together, and pairs on one output, of which one must be
    refused."""
    policy = c.work / "policy.json"
    policy.write_text(AWAY)
    given = ["--model", str(c.model), "--policy", str(policy), "--device", "sim", "--ignore-eos"]
    jobs = [Trials(c.work / f"pair{i}", rows_of(8 + i), given, real_command) for i in range(2)]
    jobs[0].offload = jobs[1].offload = c.work / "shared"
    yield (tally := Tally("two jobs, one offload directory"))
    for _ in range(c.several(1, 20)):
        for job in jobs:
            job.fresh()
        codes = _together([lambda job=job: real_command(job.arguments()) for job in jobs])  # type: ignore[misc]
        wrong = [] if codes == [job.code for job in jobs] else [f"exit codes {codes}"]
        wrong += [f"{job.job}: another output" for job in jobs if job.bytes() != job.expected]
        wrong += [name for job in jobs for name in job.left_over()]
        tally.note("pair", wrong)
    yield (tally := Tally("one job started twice"))
    for _ in range(c.several(1, 20)):
        jobs[0].fresh()
        codes = _together([lambda: real_command(jobs[0].arguments())] * 2)
        allowed = {jobs[0].code, 2}
        wrong = [] if set(codes) <= allowed and jobs[0].code in codes else [f"exit codes {codes}"]
        wrong += [] if jobs[0].bytes() == jobs[0].expected else ["another output"]
        done = jobs[0].done()
        tally.note("pair", [*wrong, *jobs[0].left_over()], repeated=len(done) - len(set(done)))


def _together(works: Sequence[Callable[[], int]]) -> list[int]:
    children = []
    for work in works:
        if not (child := os.fork()):
            code = 99
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
                code = work()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def little_memory(c: Campaign) -> Iterator[Tally]:
    """Run models in less memory than they need, in several sizes: with --device-mem, and in a cgroup."""
    work = c.work / "budgets"
    work.mkdir()
    jobs = budgets.Budgets(work, budgets.QUICK if c.quick else budgets.FULL)
    yield (tally := Tally("--device-mem below the model"))
    jobs.given(tally)
    yield (tally := Tally("memory limit of a cgroup"))
    jobs.limited(tally)
    yield (tally := Tally("memory limit, offloading to RAM"))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flexengine-faults-") as ram:
        jobs.limited(tally, Path(ram))


def bad_input(c: Campaign) -> Iterator[Tally]:
    """Run mutated input lines in one job."""
    yield (tally := Tally("mutated input lines"))
    damage.input_lines(c.model, c.work / "lines", c.several(500, 10_000), c.seed, tally)


def bad_files(c: Campaign) -> Iterator[Tally]:
    """Run models whose files are cut, hostile or have flipped bits."""
    for name in damage.FILES:
        yield (tally := Tally(f"damaged {name}"))
        damage.model_files(c.model, c.work / f"damaged-{name}", name, c.several(50, 1000), c.seed, tally)


def flipped_bits(c: Campaign) -> Iterator[Tally]:
    """Flip bits of models and prepared files, and look for them with --verify."""
    from flexengine.model.verify import Verifier

    work, count = c.work / "bits", c.several(25, 1000)
    work.mkdir()
    model = bits.listed(Path(shutil.copytree(c.model, work / "model")))
    (work / "converted").mkdir()
    gguf_files.convert(model, gguf := work / "converted" / "model.gguf")
    yield (tally := Tally("flipped bits: model"))
    bits.found_by_code(model, Verifier().directory, count, c.seed, tally)
    with own_cache(work / "cache") as cache:
        yield (tally := Tally("flipped bits: encoded weights"))
        encoded = bits.prepare(model, work, cache, "--weights", "int4")
        bits.found_by_code(encoded, Verifier().prepared, count, c.seed, tally)
        yield (tally := Tally("flipped bits: found by the command"))
        job = bits.one_job(model, work, "--weights", "int4", "--verify")
        for place in (model, encoded):
            bits.found_by_command(place, job, c.several(1, 10), c.seed, tally)
    with own_cache(work / "other cache") as cache:
        yield (tally := Tally("flipped bits: converted from GGUF"))
        bits.found_by_code(bits.prepare(gguf, work, cache), Verifier().prepared, count, c.seed, tally)


KINDS: dict[str, Kind] = {
    "protocol": protocol_errors, "crashes": protocol_crashes, "journal": damaged_journals, "engine": engine_errors,
    "prepared": prepared_errors, "kills": random_kills, "disks": real_disks, "shared": shared_directory,
    "memory": little_memory, "input": bad_input, "files": bad_files, "bits": flipped_bits,
}  # fmt: skip
