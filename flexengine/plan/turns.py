"""Seconds of slices that take turns on several engines (`schedule.turns`), while attention workers attend.

All engines are alike. With n gpu_batches in flight on R engines, a slice of t_m seconds and attention of t_a seconds, a
layer of all gpu_batches takes (Lamina, section 3.3)

    rotational   max(n t_a, n t_m / R, t_m + t_a)
    fixed        max(n t_a, ceil(n / R) t_m, t_m + t_a)

The first engine also computes prompts, bookkeeping, embedding and head.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.rates import Rates
from flexengine.plan.sizes import Array
from flexengine.plan.terms import BESIDE_PROMPTS, PromptBatches, Sweeping, Term, decode_attention, formed, routes
from flexengine.policy import ORDERS, ROTATIONAL, Policy
from flexengine.schedule.place import cache_homes
from flexengine.schedule.turns import Turns

MESSAGES = 4  # of a slice that another engine computes: two to this engine, two back


@lru_cache(maxsize=1024)
def engine_shares(engines: int, layers: int, order: str, batches: int) -> tuple[float, ...]:
    """Return, by engine, its share of all slices of a sweep. The first and the last slice of a gpu_batch are one."""
    turns, counts = Turns(engines, layers, order), [0] * engines
    for batch in range(batches):
        for number in range(layers):
            counts[turns.engine(number, batch)] += 1
    return tuple(count / (batches * layers) for count in counts)


def in_flight(policy: Policy, hardware: Hardware) -> int:
    """Return the gpu_batches of a full block whose attention is computed elsewhere."""
    homes = cache_homes(policy, hardware.places)
    return sum(math.ceil(homes.get(home, 0) / policy.gpu_batch_size) for home in policy.attended(hardware.places))


def layer_period(order: str, engines: int, batches: int, slice_seconds: float, pool: float, away: float) -> float:
    """Return the seconds of a layer of all gpu_batches; the formula above.

    Args:
        pool: seconds of the busiest worker, for all gpu_batches.
        away: seconds from the question of one gpu_batch to its answer.
    """
    turns = batches / engines if order == ROTATIONAL else math.ceil(batches / engines)
    return max(pool, turns * slice_seconds, slice_seconds + away)


def periods(model: ModelFacts, hardware: Hardware, policy: Policy, pool: float, away: float) -> dict[str, float]:
    """Return `layer_period` of a policy by order. pool, away: as there."""
    crowd = 1.0 if hardware.gpu else float(hardware.engines)
    seconds = float(Rates.of(model, hardware).stack(policy.gpu_batch_size, policy.weights[0]))
    slice_seconds = crowd * seconds / len(model.layers)
    given = hardware.engines, in_flight(policy, hardware), slice_seconds, pool, away
    return {order: layer_period(order, *given) for order in ORDERS}


def terms(data: Sweeping, prompts: PromptBatches, split: Mapping[str, float]) -> Iterator[Term]:
    """Yield the terms of the engines: what others compute for the first one, and the least seconds of a sweep, in which
    each gpu_batch waits for its own slices and attention. Arguments as in `terms.parts`."""
    hardware, policy, rates, sweeps = data.hardware, data.policy, data.rates, data.sweeps
    layers, batches = len(data.model.layers), in_flight(policy, hardware)
    if not batches:
        return
    shares = engine_shares(hardware.engines, layers, policy.order, batches)
    work: Array = np.zeros(sweeps.times.shape)
    turn: Array = np.zeros(sweeps.times.shape)
    full_layers = float(rates.stack(policy.gpu_batch_size, policy.weights[0]))
    handing = (1 - shares[0]) * MESSAGES * hardware.worker_seconds * layers
    for home, place in policy.attended(hardware.places).items():
        if not (share := split.get(home, 0.0)):
            continue
        full, rest, _, _ = formed(policy, sweeps, prompts, home, share)
        seconds, number = full * full_layers + rates.stack(rest, policy.weights[0]), full + (rest > 0)
        work = work + seconds
        attended = decode_attention(rates, sweeps, policy.attended_by(place)) * sweeps.counted
        away = share * (attended + _moving(data, place))
        asking = layers * hardware.worker_seconds if place_of(place).worker else 0.0
        each = np.where(number > 0, (seconds + away) / np.maximum(number, 1) + asking + handing, 0.0)
        turn = np.maximum(turn, each)
    crowd = 1.0 if hardware.gpu else float(hardware.engines)  # processes of one machine share its processors
    yield Term("device", "", "", (crowd * shares[0] - 1) * work)
    for engine, share in enumerate(shares[1:], 1):
        yield Term(f"replica{engine}", "", "", crowd * share * work)
    yield Term(f"turns {BESIDE_PROMPTS}", "", "", turn)


def _moving(data: Sweeping, place: str) -> Array:
    """Return the seconds by sweep of all questions to a place, and of the answers."""
    down, _, up = routes(data.hardware).attend[place]
    tokens = data.sweeps.decoding * data.sweeps.counted * len(data.model.layers)
    sizes = ((down, data.model.sent), (up, data.model.fetched))
    batch = data.policy.gpu_batch_size
    seconds = (data.hardware.link_seconds(lane, tokens * size, batch * size) for lane, size in sizes)
    return np.asarray(sum(seconds))
