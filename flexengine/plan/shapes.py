"""Which shapes of a block are worth trying: its size, gpu_batches, micro-batches, schedule and slots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flexengine.plan.cost import Cost
from flexengine.plan.least import smallest
from flexengine.plan.sizes import delegated
from flexengine.policy import Policy

BLOCK = 1024  # most sequences alive: what more would gain, the bookkeeping of each takes
GPU_BATCH = 64  # sequences of a gpu_batch, to begin with
GPU_BATCHES = (16, 32, 64, 128, 256)  # and what else is tried
FEW, MOST_BATCHES = (2, 4, 8), 32
SMALLER = (32, 16, 4)  # where buffers for that many do not fit
TOKENS = (2048, 1024, 512, 256, 128)  # micro-batches on a GPU
TOKENS_CPU = (512, 2048, 1024, 256, 128)  # and on a CPU


@dataclass(frozen=True)
class Options:
    """What a search must keep to. prefill_tokens: of the micro-batches; latency_limit: seconds from a row's entry to
    its end, in the mean; placed: a policy whose weights, cache, hidden states and slots stay as they are; overlap: as
    in `Cost`; block: most sequences alive, None for as many as pay."""

    prefill_tokens: int | None = None
    latency_limit: float | None = None
    placed: Policy | None = None
    overlap: bool = True
    block: int | None = None


@dataclass(frozen=True)
class Shapes:
    """The shapes worth trying for the job and the machine of `cost`, within `options`."""

    cost: Cost
    options: Options

    @property
    def tokens(self) -> tuple[int, ...]:
        """Micro-batches worth trying, the preferred one first."""
        if self.options.prefill_tokens is not None:
            return (self.options.prefill_tokens,)
        return TOKENS_CPU if self.cost.hardware.kind != "cuda" else TOKENS

    def blocks(self) -> list[int]:
        """Block sizes worth trying, falling: as many rows as there are, then by a factor of about 1.4."""
        size = float(max(1, min(self.options.block or BLOCK, self.cost.workload.count)))
        found = []
        while size >= 1:
            found.append(round(size))
            size /= 1.4142
        return list(dict.fromkeys([*found, 1]))

    def too_large(self, policy: Policy) -> bool:
        """Whether its block is larger than the options allow."""
        return self.options.block is not None and policy.block_size > self.options.block

    def smallest(self) -> tuple[Policy, ...]:
        """The policies that take least memory, the fastest first."""
        policies = smallest(min(self.tokens), self.cost.hardware.shared)
        placed = self.options.placed
        return policies if placed is None else (placed_like(policies[0], placed),)

    def of(self, block: int, batch: int = GPU_BATCH) -> Policy:
        """A policy with a block of that size in gpu_batches of at most `batch`, everything on the device."""
        batches = -(-block // batch)
        return Policy(-(-block // batches), batches, prefill_tokens=self.tokens[0])

    def even(self, block: int) -> Policy:
        """A block of cohorts so small that one enters in every sweep, and prompts keep the device busy throughout."""
        sweeps = self.cost.tokens / max(1, self.cost.workload.count)  # that a mean sequence lives
        return self.of(block, max(1, round(block / max(1.0, sweeps))))

    def batches(self, policy: Policy) -> Iterator[Policy]:
        """The same block in other gpu_batches."""
        for batch in GPU_BATCHES:
            if batch < 2 * policy.block_size:
                batches = -(-policy.block_size // batch)
                yield replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches)

    def neighbours(self, policy: Policy) -> Iterator[Policy]:
        """Other micro-batches, schedules and slots, and blocks a little larger and smaller."""
        yield from (replace(policy, prefill_tokens=tokens) for tokens in self.tokens if tokens != policy.prefill_tokens)
        yield replace(policy, schedule="diagonal" if policy.schedule == "continuous" else "continuous")
        for batch in (*FEW, *GPU_BATCHES):  # buffers for few leave more room for weights
            batches = -(-policy.block_size // batch)
            if batch < policy.block_size and batches <= MOST_BATCHES:
                yield replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches)
                if batches > 1:  # a little smaller, where a memory is just too small for the block
                    yield replace(policy, gpu_batch_size=batch, num_gpu_batches=batches - 1)
        yield replace(policy, slots=1)
        for factor in (0.85, 1, 1.2):
            block = max(1, min(round(policy.block_size * factor), self.blocks()[0]))
            yield replace(self.of(block), prefill_tokens=policy.prefill_tokens, schedule=policy.schedule)
            yield replace(self.even(block), prefill_tokens=policy.prefill_tokens, schedule="diagonal")


def placed_like(shape: Policy, placed: Policy) -> Policy:
    """The shape with everything where it lies under `placed`."""
    return sensible(replace(shape, weights=placed.weights, cache=placed.cache, activations=placed.activations,
                            slots=placed.slots, schedule=placed.schedule, delegate=placed.delegate))  # fmt: skip


def sensible(policy: Policy) -> Policy:
    """The policy without delegation if none of its block has its cache on the host."""
    return policy if not policy.delegate or delegated(policy) else replace(policy, delegate=False)
