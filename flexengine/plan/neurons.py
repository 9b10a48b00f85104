"""Neurons on demand: how many a token uses, how many of them are in memory, and the seconds of both (LLM in a flash).

A layer's memory holds the neurons that were used last. If it has room for the union of the last k tokens, the next one
reads s(k + 1) - s(k) of the neurons, where s(k) is the mean share that k successive tokens use together (section 3.1;
systems 4.4). The memory's room decides k. Tokens of different sequences in a gpu_batch are taken as independent:

    s(k) of b sequences = 1 - (1 - s(k) of one) ^ e(b),    e(b) = log(1 - union of b) / log(1 - union of 1)

All layers have room for the same k, as far as the policy's share of all neurons allows: layers whose tokens use many
neurons get more memory than others.

The experts of a mixture that are kept in memory are counted in the same way. Experts of the next layer that are read
early are counted as if they were read when they are needed, so such a job may be faster than predicted.

Other mixtures load their experts into the slot of the layer, in sweeps of few tokens only those that tokens chose. A
token uses `active` of E experts. If tokens choose independently and evenly, t tokens choose this share of a layer's:

    share(t) = 1 - (1 - active / E)^t

Real routers choose fewer, because tokens are alike. Whole layers are prefetched while other layers are computed. Chosen
experts cannot be prefetched, because the router runs after the layer's attention. So experts are loaded on demand only
if the share is at most MAX_CHOSEN_SHARE: loading them then takes at most half as long as loading all.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from flexengine.errors import InvalidInput
from flexengine.places import off_device
from flexengine.plan.facts import ModelFacts, NeuronFacts, TensorFact
from flexengine.plan.hardware import Hardware, Table, at, values_at
from flexengine.plan.layout import Layout
from flexengine.plan.profile import Profile
from flexengine.plan.sizes import ALIGN, SHORT_READ, Array, aligned
from flexengine.plan.terms import Sweeping, Term
from flexengine.policy import Policy
from flexengine.schedule.frame import Demand

ASSUMED_ACTIVE = 0.1  # share of the neurons that a token uses, if nothing was measured
ASSUMED_REUSE = 0.6  # exponent: k successive tokens use k^this times as many neurons as one
RECORD_READERS = 32  # threads that read records; as in flash.reader
_CERTAIN = 1 - 1e-9
_MOST_AGE = 4096  # tokens
NEURONS = "neurons"
PREDICTORS = "predictors"
RECORDS = "records on their way"
STREAMED = 4 << 20  # bytes of records that are read together for tokens that use all neurons; two such buffers
EXPERT_STAGES = 3  # experts that are on their way to a GPU at once
EXPERT_SPARES = 2  # experts that are read early at once without a GPU
MAX_CHOSEN_SHARE = 0.5  # share of a layer's experts expected in a sweep, up to which they are loaded on demand
_HELD_VECTORS = 4  # hidden-size vectors per token held while experts are loaded: residual, its norm and their casts
RECORD_READ = 128 << 10  # bytes of a read of records; as in flash.reader


def part_of(room: int) -> int:
    """Return how many neurons are read together if tokens use more than there is room for: few, so that others stay in
    memory, but enough for the requests that a disk answers together."""
    return max(room // 8, min(RECORD_READERS, room // 2))


@dataclass(frozen=True)
class Use:
    """How a block's neurons are used. `rows` is the number of tokens of a gpu_batch, each of another sequence."""

    block: NeuronFacts

    def used(self, rows: Array) -> Array:
        """Return the share of the neurons that the tokens of a gpu_batch use together."""
        return self._together(self._successive(np.ones(1)), rows)

    def missing(self, rows: Array, room: float) -> Array:
        """Return the share of the neurons that a gpu_batch reads, with neurons of the last gpu_batches in memory.

        Args:
            rows: tokens of the gpu_batch.
            room: share of the neurons that the memory has room for.
        """
        if room >= 1:
            return np.zeros(np.shape(rows))
        ages, each = np.arange(_MOST_AGE + 1, dtype=float), np.atleast_1d(rows)
        shares, found, held = _curve(self.block), [], int(room * self.block.neurons)
        kept = (held - 2 * part_of(held)) / self.block.neurons  # if tokens use more; see `Arena.overlapping`
        for count in each:
            together = self._together(shares, count)
            k = float(np.interp(room, together, ages))
            new = float(np.interp(k + 1, ages, together) - np.interp(k, ages, together))
            found.append(new if self.block.experts or k >= 1 else max(new, float(together[1]) - kept))
        return np.array(found).reshape(np.shape(rows))

    def _successive(self, ages: Array) -> Array:
        """Return the share of the neurons that this many successive tokens of a sequence use together."""
        known = self.block.reuse
        if len(known) < 2:
            first = known[0] if known else ASSUMED_ACTIVE
            return np.minimum(_CERTAIN, first * ages**ASSUMED_REUSE)
        last, before = known[-1], known[-2]
        n = len(known)
        power = np.log(last / before) / np.log(n / (n - 1)) if before > 0 else 0.0
        beyond = last * (np.maximum(ages, 1) / n) ** power
        inside = np.interp(ages, np.arange(n + 1), (0.0, *known))
        return np.minimum(_CERTAIN, np.where(ages <= n, inside, beyond))

    def _together(self, shares: Array, rows: Array) -> Array:
        """Return the share that `rows` sequences use together, of which each uses `shares`."""
        unions, exponent = np.minimum(self.block.unions, _CERTAIN), np.asarray(rows, dtype=float)
        if len(unions) >= 2 and unions[0] > 0:
            exponents = np.log1p(-unions) / np.log1p(-unions[0])
            inside = np.interp(rows, np.arange(len(unions) + 1), (0.0, *exponents))
            exponent = np.where(exponent > len(unions), exponents[-1] * exponent / len(unions), inside)
        return np.asarray(1 - (1 - shares) ** exponent)


def terms(data: Sweeping, prompt: float) -> Iterator[Term]:
    """Yield the seconds of all blocks by sweep. The device waits for the reads, so they count as its own.

    Args:
        prompt: tokens of a full gpu_batch of prompts. A gpu_batch of prompts uses all neurons, and reads them.
    """
    hardware, policy, sweeps = data.hardware, data.policy, data.sweeps
    for block, layers, share in _shares(data.model, policy):
        reading, computing = _passes(block, share, hardware, sweeps, prompt)
        decoding = _decoding(block, share, hardware, policy, sweeps)
        yield Term("device", "", "", layers * (decoding + np.maximum(reading, computing)))


def waits(model: ModelFacts, hardware: Hardware, policy: Policy, sweeps: Profile, prompt: float) -> Array:
    """Return the seconds by sweep that the device waits for the records of prompts. prompt: as in `terms`."""
    total = np.zeros(sweeps.times.shape)
    for block, layers, share in _shares(model, policy):
        reading, computing = _passes(block, share, hardware, sweeps, prompt)
        total = total + layers * np.maximum(0.0, reading - computing)
    return total


def _shares(model: ModelFacts, policy: Policy) -> Iterator[tuple[NeuronFacts, int, float]]:
    """Yield each different block, the number of its layers, and the share of its neurons that have room in memory."""
    room = dict(zip(model.blocks, rooms(model.blocks, policy.neurons), strict=True))
    for block, layers in _grouped(model.blocks).items():
        yield block, layers, room[block] / block.neurons


@lru_cache(maxsize=1024)
def rooms(blocks: tuple[NeuronFacts | None, ...], share: float) -> tuple[int, ...]:
    """Return, by layer, the number of neurons that memory has room for; 0 for a layer without a block.

    Args:
        share: of the bytes of all neurons. Each block has room for `NeuronFacts.least` at least.
    """
    if not (kinds := _grouped(blocks)):
        return (0,) * len(blocks)
    budget = share * sum(layers * block.neurons * block.record for block, layers in kinds.items())
    # By block: neurons of the last 0, 1, 2, ... tokens, and at last all neurons.
    rising = {
        block: np.append(np.clip(np.ceil(_curve(block) * block.neurons), block.least, block.neurons), block.neurons)
        for block in kinds
    }
    totals = np.sum([kinds[block] * block.record * rising[block] for block in kinds], axis=0)
    k = min(max(0, int(np.searchsorted(totals, budget, side="right")) - 1), len(totals) - 2)
    part = float(np.clip((budget - totals[k]) / max(1.0, totals[k + 1] - totals[k]), 0.0, 1.0))
    each = {block: int(n[k] + part * (n[k + 1] - n[k])) for block, n in rising.items()}
    return tuple(0 if block is None else each[block] for block in blocks)


@lru_cache(maxsize=256)
def _curve(block: NeuronFacts) -> Array:
    """Return the share of the neurons that 0, 1, 2, ... successive tokens use together."""
    return Use(block)._successive(np.arange(_MOST_AGE + 1, dtype=float))


def _decoding(block: NeuronFacts, room: float, hardware: Hardware, policy: Policy, sweeps: Profile) -> Array:
    """Return the seconds by sweep of one layer's block, of whose neurons the share `room` has room in memory, for
    decoding sequences."""
    rates, use, nbytes = rates_of(hardware, block), Use(block), float(block.neurons * block.record)
    batches = np.ceil(sweeps.decoding / policy.gpu_batch_size - 1e-9)
    rows = np.where(batches > 0, sweeps.decoding / np.maximum(batches, 1), 0.0)
    used = use.used(rows)
    missing = use.missing(rows, room)
    part = part_of(int(room * block.neurons)) / block.neurons
    together = np.where(used > room, np.minimum(missing, part), missing) * block.neurons  # records of one read
    read = missing * block.neurons * block.read_bytes / values_at(rates["read"], np.maximum(1.0, together))
    computed = used * nbytes * _per_byte(rates["some"], rows)
    return np.asarray(np.where(batches > 0, batches * (read + computed + block.guess / hardware.elementwise), 0.0))


def _passes(block: NeuronFacts, room: float, hardware: Hardware, sweeps: Profile, prompt: float) -> tuple[Array, Array]:
    """Return the seconds by sweep of one layer's block for prompts: with reads, and as if all records were in memory.
    If all have room, the first gpu_batch reads each record before it is computed, and later ones read none. Other
    arguments as in `_decoding` and `terms`."""
    rates = rates_of(hardware, block)
    # Sweeps with few prompts have smaller gpu_batches, but one at least.
    batches = np.maximum(sweeps.prompt / prompt, np.minimum(sweeps.entering, 1.0) * (sweeps.prompt > 0))
    tokens = sweeps.prompt / np.where(batches > 0, batches, 1.0)
    multiplied = tokens * block.reuse[0] if block.experts else tokens  # tokens of a neuron
    stored = block.neurons * block.read_bytes
    computing = batches * block.neurons * block.record * _per_byte(rates["all"], multiplied)
    if room < 1:
        return batches * stored * _per_byte(rates["all_read"], multiplied), computing
    once = stored / rates["all_read"][0][1]
    return computing + once * (np.arange(len(batches)) == np.argmax(batches > 0)), computing


def _per_byte(rate: Table, tokens: Array) -> Array:
    """Return the seconds per byte. Fewer tokens than were measured take as long as the fewest, as the bytes are read
    from a disk or from memory; for more tokens the seconds grow with their number. rate: (tokens, bytes per second)."""
    return np.asarray(np.maximum(1.0, tokens / rate[-1][0]) / values_at(rate, np.maximum(tokens, 1e-9)))


def rates_of(hardware: Hardware, block: NeuronFacts) -> dict[str, Table]:
    """Return the tables of a block; assumed ones where nothing was measured."""
    matrix = hardware.products.get("float16") or next(iter(hardware.products.values()))
    disk, memory = hardware.checkpoint_read, hardware.elementwise
    one, many = at(disk, block.read_bytes), at(disk, block.read_bytes * block.neurons)
    element = 2.0 * 8 / 16  # FLOP per byte of a 16-bit weight and token
    computing = tuple((rows, flops / (element * rows)) for rows, flops in matrix)
    smaller = block.read_bytes / block.record
    assumed: dict[str, Table] = {
        "read": ((1.0, one),),
        "some": ((1.0, memory),),
        "all": computing,
        "all_read": tuple((rows, min(many, smaller * rate)) for rows, rate in computing),
    }
    return {**assumed, **hardware.blocks.get(block.signature, {})}


def reads(model: ModelFacts, policy: Policy, rows: float) -> float:
    """Return the bytes of records that a gpu_batch of decoding sequences reads."""
    held = zip(model.blocks, rooms(model.blocks, policy.neurons), strict=True)
    return sum(float(Use(b).missing(np.asarray(rows), room / b.neurons)) * b.neurons * b.read_bytes
               for b, room in held if b is not None)  # fmt: skip


@lru_cache(maxsize=64)
def _grouped(blocks: tuple[NeuronFacts | None, ...]) -> Counter[NeuronFacts]:
    return Counter(block for block in blocks if block is not None)


def share_of(model: ModelFacts, free: int | None) -> float:
    """Return the largest share of the neurons, in thousandths, whose records fit; None is no limit.

    Args:
        free: bytes that are left if the share is 0. Each block has a few neurons in memory then.
    """
    if free is None or not any(model.blocks):
        return float(any(model.blocks))

    def booked(thousandths: int) -> int:
        held = zip(model.blocks, rooms(model.blocks, thousandths / 1000), strict=True)
        return sum(aligned(room * block.record) for block, room in held if block is not None)

    most = free + booked(0)
    return max(0, bisect_right(range(1001), most, key=booked) - 1) / 1000


def book(layout: Layout, model: ModelFacts, shared: bool) -> None:
    """Book device memory for neurons and their predictors, and RAM for records that are read.

    The workspace has room for masks of the neurons that tokens use.

    Args:
        shared: whether host and device are one memory.

    Raises:
        InvalidInput: the policy has a share of neurons in memory, but none are read on demand.
    """
    if layout.policy.neurons and not any(model.blocks):
        raise InvalidInput(
            f"policy neurons is {layout.policy.neurons}, but no neurons are read on demand; set flash"
            " (--flash), or leave neurons out of the policy"
        )
    place = "device" if shared else "host"
    layout.rooms = rooms(model.blocks, layout.policy.neurons)
    blocks = [block for block in model.blocks if block is not None]
    for block, room in zip(model.blocks, layout.rooms, strict=True):
        if block is None:
            continue
        if not block.experts:
            layout.book("device", NEURONS, aligned(room * block.record))
        layout.book("device", PREDICTORS, aligned(block.predictor))
    for record, rows in expert_rows(model, layout.rooms).items():
        layout.book("device", NEURONS, aligned(rows * record))
    if records := [block.record for block in blocks if not block.experts]:
        readers = aligned(RECORD_READERS * (max(RECORD_READ, *records) + 2 * ALIGN))
        layout.book(place, RECORDS, 2 * STREAMED + readers)
        # A GPU computes, or puts into rows, copies of the records that were read.
        layout.book("device", RECORDS, decoded_bytes(blocks) + STREAMED * model.gpu)
    if experts_read := [block.read_bytes for block in blocks if block.experts]:
        layout.book(place, RECORDS, SHORT_READ + 2 * ALIGN + EXPERT_STAGES * model.gpu * aligned(max(experts_read)))


def decoded_bytes(blocks: Iterable[NeuronFacts]) -> int:
    """Return the bytes of the decoded vectors of one buffer of records."""
    return max((aligned(STREAMED // block.record * block.decoded) for block in blocks), default=0)


def expert_rows(model: ModelFacts, held: Sequence[int]) -> dict[int, int]:
    """Return, by bytes of an expert, the rows of memory for all layers with such experts.

    Without a GPU, experts are read early to spare rows, which belong to no layer; none if all experts fit.

    Args:
        held: by layer, the number of neurons that memory has room for.
    """
    rows, spare = dict[int, int](), 0
    for block, room in zip(model.blocks, held, strict=True):
        if block is not None and block.experts:
            rows[block.record] = rows.get(block.record, 0) + room
            spare = EXPERT_SPARES if room < block.neurons and not model.gpu else spare
    return {record: count + spare for record, count in rows.items()}


def experts_share(active: int, experts: int, tokens: float | Array) -> Array:
    """Return the expected share of a layer's experts that `tokens` tokens choose."""
    return np.asarray(1 - (1 - min(1.0, active / experts)) ** tokens)


def most_tokens(model: ModelFacts) -> int:
    """Return the most tokens of a sweep that loads experts on demand; 0 if no sweep does."""
    experts = _fewest_experts(model)
    if not 0 < model.active < experts:
        return 0
    return int(math.log(1 - MAX_CHOSEN_SHARE) / math.log(1 - model.active / experts) + 1e-9)


def with_experts(demand: Demand, model: ModelFacts, homes: Mapping[str, str]) -> Demand:
    """Return the weights that a program loads by rows, with the experts that are off the device.

    Args:
        demand: the same without experts.
        homes: tier of every tensor by name.
    """

    def of(layer: tuple[TensorFact, ...], experts: bool) -> tuple[str, ...]:
        return off_device({homes[t.name] for t in layer if bool(t.experts) == experts})

    experts, others = (tuple(of(layer, only) for layer in model.layers) for only in (True, False))
    return replace(demand, experts=experts, others=others, most_tokens=most_tokens(model))


def book_experts(layout: Layout, model: ModelFacts, tokens: int) -> None:
    """Book the device bytes that forward passes hold while their experts are loaded: of each token its hidden states,
    and scores, shares and ids of its experts. tokens: most of a sweep."""
    if all(layout.homes[t.name] == "device" for t in model.experts):
        return
    experts = max(t.experts for t in model.experts)
    token = _HELD_VECTORS * model.hidden_bytes + 3 * 4 * experts + 2 * 8 * model.active
    layout.book("device", "paused forwards", aligned(min(tokens, most_tokens(model)) * token))


def unused_experts(model: ModelFacts, tokens: Array) -> Array:
    """Return, by tokens of a sweep, the expected bytes of experts that it does not load, if all are off the device."""
    total = sum(t.stored_bytes for t in model.experts)
    unchosen = 1 - experts_share(model.active, _fewest_experts(model), tokens)
    return np.where(tokens <= most_tokens(model), total * unchosen, 0.0)


def _fewest_experts(model: ModelFacts) -> int:
    """Return the number of experts of the layer that has the fewest; 0 if none has any."""
    return min((t.experts for t in model.experts), default=0)
