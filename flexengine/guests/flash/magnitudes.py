"""Magnitudes of activations, recorded while a model reads a text: they give the thresholds of sparsified activations.

A histogram per layer counts magnitudes by the upper bits of their fp32 numbers, so a bin's bounds differ by 0.4 % at
most, and memory does not grow with the text. Quantiles of the magnitudes are what is kept.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexengine.errors import BadCheckpoint
from flexengine.guests.flash.feed_forward import FeedForward, watching
from flexengine.model.shards import save

SHARES = np.linspace(0.0, 1.0, 1001)
_LOW_BITS = 15  # of a number's 31 that are the same for a bin: 8 bits of the mantissa are left
_BINS = 1 << (31 - _LOW_BITS)
_NAME = "magnitudes"


@dataclass(frozen=True)
class Magnitudes:
    """Quantiles of the magnitudes of a model's activations."""

    quantiles: NDArray[np.float32]  # fp32 [layers, shares], for SHARES

    def thresholds(self, share: float) -> list[float]:
        """Return, by layer, the magnitude that this share of the activations is below."""
        return [float(np.interp(share, SHARES, layer)) for layer in self.quantiles]

    def write(self, file: Path) -> None:
        """Write a file. Raise OSError if that fails."""
        save({_NAME: torch.from_numpy(self.quantiles)}, file)


def load(file: Path) -> Magnitudes:
    """Read a file that `Magnitudes.write` wrote. Raise BadCheckpoint if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load as parse

    try:
        return Magnitudes(parse(file.read_bytes())[_NAME].numpy())
    except (OSError, SafetensorError, KeyError) as error:
        raise BadCheckpoint(f"{file} cannot be read: {error}; remove its directory to calibrate again") from error


class MagnitudeRecorder:
    """Counts the magnitudes of activations of blocks. Memory: 0.5 MB per block."""

    def __init__(self, blocks: Sequence[FeedForward]) -> None:
        self._blocks = blocks
        self._counts = torch.zeros(len(blocks), _BINS, dtype=torch.int64)

    def watching(self) -> AbstractContextManager[None]:
        """Count the activations of the passes of jobs."""
        return watching(self._blocks, self._note)

    def _note(self, number: int, _: Any, x: Tensor, out: Tensor) -> None:
        self._counts[number] += histogram(self._blocks[number].act(out)).cpu()

    def magnitudes(self) -> Magnitudes:
        """Return the quantiles of what was counted."""
        return Magnitudes(np.stack([_quantiles(counts.numpy()) for counts in self._counts]))


def histogram(values: Tensor) -> Tensor:
    """Return how many values have a magnitude in each bin, int64 [bins]. The sign bit of a number is left out."""
    bits = values.detach().float().flatten().view(torch.int32) & 0x7FFFFFFF
    return torch.bincount(bits >> _LOW_BITS, minlength=_BINS)


def _quantiles(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the magnitudes that each of SHARES is below. Values are taken as evenly spread over their bin."""
    filled = np.flatnonzero(counts)
    bounds = (np.arange(_BINS + 1, dtype=np.int64) << _LOW_BITS).astype(np.uint32).view(np.float32)
    below = np.concatenate([[0], np.cumsum(counts[filled])]) / max(1, counts.sum())
    ranks = np.searchsorted(below[1:], SHARES, side="left").clip(max=len(filled) - 1)
    low, high = bounds[filled[ranks]], bounds[filled[ranks] + 1]
    part = (SHARES - below[ranks]) / (below[ranks + 1] - below[ranks])
    return np.asarray(low + part * (high - low), np.float32)
