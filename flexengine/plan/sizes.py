"""How many tokens are computed at once under a policy, and how many bytes that takes.

All sizes are bytes unless a name says otherwise.
"""

import math
from collections.abc import Iterable, Sequence

from flexengine.plan import gpu
from flexengine.plan.facts import ModelFacts
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, shares
from flexengine.schedule.order import entrants
from flexengine.schedule.place import places

ALIGN = 4096
TENSOR_ALIGN = 64  # of tensors within a slot
PAGE_TOKENS = 16  # of KV pages on the device
EXTENT = 256 << 10  # least bytes of a KV page off the device, so that links see long transfers
PASS = 192 << 10  # bytes of an open forward pass beside tensors: its stack, frames and page tables


def aligned(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


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
    share, total = shares(policy.activations).get(tier, 0.0), sweep_tokens(policy, workload)
    return min(total, math.ceil(share * total) + policy.prefill_tokens) if share else 0


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


def kernel_buffers(model: ModelFacts, policy: Policy, workload: Workload) -> int:
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
    """Return the most sequences at once whose decode attention is delegated."""
    homes = places(policy.block_size, policy.cache)
    return sum(sequences for home, sequences in homes.items() if policy.attends(home) != "device")


def suspended(model: ModelFacts, policy: Policy) -> int:
    """Bytes that forward passes hold on the device while their attention is computed elsewhere: q, k, v with and
    without rotation, and the residual with its norm and casts."""
    return aligned(delegated(policy) * (3 * model.sent + 4 * model.hidden * model.itemsize))


def page_tokens(model: ModelFacts, tier: str, longest: int, window: int | None = None) -> int:
    """Return the tokens of one KV page. Off the device pages are extents of at least EXTENT bytes, or of the longest
    sequence, and whole ALIGN blocks. A window has at least two pages: it is rounded up to whole pages, and its oldest
    page is seen in part.

    Args:
        longest: tokens of the longest sequence.
        window: tokens that the layers' queries see, None for all.
    """
    if tier == "device":
        return PAGE_TOKENS
    wanted = min(-(-EXTENT // model.kv_token), longest if window is None else min(longest, -(-window // 2)))
    tokens = aligned(wanted, PAGE_TOKENS)
    while tokens * model.kv_token % ALIGN:
        tokens += PAGE_TOKENS
    return tokens
