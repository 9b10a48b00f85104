"""Plans of a pipeline's jobs, for its first stage: one block for all stages, and on one machine the layers of each."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from flexengine.activity import activity, message
from flexengine.engine.core import Core
from flexengine.engine.planner import MIN_QUICK_SECONDS, UNLIMITED, Plan, Planner
from flexengine.errors import OutOfMemory
from flexengine.guests.stages.group import OrderKind
from flexengine.guests.stages.remote import Driver, JobOrder, RemotePlan
from flexengine.guests.wire.link import answers_read
from flexengine.lossy import Lossy
from flexengine.plan.candidates import Options
from flexengine.plan.chain import ChainPlan, ChainSearch, Range
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.lp import SolverFailed
from flexengine.plan.min_memory import fitting, lay_out_given
from flexengine.plan.placement import ON_DEVICE
from flexengine.plan.search import Search
from flexengine.plan.stages import Strategy, block_of, even_layers, place_weights, stage_facts
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.worker.open_model import OpenModel, Trust, open_model

MIN_SPLIT_GAIN = 0.97  # layers move only if the slowest stage then takes at most this share of its seconds


def opened_again(core: Core, layers: Range | None) -> OpenModel:
    """Return the model of a core opened again, with these layers; None for all of them."""
    options, before = core.options, core.opened
    name = None if options.model is None else str(options.model)
    # No verifier: the files were compared with their checksums when the core was opened.
    trust = Trust(options.trust_remote_code, None, options.allow_symlinks, core.machine.capacity.ram)
    opened = open_model(name, options.dtype, core.machine.kind, trust, lossy=before.lossy, layers=layers)
    opened.importances, opened.thresholds, opened.verifier = before.importances, before.thresholds, before.verifier
    return opened


def take_layers(core: Core, planner: Planner, layers: Range) -> None:
    """Let a stage hold other layers of its model. Weights in memory are dropped. Raise as `open_model`.

    Args:
        planner: plans the jobs of the stage.
        layers: first layer, and last layer + 1.
    """
    if layers != core.skeleton.layer_range:
        opened = opened_again(core, layers)
        core.drop_weights()
        core.opened = planner.opened = opened
        core.skeleton = opened.skeleton


class PipelinePlanner(Planner):
    """Plans the jobs of a pipeline, for its first stage. Every stage chooses the best policy for itself. All then take
    the one under which the slowest stage is fastest.

    On one machine, the layers are divided first, for the rows of the job, and all stages plan with the rates of this
    process. It measures them while the others wait, so that they do not disturb each other.

    Attributes:
        others: the other stages' plans of the last layout.
        ranges: layers of each stage, once they were divided for a job; [] while they are even.
    """

    def __init__(self, core: Core, strategy: Strategy | None, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(core.driver, Driver)
        self.core, self.driver, self.strategy = core, core.driver, strategy
        self.others: list[RemotePlan] = []
        self.alone, self.cohorts = False, self.driver.group.size
        self.ranges: list[Range] = []
        self._block: Policy | None = None  # of the plan that divided the layers
        self._whole: OpenModel | None = None  # all layers, with the present lossy switches

    @property
    def _together(self) -> bool:
        """Whether all stages are on this machine, with equal parts of it."""
        return self.driver.group.local_size == self.driver.group.size and not self.machine.workers

    def use(self, lossy: Lossy) -> None:
        super().use(lossy)
        self._block = None
        if self._whole is not None:
            self._whole.use(lossy)

    def plan(self, workload: Workload, resident: Policy | None = None) -> Plan:
        """Return the plan of a job for the first stage. Arguments and errors as for `Planner.plan`. Layers are divided
        before, unless weights are in memory, or a strategy or a policy is given."""
        given = self.policy is not None or self.strategy is not None or resident is not None
        if workload.count and self._together and not given:
            with suppress(OutOfMemory, SolverFailed):  # which the plan raises, if it fails with the present layers
                self._divide(workload)
        return super().plan(workload, resident)

    def _divide(self, workload: Workload) -> None:
        """Give each stage the layers under which the slowest one is predicted to be fastest for these rows, if that
        gains enough. Measure this model's rates for jobs that are long enough. Raise OutOfMemory if no row fits."""
        self._block = None
        if self._whole is None:
            self._whole = self.rates.opened = opened_again(self.core, None)
            self.rates.forget()
        with activity("planning", "dividing the layers among the stages"):
            found, plan = self._chain(workload)
        if plan.seconds >= MIN_QUICK_SECONDS and self.rates.measure_quickly():
            with activity("planning", "dividing the layers among the stages"):
                found, plan = self._chain(workload)
        self._block = plan.policy
        ranges, size = [stage.layers for stage in plan.stages], self.driver.group.size
        present = self.ranges or even_layers(self.core.skeleton.total, self.core.skeleton.inherits, size)
        now = inf  # seconds with the present layers, under the best block for them
        with suppress(OutOfMemory):
            now = min(max(found.seconds(policy, present)) for policy in (plan.policy, *found.blocks(present)))
        if max(found.seconds(plan.policy, ranges)) <= MIN_SPLIT_GAIN * now:
            take_layers(self.core, self, ranges[0])
            self.ranges = ranges

    def _chain(self, workload: Workload) -> tuple[ChainSearch, ChainPlan]:
        """Return the plan of a chain of stages with the memory and the rates of this process, for the rows that fit,
        and its search."""
        assert self._whole is not None
        facts, machines = self._whole.facts, [self.rates.known()] * self.driver.group.size
        limits = Options(self.prefill_tokens, block=self.block, overlap=self.overlap)

        def planned(part: Workload) -> tuple[ChainSearch, ChainPlan]:
            search = ChainSearch(facts, machines, part, limits)
            return search, search.plan()

        return fitting(workload, planned)[0]

    def layout(self, workload: Workload, resident: Policy | None = None) -> Layout:
        """Return the layout of the first stage. Raise OutOfMemory if the job does not fit in a stage."""
        layout = super().layout(workload, resident)
        job = self._job(workload, layout.policy, given=self.policy is not None)
        self.others = list(self.driver.ask(OrderKind.LAY_OUT, RemotePlan, job)().values())
        return layout

    def remote_case(self, rank: int, workload: Workload) -> tuple[Cost, Prediction] | None:
        """Return the cost model of another stage, and the prediction of its plan of the last layout, both computed by
        this process. None if the stages have unlike machines or attention workers, or if the plan does not fit here."""
        if not self._together:
            return None
        first, end, total = self.others[rank - 1].layers
        whole = self._whole or opened_again(self.core, None)
        model = stage_facts(whole.facts, slice(first, end), (first == 0, end == total))
        cost = Cost(model, self.rates.known(), workload, self.overlap, self.cohorts)
        with suppress(OutOfMemory):
            layout = lay_out_given(model, self.others[rank - 1].policy, workload, self.machine.capacity)
            return cost, cost.predict(layout)
        return None

    def _job(self, workload: Workload, policy: Policy, **fields: Any) -> JobOrder:
        """Return what the other stages plan. fields: further ones of `JobOrder`."""
        hardware = self.rates.known().to_json() if self._together else None
        return JobOrder(workload, self.opened.lossy, policy, layers=self.ranges, hardware=hardware, **fields)

    def _say_unused(self, searched: Search) -> None:
        message("attention workers are not used: the stages are predicted to be no faster with them")

    def choose(
        self,
        workload: Workload,
        resident: Policy | None = None,
        limits: Options = UNLIMITED,
        known: Hardware | None = None,
    ) -> Prediction:
        """Return a policy for all stages, with the weights of the first one, and its prediction for the first stage.
        Arguments and errors as for `Planner.choose`; an error of another stage names the stage."""
        tokens = limits.prefill_tokens or self.prefill_tokens
        if self.strategy is not None and limits.block is None:
            shared = block_of(self.strategy, workload)
            shared = replace(shared, prefill_tokens=tokens or shared.prefill_tokens)
        else:  # of the policies that are best for a stage, the one under which the slowest stage is fastest
            job = self._job(workload, Policy(), block=limits.block, prefill_tokens=tokens)
            others = self.driver.ask(OrderKind.CHOOSE, Policy, job)
            with answers_read(others):
                own = super().choose(workload, resident, limits, known).policy
            chosen = [own, *others().values(), *self._of_chain(limits, tokens)]
            every = {replace(policy, weights=ON_DEVICE, neurons=0.0) for policy in chosen}
            by_size = sorted(every, key=lambda policy: (policy.block_size, str(policy)))  # a tie takes the smallest
            shared = min(by_size, key=lambda policy: self._slowest(policy, workload, resident, known))
        return place_weights(self.cost(workload, known), shared, self.machine.capacity, resident)

    def _of_chain(self, limits: Options, tokens: int | None) -> Sequence[Policy]:
        """Return the policy with which the layers were divided, if the limits allow it. tokens: most of a prefill
        chunk; None for those of the policy."""
        least = min(filter(None, (limits.block, self.block)), default=inf)
        if self._block is None or self._block.block_size > least:
            return []
        return [replace(self._block, prefill_tokens=tokens or self._block.prefill_tokens)]

    def _slowest(self, policy: Policy, workload: Workload, resident: Policy | None, known: Hardware | None) -> float:
        """Return the seconds of work of the slowest stage under a block; infinite if a stage has no room for it."""
        answers = self.driver.ask(OrderKind.LAY_OUT, RemotePlan, self._job(workload, policy))
        slowest = inf
        with suppress(OutOfMemory):
            slowest = place_weights(self.cost(workload, known), policy, self.machine.capacity, resident).total_seconds
        with suppress(OutOfMemory):
            return max(slowest, *(plan.seconds for plan in answers().values()))
        return inf
