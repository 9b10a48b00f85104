"""Measurement of layers that one call of kernels computes with their attention (`model.native`)."""

import time
from contextlib import suppress
from statistics import median

import torch

from flexengine.errors import OutOfMemory
from flexengine.measure.attention import AttentionTrial
from flexengine.measure.model import PassTrial, random_weights
from flexengine.measure.timing import unnoticed
from flexengine.model.forward import Head, Layer
from flexengine.plan.hardware import Hardware
from flexengine.plan.rates import Rates
from flexengine.tier.machine import Machine
from flexengine.worker.cache import Cache, View
from flexengine.worker.open_model import OpenModel

SEQUENCES, PAST = 16, 15  # of the gpu_batch; cached tokens of each sequence. Both hardly change the difference
WARM, PASSES, SECONDS = 2, 10, 0.3  # passes that do not count: the first finds which layers follow each other


@torch.no_grad()
def measure_fused(hardware: Hardware, opened: OpenModel, machine: Machine) -> dict[str, float]:
    """Return `Hardware.fused` of the model: what layers and attention take apart, as `hardware` has measured them, less
    what they take in one call.

    {} if modules compute layers, or memory is short. Takes half a second. Afterwards the modules have their previous
    parameters.
    """
    facts, skeleton, rates = opened.facts, opened.skeleton, Rates.of(opened.facts, hardware)
    names = [facts.signature(j) for j in range(len(facts.layers))]
    with suppress(OutOfMemory), unnoticed(machine), random_weights(skeleton, names, opened.held, machine) as bound:
        if not bound:
            return {}
        trial = PassTrial(skeleton, machine, SEQUENCES, recycles=True)
        with AttentionTrial(facts, machine, opened.dtype).cache(bound, SEQUENCES, PAST, 1) as (cache, view):
            seconds, end = list[float](), time.perf_counter() + SECONDS
            while len(seconds) < WARM + PASSES and (len(seconds) <= WARM or time.perf_counter() < end):
                took = _pass(trial, bound, cache, view)
                trial.end()
                if took is None:
                    return {}
                seconds.append(took)
        apart = 0.0
        for layer in range(bound):
            attention = rates.attention[skeleton.windows.get(layer)]
            read = attention.decode(SEQUENCES * (PAST + 1), PAST + 1)
            apart += rates.one_layer(layer, SEQUENCES) + attention.call + float(read)
        return dict.fromkeys(names[:bound], max(0.0, apart - median(seconds[WARM:])) / bound)
    return {}


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
