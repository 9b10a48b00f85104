"""The policies of a search: block shapes to try, the policies that were laid out and priced, and the best of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from flexengine.activity import tick
from flexengine.errors import OutOfMemory
from flexengine.places import TIERS, WORKERS
from flexengine.plan import guest
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import Layout, lay_out, lay_out_weights, left_bytes
from flexengine.plan.min_memory import capacity_for, smallest
from flexengine.plan.sizes import delegated
from flexengine.policy import NO_CACHE, REQUESTS, Policy, Split, shares
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
# Placements whose seconds in the program are over SLACK times the best ones are skipped. Rounded policies were at most
# 1.2 % faster than the program in 4,000 placements.
SLACK = 1.02
WIDE_SLACK = 1.3  # the same, while the search collects policies to refine
MAX_TIME_RATIO = 0.995  # a policy replaces the best one if it takes at most this share of its seconds


@dataclass(frozen=True)
class Options:
    """Constraints of a search."""

    prefill_tokens: int | None = None  # tokens per prefill chunk of all policies, None for free choice
    latency_limit: float | None = None  # most mean seconds from a row's entry to its end, None for no limit
    placed: Policy | None = None  # policy whose splits, slots, schedule and delegation are kept; None for free choice
    overlap: bool = True  # as in `Cost`
    block: int | None = None  # most sequences alive, None for MAX_BLOCK_SIZE
    frontier: bool = False  # whether to collect slower policies with less latency too
    by_tokens: bool = False  # whether attention workers may divide the tokens, which changes the last bits of results
    cohorts: int = 1  # as in `Cost`; a block has at least a gpu_batch for each, as far as it has sequences
    schedule: str | None = None  # of all policies, None for free choice
    stores_from: float = 600.0  # jobs of at least these seconds store results often, as in `search`


@dataclass
class Candidates:
    """Policies of one search, for the job and the machine of `cost`, within `options`.

    Raises:
        TooLittle: not even the smallest policies fit.
    """

    cost: Cost
    options: Options
    capacity: Capacity = field(init=False)  # to plan for
    # predictions of the policies that fit, in the order of the search
    predictions: dict[Policy, Prediction] = field(default_factory=dict)
    refused: dict[Policy, OutOfMemory] = field(default_factory=dict)  # errors of the policies that do not fit
    _weights: dict[tuple[Split, int, float, bool], Layout] = field(default_factory=dict)
    _best: Prediction | None = None

    def __post_init__(self) -> None:
        cost = self.cost
        self.capacity = capacity_for(cost.model, self.smallest(), cost.workload, cost.hardware.capacity)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the values of prefill_tokens to try, the preferred one first."""
        if self.options.prefill_tokens is not None:
            return (self.options.prefill_tokens,)
        return PREFILL_TOKENS_GPU if self.cost.hardware.gpu else PREFILL_TOKENS_CPU

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
        shape = divided(Policy(block, 1, prefill_tokens=self.tokens[0]), -(-block // batch))
        return self.suited(shape)

    def suited(self, policy: Policy) -> Policy:
        """Return the policy as `sensible`, for the cohorts of `cost` and with the schedule of the options."""
        policy = for_cohorts(sensible(policy), self.cost.cohorts)
        return replace(policy, schedule=self.options.schedule) if self.options.schedule else policy

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
                yield divided(policy, -(-policy.block_size // batch))

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
                yield divided(policy, batches)
                if batches > 1:  # a slightly smaller block, in case a memory is just too small
                    yield replace(policy, gpu_batch_size=batch, num_gpu_batches=batches - 1)
        yield replace(policy, slots=1, half_layers=False)
        if policy.delegates and policy.slots == 2 and policy.weights[0] < 1 and self.cost.model.divisible:
            yield replace(policy, half_layers=not policy.half_layers)
        for factor in (0.85, 1, 1.2):
            block = max(1, min(round(policy.block_size * factor), self.blocks()[0]))
            yield replace(self.of(block), prefill_tokens=policy.prefill_tokens, schedule=policy.schedule)
            yield replace(self.even(block), prefill_tokens=policy.prefill_tokens, schedule="diagonal")

    def attempt(self, policy: Policy) -> Prediction | None:
        """Lay a policy out and price it. Return None if it does not fit."""
        if self.cost.hardware.engines > 1 and policy.works and policy.weights[0] < 1:
            return None  # several engines do not stream weights
        given = self.suited(policy)
        policy = with_neurons(given, self.cost.model, self.capacity, lambda p: self.laid_out(p, self.capacity))
        if policy in self.refused or self.too_large(policy):
            self.refused.update({given: self.refused[policy]} if policy in self.refused else {})
            return None
        if policy not in self.predictions:
            tick()
            try:
                prediction = self.cost.predict(self.laid_out(policy, self.capacity))
            except OutOfMemory as error:
                self.refused[policy] = self.refused[given] = error
                return None
            self.predictions[policy] = prediction
            limit, best = self.options.latency_limit, self._best
            in_time = limit is None or prediction.latency <= limit
            if in_time and (best is None or prediction.total_seconds < MAX_TIME_RATIO * best.total_seconds):
                self._best = prediction
        return self.predictions[policy]

    def laid_out(self, policy: Policy, capacity: Capacity) -> Layout:
        """Return the policy's layout. Raise OutOfMemory if it does not fit."""
        model, key = self.cost.model, (policy.weights, policy.slots, policy.neurons, policy.half_layers)
        if key not in self._weights:
            self._weights[key] = lay_out_weights(model, policy, capacity)
        return lay_out(model, policy, self.cost.workload, capacity, self._weights[key])

    def too_slow(self, seconds: float, latency: float, wide: bool) -> bool:
        """Return whether a placement can be skipped, given lower bounds of its seconds and of its latency.

        Args:
            wide: keep placements within WIDE_SLACK and, if latency counts, those that no policy beats in both.
        """
        options, predictions = self.options, self.predictions.values()
        if not predictions or (self._best is None and options.latency_limit is not None):
            return False
        if seconds <= (WIDE_SLACK if wide else SLACK) * self.leader().total_seconds:
            return False
        latency_counts = wide and (options.frontier or options.latency_limit is not None)
        return not latency_counts or any(p.total_seconds <= seconds and p.latency <= latency for p in predictions)

    def leader(self) -> Prediction:
        """Return the best policy so far; if none keeps the latency limit, the one with the least latency."""
        return self._best or min(self.predictions.values(), key=attrgetter("latency"))


def divided(policy: Policy, batches: int) -> Policy:
    """Return the policy with its block, or hardly more sequences, in this many gpu_batches."""
    return replace(policy, gpu_batch_size=-(-policy.block_size // batches), num_gpu_batches=batches)


def for_cohorts(policy: Policy, cohorts: int) -> Policy:
    """Return the policy with at least one gpu_batch per cohort in its block, as far as it has sequences, so that all
    stages of a pipeline compute at the same time; with attention workers two, so that a stage computes one while the
    workers attend to the other. The block keeps its size, or grows by less than one sequence per gpu_batch."""
    block = policy.block_size
    batches = min(cohorts * (2 if policy.works else 1), block) if cohorts > 1 else 1
    if policy.num_gpu_batches >= batches or policy.schedule == "row":
        return policy
    return divided(policy, batches)


def placed_like(shape: Policy, placed: Policy) -> Policy:
    """Return `shape` with the splits, slots, schedule, delegation and partition of `placed`."""
    size = {name: getattr(shape, name) for name in ("gpu_batch_size", "num_gpu_batches", "prefill_tokens", "neurons")}
    return sensible(replace(placed, **size))


def sensible(policy: Policy) -> Policy:
    """Return the policy, without delegation if no sequence of its block has its cache on the host or a disk, and with
    the KV cache of attention workers on the device if that is no sequence."""
    if policy.works and not reaches_workers(policy.block_size, policy.cache):
        split = shares(policy.cache)
        split["device"] += split.pop(WORKERS)
        policy = replace(policy, cache=tuple(split.values()), partition=REQUESTS, queries_first=False)
    return policy if not policy.delegates or delegated(policy, TIERS) else replace(policy, delegate=NO_CACHE)


def with_neurons(policy: Policy, model: ModelFacts, capacity: Capacity, laid_out: Callable[[Policy], Layout]) -> Policy:
    """Return the policy with as many neurons in memory as fit, if the model reads neurons on demand.

    Args:
        laid_out: returns the layout of a policy, or raises OutOfMemory.
    """
    if not model.blocks:
        return policy
    policy = replace(policy, neurons=0.0)
    try:
        free = left_bytes(laid_out(policy), "device", capacity)
    except OutOfMemory:
        return policy
    return replace(policy, neurons=guest("neurons").share_of(model, free))
