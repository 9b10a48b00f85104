"""What would help most: the job planned again on machines, or with weights, that differ in one thing.

Every change is first priced under a few policies near the one there is, which takes milliseconds and says at least
what it gains; then, the most promising first, the policy is searched anew as long as the time lasts.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.places import is_disk
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Hardware, Table
from flexengine.plan.layout import lay_out
from flexengine.plan.least import planned
from flexengine.plan.prediction import Prediction
from flexengine.plan.rates import Rates
from flexengine.plan.search import search
from flexengine.plan.shapes import Options
from flexengine.plan.words import size
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, places_of, thousandths

LEAST = 1.03  # a factor below which a change is not worth naming
FULL = 0.8  # share of a memory in use from which on more of it may help
BUDGET = 5.0  # seconds for all changes
FOUR_BITS = 0.28125 * 2  # bytes per element: 4 bits, and 16 of scale and zero each for every 64 elements
_POINTS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # tokens at which a layer's time is carried over


class Help(NamedTuple):
    """ratio: how many times sooner the job ends, loading included. searched: whether the policy was searched anew;
    otherwise the ratio is the least that the change gives."""

    label: str
    ratio: float
    searched: bool = True


@dataclass(frozen=True)
class Change:
    """A model on a machine, one of which differs from what there is. grown: bytes that a tier has more of."""

    label: str
    model: ModelFacts
    hardware: Hardware
    grown: tuple[str, int] | None = None


def helps(
    model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction, options: Options | None = None,
    budget: float = BUDGET, now: Callable[[], float] = time.monotonic,
) -> list[Help]:  # fmt: skip
    """What makes the job at least LEAST times shorter than `prediction`, falling by the factor.

    prediction: of the best policy as things are; options: what the search for it kept to; budget: seconds by the clock
    `now` in which searches may be begun, one more of the longest so far taken into account.
    """
    before, began, longest = prediction.total_seconds, now(), 0.0
    asked = options or Options()
    quick = [(change, _near(change, workload, prediction, asked)) for change in changes(model, hardware, prediction)]
    found = []
    for change, least in sorted(quick, key=lambda pair: pair[1]):
        seconds, start = least, now()
        searched = start - began + longest <= budget
        if searched:
            with suppress(OutOfMemory, InvalidInput):  # a search may miss the latency limit
                seconds = min(least, search(change.model, change.hardware, workload, asked).best.total_seconds)
            longest = max(longest, now() - start)
        found.append(Help(change.label, before / min(seconds, before), searched))
    return sorted((h for h in found if h.ratio >= LEAST), key=lambda h: -h.ratio)


# The changes.


def changes(model: ModelFacts, hardware: Hardware, prediction: Prediction) -> list[Change]:
    """Every change that may help: twice of each memory that is full, of each link, of the device; 4-bit weights."""
    found = [
        Change(label, model, _grown(hardware, tier, limit), (tier, limit))
        for tier, limit, label in _full(hardware, prediction)
    ]
    used = {lane for lane, seconds in prediction.busy.items() if seconds > 0}
    if any(map(is_disk, used)) or prediction.load_seconds > 0:
        found.append(Change("disk twice as fast", model, _faster_disk(hardware)))
    if not hardware.shared:
        links = _twice_as_fast(hardware, "h2d", "d2h")
        found.append(Change("link between host and device twice as fast", model, links))
    found.append(Change("CPU twice as fast" if hardware.shared else "device twice as fast", model,
                        faster_device(hardware)))  # fmt: skip
    if (narrow := four_bits(model)) is not None:
        found.append(Change("4-bit weights (--weights int4)", narrow, as_fast(hardware, model, narrow)))
    return found


def _full(hardware: Hardware, prediction: Prediction) -> Iterator[tuple[str, int, str]]:
    """(tier, capacity in bytes, what twice as much is called) of each memory that is nearly full."""
    used = {tier: prediction.layout.total(tier) for tier in hardware.places}
    if hardware.shared:
        used["device"] += used.pop("host")
    words = {"device": "RAM" if hardware.shared else "device memory", "host": "host RAM"}
    for tier, nbytes in used.items():
        limit = hardware.capacity.limits[tier]
        if limit is not None and nbytes >= FULL * limit:
            yield tier, limit, f"+{size(limit)} {words.get(tier, f'{tier} space')}"


def _grown(hardware: Hardware, tier: str, nbytes: int) -> Hardware:
    capacity = hardware.capacity
    return hardware.with_capacity(capacity.limited({tier: (capacity.limits[tier] or 0) + nbytes}))


def _twice(table: Table) -> Table:
    return tuple((x, 2 * y) for x, y in table)


def _halves(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Of tables of seconds."""
    return {name: tuple((x, y / 2) for x, y in table) for name, table in tables.items()}


def _faster_attention(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Measured attention on the device in half the time; what the host computes stays as it is."""
    halved = {name: table if name == "host" else _twice(table) for name, table in tables.items()}
    return halved | _halves({name: table for name, table in tables.items() if name == "call"})


def _twice_as_fast(hardware: Hardware, *lanes: str) -> Hardware:
    links = {lane: _twice(table) if lane in lanes else table for lane, table in hardware.links.items()}
    return replace(hardware, links=links)


def _faster_disk(hardware: Hardware) -> Hardware:
    """Both of the offload directory and of the model's files."""
    faster = _twice_as_fast(hardware, *filter(is_disk, hardware.links))
    return replace(faster, checkpoint_read=_twice(hardware.checkpoint_read))


def faster_device(hardware: Hardware) -> Hardware:
    """Everything that is computed, and what memory it reads, in half the time; on cpu also what fills a slot."""
    faster = _twice_as_fast(hardware, "h2d") if hardware.shared else hardware
    return replace(
        faster, products={name: _twice(table) for name, table in hardware.products.items()},
        prompt_attention=_twice(hardware.prompt_attention), decode_attention=_twice(hardware.decode_attention),
        attention={shape: _faster_attention(tables) for shape, tables in hardware.attention.items()},
        vector_flops=2 * hardware.vector_flops, elementwise=2 * hardware.elementwise,
        cell_seconds=hardware.cell_seconds / 2, layers=_halves(hardware.layers), heads=_halves(hardware.heads),
    )  # fmt: skip


def four_bits(model: ModelFacts) -> ModelFacts | None:
    """The model with its layers' matrices in 4 bits, stored and held; None if that saves less than a tenth.

    Bytes per element are whole numbers, so what shrinks is the number of elements, of one byte each.
    """

    def narrow(t: TensorFact) -> TensorFact:
        if not t.matrix or t.encoded or min(t.stored, t.held) < 2:
            return t
        return replace(t, elements=max(1, round(t.elements * FOUR_BITS)), stored=1, held=1)

    small = replace(model, layers=tuple(tuple(narrow(t) for t in layer) for layer in model.layers))
    bytes_ = [sum(t.held_bytes for t in m.tensors) for m in (small, model)]
    return small if bytes_[0] < 0.9 * bytes_[1] else None


def instead(model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction) -> list[Help]:
    """What the policy that would be chosen gains over a given one, if that is worth a word."""
    try:
        ratio = prediction.total_seconds / search(model, hardware, workload).best.total_seconds
    except OutOfMemory:  # a given policy may fill RAM to the brim
        return []
    return [Help("the policy that is chosen without --policy", ratio)] if ratio >= LEAST else []


def as_fast(hardware: Hardware, model: ModelFacts, other: ModelFacts) -> Hardware:
    """Return hardware on which layers and head of `other` take the time that those of `model` take."""
    rates = Rates.of(model, hardware)
    layers = {
        other.signature(j): tuple((x, rates.one_layer(j, x)) for x in _POINTS)
        for j in _one_of_each([model.signature(j) for j in range(len(model.layers))])
    }
    heads = {other.head_signature: tuple((x, float(rates.head(x))) for x in _POINTS)}
    streaming = {other.signature(0): rates.streaming} if rates.streaming else {}
    return replace(
        hardware, layers={**hardware.layers, **layers}, heads={**hardware.heads, **heads},
        streaming={**hardware.streaming, **streaming},
        delegation={**hardware.delegation, other.signature(0): rates.delegated},
    )  # fmt: skip


def _one_of_each(names: list[str]) -> list[int]:
    return [names.index(name) for name in dict.fromkeys(names)]


# Policies near the one there is.


def _near(change: Change, workload: Workload, prediction: Prediction, options: Options) -> float:
    """Seconds of the best policy near the one there is; without end if none fits, or keeps the latency limit."""
    cost = Cost(change.model, change.hardware, workload, options.overlap)
    capacity = planned(change.hardware.capacity)
    seconds = [float("inf")]
    for policy in dict.fromkeys(_neighbours(change, workload, prediction.policy)):
        try:
            found = cost.predict(lay_out(change.model, policy, workload, capacity))
        except OutOfMemory:
            continue
        if options.latency_limit is None or found.latency <= options.latency_limit:
            seconds.append(found.total_seconds)
    return min(seconds)


def _neighbours(change: Change, workload: Workload, policy: Policy) -> Iterator[Policy]:
    """The policy itself; with larger blocks; and with weights in the memory that was added."""
    yield policy
    for factor in (1.5, 2.0):
        batches = round(policy.num_gpu_batches * factor)
        if batches > policy.num_gpu_batches and policy.gpu_batch_size * policy.num_gpu_batches < workload.count:
            yield replace(policy, num_gpu_batches=batches)
    freed = sum(t.held_bytes for t in change.model.tensors)
    for fill in (0.9, 0.6, 0.3):
        if change.grown is not None:
            yield _nearer(policy, change.grown[0], fill * change.grown[1] / freed)
        elif change.label.startswith("4-bit"):
            yield _nearer(policy, "device", fill * (1 - policy.weights[0]))


def _nearer(policy: Policy, tier: str, share: float) -> Policy:
    """So much more of the weights on a tier, taken from those below it, the furthest first."""
    weights, place = list(policy.weights), places_of(policy.weights).index(tier)
    for source in range(len(weights) - 1, place, -1):
        moved = min(share, weights[source])
        weights[source], weights[place], share = weights[source] - moved, weights[place] + moved, share - moved
    return replace(policy, weights=thousandths(weights))
