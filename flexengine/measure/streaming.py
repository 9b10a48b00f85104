"""What streaming weights and computing do to each other: some layers of the model, read and computed in lanes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from flexengine.errors import OutOfMemory
from flexengine.measure.links import disk_of
from flexengine.measure.model import Trial
from flexengine.measure.timing import unnoticed
from flexengine.plan.hardware import MOST_SLOWED, Table, at
from flexengine.plan.layout import lay_out_weights
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor
from flexengine.schedule.order import Batch, Piece
from flexengine.schedule.program import Op, Program, Task
from flexengine.tier.machine import Machine
from flexengine.worker.opened import Opened
from flexengine.worker.weights import Weights

PASS_BYTES = 256 << 20  # of the checkpoint, that a pass streams at most
TURNS, PASSES_SECONDS = 3, 0.8  # alone and together, each after a pass that does not count
WAITING = 16  # tokens of a pass whose device waits for every layer: few, so that waiting is much of its time
TOKENS = 64  # of a gpu_batch, as many as one that decodes has
LESS, MORE = 0.6, 1.4  # seconds of computing a layer, for all gpu_batches of a pass, over those of reading it
MOST_BATCHES = 32
TELLING = 0.1  # least share of the longest lane's time that the others' work takes; less says nothing


@dataclass(frozen=True)
class Streamed:
    """Seconds of one layer: from one to the next, and the work of the device's lane, the disk's and, where there is
    one, the link's between host and device."""

    seconds: float
    device: float
    read: float
    link: float = 0.0

    @property
    def added(self) -> float | None:
        """Seconds that each second of the shorter lanes adds to the longest, if `seconds` are those of an overlapped
        pass and the lanes' those of a pass where nothing overlaps. None where the shorter ones do almost nothing."""
        alone = (self.device, self.read, self.link)
        rest = sum(alone) - max(alone)
        return (self.seconds - max(alone)) / rest if rest >= TELLING * max(alone) else None


@torch.no_grad()
def measure_streaming(opened: Opened, machine: Machine, layer: Table) -> dict[str, float]:
    """`Hardware.streaming` of this model: from passes over its first layers, all of them read from the checkpoint, some
    where reading takes longer than computing and some where it does not (as far as MOST_BATCHES gpu_batches allow),
    next to passes where nothing overlaps. All reads are direct.

    layer: (tokens, seconds) of such a layer computed alone. {} where there is no room for two layers, the first two
    differ, or there is nothing to read. Raises BadCheckpoint.
    """
    if not opened.files or _depth(opened) < 2:
        return {}
    policy = Policy(1, 1, weights=(0.0, 0.0, 1.0), slots=2)
    layout = lay_out_weights(opened.facts, policy, machine.capacity.staged)
    with unnoticed(machine):
        try:
            weights = Weights(opened, layout, machine)
        except OutOfMemory:
            return {}
        way = disk_of(machine).way
        way.direct = way.held = True
        try:
            weights.settle_all()
            return _compared(weights, layer, _depth(opened))
        finally:
            way.held = False
            weights.close()


def _compared(weights: Weights, layer: Table, depth: int) -> dict[str, float]:
    machine, added = weights.machine, list[float]()
    few = Trial(weights.skeleton, machine, WAITING)
    waited = [_passes(weights, [few], depth, slots=1) for _ in range(TURNS)]
    read, wake = (median(x) for x in ([x.read for x in waited], [x.device - at(layer, WAITING) for x in waited]))
    batches = (round(ratio * read / at(layer, TOKENS)) for ratio in (LESS, MORE))
    for count in sorted({min(MOST_BATCHES, max(1, number)) for number in batches}):
        trials = [Trial(weights.skeleton, machine, TOKENS) for _ in range(count)]
        for _ in range(TURNS):
            alone, both = (_passes(weights, trials, depth, slots) for slots in (1, 2))
            device = min(alone.device, count * at(layer, TOKENS))
            if (share := Streamed(both.seconds, device, alone.read, alone.link).added) is not None:
                added.append(share)
    lost, wake = (min(MOST_SLOWED, max(0.0, x)) for x in (median(added or [0.0]), wake))
    # At most 1: all seconds of the device are added to the disk's; with more, a disk that reads little would be
    # predicted to end last.
    return {"device": lost, "disk_read": min(1.0, lost), "wake": wake}


def _depth(opened: Opened) -> int:
    """Layers of a pass: the first ones that are alike."""
    facts = opened.facts
    alike = next((j for j in range(len(facts.layers)) if facts.signature(j) != facts.signature(0)), len(facts.layers))
    nbytes = sum(t.stored_bytes for t in facts.layers[0])
    return min(alike, max(2, PASS_BYTES // max(1, nbytes)))


def _passes(weights: Weights, trials: Sequence[Trial], depth: int, slots: int) -> Streamed:
    """Passes over the first `depth` layers, each of them computed once for every trial."""
    batches = [Batch((Piece(k, 0, trial.tokens, True),), "device", "device") for k, trial in enumerate(trials)]

    def perform(task: Task) -> None:
        if task.op is Op.LOAD_WEIGHT:
            weights.load(task.cell.layer, task.slot, task.home, task.hop)
            return
        trial = trials[task.cell.batch]
        if task.cell.layer == 0:
            trial.begin()
        weights.bind(task.cell.layer, task.slot)
        trial.layer()

    program = Program(weights.streamed[:depth], depth, slots, weights.machine.routes)
    with Executor(perform, weights.machine.lanes) as executor:
        executor.run(program.sweep(0, batches, True))
        before, began, number, more = dict(executor.busy), time.perf_counter(), 0, True
        while more:
            number, more = number + 1, time.perf_counter() - began < PASSES_SECONDS
            executor.run(program.sweep(number, batches, more))
        executor.abandon("device", lambda: Trial.end_all(trials))
        layers = number * depth
        lanes = {lane: (x - before.get(lane, 0.0)) / layers for lane, x in executor.busy.items()}
        seconds = (time.perf_counter() - began) / layers
        return Streamed(seconds, lanes["device"], lanes["disk_read"], lanes.get("h2d", 0.0))
