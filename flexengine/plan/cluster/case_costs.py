"""Costs of one case: devices in an order, micro-batches, and choices of a layer. Arrays, for programs and searches.

A *unit* is one layer, or a group of neighbouring layers that are decided together. Units of equal size are one *class*.
A *choice* of a unit is a format and a home of its weights: the device, or the host, from where they are streamed for
every micro-batch while other layers compute.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.cluster.job import Format

Array = NDArray[np.float64]
SLACK = 1e-9  # of a memory's bytes, relative: rounding errors of sums


class UnitChoice(NamedTuple):
    """Format of a unit's weights, and whether they are on the host."""

    form: Format
    host: bool


@dataclass(frozen=True)
class CaseCosts:
    """Costs of a case. N stages, K classes, C choices, U units. Seconds and bytes are of whole units."""

    choices: tuple[UnitChoice, ...]  # the C choices
    classes: tuple[int, ...]  # class of each unit
    # prefill, decode: [N, K, C] seconds of one micro-batch; infinite if the device has no kernel
    prefill: Array
    decode: Array
    load: Array  # [N, K, C] seconds to stream the weights of a unit on the host; 0 on the device
    memory: Array  # [N, K, C] bytes on the device: weights and KV cache of all live sequences
    host: Array  # [N, K, C] bytes on the host
    slots: Array  # [N, K, C] bytes of the buffers that a stage needs to stream such a unit; the largest counts
    # fixed_prefill, fixed_decode: [N] seconds of a micro-batch besides layers
    fixed_prefill: Array
    fixed_decode: Array
    fixed_memory: Array  # [N] bytes besides layers; a stage without layers needs none
    # capacity, host_capacity: [N] bytes
    capacity: Array
    host_capacity: Array
    # hop_prefill, hop_decode: [N, N] seconds of sending a micro-batch from one stage to another
    hop_prefill: Array
    hop_decode: Array
    back: float  # seconds of sending a micro-batch's tokens from the last stage to the first
    harm: Array  # [U, C] harm of each choice
    theta: float  # seconds per unit of harm
    # prefills, cohorts: number of prefill and of decode micro-batches
    prefills: int
    cohorts: int
    steps: int  # decode steps of a sequence; its first token comes from prefill
    rounds: int = 1  # how often a full set of sequences passes

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.capacity)

    @property
    def units(self) -> int:
        """Return the number of units."""
        return len(self.classes)

    def passes(self, slowest: tuple[Any, Any], through: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the seconds of prefill and of a decode step of all micro-batches of one round, as numbers or arrays.

        A micro-batch's next token cannot start before its last token has left the last stage, so a decode step of all
        cohorts takes the longer of cohorts * slowest and the way through the pipeline. LLM-PQ's objective (equation 4)
        leaves this limit out.

        Args:
            slowest: seconds of the slowest stage or link, in prefill and in decode.
            through: seconds of the way of a micro-batch through the pipeline, in prefill and in decode.
        """
        prefill = (self.prefills - 1) * slowest[0] + through[0]
        return prefill, np.maximum(self.cohorts * slowest[1], through[1])


@dataclass(frozen=True)
class Priced:
    """Seconds and bytes of an assignment of units to stages and choices."""

    used: tuple[int, ...]  # stages that have units, in order
    # prefill, decode: by used stage, seconds of one micro-batch
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    # hop_prefill, hop_decode: by used stage but the last, seconds of sending a micro-batch to the next
    hop_prefill: tuple[float, ...]
    hop_decode: tuple[float, ...]
    back: float  # seconds of sending tokens back to the first stage; 0 with one stage
    # memory, host: by used stage, bytes
    memory: tuple[float, ...]
    host: tuple[float, ...]
    fits: bool  # whether all bytes fit
    passes: tuple[float, float]  # seconds of prefill and of a decode step of all micro-batches of one round
    seconds: float  # seconds of the job
    harm: float  # sum over units
    cost: float  # seconds + theta * harm


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
    slowest = max(*prefill, *hop_prefill, 0.0), max(*decode, *hop_decode, 0.0)
    through = sum(prefill) + sum(hop_prefill), sum(decode) + sum(hop_decode) + back
    first, step = map(float, numbers.passes(slowest, through))
    seconds = numbers.rounds * (first + numbers.steps * step)
    harm = float(numbers.harm[np.arange(numbers.units), picked].sum())
    return Priced(used, tuple(map(float, prefill)), tuple(map(float, decode)), hop_prefill, hop_decode, back,
                  tuple(map(float, memory)), tuple(map(float, host)), fits, (first, step), seconds, harm,
                  seconds + numbers.theta * harm)  # fmt: skip
