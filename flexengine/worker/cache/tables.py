"""The page tables of a gpu_batch, which all layers that see equally many tokens share during a sweep."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.schedule.order import Batch, Piece
from flexengine.schedule.pages import Pool
from flexengine.worker.rows import Rows, rows_of
from flexengine.worker.values import Closed, PageShape

Runs = list[tuple[int, int, int]]  # (first page in the pool, first page in the buffer, pages)
Pairs = list[tuple[int, int]]  # (page in the pool, page in the buffer)


class Prompts(NamedTuple):
    """Pieces of equal length, one after another in the batch: tokens first .. first + rows * length - 1."""

    first: int
    rows: int
    length: int
    past: int  # tokens cached before; only single pieces have any
    table: Tensor | None


class MeanKeys(NamedTuple):
    """Where the mean keys of a batch's tokens are kept. opening: (place, first token, end) of each sequence that
    begins; of: place by token, [tokens]."""

    opening: list[tuple[int, int, int]]
    of: Tensor


@dataclass
class Tables:
    """One gpu_batch's pages of a group of layers during a sweep.

    Page numbers count in the pool of the cache's tier, or in a buffer if the cache is off the device and attention is
    not delegated. If attention is delegated, the tensors are in RAM.

    Attributes:
        tables: int32 [decode, pages], of the single tokens.
        lengths: int32 [decode], tokens cached after the sweep.
        pages, offsets: int32, of every new token that is kept: the single ones first.
        kept: int64, which tokens after the single ones are kept; None if all are. Tokens that no later query sees
            are not.
        prompts: pieces of more tokens.
        load: pages to load before compute.
        keys: pages of which only keys are loaded. Chosen values of the pages in `closed` are loaded later.
        store: pages to store after compute.
        rows: what is stored of decoding sequences at home in RAM, instead of their pages.
        copies: (from, to) pages to copy within the pool before tokens are appended. Where pages pass through a buffer,
            they are loaded from one page and stored to the other instead.
    """

    tables: Tensor
    lengths: Tensor
    pages: Tensor
    offsets: Tensor
    kept: Tensor | None
    prompts: list[Prompts]
    load: Runs
    keys: Runs
    store: Runs
    closed: Closed | None = None
    rows: tuple[Rows, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass
class View:
    """One gpu_batch's share of the cache during a sweep.

    Attributes:
        decode: how many of the first tokens are single ones.
        groups: by group of layers.
        means: None unless keys are kept without their means.
    """

    decode: int
    groups: tuple[Tables, ...]
    means: MeanKeys | None = None


def packed(batch: Batch) -> list[Piece]:
    """The batch's pieces in the order their tokens are packed: single tokens first, then by length."""
    return sorted(batch.pieces, key=lambda p: (p.count > 1, p.count, p.start > 0))


class _Moved:
    """Pages that pass through a buffer, piece by piece.

    Attributes:
        single: whether the pages of a single token's past are loaded without their values.
        rows: whether a decode step stores its token rather than its page.
    """

    def __init__(self, pool: Pool, single: bool, rows: bool) -> None:
        self.pool, self.single, self.rows = pool, single, rows
        self.load, self.keys, self.store = Runs(), Runs(), Runs()
        self.tokens: list[tuple[int, int, int]] = []  # page in the pool, page in the buffer, place in the page
        self._at = 0

    def add(self, piece: Piece, ids: list[int], copied: int | None) -> list[int]:
        """Note what the piece loads and stores. Return the buffer's pages for the sequence's page ids.

        Args:
            copied: as `Sequence.copied`, of the pool.
        """
        pool, size = self.pool, self.pool.page_tokens
        here = list(range(self._at, self._at + pool.held(piece.start + piece.count)))
        self._at += len(here)

        def pairs(numbers: range, ids: list[int] = ids) -> Pairs:
            return [(ids[i], here[i]) for i in pool.entries(numbers)]

        read, filling = pool.read(piece.start), piece.start // size
        sources = ids
        if copied is not None:
            sources = ids.copy()
            sources[pool.entry(filling)] = copied
        if self.single and piece.count == 1:
            self.keys += _runs(pairs(range(read.start, filling)))
            read = range(max(read.start, filling), read.stop)
        self.load += _runs(pairs(read, sources))
        if piece.decodes and self.rows and copied is None:
            ((far, near),) = pairs(range(filling, filling + 1))
            self.tokens.append((far, near, piece.start % size))
        else:
            self.store += _runs(pairs(pool.written(piece.start, piece.start + piece.count)))
        return here


def tables_of(
    batch: Batch, pieces: list[Piece], pool: Pool, owned: list[list[int]], copied: dict[int, int], shape: PageShape,
    device: torch.device, values: bool,
) -> Tables:  # fmt: skip
    """Return the tables of a gpu_batch for one group of layers.

    Args:
        pieces: of the batch, in packed order.
        pool: of the batch's tier.
        owned: page ids of the sequence of each piece.
        copied: by piece, `Sequence.copied` of this pool if there is one.
        shape: layout of a page.
        device: where attention runs that is not delegated.
        values: whether values are loaded when they are chosen.
    """
    decode = sum(p.count == 1 for p in pieces)
    here, closed, moved = owned, None, _Moved(pool, values, batch.cache_home == "host")
    copies: list[tuple[int, int]] = []
    if batch.cache_home != "device" and not batch.delegated:
        here = [moved.add(piece, owned[i], copied.get(i)) for i, piece in enumerate(pieces)]
    else:
        copies = [(page, owned[i][pool.entry(pieces[i].start // pool.page_tokens)]) for i, page in copied.items()]
    ends = [p.start + p.count for p in pieces]
    tables = [pool.table(ids, end) for ids, end in zip(here, ends, strict=True)]
    if moved.keys:
        far = [pool.table(ids, end) for ids, end in zip(owned[:decode], ends, strict=False)]
        starts = torch.tensor([p.start // pool.page_tokens * pool.page_tokens for p in pieces[:decode]])
        closed = Closed(*(x.to(device) for x in (_padded(far), _padded(tables[:decode]), starts)))
    on = torch.device("cpu") if batch.delegated else device
    size, spans = pool.page_tokens, [_kept(pool, p) for p in pieces[decode:]]
    page_ids = [table[-1] for table in tables[:decode]]
    page_ids += [table[s // size] for table, span in zip(tables[decode:], spans, strict=True) for s in span]
    offsets = [p.start % size for p in pieces[:decode]] + [s % size for span in spans for s in span]
    return Tables(
        _padded(tables[:decode]).int().to(on),
        _int32(ends[:decode], on),
        _int32(page_ids, on), _int32(offsets, on), _indices(pieces[decode:], spans, decode, on),
        _prompts(pieces[decode:], tables[decode:], decode, on), moved.load, moved.keys, moved.store, closed,
        tuple(rows_of(shape, moved.tokens, device)), tuple(copies),
    )  # fmt: skip


def _kept(pool: Pool, piece: Piece) -> range:
    """Return the positions of the piece's tokens that are written to pages."""
    end = piece.start + piece.count
    return range(max(piece.start, pool.first_written(piece.start, end) * pool.page_tokens), end)


def _indices(pieces: list[Piece], spans: list[range], first: int, device: torch.device) -> Tensor | None:
    """Return the places in the batch of the tokens at these positions, None for all. first: of the pieces' tokens."""
    if all(len(span) == piece.count for piece, span in zip(pieces, spans, strict=True)):
        return None
    found: list[int] = []
    for piece, span in zip(pieces, spans, strict=True):
        first += piece.count
        found += range(first - len(span), first)
    return torch.tensor(found, dtype=torch.int64).to(device)


def _int32(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _padded(rows: list[list[int]]) -> Tensor:
    """The rows side by side, int64 [rows, at least 1]."""
    width = max((len(row) for row in rows), default=1)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64).view(-1, width)


def _runs(pairs: Pairs) -> Runs:
    """Return runs of pages that are neighbours both in the pool and in the buffer."""
    runs = Runs()
    for far, near in pairs:
        if runs and (far, near) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((far, near, 1))
    return runs


def _prompts(pieces: list[Piece], tables: list[list[int]], first: int, device: torch.device) -> list[Prompts]:
    """Groups neighbouring fresh pieces of equal length; a continued piece stands alone with its table."""
    groups: list[Prompts] = []
    for piece, table in zip(pieces, tables, strict=True):
        last = groups[-1] if groups else None
        if piece.start:
            groups.append(Prompts(first, 1, piece.count, piece.start, _int32(table, device)))
        elif last and last.table is None and last.length == piece.count:
            groups[-1] = last._replace(rows=last.rows + 1)
        else:
            groups.append(Prompts(first, 1, piece.count, 0, None))
        first += piece.count
    return groups
