"""Measurements of lanes that work at the same time, with layers of the model: the mutual slowdown of streamed weights
and compute, and the device time that delegated attention costs.

On a GPU these costs are short gaps between its tasks. If the device is the CPU, the lanes that send, attend and fetch
take cores from it, and all threads of a product wait for the thread that lost its core.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from flexengine import kernels
from flexengine.activity import tick
from flexengine.errors import OutOfMemory
from flexengine.kernels.base import AttentionOptions
from flexengine.measure.links import WHAT
from flexengine.measure.model import PassTrial, random_weights
from flexengine.measure.timing import Borrowed, fill, measuring, seconds_per_call, unnoticed
from flexengine.plan.hardware import MOST_SLOWED, Table, at
from flexengine.plan.layout import lay_out_weights
from flexengine.plan.sizes import PAGE_TOKENS
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor, causes_raised
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Compute, Copy, Op, Task
from flexengine.tier.disk import DiskTier
from flexengine.tier.machine import Machine
from flexengine.tier.throttled import Throttled
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights

PASS_BYTES = 256 << 20  # maximum bytes of the checkpoint that a pass streams
TURNS, PASSES_SECONDS = 3, 0.8  # turns alone and together; seconds of each, after a warm-up pass
WAITING = 16  # tokens of a pass whose device waits for every layer; with few tokens, most of its time is waiting
TOKENS = 64  # tokens of a gpu_batch, as in a decoding one
LESS, MORE = 0.6, 1.4  # ratios of compute time per layer, for all gpu_batches of a pass, to read time per layer
MAX_BATCHES = 32  # maximum gpu_batches of a pass
TELLING = 0.1  # minimum ratio of the shorter lanes' time to the longest lane's, below which a result is too inexact
MAX_LAYERS = 8  # maximum layers of a pass
SEQUENCES, PAGES = 8, 4  # sequences, each with one token to compute; cached pages of each sequence
BOTH = 2  # gpu_batches: the device computes one gpu_batch while the host computes attention of the other
DELEGATION_TURNS, DELEGATION_SECONDS = 4, 0.15  # turns with and without delegation; seconds of each


@dataclass(frozen=True)
class Streamed:
    """Mean seconds of one layer in a pass: from its start to the start of the next, and of work on the device, disk and
    h2d lanes."""

    seconds: float
    device: float
    read: float
    link: float = 0.0

    @property
    def added(self) -> float | None:
        """Seconds that each second of the shorter lanes adds to the longest lane.

        `seconds` must come from a pass with overlap, and the lanes' times from a pass without. None if the shorter
        lanes have almost no work.
        """
        alone = (self.device, self.read, self.link)
        rest = sum(alone) - max(alone)
        return (self.seconds - max(alone)) / rest if rest >= TELLING * max(alone) else None


@torch.no_grad()
def measure_streaming(opened: OpenModel, machine: Machine, layer: Table, reads: Table) -> dict[str, float]:
    """Return `Hardware.streaming` of this model.

    Passes over the model's first layers, read from the checkpoint by direct I/O, are timed with and without overlap. In
    some passes reading takes longer than compute, in others not (as far as MAX_BATCHES gpu_batches allow).

    Args:
        opened: the model.
        machine: the machine to measure.
        layer: (tokens, seconds) of such a layer computed alone.
        reads: `Hardware.checkpoint_read`.

    Returns:
        {} if two layers do not fit in memory, the first two layers differ, or there is no checkpoint.

    Raises:
        BadCheckpoint: a read failed.
    """
    if not opened.files or _depth(opened) < 2:
        return {}
    policy = Policy(1, 1, weights=(0.0, 0.0, 1.0), slots=2)
    layout = lay_out_weights(opened.facts, policy, machine.capacity)
    what = "how much computing and reading of layers slow each other"
    with unnoticed(machine), measuring(what, "model", "25 s"):
        try:
            weights = Weights(opened, layout, machine)
        except OutOfMemory:
            return {}
        disk = machine.disk.inner if isinstance(machine.disk, Throttled) else machine.disk
        assert isinstance(disk, DiskTier)
        way = disk.way
        way.direct = way.held = True
        try:
            weights.load_all_resident()
            nbytes = sum(t.stored_bytes for t in opened.facts.layers[0])
            return _compared(weights, layer, _depth(opened), nbytes / at(reads, nbytes))
        finally:
            way.held = False
            weights.close()


def _compared(weights: Weights, layer: Table, depth: int, told: float) -> dict[str, float]:
    """Return `Hardware.streaming` from passes with one weight slot (no overlap) and two (overlap). told: seconds of
    reading a layer by `Hardware.checkpoint_read`."""
    machine, added = weights.machine, list[float]()
    short = PassTrial(weights.skeleton, machine, WAITING)
    waited = [_passes(weights, [short], depth, slots=1) for _ in range(TURNS)]
    read, wake = (median(x) for x in ([x.read for x in waited], [x.device - at(layer, WAITING) for x in waited]))
    batches = (round(ratio * read / at(layer, TOKENS)) for ratio in (LESS, MORE))
    for count in sorted({min(MAX_BATCHES, max(1, number)) for number in batches}):
        trials = [PassTrial(weights.skeleton, machine, TOKENS) for _ in range(count)]
        for _ in range(TURNS):
            alone, both = (_passes(weights, trials, depth, slots) for slots in (1, 2))
            device = min(alone.device, count * at(layer, TOKENS))
            if (share := Streamed(both.seconds, device, alone.read, alone.link).added) is not None:
                added.append(share)
    lost, wake = (min(MOST_SLOWED, max(0.0, x)) for x in (median(added or [0.0]), wake))
    # At most 1, which adds all of the device's seconds to the disk's. With more, a disk lane with few reads would be
    # predicted to be the longest lane.
    return {"device": lost, "disk_read": min(1.0, lost), "wake": wake, "read": min(MOST_SLOWED, max(1.0, read / told))}


def _depth(opened: OpenModel) -> int:
    """Return the number of layers of a pass: the first ones that have the same signature, at least 2 if possible."""
    facts = opened.facts
    alike = next((j for j in range(len(facts.layers)) if facts.signature(j) != facts.signature(0)), len(facts.layers))
    nbytes = sum(t.stored_bytes for t in facts.layers[0])
    return min(alike, max(2, PASS_BYTES // max(1, nbytes)))


def _passes(weights: Weights, trials: Sequence[PassTrial], depth: int, slots: int) -> Streamed:
    batches = [Batch((Piece(k, 0, trial.tokens, True),), "device", "device") for k, trial in enumerate(trials)]

    def perform(task: Task) -> None:
        if isinstance(task, Copy):
            assert task.buffer is not None
            weights.load(task.cell.layer, task.buffer, task.home, task.hop)
            return
        trial = trials[task.cell.batch]
        if task.cell.layer == 0:
            trial.begin()
        assert isinstance(task, Compute)
        weights.bind(task.cell.layer, task.slot)
        trial.layer()

    program = Program(weights.streamed[:depth], depth, slots, weights.machine.routes)
    tick()
    with causes_raised(), Executor(perform, weights.machine.lanes) as executor:
        executor.run(program.sweep(0, batches, True))
        before, began, number, more = dict(executor.times.busy), time.perf_counter(), 0, True
        while more:
            number, more = number + 1, time.perf_counter() - began < PASSES_SECONDS
            executor.run(program.sweep(number, batches, more))
        executor.abandon("device", lambda: PassTrial.end_all(trials))
        layers = number * depth
        lanes = {lane: (x - before.get(lane, 0.0)) / layers for lane, x in executor.times.busy.items()}
        seconds = (time.perf_counter() - began) / layers
        return Streamed(seconds, lanes["device"], lanes["disk_read"], lanes.get("h2d", 0.0))


@torch.no_grad()
def measure_delegation(opened: OpenModel, machine: Machine) -> float | None:
    """Return the extra seconds of a layer of a gpu_batch with delegated attention, without the attention itself.

    None if host and device are one memory, or no layer fits in memory. Takes about two seconds. Afterwards the modules
    have their previous parameters.
    """
    if machine.capacity.shared or opened.facts.alone:  # attention is never delegated
        return None
    names = [opened.facts.signature(j) for j in range(len(opened.facts.layers))]
    with (
        unnoticed(machine),
        measuring("attention of the CPU beside the device", "model", "2 s"),
        random_weights(opened.skeleton, names, opened.held, machine) as bound,
    ):
        if not bound:
            return None
        depth = min(bound, MAX_LAYERS)
        try:
            with Borrowed(machine) as regions:
                cells = [_Cell(opened, machine, regions, depth) for _ in range(BOTH)]
                run = Executor(lambda task: cells[task.cell.batch].perform(task), machine.lanes)
                with causes_raised(), run as executor:
                    turns = [[_seconds(executor, machine, depth, delegated) for delegated in (True, False)]
                             for _ in range(DELEGATION_TURNS)]  # fmt: skip
                    executor.abandon("device", lambda: PassTrial.end_all(cell.trial for cell in cells))
        except OutOfMemory:
            return None
    return max(0.0, median(delegated - whole for delegated, whole in turns))


def _seconds(executor: Executor, machine: Machine, depth: int, delegated: bool) -> float:
    program = Program([()] * (depth + 1), depth, 2, machine.routes)  # the last unit, a head, ends the last layer
    home = "host" if delegated else "device"
    batches = [Batch((Piece(k, 1, 1, True),), home, "device", home) for k in range(BOTH)]
    seconds = seconds_per_call(lambda number: executor.run(program.sweep(number, batches, True)), DELEGATION_SECONDS)
    return seconds / (depth * BOTH)


class _Cell:
    """A gpu_batch of single tokens: its forward passes, its buffers on device and host, and its KV cache."""

    def __init__(self, opened: OpenModel, machine: Machine, regions: Regions, depth: int) -> None:
        self.depth, facts, dtype = depth, opened.facts, opened.dtype
        self.machine, self.kernels, self.options = machine, kernels.load(), AttentionOptions(facts.head_dim**-0.5)
        self.trial, self.answer = PassTrial(opened.skeleton, machine, SEQUENCES), torch.empty(0)
        shape = (SEQUENCES * PAGES, 2, facts.kv_heads, PAGE_TOKENS, facts.head_dim)
        pool = machine.host.view(regions.take("host", torch.Size(shape).numel() * dtype.itemsize, WHAT, dtype))
        self.pool = fill(pool).view(shape)
        self.tables = torch.arange(SEQUENCES * PAGES, dtype=torch.int32).view(SEQUENCES, PAGES)
        self.lengths = torch.full((SEQUENCES,), PAGES * PAGE_TOKENS, dtype=torch.int32)
        self.heads = (SEQUENCES, facts.heads, facts.head_dim)
        size = torch.Size(self.heads).numel() * dtype.itemsize
        self.device_buffer, self.host_buffer = (regions.take(tier, size, WHAT, dtype) for tier in ("device", "host"))
        fill(machine.host.view(self.host_buffer))

    def perform(self, task: Task) -> None:
        """Run a task of this gpu_batch."""
        machine, trial = self.machine, self.trial
        if task.op is Op.SEND:
            machine.host.store(machine.device.view(self.device_buffer), self.host_buffer)
        elif task.op is Op.FETCH:
            machine.host.load(self.host_buffer, machine.device.view(self.device_buffer))
        elif task.op is Op.ATTEND:
            queries = machine.host.view(self.host_buffer)
            out = self.kernels.decode_attention(
                queries.view(self.heads), self.pool, self.tables, self.lengths, self.options
            )
            queries.copy_(out.view(-1))
        elif task.op is Op.FINISH:
            trial.resume(self.answer)
        elif task.cell.layer < self.depth:
            if task.cell.layer == 0:
                trial.begin()
            if task.op is not Op.PROJECT:
                trial.layer()
                return
            attend, buffer = trial.attention(), machine.device.view(self.device_buffer)
            buffer.copy_(attend.q.reshape(-1)[: len(buffer)])
            self.answer = trial.answer(attend)
