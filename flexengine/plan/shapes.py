"""Block shapes that the policy search tries: block size, gpu_batches, prefill_tokens, schedule and slots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flexengine.places import TIERS, WORKERS
from flexengine.plan.cost import Cost
from flexengine.plan.min_memory import smallest
from flexengine.plan.sizes import delegated
from flexengine.policy import REQUESTS, Policy, shares
from flexengine.schedule.place import reaches_workers

MAX_BLOCK_SIZE = 1024  # sequences; bookkeeping of more sequences takes as long as they gain
# Sequences of a gpu_batch.
FIRST_GPU_BATCH = 64  # tried first
FALLBACK_GPU_BATCHES = (32, 16, 4)  # tried if buffers of FIRST_GPU_BATCH sequences do not fit
GPU_BATCHES = (16, 32, 64, 128, 256)  # tried in the refinement
SMALL_GPU_BATCHES = (2, 4, 8)  # tried too: their small buffers leave more memory for weights
MAX_NUM_GPU_BATCHES = 32  # of a block in the refinement
# Values of prefill_tokens, in order of preference.
PREFILL_TOKENS_GPU = (2048, 1024, 512, 256, 128)
PREFILL_TOKENS_CPU = (512, 2048, 1024, 256, 128)


@dataclass(frozen=True)
class Options:
    """Constraints of a search.

    Attributes:
        prefill_tokens: tokens per prefill chunk of all policies, None for free choice.
        latency_limit: most mean seconds from a row's entry to its end, None for no limit.
        placed: policy whose splits, slots, schedule and delegation are kept; None for free choice.
        overlap: as in `Cost`.
        block: most sequences alive, None for MAX_BLOCK_SIZE.
        frontier: whether to collect slower policies with less latency too.
    """

    prefill_tokens: int | None = None
    latency_limit: float | None = None
    placed: Policy | None = None
    overlap: bool = True
    block: int | None = None
    frontier: bool = False

    @property
    def latency_counts(self) -> bool:
        """Whether the search also collects slower policies with less latency."""
        return self.frontier or self.latency_limit is not None


@dataclass(frozen=True)
class Shapes:
    """Shapes to try for the job and the machine of `cost`, within `options`."""

    cost: Cost
    options: Options

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the values of prefill_tokens to try, the preferred one first."""
        if self.options.prefill_tokens is not None:
            return (self.options.prefill_tokens,)
        return PREFILL_TOKENS_CPU if self.cost.hardware.kind != "cuda" else PREFILL_TOKENS_GPU

    def blocks(self) -> list[int]:
        """Return the block sizes to try: from all rows, or the limit, down to 1 by a factor of about 1.4."""
        size = float(max(1, min(self.options.block or MAX_BLOCK_SIZE, self.cost.workload.count)))
        sizes = []
        while size >= 1:
            sizes.append(round(size))
            size /= 1.4142
        return list(dict.fromkeys([*sizes, 1]))

    def too_large(self, policy: Policy) -> bool:
        """Return whether a policy's block is larger than the options allow."""
        return self.options.block is not None and policy.block_size > self.options.block

    def smallest(self) -> tuple[Policy, ...]:
        """Return the policies that take least memory, the fastest first."""
        policies = smallest(min(self.tokens), self.cost.hardware.capacity)
        placed = self.options.placed
        return policies if placed is None else (placed_like(policies[0], placed),)

    def of(self, block: int, batch: int = FIRST_GPU_BATCH) -> Policy:
        """Return a policy with all data on the device.

        Args:
            block: block size.
            batch: most sequences of a gpu_batch.
        """
        batches = -(-block // batch)
        return Policy(-(-block // batches), batches, prefill_tokens=self.tokens[0])

    def even(self, block: int) -> Policy:
        """Return a policy whose block has one gpu_batch per sweep of a mean sequence's life.

        Under the diagonal schedule, one gpu_batch then enters in every sweep, so all sweeps have equal prefill.
        """
        sweeps = self.cost.tokens / max(1, self.cost.workload.count)  # life of a mean sequence
        return self.of(block, max(1, round(block / max(1.0, sweeps))))

    def batches(self, policy: Policy) -> Iterator[Policy]:
        """Yield the policy with its block in gpu_batches of other sizes."""
        for batch in GPU_BATCHES:
            if batch < 2 * policy.block_size:
                batches = -(-policy.block_size // batch)
                yield replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches)

    def steps(self, policy: Policy) -> Iterator[Policy]:
        """Yield the policy with one gpu_batch less and more, or with one sequence less and more in a single one. A
        larger block than those of `blocks` is left out."""
        name = "num_gpu_batches" if policy.num_gpu_batches > 1 else "gpu_batch_size"
        for size in (getattr(policy, name) - 1, getattr(policy, name) + 1):
            if size and (other := replace(policy, **{name: size})).block_size <= self.blocks()[0]:
                yield other

    def neighbours(self, policy: Policy) -> Iterator[Policy]:
        """Yield the policy with other prefill_tokens, schedule, gpu_batches and slots, and with similar block sizes."""
        yield from (replace(policy, prefill_tokens=tokens) for tokens in self.tokens if tokens != policy.prefill_tokens)
        yield replace(policy, schedule="diagonal" if policy.schedule == "continuous" else "continuous")
        for batch in (*SMALL_GPU_BATCHES, *GPU_BATCHES):
            batches = -(-policy.block_size // batch)
            if batch < policy.block_size and batches <= MAX_NUM_GPU_BATCHES:
                yield replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches)
                if batches > 1:  # a slightly smaller block, in case a memory is just too small
                    yield replace(policy, gpu_batch_size=batch, num_gpu_batches=batches - 1)
        yield replace(policy, slots=1)
        for factor in (0.85, 1, 1.2):
            block = max(1, min(round(policy.block_size * factor), self.blocks()[0]))
            yield replace(self.of(block), prefill_tokens=policy.prefill_tokens, schedule=policy.schedule)
            yield replace(self.even(block), prefill_tokens=policy.prefill_tokens, schedule="diagonal")


def placed_like(shape: Policy, placed: Policy) -> Policy:
    """Return `shape` with the splits, slots, schedule, delegation and partition of `placed`."""
    return sensible(replace(shape, weights=placed.weights, cache=placed.cache, activations=placed.activations,
                            slots=placed.slots, schedule=placed.schedule, delegate=placed.delegate,
                            partition=placed.partition, queries_first=placed.queries_first))  # fmt: skip


def sensible(policy: Policy) -> Policy:
    """Return the policy, without delegation if no sequence of its block has its cache on the host, and with the KV
    cache of attention workers on the device if that is no sequence."""
    if policy.works and not reaches_workers(policy.block_size, policy.cache):
        split = shares(policy.cache)
        split["device"] += split.pop(WORKERS)
        policy = replace(policy, cache=tuple(split.values()), partition=REQUESTS, queries_first=False)
    return policy if not policy.delegate or delegated(policy, TIERS) else replace(policy, delegate=False)
