"""Terms of attention that does not find all it needs on the device.

Delegated attention, at the host or at attention workers: bytes of buffers, seconds of links and work.

Seconds of loading chosen values (`topk`) from a KV cache off the device, the mean of the formula in
`worker.on_demand`: keys are loaded before a layer is computed, like whole pages; so are the values of a page that is
not full. All other values are loaded after the layer has chosen them, and the device waits: row by row from RAM, block
by block from disk.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flexengine.errors import InvalidInput
from flexengine.places import DEVICE, HOST, place_of, workers_in_memory, workers_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity, Hardware, at
from flexengine.plan.layout import CHOSEN, Layout
from flexengine.plan.profile import Profile
from flexengine.plan.sizes import DELEGATION, DESKS, Array, aligned, delegated
from flexengine.plan.terms import (
    BESIDE_PROMPTS,
    CACHE,
    WEIGHTS,
    Lanes,
    Sweeping,
    Term,
    decode_attention,
    fraction,
    kind_of,
    routes,
)
from flexengine.plan.workload import Workload
from flexengine.policy import HEADS, REQUESTS, TOKENS, Policy, shares
from flexengine.schedule.frame import num_buffers
from flexengine.schedule.pages import Pool
from flexengine.schedule.place import cache_homes

LOG_SUM_BYTES = 4  # of a log-sum-exp
MAX_GAP_BYTES = 128 << 10  # rows at most this far apart share one disk read; equal to GAP in tier/disk.py
PICK_SECONDS = 1e-7  # to find a row, gather it and store it; assumed, not measured


# Bytes.


def book(layout: Layout, model: ModelFacts, capacity: Capacity) -> None:
    """Book device bytes of forward passes that wait for attention, and buffers for all delegated sequences, so that no
    gpu_batch waits for another.

    The host also has a workspace for the kernels' output of one gpu_batch.

    Raises:
        InvalidInput: attention of this model or machine cannot be delegated as the policy says.
    """
    check_partition(model, layout.policy, layout.places)
    policy, rows = layout.policy, delegated(layout.policy, layout.places)
    # A token that waits has q, k, v with and without rotation, and the residual with its norm and casts.
    # If hidden states leave the device, the output of the embedding is kept while the first layer waits. If engines
    # take turns, hidden states of a slice that another engine computes next, or has computed, are beside the pass.
    more = (policy.activations[0] < 1) + (capacity.turns > 1)
    token = 3 * model.sent + (4 + more) * model.hidden_bytes
    layout.book("device", "paused forwards", aligned(min(policy.block_size, sum(rows.values())) * token))
    if policy.works and not workers_of(rows):
        raise InvalidInput(
            f"the policy's share of {policy.works:g} on attention workers is no sequence of a block of"
            f" {policy.block_size}; raise the share, or leave it out"
        )
    if policy.delegates and capacity.shared:
        raise InvalidInput(
            f"policy delegate is {policy.delegate}, but on device 'cpu' RAM is the device, and attention"
            " always runs there; set delegate to none"
        )
    for place in rows:
        if (members := len(policy.team(place, layout.places))) > 1:
            layout.desks[place] = aligned(rows[place] * (model.sent + model.fetched + 4 * model.heads))
            layout.book("device" if capacity.shared else "host", DESKS, members * layout.desks[place])
    by_cpu = [n for place, n in rows.items() if not place_of(place).worker]
    if policy.delegates and not by_cpu:
        share = sum(x for place, x in shares(policy.cache).items() if policy.attends(place) == HOST)
        raise InvalidInput(
            f"policy delegate is {policy.delegate}, but a share of {share:g} of the KV cache is no sequence of a block"
            f" of {policy.block_size}; raise the share, or set delegate to none"
        )
    layout.delegation = {place: aligned(n * model.sent) for place, n in rows.items()}
    for tier in ("device",) if capacity.shared else ("device", "host"):
        layout.book(tier, DELEGATION, sum(layout.delegation.values()))
    if by_cpu:
        workspace_rows = min(sum(by_cpu), policy.gpu_batch_size)
        layout.book("host", "delegation workspace", aligned(workspace_rows * model.fetched))


def check_partition(model: ModelFacts, policy: Policy, places: Iterable[str]) -> None:
    """Raise InvalidInput if attention of the model cannot be divided as the policy says. places: of the machine."""
    workers, sparse = len(workers_in_memory(places)), model.topk is not None
    faults = {
        f"partition is {HEADS}, but the model's {model.kv_heads} KV heads cannot be divided evenly among {workers}"
        f" attention workers; start a number of workers that divides them, or set partition to {REQUESTS} or"
        f" {TOKENS}": policy.partition == HEADS and model.kv_heads % workers,
        f"partition is {TOKENS}, but with sparse attention a worker cannot know which values of other workers are"
        f" larger; set partition to {REQUESTS} or {HEADS}": policy.partition == TOKENS and sparse,
        "queries_first is true, but with sparse attention the new token decides which values are read; set"
        " queries_first to false": policy.queries_first and sparse,
        "queries_first is true, but the model's layers compute queries together with keys and values; set"
        " queries_first to false": policy.queries_first and not model.queries_apart,
    }
    for fault in filter(faults.get, faults):
        raise InvalidInput(f"policy {fault}")


def prompt_pages(policy: Policy, workload: Workload, pool: Pool) -> int:
    """Return the pages of a gpu_batch of prompts of mean length, at least those of the longest sequence."""
    prompts = math.ceil(policy.prefill_tokens * workload.count / max(1, workload.prompt_tokens(workload.count)))
    tokens = -(-policy.prefill_tokens // pool.page_tokens) + min(prompts, policy.gpu_batch_size)
    return max(pool.held(workload.longest), tokens)


# Seconds.


class Crossing(NamedTuple):
    """Bytes of a token in one layer over the lanes of a place that computes attention. Several workers work at the same
    time, over connections of their own: the slowest counts, with its bytes at the rate of the place's lanes."""

    # queries, keys: to the place; keys with values
    queries: float
    keys: float
    answers: float  # from the place
    pages: float = 1.0  # share of the bytes of pages

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


def slowing(
    crosstalk: Mapping[str, Mapping[str, float]], hardware: Hardware, policy: Policy, model: ModelFacts, rows: int
) -> Mapping[str, Mapping[str, float]]:
    """Return `crosstalk` under a policy: by lane and other lane, the waits that the order of a layer's cells adds.

    A gpu_batch's attention is over before its cell ends. With a single gpu_batch, the device waits for all of it. A
    streamed layer ends before the next one begins (`schedule.order`), so the first gpu_batch's attention and the last
    one's cell overlap with nothing that has to wait for them. Weights of the next layer precede most answers in the
    lane of the answers, so the rest of the cells follows the load. Places that attend to caches of their own work at
    the same time, so the device waits for each by its part. A CPU and an attention worker on its cores slow each other
    by the worker's share of the cores.

    Args:
        rows: number of rows of the job.
    """
    homes, way = cache_homes(policy, hardware.places), routes(hardware)
    talk = {lane: dict(others) for lane, others in crosstalk.items()}
    filled = min(1.0, rows / policy.block_size) / policy.gpu_batch_size
    own = dict[str, int]()  # by place that attends: gpu_batches, each of sequences of one place
    for home, n in homes.items():
        own[policy.attends(home)] = own.get(policy.attends(home), 0) + math.ceil(filled * n)
    batches, attended = sum(own.values()), [place for place in own if place != DEVICE]
    streams, before = policy.weights[0] < 1, projection_share(model, 0)
    after = (1 - before) * sum(own[place] for place in attended) / batches
    cores = hardware.worker_cores if not hardware.gpu else {}

    def add(lane: str, other: str, share: float) -> None:
        if share > 0:
            talk.setdefault(lane, {})[other] = max(share, talk.get(lane, {}).get(other, 0.0))

    for place in attended:
        _, lane, back = way.attend[place]
        closed = batches == 1 or (streams and policy.slots < 3)
        add("device", lane, closed / len(attended) * (1 / own[place] + before / batches - 1 + after))
        add(lane, "device", (closed or own[place] == 1) / batches)
        for one, other in (("device", lane), (lane, "device")):
            add(one, other, min(1.0, sum(cores.get(worker, 0.0) for worker in policy.team(place, hardware.places))))
        if streams and back in way.load["host"]:
            later = before / batches + after * (1 - 1 / own[place]) if batches > 1 else after
            add(back, "device", later)
            add("device", back, later if batches > 1 else 0.0)
            add(back, lane, closed / own[place] if batches > 1 else 0.0)
    return talk


def half_layers(work: Lanes, last: Iterable[str], policy: Policy, sweeps: Profile) -> Iterator[Term]:
    """Yield, for each lane that loads to the device, a lower bound of a sweep if halves of layers are loaded apart:
    cells that are computed at once, as those of prompts, do not overlap with the load of the next layer.

    Args:
        work: seconds by lane and fraction.
        last: the lanes.
    """
    here = any(share and policy.attends(place) == DEVICE for place, share in shares(policy.cache).items())
    whole = np.where((sweeps.prompt > 0) | here, 1.0, 0.0)
    for lane in last:
        loads = {name: seconds for name, seconds in work[lane].items() if kind_of(name) == WEIGHTS}
        for name, seconds in (*work["device"].items(), *loads.items()):
            kind, _, place = name.partition("@")
            yield Term(f"{lane} of halves {BESIDE_PROMPTS}", kind, place, whole * seconds)


def pages_after_answers(
    work: Lanes, hardware: Hardware, policy: Policy, sweeps: Profile, split: Mapping[str, float], before: float
) -> Iterator[Term]:
    """Yield lower bounds of a sweep without prompts if pages of some gpu_batches are loaded to the device, and other
    places attend to those of others.

    Delegated gpu_batches come first in a layer (`schedule.batches.interleaved`). So pages cross the link to the device
    after all answers of the layer, and the cells that need them, and those that finish the layer, follow: attention of
    the next layer waits for them. If layers end before the next one begins, these are all cells but the first parts of
    delegated ones; else one delegated cell follows before attention goes on. One bound has the first gpu_batch's pages
    and all its cells, the other ones have all pages that are not loaded ahead and the last cell that needs them.

    Args:
        work: seconds by lane and fraction.
        split: by place, share of the sequences whose cache is there.
        before: share of q, k and v projections in a layer.
    """
    homes, alone = {home: share for home, share in split.items() if share > 0}, sweeps.prompt == 0
    pages = [home for home in homes if home != DEVICE and policy.attends(home) == DEVICE]
    elsewhere = {home: share for home, share in homes.items() if policy.attends(home) != DEVICE}
    closed, share = policy.weights[0] < 1 and policy.slots < 3, sum(elsewhere.values())
    for place in {policy.attends(home) for home in elsewhere} if pages else ():
        _, attend, back = routes(hardware).attend[place]
        own = sum(x for home, x in elsewhere.items() if policy.attends(home) == place)
        first = share / np.maximum(1, own * sweeps.decoding / policy.gpu_batch_size)
        last = (1 - before) * share + before * first if closed else first
        for home in pages:
            *reads, link = routes(hardware).load[home]
            if link != back:  # pages of further disks cross on lanes of their own
                continue
            batches = np.maximum(1.0, np.ceil(homes[home] * sweeps.decoding / policy.gpu_batch_size))
            ahead = np.minimum(1.0, num_buffers(policy.slots) / batches)
            bounds: list[tuple[str, str, Any, Any]] = []
            bounds += [("first", link, 1 / batches, 1 - share + last), ("all", link, 1.0, homes[home] / batches + last)]
            bounds += [(f"all {lane}", lane, 1 - ahead, homes[home] / batches + last) for lane in reads]
            for bound, lane, loaded, computed in bounds:
                parts: list[tuple[str, str, Any]] = [(attend, name, 1.0) for name in work[attend]]
                parts += [("device", name, computed) for name in work["device"]]
                parts += [(lane, name, loaded) for name in work[lane] if name == fraction(CACHE, home)]
                for one, name, factor in parts:
                    kind, _, where = name.partition("@")
                    seconds = np.where(alone, factor * work[one][name], 0.0)
                    yield Term(f"{attend}, {bound} pages of {home} {BESIDE_PROMPTS}", kind, where, seconds)


def terms(data: Sweeping) -> Iterator[Term]:
    """Yield the terms of delegated attention."""
    model, hardware, policy, sweeps = data.model, data.hardware, data.policy, data.sweeps
    gpu_batch = policy.gpu_batch_size
    tokens = sweeps.decoding * sweeps.counted * len(model.layers)
    for home, place in policy.attended(hardware.places).items():
        down, there, up = routes(hardware).attend[place]
        first, cells = policy.queries_first and place_of(place).worker, tokens / gpu_batch
        crossing = Crossing.of(model, hardware, policy, place)
        yield data.move(up, CACHE, home, tokens * crossing.answers, gpu_batch * crossing.answers)
        for sent in crossing[:2] if first else (crossing.queries + crossing.keys,):
            yield data.move(down, CACHE, home, tokens * sent, gpu_batch * sent)
        attended = decode_attention(data.rates, sweeps, policy.attended_by(place)) * sweeps.counted
        asking = hardware.worker_seconds if place_of(place).worker else 0.0
        yield Term(there, CACHE, home, attended + cells * (1 + first) * asking)
        on_device = decode_attention(data.rates, sweeps) * sweeps.counted
        yield Term("device", CACHE, home, cells * data.rates.delegated - on_device)
        if first:
            yield Term("device", CACHE, home, cells * hardware.task_seconds - _hidden(data, attended))


def _hidden(data: Sweeping, attended: Array) -> Array:
    """Return the seconds by sweep in which the device computes keys and values while workers attend to cached
    tokens, if the device waits for attention otherwise (`Cost.slowing`). attended: seconds of attention."""
    policy, model = data.policy, data.model
    if policy.block_size > policy.gpu_batch_size or policy.slots == 1:
        return np.zeros(data.sweeps.times.shape)
    layers = range(len(model.layers))
    share = sum(keys_share(model, j) for j in layers) / len(layers)
    computed = share * data.rates.stack(data.sweeps.decoding, policy.weights[0]) * data.sweeps.counted
    return np.minimum(np.asarray(computed), attended)


def keys_share(model: ModelFacts, layer: int) -> float:
    """Return the share of a layer's FLOP in k and v projections."""
    return projection_share(model, layer) * 2 * model.kv_heads / (model.heads + 2 * model.kv_heads)


def projection_share(model: ModelFacts, layer: int) -> float:
    """Return the share of a layer's FLOP in q, k and v projections, which precede attention."""
    products = sum(t.used(model.active or 1) for t in model.layers[layer] if t.matrix)
    before = model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    return min(1.0, before / products) if products else 0.5


# Chosen values.


def chosen_tokens(data: Sweeping) -> tuple[Array, Array]:
    """Return tokens of decoding sequences by sweep: those loaded before a layer is computed, per layer, and those in
    full pages that attention sees, summed over layers. A key without its value counts half. The last page of a sequence
    is assumed half full."""
    sweeps, pages, windows = data.sweeps, data.pages, data.rates.windows
    held, decoding = np.maximum(sweeps.loaded - sweeps.prompt_loaded, 0.0), sweeps.decoding * sweeps.counted
    sizes = {group.away.window: group.away.page_tokens for group in pages if not group.away.is_record}
    filling = sum(group.layers * (group.away.page_tokens - 1) for group in pages)
    full = np.zeros(held.shape)
    for window, layers in windows.items():
        seen = sweeps.cached[window] * sweeps.counted
        size = sizes[window if window in sizes else None]
        full = full + layers * np.maximum(seen - decoding * (size + 1) / 2, 0.0)
    return (held + np.minimum(held, decoding * filling)) / 2, full


def chosen_share(model: ModelFacts, rows: float = 1.0) -> float:
    """Return the probability that a query head of a kv head chooses one of `rows` neighbouring values.

    Choices are assumed random and independent.
    """
    heads = model.heads / model.kv_heads
    return float(1 - (1 - (model.topk or 0.0)) ** (heads * rows))


def waiting(
    model: ModelFacts, hardware: Hardware, home: str, full: Any, batch_tokens: float
) -> tuple[dict[str, Any], Any]:
    """Return the seconds of loading chosen values, by lane, and the seconds in which the device gathers their rows.

    Args:
        home: tier of the KV cache.
        full: tokens in full pages, a float or an array.
        batch_tokens: tokens in full pages of one gpu_batch in one layer.
    """
    half, row = model.kv_token / 2, model.kv_token / 2 / model.kv_heads  # bytes of a token's values; of one kv head's
    chosen, lanes = full * chosen_share(model), dict[str, Any]()
    if place_of(home).disk:
        share = chosen_share(model, max(1.0, (MAX_GAP_BYTES + row) / row))  # of the values, gaps included
        lane, transfer = place_of(home).lanes[0], max(1.0, batch_tokens * share * half)
        lanes[lane] = full * share * half / at(hardware.links[lane], transfer)
    if home == "host" or not hardware.shared:
        transfer = min(float(CHOSEN), max(1.0, batch_tokens * chosen_share(model) * half))
        lanes["h2d"] = chosen * half / at(hardware.links["h2d"], transfer)
    return lanes, chosen * model.kv_heads * model.kv_pieces * PICK_SECONDS


def chosen_terms(data: Sweeping, overlaps: bool) -> Iterator[Term]:
    """Yield the terms of chosen values. overlaps: whether lanes work at the same time; if not, the device waits for
    every load, and these waits need no term."""
    sweeps, full = data.sweeps, chosen_tokens(data)[1]
    total = float((sweeps.times * sweeps.decoding).sum()) * len(data.model.layers)
    at_once = float((sweeps.times * full).sum()) / max(1e-9, total) * data.policy.gpu_batch_size
    for place in routes(data.hardware).load:
        if data.policy.attends(place) != "device":  # values are not loaded to the device
            continue
        lanes, handling = waiting(data.model, data.hardware, place, full, at_once)
        for lane, seconds in lanes.items():
            yield Term(lane, CACHE, place, seconds)
        yield Term("device", CACHE, place, handling + (sum(lanes.values()) if overlaps else 0.0))
