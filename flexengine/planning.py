"""Plans for a model on a machine: measures it where that pays, and searches the policy."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexengine.config import SamplingParams, cache_root, parse_size
from flexengine.errors import FlexError, InvalidInput, OutOfMemory
from flexengine.lossy import Lossy
from flexengine.measure import store
from flexengine.model.skeleton import named_dtype
from flexengine.model.tokenizer import load_tokenizer
from flexengine.plan.assumed import assumed
from flexengine.plan.cost import Cost
from flexengine.plan.feedback import Watch
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.least import planned
from flexengine.plan.prediction import Prediction
from flexengine.plan.search import Search, search
from flexengine.plan.shapes import Options
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.survey import Reader, Refused
from flexengine.tier.machine import Links, Machine, make_machine
from flexengine.worker.opened import Opened

Say = Callable[[str], None]

SAVING = 0.95  # of the predicted seconds, that must be left for something to be done less exactly
SPARED, MOST_SPARED = 1 / 16, 1 / 4  # of what proved too large, that is left free at least and at most
WORTH = 60.0  # seconds a job must be thought to take for the machine to be measured before it


class Planner:
    """Plans the jobs of one model on one machine.

    given: rates to plan with instead of this machine's own; capacities are the machine's always. say: told of what
    takes time. overlap: whether lanes work at the same time where a policy has slots for it.
    """

    def __init__(
        self, machine: Machine, opened: Opened, offload_dir: Path, given: Hardware | None = None, overlap: bool = True
    ) -> None:
        self.machine, self.opened, self.offload_dir, self.overlap = machine, opened, offload_dir, overlap
        self._hardware = fitted(given, machine) if given is not None else None
        self._given = given is not None

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

    def least_lossy(self, workload: Workload, prefill_tokens: int | None, among: Sequence[Lossy]) -> Lossy:
        """The switches with which a job is predicted to end first; more of them only where that saves SAVING. Raises
        OutOfMemory if it fits with none."""

        def seconds(lossy: Lossy) -> float:
            self.use(lossy)
            return self.choose(workload, prefill_tokens).total_seconds

        self.use(best := least_lossy(among, seconds))
        return best

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
        self, workload: Workload, prefill_tokens: int | None, placed: Policy | None = None, block: int | None = None
    ) -> Prediction:
        """What is best for a workload. placed: the policy under which the weights are in memory; they stay where they
        are if the job fits beside them, unless it is long and loading them anew pays. block: most sequences alive."""
        anew = Options(prefill_tokens, block=block)
        if placed is None:
            return self.search(workload, anew).best
        try:
            kept = self.search(workload, replace(anew, placed=placed), measure=False).best
        except OutOfMemory:
            return self.search(workload, anew, measure=False).best
        if kept.seconds < WORTH:
            return kept
        other = self.search(workload, anew, measure=False).best
        return other if other.total_seconds < kept.seconds else kept

    def smaller(self, workload: Workload, layout: Layout, tier: str, missing: int, placed: Policy | None) -> Layout:
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
        return self.choose(workload, policy.prefill_tokens, placed, half).layout

    def cost(self, workload: Workload) -> Cost:
        """Prices of a workload's policies, with the best rates known; nothing is measured for it."""
        return Cost(self.opened.facts, self.known(), workload, self.overlap)

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


@dataclass(frozen=True)
class Place:
    """Where a job is to run; fields as the options of the command line."""

    device: str = "auto"
    device_mem: str | int | None = None
    host_mem: str | int | None = None
    offload_dir: str | Path | None = None

    @property
    def directory(self) -> Path:
        """Return the offload directory. If the home directory is unknown, return a path that cannot be created; only
        plans that spill then fail."""
        if self.offload_dir:
            return Path(self.offload_dir)
        try:
            return cache_root() / "offload"
        except InvalidInput:
            return Path(os.devnull) / "offload"

    def machine(self, links: Links | None = None) -> Machine:
        """The machine. Raises InvalidInput for what it does not have."""
        device = parse_size(self.device_mem, "--device-mem") if self.device_mem is not None else None
        host = parse_size(self.host_mem, "--host-mem") if self.host_mem is not None else None
        return make_machine(self.device, device, host, self.directory, links)


def this_machine(
    place: Place, opened: Opened | None, again: bool = False, say: Say | None = None, dtype: str | None = None
) -> Hardware:
    """This machine's rates and, with a model, the model's own on it, measured unless they have been (or `again`).
    dtype: of activations, where there is no model; None: this kind of machine's own."""
    computing = named_dtype(dtype)
    machine = place.machine()
    if machine.no_offload and say:
        say(f"nothing is offloaded to disk: {machine.no_offload}")
    try:
        found = store.obtain(machine, place.directory, opened, True, say, again, computing)
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
