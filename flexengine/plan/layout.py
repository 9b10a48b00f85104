"""Place of every tensor and bytes of every buffer under a policy. The engine allocates these bytes.

All sizes are in bytes unless a name has another unit. Regions are rounded up to ALIGN, as in the tiers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import mul

from flexengine.errors import ONE_SEQUENCE, InvalidInput, OutOfMemory, size
from flexengine.places import DISK, HOST, TIERS, disks_of, further_disks, place_of, workers_in_memory
from flexengine.plan import guest
from flexengine.plan.facts import CacheGroup, ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity, check_places
from flexengine.plan.sizes import (
    ALIGN,
    CONVERTED,
    aligned,
    batch_tokens,
    gpu_buffers,
    hidden_tokens,
    open_passes,
    pages_of,
    paused,
    read_buffers,
    shared_out,
    slot_bytes,
    sweep_tokens,
    workspace,
)
from flexengine.plan.workload import Workload
from flexengine.policy import TOKENS, Policy, shares
from flexengine.schedule.frame import Demand, num_buffers
from flexengine.schedule.pages import Pool
from flexengine.schedule.place import cache_homes, place_groups

HEAD_CHUNK = 64 << 20  # most bytes of a streamed head chunk if no layer is streamed
MEAN_KEYS = "mean keys"
VALUES = "chosen values"
EMBEDDED = "embedding rows"
PASSING = "weights on their way to the GPU"
COPYING = "copies of weights to a further disk"
READING = "read buffers"
ROWS = "rows being read"
ENTERING = "entering hidden states"
COPIED = 8 << 20  # bytes of RAM that weights pass through on their way to a further disk
CHOSEN = 4 << 20  # most bytes of chosen values in transfer at once


@dataclass
class Layout:
    """Place of every weight and bytes of every buffer under one policy."""

    policy: Policy
    places: tuple[str, ...] = TIERS
    homes: dict[str, str] = field(default_factory=dict)  # place of every tensor, by name
    stored_bytes: dict[str, int] = field(default_factory=dict)  # sum of the tensors' `stored_bytes`, by place
    head_rows: int = 0  # vocabulary rows per head chunk
    slot: int = 0  # bytes of one weight slot; of the slot of second halves, if halves of layers are loaded apart
    early_slot: int = 0  # bytes of the slot of first halves
    stages: dict[str, int] = field(default_factory=dict)  # bytes of a slot's host staging, by disk
    early_stages: dict[str, int] = field(default_factory=dict)  # of the slot of first halves
    # bytes of a layer's weights that are read together, by place; mean over layers with weights there
    layer_reads: dict[str, float] = field(default_factory=dict)
    groups: tuple[CacheGroup, ...] = ()
    pools: dict[str, tuple[Pool, ...]] = field(default_factory=dict)  # KV pages, by place and group
    # bytes of one layer's page, by place and group
    page_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    token_bytes: int = 0  # bytes that one token adds to the KV cache of all layers, as if all had attention
    cache_buffer: int = 0  # device bytes of one buffer for KV pages
    beside: int = 0  # bytes of KV pages before the records in a buffer, if a layer has both
    cache_stage: int = 0  # host bytes of one stage for KV pages on their way from or to a disk or a worker
    values: int = 0  # bytes of chosen values in transfer at once
    embedded: int = 0  # host bytes of a sweep's embedding rows, if the embedding is off the GPU
    rooms: tuple[int, ...] = ()  # by layer, neurons or experts that memory has room for, if they are read on demand
    passing: int = 0  # host bytes through which resident weights are read into GPU memory
    copying: int = 0  # bytes of RAM through which weights are copied to further disks
    port_buffer: int = 0  # device bytes of one buffer between a port and a forward pass
    hidden_buffer: int = 0  # device bytes of one buffer for hidden states
    hidden_home: dict[str, int] = field(default_factory=dict)  # bytes of hidden states off the device, by place
    # bytes of queries, keys, values and outputs of delegated attention, by place that computes it: on the device,
    # and also on the host if that is other memory
    delegation: dict[str, int] = field(default_factory=dict)
    # bytes in RAM of questions and answers of each attention worker, by place that several workers share
    desks: dict[str, int] = field(default_factory=dict)
    # bytes by place and purpose. The ledgers must agree with these numbers.
    account: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place in self.places:
            self.stored_bytes.setdefault(place, 0)
            self.account.setdefault(place, {})

    def book(self, tier: str, what: str, nbytes: int) -> None:
        """Add bytes of a purpose to the account of a place."""
        if nbytes:
            self.account[tier][what] = self.account[tier].get(what, 0) + nbytes

    def total(self, tier: str) -> int:
        """Return all booked bytes of a place."""
        return sum(self.account[tier].values())

    @property
    def slots(self) -> list[int]:
        """Bytes of each weight slot. With halves of layers, the first slot is that of first halves."""
        halves = [self.early_slot] * self.policy.half_layers
        return [*halves, *[self.slot] * (self.policy.slots - len(halves))]

    def slot_stages(self, disk: str) -> list[int]:
        """Return the bytes of each slot's host staging for a disk."""
        halves = [self.early_stages.get(disk, 0)] * self.policy.half_layers
        return [*halves, *[self.stages.get(disk, 0)] * (self.policy.slots - len(halves))]

    def room(self, tier: str) -> float:
        """Return the tokens of all pages of a tier, averaged over layers; a record counts as those of as many bytes."""
        each = zip(self.groups, self.pools[tier], self.page_bytes[tier], strict=True)
        return sum(len(group.layers) * pool.pages * page for group, pool, page in each) / max(1, self.token_bytes)

    def demand(self, model: ModelFacts) -> Demand:
        """Return which weights a program loads by rows: the embedding and the experts, if they are off the device."""
        table = "" if model.embedding is None else self.homes[model.embedding.name]
        demand = Demand("" if table == "device" else table)
        return guest("neurons").with_experts(demand, model, self.homes) if model.experts else demand

    def head_chunks(self, vocabulary: int) -> list[tuple[int, int]]:
        """Return (first row, last row + 1) of each head chunk; [] without a head."""
        if not self.head_rows:
            return []
        return [(row, min(row + self.head_rows, vocabulary)) for row in range(0, vocabulary, self.head_rows)]


def lay_out(
    model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity, weights: Layout | None = None
) -> Layout:
    """Return the layout of a job. KV pools take the bytes that the workload needs, or all memory that is left.

    Args:
        weights: result of `lay_out_weights` for equal weights, slots and neurons; None computes it.

    Raises:
        OutOfMemory: the buffers, or the KV cache of one sequence, do not fit.
        InvalidInput: the policy delegates attention, but no cache is off the device.
    """
    policy = guest("records").fitting(model, policy, workload, capacity) if model.alone else policy
    placed = weights or lay_out_weights(model, policy, capacity)
    account = {tier: dict(booked) for tier, booked in placed.account.items()}
    layout = replace(
        placed, policy=policy, pools={}, page_bytes={}, hidden_home={}, delegation={}, desks={}, account=account
    )
    _hidden(layout, model, workload, capacity)
    _edges(layout, model, workload, capacity)
    buffers = gpu_buffers(model, batch_tokens(policy, workload), workload.longest) if model.gpu else 0
    layout.book("device", "workspace", workspace(model, policy, workload) + aligned(buffers))
    layout.book("device", "paused forwards", paused(model, policy, workload))
    layout.book("device" if capacity.shared else "host", ROWS, aligned(workload.reading))
    if model.experts:
        guest("neurons").book_experts(layout, model, sweep_tokens(policy, workload))
    if policy.delegates or policy.works:
        guest("delegation").book(layout, model, capacity)
    for tier in layout.places:
        _check(layout, tier, capacity, "weights, buffers and workspace")
    _cache(layout, model, workload, capacity)
    return layout


def lay_out_weights(model: ModelFacts, policy: Policy, capacity: Capacity) -> Layout:
    """Return the part of a layout that depends only on the policy's weights, slots and neurons.

    Args:
        capacity: only its places, `staged` and `shared` matter.

    Raises:
        InvalidInput: the policy names a place that the machine does not have, or divides layers that cannot be.
    """
    check_places(policy, capacity)
    if policy.half_layers and (capacity.shared or not model.divisible):
        fault = "layers of this model cannot be divided at attention, or load experts or neurons"
        if capacity.shared:
            fault = "on device 'cpu' RAM is the device, and weights are read from it"
        raise InvalidInput(f"policy half_layers is true, but {fault}; set half_layers to false")
    layout = Layout(policy, capacity.places)
    homes = place_groups(model.group_sizes, policy.weights)
    layout.homes.update(zip(model.group_names, chain.from_iterable(homes), strict=True))
    layout.homes.update((t.name, "device") for t in model.others)
    layers = Counter(zip(model.alike, homes, strict=False))  # `homes` has more items at the end, for the edges
    reads = {tier: [0, 0] for tier in layout.places}  # bytes, and number of layers with weights there
    for (j, at), times in layers.items():
        placed = list(zip(model.layers[j], at, strict=True))
        late = [(t, home) for t, home in placed if not (policy.half_layers and t.early)]
        layout.slot = max(layout.slot, _slot(late, layout.stages))
        if policy.half_layers:
            early = [(t, home) for t, home in placed if t.early]
            layout.early_slot = max(layout.early_slot, _slot(early, layout.early_stages))
        _book_weights(layout, placed, times)
        for tier in set(at):
            reads[tier][0] += times * sum(t.stored_bytes for t, home in placed if home == tier)
            reads[tier][1] += times
    layout.layer_reads = {tier: nbytes / count for tier, (nbytes, count) in reads.items() if count}
    _book_weights(layout, [(t, layout.homes[t.name]) for t in (*model.others, *model.edges)])
    _head(layout, model)
    if model.blocks or policy.neurons:
        guest("neurons").book(layout, model, capacity.shared)
    layout.book("device", "weight slots", sum(map(aligned, layout.slots)))
    if capacity.staged:
        disks = dict.fromkeys((*layout.stages, *layout.early_stages))
        staged = sum(aligned(nbytes) for disk in disks for nbytes in layout.slot_stages(disk))
        layout.book("host", "weight staging", staged)
    if any(layout.stored_bytes[disk] for disk in further_disks(layout.places)):
        layout.copying = COPIED
        layout.book("host", COPYING, layout.copying)
    if model.gpu:
        layout.passing = CONVERTED
        layout.book("host", PASSING, layout.passing)
    return layout


def _slot(placed: list[tuple[TensorFact, str]], stages: dict[str, int]) -> int:
    """Return the bytes of a slot for tensors off the device. Enlarge the staging in `stages`, by disk, for them."""
    for disk in disks_of({home for _, home in placed}):
        staged = slot_bytes(t.stored_bytes for t, home in placed if home == disk)
        stages[disk] = max(stages.get(disk, 0), staged)
    return slot_bytes(t.held_bytes for t, home in placed if home != "device")


def _book_weights(layout: Layout, placed: Iterable[tuple[TensorFact, str]], times: int = 1) -> None:
    for t, home in placed:
        layout.stored_bytes[home] += times * t.stored_bytes
        if home != DISK:  # weights on the first disk stay in the checkpoint
            layout.book(home, "weights", times * aligned(t.held_bytes if home == "device" else t.stored_bytes))


def _head(layout: Layout, model: ModelFacts) -> None:
    """Cut a streamed head into chunks of rows that fit into the layers' slots, all of about the same size.

    After a short last chunk, the next sweep's first layer would wait for the chunk before it, whose slot it takes.
    """
    if (head := model.output) is None:
        return
    home = layout.homes[head.name]
    if home == "device":
        layout.head_rows = model.vocabulary
        return
    together = head.rows_together  # rows of one encoded block
    blocks = -(-model.vocabulary // together)
    room = layout.slot or HEAD_CHUNK
    room -= slot_bytes([room]) - room  # the bytes that `slot_bytes` adds to large tensors
    held, stored = (head.most or nbytes // blocks for nbytes in (head.held_bytes, head.stored_bytes))
    taken = -(-blocks // -(-blocks // max(1, room // held)))
    layout.head_rows = min(model.vocabulary, taken * together)
    layout.slot = max(layout.slot, slot_bytes([taken * held]))
    if place_of(home).disk:
        layout.stages[home] = max(layout.stages.get(home, 0), slot_bytes([taken * stored]))


def _hidden(layout: Layout, model: ModelFacts, workload: Workload, capacity: Capacity) -> None:
    policy = layout.policy
    off_device = [place for place, share in shares(policy.activations).items() if share and place != "device"]
    if not off_device:
        return
    row = model.hidden_bytes
    layout.hidden_buffer = aligned(policy.prefill_tokens * row)
    layout.book("device", "hidden buffers", num_buffers(policy.slots) * layout.hidden_buffer)
    if disks_of(off_device) and capacity.staged:
        layout.book("host", "hidden staging", num_buffers(policy.slots) * layout.hidden_buffer)
    for tier in off_device:
        states = aligned(hidden_tokens(policy, workload, tier) * row)
        layout.hidden_home[tier] = states + open_passes(policy, workload) * ALIGN
        layout.book(tier, "hidden states", layout.hidden_home[tier])


def _edges(layout: Layout, model: ModelFacts, workload: Workload, capacity: Capacity) -> None:
    """Book host memory for the embedding rows of a sweep, if the machine has a GPU and the embedding is off it; device
    buffers for hidden states that enter or leave; and RAM for hidden states that wait to enter."""
    policy, row, table = layout.policy, model.hidden_bytes, model.embedding
    if model.gpu and table is not None and layout.homes[table.name] != "device":
        width = max(model.hidden, table.elements // model.vocabulary)
        layout.embedded = aligned(sweep_tokens(policy, workload) * width * model.itemsize)
        layout.book("host", EMBEDDED, layout.embedded)
    if table is None or model.leaves:
        layout.port_buffer = aligned(policy.prefill_tokens * row)
        ports = (table is None) + model.leaves
        layout.book("device", "port buffers", ports * policy.slots * layout.port_buffer)
    if table is None:
        states = aligned(sweep_tokens(policy, workload) * row)
        layout.book("device" if capacity.shared else "host", ENTERING, states)


def _cache(layout: Layout, model: ModelFacts, workload: Workload, capacity: Capacity) -> None:
    policy, layers, layout.token_bytes = layout.policy, len(model.layers), len(model.layers) * model.kv_token
    homes, longest = cache_homes(policy, layout.places), workload.longest
    layout.groups = groups = model.cache_groups(longest)
    for tier, count in sorted(homes.items(), key=lambda item: item[0] == "device"):  # sequences enter in this order
        slices = max(1, len(policy.team(tier, layout.places))) if policy.partition == TOKENS else 1
        pools = [pages_of(model, tier, longest, group, slices) for group in groups]
        each = zip(groups, pools, strict=True)
        layout.page_bytes[tier] = tuple(g.state or pool.page_tokens * model.kv_token for g, pool in each)
        if tier != "device":
            batch, pages = min(policy.gpu_batch_size, count), layout.page_bytes[tier]
            whole = [workload.pages(batch, pool) for pool in pools]
            passing = whole
            if policy.attends(tier) == HOST:  # pages of decoding sequences pass through no device buffer
                fewer = guest("delegation").prompt_pages
                passing = [min(n, fewer(policy, workload, pool)) for n, pool in zip(whole, pools, strict=True)]
                if workload.stems:  # nothing limits pages of decoding sequences: each may have another prefix
                    whole = [max(n, workload.unshared.pages(batch, p)) for n, p in zip(whole, pools, strict=True)]
            pools = [replace(pool, batch_pages=n) for pool, n in zip(pools, passing, strict=True)]
            layout.cache_buffer = max(0, layout.cache_buffer, *map(mul, passing, pages))
            if place_of(tier).staged and capacity.staged:
                layout.cache_stage = max(0, layout.cache_stage, *map(mul, whole, pages))
        layout.pools[tier] = tuple(pools)
    if model.states:
        guest("records").make_room(layout)
    layout.book("device", "cache buffers", num_buffers(policy.slots) * aligned(layout.cache_buffer))
    if model.topk is not None:
        layout.values = aligned(min(CHOSEN, layout.cache_buffer // 2))
        layout.book("device", VALUES, layout.values)
        layout.book("host", VALUES, layout.values if capacity.staged else 0)
    if model.centred:
        layout.book("device", MEAN_KEYS, aligned(4 * layers * policy.block_size * model.kv_heads * model.head_dim))
    if layout.cache_stage:
        layout.book("host", "cache staging", num_buffers(policy.slots) * aligned(layout.cache_stage))
    expert = max((block.read_bytes for block in model.blocks if block is not None and block.experts), default=0)
    longest_read = max(model.stored_bytes, layout.cache_buffer, layout.cache_stage, layout.hidden_buffer, expert)
    used = {place for place, nbytes in layout.stored_bytes.items() if nbytes} | layout.pools.keys()
    disks = 1 + len((used | layout.hidden_home.keys()).intersection(further_disks(layout.places)))
    layout.book("device" if capacity.shared else "host", READING, read_buffers(longest_read, disks))
    for tier in layout.places:
        _check(layout, tier, capacity, "weights, buffers and workspace")
    needed = {tier: _fill(layout, tier, workload, capacity, count) for tier, count in homes.items()}
    held = {tier for tier, pools in layout.pools.items() if not pools or any(pool.pages for pool in pools)}
    # Without its sequences a worker has no use, so that the policy would not be the one that was given.
    if missing := [tier for tier in homes if tier not in held and (not held or tier in workers_in_memory(homes))]:
        tier, what = missing[0], f"{ONE_SEQUENCE} of {longest:,} tokens"
        limit, used_bytes = _limit_and_used(layout, tier, capacity)
        raise OutOfMemory(tier, what, needed[tier], used_bytes, limit or 0, _remedy(tier))


def _fill(layout: Layout, tier: str, workload: Workload, capacity: Capacity, count: int) -> int:
    """Set the number of pages of a tier's pools, which hold KV cache of at most `count` sequences. Return the bytes of
    the longest sequence's pages there."""
    pools, longest, room = layout.pools[tier], workload.longest, left_bytes(layout, tier, capacity)
    team = layout.policy.team(tier, layout.places) or (tier,)
    if len(team) > 1:
        rooms = [left for member in team if (left := left_bytes(layout, member, capacity)) is not None]
        room = len(team) * (min(rooms) - ALIGN) if rooms else None
    sizes = [page * len(g.layers) for page, g in zip(layout.page_bytes[tier], layout.groups, strict=True)]
    least = [pool.held(longest) for pool in pools]
    needed = [workload.pages(count, pool) for pool in pools]
    pages = shared_out(needed, least, sizes, None if room is None else room - ALIGN)
    if not all(pages) and len(layout.pools) == 1:
        pages = least
    layout.pools[tier] = tuple(replace(pool, pages=n) for pool, n in zip(pools, pages, strict=True))
    for member in team:
        nbytes = sum(n * size for n, size in zip(pages, sizes, strict=True)) // len(team)
        layout.book(member, "KV cache", aligned(nbytes))
    for member in team:
        _check(layout, member, capacity, f"{ONE_SEQUENCE} of {longest:,} tokens")
    return sum(n * size for n, size in zip(least, sizes, strict=True))


def _in_ram(tier: str, capacity: Capacity) -> bool:
    return capacity.shared and not place_of(tier).staged


def _limit_and_used(layout: Layout, tier: str, capacity: Capacity) -> tuple[int | None, int]:
    if _in_ram(tier, capacity):
        return capacity.device, layout.total("device") + layout.total("host")
    return capacity.limits[tier], layout.total(tier)


def left_bytes(layout: Layout, tier: str, capacity: Capacity) -> int | None:
    """Return the bytes of a tier that are not booked; None without a limit."""
    limit, used = _limit_and_used(layout, tier, capacity)
    return None if limit is None else limit - used


def _check(layout: Layout, tier: str, capacity: Capacity, what: str) -> None:
    limit, used = _limit_and_used(layout, tier, capacity)
    if limit is not None and used > limit:
        last = list(layout.account[tier].values())[-1:] or [0]
        booked = f"booked so far: {booked_parts(layout, tier, capacity, used)}"
        raise OutOfMemory(tier, what, last[0], used - last[0], limit, f"{booked}; {_remedy(tier)}")


def booked_parts(layout: Layout, tier: str, capacity: Capacity, nbytes: int) -> str:
    """Return the parts of `nbytes` of a tier, as "name size, name size". Shared memory has parts of both tiers."""
    tiers = ("device", "host") if _in_ram(tier, capacity) else (tier,)
    parts = sum((Counter(layout.account[t]) for t in tiers), Counter[str]())
    parts += Counter({"left free": nbytes - parts.total()})
    return ", ".join(f"{name} {size(part)}" for name, part in parts.items())


def _remedy(tier: str) -> str:
    if (place := place_of(tier)).worker:
        return "give the attention workers more memory with --worker-mem, or make the block smaller"
    which = "" if tier == DISK else f" (the directory of {tier})"
    more = f"set --offload-dir{which} to a directory with more free bytes" if place.disk else "give more memory"
    return f"{more}, move a share of the policy to another tier, or make the block smaller"
