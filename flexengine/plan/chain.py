"""Plan a chain of stages that offload: the layers of each stage, one block for all, and each stage's placement.

Each stage is planned as a machine of its own that has only the layers of the stage (FlexGen section 4.4), with the cost
model, the search and the linear program of a single machine. The block is cut into a cohort per stage, and weights
that a stage streams are read once for each sweep of a cohort. The search takes turns: unlike stages search blocks, each
stage places its weights for a block, and layers move from slow stages to fast ones.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from flexengine.activity import tick
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan.candidates import Options, for_cohorts
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.network import hops_of, tokens_by_kind, tokens_sent
from flexengine.plan.placement import ON_DEVICE
from flexengine.plan.search import search
from flexengine.plan.stages import (
    StagePlan,
    Strategy,
    even_layers,
    place_weights,
    shape_name,
    stage_facts,
)
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

if TYPE_CHECKING:
    from flexengine.plan.cluster.devices import Link

MAX_TURNS = 3  # of searching a block and moving layers
MOST_SWEEPS = 10_000  # that are followed one by one; those of longer jobs are as many times longer
MIN_GAIN = 0.995  # a turn counts if it makes the job at least so much shorter
Range = tuple[int, int]  # first layer, and last layer + 1


@dataclass(frozen=True)
class ChainStage:
    """One stage of a plan."""

    layers: Range
    cost: Cost  # of a model with these layers only
    prediction: Prediction  # of the stage alone; a sweep is one of each cohort


@dataclass(frozen=True)
class ChainPlan:
    """Stages that compute one after the other, and the block that all of them have."""

    stages: tuple[ChainStage, ...]
    # from each stage to the next, and from the last one to the first; () if links take no time
    links: tuple["Link", ...] = ()

    @property
    def policy(self) -> Policy:
        """Return the policy of the first stage. Others have other weights."""
        return self.stages[0].prediction.policy

    @cached_property
    def slowest(self) -> int:
        """Return the number of the stage with the most seconds of work."""
        return max(range(len(self.stages)), key=lambda rank: self.stages[rank].prediction.total_seconds)

    @cached_property
    def tight(self) -> Prediction:
        """Return the prediction of the stage that admits the fewest sequences, as all others then do."""
        return max((stage.prediction for stage in self.stages), key=lambda p: sum(p.counts.values()))

    @property
    def cohorts(self) -> int:
        """Return the number of cohorts into which the block is cut."""
        return max(1, min(len(self.stages), self.tight.policy.num_gpu_batches, round(self.tight.alive)))

    @cached_property
    def seconds(self) -> float:
        """Return the seconds of the job, with the waits of stages for one another (the bubble).

        A cohort's sweep begins on a stage when its hidden states have come from the stage before, and when the stage
        has ended its sweep of the cohort before. Sweeps in which sequences enter are spread evenly over the job.
        """
        each = [stage.prediction for stage in self.stages]
        tight, cohorts = self.tight, self.cohorts
        entering, others = (round(tight.counts[kind]) for kind in ("prefill", "decode"))
        times = max(1.0, (entering + others) / MOST_SWEEPS)
        entering, others = round(entering / times), round(others / times)
        takes = {
            kind: [sweep_of(p, kind) * times / cohorts * share_of(p, tight, kind) for p in each]
            for kind in tight.counts
        }
        first = self.stages[0].cost
        swept = {kind: count / cohorts for kind, count in tokens_by_kind(tight, first.workload).items()}
        policy = tight.policy
        batches = -(-policy.num_gpu_batches // cohorts)
        hops = hops_of(self.links, first.model, swept, batches, policy.prefill_tokens)
        back = times * self.links[-1].latency if self.links else 0.0
        free, ready, sent = [0.0] * len(each), [0.0] * cohorts, [0.0] * len(each)
        for sweep in range(entering + others):
            kind = "prefill" if sweep * entering % (entering + others) < entering else "decode"
            for cohort in range(cohorts):
                for stage, seconds in enumerate(takes[kind]):
                    began = max(free[stage], ready[cohort])
                    free[stage] = ready[cohort] = began + seconds
                    if stage < len(hops[kind]):
                        hop = hops[kind][stage].longer(times)
                        sent[stage], ready[cohort] = hop.arrival(sent[stage], began, ready[cohort])
                ready[cohort] += back
        return max(*free, *ready) + max(prediction.load_seconds for prediction in each)

    @property
    def link_seconds(self) -> list[float]:
        """Return the seconds in which each link to a next stage carries hidden states."""
        cost = self.stages[0].cost
        nbytes = tokens_sent(cost.workload) * cost.model.hidden_bytes
        return [nbytes / link.bandwidth for link in self.links[:-1]]

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens per second."""
        return self.stages[0].prediction.tokens / self.seconds

    @property
    def spread(self) -> float:
        """Return by how much the slowest stage's work exceeds that of the fastest, as a share of the slowest."""
        seconds = [stage.prediction.total_seconds for stage in self.stages]
        return 1 - min(seconds) / max(seconds)


def share_of(prediction: Prediction, tight: Prediction, kind: str) -> float:
    """Return the part of a stage's own sweep that it computes in one of the stage with the most sweeps."""
    own, most = prediction.counts[kind], tight.counts[kind]
    return own / most if own and most else 1.0


def sweep_of(prediction: Prediction, kind: str) -> float:
    """Return the seconds of a mean sweep of this kind, or of the other one where the job has none of it."""
    return prediction.sweep_seconds[kind] or max(prediction.sweep_seconds.values())


class ChainSearch:
    """The search for a chain's plan.

    Args:
        model: the whole model.
        machines: one for each stage, in the order of the layers.
        workload: the job.
        options: of the search for a block; `cohorts` is set.
        links: as in `ChainPlan`.
    """

    def __init__(
        self,
        model: ModelFacts,
        machines: Sequence[Hardware],
        workload: Workload,
        options: Options | None = None,
        links: Sequence["Link"] = (),
    ) -> None:
        self.model, self.machines, self.workload, self.links = model, machines, workload, tuple(links)
        self.options = replace(options or Options(), cohorts=len(machines))
        self._alike = [self.machines.index(machine) for machine in machines]
        self._costs: dict[tuple[int, Range], Cost] = {}
        self._blocks: dict[tuple[int, Range], Policy] = {}
        self._placed: dict[tuple[object, ...], Prediction | None] = {}

    def even(self) -> list[Range]:
        """Return the layers of each stage, divided as by `even_layers`, with its errors."""
        return even_layers(len(self.model.layers), self.model.inherits, len(self.machines))

    def plan(self) -> ChainPlan:
        """Return the plan with which the job ends first.

        Raises:
            TooLittle: a stage has too little memory for an even part of the layers, and no other split was found.
        """
        ranges, best = self.even(), None
        for _ in range(MAX_TURNS):
            tried = [(policy, self.balanced(policy, ranges)) for policy in self.blocks(ranges)]
            if not (chains := [self.made(*pair) for pair in tried if max(self.seconds(*pair)) < inf]):
                policy, ranges = tried[0]
                continue
            made = min(chains, key=lambda plan: plan.seconds)  # stages may wait for each other under a block
            ranges = [stage.layers for stage in made.stages]
            if best is not None and made.seconds > MIN_GAIN * best.seconds:
                return min(best, made, key=lambda plan: plan.seconds)
            best = made
        return best or self.made(policy, ranges)

    def blocks(self, ranges: Sequence[Range]) -> list[Policy]:
        """Return the policies that are best for one of the stages alone, of stages alike only once."""
        kinds = {self._kind(rank, layers): rank for rank, layers in enumerate(ranges)}
        found = dict[Policy, None]()
        for rank in kinds.values():
            with suppress(OutOfMemory):
                found[self.block(rank, ranges)] = None
        return [*found] or [self.block(0, ranges)]

    def block(self, rank: int, ranges: Sequence[Range]) -> Policy:
        """Return the policy that is best for one stage alone. Its weights do not matter, and are on the device."""
        if (key := (rank, ranges[rank])) not in self._blocks:
            cost = self.cost(*key)
            policy = search(cost.model, cost.hardware, self.workload, self.options).best.policy
            self._blocks[key] = replace(for_cohorts(policy, len(self.machines)), weights=ON_DEVICE, neurons=0.0)
        return self._blocks[key]

    def balanced(self, policy: Policy, ranges: Sequence[Range]) -> list[Range]:
        """Return the layers of each stage, moved from slow stages to fast ones while the slowest gets faster."""
        counts = [end - first for first, end in ranges]
        best, step = self._ranked(policy, counts), max(1, max(counts) // 4)
        while step:
            slow, *others = sorted(range(len(counts)), key=lambda k: -self.seconds(policy, ranged(counts))[k])
            for fast in reversed(others):
                tried = [n - step * (k == slow) + step * (k == fast) for k, n in enumerate(counts)]
                if tried[slow] > 0 and (found := self._ranked(policy, tried)) < best:
                    counts, best = tried, found
                    break
            else:
                step //= 2
        return ranged(counts)

    def _ranked(self, policy: Policy, counts: Sequence[int]) -> list[float]:
        return sorted(self.seconds(policy, ranged(counts)), reverse=True)

    def seconds(self, policy: Policy, ranges: Sequence[Range]) -> list[float]:
        """Return the seconds of work of each stage; infinite where the block does not fit or it cannot begin."""
        placed = [
            None if layers[0] in self.model.inherits else self.placed(policy, rank, layers)
            for rank, layers in enumerate(ranges)
        ]
        return [inf if prediction is None else prediction.total_seconds for prediction in placed]

    def placed(self, policy: Policy, rank: int, layers: Range) -> Prediction | None:
        """Return the prediction of a stage with its weights where they are best; None if the block does not fit."""
        cost, key = self.cost(rank, layers), (policy, *self._kind(rank, layers))
        if key not in self._placed:
            tick()
            self._placed[key] = None
            with suppress(OutOfMemory):
                self._placed[key] = place_weights(cost, policy, cost.hardware.capacity)
        return self._placed[key]

    def _kind(self, rank: int, layers: Range) -> tuple[object, ...]:
        """Return a key that is equal for stages that are planned alike."""
        model = self.cost(rank, layers).model
        kept = tuple(tuple(t.held_bytes for t in layer) for layer in model.layers)
        return self._alike[rank], layers[0] == 0, model.leaves, kept, model.windows, model.blocks

    def cost(self, rank: int, layers: Range) -> Cost:
        """Return the cost model of a stage."""
        if (rank, layers) not in self._costs:
            ends = (layers[0] == 0, layers[1] == len(self.model.layers))
            facts = stage_facts(self.model, slice(*layers), ends)
            cost = Cost(facts, self.machines[rank], self.workload, self.options.overlap, self.options.cohorts)
            self._costs[rank, layers] = cost
        return self._costs[rank, layers]

    def made(self, policy: Policy, ranges: Sequence[Range]) -> ChainPlan:
        """Return the plan of a block and layers. Raise OutOfMemory if a stage has no room for the block."""
        stages = []
        for rank, layers in enumerate(ranges):
            cost = self.cost(rank, layers)
            prediction = self.placed(policy, rank, layers) or place_weights(cost, policy, cost.hardware.capacity)
            stages.append(ChainStage(layers, cost, prediction))
        return ChainPlan(tuple(stages), self.links)


def ranged(counts: Sequence[int]) -> list[Range]:
    """Return the layers of each stage. counts: numbers of layers."""
    ends = [sum(counts[:k]) for k in range(len(counts) + 1)]
    return list(pairwise(ends))


def plan_chain(
    model: ModelFacts,
    machines: Sequence[Hardware],
    workload: Workload,
    options: Options | None = None,
    links: Sequence["Link"] = (),
) -> ChainPlan:
    """Return the plan of a chain with which the job ends first. Arguments and errors as for `ChainSearch`.

    Raises:
        InvalidInput: there are fewer layers than machines.
    """
    if any(machine.workers for machine in machines):
        raise InvalidInput("stages are planned without attention workers; leave them out")
    return ChainSearch(model, machines, workload, options, links).plan()


def chain_strategy(
    plan: ChainPlan, model: ModelFacts, forms: Sequence[str | None], names: Sequence[str] = ()
) -> Strategy:
    """Return the strategy of a plan, with a policy for each stage. forms: format of each layer, None for exact. names:
    of the devices."""
    stages = [
        StagePlan(
            names[rank] if names else f"stage {rank}",
            each.layers,
            tuple(forms[slice(*each.layers)]),
            each.prediction.policy,
        )
        for rank, each in enumerate(plan.stages)
    ]
    policy, cohorts = plan.policy, min(len(stages), plan.policy.num_gpu_batches)
    cohort = policy.gpu_batch_size * -(-policy.num_gpu_batches // cohorts)
    longest = max(prompt for prompt, _ in plan.stages[0].cost.workload.sizes)
    prompts = max(1, min(cohort, policy.prefill_tokens // longest))
    return Strategy(shape_name(model), len(model.layers), tuple(stages), prompts, cohort, cohorts)
