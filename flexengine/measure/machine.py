"""Measurement of the rates that `store.obtain` lacks: of a machine, of the engine's own overhead, and of a model."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from scipy.optimize import nnls

from flexengine import kernels as available
from flexengine.config import SamplingParams
from flexengine.measure import store
from flexengine.measure.attention import measure_attention
from flexengine.measure.fused import measure_fused
from flexengine.measure.kernels import QUICK_SECONDS, measure_crosstalk, measure_forms, measure_kernels, quick_products
from flexengine.measure.links import WHAT, copies, measure_links, quick_reads, quick_spills
from flexengine.measure.model import measure_model, random_weights, time_layers
from flexengine.measure.store import knows_attention, knows_blocks, knows_products, machine_name
from flexengine.measure.streaming import measure_delegation, measure_streaming
from flexengine.measure.timing import (
    MAX_CALLS,
    Borrowed,
    fill,
    measuring,
    noticing,
    room,
    seconds_per_call,
    undisturbed,
    unnoticed,
)
from flexengine.model.build import build
from flexengine.model.tokenizer import Stops
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.rates import assumed, knows_fused
from flexengine.plan.sizes import PAGE_TOKENS
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.pages import pages_for
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sequence as LiveSequence
from flexengine.schedule.sweeps import Sweeps
from flexengine.tier.base import ALIGN
from flexengine.tier.machine import Machine
from flexengine.worker.cache import Cache, packed
from flexengine.worker.open_model import OpenModel

SECONDS = 0.15  # for each figure
LAYERS, BATCHES = 16, 4  # of an empty program
SEQUENCES, PROMPT = 64, 200  # sequences of a sweep; tokens of each
TINY = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=64, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64)  # fmt: skip
PATIENCE = 30.0  # seconds for each disk; if measuring has taken longer, crosstalk is left out
COPIED = 128 << 20  # bytes of device memory that a copy within the device reads; caches hold less
ATTENDED = 0.4  # rate at which attention reads the KV cache, by that of such copies; 0.3 to 0.8 were measured
RECORDS = "flexengine.guests.flash.model:measure_blocks"  # imported for models whose neurons are read on demand


def measure_machine(machine: Machine, dtype: torch.dtype, checkpoint: Sequence[Path]) -> Hardware:
    """Return the rates that do not depend on the model, without capacities. Takes about twenty seconds, or up to twice
    that if other programs disturb it."""
    crosstalk = dict[str, dict[str, float]]()
    with measuring("the rates of disk and memory", "machine", "10 s"):
        links, first = undisturbed(lambda: _with_seconds(lambda: measure_links(machine, checkpoint)))
    with measuring("the rates of products and attention", "machine", "10 s"):
        rates, second = undisturbed(lambda: _with_seconds(lambda: _computing(machine, dtype)))
    if first + second < PATIENCE * len(machine.disks):
        with measuring("how much computing and transfers slow each other", "machine", "5 s"):
            crosstalk = undisturbed(lambda: measure_crosstalk(machine, checkpoint))
    more = (None,) * (len(machine.disks) - 1)
    return Hardware(machine_name(machine), machine.kind, None, None, None, more_disks=more, crosstalk=crosstalk,
                    measured=True, **links, **rates)  # fmt: skip


def _with_seconds(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    return measure(), time.perf_counter() - began


def _computing(machine: Machine, dtype: torch.dtype) -> dict[str, Any]:
    """Return the rates of kernels and of the engine's own overhead, by field of `Hardware`."""
    rates = measure_kernels(machine, dtype)
    with torch.no_grad(), unnoticed(machine):
        rates |= dict(cell_seconds=cell_seconds(machine, dtype), task_seconds=task_seconds(machine))
        rates["sweep_seconds"], rates["sequence_seconds"] = sweep_seconds(machine, dtype, SECONDS)
    return rates


def measure_opened(hardware: Hardware, machine: Machine, opened: OpenModel) -> dict[str, Mapping[str, Any]]:
    """Return the model's own rates that `hardware` lacks, by field of `Hardware` and name."""
    facts, name = opened.facts, opened.facts.signature(0)
    fields = ("layers", "resident", "fused", "heads", "streaming", "attention", "delegation", "blocks")
    found: dict[str, dict[str, Any]] = {field: {} for field in fields}
    if not knows_products(hardware, facts):
        with measuring("this model's layers", "model", "10 s"):
            found |= undisturbed(lambda: measure_layers(opened, machine))
    if not knows_attention(hardware, facts):
        with measuring("this model's attention", "model", "2 s for each shape"):
            found["attention"] = undisturbed(lambda: {**measure_attention(opened, machine)})
    if not found["layers"] and not knows_fused(hardware, facts):
        found["fused"] = undisturbed(lambda: measure_fused(opened, machine))
    if not knows_blocks(hardware, facts):
        with measuring("records of this model's neurons", "model", "10 s"):
            found["blocks"] = undisturbed(lambda: {**resolve_name(RECORDS)(opened, machine)})
    table = found["layers"].get(name) or hardware.layers.get(name)
    if table and name not in hardware.streaming:
        reads = hardware.checkpoint_read
        mutual = undisturbed(lambda: measure_streaming(opened, machine, table, reads))
        found["streaming"] = {name: mutual} if mutual else {}
    if name not in hardware.delegation:
        lost = undisturbed(lambda: measure_delegation(opened, machine))
        found["delegation"] = {name: lost} if lost is not None else {}
    return {**found}


def measure_layers(opened: OpenModel, machine: Machine, quick: bool = False) -> dict[str, Any]:
    """Return `Hardware.layers`, `resident`, `heads` and `fused` of the model, which share random weights."""
    fused = dict[str, Any]()
    found: dict[str, Any] = measure_model(opened.skeleton, opened.facts, opened.held, machine, quick=quick,
                                          also=lambda n: fused.update(measure_fused(opened, machine, n)))  # fmt: skip
    return found | {"fused": fused}


def measure_quickly(
    known: Hardware | None, machine: Machine, opened: OpenModel
) -> tuple[Hardware, dict[str, Any], bool]:
    """Return `known`, or if it is None, rates of the machine; the model's own rates that they lack; and whether other
    programs disturbed the measurement."""
    length, remedy = "3 to 6 s" if known is None else "2 to 5 s", "so they are measured again at the next start"
    with (
        noticing(remedy) as disturbed,
        measuring("what decides the speed of this model here", "machine and model", length),
    ):
        hardware = known or quick_rates(machine, opened)
        found = quick_model(hardware, machine, opened)
    return hardware, found, bool(disturbed)


@torch.no_grad()
def quick_rates(machine: Machine, opened: OpenModel) -> Hardware:
    """Return assumed rates, but measured ones of copies to and from the device, of device memory, of offload
    directories, of reads of the checkpoint and of the engine's own overhead, within a second or two. `quick_model` adds
    the model's.

    These differ by more than ten times between machines, and decide which policy is best. Not measured is delegation. A
    sim machine has the memory and overhead of its CPU, if all of that was measured. The ledgers are unchanged
    afterwards. Raise OutOfMemory if a tier has no free memory.
    """
    known, cpu = store.unmeasured(machine, opened.dtype), store.computing_rates(machine, opened.dtype)
    own = dict[str, Any]()
    with unnoticed(machine):
        links = copies(machine, QUICK_SECONDS) | quick_spills(machine)
        if cpu is None or not cpu.measured:
            copied = _copied(machine)
            sweep, each = sweep_seconds(machine, opened.dtype, QUICK_SECONDS)
            own = dict(elementwise=copied, decode_attention=((1.0, ATTENDED * copied),))
            own |= dict(sweep_seconds=sweep or known.sweep_seconds, sequence_seconds=each or known.sequence_seconds)
        reads = quick_reads(machine, opened.files) or known.checkpoint_read
        found = measure_crosstalk(machine, opened.files, quick=True)
        if "disk_read" in found:  # reads of the checkpoint; offload directories are assumed to be alike
            for lane in known.crosstalk.get("device", {}):
                found["device"].setdefault(lane, found["device"]["disk_read"])
                found.setdefault(lane, found["disk_read"])
        talk = {lane: {**known.crosstalk.get(lane, {}), **others} for lane, others in found.items()}
    return replace(
        known, name=machine_name(machine), links={**known.links, **links}, checkpoint_read=reads,
        crosstalk={**known.crosstalk, **talk}, **own,
    )  # fmt: skip


def _copied(machine: Machine) -> float:
    """Return the bytes per second that a copy within the device reads and writes; its memory is free again."""
    with Borrowed(machine) as regions:
        size = max(ALIGN, min(COPIED, room(machine, "device") // 2) // ALIGN * ALIGN)
        source, target = (fill(machine.device.view(regions.take("device", size, WHAT))) for _ in range(2))
        return 2 * size / seconds_per_call(lambda _: target.copy_(source), QUICK_SECONDS, machine)


def quick_model(hardware: Hardware, machine: Machine, opened: OpenModel) -> dict[str, Any]:
    """Return the rates of the model's layers, head, attention and records that `hardware` lacks, within a few seconds;
    for layers that do not fit in memory those of products in their formats, instead of assumed ones."""
    found: dict[str, Any] = {}
    hardware = replace(hardware, quick=())  # what was measured briefly is not measured so again
    if not knows_products(hardware, opened.facts):
        found = measure_layers(opened, machine, quick=True)
        if not found["layers"]:
            found["products"] = measure_forms(machine, opened, hardware.products)
            name, guess = str(opened.dtype).removeprefix("torch."), assumed(machine.kind, machine.capacity).products
            if hardware.products.get(name) == guess.get(name):
                found["products"][name] = quick_products(machine, opened.dtype, opened.dtype)
    if not knows_attention(hardware, opened.facts):
        found["attention"] = {**measure_attention(opened, machine, quick=True)}
    if not found.get("layers") and not knows_fused(hardware, opened.facts):
        found["fused"] = measure_fused(opened, machine)
    if not knows_blocks(hardware, opened.facts):
        found["blocks"] = {**resolve_name(RECORDS)(opened, machine, quick=True)}
    return found


def cell_seconds(machine: Machine, dtype: torch.dtype) -> float:
    """Return the overhead of one layer, in seconds: calling modules, pausing and resuming.

    It is measured on a model so small that its computation takes almost no time. 0 means that even this model did not
    fit in memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        skeleton = build(Path(folder), dtype)
    names = ["layer"] * len(skeleton.layers)
    held = {name: dtype for group in (*skeleton.layers, skeleton.others) for name in group}
    with random_weights(skeleton, names, held, machine) as bound:
        return time_layers(skeleton, names, machine, (1,), SECONDS)[1]["layer"] if bound else 0.0


def task_seconds(machine: Machine) -> float:
    """Return the seconds of an empty task in a program that streams weights, where each cell waits for another lane."""
    program = Program([("host",)] * LAYERS, LAYERS, 2, machine.routes)
    batches = [Batch((Piece(k, 0, 1, True),), "device", "device") for k in range(BATCHES)]
    counts: list[int] = []

    def sweep(number: int) -> None:
        tasks = list(program.sweep(number, batches, True))
        counts.append(len(tasks))
        executor.run(tasks)

    with Executor(lambda _: None, machine.lanes) as executor:
        seconds = seconds_per_call(sweep, SECONDS)
    return seconds / counts[-1]


def sweep_seconds(machine: Machine, dtype: torch.dtype, budget: float) -> tuple[float, float]:
    """Return the overhead in seconds of a sweep, and of each sequence in it.

    It includes forming batches, page tables, inputs and recording sampled tokens. Both are fitted by least squares of
    relative errors over several numbers of sequences, each timed for `budget` seconds. 0 means that two sequences did
    not fit in memory.
    """
    pages = pages_for(PROMPT + MAX_CALLS + 1, PAGE_TOKENS)
    count = min(SEQUENCES, room(machine, "device") // (pages * PAGE_TOKENS * 2 * dtype.itemsize))
    if count < 2:
        return 0.0, 0.0
    counts = sorted({1, count // 2, count})
    seconds = [_sweep(machine, dtype, n, budget) for n in counts]
    (fixed, each), _ = nnls([[1.0 / s, n / s] for n, s in zip(counts, seconds, strict=True)], [1.0] * len(counts))
    return max(1e-9, float(fixed)), max(1e-9, float(each))


def _sweep(machine: Machine, dtype: torch.dtype, count: int, budget: float) -> float:
    tensor = TensorFact("w", 1, 1, 1)
    facts = ModelFacts(((tensor,),), (), tensor, None, 1, 1, 1, 1, 1, 1, dtype.itemsize)
    policy, workload = Policy(count, 1), Workload({(PROMPT, MAX_CALLS + 2): count})
    endless = Capacity(None, None, None, machine.capacity.shared, machine.capacity.staged)
    layout = lay_out(facts, policy, workload, endless)
    cache = Cache(facts, layout, machine, available.load(), dtype)
    try:
        sweeps = Sweeps(policy, layout.pools)
        for i in range(count):
            sweeps.add(LiveSequence(i, PROMPT, MAX_CALLS + 2))
        stops, generated = Stops(None, SamplingParams(), {-1}), list(range(PROMPT))

        def sweep(_: int) -> None:
            batches = sweeps.begin(cache.claim)
            for batch in batches:
                cache.view(batch)
                pieces = packed(batch)
                for numbers in ([p.start for p in pieces], [p.count for p in pieces], [p.sequence for p in pieces]):
                    torch.tensor([numbers]).to(machine.compute)
            for _ in sweeps.live:
                stops.reason(generated)
            sweeps.advance(batches, set())

        return seconds_per_call(sweep, budget, machine)
    finally:
        cache.close()
