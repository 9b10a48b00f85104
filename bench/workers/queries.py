"""Queries first, measured against not: python -m bench.workers.queries JOB.json is the process of one case.

One engine generates the same rows in turns, with queries that go first and without. The links between the simulated
device and its worker are throttled. In cases of kind "slowed", device and worker take given seconds (slowed.py), and
the virtual clock has the same seconds. In cases of kind "computed", one thread computes for the device, one for the
worker.
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.harness import Record
from bench.models import LlamaShape, make
from bench.simulate import simulate
from bench.workers import slowed
from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.places import Routes
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task

LAYERS, HEADS, VOCABULARY = 4, 16, 2000
SEQUENCES, TOKENS = 8, 12
SIDES = {"without": False, "first": True}


@dataclass(frozen=True)
class Case:
    """A model, links and seconds.

    Attributes:
        kind: slowed or computed.
        kv_heads: KV heads of the model.
        batches: gpu_batches in flight.
        hidden, ffn: elements of hidden states, and of the MLP.
        context: tokens of a prompt.
        rate, latency: of the links, bytes per second and seconds.
        product: seconds per element of a weight, if slowed.
        attention: seconds per cached token, if slowed.
    """

    kind: str
    kv_heads: int
    batches: int
    hidden: int
    ffn: int
    context: int
    rate: float
    latency: float
    product: float = 0.0
    attention: float = 0.0

    @property
    def name(self) -> str:
        """Name of the case in records."""
        return f"{self.kind}, {HEADS // self.kv_heads} heads per KV head, {self.batches} in flight"

    @property
    def shape(self) -> LlamaShape:
        """Shape of the model."""
        return LlamaShape(LAYERS, self.hidden, self.ffn, HEADS, vocab=VOCABULARY, dtype="float32",
                          kv_heads=self.kv_heads)  # fmt: skip

    def policy(self, queries_first: bool) -> Policy:
        """Return the policy of a side."""
        cache: Any = {"workers": 1}
        return Policy(SEQUENCES // self.batches, self.batches, cache=cache, queries_first=queries_first)


def _slowed(kv_heads: int, batches: int) -> Case:
    """Return a case whose q projection takes 4 ms per gpu_batch, and whose attention takes 16 ms for all sequences."""
    hidden, context = 128, 48
    product, attention = 4e-3 / hidden**2, 16e-3 / (SEQUENCES * (context + TOKENS / 2))
    return Case("slowed", kv_heads, batches, hidden, 352, context, 2e6, 50e-6, product, attention)


CASES = [_slowed(kv_heads, batches) for kv_heads in (16, 4) for batches in (1, 2)] + [
    Case("computed", kv_heads, 1, 1024, 2816, 2048 // kv_heads, 200e6, 50e-6) for kv_heads in (16, 4)
]


@dataclass
class Decoding:
    """Times of the tasks of sweeps; an executor calls `add`.

    Attributes:
        spans: by sweep, (task, began, end).
    """

    spans: dict[int, list[tuple[Task, float, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, task: Task, began: float, end: float) -> None:
        """Add a task that ran from `began` to `end`."""
        self.spans[task.cell.sweep].append((task, began, end))

    def figures(self) -> Record:
        """Return the seconds of the sweeps without prompts, and medians over them: shares of a sweep by lane; seconds
        by operation; and seconds in which cached tokens were attended while keys and values were computed and sent."""
        sweeps = [each for _, each in sorted(self.spans.items())
                  if not any(task.op is Op.STORE_CACHE for task, _, _ in each)]  # fmt: skip
        seconds = [max(end for _, _, end in each) - min(began for _, began, _ in each) for each in sweeps]
        busy = [_sums((task.lane, end - began) for task, began, end in each) for each in sweeps]
        ops = [_sums((task.op.value, end - began) for task, began, end in each) for each in sweeps]
        shares = {lane: median(one[lane] / whole for one, whole in zip(busy, seconds, strict=True)) for lane in busy[0]}
        return {"sweeps": seconds, "busy": shares, "overlap_seconds": median(map(_overlap, sweeps)),
                "seconds": {op: median(one[op] for one in ops) for op in ops[0]}}  # fmt: skip


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in pairs:
        sums[name] += seconds
    return sums


def _overlap(sweep: Sequence[tuple[Task, float, float]]) -> float:
    """Return the seconds in which a cell's cached tokens were attended while its keys and values were computed and
    sent."""
    times = {(task.op, task.cell): (began, end) for task, began, end in sweep}
    return sum(max(0.0, min(end, times[Op.SEND_KEYS, cell][1]) - max(began, times[Op.PROJECT_KEYS, cell][0]))
               for (op, cell), (began, end) in times.items() if op is Op.ATTEND_CACHED)  # fmt: skip


def virtual(case: Case, queries_first: bool) -> float:
    """Return the seconds of a decode sweep of a slowed case on the virtual clock."""
    routes = Routes.between(("device", "host", "disk", "worker1"), staged=True)
    sequences, dim = SEQUENCES // case.batches, case.hidden // HEADS
    batches = [Batch(tuple(Piece(k * sequences + i, 1, 1, True) for i in range(sequences)), "worker1", "device",
                     "worker1", queries_first) for k in range(case.batches)]  # fmt: skip
    program = Program([()] * (LAYERS + 1), LAYERS, 2, routes)
    queries, keys = case.hidden, 2 * case.kv_heads * dim  # elements of a token

    def computed(elements: int) -> float:
        return elements * case.hidden * case.product

    def moved(elements: int) -> float:
        return case.latency + 4 * sequences * elements / case.rate

    attended = sequences * (case.context + TOKENS / 2) * case.attention
    whole = {Op.PROJECT: computed(queries + keys), Op.SEND: moved(queries + keys), Op.ATTEND: attended}
    parts = {Op.PROJECT: computed(queries), Op.SEND: moved(queries), Op.PROJECT_KEYS: computed(keys),
             Op.SEND_KEYS: moved(keys), Op.ATTEND_CACHED: attended, Op.ATTEND: 0.0}  # fmt: skip
    rest = {Op.FINISH: computed(case.hidden + 3 * case.ffn), Op.FETCH: moved(queries), Op.COMPUTE: 0.0}
    seconds = rest | (parts if queries_first else whole)
    return simulate(program.sweep(0, batches, False), lambda task: seconds[task.op]).seconds


def run(job: dict[str, Any]) -> Record:
    """Return the figures of all turns, by side, and whether all tokens are equal."""
    case, rng = Case(**job["case"]), random.Random(4)
    model = make(case.shape, Path(job["folder"]) / f"queries {case.hidden} {case.kv_heads}")
    prompts = [{"prompt_token_ids": [rng.randrange(3, VOCABULARY) for _ in range(case.context)]}
               for _ in range(SEQUENCES)]  # fmt: skip
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    runs: dict[str, list[Record]] = {side: [] for side in SIDES}
    tokens = list[Any]()
    with ExitStack() as stack:
        workers: dict[str, Any] = {"attention_workers": 1, "worker_mem": "1G"}
        if case.kind == "slowed":
            workers = {"attention_workers": [slowed.start(1 << 30, case.attention, stack)]}
        engine = stack.enter_context(Engine(
            model, device="sim", device_mem="2G", host_mem="1G", policy=case.policy(True), progress=False,
            links=Links(case.rate, case.rate, latency=case.latency), **workers,
        ))  # fmt: skip
        if case.kind == "slowed":
            slowed.slow_down(engine.core.skeleton.model, case.product)
        for turn in range(job["turns"] + 1):
            for side in SIDES if turn % 2 else reversed(SIDES):
                engine.planner.policy, engine.core.sample = case.policy(SIDES[side]), (sample := Decoding())
                tokens.append([result.token_ids for result in engine.generate(prompts, params)])
                if turn:  # the first one reads weights
                    runs[side].append(sample.figures())
    return {"runs": runs, "same": all(each == tokens[0] for each in tokens)}


def figures(case: Case, found: Record) -> Record:
    """Return the figures of a case's record from its `run`: of each side, the saving, the virtual clock's.

    Sweep i of a turn is sweep i of all turns, and other processes only add to its seconds. So the fastest one counts,
    and `sweep_seconds` is the mean of these over i. Other figures are medians.
    """
    sides = {side: {key: _median([each[key] for each in runs]) for key in ("busy", "seconds", "overlap_seconds")}
             for side, runs in found["runs"].items()}  # fmt: skip
    turns = {side: [each["sweeps"] for each in runs] for side, runs in found["runs"].items()}
    seconds = {side: fmean(map(min, zip(*each, strict=True))) for side, each in turns.items()}
    medians = {side: median(x for one in each for x in one) for side, each in turns.items()}
    saved = 1 - seconds["first"] / seconds["without"]
    record: Record = {"same": found["same"], "sweep_seconds": seconds, "saved": saved, "median_seconds": medians,
                      "sides": sides}  # fmt: skip
    if case.kind == "slowed":
        clock = {side: virtual(case, first) for side, first in SIDES.items()}
        record |= {"virtual_seconds": clock, "virtual_saved": 1 - clock["first"] / clock["without"],
                   "to_virtual": {side: seconds[side] / clock[side] for side in SIDES}}  # fmt: skip
    return record


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or of each entry of dicts."""
    if isinstance(values[0], dict):
        return {key: median(value[key] for value in values) for key in values[0]}
    return median(values)


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
