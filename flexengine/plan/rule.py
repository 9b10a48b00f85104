"""The policy used when none is given: resident if it fits, else streamed; the largest block that fits."""

from dataclasses import replace

from flexengine.errors import OutOfMemory
from flexengine.plan.layout import PAGE_TOKENS, Capacity, ModelFacts, Workload, lay_out
from flexengine.policy import Policy, Split

GPU_BATCH = 64  # sequences; matrix products gain little beyond that many rows
BLOCK = 512  # most sequences alive
TOKENS = 2048  # most tokens computed at once on a GPU
TOKENS_CPU = 512  # and on a CPU, whose products gain nothing beyond: what more would take serves the weights better
OVERHEAD = 32 << 20  # bytes: modules, tokenizer, threads, I/O chunks, the allocator's gaps
STEPS = 40  # of the shares of weights tried
_DISK: Split = (0.0, 0.0, 1.0)


def planned(capacity: Capacity) -> Capacity:
    """The capacity to plan for where the device is this process's own RAM, which holds more than tensors."""
    if not capacity.shared or capacity.device is None:
        return capacity
    kept = min(max(capacity.device // 25, OVERHEAD), capacity.device // 10)
    return replace(capacity, device=capacity.device - kept)


def default_policy(
    model: ModelFacts, workload: Workload, capacity: Capacity, prefill_tokens: int | None = None
) -> Policy:
    """A policy that fits the capacity and the workload. prefill_tokens: of the micro-batches; None leaves it open.

    Tried in this order: everything on the device; then weights streamed, with whatever memory the largest block's KV
    leaves filled with weights: in host RAM as stored, then on the device. Raises OutOfMemory when not even
    one sequence with streamed weights fits.
    """
    base = _shape(workload, capacity, prefill_tokens)
    if capacity.device is None:
        return base
    fixed = prefill_tokens is not None
    for policy in _narrower(base, fixed):
        if _holds_block(model, policy, workload, capacity):
            return policy
    streamed = replace(base, weights=_DISK)
    choices = [replace(p, slots=slots) for p in _narrower(streamed, fixed) for slots in (2, 1)]
    return _fill(model, _best(choices, model, workload, capacity), workload, capacity)


def reshaped(
    policy: Policy, model: ModelFacts, workload: Workload, capacity: Capacity, prefill_tokens: int | None = None
) -> Policy:
    """A policy for another workload with the weights where `policy` put them. Raises OutOfMemory if none fits."""
    shapes = _narrower(_shape(workload, capacity, prefill_tokens), prefill_tokens is not None)
    choices = [replace(p, weights=policy.weights, slots=policy.slots) for p in shapes]
    return _best(choices, model, workload, capacity)


def _shape(workload: Workload, capacity: Capacity, prefill_tokens: int | None) -> Policy:
    """The largest block worth having for a workload."""
    count = max(1, min(BLOCK, workload.count))
    batch = min(GPU_BATCH, count)
    tokens = prefill_tokens or (TOKENS_CPU if capacity.shared else TOKENS)
    return Policy(gpu_batch_size=batch, num_gpu_batches=-(-count // batch), prefill_tokens=tokens)


def _best(choices: list[Policy], model: ModelFacts, workload: Workload, capacity: Capacity) -> Policy:
    """The first choice that scores nearly as well as the best. Raises OutOfMemory if none fits."""
    scores = [_score(model, choice, workload, capacity) for choice in choices]
    best = next(i for i, score in enumerate(scores) if score >= 0.95 * max(scores))
    if not scores[best]:
        lay_out(model, choices[-1], workload, capacity)  # raises, with the numbers of the smallest there is
    return choices[best]


def _score(model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity) -> float:
    """0 if the policy does not fit; else the inverse of how often its block is filled to finish the workload.

    Every filling streams all weights once per token; without overlap the score is halved. Among near equals the first
    choice, with the larger micro-batches, is taken.
    """
    try:
        layout = lay_out(model, policy, workload, capacity)
    except OutOfMemory:
        return 0.0
    alive = sum(p.pages for p in layout.pools.values()) * workload.count / max(1, workload.pages(PAGE_TOKENS))
    rounds = -(-workload.count // max(1, min(policy.block_size, int(alive))))
    return (1.0 if policy.slots > 1 else 0.5) / rounds


def _narrower(policy: Policy, fixed: bool) -> list[Policy]:
    """The policy with ever smaller micro-batches, unless they are fixed, and at the end a smaller block."""
    tokens = [t for t in (2048, 1024, 512, 256, 128) if t < policy.prefill_tokens and not fixed]
    tokens = [policy.prefill_tokens, *tokens]
    few = replace(policy, gpu_batch_size=min(8, policy.gpu_batch_size), num_gpu_batches=1, prefill_tokens=tokens[-1])
    return [*(replace(policy, prefill_tokens=t) for t in tokens), few]


def _holds_block(model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity) -> bool:
    """Whether the policy fits with KV room for a quarter of its block at least: below that, streaming does better."""
    try:
        layout = lay_out(model, policy, workload, capacity)
    except OutOfMemory:
        return False
    free = lay_out(model, policy, workload, replace(capacity, device=None, host=None))
    return 4 * sum(p.pages for p in layout.pools.values()) >= sum(p.pages for p in free.pools.values())


def _fill(model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity) -> Policy:
    """The largest shares of weights in host RAM, then on the device, that leave the block's KV as large as it is.

    Where both are one memory, host RAM is worth having only for what takes fewer bytes as stored.
    """
    pages = sum(p.pages for p in lay_out(model, policy, workload, capacity).pools.values())

    def fits(candidate: Policy) -> bool:
        try:
            layout = lay_out(model, candidate, workload, capacity)
        except OutOfMemory:
            return False
        return sum(p.pages for p in layout.pools.values()) >= pages

    stored, held = (sum(t.elements * getattr(t, what) for t in model.tensors) for what in ("stored", "held"))
    steps = [s / STEPS for s in range(STEPS, -1, -1)]
    host = 0.0
    if not capacity.shared or stored < 0.9 * held:
        host = next((s for s in steps if fits(replace(policy, weights=(0.0, s, 1 - s)))), 0.0)
    device = next((s for s in steps if s + host <= 1 and fits(replace(policy, weights=_shares(s, host)))), 0.0)
    return replace(policy, weights=_shares(device, host))


def _shares(device: float, host: float) -> Split:
    return (device, host, max(0.0, round(1 - device - host, 9)))
