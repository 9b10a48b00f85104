"""Products with records of neurons, and weighted sums of them, against a plain read of as many bytes.

python -m bench.kernels.neurons [--cases 4096 ...] [--rounds 12] [--out neurons.jsonl]

Every round takes other records, at random places of a file of records in huge pages that is larger than the CPU's
caches. All sides alternate in one process, on threads that share cores with other programs, so the least time of all
rounds counts. GB/s counts the bytes of the vectors read, not of whole records. Prints one JSON line and one table per
case.
"""

import argparse
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bench import harness
from bench.harness import Record
from bench.kernels.attention import BEYOND, Run, held, reading, timed
from flexengine import kernels
from flexengine.codec.records import RecordForm
from flexengine.kernels.base import Kernels

import torch  # isort: skip  # after flexengine, which sets the threads' wait policy

SEED = 0


@dataclass(frozen=True)
class Case:
    """Neurons of one layer.

    Attributes:
        places: neurons of one call, of `room` in memory.
        rows: numbers of rows.
        zeros: share of weights that are 0, in each row.
    """

    name: str
    width: int
    places: int
    rows: tuple[int, ...] = (1, 2, 4, 8)
    kinds: tuple[str, ...] = ("float32", "bfloat16", "float16", "int8", "int4")
    zeros: float = 0.0

    def nbytes(self, kind: str) -> int:
        """Return the bytes of the vectors that one call reads."""
        return self.places * RecordForm(kind, self.width).vector_bytes

    def room(self, kind: str) -> int:
        """Return the records in memory, so many that the next rounds' vectors are in no cache."""
        return max(2 * self.places, -(-2 * BEYOND // RecordForm(kind, self.width).nbytes))


CASES = {case.name: case for case in (Case("2048", 2048, 1000), Case("4096", 4096, 2000), Case("8192", 8192, 3000))}


def sides(case: Case, kind: str, kernel: Kernels) -> dict[str, Run]:
    """Return the sides of one kind: products and sums by the number of rows, and a read."""
    form, room = RecordForm(kind, case.width), case.room(kind)
    some = form.encode(*torch.randn(2, 64, case.width))
    records = held(some.repeat(-(-room // 64), 1)[:room])
    found = {f"{kind} read": reading(case.nbytes(kind), records.view(-1).view(torch.int64))}
    for rows in case.rows:
        x, a = torch.randn(rows, case.width), torch.randn(rows, case.places)
        a = a.masked_fill(torch.rand(a.shape) < case.zeros, 0.0)
        for name, function, factor in (("products", kernel.record_products, x), ("sum", kernel.record_sum, a)):
            places = [torch.randperm(room)[: case.places] for _ in range(2)]  # of this side only: in no cache
            call = functools.partial(_call, functools.partial(function, factor, records), places, form)
            found[f"{kind} {name} {rows}"] = call
    return found


def _call(function: functools.partial[torch.Tensor], places: list[torch.Tensor], form: RecordForm, i: int) -> object:
    return function(places[i % 2], form, i // 2 % form.vectors)


def results(case: Case, kind: str, seconds: Mapping[str, list[float]]) -> Record:
    """Return GB/s of each side, from the least times, and the share of the read's rate."""
    rates = {name.removeprefix(f"{kind} "): case.nbytes(kind) / min(found) / 1e9 for name, found in seconds.items()}
    return {name: {"gb_s": rate, "share": rate / rates["read"]} for name, rate in rates.items()}


def table(case: Case, found: Mapping[str, Record]) -> str:
    """Return the figures of `results` as a table: GB/s and share of the read, by rows."""
    lines = [f"{case.places} vectors of {case.width}",
             f"{'':20}{'read':>6}" + "".join(f"{f'{rows} rows':>15}" for rows in case.rows)]  # fmt: skip
    for kind, sides in found.items():
        for name in ("products", "sum"):
            cells = [sides[f"{name} {rows}"] for rows in case.rows]
            lines.append(f"{kind:11}{name:9}{sides['read']['gb_s']:6.1f}"
                         + "".join(f"{x['gb_s']:8.1f} ({x['share']:4.2f})" for x in cells))  # fmt: skip
    return "\n".join(lines)


def run_case(case: Case, rounds: int) -> Record:
    """Return the record of one case."""
    torch.manual_seed(SEED)
    kernel = kernels.load()
    found = {kind: results(case, kind, timed(sides(case, kind, kernel), rounds)) for kind in case.kinds}
    return {
        **harness.header("neurons", case, [{"versions": harness.versions()}]), "kernels": kernel.name,
        "simd": getattr(kernel, "simd", None), "threads": torch.get_num_threads(), "seed": SEED, "rounds": rounds,
        "kinds": found,
    }  # fmt: skip


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=12, help="how often the sides take turns (default 12)")
    parser.add_argument("--out", metavar="FILE", help="append records to this file under bench/results/")
    arguments = parser.parse_args()
    for name in arguments.cases:
        found = run_case(CASES[name], arguments.rounds)
        harness.emit(found, arguments.out)
        print(table(CASES[name], found["kinds"]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
