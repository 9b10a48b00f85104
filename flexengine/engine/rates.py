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
from flexengine.plan.rates import assumed
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

WORKER_RATES = "flexengine.guests.attention_workers.attender:measure_workers"  # imported on first use


class RateStore:
    """Rates of a machine and of a model on it.

    Args:
        machine: its capacities replace those of all rates.
        given: rates to use instead of this machine's; None uses the stored ones.

    Raises:
        InvalidInput: the given rates are of another kind of machine.
    """

    def __init__(self, machine: Machine, opened: OpenModel, given: Hardware | None = None) -> None:
        self.machine, self.opened = machine, opened
        self._hardware = fitted(given, machine) if given is not None else None
        self._given = given is not None
        self._quick: Hardware | None = None  # from `quick_rates`
        self._tried = False  # whether `quick_rates` was called

    def forget(self) -> None:
        """Read the stored rates again when they are needed: the model's formats have changed."""
        if not self._given:
            self._hardware, self._tried = None, False

    def known(self) -> Hardware:
        """Return this machine's stored rates. If none are stored, return those of `measure_quickly`, or assumed ones.
        Measure nothing but attention workers."""
        machine = self.machine
        known = self._hardware or store.obtain(machine, self.opened) or self._quick
        known = known or assumed(machine.kind, machine.capacity, machine.same_device)
        if machine.workers and not known.worker_attention:
            known = replace(known, **self._workers)
        return known.with_capacity(machine.capacity)  # it may have changed since

    def complete(self, known: Hardware) -> bool:
        """Return whether no rate in `known()` is assumed that could be measured."""
        return self._hardware is not None or store.knows(known, self.opened.facts)

    def measure_quickly(self, known: Hardware) -> bool:
        """Measure a few rates once: of a machine without stored rates, or products in formats of this model that the
        stored rates lack, which are stored. Return whether `known()` has changed. A CPU without stored rates is not
        measured: what is assumed of it is less often wrong. known: the rates that `known` returned."""
        unknown = self.machine.capacity.shared and not known.measured
        if self._tried or unknown or self._hardware is not None or store.knows_products(known, self.opened.facts):
            return False
        self._tried = True
        from flexengine.measure.kernels import measure_forms
        from flexengine.measure.machine import quick_rates

        try:
            if not known.measured and self._quick is None:
                self._quick = quick_rates(self.machine, self.opened)
                return True
            if not (tables := measure_forms(self.machine, self.opened, known.products)):
                return False
        except (FlexError, torch.OutOfMemoryError) as error:
            message(f"not measured: {error}", logging.WARNING)
            return False
        facts, key = self.opened.facts, store.key_of(self.machine, self.opened.dtype, self.opened.files)
        if self._quick is not None:
            self._quick = store.joined(self._quick, {"products": tables}, facts)
        if latest := store.cached(key):
            store.save_rates(key, store.joined(latest, {"products": tables}, facts))
        return True

    def measured(self) -> Hardware:
        """Return the rates of this machine and of this model on it. Measure rates that are not stored. If measuring
        fails, report the reason and return `known()`."""
        if self._hardware is None:
            try:
                self._hardware = store.obtain(self.machine, self.opened, measure=True)
            except (FlexError, OSError) as error:
                message(f"not measured: {error}", logging.WARNING)
        self._hardware = self.known()
        return self._hardware

    def learn(self, watch: SweepMonitor) -> None:
        """Correct this machine's stored rates if they were persistently wrong in a job. Given rates are not changed.
        watch: the finished job's predicted and measured seconds."""
        if not self._given and watch.cost.hardware.measured and (factors := watch.factors()):
            opened = self.opened
            key = store.key_of(self.machine, opened.dtype, opened.files)
            planned = replace(watch.cost.hardware, workers=(), filed=0, worker_attention={}, worker_links={},
                              worker_seconds=0.0, worker_cores={})  # fmt: skip
            latest = store.cached(key) or planned  # other jobs may have stored their corrections meanwhile
            corrected = store.corrected(latest, factors, opened.facts, watch.cost.hardware)
            store.save_rates(key, corrected)
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


def fitted(hardware: Hardware, machine: Machine) -> Hardware:
    """Return these rates with a machine's capacities. Raise InvalidInput if the machine is of another kind or has
    another number of disks."""
    if hardware.kind != machine.kind:
        raise InvalidInput(
            f"hardware {hardware.name} is of kind {hardware.kind}, but this job runs on {machine.kind};"
            " give hardware of that kind, or another device"
        )
    disks = len(hardware.more_disks) + 1
    if disks != len(machine.disks):
        raise InvalidInput(
            f"hardware {hardware.name} has {disks} disks, but this job has {len(machine.disks)} offload"
            " directories; give --offload-dir as often as the hardware has disks"
        )
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
        if not again and store.obtain(machine, opened, dtype=computing) is not None:
            message("rates of the machine itself were measured before; --again measures them again")
        hardware = store.obtain(machine, opened, True, again, computing)
        assert hardware is not None
        return hardware
    finally:
        machine.close()
