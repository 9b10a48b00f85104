"""Experts on demand with counts: what the blocks of a job read, and what the guesses of the layer before were worth."""

from dataclasses import dataclass
from typing import Any

import greenlet
import numpy as np
from torch import Tensor

from flexengine.guests.flash.expert_blocks import ExpertBlock


@dataclass
class Counts:
    """What a block did."""

    used: int = 0  # experts that tokens used, summed over calls; unions over the tokens of a call
    read: int = 0  # those that had to be read


@dataclass
class Guesses:
    """What the guesses of the layer before were worth, summed over the calls with a guess."""

    chosen: int = 0  # experts that the tokens of a call chose together
    right: int = 0  # those that the guess named
    missing: int = 0  # chosen experts that were not in memory
    found: int = 0  # those of `missing` that the guess named
    early: int = 0  # experts whose read began early
    wasted: int = 0  # those of them that were not chosen; the others were
    ahead_bytes: int = 0  # bytes of chosen experts that were read before the layer needed them
    wasted_bytes: int = 0  # bytes read of experts that were not chosen


class CountedBlock(ExpertBlock):
    """The experts of one layer, with counts. It takes the place of ExpertBlock in its module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts, self.guesses = Counts(), Guesses()

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        named, used = self._named.get(greenlet.getcurrent()), set(chosen.flatten().tolist())
        if named is not None:
            missing = {expert for expert in used if self.arena.rows(np.array([expert]))[0] < 0}
            self.guesses.chosen += len(used)
            self.guesses.right += len(named & used)
            self.guesses.missing += len(missing)
            self.guesses.found += len(named & missing)
        self.guesses.ahead_bytes += sum(read.nbytes for expert, read in self._coming.items() if expert in used)
        self.counts.used += len(used)
        return super().__call__(hidden, chosen, weights)

    def guess(self, hidden: Tensor) -> None:
        before = set(self._coming)
        super().guess(hidden)
        self.guesses.early += len(self._coming.keys() - before)

    def _arrive(self, expert: int, row: int) -> None:
        super()._arrive(expert, row)
        self.counts.read += 1

    def _stop_wrong(self, chosen: Any) -> None:
        before = dict(self._coming)
        super()._stop_wrong(chosen)
        stopped = [read for expert, read in before.items() if expert not in self._coming]
        self.guesses.wasted += len(stopped)
        self.guesses.wasted_bytes += sum(read.nbytes for read in stopped)
