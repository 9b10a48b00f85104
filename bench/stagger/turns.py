"""Two engines that take turns on one attention worker: rotational against fixed order, in processes.

The first engine, the other one and the worker are processes. A slice lasts t_m on each engine, and attention t_a: the
processes sleep for what is left of these seconds. Questions and answers cross links that are throttled, too. Beside
the measured period is that of the same program on the virtual clock, with these seconds.
"""

import random
import sys
import time
from pathlib import Path
from statistics import median

from bench import harness
from bench.harness import Record
from bench.models import LlamaShape, make
from bench.simulate import simulate
from bench.stagger.engines import answer, pool, start
from flexengine.places import DIRECT
from flexengine.plan.turns import layer_period
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op
from flexengine.schedule.turns import Turns

SHAPE = LlamaShape(14, 64, 128, 4, vocab=64, positions=128, dtype="float32", kv_heads=2)
SLICE, ATTENTION, CROSSING = 0.12, 0.05, 0.005  # seconds; of each crossing of a link, to the worker and back
ENGINES, ROWS, PROMPT, TOKENS = 2, 12, 8, 4
ORDERS = (("fixed", 2), ("rotational", 3), ("fixed", 4))  # and gpu_batches
FIRST, LAST = 4, 12  # layers of the window; gpu_batch 0 begins even ones on the first engine
LIMIT = 0.05  # most relative error


def virtual(order: str, batches: int) -> float:
    """Return the period of the program on the virtual clock."""
    layers = SHAPE.layers
    made = [Batch((Piece(k, 9, 1, True),), "worker1", "device", "worker1") for k in range(batches)]
    routes = DIRECT.between(("device", "disk", "worker1"), staged=False)
    program = Program([()] * (layers + 1), layers, 2, routes, turns=Turns(ENGINES, layers, order).engine)
    seconds = {Op.FINISH: SLICE / 2, Op.PROJECT: SLICE / 2, Op.TAKE_BACK: SLICE, Op.ATTEND: ATTENTION,
               Op.SEND: CROSSING, Op.FETCH: CROSSING}  # fmt: skip
    spans = simulate(program.sweep(0, made, False), lambda task: seconds.get(task.op, 0.0)).spans
    ends = {task.cell.layer: end for task, _, end in spans if task.op is Op.ATTEND and task.cell.batch == 0}
    return (ends[LAST] - ends[FIRST]) / (LAST - FIRST)


def turns(directory: Path) -> Record:
    """Return the record."""
    model, rng = make(SHAPE, directory / "model"), random.Random(1)
    rows = [[rng.randrange(3, SHAPE.vocab) for _ in range(PROMPT)] for _ in range(ROWS)]
    points, tokens = list[Record](), list[list[list[int]]]()
    with pool(ATTENTION, directory) as address:
        for order, batches in ORDERS:
            policy = {"gpu_batch_size": ROWS // batches, "num_gpu_batches": batches, "cache": {"workers": 1},
                      "schedule": "zigzag", "order": order}  # fmt: skip
            name = f"{order} {batches}"
            job = {"name": name, "model": str(model), "address": address, "tokens": TOKENS,
                   "policy": policy, "rows": rows, "engines": ENGINES, "slice": SLICE, "crossing": CROSSING,
                   "window": [FIRST, LAST]}  # fmt: skip
            began = time.monotonic()
            run = answer(start(job, directory), name, directory)
            seconds = time.monotonic() - began
            tokens.append(run["tokens"])
            away = ATTENTION + 2 * CROSSING
            points.append({
                "order": order, "batches": batches, "period": (period := median(run["periods"])),
                "periods": run["periods"], "virtual_period": virtual(order, batches),
                "formula": layer_period(order, ENGINES, batches, SLICE, batches * ATTENTION, away),
                "rate": batches / period, "seconds": seconds,
            })  # fmt: skip
            point = points[-1]
            print(f"  {order}, {batches} gpu_batches: a layer of all takes {period:.4f} s, on the virtual clock"
                  f" {point['virtual_period']:.4f} s; this run took {seconds:.0f} s", file=sys.stderr)  # fmt: skip
    gain, ideal = points[1]["rate"] / points[0]["rate"], (ENGINES + 1) / ENGINES
    case = {"name": "turns", "slice": SLICE, "attention": ATTENTION, "crossing": CROSSING, "engines": ENGINES,
            "layers": SHAPE.layers, "rows": ROWS, "tokens": TOKENS}  # fmt: skip
    same = all(each == tokens[0] for each in tokens)
    worst = max((p["period"] / p["virtual_period"] for p in points), key=lambda ratio: abs(ratio - 1))
    return harness.header("stagger", case, [{"versions": harness.versions()}]) | {
        "points": points, "rotational_to_fixed": gain, "ideal": ideal, "worst_ratio": worst, "same": same,
        "good": same and abs(gain / ideal - 1) <= LIMIT and abs(worst - 1) <= LIMIT,
    }  # fmt: skip
