"""Costs of one case: devices in an order, micro-batches, and choices of a layer. Arrays, for programs and searches.

A *unit* is one layer, or a group of neighbouring layers that are decided together. Units of equal size are one *class*.
A *choice* of a unit is a format and a home of its weights: the device, or the host, from where they are streamed for
every micro-batch while other layers compute.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.cluster.model import Format

Array = NDArray[np.float64]
EXACT, PAPER = "exact", "paper"  # forms of the objective
SLACK = 1e-9  # of a memory's bytes, relative: rounding errors of sums


class UnitChoice(NamedTuple):
    """Format of a unit's weights, and whether they are on the host."""

    form: Format
    host: bool


@dataclass(frozen=True)
class CaseCosts:
    """Costs of a case. N stages, K classes, C choices, U units. Seconds and bytes are of whole units.

    Attributes:
        choices: the C choices.
        classes: class of each unit.
        prefill, decode: [N, K, C] seconds of one micro-batch; infinite if the device has no kernel.
        load: [N, K, C] seconds to stream the weights of a unit on the host; 0 on the device.
        memory: [N, K, C] bytes on the device: weights and KV cache of all live sequences.
        host: [N, K, C] bytes on the host.
        slots: [N, K, C] bytes of the buffers that a stage needs to stream such a unit; the largest counts.
        fixed_prefill, fixed_decode: [N] seconds of a micro-batch besides layers.
        fixed_memory: [N] bytes besides layers; a stage without layers needs none.
        capacity, host_capacity: [N] bytes.
        hop_prefill, hop_decode: [N, N] seconds of sending a micro-batch from one stage to another.
        back: seconds of sending a micro-batch's tokens from the last stage to the first.
        harm: [U, C] harm of each choice.
        theta: seconds per unit of harm.
        prefills, cohorts: number of prefill and of decode micro-batches.
        steps: decode steps of a sequence; its first token comes from prefill.
        rounds: how often a full set of sequences passes.
        form: EXACT, or PAPER for the objective as LLM-PQ printed it.
    """

    choices: tuple[UnitChoice, ...]
    classes: tuple[int, ...]
    prefill: Array
    decode: Array
    load: Array
    memory: Array
    host: Array
    slots: Array
    fixed_prefill: Array
    fixed_decode: Array
    fixed_memory: Array
    capacity: Array
    host_capacity: Array
    hop_prefill: Array
    hop_decode: Array
    back: float
    harm: Array
    theta: float
    prefills: int
    cohorts: int
    steps: int
    rounds: int = 1
    form: str = EXACT

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.capacity)

    @property
    def units(self) -> int:
        """Return the number of units."""
        return len(self.classes)

    def round_seconds(self, slowest: tuple[float, float], through: tuple[float, float]) -> float:
        """Return the seconds of one round, by the objective.

        EXACT: a micro-batch's next token cannot start before its last token has left the last stage, so a decode step
        of all cohorts takes the longer of cohorts * slowest and the way through the pipeline. PAPER leaves this limit
        out (LLM-PQ, equation 4).

        Args:
            slowest: seconds of the slowest stage or link, in prefill and in decode.
            through: seconds of the way of a micro-batch through the pipeline, in prefill and in decode.
        """
        if self.form == PAPER:
            decoding = (self.cohorts - 1) * self.steps * slowest[1] + through[1]
        else:
            decoding = self.steps * max(self.cohorts * slowest[1], through[1])
        return (self.prefills - 1) * slowest[0] + through[0] + decoding


@dataclass(frozen=True)
class Priced:
    """Seconds and bytes of an assignment of units to stages and choices.

    Attributes:
        used: stages that have units, in order.
        prefill, decode: by used stage, seconds of one micro-batch.
        hop_prefill, hop_decode: by used stage but the last, seconds of sending a micro-batch to the next.
        back: seconds of sending tokens back to the first stage; 0 with one stage.
        memory, host: by used stage, bytes.
        fits: whether all bytes fit.
        seconds: seconds of the job.
        harm: sum over units.
        cost: seconds + theta * harm.
    """

    used: tuple[int, ...]
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    hop_prefill: tuple[float, ...]
    hop_decode: tuple[float, ...]
    back: float
    memory: tuple[float, ...]
    host: tuple[float, ...]
    fits: bool
    seconds: float
    harm: float
    cost: float


def price(numbers: CaseCosts, stage_of: Sequence[int], choice_of: Sequence[int]) -> Priced:
    """Return the costs of an assignment.

    Args:
        numbers: the case.
        stage_of: by unit, its stage; not falling.
        choice_of: by unit, its choice.
    """
    count = np.zeros(numbers.prefill.shape)
    stages, kinds = np.asarray(stage_of), np.asarray(numbers.classes)
    picked = np.asarray(choice_of)
    np.add.at(count, (stages, kinds, picked), 1.0)
    used = tuple(int(j) for j in np.unique(stages))

    def total(table: Array) -> Array:
        summed: Array = (np.where(count > 0, table, 0.0) * count).sum(axis=(1, 2))
        return summed

    rows, load = list(used), total(numbers.load)
    prefill = np.maximum(total(numbers.prefill) + numbers.fixed_prefill, load)[rows]
    decode = np.maximum(total(numbers.decode) + numbers.fixed_decode, load)[rows]
    slots = np.where(count > 0, numbers.slots, 0.0).max(axis=(1, 2))
    memory, host = (total(numbers.memory) + slots + numbers.fixed_memory)[rows], total(numbers.host)[rows]
    fits = bool(
        np.all(memory <= numbers.capacity[rows] * (1 + SLACK))
        and np.all(host <= numbers.host_capacity[rows] * (1 + SLACK))
    )
    hops = list(itertools.pairwise(used))
    hop_prefill = tuple(float(numbers.hop_prefill[a, b]) for a, b in hops)
    hop_decode = tuple(float(numbers.hop_decode[a, b]) for a, b in hops)
    back = numbers.back if hops else 0.0
    slowest = float(max(*prefill, *hop_prefill, 0.0)), float(max(*decode, *hop_decode, 0.0))
    through = float(sum(prefill)), float(sum(decode))
    if numbers.form == EXACT:  # in form PAPER, hops count only if one is the slowest part
        through = through[0] + sum(hop_prefill), through[1] + sum(hop_decode) + back
    seconds = numbers.rounds * numbers.round_seconds(slowest, through)
    harm = float(numbers.harm[np.arange(numbers.units), picked].sum())
    return Priced(used, tuple(map(float, prefill)), tuple(map(float, decode)), hop_prefill, hop_decode, back,
                  tuple(map(float, memory)), tuple(map(float, host)), fits, seconds, harm,
                  seconds + numbers.theta * harm)  # fmt: skip
