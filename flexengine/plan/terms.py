"""Terms of the cost model: bytes or seconds of one lane in every sweep.

If a term's data may be on several tiers, the term is proportional to one fraction, such as "cache@disk". Rules:

weights        Each layer, and the head, crosses the lanes from its tier once per sweep. Small sweeps leave out the
               experts that no token chose (`plan.neurons`).
KV cache       Whole pages are loaded before a layer computes, and changed pages are stored after. If pages are in host
               RAM, a decode step stores only its token.
delegated      Queries, keys and values of decoding sequences are copied to the place that computes attention, and the
               output is copied back. Only pages of continued prompts are loaded to the device; pages of decoding
               sequences on a disk are read and written, but cross no link. If queries go first to attention workers,
               there are two copies, tasks and questions. Pages that the device attends to cross the link after the
               answers of others: see `plan.delegation.pages_after_answers`.
hidden states  Between two layers, hidden states cross the lanes once in each direction.
chosen values  The device waits for these loads: see `plan.delegation`.
prompts        A gpu_batch of prompts computes longer than those that decode, and few of these are loaded ahead of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from flexengine.places import DEVICE, TIERS, Routes, lane_of, place_of
from flexengine.plan import guest
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.profile import Profile
from flexengine.plan.rates import Rates
from flexengine.plan.sizes import SCORED_ROWS, Array, LayerPages
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.schedule.batches import form_batches, split_prompt
from flexengine.schedule.frame import num_buffers

PAST_SHARE = 2 / 3  # share of a prompt cached before a later piece, averaged over its (query, key) pairs
SAMPLE_PROMPTS = 256  # most prompts of which gpu_batches are formed to estimate the mean
LANES = ("device", "h2d", "d2h", "disk_read", "disk_write")  # of every machine
BESIDE_PROMPTS = "beside prompts"  # ends the names of bounds that are no lanes
WEIGHTS, CACHE, HIDDEN = "weights", "cache", "hidden"
KINDS = {WEIGHTS: "weights", CACHE: "cache", HIDDEN: "hidden states"}  # kinds of data, and their names in messages
Lanes = dict[str, dict[str, Array]]  # lane -> fraction, or "" for none -> seconds by sweep


def fraction(kind: str, place: str) -> str:
    """Return the name of the fraction of a kind of data on a place, such as "weights@disk"."""
    return f"{kind}@{place}"


def kind_of(name: str) -> str:
    """Return the kind of data of a fraction."""
    return name.partition("@")[0]


@lru_cache
def fractions(places: tuple[str, ...] = TIERS) -> tuple[str, ...]:
    """Return the names of all fractions on a list of places: those of the weights, then of the other kinds."""
    return tuple(fraction(kind, place) for kind in KINDS for place in places)


@dataclass(frozen=True)
class PromptBatches:
    """Means of gpu_batches that hold prompts alone."""

    prompt: float  # tokens of a prompt
    batch: float  # tokens of a gpu_batch
    token_seconds: tuple[float, float]  # seconds of all layers per token: of streamed weights, of resident ones
    token_batches: float  # gpu_batches per token
    past: float  # tokens cached before a piece that is not a prompt's first

    @staticmethod
    def of(workload: Workload, rates: Rates, policy: Policy, prompt: float) -> "PromptBatches":
        """Return the means over a sample of the workload's prompts. prompt: mean computed tokens of a prompt."""
        rng, max_tokens = np.random.default_rng(0), policy.prefill_tokens
        sizes = sorted(workload.sizes.items())
        counts = np.array([count for _, count in sizes], dtype=float)
        sample = rng.choice(len(sizes), min(SAMPLE_PROMPTS, workload.count), p=counts / counts.sum())
        spared = [int(workload.spared.get(sizes[k][0], 0.0)) for k in sample]
        pieces = [
            p
            for i, (k, shared) in enumerate(zip(sample, spared, strict=True))
            for p in split_prompt(i, shared, sizes[k][0][0] - shared, max_tokens)
        ]
        batches = form_batches(pieces, policy.gpu_batch_size, max_tokens)
        tokens = np.array([sum(p.count for p in batch) for batch in batches], dtype=float)
        total = tokens.sum()
        streamed, resident = (float(rates.stack(tokens, share).sum() / total) for share in (0.0, 1.0))
        past = float(np.mean(spared)) or PAST_SHARE * prompt
        return PromptBatches(max(1e-9, prompt), float(tokens.mean()), (streamed, resident), len(batches) / total, past)

    def seconds(self, resident: float) -> float:
        """Return the seconds of all layers per token. resident: share of the weights that stay on the device."""
        return (1 - resident) * self.token_seconds[0] + resident * self.token_seconds[1]


def formed(
    policy: Policy, sweeps: Profile, prompts: PromptBatches, home: str, share: float
) -> tuple[Array, Array, Array, Array]:
    """Return by sweep what the gpu_batches with KV cache on a place hold: the number of full ones, the sequences in the
    last one that decodes, the prompt tokens that join it, and those in gpu_batches of their own. share: of the
    sequences, that have their cache there."""
    decoding, prompt, g = sweeps.decoding * share, sweeps.prompt * share, policy.gpu_batch_size
    full = np.floor(decoding / g + 1e-9)
    # If prompts are too few for a gpu_batch of their own, they join the last decoding gpu_batch. Sequences whose
    # attention is delegated share no gpu_batch with prompts.
    joins_decode = (prompt < prompts.batch) & (policy.attends(home) == DEVICE)
    apart = np.where(joins_decode, 0, prompt)
    return full, decoding - g * full, prompt - apart, apart


def parts(
    rates: Rates, policy: Policy, sweeps: Profile, prompts: PromptBatches, split: Mapping[str, float], chunks: int
) -> dict[str, Array]:
    """Return the seconds of the device lane by kind of work and sweep.

    Args:
        split: by place, share of the sequences whose cache is there. A gpu_batch holds sequences of one place.
        chunks: number of head chunks if the head is streamed.
    """
    hardware, g = rates.hardware, policy.gpu_batch_size
    units = len(rates.model.layers) + (chunks if policy.weights[0] < 1 else 1)
    whole = policy.weights[0] == policy.cache[0] == policy.activations[0] == 1
    fused = whole and bool(rates.joined)  # as `worker.weights.JoinedLayers` joins them
    stack, calls = (rates.fused, 0.0) if fused else (partial(rates.stack, resident=policy.weights[0]), rates.calls)
    full_layers, full_head = float(stack(g)), float(rates.head(g))
    prompt_head = rates.head(min(g, prompts.batch / prompts.prompt))
    layers = head = cells = called = np.zeros(sweeps.times.shape)
    for home, share in ((home, share) for home, share in split.items() if share > 0):
        full, rest, joined, apart = formed(policy, sweeps, prompts, home, share)
        layers = layers + full * full_layers + stack(rest + joined) + apart * prompts.seconds(policy.weights[0])
        head = head + full * full_head + rates.head(rest + joined / prompts.prompt)
        head = head + apart * prompts.token_batches * prompt_head
        decoding, prompting = full + (rest > 0), apart * prompts.token_batches
        cells = cells + decoding + prompting
        called = called + decoding * calls + prompting * rates.calls
    head = head + sweeps.logits * float(rates.head(SCORED_ROWS)) / SCORED_ROWS
    fresh = np.zeros(sweeps.times.shape)
    for window, count in rates.windows.items():
        read, attention = rates.model.most_read(window), rates.attention[window]
        late = sweeps.late[read]
        seconds = attention.prompt(sweeps.pairs[read] - late, min(prompts.prompt, policy.prefill_tokens))
        fresh = fresh + count * (seconds + attention.prompt(late, prompts.past, "continued"))
    return {
        "bookkeeping": hardware.sweep_seconds + hardware.sequence_seconds * sweeps.live,
        "layers": layers, "head": head, "calls": called, "tasks": cells * units * hardware.task_seconds,
        "prompt attention": fresh, "decode attention": decode_attention(rates, sweeps),
    }  # fmt: skip


def decode_attention(rates: Rates, sweeps: Profile, place: str = "device") -> Array:
    """Return the seconds by sweep of decode attention in all layers. place: place that computes all of it."""
    length = sweeps.cached[None] / np.maximum(sweeps.decoding, 1e-9)
    total = np.zeros(sweeps.times.shape)
    for window, layers in rates.windows.items():
        read = rates.model.most_read(window)
        seen = length if read is None else np.minimum(length, read)
        total = total + layers * rates.attention[window].decode(sweeps.cached[read], seen, place)
    return total


class Term(NamedTuple):
    """Seconds of a lane."""

    lane: str  # name of the lane, such as "h2d"
    kind: str  # kind of data; "" if the seconds do not depend on a placement
    place: str  # tier of the data between uses; "" as above
    seconds: Any  # seconds if all data of the kind is on this tier; float, or array by sweep


def by_lane(terms: Iterable[Term], among: Iterable[str] = LANES) -> Lanes:
    """Return the seconds of each lane and fraction. among: lanes that are in the result even without work."""
    lanes: Lanes = {lane: {} for lane in among}
    for term in terms:
        name, sums = fraction(term.kind, term.place) if term.kind else "", lanes.setdefault(term.lane, {})
        sums[name] = np.asarray(sums[name] + term.seconds if name in sums else term.seconds)
    return lanes


def routes(hardware: Hardware) -> Routes:
    """Return the lanes between each tier and the device."""
    return Routes.between(hardware.places, staged=not hardware.shared)


def page_transfer(hardware: Hardware, lane: str, page: float, pages: float, neighbours: float) -> float:
    """Return the bytes of one transfer of KV pages.

    A disk moves neighbouring pages together, and a GPU copies page by page. A simulated link makes a gpu_batch wait
    once for all its pages.

    Args:
        page: bytes of a page.
        pages: pages of one gpu_batch in one layer.
        neighbours: those of them that lie together.
    """
    if lane_of(lane).of_disk:
        return page * max(1.0, neighbours)
    return page if hardware.gpu else page * max(1.0, pages)


def waits_for_prompts(
    work: Lanes, last: Iterable[str], rates: Rates, policy: Policy, sweeps: Profile, prompts: PromptBatches,
    split: Mapping[str, float],
) -> Iterator[Term]:  # fmt: skip
    """Yield, for each lane that loads to the device, a lower bound of a sweep in which some rows enter and others
    decode: seconds of the prompts, of the weights, and of the KV pages that are not loaded beside the prompts.

    While prompts are computed, the lane loads the pages of as many other gpu_batches as there are buffers, and waits
    then. The next layer's weights are loaded beside few of this layer's pages. There is no such bound if the buffers
    suffice for all gpu_batches. The linear program does not know it, as it takes all KV cache to be on the device.

    Args:
        work: seconds by lane and fraction.
        last: the lanes.
    """
    decoding = prompting = seconds = np.zeros(sweeps.times.shape)
    away = 0.0  # share of the sequences whose pages are loaded when they decode
    for home, share in ((home, share) for home, share in split.items() if share > 0):
        full, rest, joined, apart = formed(policy, sweeps, prompts, home, share)
        decoding = decoding + full + (rest > 0)
        prompting = prompting + (apart + joined) * prompts.token_batches
        more = rates.stack(rest + joined, policy.weights[0]) - rates.stack(rest, policy.weights[0])
        seconds = seconds + apart * prompts.seconds(policy.weights[0]) + more
        away += share if home != DEVICE and policy.attends(home) == DEVICE else 0.0
    ahead = num_buffers(policy.slots) / np.maximum(away * decoding, 1e-9)  # share of the gpu_batches
    limits = np.where((ahead < 1) & (prompting > 0), 1.0, 0.0)
    factors = {WEIGHTS: limits, CACHE: limits * (1 - np.minimum(prompting, 1.0) * ahead)}
    for lane in last if limits.any() else ():
        yield Term(f"{lane} {BESIDE_PROMPTS}", "", "", limits * seconds)
        for name, by in work[lane].items():
            if (kind := kind_of(name)) in factors:
                yield Term(f"{lane} {BESIDE_PROMPTS}", kind, name.partition("@")[2], factors[kind] * by)


@dataclass(frozen=True)
class Sweeping:
    """Terms of the data that a policy moves.

    Attributes:
        pages: KV pages of each group of layers.
        neighbours: sequences of a gpu_batch whose pages off the device lie together.
    """

    model: ModelFacts
    hardware: Hardware
    policy: Policy
    sweeps: Profile
    pages: tuple[LayerPages, ...]
    rates: Rates
    neighbours: int = 1

    def move(self, lane: str, kind: str, place: str, nbytes: Any, transfer: float) -> Term:
        """Return the term of bytes that cross a lane.

        Args:
            nbytes: bytes if all data of the kind is on this place; float, or array by sweep.
            transfer: bytes of one transfer.
        """
        seconds = self.hardware.link_seconds(lane, nbytes, transfer, weights=kind == WEIGHTS)
        if kind == WEIGHTS and lane == "disk_read":
            seconds = seconds * self.rates.streaming.get("read", 1.0)
        return Term(lane, kind, place, seconds)

    def weights(self, streamed_bytes: float, reads: Mapping[str, float], read: float) -> Iterator[Term]:
        """Yield the terms of the weights.

        Args:
            streamed_bytes: bytes of all layers and the head.
            reads: by tier, bytes of a layer's weights that are read together.
            read: the same for tiers that `reads` does not have.
        """
        tokens = self.sweeps.prompt + self.sweeps.decoding
        nbytes = np.full(tokens.shape, float(streamed_bytes))
        if self.model.experts:
            nbytes = nbytes - guest("neurons").unused_experts(self.model, tokens)
        for place, lanes in routes(self.hardware).load.items():
            for lane in lanes:
                yield self.move(lane, WEIGHTS, place, nbytes, reads.get(place, read))

    def hidden(self) -> Iterator[Term]:
        """Yield the terms of the hidden states."""
        model, sweeps = self.model, self.sweeps
        token = model.hidden_bytes
        nbytes = (sweeps.prompt + sweeps.decoding) * token * max(0, len(model.layers) - 1)
        way = routes(self.hardware)
        for place in way.load:
            for lane in (*way.load[place], *way.store[place]):
                yield self.move(lane, HIDDEN, place, nbytes, self.policy.gpu_batch_size * token)

    def cache(self) -> Iterator[Term]:
        """Yield the terms of the KV cache."""
        model, sweeps, gpu_batch = self.model, self.sweeps, self.policy.gpu_batch_size
        token, way = model.kv_token * len(model.layers), routes(self.hardware)
        coming = sweeps.loaded
        if model.topk is not None:
            coming = sweeps.prompt_loaded + guest("delegation").chosen_tokens(self)[0]
        for place in way.load:
            delegated = self.policy.attends(place) != "device"
            loaded = sweeps.prompt_loaded if delegated else coming
            stored = sweeps.prompt_stored if delegated or place == "host" else sweeps.stored
            read, written = (sweeps.loaded, sweeps.stored) if delegated and place_of(place).disk else (loaded, stored)
            token_bytes = token
            if place_of(place).worker:
                token_bytes *= guest("delegation").Crossing.of(model, self.hardware, self.policy, place).pages
            for lanes, there, crossing in ((way.load[place], read, loaded), (way.store[place], written, stored)):
                for lane in lanes:
                    tokens = there if lane_of(lane).of_disk else crossing
                    page = self.page_tokens * model.kv_token
                    transfer = page_transfer(self.hardware, lane, page, gpu_batch, self.neighbours)
                    yield self.move(lane, CACHE, place, tokens * token_bytes, transfer)
            if place == "host" and not delegated:
                single = np.maximum(sweeps.stored - sweeps.prompt_stored, 0.0) / self.page_tokens
                for lane in way.store[place]:
                    kept = model.kv_token * len(model.attended) + sum(model.states)  # no record is stored in part
                    yield self.move(lane, CACHE, place, single * kept, gpu_batch * model.kv_token)

    @property
    def page_tokens(self) -> float:
        """Tokens of a KV page off the device, averaged over layers; above 0 also for layers without pages."""
        return max(1e-9, sum(group.layers * group.away.page_tokens for group in self.pages))


def embedding(model: ModelFacts, hardware: Hardware, sweeps: Profile, layout: Layout | None) -> Iterator[Term]:
    """Yield the seconds of reading embedding rows, if the table is on disk."""
    t = model.embedding
    if t is None or layout is None or not (disk := place_of(layout.homes[t.name])).disk:
        return
    row = t.stored_bytes / model.vocabulary * t.rows_together  # bytes that are read for one row
    tokens = np.minimum(sweeps.prompt + sweeps.decoding, model.vocabulary)
    lane = disk.lanes[0]
    read = max(row, hardware.weight_rates(lane)[0][0])  # a read shorter than the shortest measured one takes as long
    yield Term(lane, "", "", hardware.link_seconds(lane, tokens * read, read, weights=True))
