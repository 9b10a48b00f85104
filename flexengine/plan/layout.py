"""How many bytes of what lie where under a policy: pure arithmetic that the engine then allocates to the byte.

All sizes are bytes unless a name says otherwise. Regions are rounded up to ALIGN, as the tiers do.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan import gpu
from flexengine.policy import TIERS, Policy
from flexengine.schedule.order import entrants, pages_for
from flexengine.schedule.place import place_groups, places
from flexengine.schedule.sweeps import Pool

ALIGN = 4096
TENSOR_ALIGN = 64  # of tensors within a slot
PAGE_TOKENS = 16  # of KV pages on the device
ENCODED_ROWS = 16  # of a matrix that lie together when it is encoded
EXTENT = 256 << 10  # least bytes of a KV page off the device, so that links see long transfers
HEAD_CHUNK = 64 << 20  # most bytes of a streamed head chunk where no layer needs a larger slot
MEAN_KEYS = "mean keys"
DELEGATION = "delegation buffers"
VALUES = "chosen values"
EMBEDDED = "embedding rows"
PASSING = "weights on their way to the GPU"
READING = "read buffers"
READ, READ_BUFFERS = 4 << 20, 3  # bytes of a long read from disk, and how many at once, as in tier.disk
SHORT_READ, SHORT_READERS = READ // 4, 4  # bytes of a short one, and threads that have a buffer for one each
PASS = 192 << 10  # bytes of an open forward pass beside tensors: its stack, frames and page tables
GAP = 64 << 10  # between rows that a disk reads together, as tier.disk does
CHOSEN = 4 << 20  # most bytes of chosen values that are on their way at once
ONE_SEQUENCE = "the KV cache of one sequence"  # how the errors begin that the longest row causes
_REMEDIES = {"disk": "set --offload-dir to a directory with more free bytes"}
_MORE = "give more memory"  # of any other tier


def aligned(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class TensorFact:
    """elements: how many; stored, held: bytes per element in the checkpoint and on the device.

    experts: how many experts share it, 0 if every token uses all of it. matrix: whether tokens are multiplied by it.
    encoded: bytes of all of it, on every tier, if it is kept in a codec's form, which `form` names; else 0. Then rows
    can be taken apart by ENCODED_ROWS only.
    """

    name: str
    elements: int
    stored: int
    held: int
    experts: int = 0
    matrix: bool = True
    encoded: int = 0
    form: str = ""

    @cached_property
    def stored_bytes(self) -> int:
        return self.encoded or self.elements * self.stored

    @cached_property
    def held_bytes(self) -> int:
        return self.encoded or self.elements * self.held


@dataclass(frozen=True)
class ModelFacts:
    """A model in numbers. layers: tensors per layer in order; others: outside layers; head rows: vocabulary.

    itemsize: bytes per element in the compute dtype; width: widest activation of a layer; head: None when tied.
    kv_form: name of the format that K and V are kept in, "" if they are kept as they are computed.
    kv_kept: bytes one token adds to one layer's KV cache, if it is not kept as it is computed; kv_pieces: places in a
    page where parts of its K of one head lie; centred: whether mean keys are apart; topk: share of the
    past values that attention reads, None for all.
    scratch: bytes that the kernels' attention of prompts takes beside its arguments and result.
    kind: model type; active: experts that one token uses; windows: per layer, tokens its attention sees (None: all),
    () where all see all; softcap: number that attention's scores stay below, None for no limit. gpu: whether a GPU
    computes.
    """

    layers: tuple[tuple[TensorFact, ...], ...]
    others: tuple[TensorFact, ...]
    embedding: TensorFact
    head: TensorFact | None
    vocabulary: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    kind: str = ""
    active: int = 0
    windows: tuple[int | None, ...] = ()
    softcap: float | None = None
    kv_kept: int = 0
    kv_pieces: int = 1
    centred: bool = False
    topk: float | None = None
    scratch: int = 0
    kv_form: str = ""
    gpu: bool = False

    @property
    def kv_token(self) -> int:
        """Bytes one token adds to one layer's KV cache."""
        return self.kv_kept or 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def sent(self) -> int:
        """Bytes one token's queries, key and value take on their way to delegated attention."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim * self.itemsize

    @property
    def fetched(self) -> int:
        """Bytes one token's attention takes on its way back."""
        return self.heads * self.head_dim * self.itemsize

    @cached_property
    def tensors(self) -> tuple[TensorFact, ...]:
        """Every weight."""
        return (*(t for layer in self.layers for t in layer), *self.others, *self.edges)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all weights in their files."""
        return sum(t.stored_bytes for t in self.tensors)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each layer, the first whose tensors have the same bytes."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        sizes = (tuple((t.held_bytes, t.stored_bytes) for t in layer) for layer in self.layers)
        return tuple(first.setdefault(size, j) for j, size in enumerate(sizes))

    @cached_property
    def groups(self) -> tuple[tuple[TensorFact, ...], ...]:
        """The weights that have a home: of each layer, then the edges, each alone."""
        return (*self.layers, *((t,) for t in self.edges))

    @cached_property
    def group_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each weight of `groups`."""
        return tuple(tuple(t.elements for t in group) for group in self.groups)

    @property
    def edges(self) -> list[TensorFact]:
        """The output projection (the embedding, where they are tied), then an embedding of its own."""
        return [self.head, self.embedding] if self.head else [self.embedding]

    def signature(self, layer: int) -> str:
        """The same for layers whose computing takes the same time: under it `Hardware.layers` has the measured one."""
        tensors = sorted(((t.elements, t.form or t.held, t.experts, t.matrix) for t in self.layers[layer]), key=repr)
        shape = (self.kind, self.hidden, self.width, self.heads, self.kv_heads, self.head_dim, self.itemsize)
        return f"{self.kind or 'layer'} {hashlib.sha256(repr((shape, self.active, tensors)).encode()).hexdigest()[:16]}"

    def attention_signature(self, window: int | None = None) -> str:
        """Return the key of `Hardware.attention`: equal for layers whose attention runs at equal rates. window: tokens
        that the layer sees, None for all."""
        kept = self.kv_form or f"{8 * self.itemsize}-bit"
        shape = f"{self.heads // self.kv_heads} queries per KV head of {self.head_dim}, {kept}"
        seen = (f", window {window}" if window else "") + (", soft cap" if self.softcap else "")
        return shape + seen + (f", topk {self.topk:g}" if self.topk is not None else "")

    @property
    def head_signature(self) -> str:
        """The same for output projections that take the same time."""
        head = self.edges[0]
        return f"{self.vocabulary}x{self.hidden} held in {head.form or f'{head.held} bytes'}"


@dataclass(frozen=True)
class Workload:
    """How many sequences there are of each size. sizes: (prompt tokens, most tokens to generate) to their number."""

    sizes: Mapping[tuple[int, int], int]

    @staticmethod
    def of(lengths: Iterable[tuple[int, int]]) -> "Workload":
        """The workload of sequences with these sizes."""
        return Workload(Counter(lengths))

    def up_to(self, tokens: int) -> "Workload":
        """The sequences of at most so many tokens at their end."""
        return Workload({(p, n): times for (p, n), times in self.sizes.items() if p + n <= tokens})

    @cached_property
    def count(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """(Peak cached tokens, number of sequences), falling."""
        return sorted(((p + n - 1, times) for (p, n), times in self.sizes.items()), reverse=True)

    @cached_property
    def _prompts(self) -> list[tuple[int, int]]:
        """(Prompt tokens, number of sequences), falling."""
        return sorted(((p, times) for (p, _), times in self.sizes.items()), reverse=True)

    @cached_property
    def longest(self) -> int:
        """Peak cached tokens of the longest sequence; the last token generated is never cached."""
        return max((n for n, _ in self._ends), default=1)

    def pages(self, count: int, page_tokens: int) -> int:
        """Pages that the `count` longest sequences take at their peak."""
        return sum(times * pages_for(n, page_tokens) for n, times in _first(self._ends, count))

    def prompt_tokens(self, count: int) -> int:
        """Tokens of the `count` longest prompts together."""
        return sum(times * n for n, times in _first(self._prompts, count))


def _first(numbers: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """The first `count` of numbers given as (number, how often it occurs)."""
    for number, times in numbers:
        if count <= 0:
            return
        yield number, min(times, count)
        count -= times


@dataclass(frozen=True)
class Capacity:
    """Bytes of each tier, None for no limit. shared: host and device are one memory (a machine without a GPU).

    staged: disk and device are not directly connected; what passes between them stops in host staging.
    """

    device: int | None
    host: int | None
    disk: int | None
    shared: bool
    staged: bool


@dataclass
class Layout:
    """Who gets what. `account` books bytes per memory and purpose; the ledgers must agree with it.

    homes: tier of every tensor by name; stored: sum of their `stored_bytes` by tier; head_rows: vocabulary
    rows per head chunk.
    slot, stage: bytes of one weight slot and of its host staging.
    pools: KV pages per tier; page_bytes: of one layer's page, per tier; cache_buffer: device bytes of one buffer.
    hidden_buffer: one device buffer for hidden states; hidden_home: bytes of the off-device homes, per tier.
    values: bytes of chosen values that are on their way to a buffer at once.
    embedded: host bytes of a sweep's rows of an embedding off a GPU. passing: host bytes that weights pass through
    which are read once into GPU memory.
    delegation: bytes, on the device and on the host, of what delegated attention of all gpu_batches needs and gives.
    """

    policy: Policy
    homes: dict[str, str] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    head_rows: int = 0
    slot: int = 0
    stage: int = 0
    pools: dict[str, Pool] = field(default_factory=dict)
    page_bytes: dict[str, int] = field(default_factory=dict)
    cache_buffer: int = 0
    values: int = 0
    embedded: int = 0
    passing: int = 0
    hidden_buffer: int = 0
    hidden_home: dict[str, int] = field(default_factory=dict)
    delegation: int = 0
    account: dict[str, dict[str, int]] = field(default_factory=lambda: {t: {} for t in TIERS})

    def book(self, tier: str, what: str, nbytes: int) -> None:
        if nbytes:
            self.account[tier][what] = self.account[tier].get(what, 0) + nbytes

    def total(self, tier: str) -> int:
        return sum(self.account[tier].values())

    def head_chunks(self, vocabulary: int) -> list[tuple[int, int]]:
        """(first, last + 1) rows of each head chunk."""
        return [(at, min(at + self.head_rows, vocabulary)) for at in range(0, vocabulary, self.head_rows)]


def slot_offsets(tensors: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Where each (name, nbytes) starts in a slot; the slot's size is `slot_bytes`."""
    offsets, at = {}, 0
    for name, nbytes in tensors:
        offsets[name] = at
        at += aligned(nbytes, TENSOR_ALIGN)
    return offsets


def slot_bytes(sizes: Iterable[int]) -> int:
    """Of a slot with tensors of so many bytes."""
    return sum(aligned(n, TENSOR_ALIGN) for n in sizes)


def workspace(model: ModelFacts, policy: Policy, workload: Workload) -> int:
    """Bytes that computing one gpu_batch may take at once: activations of its widest moments, two sets of logits, and
    the scratch of the attention kernels.

    A gated FFN holds gate, up and their product, of `width` each, next to the residual, its norm and casts; attention
    holds q, k, v with and without rotation.
    """
    tokens = batch_tokens(policy, workload)
    projections = 3 * (model.heads + 2 * model.kv_heads) * model.head_dim
    moment = max(4 * model.width + 3 * model.hidden, projections + 6 * model.hidden)
    logits = 2 * 4 * model.vocabulary * min(policy.gpu_batch_size, workload.count or 1)
    return aligned(tokens * moment * model.itemsize + logits + model.scratch)


def batch_tokens(policy: Policy, workload: Workload) -> int:
    """Return the most tokens of one gpu_batch."""
    return min(policy.prefill_tokens, max(workload.prompt_tokens(policy.block_size), policy.gpu_batch_size))


def sweep_tokens(policy: Policy, workload: Workload) -> int:
    """Return the most tokens that one sweep computes: the longest prompts of all sequences that may enter in one sweep
    under the policy's schedule, and one token of each other sequence of the block."""
    entering = entrants(policy.schedule, 0, policy.gpu_batch_size, policy.num_gpu_batches)
    decoding = min(policy.block_size, workload.count) - min(entering, workload.count)
    return workload.prompt_tokens(entering) + decoding


def open_passes(policy: Policy, workload: Workload) -> int:
    """Return the most gpu_batches of one sweep: those of the block and, of prompts, one per `prefill_tokens`."""
    decoding = min(policy.block_size, max(1, workload.count))
    return decoding + sweep_tokens(policy, workload) // policy.prefill_tokens + 1


def hidden_tokens(policy: Policy, workload: Workload, tier: str) -> int:
    """Return the most tokens of one sweep whose hidden states have their home on `tier`.

    `place` assigns whole gpu_batches by their tokens, so a tier gets at most its share and one gpu_batch more.
    """
    share, total = policy.activations[TIERS.index(tier)], sweep_tokens(policy, workload)
    return min(total, math.ceil(share * total) + policy.prefill_tokens) if share else 0


def _kernel_buffers(model: ModelFacts, policy: Policy, workload: Workload) -> int:
    """Bytes that a GPU's kernels hold beside activations; 0 where none computes."""
    if not model.gpu:
        return 0
    return aligned(gpu.buffers(model, batch_tokens(policy, workload), workload.longest))


def paused(model: ModelFacts, policy: Policy, workload: Workload) -> int:
    """Bytes that the paused forward passes of a whole sweep hold on the device.

    Layer-major order keeps every gpu_batch's pass open: each holds its embedding output (and learned positions, where
    there are any) to the end, and its hidden states where their home is the device; of every token also cosines and
    sines of rotary positions in fp32, its id and its position; and PASS bytes.
    """
    prompts = workload.prompt_tokens(policy.block_size)
    if policy.block_size == policy.gpu_batch_size and prompts <= policy.prefill_tokens:
        return 0  # a single batch, which the workspace covers
    tokens, resident = sweep_tokens(policy, workload), hidden_tokens(policy, workload, "device")
    logits = 4 * model.vocabulary * min(policy.block_size, workload.count or 1)
    row = model.hidden * model.itemsize
    passes = open_passes(policy, workload) * PASS if not model.gpu else 0
    return aligned(tokens * (row + 2 * 4 * model.head_dim + 2 * 8) + resident * row + logits + passes)


def delegated(policy: Policy) -> int:
    """Most sequences that attend on the host at once."""
    return places(policy.block_size, policy.cache).get("host", 0) if policy.delegate else 0


def suspended(model: ModelFacts, policy: Policy) -> int:
    """Bytes that forward passes hold on the device while their attention is computed elsewhere: q, k, v with and
    without rotation, and the residual with its norm and casts."""
    return aligned(delegated(policy) * (3 * model.sent + 4 * model.hidden * model.itemsize))


def lay_out(
    model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity, weights: Layout | None = None
) -> Layout:
    """The layout of a job. KV pools take what the workload needs or what memory is left, whichever is less.

    weights: what `lay_out_weights` gave for this policy's weights and slots, from whoever asks about many policies.
    Raises OutOfMemory, with the numbers, when the rest does not fit or not one sequence could be cached, and
    InvalidInput for a policy that delegates attention where no cache lives apart from the device.
    """
    placed = weights or lay_out_weights(model, policy, capacity.staged)
    account = {tier: dict(booked) for tier, booked in placed.account.items()}
    layout = replace(placed, policy=policy, pools={}, page_bytes={}, hidden_home={}, account=account)
    _hidden(layout, model, workload, capacity)
    _embedded(layout, model, workload)
    layout.book("device", "workspace", workspace(model, policy, workload) + _kernel_buffers(model, policy, workload))
    layout.book("device", "paused forwards", paused(model, policy, workload) + suspended(model, policy))
    _delegation(layout, model, capacity)
    for tier in TIERS:
        _check(layout, tier, capacity, "weights, buffers and workspace")
    _cache(layout, model, workload, capacity)
    return layout


def lay_out_weights(model: ModelFacts, policy: Policy, staged: bool) -> Layout:
    """The part of a layout that depends on the policy's weights and slots alone. staged: see Capacity."""
    layout = Layout(policy)
    homes = place_groups(model.group_sizes, policy.weights)
    for group, at in zip(model.groups, homes, strict=True):
        layout.homes.update(zip((t.name for t in group), at, strict=True))
    layout.homes.update((t.name, "device") for t in model.others)
    layers = Counter(zip(model.alike, homes, strict=False))  # at the end of the homes are those of the edges
    for (j, at), times in layers.items():
        placed = list(zip(model.layers[j], at, strict=True))
        layout.slot = max(layout.slot, slot_bytes(t.held_bytes for t, home in placed if home != "device"))
        layout.stage = max(layout.stage, slot_bytes(t.stored_bytes for t, home in placed if home == "disk"))
        _book_weights(layout, placed, times)
    _book_weights(layout, [(t, layout.homes[t.name]) for t in (*model.others, *model.edges)])
    _head(layout, model)
    layout.book("device", "weight slots", policy.slots * aligned(layout.slot))
    if staged:
        layout.book("host", "weight staging", policy.slots * aligned(layout.stage))
    if model.gpu:
        layout.passing = gpu.CONVERTED
        layout.book("host", PASSING, layout.passing)
    return layout


def _book_weights(layout: Layout, placed: Iterable[tuple[TensorFact, str]], times: int = 1) -> None:
    """Of tensors with their homes, so many times."""
    for t, home in placed:
        layout.stored[home] += times * t.stored_bytes
        if home != "disk":  # the disk home of a weight is the user's own checkpoint
            layout.book(home, "weights", times * aligned(t.held_bytes if home == "device" else t.stored_bytes))


def _head(layout: Layout, model: ModelFacts) -> None:
    """Cuts a streamed head into runs of rows that fit the slots the layers need anyway."""
    head = model.edges[0]
    home = layout.homes[head.name]
    if home == "device":
        layout.head_rows = model.vocabulary
        return
    together = ENCODED_ROWS if head.encoded else 1  # rows that cannot be parted
    runs = -(-model.vocabulary // together)
    room = layout.slot or HEAD_CHUNK
    taken = min(runs, max(1, room // (head.held_bytes // runs)))
    layout.head_rows = min(model.vocabulary, taken * together)
    layout.slot = max(layout.slot, aligned(taken * (head.held_bytes // runs), TENSOR_ALIGN))
    if home == "disk":
        layout.stage = max(layout.stage, aligned(taken * (head.stored_bytes // runs), TENSOR_ALIGN))


def _hidden(layout: Layout, model: ModelFacts, workload: Workload, capacity: Capacity) -> None:
    policy = layout.policy
    away = [t for t, share in zip(TIERS, policy.activations, strict=True) if share and t != "device"]
    if not away:
        return
    row = model.hidden * model.itemsize
    layout.hidden_buffer = aligned(policy.prefill_tokens * row)
    layout.book("device", "hidden buffers", policy.slots * layout.hidden_buffer)
    if "disk" in away and capacity.staged:
        layout.book("host", "hidden staging", policy.slots * layout.hidden_buffer)
    for tier in away:
        states = aligned(hidden_tokens(policy, workload, tier) * row)
        layout.hidden_home[tier] = states + open_passes(policy, workload) * ALIGN
        layout.book(tier, "hidden states", layout.hidden_home[tier])


def _embedded(layout: Layout, model: ModelFacts, workload: Workload) -> None:
    """Host memory for the rows that a sweep's tokens need of an embedding off a GPU. On a CPU they are activations."""
    if not model.gpu or layout.homes[model.embedding.name] == "device":
        return
    width = max(model.hidden, model.embedding.elements // model.vocabulary)
    layout.embedded = aligned(sweep_tokens(layout.policy, workload) * width * model.itemsize)
    layout.book("host", EMBEDDED, layout.embedded)


def _delegation(layout: Layout, model: ModelFacts, capacity: Capacity) -> None:
    """A place for every sequence, so that no gpu_batch waits for another's; and what the kernels give on the host
    before it lies in its place, which is one gpu_batch's at a time."""
    policy, rows = layout.policy, delegated(layout.policy)
    if not policy.delegate:
        return
    if capacity.shared:
        raise InvalidInput("policy delegate is true, but on device 'cpu' RAM is the device: attention runs where its"
                           " cache lives anyway; set it to false")  # fmt: skip
    if not rows:
        raise InvalidInput(f"policy delegate is true, but none of a block of {policy.block_size} sequences has its"
                           f" cache on the host, whose share is {policy.cache[1]:g}")  # fmt: skip
    layout.delegation = aligned(rows * model.sent)
    for tier in ("device", "host"):
        layout.book(tier, DELEGATION, layout.delegation)
    layout.book("host", "delegation workspace", aligned(min(rows, policy.gpu_batch_size) * model.fetched))


def read_buffers(model: ModelFacts, layout: Layout) -> int:
    """Return the bytes of RAM that data from disk is read into before it is converted: buffers for long reads, where
    one is long, and for short ones. Of a buffer only as much is touched as the longest read fills; weights that lie
    next to each other are one read."""
    longest = max(model.stored_bytes, layout.cache_buffer, layout.hidden_buffer)
    long = min(READ_BUFFERS * READ, longest) if longest >= SHORT_READ else 0
    return aligned(long) + SHORT_READERS * aligned(min(SHORT_READ, longest) + 2 * ALIGN)


def page_tokens(model: ModelFacts, tier: str, longest: int) -> int:
    """Tokens of one KV page. Off the device pages are extents of at least EXTENT bytes, and whole ALIGN blocks."""
    if tier == "device":
        return PAGE_TOKENS
    wanted = min(-(-EXTENT // model.kv_token), longest)
    tokens = aligned(wanted, PAGE_TOKENS)
    while tokens * model.kv_token % ALIGN:
        tokens += PAGE_TOKENS
    return tokens


def _cache(layout: Layout, model: ModelFacts, workload: Workload, capacity: Capacity) -> None:
    policy, layers = layout.policy, len(model.layers)
    homes = places(policy.block_size, policy.cache)
    longest = workload.longest
    for tier in homes:
        tokens = page_tokens(model, tier, longest)
        layout.page_bytes[tier] = tokens * model.kv_token
        if tier != "device":
            batch = workload.pages(min(policy.gpu_batch_size, homes[tier]), tokens)
            layout.pools[tier] = Pool(0, tokens, batch)
            layout.cache_buffer = max(layout.cache_buffer, batch * layout.page_bytes[tier])
    layout.book("device", "cache buffers", policy.slots * aligned(layout.cache_buffer))
    if model.topk is not None:
        layout.values = aligned(min(CHOSEN, layout.cache_buffer // 2))
        layout.book("device", VALUES, layout.values)
        layout.book("host", VALUES, layout.values if capacity.staged else 0)
    if model.centred:
        layout.book("device", MEAN_KEYS, aligned(4 * layers * policy.block_size * model.kv_heads * model.head_dim))
    if "disk" in homes and capacity.staged:
        layout.book("host", "cache staging", policy.slots * aligned(layout.cache_buffer))
    layout.book("device" if capacity.shared else "host", READING, read_buffers(model, layout))
    for tier in TIERS:
        _check(layout, tier, capacity, "weights, buffers and workspace")
    for tier, count in homes.items():
        page = layout.page_bytes[tier] * layers
        tokens = page // (model.kv_token * layers)
        needed = workload.pages(count, tokens)
        room = _left(layout, tier, capacity)
        pages = needed if room is None else min(needed, max(0, (room - ALIGN) // page))
        if pages < pages_for(longest, tokens):
            pages = 0 if len(homes) > 1 else pages_for(longest, tokens)
        old = layout.pools.get(tier)
        layout.pools[tier] = Pool(pages, tokens, old.batch_pages if old else None)
        layout.book(tier, "KV cache", aligned(pages * page))
        _check(layout, tier, capacity, f"{ONE_SEQUENCE} of {longest:,} tokens")
    if not any(p.pages for p in layout.pools.values()):
        tier = next(iter(homes))
        page = layout.page_bytes[tier] * layers
        needed = page * pages_for(longest, layout.pools[tier].page_tokens)
        raise OutOfMemory(tier, f"{ONE_SEQUENCE} of {longest:,} tokens", needed,
                          _used(layout, tier, capacity), _limit(tier, capacity) or 0, _remedy(tier))  # fmt: skip


def _used(layout: Layout, tier: str, capacity: Capacity) -> int:
    if capacity.shared and tier != "disk":
        return layout.total("device") + layout.total("host")
    return layout.total(tier)


def _limit(tier: str, capacity: Capacity) -> int | None:
    limit: int | None = capacity.device if capacity.shared and tier != "disk" else getattr(capacity, tier)
    return limit


def _left(layout: Layout, tier: str, capacity: Capacity) -> int | None:
    limit = _limit(tier, capacity)
    return None if limit is None else limit - _used(layout, tier, capacity)


def _check(layout: Layout, tier: str, capacity: Capacity, what: str) -> None:
    limit, used = _limit(tier, capacity), _used(layout, tier, capacity)
    if limit is not None and used > limit:
        last = list(layout.account[tier].values())[-1:] or [0]
        booked = f"booked so far: {booked_parts(layout, tier, capacity, used)}"
        raise OutOfMemory(tier, what, last[0], used - last[0], limit, f"{booked}; {_remedy(tier)}")


def booked_parts(layout: Layout, tier: str, capacity: Capacity, nbytes: int) -> str:
    """Return what takes `nbytes` of a tier, as `name bytes, name bytes`. A CPU's RAM is device and host tier."""
    tiers = ("device", "host") if capacity.shared and tier != "disk" else (tier,)
    parts = sum((Counter(layout.account[t]) for t in tiers), Counter[str]())
    parts += Counter({"left free": nbytes - parts.total()})
    return ", ".join(f"{name} {part:,}" for name, part in parts.items())


def _remedy(tier: str) -> str:
    return f"{_REMEDIES.get(tier, _MORE)}, move a share of the policy to another tier, or make the block smaller"
