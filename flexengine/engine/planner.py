"""Planning for a model on a machine: a search for the policy, with rates that are measured for long jobs."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flexengine.activity import activity, message
from flexengine.engine.rates import RateStore, of_kernels
from flexengine.errors import OutOfMemory
from flexengine.lossy import TOKENS_PARTITION, Lossy, choices
from flexengine.places import place_of
from flexengine.plan.candidates import Options
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.formatting import clock
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.min_memory import fitting, lay_out_given, planned
from flexengine.plan.search import Search, search, unused_workers
from flexengine.plan.search import check as check_least
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

SAVING = 0.95  # a lossier choice must take less than this share of the predicted seconds
SPARED, MOST_SPARED = 1 / 16, 1 / 4  # after an out-of-memory error a tier's budget becomes 3/4 to 15/16 of its bookings
MIN_JOB_SECONDS = 60.0  # reading resident weights again may pay in jobs of at least this length
PAYBACK = 10  # measuring everything must be able to shorten a job by this many times the seconds that it takes
UNLIMITED = Options()
MIN_QUICK_SECONDS = 2.0  # measure briefly before a job if it is predicted to take at least this long
QUICK_SECONDS = 3.0  # of measuring briefly, about


@dataclass(frozen=True)
class Plan:
    """The plan of a job."""

    layout: Layout | None  # tier of every weight and bytes of every buffer; None if the job has no row that can be run
    workload: Workload  # the sizes of the rows that fit
    largest: int  # most tokens, prompt and generated, of one row that fits
    refusal: OutOfMemory | None  # error for longer rows; None if all rows fit


class Planner:
    """Plans the jobs of one model on one machine."""

    def __init__(
        self,
        machine: Machine,
        opened: OpenModel,
        hardware: Hardware | None = None,
        overlap: bool = True,
        policy: Policy | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Plan with the rates of `hardware`, if given, instead of this machine's. Capacities are the machine's. Raise
        InvalidInput if `hardware` is of another kind of machine, or a name in `allow` is unknown.

        Args:
            overlap: whether lanes work at the same time under a policy with two slots or more.
            allow: see EngineOptions.
        """
        self.machine, self.opened, self.overlap = machine, opened, overlap
        self.policy = policy  # that the user gave; None lets the planner choose
        # Most tokens of a prefill chunk, and sequences alive, in all policies that the planner chooses; None: no limit.
        self.prefill_tokens: int | None = None
        self.block: int | None = None
        self.cohorts = 1  # of a pipeline, one per stage; see `plan.cost.Cost`
        self.alone = True  # whether the model is whole: what is predicted is the job's, not that of a stage
        self.rates = RateStore(machine, opened, hardware)
        self._searched: Search | None = None  # with attention workers, the search that chose the last policy
        self.by_tokens = TOKENS_PARTITION in allow
        allowed = choices(allow) if set(allow) - {TOKENS_PARTITION} else ()
        # Lossy switches to choose from for the first job, and why the first of the others cannot be used.
        self.choices = tuple(each for each in allowed if opened.refusal(each) is None)
        self.unsuited = next(filter(None, map(opened.refusal, allowed)), None)

    def use(self, lossy: Lossy) -> None:
        """Plan with these switches from now on."""
        self.opened.use(lossy)
        self.rates.forget()

    def keep_prefill(self, tokens: int | None) -> bool:
        """Cut all prompts as an earlier run of the job cut them, as the last bits of results depend on it. Return
        whether the user's policy was changed. tokens: most of a prefill chunk; None lets the planner choose."""
        self.prefill_tokens = tokens
        if self.policy is None or not tokens or self.policy.prefill_tokens == tokens:
            return False
        self.policy = replace(self.policy, prefill_tokens=tokens)
        return True

    def choose_lossy(self, workload: Workload) -> None:
        """Choose the lossy switches for a job of this workload, if the planner may choose and has not chosen. Weights
        must not be loaded. Raise OutOfMemory if the job fits under no choice."""
        if not self.choices or not workload.count:
            return
        chosen = self.least_lossy(workload, self.choices)
        self.choices = ()
        if self.unsuited:
            message(f"not considered: {self.unsuited}")
        message(f"chosen: {chosen.described}")

    def least_lossy(self, workload: Workload, among: Sequence[Lossy]) -> Lossy:
        """Set and return the switches with the shortest predicted time; see `least_lossy` below.

        If all were measured, these rates tell. Else all are compared by the rates of kernels, which all have. Then the
        least lossy, the best and the fastest other choice that fit are measured briefly, if the job is predicted to
        take longer than that, and the best of these is chosen."""
        found = dict[Lossy, float]()
        if self.opened.facts.chooses(workload.longest):  # an indexer's keys must be plain
            among = [each for each in among if not each.cache_bits and each.sparse_attention is None] or among

        def seconds(lossy: Lossy, own: bool) -> float:
            self.use(lossy)
            known = self.rates.known() if own else of_kernels(self.rates.known())
            found[lossy] = self.choose(workload, known=known).total_seconds
            return found[lossy]

        def measured(lossy: Lossy) -> bool:
            self.use(lossy)
            return self.rates.own

        own = all(map(measured, among))
        best = least_lossy(among, partial(seconds, own=own))
        if not own:
            fits = [lossy for lossy in among if lossy in found]
            fastest = min((lossy for lossy in fits if lossy != best), key=found.__getitem__, default=best)
            final = [lossy for lossy in fits if lossy in (fits[0], best, fastest)]
            new = [lossy for lossy in final if not measured(lossy)]
            if found[best] > QUICK_SECONDS * len(new):
                for lossy in new:
                    self.use(lossy)
                    self.rates.measure_quickly()
            if all(map(measured, final)):
                found.clear()
                best = least_lossy(final, partial(seconds, own=True))
        self.use(best)
        message(
            f"predicted seconds of the job: {', '.join(f'{x:.3g} {lossy}' for lossy, x in found.items())}",
            logging.INFO if any(lossy.flash for lossy in found) else logging.DEBUG,
        )
        return best

    def plan(self, workload: Workload, resident: Policy | None = None) -> Plan:
        """Return the plan of a job. Raise OutOfMemory if not even its shortest rows fit. resident: as for `choose`."""
        if not workload.count:
            return Plan(None, workload, 0, None)
        layout, largest, refusal = fitting(workload, lambda part: self.layout(part, resident))
        # A search has measured already; of a stage the time is not shown.
        unknown = self.alone and self.policy is not None and resident is None and not self.rates.own
        if unknown and self.cost(workload.up_to(largest)).predict(layout).seconds >= MIN_QUICK_SECONDS:
            self.rates.measure_quickly()
        if self.machine.workers and self._searched is not None and not layout.policy.works:
            self._say_unused(self._searched)
        if self.opened.facts.topk is not None:
            from flexengine.plan.sparse import sparse_warning

            cost = self.cost(workload.up_to(largest))
            if warning := sparse_warning(cost, cost.predict(layout)):
                message(warning, logging.WARNING)
        return Plan(layout, workload.up_to(largest), largest, refusal)

    def _say_unused(self, searched: Search) -> None:
        message(unused_workers(searched.tried, searched.best))

    def check(self, workload: Workload) -> None:
        """Raise OutOfMemory if `plan` would, without a search for a policy."""
        least = partial(
            check_least, self.opened.facts, capacity=self.machine.capacity, prefill_tokens=self.prefill_tokens
        )
        fitting(workload, least if self.policy is None else self.layout)

    def layout(self, workload: Workload, resident: Policy | None = None) -> Layout:
        """Return the layout under the given policy, or under the best one. Raise OutOfMemory if it does not fit."""
        if self.policy is not None:
            return self.layout_under(self.policy, workload)
        return self.choose(workload, resident).layout

    def layout_under(self, policy: Policy, workload: Workload) -> Layout:
        """Return the layout under a policy. Raise OutOfMemory if it does not fit."""
        return lay_out_given(self.opened.facts, policy, workload, self.machine.capacity)

    def search(self, workload: Workload, options: Options | None = None, known: Hardware | None = None) -> Search:
        """Return the search for the best policy. Raise as `plan.search.search` does.

        Args:
            options: limits of the search.
            known: rates to search with; must be given while weights are loaded, as measuring needs their memory and
                modules. None for the rates known so far: then measure briefly if the job is predicted to take
                MIN_QUICK_SECONDS, and everything if that can pay; see `pays`.
        """
        facts, rates, measure = self.opened.facts, self.rates, known is None
        known = known or rates.known()
        options = replace(options or Options(), overlap=self.overlap, by_tokens=self.by_tokens, cohorts=self.cohorts)
        options = options if self.alone else replace(options, stores_from=math.inf)
        with activity("planning", "searching the policy with the shortest predicted time"):
            found = search(facts, known, workload, options)
            if not measure or found.best.seconds < MIN_QUICK_SECONDS:
                return found
            if rates.measure_quickly():
                found = search(facts, known := rates.known(), workload, options)
            length, seconds = rates.missing_seconds(known), found.best.total_seconds
            if not length or not pays(seconds, 0.0, length):
                return found
            free = known.with_capacity(replace(known.capacity, device=None, workers=(), filed=0))
            least = search(facts, free, workload, replace(options, placed=None)).best.total_seconds
            if not pays(seconds, least, length):
                return found
            job = f"{clock(seconds)}, of which a better plan saves at most {clock(seconds - least)}"
            message(f"measuring this machine and model takes about {clock(length)}; the job is predicted to take {job}")
            return search(facts, rates.measured(), workload, options)

    def choose(
        self,
        workload: Workload,
        resident: Policy | None = None,
        limits: Options = UNLIMITED,
        known: Hardware | None = None,
    ) -> Prediction:
        """Return the best policy for a workload, and its prediction. Raise OutOfMemory if no policy fits.

        Args:
            resident: the policy under which weights are in memory; None if none are. They stay if the job fits beside
                them, unless the job is long and reading them again pays.
            limits: if its `block` or `prefill_tokens` is None, that of the planner holds.
            known: as for `search`; not needed if weights are in memory.
        """
        tokens, block = limits.prefill_tokens or self.prefill_tokens, limits.block or self.block
        searched = self._choice(workload, resident, replace(limits, prefill_tokens=tokens, block=block), known)
        self._searched = searched if self.machine.workers else None  # its layouts take tens of MB
        return searched.best

    def _choice(self, workload: Workload, resident: Policy | None, options: Options, known: Hardware | None) -> Search:
        if resident is None:
            return self.search(workload, options, known)
        known = known or self.rates.known()
        try:
            beside = self.search(workload, replace(options, placed=resident), known)
        except OutOfMemory:
            return self.search(workload, options, known)
        if beside.best.seconds < MIN_JOB_SECONDS:
            return beside
        other = self.search(workload, options, known)
        return other if other.best.total_seconds < beside.best.seconds else beside

    def smaller(self, workload: Workload, layout: Layout, tier: str, missing: int, resident: Policy | None) -> Layout:
        """Return a layout of at most half the block after an out-of-memory error.

        The tier's budget becomes the booked bytes less the missing bytes, and at least 3/4 and at most 15/16 of the
        booked bytes. The budget also holds for all later plans. Prompts are cut as before, so that results stay equal.
        Raise OutOfMemory if no such layout fits.

        Args:
            layout: the layout under which memory ran out.
            tier: the tier that ran out: device, host, or an attention worker.
            missing: bytes that could not be allocated; 0 if the number is unknown.
            resident: as for `choose`.
        """
        capacity, other = self.machine.capacity, "host" if tier == "device" else "device"
        in_ram = capacity.shared and not place_of(tier).worker
        booked = layout.total(tier) + (layout.total(other) if in_ram else 0)
        lost = int(min(max(missing, SPARED * booked), MOST_SPARED * booked))
        aside = 0  # bytes for memory other than tensors
        if in_ram and capacity.device is not None:
            aside = capacity.device - max(planned(capacity).device or 0, booked)
        self.machine.capacity = capacity.limited({tier: booked - lost + aside})
        policy = layout.policy
        half = max(1, min(policy.block_size, workload.count) // 2)
        return self.choose(workload, resident, Options(policy.prefill_tokens, block=half)).layout

    def cost(self, workload: Workload, known: Hardware | None = None) -> Cost:
        """Return the cost model of a workload. Measure nothing. known: rates to use; None for those known so far."""
        return Cost(self.opened.facts, known or self.rates.known(), workload, self.overlap, self.cohorts)

    def watch(self, workload: Workload, layout: Layout) -> SweepMonitor:
        """Return what compares a job's sweeps, each of one cohort, with their prediction under a layout."""
        return SweepMonitor(Cost(self.opened.facts, self.rates.known(), workload, self.overlap), layout)


def pays(seconds: float, least: float, length: float) -> bool:
    """Return whether measuring everything can pay for itself PAYBACK times.

    Args:
        seconds: predicted seconds of the job under the best plan with the rates known so far.
        least: predicted seconds with unlimited memory of the device, which no better plan undercuts.
        length: seconds of the measurement.
    """
    return seconds - least >= PAYBACK * length


def least_lossy(among: Sequence[Lossy], seconds: Callable[[Lossy], float]) -> Lossy:
    """Return the switches with the fewest seconds. Choose a lossier choice only if it takes less than SAVING times the
    seconds of the best choice before it. Raise OutOfMemory if the job fits under no choice; the error is that of the
    choice that needs the fewest bytes.

    Args:
        among: the choices, the least lossy first.
        seconds: return the seconds of a job with these switches, or raise OutOfMemory if the job does not fit.
    """
    best, best_seconds, refused = among[0], float("inf"), list[OutOfMemory]()
    for lossy in among:
        try:
            predicted = seconds(lossy)
        except OutOfMemory as error:
            refused.append(error)
            continue
        if predicted < SAVING * best_seconds:
            best, best_seconds = lossy, predicted
    if best_seconds == float("inf"):
        raise min(refused, key=lambda error: error.needed)
    return best
