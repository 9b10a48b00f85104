"""Measurement of the device time that delegated attention costs, with layers of the model.

On a GPU these costs are short gaps between its tasks. If the device is the CPU, the lanes that send, attend and fetch
take cores from it, and all threads of a product wait for the thread that lost its core.
"""

from statistics import median

import torch

from flexengine import kernels
from flexengine.errors import OutOfMemory
from flexengine.kernels.base import AttentionOptions
from flexengine.measure.links import WHAT
from flexengine.measure.model import PassTrial, random_weights
from flexengine.measure.timing import fill, measuring, seconds_per_call, unnoticed
from flexengine.plan.pages import PAGE_TOKENS
from flexengine.runtime.execute import Executor, causes_raised
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions

DEPTH = 8  # maximum layers of a pass
TOKENS, PAGES = 8, 4  # sequences, each with one token to compute; cached pages of each sequence
BATCHES = 2  # the device computes one gpu_batch while the host computes attention of the other
TURNS, SECONDS = 4, 0.15  # turns with and without delegation; seconds of each


@torch.no_grad()
def measure_delegation(opened: OpenModel, machine: Machine) -> float | None:
    """Return the extra seconds of a layer of a gpu_batch with delegated attention, without the attention itself.

    None if host and device are one memory, or no layer fits in memory. Takes about two seconds. Afterwards the modules
    have their previous parameters.
    """
    if machine.capacity.shared:
        return None
    names = [opened.facts.signature(j) for j in range(len(opened.facts.layers))]
    with (
        unnoticed(machine),
        measuring("attention of the CPU beside the device", "model", "2 s"),
        random_weights(opened.skeleton, names, opened.held, machine) as bound,
    ):
        if not bound:
            return None
        depth = min(bound, DEPTH)
        try:
            with Regions(machine) as regions:
                cells = [_Cell(opened, machine, regions, depth) for _ in range(BATCHES)]
                run = Executor(lambda task: cells[task.cell.batch].perform(task), machine.lanes)
                with causes_raised(), run as executor:
                    turns = [[_seconds(executor, machine, depth, delegated) for delegated in (True, False)]
                             for _ in range(TURNS)]  # fmt: skip
                    executor.abandon("device", lambda: PassTrial.end_all(cell.trial for cell in cells))
        except OutOfMemory:
            return None
    return max(0.0, median(delegated - whole for delegated, whole in turns))


def _seconds(executor: Executor, machine: Machine, depth: int, delegated: bool) -> float:
    program = Program([()] * (depth + 1), depth, 2, machine.routes)  # the last unit, a head, ends the last layer
    home = "host" if delegated else "device"
    batches = [Batch((Piece(k, 1, 1, True),), home, "device", home) for k in range(BATCHES)]
    seconds = seconds_per_call(lambda number: executor.run(program.sweep(number, batches, True)), SECONDS)
    return seconds / (depth * BATCHES)


class _Cell:
    """A gpu_batch of single tokens: its forward passes, its buffers on device and host, and its KV cache."""

    def __init__(self, opened: OpenModel, machine: Machine, regions: Regions, depth: int) -> None:
        self.depth, facts, dtype = depth, opened.facts, opened.dtype
        self.machine, self.kernels, self.options = machine, kernels.load(), AttentionOptions(facts.head_dim**-0.5)
        self.trial, self.answer = PassTrial(opened.skeleton, machine, TOKENS), torch.empty(0)
        shape = (TOKENS * PAGES, 2, facts.kv_heads, PAGE_TOKENS, facts.head_dim)
        pool = machine.host.view(regions.take("host", torch.Size(shape).numel() * dtype.itemsize, WHAT, dtype))
        self.pool = fill(pool).view(shape)
        self.tables = torch.arange(TOKENS * PAGES, dtype=torch.int32).view(TOKENS, PAGES)
        self.lengths = torch.full((TOKENS,), PAGES * PAGE_TOKENS, dtype=torch.int32)
        self.heads = (TOKENS, facts.heads, facts.head_dim)
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
