"""Estimate which change of machine or weights would speed a job up most. Each estimate changes one thing.

First, each change is priced under a few policies similar to the current one. This takes milliseconds and gives a lower
bound of the speedup. Then the policy search runs for each change, the most promising first, until the time is over.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from flexengine.activity import activity
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.places import MOST_DISKS, lane_of, place_names, place_of
from flexengine.plan.candidates import Options
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.formatting import size
from flexengine.plan.hardware import Hardware, Table
from flexengine.plan.min_memory import planned
from flexengine.plan.rates import Rates
from flexengine.plan.search import MAX_AT_STAKE, search, storing
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, shares, thousandths

MIN_SPEEDUP = 1.03  # changes with a smaller speedup are not reported
NEARLY_FULL_SHARE = 0.8  # share of a memory in use from which on more memory may help
SEARCH_SECONDS = 5.0  # for the searches of all changes
INT4_BYTES = 0.28125 * 2  # per element: 4 bits, and a scale and a zero of 16 bits each for every 64 elements
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # points at which `as_fast` copies a layer's seconds


class Help(NamedTuple):
    """A change and its speedup."""

    label: str  # the change in words
    ratio: float  # seconds of the job before / after the change, loading included
    searched: bool = True  # whether a policy was searched for the change; else `ratio` is a lower bound


class Change(NamedTuple):
    """A changed model or machine."""

    label: str  # the change in words
    # model, hardware: after the change
    model: ModelFacts
    hardware: Hardware
    grown: tuple[str, int] | None = None  # (tier, additional bytes) if a memory grows


@activity("planning", "searching the changes that would help most")
def ideas(
    model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction, chosen: bool,
    options: Options | None = None, thorough: bool = False,
) -> list[Help]:  # fmt: skip
    """Return what makes the job faster: the planner's policy, if a given one is slower, and changes.

    The planner also chooses the policy after each change. So a policy as fast as the planner's has the same list with
    and without --policy.

    Args:
        prediction: prediction of the policy.
        chosen: whether the planner chose it.
        options: constraints of the search that chose it.
        thorough: search every change, without a limit of time.
    """
    best = prediction
    if not chosen:
        with activity("planning", "searching the policy of the planner, for comparison"), suppress(OutOfMemory):
            # The search leaves some RAM free, a given policy may use all.
            best = min(prediction, search(model, hardware, workload, options).best, key=attrgetter("total_seconds"))
    ratio = prediction.total_seconds / best.total_seconds
    found = helps(model, hardware, workload, best, options, math.inf if thorough else SEARCH_SECONDS)
    if ratio < MIN_SPEEDUP:
        return found
    own = [
        Help(f"{h.label}, with the policy that the planner then chooses", ratio * h.ratio, h.searched) for h in found
    ]
    return [*own, Help("the policy that is chosen without --policy", ratio)]


def helps(
    model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction, options: Options | None = None,
    budget: float = SEARCH_SECONDS, now: Callable[[], float] = time.monotonic,
) -> list[Help]:  # fmt: skip
    """Return the changes that make the job faster by MIN_SPEEDUP or more, the largest speedup first.

    Args:
        prediction: prediction of the best policy without changes.
        options: constraints of the search that found it.
        budget: seconds for all searches. A search begins if one as long as the longest so far would end in time.
        now: clock in seconds.
    """
    before, began, longest = prediction.total_seconds, now(), 0.0
    options = options or Options()
    # One rule chooses blocks before and after a change, even if the job becomes shorter than `stores_from`.
    often = before >= options.stores_from and prediction.at_stake <= MAX_AT_STAKE
    options = replace(options, stores_from=0.0 if often else math.inf)
    quick = [(c, _seconds_nearby(c, workload, prediction, options)) for c in changes(model, hardware, prediction)]
    result = []
    for change, bound in sorted(quick, key=lambda pair: pair[1]):
        seconds, start = bound, now()
        searched = start - began + longest <= budget
        if searched:
            with suppress(OutOfMemory, InvalidInput):  # a search may miss the latency limit
                seconds = min(bound, search(change.model, change.hardware, workload, options).best.total_seconds)
            longest = max(longest, now() - start)
        result.append(Help(change.label, before / min(seconds, before), searched))
    return sorted((h for h in result if h.ratio >= MIN_SPEEDUP), key=lambda h: -h.ratio)


# The changes.


def changes(model: ModelFacts, hardware: Hardware, prediction: Prediction) -> list[Change]:
    """Return the changes to try: double each memory that is nearly full, disk, link and device; 4-bit weights."""
    capacity, result = hardware.capacity, list[Change]()
    booked: dict[str, int] = {place: prediction.layout.total(place) for place in hardware.places}
    if hardware.shared:
        booked["device"] += booked.pop("host")
    words = {"device": "RAM" if hardware.shared else "device memory", "host": "host RAM"}
    for place, nbytes in booked.items():
        limit = capacity.limits[place]
        if limit is not None and nbytes >= NEARLY_FULL_SHARE * limit:
            label = f"+{size(limit)} {words.get(place, f'{place} space')}"
            larger = hardware.with_capacity(capacity.limited({place: 2 * limit}))
            result.append(Change(label, model, larger, (place, limit)))
    used = {lane for lane, seconds in prediction.busy.items() if seconds > 0}
    if any(lane_of(lane).of_disk for lane in used) or prediction.load_seconds > 0:
        result.append(Change("disk twice as fast", model, _faster_disk(hardware)))
    if not hardware.shared:
        links = replace(hardware, links=_times(2, hardware.links, "h2d", "d2h"))
        result.append(Change("link between host and device twice as fast", model, links))
    device = "CPU" if hardware.shared else "device"
    result.append(Change(f"{device} twice as fast", model, faster_device(hardware)))
    if (narrow := four_bits(model)) is not None:
        result.append(Change("4-bit weights (--weights int4)", narrow, as_fast(hardware, model, narrow)))
    return result


def _times(factor: float, tables: Mapping[str, Table], *names: str) -> dict[str, Table]:
    """Return the tables with all y of those of these names, or of all tables, multiplied."""
    return {
        name: tuple((x, factor * y) for x, y in table) if name in names or not names else table
        for name, table in tables.items()
    }


def _faster_disk(hardware: Hardware) -> Hardware:
    """Return hardware on which the offload directories and the model's files are twice as fast."""
    links = _times(2, hardware.links, *(lane for lane in hardware.links if lane_of(lane).of_disk))
    blocks = {key: _times(2, tables, "read") for key, tables in hardware.blocks.items()}
    read = _times(2, {"": hardware.checkpoint_read})[""]
    return replace(hardware, links=links, checkpoint_read=read, blocks=blocks)


def faster_device(hardware: Hardware) -> Hardware:
    """Return hardware on which the device computes and reads memory twice as fast.

    On a CPU, weights are also copied to slots twice as fast.
    """
    links = _times(2, hardware.links, "h2d") if hardware.shared else hardware.links
    attention = _times(2, {"prompt": hardware.prompt_attention, "decode": hardware.decode_attention})
    measured = {
        shape: _times(0.5, _times(2, tables, "decode", "prompt", "continued"), "call")  # the host's do not change
        for shape, tables in hardware.attention.items()
    }
    return replace(
        hardware, links=links, products=_times(2, hardware.products), prompt_attention=attention["prompt"],
        decode_attention=attention["decode"], attention=measured, vector_flops=2 * hardware.vector_flops,
        elementwise=2 * hardware.elementwise, cell_seconds=hardware.cell_seconds / 2,
        layers=_times(0.5, hardware.layers), heads=_times(0.5, hardware.heads),
        resident=_times(0.5, hardware.resident), fused=_times(0.5, hardware.fused),
        blocks={key: _times(2, tables, "some", "all") for key, tables in hardware.blocks.items()},
    )  # fmt: skip


def four_bits(model: ModelFacts) -> ModelFacts | None:
    """Return the model with the matrices of its layers in 4 bits; None if this saves less than a tenth of the bytes, or
    if neurons or experts are read on demand: rates of records of other sizes are not known.

    `TensorFact` has whole bytes per element. So the number of elements is reduced, and each has one byte.
    """
    if any(model.blocks):
        return None

    def narrow(t: TensorFact) -> TensorFact:
        if not t.matrix or t.encoded or min(t.stored, t.held) < 2:
            return t
        return replace(t, elements=max(1, round(t.elements * INT4_BYTES)), stored=1, held=1)

    small = replace(model, layers=tuple(tuple(narrow(t) for t in layer) for layer in model.layers))
    small_bytes, model_bytes = (sum(t.held_bytes for t in m.tensors) for m in (small, model))
    return small if small_bytes < 0.9 * model_bytes else None


def _coded(model: ModelFacts) -> ModelFacts:
    """Return the model with the matrices of its layers multiplied as int4; sizes are unchanged."""
    layers = (tuple(replace(t, form=t.form or "int4") if t.matrix else t for t in layer) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def as_fast(hardware: Hardware, model: ModelFacts, other: ModelFacts) -> Hardware:
    """Return hardware on which layers and head of model `other` take as long as those of `model`, or as in 4 bits if
    the rates of such products are known."""
    rates = Rates.of(model, hardware)
    timed = Rates.of(_coded(model), hardware) if "int4" in hardware.products else rates
    first = {model.signature(j): j for j in reversed(range(len(model.layers)))}
    layers, kept = (
        {other.signature(j): tuple((x, timed.one_layer(j, x, resident)) for x in _TOKENS) for j in first.values()}
        for resident in (False, True)
    )
    tables = {other.fused_signature(other.signature(j)): rates.fused_table(name) for name, j in first.items()}
    heads = {other.head_signature: tuple((x, float(rates.head(x))) for x in _TOKENS)} if other.output else {}
    streaming = {other.signature(0): rates.streaming} if rates.streaming else {}
    return replace(
        hardware,
        layers={**hardware.layers, **layers},
        resident={**hardware.resident, **kept},
        heads={**hardware.heads, **heads},
        fused={**hardware.fused, **{name: table for name, table in tables.items() if table}},
        streaming={**hardware.streaming, **streaming},
        delegation={**hardware.delegation, other.signature(0): rates.delegated},
        corrected={name: by for name, by in hardware.corrected.items() if name not in layers},  # they are in the tables
    )


# Policies similar to the current one.


def _seconds_nearby(change: Change, workload: Workload, prediction: Prediction, options: Options) -> float:
    """Return the seconds of the best policy similar to the current one.

    Return infinity if none fits and keeps the latency limit.
    """
    cost = Cost(change.model, change.hardware, workload, options.overlap, options.cohorts)
    capacity = planned(change.hardware.capacity)
    found, limit = list[Prediction](), options.latency_limit
    for policy in dict.fromkeys(_neighbours(change, workload, prediction.policy)):
        similar = cost.of(policy, capacity)
        if similar is not None and (limit is None or similar.latency <= limit):
            found.append(similar)
    if not found:
        return math.inf
    return storing(found, min(found, key=attrgetter("total_seconds")), options).total_seconds


def _neighbours(change: Change, workload: Workload, policy: Policy) -> Iterator[Policy]:
    """Yield the policy itself, policies with larger blocks, and policies with more weights in the added memory."""
    yield policy
    for factor in (1.5, 2.0):
        batches = round(policy.num_gpu_batches * factor)
        if batches > policy.num_gpu_batches and policy.gpu_batch_size * policy.num_gpu_batches < workload.count:
            yield replace(policy, num_gpu_batches=batches)
    total = sum(t.held_bytes for t in change.model.tensors)
    for fill in (0.9, 0.6, 0.3):  # share of the added memory
        if change.grown is not None and not place_of(change.grown[0]).worker:
            yield _moved_up(policy, change.grown[0], fill * change.grown[1] / total)
        elif change.label.startswith("4-bit"):
            yield _moved_up(policy, "device", fill * (1 - policy.weights[0]))


def _moved_up(policy: Policy, tier: str, share: float) -> Policy:
    """Return the policy with this share of the weights moved to a place from farther places, the farthest first.
    To a disk they also come from nearer disks."""
    by_place = dict.fromkeys(place_names(MOST_DISKS), 0.0) | shares(policy.weights)
    weights, place = list(by_place.values()), list(by_place).index(tier)
    sources = [k for k in reversed(range(len(weights))) if k > place or (place_of(tier).disk and 2 <= k < place)]
    for source in sources:
        moved = min(share, weights[source])
        weights[source], weights[place], share = weights[source] - moved, weights[place] + moved, share - moved
    return replace(policy, weights=thousandths(weights))
