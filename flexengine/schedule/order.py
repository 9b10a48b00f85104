"""Who computes together, and in which order: pure functions and generators over plain numbers.

A sweep takes every live sequence one token further. Its cells are walked column by column (layer-major), so that each
layer's weights are needed once per sweep (FlexGen section 4.2).

        batch 0   batch 1   batch 2
layer 0    1         2         3
layer 1    4         5         6          the numbers are the order of the cells of one sweep
layer 2    7         8         9

Schedules differ only in who is alive in a sweep, that is in admission (`entrants`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexengine.schedule.pages import Pool


class Cell(NamedTuple):
    """One layer of one gpu_batch in one sweep: the unit of compute. `layer` counts layers, then head chunks."""

    sweep: int
    layer: int
    batch: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start .. start+count-1 of a sequence in one gpu_batch; `final` when its last token is sampled from."""

    sequence: int
    start: int
    count: int
    final: bool

    @property
    def decodes(self) -> bool:
        """Whether it is one generated token rather than a piece of a prompt."""
        return self.start > 0 and self.count == 1

    def pairs(self, window: int | None) -> int:
        """(query, key) pairs of its attention, of which each query sees `window` at most."""
        first, last = self.start + 1, self.start + self.count
        if window is None or last <= window:
            return (first + last) * self.count // 2
        if first >= window:
            return self.count * window
        inside = window - first + 1
        return (first + window) * inside // 2 + (last - window) * window


class Batch(NamedTuple):
    """A gpu_batch: pieces whose KV cache shares a home tier, and the home of its activations between layers.

    delegated: attention runs where the cache lives; then every piece is one generated token.
    """

    pieces: tuple[Piece, ...]
    cache_home: str
    hidden_home: str
    delegated: bool = False

    @property
    def tokens(self) -> int:
        return sum(p.count for p in self.pieces)


class Growing(NamedTuple):
    """A sequence as the forecast sees it.

    Attributes:
        tokens: cached after the coming sweep.
        sweeps: until it leaves.
        shared: tokens of its prompt if another sequence that leaves no earlier counts the pages that they share.
    """

    tokens: int
    sweeps: int
    shared: int = 0


def cells(sweep: int, layers: int, batches: int) -> Iterator[Cell]:
    """The cells of one sweep in layer-major order."""
    return (Cell(sweep, j, k) for j in range(layers) for k in range(batches))


def entrants(schedule: str, live: int, gpu_batch_size: int, num_gpu_batches: int) -> int:
    """Most sequences that may enter in the coming sweep when `live` are alive.

    row: one gpu_batch runs to its end before the next enters. zigzag: a whole block enters together when the last has
    ended (FlexGen 4.2). diagonal: one cohort of gpu_batch_size per sweep (FlexGen appendix A.1). continuous: every free
    place is filled at once.
    """
    block = gpu_batch_size * num_gpu_batches
    if schedule == "row":
        return 0 if live else gpu_batch_size
    if schedule == "zigzag":
        return 0 if live else block
    if schedule == "diagonal":
        return min(gpu_batch_size, block - live)
    return block - live


def peak_pages(sequences: Sequence[Growing], pool: Pool) -> int:
    """Return the most pages ever held if no other sequence enters: each sequence grows one token per sweep and then
    leaves. Pages that sequences share are counted once.

    The number of pages only falls when a sequence leaves, so the peak lies at one of the last sweeps of a sequence.
    """
    if not sequences:
        return 0
    tokens, sweeps, shared = np.array(sequences).T
    at = np.unique(sweeps)[:, None]
    held = pool.held(tokens + at - 1) - pool.num_shared(shared)
    return int(np.where(sweeps >= at, held, 0).sum(axis=1).max())


def split_prompt(sequence: int, start: int, count: int, budget: int) -> list[Piece]:
    """Pieces of at most `budget` tokens covering tokens start .. start+count-1, in order."""
    cuts = range(start, start + count, budget)
    return [Piece(sequence, at, min(budget, start + count - at), at + budget >= start + count) for at in cuts]


def form_batches(
    pieces: Iterable[Piece], gpu_batch_size: int, token_budget: int, pools: Sequence[Pool] = ()
) -> list[tuple[Piece, ...]]:
    """Cut pieces, in order, into gpu_batches of bounded sequences, tokens and, where a pool limits them, cache pages.

    Pieces of one sequence land in different batches, in order, so that a later one finds the cache of the earlier.
    """
    limited = [(pool, pool.batch_pages) for pool in pools if pool.batch_pages is not None]
    batches: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    tokens, pages = 0, [0] * len(limited)
    for piece in pieces:
        needs = [pool.held(piece.start + piece.count) for pool, _ in limited]
        full = len(current) == gpu_batch_size or tokens + piece.count > token_budget
        full = full or any(n + more > most for n, more, (_, most) in zip(pages, needs, limited, strict=True))
        if current and (full or current[-1].sequence == piece.sequence):
            batches.append(tuple(current))
            current, tokens, pages = [], 0, [0] * len(limited)
        current.append(piece)
        tokens, pages = tokens + piece.count, [n + more for n, more in zip(pages, needs, strict=True)]
    if current:
        batches.append(tuple(current))
    return batches
