"""Measurement of the rates that `store.obtain` lacks: of a machine, and of a model on it."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from flexengine.measure.attention import measure_attention
from flexengine.measure.kernels import measure_crosstalk, measure_kernels
from flexengine.measure.links import measure_links
from flexengine.measure.model import measure_model
from flexengine.measure.store import knows_attention, knows_blocks, knows_products, machine_name
from flexengine.measure.streaming import measure_delegation, measure_streaming
from flexengine.measure.timing import measuring, noticing
from flexengine.plan.hardware import Hardware
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

PATIENCE = 30.0  # seconds for each disk; if measuring has taken longer, crosstalk is left out
RECORDS = "flexengine.guests.flash.model:measure_blocks"  # imported for models whose neurons are read on demand


def measure_machine(machine: Machine, dtype: torch.dtype, checkpoint: Sequence[Path]) -> Hardware:
    """Return the rates that do not depend on the model, without capacities. Takes about twenty seconds."""
    began, crosstalk = time.perf_counter(), dict[str, dict[str, float]]()
    with noticing():
        with measuring("the rates of disk and memory", "machine", "10 s"):
            links = measure_links(machine, checkpoint)
        with measuring("the rates of products and attention", "machine", "10 s"):
            rates = measure_kernels(machine, dtype)
        if time.perf_counter() - began < PATIENCE * len(machine.disks):
            with measuring("how much computing and transfers slow each other", "machine", "5 s"):
                crosstalk = measure_crosstalk(machine, checkpoint)
    more = (None,) * (len(machine.disks) - 1)
    return Hardware(machine_name(machine), machine.kind, None, None, None, more_disks=more, crosstalk=crosstalk,
                    measured=True, **links, **rates)  # fmt: skip


def measure_opened(hardware: Hardware, machine: Machine, opened: OpenModel) -> dict[str, Mapping[str, Any]]:
    """Return the model's own rates that `hardware` lacks, by field of `Hardware` and name."""
    facts, name = opened.facts, opened.facts.signature(0)
    fields = ("layers", "heads", "streaming", "attention", "delegation", "blocks")
    found: dict[str, dict[str, Any]] = {field: {} for field in fields}
    with noticing():
        if not knows_products(hardware, facts):
            with measuring("this model's layers", "model", "10 s"):
                found["layers"], found["heads"] = measure_model(opened.skeleton, facts, opened.held, machine)
        if not knows_attention(hardware, facts):
            with measuring("this model's attention", "model", "2 s for each shape"):
                found["attention"] = {**measure_attention(opened, machine)}
        if not knows_blocks(hardware, facts):
            with measuring("records of this model's neurons", "model", "10 s"):
                found["blocks"] = {**resolve_name(RECORDS)(opened, machine)}
        table = found["layers"].get(name) or hardware.layers.get(name)
        if table and name not in hardware.streaming and (mutual := measure_streaming(opened, machine, table)):
            found["streaming"] = {name: mutual}
        if name not in hardware.delegation and (lost := measure_delegation(opened, machine)) is not None:
            found["delegation"] = {name: lost}
    return {**found}
