"""Cache of measured rates per machine. The engine calls `obtain`, which adds the free memory of the moment."""

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import torch

from flexengine import __version__
from flexengine import kernels as available
from flexengine.activity import message
from flexengine.config import cache_root, mark_used
from flexengine.errors import InvalidInput
from flexengine.kernels.build import cpu_type
from flexengine.model.linear import numerics
from flexengine.places import COPIES, DISK, HOST, disks_of, lane_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, Table
from flexengine.plan.rates import assumed, timed
from flexengine.system.limits import device_of
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

# fields of `Hardware` that hold for all machines that compute with one CPU
COMPUTING = (
    *("products", "prompt_attention", "decode_attention", "elementwise", "vector_flops", "cell_seconds"),
    *("task_seconds", "sweep_seconds", "sequence_seconds", "layers", "resident", "fused", "heads", "attention"),
    "quick",
)
# fields of `Hardware` with tables of models, by signature
OWN = ("layers", "resident", "fused", "heads", "attention", "blocks")
RATES = 2  # changes when stored rates mean something else
MIN_CORRECTION, MAX_CORRECTION = 0.2, 5.0  # limits of the product of all corrections of a figure


def obtain(
    machine: Machine, opened: OpenModel | None, measure: bool = False, again: bool = False,
    dtype: torch.dtype | None = None,
) -> Hardware | None:  # fmt: skip
    """Return this machine's Hardware with the model's own rates and the memory that is free now.

    Weights must not be loaded yet: measuring needs the memory, and leaves the modules without weights.

    Args:
        machine: the machine to measure.
        opened: the model; None for the machine's rates only.
        measure: measure rates that the cache lacks, within a minute. Otherwise they are missing.
        again: ignore the cache.
        dtype: dtype of activations, if `opened` is None.

    Returns:
        None if the cache lacks the machine's rates and `measure` is false. Rates of `obtain_quickly` are replaced if
        `measure` is true.
    """
    held = opened.dtype if opened else dtype or (torch.float16 if machine.gpu else torch.float32)
    files = opened.files if opened else []
    hardware = None if again else cached(key_of(machine, held, files))
    if hardware is None and not measure:
        return None
    if hardware is None or (measure and hardware.assumed):
        hardware = resolve_name("flexengine.measure.machine:measure_machine")(machine, held, files)
        assert hardware is not None
        keep(machine, held, files, hardware)
    measured: dict[str, Any] = {}  # missing rates of the model
    if measure and opened is not None:
        measured = resolve_name("flexengine.measure.machine:measure_opened")(hardware, machine, opened)
    if opened is not None and any(measured.values()):
        hardware, _ = _kept_with(hardware, measured, machine, opened)
    return hardware.with_capacity(machine.capacity)


def obtain_quickly(machine: Machine, opened: OpenModel, unstored: Hardware | None = None) -> tuple[Hardware, bool]:
    """Measure for 2 to 6 seconds what decides the device's seconds of this model: its own layers, head and
    attention, and of a machine without stored rates also memory, copies, reads of the checkpoint and overhead. Return
    all rates, and whether they are stored, for later jobs. They are not if other programs disturbed the measurement.
    Arguments and errors as of `obtain`. unstored: rates that an earlier call has returned without storing them."""
    known = unstored or cached(key_of(machine, opened.dtype, opened.files))
    measure = resolve_name("flexengine.measure.machine:measure_quickly")
    hardware, measured, disturbed = measure(known, machine, opened)
    if unstored is not None or disturbed:
        return joined(hardware, measured, opened.facts, quick=True), False
    return _kept_with(hardware, measured, machine, opened, quick=True)


def _kept_with(
    hardware: Hardware, measured: Mapping[str, Any], machine: Machine, opened: OpenModel, quick: bool = False
) -> tuple[Hardware, bool]:
    """Store and return the machine's rates with those of a model, and whether they are stored."""
    latest = cached(key_of(machine, opened.dtype, opened.files)) or hardware  # others may have stored other models'
    stored = keep(machine, opened.dtype, opened.files, joined(latest, measured, opened.facts, quick))
    return joined(hardware, measured, opened.facts, quick), stored


def unmeasured(machine: Machine, dtype: torch.dtype) -> Hardware:
    """Return assumed rates. Those of a sim machine's links are at most their limits, and its rates of computing are
    this CPU's, if a job on `--device cpu` has stored them."""
    hardware = assumed(machine.kind, machine.capacity, machine.same_device)
    limits: dict[str, float | None] = {}
    for place, lanes in {HOST: COPIES, **{disk: disk.lanes for disk in disks_of(machine.tiers)}}.items():
        if (slowed := machine.tier(place).slowed) is not None:
            limits |= zip(lanes, slowed[0].values(), strict=True)
    links = {lane: ((1.0, min(table[0][1], limits.get(lane) or math.inf)),) for lane, table in hardware.links.items()}
    hardware = replace(hardware, links=links, checkpoint_read=links[DISK.lanes[0]])
    if (own := computing_rates(machine, dtype)) is None:
        return hardware
    computing: dict[str, Any] = {name: getattr(own, name) for name in COMPUTING}
    computing |= {"host_attention": own.decode_attention[0][1], "host_flops": own.vector_flops}
    lengthened = {name: by for name, by in own.corrected.items() if name not in own.links}
    return replace(hardware, name=f"{own.name}, links assumed", corrected=lengthened, **computing)


def computing_rates(machine: Machine, dtype: torch.dtype) -> Hardware | None:
    """Return the rates that jobs on `--device cpu` have stored, of which a sim machine has those of computing; None if
    there are none, or for other machines."""
    return cached(_computing_key(machine, dtype)) if machine.kind == "sim" else None


def joined(known: Hardware, measured: Mapping[str, Any], facts: ModelFacts, quick: bool = False) -> Hardware:
    """Return rates with further ones. Corrections of earlier ones end, also if this model's are computed from them.
    quick: whether the further ones were measured briefly; they replace no others. See `Hardware.quick`."""
    whole = _whole(known) if quick else set()
    measured = {
        field: {name: table for name, table in new.items() if field not in OWN or name not in whole}
        for field, new in measured.items()
    }
    again = {name for field in ("layers", "heads", "blocks") for name in measured.get(field, ())}
    if measured.get("products"):
        own = {facts.signature(j) for j in range(len(facts.layers))} | {facts.head_signature}
        again |= own - {*known.layers, *known.heads}
    before = {name: by for name, by in known.corrected.items() if name not in again}
    tables: dict[str, Any] = {field: {**getattr(known, field), **new} for field, new in measured.items()}
    names = {name for field in OWN for name in measured.get(field, ())}
    brief = {*known.quick} | names if quick else {*known.quick} - names
    return replace(known, corrected=before, quick=tuple(sorted(brief)), **tables)


def knows(hardware: Hardware, facts: ModelFacts) -> bool:
    """Return whether the seconds of this model's layers, head, attention and records were measured."""
    return knows_products(hardware, facts) and knows_attention(hardware, facts) and knows_blocks(hardware, facts)


def knows_quickly(machine: Machine, opened: OpenModel) -> bool:
    """Return whether this machine, and this model's layers, head, attention and records on it, were measured
    briefly at least. Rates of another machine that computes with the same CPU do not count."""
    hardware = cached(key_of(machine, opened.dtype, opened.files))
    return hardware is not None and timed(hardware, opened.facts)


def _whole(hardware: Hardware) -> set[str]:
    """Return the signatures with tables that were not only measured briefly."""
    return {name for field in OWN for name in getattr(hardware, field)} - {*hardware.quick}


def _merged(latest: Hardware, hardware: Hardware) -> Hardware:
    """Return the rates of computing of two files of one CPU, which may know other models: the newer `hardware`'s, but
    what only `latest` has measured, or only `latest` not just briefly, as that has it."""
    older = {name for field in OWN for name in getattr(latest, field)}
    newer = {name for field in OWN for name in getattr(hardware, field)}
    stay = older - newer | _whole(latest) - _whole(hardware)
    base = hardware if hardware.measured or not latest.measured else latest
    tables: dict[str, Any] = {
        field: {**getattr(hardware, field), **{n: t for n, t in getattr(latest, field).items() if n in stay}}
        for field in OWN
    }
    by = {name: by for name, by in latest.corrected.items() if name in stay or name not in newer}
    by |= {name: factor for name, factor in hardware.corrected.items() if name not in stay}
    quick = {*hardware.quick} - stay | {*latest.quick} & stay
    return replace(base, corrected=by, quick=tuple(sorted(quick)), **tables)


def knows_blocks(hardware: Hardware, facts: ModelFacts) -> bool:
    """Return whether reads and products of this model's records were measured."""
    return all(b is None or b.experts or b.signature in {*hardware.blocks} - {*hardware.quick} for b in facts.blocks)


def knows_attention(hardware: Hardware, facts: ModelFacts) -> bool:
    """Return whether attention of this model's shapes was measured."""
    shapes = {facts.attention_signature(window) for window in facts.attended}
    return {*hardware.attention} - {*hardware.quick} >= shapes


def knows_products(hardware: Hardware, facts: ModelFacts) -> bool:
    """Return whether the seconds of this model's layers and head were measured."""
    layers = {facts.signature(j) for j in range(len(facts.layers))}
    known = {*hardware.layers, *hardware.heads} - {*hardware.quick}
    return known >= layers and (facts.output is None or facts.head_signature in known)


def corrected(
    hardware: Hardware, factors: Mapping[str, float], facts: ModelFacts, planned: Hardware | None = None
) -> Hardware:
    """Return `hardware` with rates corrected by the times of a job.

    A link's factor divides its rates; that of disk_read also divides the rates of checkpoint reads. The factor of
    "device" multiplies the seconds of this model's layers and head, whether they were measured or are computed from the
    rates of products, or those of its records if it has some. Factors of unknown lanes are ignored, and so are factors
    of rates that were measured again after the job was planned. The product of all corrections of a rate is limited to
    0.2 to 5: an error with another cause, which no correction reduces, could otherwise grow from job to job.

    Args:
        hardware: the rates to correct.
        factors: by lane, actual seconds over seconds predicted with `planned`.
        facts: facts of the job's model.
        planned: rates that the job was planned with, as other jobs may have corrected `hardware` since; None for
            `hardware`.
    """
    own = {facts.signature(j) for j in range(len(facts.layers))} | {facts.head_signature}
    if any(facts.blocks):  # most of the device's seconds are those of records, which it also waits for
        own = {block.signature for block in facts.blocks if block}
    names = {lane: {lane} for lane in hardware.links}
    names["device"] = own & {*hardware.blocks} if any(facts.blocks) else own
    before, now = (planned or hardware).corrected, dict(hardware.corrected)
    for lane, factor in factors.items():
        for name in names.get(lane_of(lane).link, ()):
            if planned is not None and not _alike(_measured(planned, name), _measured(hardware, name)):
                continue
            now[name] = min(MAX_CORRECTION, max(MIN_CORRECTION, before.get(name, 1.0) * factor))
    more = {name: total / hardware.corrected.get(name, 1.0) for name, total in now.items()}

    def stretched(tables: Mapping[str, Table]) -> dict[str, Table]:
        return {name: _times(table, more.get(name, 1.0)) for name, table in tables.items()}

    return replace(
        hardware, corrected=now, layers=stretched(hardware.layers), heads=stretched(hardware.heads),
        links={lane: _times(table, 1 / more.get(lane, 1.0)) for lane, table in hardware.links.items()},
        blocks={name: {what: _times(table, 1 / more.get(name, 1.0)) for what, table in tables.items()}
                for name, tables in hardware.blocks.items()},
        checkpoint_read=_times(hardware.checkpoint_read, 1 / more.get("disk_read", 1.0)),
    )  # fmt: skip


def _times(table: Table, factor: float) -> Table:
    return tuple((x, y * factor) for x, y in table)


def key_of(machine: Machine, dtype: torch.dtype, checkpoint: Sequence[Path]) -> str:
    """Return the cache key of this machine's rates.

    They also depend on the dtype of activations and the disk of the checkpoint. Without a checkpoint, the disk of the
    offload directory is used.
    """
    disks = sorted({device_of(path) for path in checkpoint or machine.directories[:1]})
    return _digest([fingerprint(machine), str(dtype), *map(str, disks)])


def fingerprint(machine: Machine) -> str:
    """Return a hash, 32 hexadecimal digits, of all properties that a machine's rates depend on."""
    rates = [tier.slowed for tier in machine.tiers.values() if tier.slowed is not None]
    parts = [machine.kind, rates, *map(device_of, machine.directories)]
    parts += ["no offload directory"] if machine.no_offload else []
    return _digest([*_computing(machine), *map(str, parts)])


def _computing(machine: Machine) -> list[str]:
    """Return all properties that rates of computing depend on; a CPU's are equal for devices cpu and sim."""
    parts = [
        RATES, __version__, torch.__version__, version("transformers"), cpu_type(), os.cpu_count(),
        len(os.sched_getaffinity(0)), torch.get_num_threads(), psutil.virtual_memory().total, machine_name(machine),
        machine.lanes, numerics(machine.compute), available.load().name,
    ]  # fmt: skip
    return [str(part) for part in parts]


def _computing_key(machine: Machine, dtype: torch.dtype) -> str:
    return _digest([*_computing(machine), str(dtype), "computing"])


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def machine_name(machine: Machine) -> str:
    """Return the name of the GPU, or of the CPU with its number of cores."""
    if machine.gpu:
        return str(torch.get_device_module(machine.compute).get_device_name())
    lines = cpu_type().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _file(key: str) -> Path:
    return cache_root() / "hardware" / f"{key}.json"


def cached(key: str) -> Hardware | None:
    """Return the rates saved under this key; None if there are none, or the file is not valid."""
    try:
        hardware = Hardware.from_json(json.loads(_file(key).read_bytes()), "stored rates")
        mark_used(_file(key))
        return hardware
    except (OSError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError):
        return None


def keep(machine: Machine, dtype: torch.dtype, files: Sequence[Path], hardware: Hardware) -> bool:
    """Store rates of this machine. Return whether that succeeded; if not, report the reason."""
    fault = save_rates(key_of(machine, dtype, files), hardware)
    if machine.kind == "cpu" and not fault:
        latest = cached(key := _computing_key(machine, dtype))  # for `unmeasured`
        fault = save_rates(key, _merged(latest, hardware) if latest else hardware)
    if fault:
        message(f"the measured rates cannot be saved, so the next job will measure again: {fault}; set FLEXENGINE_CACHE"
                " to a directory that can be written", logging.WARNING)  # fmt: skip
    return not fault


def save_rates(key: str, hardware: Hardware) -> str:
    """Save rates under this key, readable for this user only. Return the reason of a failure, "" for success."""
    try:
        path = _file(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{key}.", dir=path.parent)
        with ExitStack() as failed:
            failed.callback(os.unlink, name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(hardware.to_json(), file)
            os.replace(name, path)
            failed.pop_all()
        return ""
    except (OSError, InvalidInput) as error:
        return str(error)


def _measured(hardware: Hardware, name: str) -> Table:
    """Return a link's bytes/s, seconds of a layer or head, or all bytes/s of a block, as measured, without corrections;
    () if missing."""
    by = hardware.corrected.get(name, 1.0)
    if name in hardware.links:
        return _times(hardware.links[name], by)
    if name in hardware.blocks:
        return tuple(point for table in hardware.blocks[name].values() for point in _times(table, by))
    return _times(hardware.layers.get(name) or hardware.heads.get(name) or (), 1 / by)


def _alike(one: Table, other: Table) -> bool:
    return len(one) == len(other) and all(
        x == a and math.isclose(y, b, rel_tol=1e-6) for (x, y), (a, b) in zip(one, other, strict=True)
    )
