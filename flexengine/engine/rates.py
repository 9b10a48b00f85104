"""The rates that plans use: given ones, measured ones that are stored, or assumed ones."""

import logging
from dataclasses import replace
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import torch

from flexengine.activity import message
from flexengine.engine.options import MachineOptions
from flexengine.errors import FlexError, InvalidInput, OutOfMemory, WorkerLost
from flexengine.measure import store
from flexengine.model.config import named_dtype
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.hardware import Hardware
from flexengine.plan.rates import timed
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

MACHINE_SECONDS, MODEL_SECONDS = 25.0, 20.0  # of measuring everything, about
WORKER_RATES = "flexengine.guests.attention_workers.attender:measure_workers"  # imported on first use


class RateStore:
    """Rates of a machine and of a model on it. Raise InvalidInput if the given rates are of another kind of machine.

    Args:
        machine: its capacities replace those of all rates.
        given: rates to use instead of this machine's; None uses the stored ones.
    """

    def __init__(self, machine: Machine, opened: OpenModel, given: Hardware | None = None) -> None:
        self.machine, self.opened = machine, opened
        self._hardware = fitted(given, machine) if given is not None else None
        self._given = given is not None
        self._quick: Hardware | None = None  # measured by `measure_quickly`, if it was not stored
        self.engines = 1  # engines that take turns on slices
        self._tried = False  # whether `measure_quickly` has measured

    def forget(self) -> None:
        """Read the stored rates again when they are needed: the model's formats have changed."""
        if not self._given:
            self._hardware, self._tried = None, False

    def known(self) -> Hardware:
        """Return this machine's stored rates; if none are stored, assumed ones. Measure nothing but attention
        workers."""
        machine = self.machine
        known = self._hardware or self._quick or store.obtain(machine, self.opened)
        known = known or store.unmeasured(machine, self.opened.dtype)
        if machine.workers and not known.worker_attention:
            known = replace(known, **self._workers)
        known = known if known.engines == self.engines else replace(known, engines=self.engines)
        return known.with_capacity(machine.capacity)  # it may have changed since

    @property
    def own(self) -> bool:
        """Whether this model was measured, or rates were given."""
        return self._given or timed(self.known(), self.opened.facts)

    def missing_seconds(self, known: Hardware) -> float:
        """Return the seconds that `measured` would take, about; 0 if no rate in `known()` is assumed that could be
        measured. known: the rates that `known` returned."""
        if self._hardware is not None or (known.measured and store.knows(known, self.opened.facts)):
            return 0.0
        return MODEL_SECONDS + (0.0 if known.measured else MACHINE_SECONDS)

    def measure_quickly(self) -> bool:
        """Measure for 2 to 6 seconds what decides the device's seconds of this model, once for a machine and model,
        unless it is known. Return whether `known()` has changed."""
        if self._quick is not None and timed(self._quick, self.opened.facts):
            return False
        if self._tried or self._hardware is not None or store.knows_quickly(self.machine, self.opened):
            return False
        self._tried = True
        try:
            hardware, stored = store.obtain_quickly(self.machine, self.opened, self._quick)
        except (FlexError, OSError, torch.OutOfMemoryError) as error:
            message(f"not measured: {error}", logging.WARNING)
            return False
        self._quick = None if stored else hardware
        return True

    def measured(self) -> Hardware:
        """Return the rates of this machine and of this model on it. Measure rates that are not stored. If measuring
        fails, report the reason and return `known()`."""
        if self._hardware is None:
            try:
                self._hardware, self._quick = store.obtain(self.machine, self.opened, measure=True), None
            except (FlexError, OSError) as error:
                message(f"not measured: {error}", logging.WARNING)
        self._hardware = self.known()
        return self._hardware

    def learn(self, watch: SweepMonitor) -> None:
        """Correct this machine's stored rates if they were persistently wrong in a job. Given rates are not changed,
        nor are those of a model whose measurement was never tried, or was not stored. watch: the finished job's
        predicted and measured seconds."""
        opened, known = self.opened, watch.cost.hardware
        learns = (
            not self._given
            and self._quick is None
            and (known.measured or self._tried or store.knows_quickly(self.machine, opened))
        )
        if learns and (factors := watch.factors()):
            key = store.key_of(self.machine, opened.dtype, opened.files)
            planned = replace(watch.cost.hardware, workers=(), filed=0, worker_attention={}, worker_links={},
                              worker_seconds=0.0, worker_cores={}, engines=1)  # fmt: skip
            latest = store.cached(key) or planned  # other jobs may have stored their corrections meanwhile
            corrected = store.corrected(latest, factors, opened.facts, watch.cost.hardware)
            store.keep(self.machine, opened.dtype, opened.files, corrected)
            if self._hardware is not None:  # else the rates are read from the store when needed
                self._hardware = corrected

    @cached_property
    def _workers(self) -> dict[str, Any]:
        """Fields of `Hardware` about attention workers, which are measured once, before the first job takes their
        memory. Empty if a worker is lost meanwhile, which the job will replace, or has no room for a page, which other
        engines may hold."""
        try:
            rates: dict[str, Any] = resolve_name(WORKER_RATES)(self.machine, self.opened.facts, self.opened.dtype)
            return rates
        except (WorkerLost, OutOfMemory) as error:
            message(f"attention workers are not measured: {error}; the plan assumes that they are as fast as copies to"
                    " the device", logging.WARNING)  # fmt: skip
            return {}


def of_kernels(hardware: Hardware) -> Hardware:
    """Return the rates without those of single models, so that all formats are predicted by the same rates."""
    none: dict[str, Any] = {key: {} for key in (*store.OWN, "corrected")}
    return replace(hardware, quick=(), **none)


def fitted(hardware: Hardware, machine: Machine) -> Hardware:
    """Return these rates with a machine's capacities. Raise InvalidInput if the machine is of another kind or has
    another number of disks."""
    if hardware.kind != machine.kind:
        fault = f"hardware {hardware.name} is of kind {hardware.kind}, but this job runs on {machine.kind}"
        raise InvalidInput(f"{fault}; give hardware of that kind, or another device")
    disks = len(hardware.more_disks) + 1
    if disks != len(machine.disks):
        fault = f"hardware {hardware.name} has {disks} disks, but this job has {len(machine.disks)} offload directories"
        raise InvalidInput(f"{fault}; give --offload-dir as often as the hardware has disks")
    return hardware.with_capacity(machine.capacity)


def this_machine(
    options: MachineOptions, opened: OpenModel | None, again: bool = False, dtype: str | None = None
) -> Hardware:
    """Return this machine's rates and, with a model, the rates of the model on it. Measure rates that are not stored.

    Args:
        opened: the model; None measures the machine alone.
        again: measure stored rates again, too.
        dtype: dtype of activations if there is no model; None takes the machine's default.
    """
    computing = named_dtype(dtype)
    machine = options.machine()
    machine.say_no_offload()
    try:
        if not again and (known := store.obtain(machine, opened, dtype=computing)) and known.measured:
            message("rates of the machine itself were measured before; --again measures them again")
        hardware = store.obtain(machine, opened, True, again, computing)
        assert hardware is not None
        return hardware
    finally:
        machine.close()
