"""Placement of one block shape: solve the linear program, and round its fractions so that they fit."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from flexengine.places import place_of, workers_of
from flexengine.plan.candidates import Candidates, Options
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.lp import SolverFailed, solve
from flexengine.plan.problem import MemoryLimit, Problem, memories, phases
from flexengine.plan.terms import CACHE, HIDDEN, WEIGHTS, fraction, fractions, kind_of
from flexengine.plan.workload import Workload
from flexengine.policy import ALL_CACHE, HOST_CACHE, NO_CACHE, REQUESTS, Policy, Split, delegate_of, thousandths
from flexengine.schedule.place import cache_homes, reaches_workers

MARGINS = (0.002, 0.008, 0.03, 0.12, 0.3)  # fraction of a memory to leave free in each retry
ON_DEVICE: Split = (1.0, 0.0, 0.0)
_ON_HOST: Split = (0.0, 1.0, 0.0)
_ON_DISK: Split = (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Choice:
    """Data that may leave the device."""

    cache: bool  # whether KV cache may
    hidden: bool  # whether hidden states may
    delegate: str = NO_CACHE  # as in `Policy`
    # split of the KV cache that has a share on attention workers, and that the program does not change; None if
    # workers have no share
    attended: Split | None = None
    # partition, queries_first: as in `Policy`
    partition: str = REQUESTS
    queries_first: bool = False

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the data that leave the device under a policy."""
        if policy.works:
            return cls(False, False, policy.delegate, policy.cache, policy.partition, policy.queries_first)
        return cls(policy.cache != ON_DEVICE, policy.activations != ON_DEVICE, policy.delegate)

    def onto(self, shape: Policy) -> Policy:
        """Return a shape with all KV cache on the device, or with the fixed split."""
        if self.attended is None:
            return shape
        return replace(shape, cache=self.attended, partition=self.partition, queries_first=self.queries_first)


@dataclass
class Placement:
    """Placements of one job on one machine."""

    tried: Candidates  # receives the policies that fit
    failed: SolverFailed | None = None  # the solver's last failure; None if there is none
    spills: bool = True  # whether KV cache may be on disks
    _solvable: dict[tuple[Policy, Choice], bool] = field(default_factory=dict)
    _corners: dict[Policy, Layout] = field(default_factory=dict)

    @property
    def places(self) -> tuple[str, ...]:
        """The machine's places among which the program divides data. The share of attention workers is fixed."""
        return tuple(place for place in self.tried.cost.hardware.places if not place.worker)

    @property
    def delegates(self) -> tuple[str, ...]:
        """Values of `Policy.delegate` to try. Attention may be delegated if the host is not the device, and its
        rate of attention is known. With assumed rates it is not: a cell may take ten times as long as they say."""
        hardware = self.tried.cost.hardware
        known = hardware.host_attention > 0 and not hardware.shared and not hardware.assumed
        known = known and not self.tried.cost.model.alone
        return (HOST_CACHE, ALL_CACHE) if known else ()

    def solve_placement(self, shape: Policy, choice: Choice, wide: bool = False) -> bool:
        """Solve the placement of a block shape, round it, and lay it out. Skip a placement that is too slow.

        Args:
            shape: block shape, schedule, slots and prefill_tokens; its splits are ignored.
            choice: data that may leave the device.
            wide: as in `Candidates.too_slow`.

        Returns:
            False if no placement fits. True otherwise, even if it was skipped.
        """
        if self.tried.too_large(shape):
            return False
        if choice.attended is not None and not reaches_workers(shape.block_size, choice.attended):
            return False
        key = _bare(shape), choice
        if key not in self._solvable:
            try:
                self._solvable[key] = self._place(*key, wide)
            except SolverFailed as error:  # other programs may be solved
                self.failed, self._solvable[key] = error, False
        return self._solvable[key]

    def _place(self, shape: Policy, choice: Choice, wide: bool) -> bool:
        shape = self.tried.suited(choice.onto(shape))
        if choice.attended is not None and self.tried.cost.hardware.engines > 1:  # they do not stream weights
            on_device = replace(shape, weights=ON_DEVICE, activations=ON_DEVICE)
            return self.tried.attempt(on_device) is not None
        rows, allowed = self._memories(shape, choice), self._allowed(choice)
        if not all(row.used.least(allowed) <= row.capacity for row in rows):  # finds most infeasible programs
            return False
        problem = self._problem(shape, choice, rows)
        if self.tried.too_slow(*problem.least(), wide):
            return True
        for margin in MARGINS:
            solved = solve(problem)
            if solved is None and problem.latency_limit is not None:  # so that a message can name the least latency
                solved = solve(replace(problem, latency_limit=None))
            if solved is None:
                return False
            if self.tried.too_slow(solved.seconds, solved.latency, wide):
                return True
            policy = self.tried.suited(_rounded(shape, solved.fractions, choice))
            if self.tried.attempt(policy) is not None:
                return True
            error = self.tried.refused[policy]  # of the memory that was too small
            less = max(error.needed + error.used - error.capacity, 0)
            rows = tuple(
                replace(row, capacity=row.capacity - less - row.capacity * margin) if row.label == error.tier else row
                for row in problem.memories
            )
            problem = replace(problem, memories=rows)
        return False

    def problem(self, shape: Policy, choice: Choice) -> Problem:
        """Return the linear program of a block shape."""
        shape = choice.onto(_bare(shape))
        return self._problem(shape, choice, self._memories(shape, choice))

    def _problem(self, shape: Policy, choice: Choice, rows: tuple[MemoryLimit, ...]) -> Problem:
        cost = self.tried.cost
        delegates = choice.delegate != NO_CACHE and choice.attended is None
        priced = replace(shape, cache=_ON_HOST, delegate=choice.delegate) if delegates else shape
        split = self._attended(shape) if choice.attended else {"device": 1.0}
        parts = phases(cost, priced, cost.sweeps(shape, share=0.5 if choice.cache else 0.0), split)
        held = dict.fromkeys(fractions(workers_of(cost.hardware.places)), 0.0)
        if choice.attended:
            held |= {fraction(CACHE, place): split.get(place, 0.0) for place in cost.hardware.places}
        if held:
            parts = tuple(phase.fixed(held) for phase in parts)
        allowed, limit = self._allowed(choice), self.tried.options.latency_limit
        return Problem(parts, rows, cost.slowing(priced), cost.overlaps(shape), allowed, limit, self.places)

    def _attended(self, shape: Policy) -> dict[str, float]:
        """Return the fraction of the sequences of a block by place of their KV cache, as if none overflowed into
        files."""
        homes = cache_homes(shape, [place for place in self.tried.cost.hardware.places if not place.filed])
        return {place: count / sum(homes.values()) for place, count in homes.items()}

    def _allowed(self, choice: Choice) -> frozenset[str]:
        """Return the fractions that may be above 0. Without a GPU, only weights that are smaller in stored form may be
        on the host."""
        shared = self.tried.cost.hardware.shared
        places = tuple(place for place in self.places if place != "host" or not shared)
        by_kind = {
            WEIGHTS: self.places if self.weights_on_host else places,
            CACHE: tuple(p for p in places if self.spills or not place_of(p).disk) if choice.cache else ("device",),
            HIDDEN: places if choice.hidden else ("device",),
        }
        return frozenset(fraction(kind, place) for kind, tiers in by_kind.items() for place in tiers)

    def _memories(self, shape: Policy, choice: Choice) -> tuple[MemoryLimit, ...]:
        corners = {tier: self._corner(shape, tier, choice) for tier in self.places}
        cost = self.tried.cost
        token, device = cost.model.kv_token * len(cost.model.layers), cost.peak(shape)
        offloaded = cost.peak(shape, share=1.0) if choice.cache else device
        cache = {tier: token * (device if tier == "device" else offloaded) for tier in self.places}
        rows = memories(corners, cache, self.tried.capacity)
        if not choice.attended:
            return rows
        split = self._attended(shape)
        held = {fraction(CACHE, place): split.get(place, 0.0) for place in self.places}
        return tuple(replace(row, used=row.used.fixed(held)) for row in rows)

    @cached_property
    def weights_on_host(self) -> bool:
        """Whether weights may be on the host: it is another memory, or holds weights in fewer bytes than the device."""
        tensors = self.tried.cost.model.tensors
        stored, held = (sum(t.elements * getattr(t, what) for t in tensors) for what in ("stored", "held"))
        return bool(stored < 0.9 * held) or not self.tried.cost.hardware.shared

    def _corner(self, shape: Policy, tier: str, choice: Choice) -> Layout:
        """Return the layout, without memory limits, with all data that may move on one tier."""
        split: Split = tuple(float(t == tier) for t in self.places)
        policy = replace(
            shape,
            weights=split,
            cache=split if choice.cache else choice.attended or ON_DEVICE,
            activations=split if choice.hidden else ON_DEVICE,
            delegate=choice.delegate if choice.attended else delegate_of(choice.delegate, split),
        )
        if policy not in self._corners:
            unlimited = self.tried.capacity.limited(dict.fromkeys(self.tried.capacity.places))
            self._corners[policy] = self.tried.laid_out(policy, unlimited)
        return self._corners[policy]


def _bare(shape: Policy) -> Policy:
    """Return the shape with fixed splits, as a key for shapes that differ only in splits."""
    return replace(shape, weights=_ON_DISK, cache=ON_DEVICE, activations=ON_DEVICE, delegate=NO_CACHE,
                   partition=REQUESTS, queries_first=False)  # fmt: skip


def _rounded(shape: Policy, fractions: dict[str, float], choice: Choice) -> Policy:
    def split(kind: str) -> Split:
        return thousandths([x for name, x in fractions.items() if kind_of(name) == kind])

    cache = choice.attended or split(CACHE)
    delegate = delegate_of(choice.delegate, cache)
    return replace(shape, weights=split(WEIGHTS), cache=cache, activations=split(HIDDEN), delegate=delegate)


def placement_problem(
    model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy, options: Options | None = None
) -> Problem:
    """Return the linear program for a policy's block shape.

    Data may leave the device in the program if it does so under the policy.
    """
    tried = Candidates(Cost(model, hardware, workload), options or Options())
    return Placement(tried).problem(policy, Choice.of(policy))
