"""Seconds and bytes of a job before it runs: per lane, per sweep, as functions of model, machine, workload and policy.

FlexGen's cost model (paper section 4.3, appendix A.2) with every literal a function of the model's config, and these
decisions on its defects: all link traffic overlaps compute where there are two slots (its release adds the upload of
weights); decode activations have one token; the disk's rate is measured, at the size of the transfers; sweeps are those
of the real workload (`profile`), not n equal ones; lanes that share cores slow each other (`Hardware.crosstalk`).

The seconds of a lane in a sweep are linear in what share of weights (w), KV cache (c) and hidden states (h) lies on the
device (g), host (c) and disk (d). The linear program leaves these nine fractions open; a policy that was laid out has
realised ones. Both are priced by the same terms.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np

from flexengine.plan.attention import Attention
from flexengine.plan.chosen import Chosen, waiting
from flexengine.plan.experts import unused
from flexengine.plan.facts import ENCODED_ROWS, ModelFacts
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.layout import Layout
from flexengine.plan.problem import Linear, Phase
from flexengine.plan.profile import Array, Pages, Profile, Unit, layer_pages, profile, unit
from flexengine.plan.rates import Rates
from flexengine.plan.workload import Workload
from flexengine.policy import TIERS, Policy
from flexengine.schedule.order import form_batches, split_prompt
from flexengine.schedule.place import places

PAST = 2 / 3  # of a prompt is cached before the mean pair of its continued pieces
SAMPLE = 256  # prompts that stand for all when batches are formed
LOADED = 8 << 20  # bytes of a read, when weights are brought to where they stay
GROUPS = 3  # phases that prefill sweeps, and decode sweeps, are grouped into

Terms = dict[str, dict[str, Array]]  # lane -> fraction (or "" for what does not depend on any) -> seconds by sweep
Fractions = Mapping[str, float]
T = TypeVar("T")
Indices = np.ndarray[tuple[Any, ...], np.dtype[np.signedinteger[Any]]]


@dataclass(frozen=True)
class Prediction:
    """What a policy will do. Seconds of the whole job, loading apart, unless a name says otherwise.

    lanes: kind of sweep ("prefill": somebody enters, "decode") -> lane -> seconds of work in a mean sweep of that kind;
    sweep_seconds: of such a sweep; counts: how many there are. busy: seconds of work by lane, of the whole job.
    latency: mean seconds from a row's entry to its end. load_seconds: by how much reading what stays in memory makes
    the first sweep longer.
    fractions: the realised shares of weights (w), cache (c), hidden states (h) on device (g), host (c) and disk (d).
    """

    policy: Policy
    layout: Layout
    seconds: float
    load_seconds: float
    latency: float
    rows: int
    tokens: int
    alive: float
    counts: dict[str, float]
    sweep_seconds: dict[str, float]
    lanes: dict[str, dict[str, float]]
    busy: dict[str, float]
    fractions: dict[str, float] = field(default_factory=dict)

    @property
    def tok_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def total_seconds(self) -> float:
        """From the start to the last row, which is what the search makes least."""
        return self.seconds + self.load_seconds

    @property
    def bottleneck(self) -> str:
        """The lane that works longest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


class Cost:
    """Prices policies for one model, machine and workload; keeps what several policies have in common.

    overlap: whether lanes work at the same time where a policy has slots for it; else one task runs at a time.
    """

    def __init__(self, model: ModelFacts, hardware: Hardware, workload: Workload, overlap: bool = True) -> None:
        self.model, self.hardware, self.workload, self.overlap = model, hardware, workload, overlap
        self.rates = Rates.of(model, hardware)
        self.crosstalk = self.rates.crosstalk
        self.windows = frozenset(w for w in self.rates.windows if w is not None)
        self.pages = layer_pages(model, workload.longest)
        self.away_page = sum(group.layers * group.away.page_tokens for group in self.pages)  # tokens, in the mean
        self.tokens = sum(n * times for (_, n), times in workload.sizes.items())
        ends = sum(self._kept(p + n - 1) * times for (p, n), times in workload.sizes.items())
        self.mean_peak = max(1.0, ends / max(1, workload.count))  # cached tokens of a mean sequence at its end
        streamed = [*(sum(t.stored_bytes for t in layer) for layer in model.layers)]
        head = model.edges[0]
        self.unit_bytes = max(streamed)
        self.head_chunks = -(-head.stored_bytes // self.unit_bytes)  # as slots are as large as a layer
        self.streamed_bytes = sum(streamed) + head.stored_bytes
        self._units = _cached(self._unit)
        self._prefills = _cached(self._prefill)
        self._profiles = _cached(self._profile)

    # The job's sweeps.

    def _kept(self, tokens: int) -> float:
        """Return how many of a sequence's tokens stay cached, in the mean of the layers."""
        pools = ((group.layers, group.device) for group in self.pages)
        return sum(layers * min(tokens, pool.held(tokens) * pool.page_tokens) for layers, pool in pools)

    def sweeps(self, policy: Policy, room: float = np.inf, share: float = 0.0) -> Profile:
        """The job's sweeps. room: page tokens there are; share: of the sequences whose cache lives off the device."""
        shape = (policy.gpu_batch_size, policy.num_gpu_batches)
        return self._profiles(policy.prefill_tokens, share, policy.schedule, shape, room)

    def _profile(
        self, prefill_tokens: int, share: float, schedule: str, shape: tuple[int, int], room: float
    ) -> Profile:
        return profile(self._units(prefill_tokens, share), max(1, self.workload.count), schedule, shape, room)

    def _unit(self, prefill_tokens: int, share: float) -> Unit:
        return unit(self.workload, prefill_tokens, Pages(self.pages, share), self.windows)

    def _prefill(self, gpu_batch_size: int, prefill_tokens: int) -> tuple[float, float, float]:
        """Of prompts alone: tokens of a mean gpu_batch, seconds of all layers per token, gpu_batches per token."""
        rng = np.random.default_rng(0)
        sizes = sorted(self.workload.sizes.items())
        weights = np.array([times for _, times in sizes], dtype=float)
        chosen = rng.choice(len(sizes), min(SAMPLE, self.workload.count), p=weights / weights.sum())
        pieces = [p for i, k in enumerate(chosen) for p in split_prompt(i, 0, sizes[k][0][0], prefill_tokens)]
        batches = form_batches(pieces, gpu_batch_size, prefill_tokens)
        tokens = np.array([sum(p.count for p in batch) for batch in batches], dtype=float)
        total = tokens.sum()
        return float(tokens.mean()), float(self.rates.stack(tokens).sum() / total), len(batches) / total

    # Seconds by lane.

    def terms(
        self, policy: Policy, sweeps: Profile, split: Iterable[float], layout: Layout | None = None
    ) -> Terms:  # fmt: skip
        """Return seconds by lane, fraction and sweep.

        Args:
            split: share of the sequences whose cache is on each tier. A gpu_batch holds sequences of one tier.
            layout: gives the bytes of a layer that are read together; None: the whole layer is read together.
        """
        model, hardware, rates = self.model, self.hardware, self.rates
        staged, layers = not hardware.shared, len(model.layers)
        found: Terms = {lane: {} for lane in ("device", "h2d", "d2h", "disk_read", "disk_write")}
        found["device"][""] = self._compute(policy, sweeps, list(split))
        if layout is not None and layout.homes[model.embedding.name] == "disk":
            found["disk_read"][""] = self._embedding(sweeps)

        def link(lane: str, name: str, nbytes: Array, transfer: float) -> None:
            rate = at(hardware.links[lane if lane in hardware.links else "h2d"], max(transfer, 1.0))
            seconds = nbytes / rate
            found[lane][name] = found[lane][name] + seconds if name in found[lane] else seconds

        weights = self.streamed_bytes - unused(model, sweeps.prompt + sweeps.decoding)
        pieces = {tier: self._transfer(layout, tier) for tier in ("host", "disk")}
        link("h2d", "wc", weights, pieces["host"])
        found["disk_read"]["wd"] = weights / at(hardware.checkpoint_read, max(pieces["disk"], 1.0))
        page = self.away_page * model.kv_token
        # A GPU copies page by page. A simulated link makes a gpu_batch wait once for all its pages, one each at least.
        together = page if hardware.kind == "cuda" else page * policy.gpu_batch_size
        coming = sweeps.loaded
        if model.topk is not None:
            chosen = Chosen.of(sweeps, self.pages, rates.windows)
            coming = sweeps.prompt_loaded + chosen.ahead
        loaded, stored = (x * model.kv_token * layers for x in (coming, sweeps.stored))
        hidden = (sweeps.prompt + sweeps.decoding) * model.hidden * model.itemsize * max(0, layers - 1)
        wide = policy.gpu_batch_size * model.hidden * model.itemsize
        rows = np.maximum(sweeps.stored - sweeps.prompt_stored, 0.0) / self.away_page  # a decode step stores one each
        up, down = loaded, sweeps.prompt_stored * model.kv_token * layers  # of what lives on the host
        if policy.delegate:  # then pages are moved for prompts alone
            up, rows = sweeps.prompt_loaded * model.kv_token * layers, np.zeros_like(rows)
            asked, g = sweeps.decoding * sweeps.counted * layers, policy.gpu_batch_size
            link("h2d", "cc", asked * model.fetched, g * model.fetched)
            link("d2h", "cc", asked * model.sent, g * model.sent)
            found["cpu"] = {"cc": self._seen(sweeps, Attention.on_host) * sweeps.counted}
            here = self._seen(sweeps, Attention.decode) * sweeps.counted
            found["device"]["cc"] = asked / g * rates.delegated - here
        for lane, name, nbytes, transfer in (
            ("h2d", "cc", up, together), ("d2h", "cc", down, together), ("h2d", "hc", hidden, wide),
            ("d2h", "cc", rows * model.kv_token * layers, policy.gpu_batch_size * model.kv_token),
            ("d2h", "hc", hidden, wide), ("disk_read", "cd", loaded, page), ("disk_write", "cd", stored, page),
            ("disk_read", "hd", hidden, wide), ("disk_write", "hd", hidden, wide),
        ):  # fmt: skip
            link(lane, name, nbytes, transfer)
        if staged:  # what comes from disk, or goes there, crosses the device's link as well
            link("h2d", "wd", weights, pieces["disk"])
            for lane, name, nbytes, transfer in (
                ("h2d", "cd", loaded, together), ("d2h", "cd", stored, together),
                ("h2d", "hd", hidden, wide), ("d2h", "hd", hidden, wide),
            ):  # fmt: skip
                link(lane, name, nbytes, transfer)
        if model.topk is not None:
            self._wait_for_values(found, policy, sweeps, chosen.full)
        return found

    def _embedding(self, sweeps: Profile) -> Array:
        """Return the seconds of reading embedding rows, which come one by one from the disk, by sweep."""
        t = self.model.edges[-1]
        row = t.stored_bytes / self.model.vocabulary * (ENCODED_ROWS if t.encoded else 1)  # rows that lie together
        tokens = np.minimum(sweeps.prompt + sweeps.decoding, self.model.vocabulary)
        table = self.hardware.checkpoint_read
        read = max(row, table[0][0])  # a shorter read than any that was measured takes as long as the shortest
        return np.asarray(tokens * read / at(table, read))

    def _transfer(self, layout: Layout | None, tier: str) -> float:
        """Bytes of a layer's weights that come from a tier together, in the mean of the layers that have any there."""
        if layout is None:
            return self.unit_bytes
        layers = ([t.stored_bytes for t in layer if layout.homes[t.name] == tier] for layer in self.model.layers)
        sizes = [sum(found) for found in layers if found]
        return sum(sizes) / len(sizes) if sizes else self.unit_bytes

    def _wait_for_values(self, found: Terms, policy: Policy, sweeps: Profile, full: Array) -> None:
        """Adds chosen values to the links, and to the device, which waits for them. Without overlap it waits anyway."""
        total = float((sweeps.times * sweeps.decoding).sum()) * len(self.model.layers)
        at_once = float((sweeps.times * full).sum()) / max(1e-9, total) * policy.gpu_batch_size
        for home, name in (("host", "cc"), ("disk", "cd")):
            if home == "host" and policy.delegate:  # attention reads them where they are
                continue
            lanes, handling = waiting(self.model, self.hardware, home, full, at_once)
            for lane, seconds in lanes.items():
                found[lane][name] = found[lane][name] + seconds
            on_device = handling + (sum(lanes.values()) if self.overlaps(policy) else 0.0)
            found["device"][name] = found["device"].get(name, 0.0) + on_device

    def _compute(self, policy: Policy, sweeps: Profile, split: list[float]) -> Array:
        """Seconds of the device lane by sweep."""
        return np.asarray(sum(self.parts(policy, sweeps, split).values()))

    def parts(self, policy: Policy, sweeps: Profile, split: list[float]) -> dict[str, Array]:
        """Return the seconds of the device lane by kind of work and sweep.

        Args:
            split: share of the sequences whose cache is on each tier. A gpu_batch holds sequences of one tier.
        """
        hardware, rates, g = self.hardware, self.rates, policy.gpu_batch_size
        mean, per_token, per_batch = self._prefills(g, policy.prefill_tokens)
        units = len(self.model.layers) + (self.head_chunks if policy.weights[0] < 1 else 1)
        found = dict.fromkeys(("layers", "head", "calls", "tasks", "prompt attention"), np.zeros(sweeps.times.shape))
        found["bookkeeping"] = hardware.sweep_seconds + hardware.sequence_seconds * sweeps.live
        prompts = max(1e-9, float(self._units(policy.prefill_tokens, 0.0).prompt))
        host = TIERS.index("host") if policy.delegate and len(split) == len(TIERS) else -1  # who never joins prompts
        for tier, share in ((i, s) for i, s in enumerate(split) if s > 0):
            decoding, prompt = sweeps.decoding * share, sweeps.prompt * share
            full, rest = np.floor(decoding / g + 1e-9), decoding - g * np.floor(decoding / g + 1e-9)
            few = (prompt < mean) & (tier != host)  # then prompts join what is left of the decoding
            joined, apart = rates.stack(rest + prompt), rates.stack(rest) + prompt * per_token
            found["layers"] = found["layers"] + full * float(rates.stack(g)) + np.where(few, joined, apart)
            joined, apart = rates.head(rest + prompt / prompts), rates.head(rest)
            apart = apart + prompt * per_batch * rates.head(min(g, mean / prompts))
            found["head"] = found["head"] + full * float(rates.head(g)) + np.where(few, joined, apart)
            cells = full + (rest > 0) + np.where(few, 0, prompt * per_batch)
            found["tasks"] = found["tasks"] + cells * units * hardware.task_seconds
            found["calls"] = found["calls"] + cells * rates.calls
        for window, layers in rates.windows.items():
            late, attention = sweeps.late[window], rates.attention[window]
            fresh = attention.prompt(sweeps.pairs[window] - late, min(prompts, policy.prefill_tokens))
            work = fresh + attention.continued(late, PAST * prompts)
            found["prompt attention"] = found["prompt attention"] + layers * work
        return found | {"decode attention": self._seen(sweeps, Attention.decode)}

    def _seen(self, sweeps: Profile, seconds: Callable[[Attention, Array, Array], Array]) -> Array:
        """Decode attention of all layers by sweep. seconds: of one layer, by cached tokens in all and of a sequence."""
        length = sweeps.cached / np.maximum(sweeps.decoding, 1e-9)
        total = np.zeros(sweeps.times.shape)
        for window, layers in self.rates.windows.items():
            cached = sweeps.cached if window is None else sweeps.windows[window]
            seen = length if window is None else np.minimum(length, window)
            total = total + layers * seconds(self.rates.attention[window], cached, seen)
        return total

    def slowing(self, policy: Policy) -> Mapping[str, Mapping[str, float]]:
        """`crosstalk` under a policy: the device waits for the host to attend if there is no other gpu_batch."""
        if not policy.delegate or policy.block_size > policy.gpu_batch_size:
            return self.crosstalk
        return {**self.crosstalk, "device": {**self.crosstalk.get("device", {}), "cpu": 1.0}}

    def overlaps(self, policy: Policy) -> bool:
        """Whether lanes work at the same time under a policy, so that their seconds do not add up."""
        return self.overlap and policy.slots > 1

    def sweep_seconds(self, terms: Terms, fractions: Fractions, policy: Policy) -> tuple[Array, dict[str, Array]]:
        """Seconds of every sweep, and of each lane's work in it."""
        lanes = {
            lane: np.asarray(sum(x if not name else fractions.get(name, 0.0) * x for name, x in by.items()))
            for lane, by in terms.items()
            if by
        }
        used = {lane: seconds for lane, seconds in lanes.items() if np.any(seconds > 0)}
        seconds = np.asarray(self._ends(used, policy))
        if not self.overlaps(policy):  # the device has waited for every layer that was away
            away = min(1.0, fractions.get("wc", 0.0) + fractions.get("wd", 0.0))
            seconds = seconds + self.rates.streaming.get("wake", 0.0) * len(self.model.layers) * away
        return seconds, used

    def _ends(self, used: Mapping[str, Any], policy: Policy) -> Any:
        """When the last lane ends, by what each of them has to do: seconds, or arrays of them."""
        return np.max(list(self.slowed(used, policy).values()), axis=0) if self.overlaps(policy) else sum(used.values())

    def slowed(self, used: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
        """By lane, what it has to do and what the others add to it; seconds, or arrays of them."""
        talk = self.slowing(policy)
        return {
            lane: seconds + sum(talk.get(lane, {}).get(other, 0.0) * used[other] for other in used if other != lane)
            for lane, seconds in used.items()
        }

    # A policy that was laid out.

    def predict(self, layout: Layout, missing: float = 1.0) -> Prediction:
        """What the job will take under a layout. missing: share of the weights that stay in memory that is yet to be
        read, which an earlier job may have begun."""
        policy = layout.policy
        split, room = self._split(layout)
        away = sum(split[tier] for tier in ("host", "disk"))
        sweeps = self.sweeps(policy, room, round(away, 2))
        terms = self.terms(policy, sweeps, split.values(), layout)
        fractions = self.realised(layout, split)
        seconds, lanes = self.sweep_seconds(terms, fractions, policy)
        entering = sweeps.prompt > 1e-9
        kinds = {"prefill": np.where(entering, sweeps.times, 0.0), "decode": np.where(entering, 0.0, sweeps.times)}
        counts = {kind: float(times.sum()) for kind, times in kinds.items()}

        def mean(values: Array, kind: str) -> float:
            return float((values * kinds[kind]).sum() / counts[kind]) if counts[kind] else 0.0

        total = float((seconds * sweeps.times).sum())
        cache, rest = self._touched(layout, missing)
        total += cache
        first = int(np.argmax(entering))
        reading = missing * self.reading(layout)
        loading = self._loading(policy, reading, rest, {lane: float(x[first]) for lane, x in lanes.items()})
        return Prediction(
            policy, layout, total, loading,
            float(((seconds * sweeps.times * sweeps.live).sum() + loading * sweeps.live[first]) / max(1, sweeps.rows)),
            sweeps.rows, self.tokens,
            float((sweeps.live * sweeps.times).sum() / sweeps.times.sum()), counts,
            {kind: mean(seconds, kind) for kind in kinds},
            {kind: {lane: mean(x, kind) for lane, x in lanes.items()} for kind in kinds},
            {lane: float((x * sweeps.times).sum()) for lane, x in lanes.items()}, fractions,
        )  # fmt: skip

    def _loading(self, policy: Policy, reading: float, touched: float, first: Mapping[str, float]) -> float:
        """By how much the first sweep, with so much work in each lane, is longer because weights that stay are read in
        it. touched: seconds in which their RAM is written to for the first time."""
        device = first.get("device", 0.0)
        if self.hardware.kind != "cuda":  # the processor that computes also gets the pages
            device += touched
        if self.overlap and not self.overlaps(policy):  # one slot: lanes take turns, but what stays needs no slot
            slowed, alone = self.slowed({"device": device, "disk_read": reading}, policy), sum(first.values())
            end = max(alone - first.get("device", 0.0) + slowed["device"], slowed["disk_read"])
            if first.get("disk_read"):  # in whose lane a layer's read waits for its slot, and holds up those behind it
                end = max(end, alone + reading)
        else:
            disk = first.get("disk_read", 0.0) + reading
            end = self._ends({**first, "device": device, "disk_read": disk}, policy)
        return float(max(end, touched) - self._ends(first, policy))

    def reading(self, layout: Layout) -> float:
        """Seconds of reading what stays in memory, alone."""
        return (layout.stored["device"] + layout.stored["host"]) / at(self.hardware.checkpoint_read, LOADED)

    def _touched(self, layout: Layout, missing: float) -> tuple[float, float]:
        """Seconds it takes that RAM is written to for the first time: by the KV cache as it fills, and before.
        missing: share of the weights that have not been written there yet."""
        tiers = ("device", "host") if self.hardware.shared or self.hardware.kind == "sim" else ("host",)
        booked = [(what, n) for tier in tiers for what, n in layout.account[tier].items()]
        cache, weights = (sum(n for what, n in booked if what == name) for name in ("KV cache", "weights"))
        rest, rate = sum(n for _, n in booked) - cache - (1 - missing) * weights, self.hardware.touch
        busy = self.hardware.touch_busy if self.hardware.kind != "cuda" else 0.0  # a GPU computes without the processor
        return (cache / (busy or rate), rest / rate) if rate else (0.0, 0.0)

    def _split(self, layout: Layout) -> tuple[dict[str, float], float]:
        """Shares of the sequences whose cache lives on each tier (the device's places are filled first), and the page
        tokens there are."""
        homes = places(layout.policy.block_size, layout.policy.cache)
        live = float(min(layout.policy.block_size, max(1, self.workload.count)))
        room, counts = 0.0, dict.fromkeys(TIERS, 0.0)
        for tier in layout.pools:
            tokens = layout.room(tier)
            counts[tier] = max(0.0, min(homes.get(tier, 0), tokens / self.mean_peak, live - sum(counts.values())))
            room += tokens
        whole = sum(counts.values()) or 1.0
        return {tier: n / whole for tier, n in counts.items()}, room

    def realised(self, layout: Layout, split: Mapping[str, float]) -> dict[str, float]:
        """The nine fractions as they came out of rounding to tensors, sequences and gpu_batches."""
        names = dict(zip(TIERS, "gcd", strict=True))
        weights = dict(layout.stored)
        for t in (*self.model.others, *self.model.edges[1:]):  # who are never streamed
            weights[layout.homes[t.name]] -= t.stored_bytes
        batches = max(1, -(-min(layout.policy.block_size, self.workload.count) // layout.policy.gpu_batch_size))
        hidden = places(batches, layout.policy.activations)
        found = {f"w{names[t]}": n / self.streamed_bytes for t, n in weights.items()}
        found |= {f"c{names[t]}": share for t, share in split.items()}
        return found | {f"h{names[t]}": hidden.get(t, 0) / batches for t in TIERS}

    # The linear program's parts.

    def phases(self, policy: Policy, sweeps: Profile) -> tuple[Phase, ...]:
        """The first sweep, while which weights that stay are read; the others grouped by how much they compute, prefill
        apart from decode."""
        terms, times = self.terms(policy, sweeps, (1.0,)), sweeps.times.copy()
        entering = sweeps.prompt > 1e-9
        first = int(np.argmax(entering))
        found = [_phase("first", terms, np.array([first]), np.minimum(1.0, times[first : first + 1]), sweeps)]
        found[0] = replace(found[0], lanes=_together(found[0].lanes, self._settling()))
        times[first] -= min(1.0, times[first])
        for kind, there in (("prefill", entering), ("decode", ~entering)):
            chosen = np.flatnonzero(there & (times > 0))
            order = chosen[np.argsort(terms["device"][""][chosen], kind="stable")]
            for number, group in enumerate(g for g in np.array_split(order, GROUPS) if len(g)):
                found.append(_phase(f"{kind} {number + 1}", terms, group, times[group], sweeps))
        return tuple(found)

    def _settling(self) -> dict[str, Linear]:
        """Work of reading what stays in memory, once. Its RAM is new. Page faults take the processor that computes
        where there is no GPU; else they are a lane of their own ("touch"), as they overlap disk reads."""
        read = self.streamed_bytes / at(self.hardware.checkpoint_read, LOADED)
        touched = self.streamed_bytes / self.hardware.touch if self.hardware.touch else 0.0
        lanes = {"disk_read": {"wg": read, "wc": read}}
        if self.hardware.kind == "cuda":
            lanes["touch"] = {"wg": 0.0, "wc": touched}
        else:
            lanes["device"] = {"wg": touched, "wc": touched}
        return {lane: Linear(0.0, by) for lane, by in lanes.items()}


def _cached(method: Callable[..., T]) -> Callable[..., T]:
    """Return `method` with a cache that holds no reference to its object: the cycle would keep both alive."""
    weak = WeakMethod(method)

    def call(*args: Any) -> T:
        found = weak()
        assert found is not None
        return found(*args)

    return cache(call)


def _phase(label: str, terms: Terms, group: Indices, times: Array, sweeps: Profile) -> Phase:
    """group: the sweeps it stands for, each so many times."""
    every = np.array([x[group] for by in terms.values() for x in by.values()])  # [seconds, sweeps]
    means = iter(((every * times).sum(axis=1) / times.sum()).tolist())
    lanes = {}
    for lane, by in terms.items():
        found = {name: next(means) for name in by}
        lanes[lane] = Linear(found.pop("", 0.0), found)
    life = float((times * sweeps.live[group]).sum() / max(1, sweeps.rows))
    return Phase(label, float(times.sum()), lanes, life)


def _together(one: Mapping[str, Linear], other: Mapping[str, Linear]) -> dict[str, Linear]:
    """The work of both, by lane."""
    nothing = Linear(0.0)
    return {lane: one.get(lane, nothing) + other.get(lane, nothing) for lane in dict.fromkeys([*one, *other])}
