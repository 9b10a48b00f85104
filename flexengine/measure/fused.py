"""Measurement of layers that one call of kernels computes with their attention (`model.native`)."""

import time
from contextlib import suppress
from statistics import median

import torch

from flexengine.errors import OutOfMemory
from flexengine.measure.attention import AttentionTrial
from flexengine.measure.model import PassTrial, random_weights, reorder, working_memory
from flexengine.measure.timing import room, unnoticed, without_falls
from flexengine.model.forward import Head, Layer
from flexengine.plan.hardware import Table
from flexengine.tier.machine import Machine
from flexengine.worker.cache import Cache, View
from flexengine.worker.open_model import OpenModel

SEQUENCES, PAST = (1, 8, 16, 64), 15  # of the gpu_batch; cached tokens of each sequence
WARM, PASSES, SECONDS = 2, 10, 0.2  # passes that do not count: the first finds which layers follow each other


@torch.no_grad()
def measure_fused(opened: OpenModel, machine: Machine, bound: int | None = None) -> dict[str, Table]:
    """Return `Hardware.fused` of the model, in about half a second; {} if modules compute layers, or memory is short.

    Args:
        bound: number of first layers that have weights, in the order of weights that stay in memory. None binds random
            weights to the modules, which afterwards have their previous parameters.
    """
    facts, points = opened.facts, list[tuple[float, float]]()
    names = [facts.signature(j) for j in range(len(facts.layers))]
    if bound is None:
        with unnoticed(machine), random_weights(opened.skeleton, names, opened.held, machine) as n:
            reorder(opened.skeleton, n, machine)
            return measure_fused(opened, machine, n)
    attention = AttentionTrial(facts, machine, opened.dtype)
    for sequences in SEQUENCES if bound and facts.joins else ():
        if bound * attention.layer_bytes(sequences, PAST + 1) > room(machine, "device"):
            break
        trial, took = PassTrial(opened.skeleton, machine, sequences, recycles=True), list[float]()
        working, cached = working_memory(facts, machine, [sequences]), attention.cache(bound, sequences, PAST, 1)
        with suppress(OutOfMemory), working, cached as (cache, view):
            end = time.perf_counter() + SECONDS
            while len(took) < WARM + PASSES and (len(took) <= WARM or time.perf_counter() < end):
                seconds = _pass(trial, bound, cache, view)
                trial.end()
                if seconds is None:
                    return {}
                took.append(seconds)
            points.append((float(sequences), median(took[WARM:]) / bound))
    if not points:
        return {}
    numbers, each = zip(*points, strict=True)
    table = tuple(zip(numbers, without_falls(each), strict=True))
    return dict.fromkeys(map(facts.fused_signature, names[:bound]), table)


def _pass(trial: PassTrial, bound: int, cache: Cache, view: View) -> float | None:
    """Return the seconds of the first `bound` layers; None if kernels do not compute all of them."""
    trial.begin()
    began = time.perf_counter()
    assert trial.forward is not None
    while isinstance(trial.event, Layer) and (layer := trial.event.index) < bound:
        paged = cache.paged(range(layer, bound), trial.skeleton.windows, view, "device", None)
        event = trial.forward.resume(trial.event.hidden, paged)
        if not isinstance(event, Layer | Head):
            return None
        trial.event = event
    return time.perf_counter() - began
