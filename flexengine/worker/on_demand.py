"""Neurons and experts of a job that its computing tasks read when tokens use them."""

from collections.abc import Sequence
from contextlib import ExitStack

from flexengine.plan.layout import Layout
from flexengine.tier.machine import Machine
from flexengine.worker.demand_reads import DemandReads, Note
from flexengine.worker.expert_blocks import ExpertBlocks
from flexengine.worker.neurons import Neurons
from flexengine.worker.opened import Opened


class OnDemand:
    """What a job reads on demand, with its memory.

    Attributes:
        reads: the reads.
        neurons: blocks whose neurons are read when they become active, if any.
        experts: mixtures whose experts are read when they are chosen, if any.

    Raises:
        OutOfMemory: a tier has less memory than the layout books.
    """

    def __init__(self, opened: Opened, layout: Layout, machine: Machine, notes: Sequence[Note] = ()) -> None:
        """Allocate the memory. notes: see `DemandReads`."""
        self.reads = DemandReads(machine.disk, notes)
        self.neurons: Neurons | None = None
        self.experts: ExpertBlocks | None = None
        with ExitStack() as undo:
            if opened.blocks:
                self.neurons = Neurons(opened, layout, machine, self.reads)
                undo.callback(self.neurons.close)
            if opened.experts:
                self.experts = ExpertBlocks(opened, layout, machine, self.reads)
                undo.callback(self.experts.close)
            self._ended = undo.pop_all()

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()
