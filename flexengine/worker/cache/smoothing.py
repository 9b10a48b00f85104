"""Keys and values made easier to keep in few bits, at no cost in exactness.

Groups of a few bits suffer from the few elements of a head that stand far off. Two changes that attention cannot see
take these away:

* the mean of a sequence's keys, taken over its first piece, is subtracted from all of them: every score of a query
  shrinks by the same amount, which the softmax does not feel (SageAttention, arXiv 2410.02367, section 4.2). It
  would where scores pass a soft cap or compete with sinks; there the mean stays.
* queries and keys are multiplied by one orthogonal matrix, which leaves their products alone and spreads what stands
  off over all elements; so are values, and the output is turned back (QuaRot, arXiv 2404.00456, section 4).

With them each token is encoded by itself, when it comes. Groups along the tokens (KIVI) need as many bits for the
same loss, and the newest tokens of every sequence kept in full until a group of them is complete.
"""

from math import prod

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor

from flexengine import kernels
from flexengine.model.forward import Attend
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import MEAN_KEYS, Layout
from flexengine.schedule.batches import Piece
from flexengine.tier.machine import Machine
from flexengine.worker.cache.pools import SequenceRecords
from flexengine.worker.cache.tables import MeanKeys
from flexengine.worker.regions import Regions


class Smoothing(SequenceRecords):
    """The mean keys of each sequence in all layers, and the matrix."""

    def __init__(self, model: ModelFacts, layout: Layout, machine: Machine, regions: Regions) -> None:
        count, self._device = layout.policy.block_size, machine.compute
        super().__init__("device", count)
        self._rotation = rotation(model.head_dim).to(machine.compute)
        region = regions.take("device", layout.account["device"][MEAN_KEYS], MEAN_KEYS, torch.float32)
        shape = (len(model.layers), count, model.kv_heads, model.head_dim)
        self._means = machine.device.view(region).view(-1)[: prod(shape)].view(shape)

    def of(self, pieces: list[Piece]) -> MeanKeys:
        """Return the mean keys of a gpu_batch's pieces, in packed order."""
        opening, by_token = list[tuple[int, int, int]](), list[int]()
        for piece in pieces:
            number, first = self.number[piece.sequence], len(by_token)
            if not piece.start:
                opening.append((number, first, first + piece.count))
            by_token += [number] * piece.count
        return MeanKeys(opening, torch.tensor(by_token).to(self._device))

    def smoothed(self, event: Attend, means: MeanKeys) -> Attend:
        """Return the event with smoothed q, k, v."""
        q, k, v = event.q, event.k, event.v
        if event.softcap is None and event.sinks is None:
            keys, own = k[0].transpose(0, 1), self._means[event.layer]
            for number, first, end in means.opening:
                own[number] = keys[first:end].float().mean(0)
            k = (keys - own[means.by_token].to(k.dtype)).transpose(0, 1)[None]
        q, k, v = (self.turned(x) for x in (q, k, v))
        return event._replace(q=q, k=k, v=v)

    def turned(self, x: Tensor) -> Tensor:
        """Return x [..., dim] times the matrix, in x's dtype. Turned twice, it is what it was, up to rounding."""
        return kernels.load_for(x.device).linear(x.to(self._rotation.dtype), self._rotation).to(x.dtype)


def rotation(dim: int) -> Tensor:
    """Return a symmetric orthogonal matrix [dim, dim], fp32: Hadamard's, as many times as the powers of two in dim
    allow."""
    size = dim & -dim
    block = torch.from_numpy(hadamard(size, np.float32))
    whole: Tensor = torch.block_diag(*[block / size**0.5] * (dim // size))  # type: ignore[no-untyped-call]
    return whole
