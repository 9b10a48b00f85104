"""Page tables of a gpu_batch during a sweep. Layers of one group share a table.

A decode step stores the rows of its tokens to pages in RAM, not whole pages. A page has one row per KV head for a
token's K, and one for its V. An encoded page has, per KV head, a row of codes and one for each scale and minimum
(codec.cache). Rows of equal width are gathered on the device, cross the link in one copy, and are put into the pool.
"""

from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat, PanelPart
from flexengine.kernels.paged import PagedAttention, PromptPieces
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.pages import Pool
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine

Runs = list[tuple[int, int, int]]  # (first page in the pool, first page in the buffer, pages)
Pairs = list[tuple[int, int]]  # (page in the pool, page in the buffer)
Shared = tuple[int, list[int]]  # tokens cached before the sweep, and the page ids that hold them (copy on write)


# Dtypes to copy rows of bytes in, the first that fits: index_copy_ of uint8 is four times as slow as of int64.
WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PageShape(NamedTuple):
    """Layout of a page. A page has a panel of K for each KV head, then a panel of V for each."""

    kv_heads: int  # number of KV heads
    page_tokens: int  # tokens of a page
    size: int  # bytes of a panel
    parts: tuple[PanelPart, ...]  # rows of a panel, by width

    @staticmethod
    def of(form: CacheFormat | None, kv_heads: int, page_tokens: int, row: int) -> "PageShape":
        """Return the layout of pages. row: bytes of one head's key in pages that are not encoded."""
        if form is None:
            return PageShape(kv_heads, page_tokens, page_tokens * row, (PanelPart(row, (0,)),))
        return PageShape(kv_heads, page_tokens, form.panel_bytes, form.parts)

    def rows(self, part: PanelPart, panels: Tensor, offsets: Tensor) -> Tensor:
        """Return numbers of rows of `part.width` bytes in a pool: int64 [starts * tokens].

        Args:
            panels, offsets: int64 of one shape, or of shapes that can be broadcast: panel and offset of each token.
        """
        first = panels * (self.size // part.width) + offsets
        return torch.cat([(first + start // part.width).flatten() for start in part.starts])


class TokenRows(NamedTuple):
    """Numbers of a batch's rows of one width, in a layer's pool and in a buffer."""

    width: int  # bytes of a row
    pool_rows: Tensor  # int64 [rows], in RAM: row numbers in the pool
    buffer_rows: Tensor  # int64 [rows], on the device: row numbers in the buffer


class Closed(NamedTuple):
    """Pages of decoding sequences that were loaded without values. All tensors are on the device."""

    pages: Tensor  # int64 [decode, most pages]: page numbers in the pool
    buffer_pages: Tensor  # int64 [decode, most pages]: page numbers in the buffer
    tokens: Tensor  # int64 [decode]: number of tokens in these pages


@dataclass
class Tables:
    """Page tables of one gpu_batch for one group of layers during a sweep.

    Page numbers are numbers in the pool of the cache's tier. If pages pass through a device buffer, or are read from a
    disk for delegated attention, they are numbers in the buffer. If attention is delegated, the tensors are in RAM.
    `decode` is the number of pieces with one token.
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


class MeanKeys(NamedTuple):
    """Numbers of the mean keys of a batch's sequences."""

    # (number, first token, last token + 1) of each sequence that begins; tokens of the packed batch
    opening: list[tuple[int, int, int]]
    by_token: Tensor  # int64 [tokens]: number of the mean key of each token's sequence


@dataclass
class View:
    """Page tables of one gpu_batch during a sweep."""

    decode: int  # number of pieces with one token, which are first in the packed batch
    groups: tuple[Tables, ...]  # by group of layers
    means: MeanKeys | None = None  # numbers of mean keys; None unless keys are stored without their means


def packed(batch: Batch) -> list[Piece]:
    """Return the batch's pieces in packed order: pieces with one token first, then by length."""
    return sorted(batch.pieces, key=lambda p: (not p.single, p.count, p.start > 0))


class _Moved:
    """Pages of a gpu_batch that pass through a device buffer.

    A page that several pieces share is loaded once, as long as none of them writes to it.

    Args:
        keys_only: whether pieces with one token load pages without values.
        rows: whether decode steps store rows in place of pages.
    """

    def __init__(self, pool: Pool, keys_only: bool, rows: bool) -> None:
        self.pool, self.keys_only, self.rows = pool, keys_only, rows
        self.load, self.keys, self.store = Pairs(), Pairs(), Pairs()  # as in `Tables`, page by page
        # (page in the pool, page in the buffer, offset in the page) of each token that is stored as rows
        self.tokens: list[tuple[int, int, int]] = []
        self._buffer_pages = count()
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
        buffer_pages = [loaded[i] if i in loaded else next(self._buffer_pages) for i in range(pool.held(end))]
        self._loaded |= {sources[i]: buffer_pages[i] for i in unchanged}

        def pairs(numbers: range, ids: list[int] = ids) -> Pairs:
            return [(ids[i], buffer_pages[i]) for i in pool.entries(numbers)]

        if keys_only:
            self.keys += pairs(range(read.start, filling))
            read = range(max(read.start, filling), read.stop)
        self.load += [(sources[i], buffer_pages[i]) for i in pool.entries(read) if i not in loaded]
        if piece.decodes and self.rows and shared is None:
            (pair,) = pairs(range(filling, filling + 1))
            self.tokens.append((*pair, piece.start % size))
        else:
            self.store += pairs(pool.written(piece.start, end))
        return buffer_pages


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
    decode, rows = sum(p.single for p in pieces), batch.cache_home == "host" and not pool.is_record
    page_ids, closed, moved = owned, None, _Moved(pool, values and not pool.is_record, rows)
    copies: list[tuple[int, int]] = []
    if batch.moves_pages:
        page_ids = [moved.add(piece, owned[i], shared.get(i)) for i, piece in enumerate(pieces)]
    else:
        for i, (tokens, ids) in shared.items():  # first new tokens that go to a page that is partly filled
            entry = pool.entry(tokens // pool.page_tokens)
            if pieces[i].start == tokens and tokens % pool.page_tokens:
                copies.append((ids[entry], owned[i][entry]))
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
    size, prompts = pool.page_tokens, pieces[decode:]
    # Positions of the tokens that are written to pages, which end with the piece.
    bounds = [(p.start, p.start + p.count) for p in prompts]
    spans = [range(max(low, pool.first_written(low, high) * size), high) for low, high in bounds]
    kept = None
    if any(len(span) < piece.count for piece, span in zip(prompts, spans, strict=True)):
        firsts = accumulate((p.count for p in prompts), initial=decode)
        inside = zip(firsts, prompts, spans, strict=False)
        kept = torch.tensor([first + s - p.start for first, p, span in inside for s in span]).long().to(where)
    pages = [table[-1] for table in tables[:decode]]
    pages += [table[s // size] for table, span in zip(tables[decode:], spans, strict=True) for s in span]
    offsets = [p.start % size for p in pieces[:decode]] + [s % size for span in spans for s in span]
    return Tables(
        _padded(tables[:decode]).int().to(where),
        _int32(ends[:decode], where), _int32(pages, where), _int32(offsets, where), kept,
        _prompts(prompts, tables[decode:], decode, where), _runs(moved.load), _runs(moved.keys),
        _runs(moved.store), closed,
        tuple(rows_of(shape, moved.tokens, device)), tuple(copies),
    )  # fmt: skip


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


def rows_of(shape: PageShape, tokens: list[tuple[int, int, int]], device: torch.device) -> list[TokenRows]:
    """Return the rows of tokens, grouped by width.

    Args:
        tokens: (page in the pool, page in the buffer, offset in the page) of every token.
    """
    if not tokens:
        return []
    *pages, offsets = torch.tensor(tokens).unbind(1)
    at = offsets[:, None]
    panels = torch.arange(2 * shape.kv_heads)
    in_pool, in_buffer = (page[:, None] * len(panels) + panels for page in pages)
    return [
        TokenRows(part.width, shape.rows(part, in_pool, at), shape.rows(part, in_buffer, at).to(device))
        for part in shape.parts
    ]


def store_rows(machine: Machine, rows: TokenRows, buffer: Region, pool: Region, tier: str) -> None:
    """Copy rows from a device buffer to a pool in RAM."""
    wide = next(dtype for dtype in WIDE if rows.width % dtype.itemsize == 0)
    whole = Region(buffer.place, buffer.start, buffer.nbytes // rows.width * rows.width, wide)
    source = machine.device.view(whole).view(-1, rows.width // wide.itemsize)
    machine.tier(tier).put(source.index_select(0, rows.buffer_rows), pool, rows.pool_rows)


def copy_pages(pool: Tensor, tables: Tables) -> None:
    """Copy the shared pages of a layer that the sweep writes to (copy on write)."""
    for source, target in tables.copies:
        pool[target].copy_(pool[source])
