"""One offload directory against two: the planned shares, and the seconds of a job, on throttled disks.

python -m bench.disks [--folder DIR] [--rates 1 0.5] [--turns 3] [--out FILE]

A random OPT model runs on a simulated accelerator whose device and host memory hold a part of the weights. The first
disk reads and writes RATE bytes per second. The second disk does so at each of the `--rates`, relative to the first.
The planner knows these rates and chooses all placements. One JSON line per rate: both machines take turns, the tokens
must be equal, and medians count. `bound` is the most that a second disk can gain: the sum of the rates over the first.
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Record
from bench.models import OptShape, make

# OPT's whole vocabulary would make the head a quarter of this small model. In OPT-30B the head is 1 %.
SHAPE = OptShape(layers=16, hidden=768, ffn=3072, heads=12, vocab=8192, positions=256)
RATE = 2e8  # bytes per second of the first disk
MEMORY = 90 << 20  # bytes of the device, and of the host
SEQUENCES, PROMPT, NEW = 16, 64, 12


@dataclass(frozen=True)
class Case:
    """rate: of the second disk, relative to the first."""

    rate: float


def rates_of(engine: Any, rates: list[float]) -> Any:
    """Return the hardware to plan with: assumed rates of a simulated accelerator, with the disks' throttles."""
    from flexengine.places import disks_of
    from flexengine.plan.rates import assumed

    known = assumed("sim", engine.core.machine.capacity)
    names = disks_of(known.places)
    tables = {name: ((1.0, rate),) for name, rate in zip(names, rates, strict=True)}
    links = {f"{name}_{way}": table for name, table in tables.items() for way in ("read", "write")}
    return replace(known, links={**known.links, **links}, checkpoint_read=((1.0, rates[0]),))


def generate(model: Path, folder: Path, rates: list[float]) -> tuple[list[list[int]], Record]:
    """Return the tokens of a job, and what it took. rates: of the disks, bytes per second."""
    from flexengine import Engine, SamplingParams
    from flexengine.tier.machine import Links

    links = Links(disk_read=rates[0], disk_write=rates[0], more_disks=tuple((rate, rate) for rate in rates[1:]))
    options: dict[str, Any] = {"device": "sim", "device_mem": MEMORY, "host_mem": MEMORY, "links": links}
    options["offload_dir"] = [folder / str(number) for number in range(len(rates))]
    with Engine(model, **options) as engine:
        hardware = rates_of(engine, rates)
    rows = [{"prompt_token_ids": [(97 * i + 31 * s + 5) % 8000 + 3 for i in range(PROMPT)]} for s in range(SEQUENCES)]
    with Engine(model, hardware=hardware, **options) as engine:
        results = engine.generate(rows, SamplingParams(NEW, ignore_eos=True))
        summary = engine.summary.to_json()
    found = {
        "decode_sweep": summary["decode_seconds"] / (NEW - 1), "seconds": summary["total_seconds"],
        "policy": summary["policy"], "bytes": summary["bytes"], "busy": summary["busy"],
        "predicted_seconds": summary["plan"]["predicted_seconds"],
    }  # fmt: skip
    return [r.token_ids for r in results], found


def measure(model: Path, folder: Path, case: Case, turns: int) -> Record:
    """Return both machines' medians."""
    ways = {"one disk": [RATE], "two disks": [RATE, case.rate * RATE]}
    runs: dict[str, list[Record]] = {way: [] for way in ways}
    tokens = []
    for _ in range(turns):
        for way, rates in ways.items():
            answer, found = generate(model, folder, rates)
            tokens.append(answer)
            runs[way].append(found)
    seconds = {what: {way: median(r[what] for r in made) for way, made in runs.items()}
               for what in ("decode_sweep", "seconds")}  # fmt: skip
    return {
        "tokens_equal": all(answer == tokens[0] for answer in tokens),
        "policy": {way: made[0]["policy"] for way, made in runs.items()},
        "bytes": {way: made[0]["bytes"] for way, made in runs.items()},
        "busy": {way: made[0]["busy"] for way, made in runs.items()}, **seconds,
        "predicted_seconds": {way: made[0]["predicted_seconds"] for way, made in runs.items()},
        "speedup": {what: by["one disk"] / by["two disks"] for what, by in seconds.items()}, "bound": 1 + case.rate,
    }  # fmt: skip


def main() -> None:
    """Measure and print the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", metavar="DIR", help="where the checkpoint is kept (default: a temporary directory)")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 0.5])
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = make(SHAPE, Path(args.folder or temporary) / "model")
        for case in map(Case, args.rates):
            line = measure(model, Path(temporary), case, args.turns)
            harness.emit({**harness.header("disks", case, [{"versions": harness.versions()}]), **line}, args.out)


if __name__ == "__main__":
    main()
