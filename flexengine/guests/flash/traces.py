"""Inputs and active neurons of feed-forward blocks, recorded while a model reads stretches of text, and statistics of
them, on which the gain of flash mode depends (LLM in a flash, section 3.1).

They are stored in unnamed files, one per layer, that stay in memory while they are small: x of every token in fp16, and
one bit per neuron, which is 1 if its activation is not 0.

A trace is bool [stretches, tokens, neurons]: the active neurons of one layer, for the successive tokens of several
stretches of text. All statistics are shares of the layer's neurons.

Magnitudes of activations give the thresholds of sparsified activations. A histogram per layer counts them by the upper
bits of their fp32 numbers, so a bin's bounds differ by 0.4 % at most, and memory does not grow with the text.
"""

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as parse
from torch import Tensor

from flexengine.errors import BadCheckpoint
from flexengine.guests.flash.feed_forward import FeedForward, watching
from flexengine.model.shards import check_room, save

IN_MEMORY = 256 << 20  # bytes of all layers that stay in memory
_LARGEST = torch.finfo(torch.float16).max
Trace = NDArray[np.bool_]
SHARES = np.linspace(0.0, 1.0, 1001)
_LOW_BITS = 15  # of a number's 31 that are the same for a bin: 8 bits of the mantissa are left
_BINS = 1 << (31 - _LOW_BITS)
_NAME = "magnitudes"
ROWS, WINDOW = 8, 16  # most rows of a union, most tokens of a window


@dataclass(frozen=True)
class NeuronSharing:
    """How much the active neurons of several tokens have in common."""

    active: float  # mean share of a token
    # Mean share of the union of b independent tokens, for b = 1, 2, ...; at most the number of stretches.
    rows: tuple[float, ...]
    window: tuple[float, ...]  # s_agg(k), the mean share of the union of k successive tokens, for k = 1, 2,


def sharing(trace: Trace) -> NeuronSharing:
    """Return the statistics of a trace."""
    return NeuronSharing(active_share(trace), row_unions(trace), window_unions(trace))


def active_share(trace: Trace) -> float:
    """Return the mean share of active neurons of a token; 0.0 for no tokens."""
    return float(trace.mean()) if trace.size else 0.0


def row_unions(trace: Trace) -> tuple[float, ...]:
    """Return the mean share of the union of b independent tokens, for b = 1 to ROWS or the number of stretches.

    Tokens at the same place of neighbouring stretches, the first after the last, count as independent.
    """
    rolled = (np.roll(trace, -b, axis=0) for b in range(min(ROWS, len(trace))))
    return tuple(map(active_share, accumulate(rolled, np.logical_or)))


def window_unions(trace: Trace, most: int = WINDOW + 1) -> tuple[float, ...]:
    """Return s_agg(k), the mean share of the union of k successive tokens, for k = 1 to `most` or the tokens of a
    stretch.

    All k have the same windows' beginnings, so the difference of two neighbours is exactly the mean share of new
    neurons.
    """
    most = min(most, trace.shape[1])
    beginnings = trace.shape[1] - most + 1
    return tuple(map(active_share, accumulate((trace[:, k : k + beginnings] for k in range(most)), np.logical_or)))


@dataclass(frozen=True)
class RecordedLayer:
    """What was recorded of one layer. The tokens may also have one dimension, instead of stretches and tokens."""

    x: Tensor  # fp16 [stretches, tokens, width], inputs of the block
    bits: Tensor  # uint8 [stretches, tokens, bytes], one bit per neuron
    neurons: int  # their number

    def part(self, chosen: Sequence[int]) -> "RecordedLayer":
        """Return some of the stretches."""
        return RecordedLayer(self.x[chosen], self.bits[chosen], self.neurons)

    def flat(self, device: torch.device) -> "RecordedLayer":
        """Return all tokens in one dimension, on a device."""
        return RecordedLayer(self.x.flatten(0, 1).to(device), self.bits.flatten(0, 1).to(device), self.neurons)

    def active(self, chosen: Tensor | slice = slice(None)) -> Tensor:
        """Return the active neurons of some stretches or tokens, bool [..., neurons]."""
        shifts = torch.arange(7, -1, -1, device=self.bits.device, dtype=torch.uint8)
        bits = (self.bits[chosen][..., None] >> shifts) & 1
        return bits.flatten(-2)[..., : self.neurons].bool()


class TraceRecorder:
    """Records the blocks of an engine's model. Every stretch must be computed as one piece."""

    def __init__(self, blocks: Sequence[FeedForward], stretches: Sequence[tuple[int, ...]], folder: Path) -> None:
        """Check that the disk has room. Raise OutOfMemory if the files are to be on disk, and it has too little room.

        Args:
            stretches: token ids of each stretch, all of one length and different from each other.
            folder: directory of the unnamed files.
        """
        self._blocks, self._tokens, self._count = blocks, len(stretches[0]), len(stretches)
        self._numbers = {_key(torch.tensor(ids)): number for number, ids in enumerate(stretches)}
        self._widths = [2 * block.width + -(-block.neurons // 8) for block in blocks]  # bytes of a token
        self._seen: list[set[int]] = [set() for _ in blocks]
        self._active = [0.0] * len(blocks)
        total = sum(self._widths) * self._tokens * self._count
        if total > IN_MEMORY:
            check_room(folder, "inputs of the feed-forward blocks", total)
        limit = IN_MEMORY // len(blocks) if total > IN_MEMORY else total
        self._files = [tempfile.SpooledTemporaryFile(max_size=limit, dir=str(folder)) for _ in blocks]  # noqa: SIM115

    def close(self) -> None:
        for file in self._files:
            file.close()

    def watching(self) -> AbstractContextManager[None]:
        """Record the blocks while the context is open."""
        return watching(self._blocks, self._note)

    def _note(self, number: int, inputs: Any, x: Tensor, out: Tensor) -> None:
        ids, starts = inputs.ids[0].cpu(), (inputs.positions[0] == 0).nonzero()[:, 0].tolist()
        x, out = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        for start in starts:
            piece = slice(start, start + self._tokens)
            if (stretch := self._numbers.get(_key(ids[piece]))) is None:
                continue
            values = x[piece].float().clamp(-_LARGEST, _LARGEST).half().cpu().contiguous().view(torch.uint8).numpy()
            bits = (self._blocks[number].act(out[piece]) != 0).cpu().numpy()
            self._files[number].seek(stretch * self._tokens * self._widths[number])
            self._files[number].write(np.concatenate([values, np.packbits(bits, axis=-1)], axis=1).tobytes())
            if stretch not in self._seen[number]:
                self._seen[number].add(stretch)
                self._active[number] += float(bits.mean())

    @property
    def shares(self) -> list[float]:
        """Mean share of active neurons so far, by block."""
        return [active / max(1, len(seen)) for active, seen in zip(self._active, self._seen, strict=True)]

    def recorded(self, number: int) -> RecordedLayer:
        """Return what was recorded of a block. Raise RuntimeError if a stretch is missing."""
        if (count := len(self._seen[number])) < self._count:
            raise RuntimeError(f"{count} of {self._count} stretches were recorded of block {number}")
        file, block = self._files[number], self._blocks[number]
        file.seek(0)
        data = np.frombuffer(file.read(), np.uint8).reshape(self._count, self._tokens, self._widths[number])
        x = torch.from_numpy(np.ascontiguousarray(data[..., : 2 * block.width])).view(torch.float16)
        bits = torch.from_numpy(np.ascontiguousarray(data[..., 2 * block.width :]))
        return RecordedLayer(x, bits, block.neurons)


def _key(ids: Tensor) -> bytes:
    return ids.numpy().tobytes()


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
