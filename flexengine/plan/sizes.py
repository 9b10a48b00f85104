"""Numbers of tokens that a policy computes at once, bytes of buffers, and KV pages: their sizes and numbers.

All sizes are in bytes unless a name has another unit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexengine.places import place_of
from flexengine.plan import guest
from flexengine.plan.facts import CacheGroup, ModelFacts
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, shares
from flexengine.schedule.frame import num_buffers
from flexengine.schedule.pages import RECORD, Pool
from flexengine.schedule.place import cache_homes
from flexengine.schedule.sweeps import entrants

PAGE_TOKENS = 16  # tokens of a KV page on the device
EXTENT = 256 << 10  # least bytes of a KV page off the device, so that transfers are long
ALIGN = 4096  # bytes
TENSOR_ALIGN = 64  # bytes, for tensors within a slot
TORCH_ALIGN = 8  # bytes; the address of a tensor is a multiple of this, which is enough for every dtype
STRAIGHT = 256 << 10  # bytes; direct reads go straight into tensors of this size or more within a slot
PASS = 192 << 10  # bytes of a paused forward pass without tensors: stack, frames and page tables
SCORED_ROWS = 64  # most scored tokens whose logits are in memory at once; enough for the full speed of kernels
DELEGATION, DESKS = "delegation buffers", "buffers of attention workers"
READ, READ_BUFFERS = 4 << 20, 3  # bytes of a long read from disk, and number of buffers, as in tier/disk.py
HUGE = 2 << 20  # bytes of a huge page
SHORT_READ, SHORT_READERS = READ // 4, 4  # bytes of a short read, and threads with one buffer each
DRAWN = 25  # bytes of scratch per token of the vocabulary and thread, at most, as in kernels/sampling.cpp
# Memory that kernels and libraries take on a GPU beside activations.
SCRATCH = 64 << 20  # bytes of a kernel's scratch memory, as in kernels/cuda.py
GATHERED = 32  # bytes of scratch per element of K and V in plain torch attention, as in kernels/cuda.py
MAX_FUSED_HEAD_DIM = 256  # most elements of a head in fused attention, as in kernels/triton_attention.py
SPAN_TOKENS = 512  # tokens of one partial result of fused attention, as in kernels/triton_attention.py
MIN_GROUP_COLUMNS = 32  # fewest columns of x that share a scale if x is rounded to 8 bits
CONVERTED = 16 << 20  # bytes of host elements that are converted on the GPU at once, as in tier/cuda.py
EXPERTS_KEPT = 8 << 20  # bytes that the native call of experts keeps, as in kernels/experts.py
BLOCK_QUERIES = 1024  # queries per call of attention within a window, as in kernels/reference.py
CUBLAS = 64 << 20  # bytes of workspaces: at most 32 MiB for each of two streams that multiply
Array = NDArray[np.float64]


def aligned(nbytes: int, to: int = ALIGN) -> int:
    """Return `nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def slot_offsets(tensors: Sequence[tuple[str, int]], starts: Mapping[str, int]) -> dict[str, int]:
    """Return the byte offset of each tensor in a slot, by name.

    A disk can write straight into memory that begins where a block of the disk does. So a tensor of STRAIGHT bytes or
    more lies as many bytes after a multiple of ALIGN as it does in its file.

    Args:
        tensors: (name, bytes) pairs.
        starts: by name, the first byte in the file of each tensor that is read from a disk into the slot.
    """
    offsets, offset = {}, 0
    for name, nbytes in tensors:
        offsets[name] = offset
        if nbytes >= STRAIGHT and name in starts and starts[name] % TORCH_ALIGN == 0:
            offsets[name] += (starts[name] - offset) % ALIGN
        offset += room(nbytes)
    return offsets


def room(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a slot."""
    return aligned(nbytes, TENSOR_ALIGN) + (ALIGN if nbytes >= STRAIGHT else 0)


def slot_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a slot for tensors of these sizes."""
    return sum(map(room, sizes))


def batch_tokens(policy: Policy, workload: Workload) -> int:
    """Return the most tokens of one gpu_batch."""
    return min(policy.prefill_tokens, max(workload.prompt_tokens(policy.block_size), policy.gpu_batch_size))


def sweep_tokens(policy: Policy, workload: Workload) -> int:
    """Return the most tokens of one sweep: the longest prompts of as many sequences as may enter together, and one
    token of each other sequence of the block."""
    entering = entrants(policy.schedule, 0, policy.gpu_batch_size, policy.num_gpu_batches)
    decoding = min(policy.block_size, workload.count) - min(entering, workload.count)
    return workload.prompt_tokens(entering) + decoding


def open_passes(policy: Policy, workload: Workload) -> int:
    """Return the most gpu_batches of one sweep: one per sequence, and one more per `prefill_tokens` tokens."""
    decoding = min(policy.block_size, max(1, workload.count))
    return decoding + sweep_tokens(policy, workload) // policy.prefill_tokens + 1


def hidden_tokens(policy: Policy, workload: Workload, tier: str) -> int:
    """Return the most tokens of one sweep with hidden states on `tier`.

    `assign_tiers` assigns whole gpu_batches by their tokens, so a tier gets at most its share plus one gpu_batch.
    """
    share, total = shares(policy.activations).get(tier, 0.0), sweep_tokens(policy, workload)
    return min(total, math.ceil(share * total) + policy.prefill_tokens) if share else 0


def workspace(model: ModelFacts, policy: Policy, workload: Workload) -> int:
    """Return the peak bytes of computing one gpu_batch: activations, two sets of logits (three if tokens are scored),
    and scratch of kernels: of attention, or of drawing tokens.

    Activations per token: a gated FFN has gate, up and their product of `width` elements each, the residual, its norm
    and casts. Attention has q, k, v with and without rotation. The native call of experts keeps rows of all chosen
    experts: input and result, before and after the gate, and rounded, beside a struct for each step.
    """
    tokens = batch_tokens(policy, workload)
    projections = 3 * (model.heads + 2 * model.kv_heads) * model.head_dim
    moment = max(4 * model.width + 3 * model.hidden_width, projections + 6 * model.hidden_width)
    logits = 2 * model.logits * min(policy.gpu_batch_size, workload.count or 1)
    if workload.scored is not None:
        rows = SCORED_ROWS if workload.scored else min(SCORED_ROWS, policy.gpu_batch_size, workload.count)
        logits = max(logits, 3 * model.logits * rows)
    threads = min(model.drawing, policy.gpu_batch_size, workload.count or 1)
    drawn = 0 if model.leaves else threads * aligned(DRAWN * model.vocabulary + ALIGN)
    row = (3 * model.hidden + 4 * model.width) * model.itemsize + 1024
    experts = 0 if model.gpu else min(EXPERTS_KEPT, tokens * model.active * row)
    token_bytes, most_tokens, sequence_bytes, most_sequences, _ = model.mixing
    padded = min(most_tokens, tokens + policy.gpu_batch_size * model.grain)  # prompts fill whole grains
    mixed = max(token_bytes * padded, sequence_bytes * min(most_sequences, policy.gpu_batch_size))
    mixed += guest("records").choosing_bytes(model, tokens, workload.longest) if model.choosing else 0
    mixed += guest("records").added_bytes(model, tokens, workload.longest) if model.added else 0
    mixed += tokens * model.held
    return aligned(tokens * moment * model.itemsize + logits + max(model.scratch, drawn) + experts + mixed)


def paused(model: ModelFacts, policy: Policy, workload: Workload) -> int:
    """Return the device bytes of the paused forward passes of a whole sweep.

    Cells are computed layer by layer, so the passes of all gpu_batches are open at once. A pass has PASS bytes and, per
    token: the output of the embedding, hidden states if they stay on the device, cosines and sines of rotary positions
    in fp32, id and position, and the numbers of chosen keys, if later layers see these, too. Where hidden states leave
    the device, the first layer's end frees the output of the embedding, unless layers read it, too.
    """
    prompts = workload.prompt_tokens(policy.block_size)
    if policy.block_size == policy.gpu_batch_size and prompts <= policy.prefill_tokens:
        return 0  # a single gpu_batch: in the workspace
    tokens, resident = sweep_tokens(policy, workload), hidden_tokens(policy, workload, "device")
    logits = model.logits * min(policy.block_size, workload.count or 1)
    chosen = 4 * model.choosing[0] + 8 if model.inherits and model.chooses(workload.longest) else 0
    passes = open_passes(policy, workload) * PASS if not model.gpu else 0
    batches = num_buffers(policy.slots) if model.experts else 1
    embedded = tokens if model.embedding_stays else min(tokens, resident + batches * batch_tokens(policy, workload))
    token = 2 * 4 * model.head_dim + 2 * 8 + chosen
    more = max(0, model.held - token - model.hidden * model.itemsize)
    own = embedded * model.hidden * model.itemsize + tokens * (token + more)
    return aligned(own + resident * model.hidden_bytes + logits + passes)


def gpu_buffers(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return the bytes that kernels and libraries hold at once on a GPU, beside activations and logits.

    Args:
        tokens: most tokens of a gpu_batch.
        longest: most cached tokens of a sequence.
    """
    partial = 4 * model.heads * -(-longest // SPAN_TOKENS) * (model.head_dim + 1)  # one sequence is never divided
    fused = model.topk is None and model.head_dim <= MAX_FUSED_HEAD_DIM
    gathered = 0 if fused else GATHERED * 2 * model.kv_heads * model.head_dim * longest
    wide = max(model.width, model.hidden)
    groups = -(-wide // MIN_GROUP_COLUMNS)  # each has a scale and a sum
    rounded = any(t.form.endswith("by int8") for t in model.tensors)  # whether products round activations to 8 bits
    codes = tokens * (wide + MIN_GROUP_COLUMNS + 8 * groups) if rounded else 0
    # All experts are computed in one call: of each token and chosen expert there are four copies (before, after,
    # weighted, reordered), and input and output of the gate, with copies.
    copied = 4 * model.hidden + 2 * model.expert_width if model.expert_width else 0
    experts = tokens * model.active * copied * model.itemsize
    converted = CONVERTED if any(t.stored != t.held and not t.encoded for t in model.tensors) else 0
    copies = 2 * model.heads * model.head_dim * model.itemsize * tokens if model.heads > model.kv_heads else 0
    windowed = 0
    for window in {w for w in model.attended if w is not None and w < longest}:
        # K and V of all prompts longer than the window are copied for every query head, and there are two masks.
        keys, prompts = min(window + BLOCK_QUERIES, longest), max(1, tokens // (window + 1))
        key = 2 * model.heads * model.head_dim * model.itemsize * prompts + BLOCK_QUERIES * (1 + model.itemsize)
        windowed = max(windowed, keys * key)
    attention = max(SCRATCH, partial, gathered, copies, windowed)
    return attention + codes + experts + converted + CUBLAS


def delegated(policy: Policy, places: Iterable[str]) -> dict[str, int]:
    """Return the most sequences with delegated decode attention, by place that computes it. places: places of the
    machine."""
    homes, rows = cache_homes(policy, places), dict[str, int]()
    for home, place in policy.attended(homes).items():
        rows[place] = rows.get(place, 0) + homes[home]
    return rows


def read_buffers(longest: int, disks: int) -> int:
    """Return the bytes of RAM buffers of all disks in use. Data is read into these buffers, then converted.

    A disk has buffers for short reads and, if any read is long, for long reads. Consecutive weights are one read. Only
    the part of a buffer that the longest read fills takes RAM, in huge pages if the read is long.

    Args:
        longest: bytes of the longest read.
        disks: number of disks in use.
    """
    long = READ_BUFFERS * min(READ, aligned(longest, HUGE)) if longest >= SHORT_READ else 0
    return disks * (aligned(long) + SHORT_READERS * aligned(min(SHORT_READ, longest) + 2 * ALIGN))


def page_tokens(model: ModelFacts, tier: str, longest: int, window: int | None = None, slices: int = 1) -> int:
    """Return the tokens of one KV page.

    Pages of attention workers do not move to the device, so they are as small as there. Elsewhere off the device, a
    page has at least EXTENT bytes, or holds the longest sequence, and is a multiple of ALIGN bytes. A window has at
    least two pages, because attention reads only a part of its oldest page.

    Args:
        longest: tokens of the longest sequence.
        window: tokens that the layers' queries see, None for all.
        slices: number of attention workers among which the tokens of a page are divided.
    """
    if tier == "device" or place_of(tier).worker:
        return slices * PAGE_TOKENS
    wanted = min(-(-EXTENT // model.kv_token), longest if window is None else min(longest, -(-window // 2)))
    tokens = aligned(wanted, PAGE_TOKENS)
    while tokens * model.kv_token % ALIGN:
        tokens += PAGE_TOKENS
    return tokens


def pages_of(model: ModelFacts, tier: str, longest: int, group: CacheGroup, slices: int = 1) -> Pool:
    """Return an empty pool of a group of layers. longest, slices: as in `page_tokens`."""
    if group.state:
        return Pool(0, RECORD, grain=model.grain)
    return Pool(0, page_tokens(model, tier, longest, group.window, slices), None, group.window)


def shared_out(needed: Sequence[int], least: Sequence[int], sizes: Sequence[int], room: int | None) -> list[int]:
    """Return the number of pages of each pool.

    If not all needed pages fit, each pool gets its least, and an equal share of its other needed pages. If even the
    least does not fit, all pools get 0 pages.

    Args:
        needed: most pages that are used, by pool.
        least: pages of the longest sequence, by pool.
        sizes: bytes of one page in all layers, by pool.
        room: bytes for all pools, None for no limit.
    """
    if room is None or sum(n * size for n, size in zip(needed, sizes, strict=True)) <= room:
        return list(needed)
    left = room - sum(n * size for n, size in zip(least, sizes, strict=True))
    if left < 0:
        return [0] * len(needed)
    more = sum((n - low) * size for n, low, size in zip(needed, least, sizes, strict=True))
    pages = [low + (n - low) * left // more for n, low in zip(needed, least, strict=True)]
    left = room - sum(n * size for n, size in zip(pages, sizes, strict=True))
    for i, size in enumerate(sizes):  # bytes left by rounding down
        extra = min(needed[i] - pages[i], left // size)
        pages[i], left = pages[i] + extra, left - extra * size
    return pages


class LayerPages(NamedTuple):
    """Pages of the layers that see equally many tokens."""

    # share of all layers; of layers with states, such that a record counts as the tokens that take as many bytes
    layers: float
    # device, away: pools on the device and off it; only their page sizes and windows count
    device: Pool
    away: Pool


def layer_pages(model: ModelFacts, longest: int) -> tuple[LayerPages, ...]:
    """Return the pages of a model's layers. longest: tokens of the longest sequence."""
    each = len(model.layers) * model.kv_token * RECORD
    return tuple(
        LayerPages(
            len(group.layers) * group.state / each if group.state else len(group.layers) / len(model.layers),
            pages_of(model, "device", longest, group),
            pages_of(model, "host", longest, group),
        )
        for group in model.cache_groups(longest)
    )


def moved_pages(pool: Pool, prompts: Array, prefill_tokens: int) -> tuple[Array, Array]:
    """Return the numbers of pages that prefill in pieces of `prefill_tokens` loads and stores, in one layer, by prompt.
    prompts: tokens of each prompt."""
    before = np.ceil(prompts / prefill_tokens) - 1  # whole pieces before the last
    starts = np.arange(0, before.max() + 1) * prefill_tokens
    read, written = pool.num_read(starts), pool.num_written(starts, starts + prefill_tokens)
    last, index = pool.num_written(before * prefill_tokens, prompts), before.astype(int)
    return np.cumsum(read)[index], (np.cumsum(written) - written)[index] + last
