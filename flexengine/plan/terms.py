"""Terms of the cost model: bytes or seconds of one lane in every sweep.

If a term's data may be on several tiers, the term is proportional to one fraction, such as "cache@disk". Rules:

weights        Each layer, and the head, crosses the lanes from its tier once per sweep. Small sweeps leave out the
               experts that no token chose (`plan.experts`).
KV cache       Whole pages are loaded before a layer computes, and changed pages are stored after. If pages are in host
               RAM, a decode step stores only its token.
delegated      Queries, keys and values of decoding sequences are copied to the place that computes attention, and the
               output is copied back. Only pages of continued prompts are loaded to the device. If queries go first to
               attention workers, there are two copies, tasks and questions.
hidden states  Between two layers, hidden states cross the lanes once in each direction.
chosen values  The device waits for these loads: see `plan.chosen`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flexengine.places import is_disk, is_worker
from flexengine.plan.chosen import Chosen, waiting
from flexengine.plan.compute import decode_attention
from flexengine.plan.delegation import keys_share
from flexengine.plan.experts import unused
from flexengine.plan.facts import ENCODED_ROWS, ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.paging import Array, LayerPages
from flexengine.plan.problem import CACHE, HIDDEN, WEIGHTS, fraction
from flexengine.plan.profile import Profile
from flexengine.plan.rates import Rates
from flexengine.policy import TOKENS, Policy
from flexengine.schedule.routes import Routes

LOG_SUM_BYTES = 4  # of a log-sum-exp
LANES = ("device", "h2d", "d2h", "disk_read", "disk_write")  # of every machine

Lanes = dict[str, dict[str, Array]]  # lane -> fraction, or "" for none -> seconds by sweep


class Move(NamedTuple):
    """Bytes that cross a lane.

    Attributes:
        lane: name of the lane, such as "h2d".
        kind: kind of data.
        place: tier of the data between uses.
        nbytes: bytes if all data of the kind is on this tier; float, or array by sweep.
        transfer: bytes of one transfer.
    """

    lane: str
    kind: str
    place: str
    nbytes: Any
    transfer: float

    def seconds(self, hardware: Hardware) -> Any:
        """Return the seconds of the lane."""
        return hardware.link_seconds(self.lane, self.nbytes, self.transfer, weights=self.kind == WEIGHTS)


class Work(NamedTuple):
    """Seconds of a lane.

    Attributes:
        lane: name of the lane.
        kind: kind of data; "" if the seconds do not depend on a placement.
        place: tier of the data; "" as above.
        work: seconds if all data of the kind is on this tier; float, or array by sweep.
    """

    lane: str
    kind: str
    place: str
    work: Any

    def seconds(self, hardware: Hardware) -> Any:
        """Return the seconds of the lane."""
        return self.work


Term = Move | Work


def by_lane(terms: Iterable[Term], hardware: Hardware) -> Lanes:
    """Return the seconds of each lane and fraction."""
    lanes: Lanes = {lane: {} for lane in LANES}
    for term in terms:
        name, seconds = fraction(term.kind, term.place) if term.kind else "", term.seconds(hardware)
        sums = lanes.setdefault(term.lane, {})
        sums[name] = np.asarray(sums[name] + seconds if name in sums else seconds)
    return lanes


def routes(hardware: Hardware) -> Routes:
    """Return the lanes between each tier and the device."""
    return Routes.between(hardware.places, staged=not hardware.shared)


def page_transfer(hardware: Hardware, lane: str, page: float, pages: float) -> float:
    """Return the bytes of one transfer of KV pages.

    A disk and a GPU copy page by page. A simulated link makes a gpu_batch wait once for all its pages.

    Args:
        hardware: rates of the machine.
        lane: lane of the transfer.
        page: bytes of a page.
        pages: pages of one gpu_batch in one layer.
    """
    alone = hardware.kind == "cuda" or is_disk(lane)
    return page if alone else page * max(1.0, pages)


class Crossing(NamedTuple):
    """Bytes of a token in one layer over the lanes of a place that computes attention. Several workers work at the same
    time, over connections of their own: the slowest counts, with its bytes at the rate of the place's lanes.

    Attributes:
        queries, keys: to the place; keys with values.
        answers: from the place.
        pages: share of the bytes of pages.
    """

    queries: float
    keys: float
    answers: float
    pages: float = 1.0

    @staticmethod
    def of(model: ModelFacts, hardware: Hardware, policy: Policy, place: str) -> "Crossing":
        """Return the bytes of a place."""
        team, keys = policy.team(place, hardware.places), model.sent - model.fetched
        if len(team) < 2:
            return Crossing(model.fetched, keys, model.fetched)
        links, n = hardware.worker_links, len(team)
        slower = links[place] / min(links[worker] for worker in team) if links.keys() >= set(team) else 1.0
        queries, answers = model.fetched / n, model.fetched / n
        if policy.partition == TOKENS:  # every worker gets all queries, and sends a log-sum-exp for each
            queries, answers = model.fetched, model.fetched + LOG_SUM_BYTES * model.heads
        return Crossing(slower * queries, slower * keys / n, slower * answers, slower / n)


@dataclass(frozen=True)
class Sweeping:
    """Terms of the data that a policy moves.

    Attributes:
        model: sizes of the model.
        hardware: rates of the machine.
        policy: the policy.
        sweeps: sweeps of the job under the policy.
        pages: KV pages of each group of layers.
        rates: rates of the model on the machine.
    """

    model: ModelFacts
    hardware: Hardware
    policy: Policy
    sweeps: Profile
    pages: tuple[LayerPages, ...]
    rates: Rates

    def weights(self, streamed_bytes: float, reads: Mapping[str, float], read: float) -> Iterator[Term]:
        """Yield the terms of the weights.

        Args:
            streamed_bytes: bytes of all layers and the head.
            reads: by tier, bytes of a layer's weights that are read together.
            read: the same for tiers that `reads` does not have.
        """
        nbytes = streamed_bytes - unused(self.model, self.sweeps.prompt + self.sweeps.decoding)
        for place, lanes in routes(self.hardware).load.items():
            for lane in lanes:
                yield Move(lane, WEIGHTS, place, nbytes, reads.get(place, read))

    def hidden(self) -> Iterator[Term]:
        """Yield the terms of the hidden states."""
        model, sweeps = self.model, self.sweeps
        token = model.hidden * model.itemsize
        nbytes = (sweeps.prompt + sweeps.decoding) * token * max(0, len(model.layers) - 1)
        way = routes(self.hardware)
        for place in way.load:
            for lane in (*way.load[place], *way.store[place]):
                yield Move(lane, HIDDEN, place, nbytes, self.policy.gpu_batch_size * token)

    def cache(self) -> Iterator[Term]:
        """Yield the terms of the KV cache."""
        model, sweeps, gpu_batch = self.model, self.sweeps, self.policy.gpu_batch_size
        token, way = model.kv_token * len(model.layers), routes(self.hardware)
        coming = sweeps.loaded if model.topk is None else sweeps.prompt_loaded + self._chosen.ahead
        for place in way.load:
            delegated = self.policy.attends(place) != "device"
            loaded = sweeps.prompt_loaded if delegated else coming
            stored = sweeps.prompt_stored if delegated or place == "host" else sweeps.stored
            token_bytes = token * Crossing.of(model, self.hardware, self.policy, place).pages
            for lanes, tokens in ((way.load[place], loaded), (way.store[place], stored)):
                for lane in lanes:
                    transfer = page_transfer(self.hardware, lane, self.page_tokens * model.kv_token, gpu_batch)
                    yield Move(lane, CACHE, place, tokens * token_bytes, transfer)
            if place == "host" and not delegated:
                single = np.maximum(sweeps.stored - sweeps.prompt_stored, 0.0) / self.page_tokens
                for lane in way.store[place]:
                    yield Move(lane, CACHE, place, single * token, gpu_batch * model.kv_token)

    def delegated(self) -> Iterator[Term]:
        """Yield the terms of delegated attention."""
        model, sweeps, gpu_batch = self.model, self.sweeps, self.policy.gpu_batch_size
        tokens = sweeps.decoding * sweeps.counted * len(model.layers)
        for home, place in self.policy.attended(self.hardware.places).items():
            down, there, up = routes(self.hardware).attend[place]
            first, cells = self.policy.queries_first and is_worker(place), tokens / gpu_batch
            crossing = Crossing.of(model, self.hardware, self.policy, place)
            yield Move(up, CACHE, home, tokens * crossing.answers, gpu_batch * crossing.answers)
            for sent in crossing[:2] if first else (crossing.queries + crossing.keys,):
                yield Move(down, CACHE, home, tokens * sent, gpu_batch * sent)
            attended = decode_attention(self.rates, sweeps, self.policy.attended_by(place)) * sweeps.counted
            asking = self.hardware.worker_seconds if is_worker(place) else 0.0
            yield Work(there, CACHE, home, attended + cells * (1 + first) * asking)
            on_device = decode_attention(self.rates, sweeps) * sweeps.counted
            yield Work("device", CACHE, home, cells * self.rates.delegated - on_device)
            if first:
                yield Work("device", CACHE, home, cells * self.hardware.task_seconds - self._hidden(attended))

    def _hidden(self, attended: Array) -> Array:
        """Return the seconds by sweep in which the device computes keys and values while workers attend to cached
        tokens, if the device waits for attention otherwise (`Cost.slowing`). attended: seconds of attention."""
        policy, model = self.policy, self.model
        if policy.block_size > policy.gpu_batch_size or policy.slots == 1:
            return np.zeros(self.sweeps.times.shape)
        layers = range(len(model.layers))
        share = sum(keys_share(model, j) for j in layers) / len(layers)
        computed = share * self.rates.stack(self.sweeps.decoding) * self.sweeps.counted
        return np.minimum(np.asarray(computed), attended)

    def chosen_values(self, overlaps: bool) -> Iterator[Term]:
        """Yield the terms of chosen values. overlaps: whether lanes work at the same time; if not, the device waits for
        every load, and these waits need no term."""
        if self.model.topk is None:
            return
        sweeps, full = self.sweeps, self._chosen.full
        total = float((sweeps.times * sweeps.decoding).sum()) * len(self.model.layers)
        at_once = float((sweeps.times * full).sum()) / max(1e-9, total) * self.policy.gpu_batch_size
        for place in routes(self.hardware).load:
            if self.policy.attends(place) != "device":  # values are not loaded to the device
                continue
            lanes, handling = waiting(self.model, self.hardware, place, full, at_once)
            for lane, seconds in lanes.items():
                yield Work(lane, CACHE, place, seconds)
            yield Work("device", CACHE, place, handling + (sum(lanes.values()) if overlaps else 0.0))

    @property
    def page_tokens(self) -> float:
        """Tokens of a KV page off the device, averaged over layers."""
        return sum(group.layers * group.away.page_tokens for group in self.pages)

    @cached_property
    def _chosen(self) -> Chosen:
        return Chosen.of(self.sweeps, self.pages, self.rates.windows)


def embedding(model: ModelFacts, hardware: Hardware, sweeps: Profile, layout: Layout | None) -> Iterator[Term]:
    """Yield the seconds of reading embedding rows, if the table is on disk."""
    t = model.embedding
    if t is None or layout is None or not is_disk(disk := layout.homes[t.name]):
        return
    row = t.stored_bytes / model.vocabulary * (ENCODED_ROWS if t.encoded else 1)  # bytes that are read for one row
    tokens = np.minimum(sweeps.prompt + sweeps.decoding, model.vocabulary)
    lane = f"{disk}_read"
    read = max(row, shortest_read(hardware, lane))
    yield Work(lane, "", "", Move(lane, WEIGHTS, disk, tokens * read, read).seconds(hardware))


def shortest_read(hardware: Hardware, lane: str) -> float:
    """Return the bytes of the shortest read of weights that was measured. A shorter read takes as long."""
    return hardware.weight_rates(lane)[0][0]
