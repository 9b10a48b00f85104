"""gpu_batches of a sweep, and the pieces of sequences that they are formed of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from flexengine.places import DEVICE, place_of
from flexengine.schedule.pages import Pool


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start .. start + count - 1 of a sequence in one gpu_batch."""

    sequence: int  # id of the sequence; negative for a trunk, a common prefix that is computed once (schedule.sweeps)
    start: int  # position of the first token
    count: int  # number of tokens
    final: bool  # whether the sequence's prompt ends, or its last sampled token is computed, with this piece
    # Number of the trunk whose KV it reads, which an earlier gpu_batch of the sweep may compute; None if there is none
    source: int | None = None
    scored: int = 0  # number of its last tokens whose next token is given, to be scored
    # Whether it is computed as a part of a prompt, even if it has one token, so that its last bits do not depend on
    # where the prompt is cut
    prompt: bool = False

    @property
    def logits(self) -> int:
        """Number of tokens whose logits are computed."""
        return self.scored or int(self.final)

    @property
    def single(self) -> bool:
        """Whether it is computed as a single token."""
        return self.count == 1 and not self.prompt

    @property
    def decodes(self) -> bool:
        """Whether the piece is a decode step (one token after others), not a prefill chunk."""
        return self.start > 0 and self.single

    def pairs(self, window: int | None) -> int:
        """Return the number of (query, key) pairs in attention; each query sees at most `window` keys (None: all)."""

        def begun(tokens: int) -> int:  # pairs of the first tokens of the sequence
            short = tokens if window is None else min(tokens, window)
            return short * (short + 1) // 2 + (tokens - short) * (window or 0)

        return begun(self.start + self.count) - begun(self.start)


class Batch(NamedTuple):
    """A gpu_batch. A tier is named by its place; the home of data is its place between uses."""

    pieces: tuple[Piece, ...]  # tokens to compute, of sequences with KV cache on one tier
    cache_home: str  # tier of the KV cache
    hidden_home: str  # tier of the hidden states between layers
    # Place that computes attention (`Policy.attends`): the device, the host, or the attention worker that holds the KV
    # cache. Off the device, every piece is a decode step.
    attention: str = "device"
    queries_first: bool = False  # whether queries are sent there before keys and values are computed

    @property
    def delegated(self) -> bool:
        """Whether an attender, not the device, computes attention."""
        return self.attention != "device"

    @property
    def moves_pages(self) -> bool:
        """Whether KV pages are loaded and stored: from and to a disk if attention is delegated."""
        return self.cache_home != DEVICE and (not self.delegated or place_of(self.cache_home).disk)

    @property
    def tokens(self) -> int:
        """Number of tokens in all pieces."""
        return sum(p.count for p in self.pieces)


def split_prompt(
    sequence: int, start: int, count: int, budget: int, ends: bool = True, source: int | None = None, scored: int = 0
) -> list[Piece]:
    """Return tokens start .. start + count - 1 of a sequence as pieces of at most `budget` tokens, in order.

    Args:
        ends: whether the last piece is final.
        source: as in Piece.
        scored: number of the last tokens whose next token is given, to be scored.
    """
    end = start + count

    def piece(first: int) -> Piece:
        after = min(first + budget, end)
        final, predicting = ends and after == end, max(0, after - max(first, end - scored))
        return Piece(sequence, first, after - first, final, source, predicting, prompt=True)

    return [piece(first) for first in range(start, end, budget)]


def form_batches(
    pieces: Iterable[Piece], gpu_batch_size: int, token_budget: int, pools: Sequence[Pool] = ()
) -> list[tuple[Piece, ...]]:
    """Return gpu_batches of the pieces, in order.

    Pieces of one sequence are in different gpu_batches, in order, as a later piece reads the KV of the earlier ones.

    Args:
        gpu_batch_size: most sequences of a gpu_batch.
        token_budget: most tokens of a gpu_batch; a single piece may exceed this number.
        pools: page pools; `batch_pages` limits the KV pages of a gpu_batch.
    """
    limited = [(pool, pool.batch_pages) for pool in pools if pool.batch_pages is not None]
    batches: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    tokens, pages = 0, [0] * len(limited)
    for piece in pieces:
        count = piece.count
        full = len(current) == gpu_batch_size or tokens + count > token_budget
        if limited:
            needs = [pool.held(piece.start + count) for pool, _ in limited]
            full = full or any(n + more > most for n, more, (_, most) in zip(pages, needs, limited, strict=True))
        if current and (full or current[-1].sequence == piece.sequence):
            batches.append(tuple(current))
            current, tokens, pages = [], 0, [0] * len(limited)
        current.append(piece)
        tokens += count
        if limited:
            pages = [n + more for n, more in zip(pages, needs, strict=True)]
    if current:
        batches.append(tuple(current))
    return batches


def interleaved(batches: Iterable[Batch]) -> list[Batch]:
    """Return the gpu_batches in an order in which those of each cache tier are spread evenly over the sweep.

    The number of buffers limits how many gpu_batches are loaded ahead. If the gpu_batches of one tier were in a row,
    the lanes of the other tiers would be idle meanwhile. Delegated gpu_batches come first: their attention is computed
    while the device computes the others. With three slots or more, a streamed layer keeps its weight slot until the
    last of them is finished.
    """
    by_tier: dict[str, list[Batch]] = {}
    first: list[Batch] = []
    for batch in batches:
        (first if batch.delegated else by_tier.setdefault(batch.cache_home, [])).append(batch)
    spread = [((i + 0.5) / len(own), batch) for own in by_tier.values() for i, batch in enumerate(own)]
    return first + [batch for _, batch in sorted(spread, key=itemgetter(0))]


def continues(earlier: Batch, later: Batch) -> bool:
    """Return whether `later` reads KV that `earlier` computes: of the same sequence, or of a trunk that it shares."""
    begun = {p.sequence for p in earlier.pieces}
    return any(p.sequence in begun or p.source in begun for p in later.pieces)
