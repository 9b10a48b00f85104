"""Numbers of tokens that a policy computes at once, and bytes of buffers.

All sizes are in bytes unless a name has another unit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from flexengine.plan.facts import ModelFacts
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, shares
from flexengine.schedule.admission import entrants
from flexengine.schedule.place import cache_homes

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
    and scratch of kernels.

    Activations per token: a gated FFN has gate, up and their product of `width` elements each, the residual, its norm
    and casts. Attention has q, k, v with and without rotation.
    """
    tokens = batch_tokens(policy, workload)
    projections = 3 * (model.heads + 2 * model.kv_heads) * model.head_dim
    moment = max(4 * model.width + 3 * model.hidden, projections + 6 * model.hidden)
    logits = 2 * model.logits * min(policy.gpu_batch_size, workload.count or 1)
    if workload.scored is not None:
        rows = SCORED_ROWS if workload.scored else min(SCORED_ROWS, policy.gpu_batch_size, workload.count)
        logits = max(logits, 3 * model.logits * rows)
    return aligned(tokens * moment * model.itemsize + logits + model.scratch)


def paused(model: ModelFacts, policy: Policy, workload: Workload) -> int:
    """Return the device bytes of the paused forward passes of a whole sweep.

    Cells are computed layer by layer, so the passes of all gpu_batches are open at once. A pass has PASS bytes and, per
    token: the output of the embedding, hidden states if they stay on the device, cosines and sines of rotary positions
    in fp32, id and position.
    """
    prompts = workload.prompt_tokens(policy.block_size)
    if policy.block_size == policy.gpu_batch_size and prompts <= policy.prefill_tokens:
        return 0  # a single gpu_batch: in the workspace
    tokens, resident = sweep_tokens(policy, workload), hidden_tokens(policy, workload, "device")
    logits = model.logits * min(policy.block_size, workload.count or 1)
    row = model.hidden * model.itemsize
    passes = open_passes(policy, workload) * PASS if not model.gpu else 0
    return aligned(tokens * (row + 2 * 4 * model.head_dim + 2 * 8) + resident * row + logits + passes)


def delegated(policy: Policy, places: Iterable[str]) -> dict[str, int]:
    """Return the most sequences with delegated decode attention, by place that computes it. places: places of the
    machine."""
    homes = cache_homes(policy, places)
    return {place: homes[home] for home, place in policy.attended(homes).items()}


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
