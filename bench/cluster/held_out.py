"""Regressions of a layer's seconds on this CPU, and their errors on shapes that they were not fitted to.

Layers are timed in sweeps of the engine itself: the difference of two models that differ only in their number of
layers, divided by the difference of the layers. Embedding, head and bookkeeping are thus left out. The checkpoint is in
bf16, as most are. (Products with fp32 weights are padded to 2, 4, 8 or 16 rows, so their seconds rise in steps.)
"""

import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.harness import Record
from bench.pipeline.models import VOCABULARY, make_model
from flexengine.plan.cluster.devices import Regression, fit

HIDDEN = 1024
LAYERS = (2, 8)
BATCHES, TOKENS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512, 1024)  # fitted
UNSEEN = [(v, t) for v in (3, 5, 7) for t in (96, 384, 768)]  # of LLM-PQ, and shorter ones
MOST_TOKENS = 4096  # of all prompts together
STEPS = 24  # decode sweeps of a job
FORMS = (None, "int8", "int4")

Point = tuple[float, float, float]


def errors(line: Regression, points: Iterable[Point]) -> list[float]:
    """Return predicted / measured - 1 of points (batch, tokens, seconds)."""
    return [line(v, t) / y - 1 for v, t, y in points]


def shapes() -> Iterator[tuple[int, int, bool]]:
    """Yield batch, prompt tokens, and whether the shape is fitted."""
    for v in BATCHES:
        yield from ((v, t, True) for t in TOKENS if v * t <= MOST_TOKENS)
    yield from ((v, t, False) for v, t in UNSEEN if v * t <= MOST_TOKENS)


def sweeps(engine: Any, batch: int, tokens: int, rng: random.Random) -> tuple[float, float]:
    """Return the seconds of the sweep that computes the prompts, and the median of the sweeps after it."""
    from flexengine import SamplingParams

    rows = [{"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(tokens)]} for _ in range(batch)]
    seen: list[float] = []
    engine.on_sweep = lambda progress: seen.append(progress.seconds)
    engine.generate(rows, SamplingParams(max_tokens=STEPS + 1, ignore_eos=True))
    each = [later - earlier for earlier, later in zip([0.0, *seen], seen, strict=False)]
    return each[0], median(each[1:])


def measured(form: str | None, turns: int) -> dict[tuple[str, bool], list[Point]]:
    """Return the points of each phase, fitted and unseen. Models and shapes take turns.

    Each time is the least of the turns, as other processes of the machine only add to it.
    """
    from flexengine import Engine, Lossy, Policy

    rng, times = random.Random(1), defaultdict[tuple[str, int, int, bool, int], list[float]](list)
    policy = Policy(max(BATCHES), 1, prefill_tokens=2 * MOST_TOKENS)
    options: dict[str, Any] = {"device": "cpu", "device_mem": "8G", "policy": policy, "prefix_sharing": False}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        engines = {}
        for layers in LAYERS:
            make_model(Path(folder) / f"{layers}", layers, HIDDEN, positions=2048, dtype="bfloat16")
            engine = opened.enter_context(Engine(Path(folder) / f"{layers}", lossy=Lossy(weights=form), **options))
            engine.load_first = True
            engines[layers] = engine
            sweeps(engine, 2, 64, rng)  # reads the weights, and starts threads
        for _ in range(turns):
            order = list(shapes())
            rng.shuffle(order)  # drift of the machine's speed is then not that of a batch
            for v, t, is_fitted in order:
                for layers, engine in engines.items():
                    prefill, decode = sweeps(engine, v, t, rng)
                    times["prefill", v, t, is_fitted, layers].append(prefill)
                    times["decode", v, t, is_fitted, layers].append(decode)
    points = defaultdict[tuple[str, bool], list[Point]](list)
    few, many = LAYERS
    for phase, v, t, is_fitted, layers in list(times):
        if layers == many:
            seconds = [min(times[phase, v, t, is_fitted, n]) for n in LAYERS]
            cached = t if phase == "prefill" else t + STEPS / 2
            points[phase, is_fitted].append((v, cached, (seconds[1] - seconds[0]) / (many - few)))
    return points


def held_out(turns: int) -> Record:
    """Return the relative errors of both regressions of each format."""
    found: Record = {"hidden": HIDDEN, "layers": list(LAYERS), "formats": {}}
    for form in FORMS:
        points = measured(form, turns)
        by_phase: Record = {}
        for phase in ("prefill", "decode"):
            line = fit(phase, points[phase, True])
            off = [abs(e) for e in errors(line, points[phase, False])]
            near = [abs(e) for e in errors(line, points[phase, True])]
            by_phase[phase] = {
                "coefficients": line.coefficients, "knee": line.knee if line.knee < inf else None,
                "mean": fmean(off), "median": median(off), "most": max(off),
                "fitted_mean": fmean(near), "fitted_most": max(near), "points": points[phase, True],
                "unseen": points[phase, False],
            }  # fmt: skip
        found["formats"][form or "exact"] = by_phase
    return found
