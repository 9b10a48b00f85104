"""Plans for a model on a machine: measures it where that pays, and searches the policy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flexengine.config import SamplingParams
from flexengine.engine.options import MachineOptions
from flexengine.engine.survey import Reader, Refused
from flexengine.errors import FlexError, InvalidInput, OutOfMemory
from flexengine.lossy import Lossy, choices
from flexengine.measure import store
from flexengine.model.skeleton import named_dtype
from flexengine.model.tokenizer import load_tokenizer
from flexengine.plan.assumed import assumed
from flexengine.plan.cost import Cost
from flexengine.plan.feedback import Watch
from flexengine.plan.fitting import fitting
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.least import lay_out_given, planned
from flexengine.plan.prediction import Prediction
from flexengine.plan.search import Search, search
from flexengine.plan.search import check as check_least
from flexengine.plan.shapes import Options
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.tier.machine import Machine
from flexengine.worker.opened import Opened

Say = Callable[[str], None]

SAVING = 0.95  # of the predicted seconds, that must be left for something to be done less exactly
SPARED, MOST_SPARED = 1 / 16, 1 / 4  # of what proved too large, that is left free at least and at most
WORTH = 60.0  # seconds a job must be thought to take for the machine to be measured before it


@dataclass(frozen=True)
class Plan:
    """What a job begins with.

    Attributes:
        layout: where everything lies; None if the job has no row that can be run.
        workload: the sizes of the rows that fit.
        largest: most tokens, prompt and generated, of one row that fits.
        refusal: why no longer row fits; None if all rows fit.
    """

    layout: Layout | None
    workload: Workload
    largest: int
    refusal: OutOfMemory | None


class Planner:
    """Plans the jobs of one model on one machine.

    Attributes:
        policy: the policy that the user gave; None lets the planner choose.
        prefill_tokens: of every policy that the planner chooses; None lets it choose them, too.
        choices: lossy switches that the planner may choose from for the first job; () leaves them as they are.
        unsuited: why the first switch that the user allowed cannot be used here; None if all can.
        say: called with a message before anything that takes long.
    """

    def __init__(
        self,
        machine: Machine,
        opened: Opened,
        offload_dir: Path,
        hardware: Hardware | None = None,
        overlap: bool = True,
        policy: Policy | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Plan with the rates of `hardware`, if given, instead of this machine's. Capacities are the machine's.

        Args:
            overlap: whether lanes work at the same time under a policy with two slots or more.
            allow: see EngineOptions.

        Raises:
            InvalidInput: `hardware` is of another kind of machine, or a name in `allow` is unknown.
        """
        self.machine, self.opened, self.offload_dir, self.overlap = machine, opened, offload_dir, overlap
        self.policy = policy
        self.prefill_tokens: int | None = None
        self._hardware = fitted(hardware, machine) if hardware is not None else None
        self._given = hardware is not None
        allowed = choices(allow) if allow else ()
        self.choices = tuple(each for each in allowed if opened.refusal(each) is None)
        self.unsuited = next(filter(None, map(opened.refusal, allowed)), None)

    @property
    def say(self) -> Say:
        return self.opened.say

    @say.setter
    def say(self, say: Say) -> None:
        self.opened.say = say

    def use(self, lossy: Lossy) -> None:
        """Plans with such weights and cache from now on."""
        self.opened.use(lossy)
        if not self._given:
            self._hardware = None

    def keep_prefill(self, tokens: int | None) -> bool:
        """Cut all prompts as an earlier run of the job cut them, as the last bits of its results depend on that. Return
        whether a given policy was changed.

        Args:
            tokens: most tokens of a prefill chunk; None lets the planner choose.
        """
        self.prefill_tokens = tokens
        if self.policy is None or not tokens or self.policy.prefill_tokens == tokens:
            return False
        self.policy = replace(self.policy, prefill_tokens=tokens)
        return True

    def choose_lossy(self, workload: Workload) -> None:
        """Choose the lossy switches for a job of this workload, if the planner may and has not. Weights must not be
        loaded. Raise OutOfMemory if the job fits with none."""
        if not self.choices or not workload.count:
            return
        chosen = self.least_lossy(workload, self.choices)
        self.choices = ()
        if self.unsuited:
            self.say(f"not considered: {self.unsuited}")
        self.say(f"chosen: {chosen}; python -m flexengine.quality shows what that costs")

    def least_lossy(self, workload: Workload, among: Sequence[Lossy]) -> Lossy:
        """Use, and return, the switches with which a job is predicted to end first; see `least_lossy` below."""

        def seconds(lossy: Lossy) -> float:
            self.use(lossy)
            return self.choose(workload).total_seconds

        self.use(best := least_lossy(among, seconds))
        return best

    def plan(self, workload: Workload, resident: Policy | None = None) -> Plan:
        """Return the plan of a job. Raise OutOfMemory if not even its shortest rows fit.

        Args:
            workload: sizes of all rows that can be run.
            resident: the policy under which weights are in memory; None if none are.
        """
        if not workload.count:
            return Plan(None, workload, 0, None)
        layout, largest, refusal = fitting(workload, lambda part: self.layout(part, resident))
        return Plan(layout, workload.up_to(largest), largest, refusal)

    def check(self, workload: Workload) -> None:
        """Raise OutOfMemory if `plan` would, without a search for a policy."""
        least = partial(check_least, self.opened.facts, capacity=self.machine.capacity,
                        prefill_tokens=self.prefill_tokens)  # fmt: skip
        fitting(workload, least if self.policy is None else self.layout)

    def layout(self, workload: Workload, resident: Policy | None = None) -> Layout:
        """Return the layout under the given policy, or under the best one. Raise OutOfMemory if it does not fit."""
        if self.policy is not None:
            return self.layout_under(self.policy, workload)
        return self.choose(workload, resident).layout

    def layout_under(self, policy: Policy, workload: Workload) -> Layout:
        """Return the layout under a policy. Raise OutOfMemory if it does not fit."""
        return lay_out_given(self.opened.facts, policy, workload, self.machine.capacity)

    def search(self, workload: Workload, options: Options | None = None, measure: bool = True) -> Search:
        """The policy for a workload. Raises as `plan.search.search` does. measure: whether the machine may be measured
        for a job that is worth it; not while weights are loaded, as it takes the room and the modules."""
        facts, known = self.opened.facts, self.known()
        options = replace(options or Options(), overlap=self.overlap)
        found = search(facts, known, workload, options)
        complete = self._hardware is not None or store.knows(known, facts)
        if complete or not measure or found.best.seconds < WORTH:
            return found
        return search(facts, self.hardware(), workload, options)

    def choose(
        self,
        workload: Workload,
        resident: Policy | None = None,
        block: int | None = None,
        prefill_tokens: int | None = None,
    ) -> Prediction:
        """Return the best policy for a workload, and its prediction. Raise OutOfMemory if no policy fits.

        Args:
            resident: the policy under which weights are in memory. They stay if the job fits beside them, unless the
                job is long and reading them again pays.
            block: most sequences alive.
            prefill_tokens: of the policy; None takes those of the planner.
        """
        anew = Options(prefill_tokens or self.prefill_tokens, block=block)
        if resident is None:
            return self.search(workload, anew).best
        try:
            kept = self.search(workload, replace(anew, placed=resident), measure=False).best
        except OutOfMemory:
            return self.search(workload, anew, measure=False).best
        if kept.seconds < WORTH:
            return kept
        other = self.search(workload, anew, measure=False).best
        return other if other.total_seconds < kept.seconds else kept

    def smaller(self, workload: Workload, layout: Layout, tier: str, missing: int, resident: Policy | None) -> Layout:
        """A layout of at most half the block, in what a layout that proved too large took of a tier, less what was
        missing (bytes; 0: nobody knows) or SPARED. Prompts are cut as before, so that results stay the same. For all
        that is planned from now on the tier is that small. Raises OutOfMemory where there is no such layout."""
        capacity, other = self.machine.capacity, "host" if tier == "device" else "device"
        booked = layout.total(tier) + (layout.total(other) if capacity.shared else 0)
        lost = int(min(max(missing, SPARED * booked), MOST_SPARED * booked))
        aside = 0  # for what is not tensors
        if capacity.shared and capacity.device is not None:
            aside = capacity.device - max(planned(capacity).device or 0, booked)
        left = booked - lost + aside
        lessened = replace(capacity, device=left) if tier == "device" else replace(capacity, host=left)
        self.machine.capacity = lessened
        if self._hardware is not None:
            self._hardware = store.with_capacity(self._hardware, self.machine)
        policy = layout.policy
        half = max(1, min(policy.block_size, workload.count) // 2)
        return self.choose(workload, resident, half, policy.prefill_tokens).layout

    def cost(self, workload: Workload) -> Cost:
        """Prices of a workload's policies, with the best rates known; nothing is measured for it."""
        return Cost(self.opened.facts, self.known(), workload, self.overlap)

    def watch(self, workload: Workload, layout: Layout) -> Watch:
        """Return what compares a job's sweeps with their prediction under a layout."""
        return Watch(self.cost(workload), layout)

    def learn(self, watch: Watch) -> None:
        """Corrects the rates kept for this machine where a job showed them to be persistently wrong; never those that
        were given."""
        if not self._given and watch.cost.hardware.measured and (factors := watch.factors()):
            opened = self.opened
            key = store.key_of(self.machine, self.offload_dir, opened.dtype, opened.files)
            latest = store.cached(key) or watch.cost.hardware  # other jobs may have added theirs meanwhile
            better = store.corrected(latest, factors, opened.facts, watch.cost.hardware)
            store.keep(key, better)
            if self._hardware is not None:  # else it is read again when it is needed
                self._hardware = store.with_capacity(better, self.machine)

    def known(self) -> Hardware:
        """This machine's rates as far as they have been measured; else what is assumed of one of its kind."""
        known = self._hardware or store.obtain(self.machine, self.offload_dir, self.opened)
        return known or assumed(self.machine.kind, self.machine.capacity)

    def hardware(self) -> Hardware:
        """This machine's rates, and this model's on it, measured unless they have been, or cannot be."""
        if self._hardware is None:
            try:
                self._hardware = store.obtain(self.machine, self.offload_dir, self.opened, measure=True, say=self.say)
            except (FlexError, OSError) as error:
                self.say(f"not measured: {error}")
        self._hardware = self._hardware or self.known()
        return self._hardware


def least_lossy(among: Sequence[Lossy], seconds: Callable[[Lossy], float]) -> Lossy:
    """Return the switches with the fewest seconds; more of them only where that saves SAVING.

    Args:
        among: the choices, the least lossy first.
        seconds: of a job with these switches; raises OutOfMemory if it does not fit.

    Raises:
        OutOfMemory: the job fits with none; the error is that of the choice that needs the fewest bytes.
    """
    best, least, refused = among[0], float("inf"), list[OutOfMemory]()
    for lossy in among:
        try:
            found = seconds(lossy)
        except OutOfMemory as error:
            refused.append(error)
            continue
        if found < SAVING * least:
            best, least = lossy, found
    if least == float("inf"):
        raise min(refused, key=lambda error: error.needed)
    return best


def fitted(hardware: Hardware, machine: Machine) -> Hardware:
    """The same rates with a machine's capacities. Raises InvalidInput if it is of another kind."""
    if hardware.kind != machine.kind:
        raise InvalidInput(f"hardware {hardware.name} is of kind {hardware.kind}, but this job runs on {machine.kind}")
    return store.with_capacity(hardware, machine)


def this_machine(
    options: MachineOptions,
    opened: Opened | None,
    again: bool = False,
    say: Say | None = None,
    dtype: str | None = None,
) -> Hardware:
    """This machine's rates and, with a model, the model's own on it, measured unless they have been (or `again`).
    dtype: of activations, where there is no model; None: this kind of machine's own."""
    computing = named_dtype(dtype)
    machine = options.machine()
    if machine.no_offload and say:
        say(f"nothing is offloaded to disk: {machine.no_offload}")
    try:
        found = store.obtain(machine, options.directory, opened, True, say, again, computing)
        assert found is not None
        return found
    finally:
        machine.close()


def workload(
    opened: Opened, rows: Iterable[Any], params: SamplingParams, trust_remote_code: bool, refused: Refused
) -> Workload:
    """The sizes of the rows, read with the model's tokenizer; those that cannot be run are told to `refused`."""
    tokenizer = load_tokenizer(opened.source.directory, trust_remote_code)
    reader = Reader(tokenizer, opened.skeleton.context_length, opened.skeleton.head[1][0])
    return reader.survey(rows, params, refused)
