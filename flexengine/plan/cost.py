"""Seconds and bytes of a job before it runs: per lane, per sweep, as functions of model, machine, workload and policy.

This is FlexGen's cost model (paper section 4.3, appendix A.2) with these changes. Sizes come from the model's config.
With two slots, transfers overlap compute, but for pages that wait for prompts (`terms.waits_for_prompts`); FlexGen's
release adds the upload of weights. Activations of decode steps have one token. The disk's rate is measured at the size
of the transfers. Sweeps are those of the real workload (`profile`), not n equal ones. Lanes that share cores slow each
other (`Hardware.crosstalk`).

The seconds of a lane in a sweep are a sum of terms (`terms`, `compute`), linear in the fractions of weights, KV cache
and hidden states on each tier. In the linear program the fractions are variables. A layout has rounded fractions. Both
use the same terms.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, TypeVar, cast

import numpy as np

from flexengine.errors import OutOfMemory
from flexengine.places import lane_of, place_of, workers_in_memory
from flexengine.plan import guest
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.loading import reading, touched
from flexengine.plan.profile import Profile, Unit, Walk, never_waits, summed, unit, walk
from flexengine.plan.rates import Rates
from flexengine.plan.sizes import PAGE_TOKENS, Array, layer_pages
from flexengine.plan.terms import (
    BESIDE_PROMPTS,
    CACHE,
    HIDDEN,
    WEIGHTS,
    Lanes,
    PromptBatches,
    Sweeping,
    Term,
    by_lane,
    embedding,
    fraction,
    parts,
    routes,
    waits_for_prompts,
)
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.schedule.place import cache_homes, count_by_tier

Fractions = Mapping[str, Any]  # floats, or arrays by sweep
Talk = Mapping[str, Mapping[str, float]]  # as `Hardware.crosstalk`
T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, tokens and lanes of a job under a policy."""

    policy: Policy
    layout: Layout
    seconds: float  # seconds of the whole job without `load_seconds`
    load_seconds: float  # by which the first sweep is longer because resident weights are read in it
    latency: float  # mean seconds from a row's entry to its end
    first: float  # seconds from the start to the first end of a row
    at_stake: float  # most seconds without an end of a row, over those of the job
    rows: int  # number of rows of the job
    tokens: int  # number of generated tokens
    alive: float  # sequences in a mean sweep
    counts: dict[str, float]  # number of sweeps by kind ("prefill": sequences enter, "decode": none does)
    sweep_seconds: dict[str, float]  # seconds of a mean sweep by kind
    lanes: dict[str, dict[str, float]]  # seconds of work in a mean sweep, by kind and lane
    busy: dict[str, float]  # seconds of work of the whole job, by lane
    fractions: dict[str, float] = field(default_factory=dict)  # realised fractions, by names such as "cache@disk"

    def shares(self, kind: str) -> dict[str, float]:
        """Return the realised fractions of a kind of data by place."""
        return {place: self.fractions.get(fraction(kind, place), 0.0) for place in self.layout.places}

    @property
    def tok_s(self) -> float:
        """Return the generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def total_seconds(self) -> float:
        """Return the seconds from the start to the last row. The search minimises this number."""
        return self.seconds + self.load_seconds

    @property
    def bottleneck(self) -> str:
        """Return the lane with the most seconds of work. Lanes of one link count together."""
        return busiest(self.busy)


def busiest(lanes: Mapping[str, float]) -> str:
    """Return the lane with the most seconds of work, of seconds by lane. Lanes of one link count together."""
    links: dict[str, float] = {}
    for lane, seconds in lanes.items():
        link = lane_of(lane).link
        links[link] = links.get(link, 0.0) + seconds
    return max(lanes, key=lambda lane: (links[lane_of(lane).link], lanes[lane]))


def _once(method: Callable[..., T]) -> Callable[..., T]:
    """Keep the results of a method of `Cost` by arguments."""

    def call(cost: "Cost", *args: Any) -> T:
        key = method.__name__, *args
        if key not in cost._kept:
            cost._kept[key] = method(cost, *args)
        return cast(T, cost._kept[key])

    return call


class Cost:
    """Seconds of policies for one model, machine and workload. Results that several policies share are cached.

    Args:
        overlap: whether lanes work at the same time if a policy has two slots; else one task runs at a time.
        cohorts: parts of the block that have sweeps of their own, each with streamed weights. A sweep of a prediction
            is then one of each cohort.
    """

    def __init__(
        self, model: ModelFacts, hardware: Hardware, workload: Workload, overlap: bool = True, cohorts: int = 1
    ) -> None:
        self.model, self.hardware, self.workload, self.overlap = model, hardware, workload, overlap
        self.cohorts = cohorts
        self.rates = Rates.of(model, hardware)
        self.crosstalk = self.rates.crosstalk
        read = map(model.most_read, self.rates.windows)
        self.windows = frozenset(w for w in (*self.rates.windows, *read) if w is not None)
        self.pages = layer_pages(model, workload.longest)
        self.tokens = sum(n * times for (_, n), times in workload.sizes.items())
        spared = workload.spared
        ends = sum(
            max(1.0, self._held(p + n - 1) - spared.get((p, n), 0.0)) * times
            for (p, n), times in workload.sizes.items()
        )
        self.mean_peak = max(1.0, ends / max(1, workload.count))  # cached tokens of an average sequence at its end
        streamed = [sum(t.stored_bytes for t in layer) for layer in model.layers]
        head = model.output.stored_bytes if model.output else 0
        self.unit_bytes = max(streamed)
        self.head_chunks = -(-head // self.unit_bytes)  # a chunk fits into a slot, which has the size of a layer
        self.streamed_bytes = sum(streamed) + head
        self._kept: dict[tuple[Any, ...], Any] = {}  # results of `_once`

    # Sweeps of the job.

    def _held(self, tokens: int) -> float:
        """Return the number of a sequence's tokens that stay cached, averaged over layers."""
        pools = ((group.layers, group.device) for group in self.pages)
        most = ((layers, pool.held(tokens) * pool.page_tokens, pool.is_record) for layers, pool in pools)
        return sum(layers * (held if whole else min(tokens, held)) for layers, held, whole in most)

    def sweeps(self, policy: Policy, room: float = np.inf, share: float = 0.0) -> Profile:
        """Return the job's sweeps.

        Args:
            policy: only its block shape, schedule and prefill_tokens matter.
            room: tokens of all pages.
            share: fraction of the sequences whose KV cache has the pages of places off the device. Attention workers
                have those of the device.
        """
        shape = (policy.gpu_batch_size, policy.num_gpu_batches)
        return self._profile(policy.prefill_tokens, share, policy.schedule, shape, room)

    def peak(self, policy: Policy, share: float = 0.0) -> float:
        """Return the most page tokens that the job holds if memory has no limit. share: as in `sweeps`."""
        shape = (policy.gpu_batch_size, policy.num_gpu_batches)
        return self._walk(policy.schedule, shape).peak(self._unit(policy.prefill_tokens, share, self._sharing(shape)))

    @_once
    def _profile(
        self, prefill_tokens: int, share: float, schedule: str, shape: tuple[int, int], room: float
    ) -> Profile:
        each, rows = self._unit(prefill_tokens, share, self._sharing(shape)), max(1, self.workload.count)
        walked = self._walk(schedule, shape) if never_waits(each, rows, schedule, shape, room) else None
        return summed(each, walked or walk(each, rows, schedule, shape, room), rows)

    @_once
    def _walk(self, schedule: str, shape: tuple[int, int]) -> Walk:
        each = self._unit(PAGE_TOKENS, 0.0, 1)  # without limits, the result does not depend on page size and share
        return walk(each, max(1, self.workload.count), schedule, shape)

    @_once
    def _unit(self, prefill_tokens: int, share: float, batch: int) -> Unit:
        return unit(self.workload, prefill_tokens, self.pages, share, batch, self.windows)

    def _sharing(self, shape: tuple[int, int]) -> int:
        """Return the sequences that may share a load of pages. shape: sequences of a gpu_batch, gpu_batches."""
        return shape[0] if self.workload.stems else 1  # 1: one unit for all shapes

    @_once
    def _prompt(self, gpu_batch_size: int, prefill_tokens: int) -> PromptBatches:
        policy = Policy(gpu_batch_size, 1, prefill_tokens=prefill_tokens)
        return PromptBatches.of(self.workload, self.rates, policy, float(self._unit(prefill_tokens, 0.0, 1).prompt))

    # Seconds by lane.

    def lanes(self, policy: Policy, sweeps: Profile, split: Mapping[str, float], layout: Layout | None = None) -> Lanes:
        """Return seconds by lane, fraction and sweep, also of `waits_for_prompts`. Arguments as in `terms`."""
        lanes = by_lane(self.terms(policy, sweeps, split, layout))
        if self.overlaps(policy):
            prompts = self._prompt(policy.gpu_batch_size, policy.prefill_tokens)
            last = {lanes[-1] for lanes in routes(self.hardware).load.values() if lanes}
            lanes |= by_lane(waits_for_prompts(lanes, last, self.rates, policy, sweeps, prompts, split), ())
            if policy.delegates:
                share = guest("delegation").projection_share(self.model, 0)
                bounds = guest("delegation").pages_after_answers(lanes, self.hardware, policy, sweeps, split, share)
                lanes |= by_lane(bounds, ())
            if policy.half_layers:
                lanes |= by_lane(guest("delegation").half_layers(lanes, last, policy, sweeps), ())
        return lanes

    def terms(
        self, policy: Policy, sweeps: Profile, split: Mapping[str, float], layout: Layout | None
    ) -> Iterator[Term]:
        """Yield the terms of a policy's sweeps.

        Args:
            split: by place, fraction of the sequences with KV cache there. A gpu_batch has sequences of one place.
            layout: has the bytes of a layer that are read together; None for the whole layer.
        """
        rates, prompts = self.rates, self._prompt(policy.gpu_batch_size, policy.prefill_tokens)
        for seconds in parts(rates, policy, sweeps, prompts, split, self.head_chunks).values():
            yield Term("device", "", "", seconds)
        yield from embedding(self.model, self.hardware, sweeps, layout)
        if self.model.tables:
            yield from guest("tables").terms(self.model, self.hardware, sweeps)
        data = Sweeping(self.model, self.hardware, policy, sweeps, self.pages, rates, self.neighbours(policy))
        if self.model.blocks:
            yield from guest("neurons").terms(data, prompts.batch)
        for term in data.weights(self.streamed_bytes, layout.layer_reads if layout else {}, self.unit_bytes):
            yield term._replace(seconds=term.seconds * min(self.cohorts, policy.num_gpu_batches))
        if self.model.alone:
            yield from guest("records").terms(data, self.workload.longest)
        yield from data.cache()
        yield from data.hidden()
        if policy.delegates or policy.works:
            yield from guest("delegation").terms(data)
            if self.hardware.engines > 1 and policy.works:
                yield from guest("turns").terms(data, prompts, split)
        if self.model.topk is not None:
            yield from guest("delegation").chosen_terms(data, self.overlaps(policy))

    def neighbours(self, policy: Policy) -> int:
        """Return the sequences of a gpu_batch whose pages lie together: all, if they take all pages at the same time,
        or if all sequences are of one size, so that gpu_batches take pages as wholes; else about one."""
        job = self.workload
        at_once = job.count <= policy.block_size and all(group.away.page_tokens >= job.longest for group in self.pages)
        return policy.gpu_batch_size if (at_once or len(job.sizes) == 1) and not job.stems else 1

    def slowing(self, policy: Policy) -> Talk:
        """Return `crosstalk` under a policy."""
        if not (policy.delegates or policy.works or policy.half_layers):  # most policies of a search
            return self.crosstalk
        rows = max(1, self.workload.count)
        return cast(Talk, guest("delegation").slowing(self.crosstalk, self.hardware, policy, self.model, rows))

    def overlaps(self, policy: Policy) -> bool:
        """Return whether lanes work at the same time under a policy, so that their seconds do not add up."""
        return self.overlap and policy.slots > 1

    def sweep_seconds(self, lanes: Lanes, fractions: Fractions, policy: Policy) -> tuple[Array, dict[str, Array]]:
        """Return the seconds of every sweep, and by lane the seconds of work in every sweep."""
        shares = {"": 1.0, **fractions}
        work = {
            lane: np.asarray(sum(shares.get(name, 0.0) * seconds for name, seconds in by.items()))
            for lane, by in lanes.items()
            if by
        }
        used = {lane: seconds for lane, seconds in work.items() if np.any(seconds > 0)}
        seconds = np.asarray(self._ends(used, policy))
        if not self.overlaps(policy):  # a streamed layer is slower after the idle device has waited for it
            off_device = self.hardware.places[1:]
            streamed = min(1.0, sum(fractions.get(fraction(WEIGHTS, place), 0.0) for place in off_device))
            seconds = seconds + self.rates.streaming.get("wake", 0.0) * len(self.model.layers) * streamed
        return seconds, {lane: x for lane, x in used.items() if not lane.endswith(BESIDE_PROMPTS)}

    def _ends(self, used: Mapping[str, Any], policy: Policy) -> Any:
        return np.max(list(self.slowed(used, policy).values()), axis=0) if self.overlaps(policy) else sum(used.values())

    def slowed(self, used: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
        """Return, by lane, the seconds (floats or arrays) of work and of waits until other lanes end, at the latest."""
        talk, ends = self.slowing(policy), dict(used)
        for lane, other in permutations(used, 2):
            ends[lane] = ends[lane] + talk.get(lane, {}).get(other, 0.0) * used[other]
        if len(used) > 2:
            last = {lane: np.max([ends[other] for other in used if other != lane], axis=0) for lane in used}
            ends = {lane: np.minimum(end, used[lane] + last[lane]) for lane, end in ends.items()}
        return ends

    # Prediction for a layout.

    def of(self, policy: Policy, capacity: Capacity) -> Prediction | None:
        """Return the prediction of a policy; None if it does not fit into the capacity."""
        try:
            return self.predict(lay_out(self.model, policy, self.workload, capacity))
        except OutOfMemory:
            return None

    def predict(self, layout: Layout, missing: float = 1.0) -> Prediction:
        """Return the prediction for a layout.

        Args:
            missing: fraction of the resident weights that is not in memory yet; an earlier job may have read some.
        """
        policy = layout.policy
        split, room = self._split(layout)
        off_device = sum(x for place, x in split.items() if place != "device" and not place_of(place).worker)
        sweeps = self.sweeps(policy, room, round(off_device, 2))
        fractions = self.realised(layout, split)
        seconds, lanes = self.sweep_seconds(self.lanes(policy, sweeps, split, layout), fractions, policy)
        entering = sweeps.prompt > 1e-9
        kinds = {"prefill": np.where(entering, sweeps.times, 0.0), "decode": np.where(entering, 0.0, sweeps.times)}
        counts = {kind: float(times.sum()) for kind, times in kinds.items()}

        def mean(values: Array, kind: str) -> float:
            return float(values @ kinds[kind] / counts[kind]) if counts[kind] else 0.0

        cache, rest = touched(self.hardware, layout, missing)
        first, waits = int(np.argmax(entering)), 0.0
        if self.model.blocks:
            batch = self._prompt(policy.gpu_batch_size, policy.prefill_tokens).batch
            waits = float(guest("neurons").waits(self.model, self.hardware, policy, sweeps, batch)[first])
        read, work = missing * reading(self.hardware, layout), {lane: float(x[first]) for lane, x in lanes.items()}
        loading = self._loading(policy, read, rest, work, waits)
        rows, whole, (stored, gap) = max(1, sweeps.rows), float(seconds @ sweeps.times), sweeps.stores(seconds, loading)
        return Prediction(
            policy=policy, layout=layout, seconds=whole + cache, load_seconds=loading, first=stored,
            at_stake=gap / (whole + loading),
            latency=float((seconds * sweeps.times) @ sweeps.live + loading * sweeps.live[first]) / rows,
            rows=sweeps.rows, tokens=self.tokens,
            alive=float(sweeps.live @ sweeps.times / sweeps.times.sum()), counts=counts,
            sweep_seconds={kind: mean(seconds, kind) for kind in kinds},
            lanes={kind: {lane: mean(x, kind) for lane, x in lanes.items()} for kind in kinds},
            busy={lane: float(x @ sweeps.times) for lane, x in lanes.items()}, fractions=fractions,
        )  # fmt: skip

    def _loading(self, policy: Policy, read: float, faults: float, first: Mapping[str, float], waits: float) -> float:
        """Return the seconds that reading resident weights adds to the first sweep.

        Args:
            read: seconds of the reads.
            faults: seconds of page faults of the weights' RAM.
            first: seconds of work of the first sweep, by lane.
            waits: part of the device's seconds in which it waits for records.
        """
        device, hidden = first.get("device", 0.0), 0.0
        if not self.hardware.gpu:  # page faults take time of the CPU that computes, unless it waits
            hidden = min(faults, waits)  # these take time of the thread that reads
            device += faults - hidden
        read = max(read, hidden)
        if self.overlap and not self.overlaps(policy):  # one slot: lanes take turns, except reads of resident weights
            slowed, alone = self.slowed({"device": device, "disk_read": read}, policy), sum(first.values())
            end = max(alone - first.get("device", 0.0) + slowed["device"], slowed["disk_read"])
            if first.get("disk_read"):  # a layer's read waits for its slot, and delays later reads
                end = max(end, alone + read)
        else:
            disk = first.get("disk_read", 0.0) + read
            end = self._ends({**first, "device": device, "disk_read": disk}, policy)
        return float(max(end, faults) - self._ends(first, policy))

    def _split(self, layout: Layout) -> tuple[dict[str, float], float]:
        """Return by tier the fraction of the sequences with KV cache there, and the tokens of all pages. The device is
        filled first."""
        homes = cache_homes(layout.policy, layout.places)
        live = float(min(layout.policy.block_size, max(1, self.workload.count)))
        room, counts = 0.0, dict.fromkeys(layout.places, 0.0)
        workers, before = workers_in_memory(layout.pools), 0.0
        for tier in layout.pools:
            tokens = layout.room(tier)
            left = live - sum(counts.values())
            if tier in workers:  # sequences enter workers by turns
                before = before or left
                left = min(left, before / len(workers))
            elif place_of(tier).filed:  # it takes what is left of the share of all workers
                left = min(left, homes[tier] - sum(n for place, n in counts.items() if place_of(place).worker))
            counts[tier] = max(0.0, min(homes.get(tier, 0), tokens / self.mean_peak, left))
            room += tokens
        whole = sum(counts.values()) or 1.0
        return {tier: n / whole for tier, n in counts.items()}, room

    def realised(self, layout: Layout, split: Mapping[str, float]) -> dict[str, float]:
        """Return the fractions after rounding to tensors, sequences and gpu_batches. split: as in `terms`, by tier."""
        weights = dict(layout.stored_bytes)
        for t in (*self.model.others, *(t for t in self.model.edges if t is not self.model.output)):  # not streamed
            weights[layout.homes[t.name]] -= t.stored_bytes
        batches = max(1, -(-min(layout.policy.block_size, self.workload.count) // layout.policy.gpu_batch_size))
        hidden = count_by_tier(batches, layout.policy.activations)
        shares = {
            WEIGHTS: {tier: nbytes / self.streamed_bytes for tier, nbytes in weights.items()},
            CACHE: split,
            HIDDEN: {place: hidden.get(place, 0) / batches for place in layout.places},
        }
        return {fraction(kind, tier): share for kind, by_tier in shares.items() for tier, share in by_tier.items()}
