"""A job in the numbers that a cluster plan needs: the model, the rows, and the micro-batches in which they pass through
a pipeline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.facts import NO_ATTENTION, ModelFacts
from flexengine.plan.sizes import PAGE_TOKENS, aligned
from flexengine.plan.stages import BITS
from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool

MAX_BATCH = 4096  # most sequences alive at once

Format = str | None  # format of a layer's matrices, from plan.stages.FORMATS
Harm = NDArray[np.float64]  # [layers, formats] harm to quality


@dataclass(frozen=True)
class Model:
    """A model as devices of one kind hold it."""

    facts: Mapping[Format, ModelFacts]  # by format of the layers; None, the exact one, is among them

    @property
    def exact(self) -> ModelFacts:
        """Return the facts of the model with exact layers."""
        return self.facts[None]

    @cached_property
    def bytes(self) -> dict[Format, list[int]]:
        """Return the bytes of each layer's weights on a device, by format."""
        return {
            form: [sum(aligned(t.held_bytes) for t in layer) for layer in made.layers]
            for form, made in self.facts.items()
        }

    @cached_property
    def active(self) -> list[float]:
        """Return the elements of each layer's matrices that one token is multiplied by; fewer than all with experts."""
        return [sum(t.used(self.exact.active) for t in layer if t.matrix) for layer in self.exact.layers]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Return for each layer the number of its kind. Layers of one kind take equal time and have equal sizes."""
        known: dict[tuple[str, int | None, int], int] = {}
        windows = self.exact.windows or (None,) * len(self.exact.layers)
        keys = [(self.exact.signature(j), window, self.state(j)) for j, window in enumerate(windows)]
        return tuple(known.setdefault(key, len(known)) for key in keys)

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention, and so keys and values."""
        return not self.exact.windows or self.exact.windows[layer] != NO_ATTENTION

    def state(self, layer: int) -> int:
        """Return the bytes of a sequence's state in a layer, beside keys and values."""
        return self.exact.states[layer] if self.exact.states else 0


def assumed_harm(model: Model, formats: Sequence[Format]) -> Harm:
    """Return the assumed harm of each layer in each format: proportional to the layer's parameters and to 4^-bits, the
    square of a code's step; all layers in int4 have harm 1."""
    parts = np.array(model.active)
    factors = np.array([0.0 if form is None else 4.0 ** (4 - BITS[form]) for form in formats])
    return np.asarray(parts[:, None] / parts.sum() * factors)


@dataclass(frozen=True)
class ClusterJob:
    """Rows of a job. Seconds are of rows of mean size, bytes of the longest rows."""

    workload: Workload  # the rows, at least one

    @property
    def rows(self) -> int:
        """Return the number of sequences."""
        return self.workload.count

    @cached_property
    def prompt(self) -> int:
        """Return the mean prompt tokens."""
        return max(1, round(sum(p * times for (p, _), times in self.workload.sizes.items()) / self.rows))

    @cached_property
    def output(self) -> int:
        """Return the mean generated tokens."""
        return max(1, round(sum(n * times for (_, n), times in self.workload.sizes.items()) / self.rows))

    @property
    def past(self) -> float:
        """Return the cached tokens of a sequence, averaged over its decode steps."""
        return self.prompt + self.output / 2

    @cached_property
    def _unshared(self) -> Workload:
        return Workload(self.workload.sizes)

    def cached(self, batch: int) -> int:
        """Return the tokens of all KV pages of the `batch` longest rows at their end, which share no pages."""
        return PAGE_TOKENS * self._unshared.pages(batch, Pool(0, PAGE_TOKENS))


@dataclass(frozen=True)
class Shape:
    """Sequences that are alive at once, and their micro-batches."""

    batch: int  # sequences alive at once
    decode: int  # most sequences of a decode micro-batch (xi), a cohort
    prefill: int  # most sequences of a prefill micro-batch (eta), a part of a cohort

    @property
    def cohorts(self) -> int:
        """Return the number of decode micro-batches."""
        return math.ceil(self.batch / self.decode)

    @property
    def prefills(self) -> int:
        """Return the number of prefill micro-batches."""
        return self.cohorts * math.ceil(self.decode / self.prefill)

    def rounds(self, rows: int) -> int:
        """Return how often `batch` sequences pass until all rows are done."""
        return math.ceil(rows / self.batch)


def shapes(batch: int, devices: int) -> list[Shape]:
    """Return the micro-batches to try for a number of live sequences.

    Decode micro-batches are even parts of the batch: 1 to twice the number of devices of them. Prefill micro-batches
    divide a decode micro-batch into powers of 2.
    """
    found = []
    for cohorts in range(1, min(batch, 2 * devices) + 1):
        decode = prefill = math.ceil(batch / cohorts)
        found.append(Shape(batch, decode, prefill))
        while prefill > 1:
            prefill = math.ceil(prefill / 2)
            found.append(Shape(batch, decode, prefill))
    return list(dict.fromkeys(found))


def batches(rows: int) -> list[int]:
    """Return the numbers of live sequences to try, falling: even parts of the rows by powers of 2."""
    rounds = math.ceil(rows / MAX_BATCH)
    sizes = [math.ceil(rows / rounds)]
    while sizes[-1] > 1:
        rounds *= 2
        sizes.append(math.ceil(rows / rounds))
    return list(dict.fromkeys(sizes))
