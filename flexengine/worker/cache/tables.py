"""Page tables of a gpu_batch during a sweep. Layers of one group share a table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.kernels.paged import PagedAttention, PromptPieces
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.pages import Pool
from flexengine.worker.rows import PageShape, TokenRows, rows_of

if TYPE_CHECKING:
    from flexengine.worker.cache.smoothing import MeanKeys

Runs = list[tuple[int, int, int]]  # (first page in the pool, first page in the buffer, pages)
Pairs = list[tuple[int, int]]  # (page in the pool, page in the buffer)
Shared = tuple[int, list[int]]  # tokens cached before the sweep, and the page ids that hold them (copy on write)


class Closed(NamedTuple):
    """Pages of decoding sequences that were loaded without values. All tensors are on the device."""

    pages: Tensor  # int64 [decode, most pages]: page numbers in the pool
    buffer_pages: Tensor  # int64 [decode, most pages]: page numbers in the buffer
    tokens: Tensor  # int64 [decode]: number of tokens in these pages


@dataclass
class Tables:
    """Page tables of one gpu_batch for one group of layers during a sweep.

    Page numbers are numbers in the pool of the cache's tier. If pages pass through a device buffer, they are numbers in
    the buffer. If attention is delegated, the tensors are in RAM. `decode` is the number of pieces with one token.
    """

    tables: Tensor  # int32 [decode, pages], page tables of the pieces with one token
    lengths: Tensor  # int32 [decode], tokens cached after the sweep
    pages: Tensor  # int32 [new tokens], page of every new token that is written; pieces with one token first
    offsets: Tensor  # int32 [new tokens], offset of these tokens in their pages
    # int64, indices of the prompt tokens that are written; None for all. Tokens that no later query sees are not
    # written.
    kept: Tensor | None
    prompts: list[PromptPieces]  # pieces of more than one token
    load: Runs  # pages to load before compute
    keys: Runs  # pages to load without values before compute
    store: Runs  # pages to store after compute
    # Pages that are loaded without values; None if there are none. Chosen values are loaded later.
    closed: Closed | None = None
    rows: tuple[TokenRows, ...] = ()  # rows to store in place of whole pages, for decode steps with pages in RAM
    # (from, to) pages to copy within the pool before tokens are appended. If pages pass through a buffer, page `from`
    # is loaded and page `to` is stored, without a copy.
    copies: tuple[tuple[int, int], ...] = ()
    paged: PagedAttention | None = None  # what the last layer got from `Kernels.paged`; None before the first one


@dataclass
class View:
    """Page tables of one gpu_batch during a sweep."""

    decode: int  # number of pieces with one token, which are first in the packed batch
    groups: tuple[Tables, ...]  # by group of layers
    means: "MeanKeys | None" = None  # numbers of mean keys; None unless keys are stored without their means


def packed(batch: Batch) -> list[Piece]:
    """Return the batch's pieces in packed order: pieces with one token first, then by length."""
    return sorted(batch.pieces, key=lambda p: (not p.single, p.count, p.start > 0))


class _Moved:
    """Pages of a gpu_batch that pass through a device buffer.

    Attributes:
        pool: pool of the pages.
        keys_only: whether pieces with one token load pages without values.
        rows: whether decode steps store rows in place of pages.
        load, keys, store: as in `Tables`.
        tokens: (page in the pool, page in the buffer, offset in the page) of each token that is stored as rows.

    A page that several pieces share is loaded once, as long as none of them writes to it.
    """

    def __init__(self, pool: Pool, keys_only: bool, rows: bool) -> None:
        self.pool, self.keys_only, self.rows = pool, keys_only, rows
        self.load, self.keys, self.store = Runs(), Runs(), Runs()
        self.tokens: list[tuple[int, int, int]] = []
        self._used = 0  # pages of the buffer
        self._loaded: dict[int, int] = {}  # by page in the pool that is only read, the page in the buffer

    def add(self, piece: Piece, ids: list[int], shared: Shared | None) -> list[int]:
        """Add the loads and stores of a piece. Return the buffer's page for each of the sequence's page ids.

        Args:
            ids: page ids of its sequence.
            shared: as in `tables_of`.
        """
        pool, size = self.pool, self.pool.page_tokens
        read, filling, end = pool.read(piece.start), piece.start // size, piece.start + piece.count
        sources = ids
        if shared is not None:
            tokens, before = shared
            sources = ids.copy()
            # The sequence's first piece also loads the page that it continues. It stores the page under its new id.
            for number in range(read.start, read.stop if piece.start == tokens else tokens // size):
                sources[pool.entry(number)] = before[pool.entry(number)]
        keys_only = self.keys_only and piece.single
        full = [] if keys_only else pool.entries(range(read.start, filling))
        unchanged = {*full} - {*pool.entries(pool.written(piece.start, end))}
        loaded = {i: self._loaded[sources[i]] for i in unchanged if sources[i] in self._loaded}
        buffer_pages = [loaded[i] if i in loaded else self._next() for i in range(pool.held(end))]
        self._loaded |= {sources[i]: buffer_pages[i] for i in unchanged}

        def pairs(numbers: range, ids: list[int] = ids) -> Pairs:
            return [(ids[i], buffer_pages[i]) for i in pool.entries(numbers)]

        if keys_only:
            self.keys += _runs(pairs(range(read.start, filling)))
            read = range(max(read.start, filling), read.stop)
        self.load += _runs([(sources[i], buffer_pages[i]) for i in pool.entries(read) if i not in loaded])
        if piece.decodes and self.rows and shared is None:
            (pair,) = pairs(range(filling, filling + 1))
            self.tokens.append((*pair, piece.start % size))
        else:
            self.store += _runs(pairs(pool.written(piece.start, end)))
        return buffer_pages

    def _next(self) -> int:
        self._used += 1
        return self._used - 1


def tables_of(
    batch: Batch, pieces: list[Piece], pool: Pool, owned: list[list[int]], shared: dict[int, Shared],
    shape: PageShape, device: torch.device, values: bool,
) -> Tables:  # fmt: skip
    """Return the tables of a gpu_batch for one group of layers.

    Args:
        pieces: pieces of the batch, in packed order.
        owned: by piece, page ids of its sequence.
        shared: by index of a piece, `Pools.shared` of its sequence and this pool.
        values: whether only chosen values are loaded.
    """
    decode = sum(p.single for p in pieces)
    page_ids, closed, moved = owned, None, _Moved(pool, values, batch.cache_home == "host")
    copies: list[tuple[int, int]] = []
    if batch.cache_home != "device" and not batch.delegated:
        page_ids = [moved.add(piece, owned[i], shared.get(i)) for i, piece in enumerate(pieces)]
    else:
        copies = _copies(pool, pieces, owned, shared)
    ends = [p.start + p.count for p in pieces]
    tables = [pool.table(ids, end) for ids, end in zip(page_ids, ends, strict=True)]
    if page_ids is owned:
        for i, (tokens, ids) in shared.items():
            full = tokens // pool.page_tokens
            tables[i][:full] = pool.table(ids, full * pool.page_tokens)
    if moved.keys:
        in_pool = [pool.table(ids, end) for ids, end in zip(owned[:decode], ends, strict=False)]
        starts = torch.tensor([p.start // pool.page_tokens * pool.page_tokens for p in pieces[:decode]])
        closed = Closed(*(x.to(device) for x in (_padded(in_pool), _padded(tables[:decode]), starts)))
    where = torch.device("cpu") if batch.delegated else device
    size, spans = pool.page_tokens, [_kept(pool, p) for p in pieces[decode:]]
    pages = [table[-1] for table in tables[:decode]]
    pages += [table[s // size] for table, span in zip(tables[decode:], spans, strict=True) for s in span]
    offsets = [p.start % size for p in pieces[:decode]] + [s % size for span in spans for s in span]
    return Tables(
        _padded(tables[:decode]).int().to(where),
        _int32(ends[:decode], where),
        _int32(pages, where), _int32(offsets, where), _indices(pieces[decode:], spans, decode, where),
        _prompts(pieces[decode:], tables[decode:], decode, where), moved.load, moved.keys, moved.store, closed,
        tuple(rows_of(shape, moved.tokens, device)), tuple(copies),
    )  # fmt: skip


def _copies(
    pool: Pool, pieces: list[Piece], owned: list[list[int]], shared: dict[int, Shared]
) -> list[tuple[int, int]]:
    """Return the (shared, own) pages of sequences whose first new token goes to a page that is partly filled."""
    copies = list[tuple[int, int]]()
    for i, (tokens, ids) in shared.items():
        entry = pool.entry(tokens // pool.page_tokens)
        if pieces[i].start == tokens and tokens % pool.page_tokens:
            copies.append((ids[entry], owned[i][entry]))
    return copies


def _kept(pool: Pool, piece: Piece) -> range:
    """Return the positions of the piece's tokens that are written to pages."""
    end = piece.start + piece.count
    return range(max(piece.start, pool.first_written(piece.start, end) * pool.page_tokens), end)


def _indices(pieces: list[Piece], spans: list[range], first: int, device: torch.device) -> Tensor | None:
    """Return the indices in the packed batch of tokens at some positions of each piece; None for all tokens.

    Args:
        spans: by piece, the positions; they end with the piece.
        first: index of the first piece's first token.
    """
    if all(len(span) == piece.count for piece, span in zip(pieces, spans, strict=True)):
        return None
    indices: list[int] = []
    for piece, span in zip(pieces, spans, strict=True):
        first += piece.count
        indices += range(first - len(span), first)
    return torch.tensor(indices, dtype=torch.int64).to(device)


def _int32(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _padded(rows: list[list[int]]) -> Tensor:
    """Return the rows, padded with 0 to equal width: int64 [rows, at least 1]."""
    width = max((len(row) for row in rows), default=1)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64).view(-1, width)


def _runs(pairs: Pairs) -> Runs:
    """Return runs of pages that are consecutive both in the pool and in the buffer."""
    runs = Runs()
    for pair in pairs:
        if runs and pair == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((*pair, 1))
    return runs


def _prompts(pieces: list[Piece], tables: list[list[int]], first: int, device: torch.device) -> list[PromptPieces]:
    """Return the pieces in order. Consecutive pieces of equal length without cached tokens are one `Prompts`."""
    groups: list[PromptPieces] = []
    for piece, table in zip(pieces, tables, strict=True):
        last = groups[-1] if groups else None
        if piece.start:
            groups.append(PromptPieces(first, 1, piece.count, piece.start, _int32(table, device)))
        elif last and last.table is None and last.length == piece.count:
            groups[-1] = last._replace(rows=last.rows + 1)
        else:
            groups.append(PromptPieces(first, 1, piece.count, 0, None))
        first += piece.count
    return groups
