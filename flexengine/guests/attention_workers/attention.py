"""Attention of a worker: answers to questions about pages in its memory."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine import kernels
from flexengine.codec.cache import CacheFormat
from flexengine.guests.attention_workers.messages import DTYPES, WorkerQuestion
from flexengine.guests.attention_workers.tables import WorkerTables, check, merge
from flexengine.kernels.base import AttentionOptions


@dataclass
class PendingQuestion:
    """A question.

    Attributes:
        part: attention over the cached tokens, and its log-sum-exp; None before it is computed.
    """

    ticket: int
    layer: int
    question: WorkerQuestion
    vectors: Tensor  # q, then k, then v; q alone if it goes first
    tables: WorkerTables
    part: tuple[Tensor, Tensor] | None = None

    @property
    def queries(self) -> Tensor:
        """Return the queries, [sequences, heads, head_dim]."""
        ask, sequences = self.question, len(self.tables.lengths)
        flat = self.vectors.view(DTYPES[ask.dtype])[: sequences * ask.heads * ask.head_dim]
        return flat.view(sequences, ask.heads, ask.head_dim)


class PageAttention(ABC):
    """Computes decode attention over pages in the memory of one engine.

    Attributes:
        sinks: fp32 [heads], by layer.
    """

    def __init__(self) -> None:
        self.kernels = kernels.load()
        self.sinks: dict[int, Tensor] = {}

    @abstractmethod
    def _part(self, handle: int, start: int, nbytes: int) -> Tensor:
        """Return bytes of memory, uint8. Raise Broken if there are none."""

    def _attend(self, asked: PendingQuestion) -> tuple[Tensor, ...]:
        """Append the new keys and values, and return attention, [sequences, heads, head_dim]. If other workers hold
        other tokens, also return its log-sum-exp, fp32 [sequences, heads]."""
        ask, tables = asked.question, asked.tables
        q, pool, form = self._begun(asked)
        self._append(asked, asked.vectors[q.nbytes :], pool, form)
        if ask.partial:
            return self._part_of(ask, q, pool, tables, form)
        options = AttentionOptions(ask.scale, ask.window, ask.softcap, self._sinks_of(asked), ask.topk)
        return (self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, options, form),)

    def _attend_cached(self, asked: PendingQuestion) -> tuple[Tensor, ...]:
        """Compute attention over the tokens before the new ones, and its log-sum-exp. Return no part of the answer."""
        ask, tables = asked.question, asked.tables
        if ask.topk is not None:
            raise ValueError("queries cannot go first if the new token decides which values are read")
        q, pool, form = self._begun(asked)
        if len(asked.vectors) > q.nbytes:
            raise ValueError(f"{len(asked.vectors)} bytes of queries came, but {q.nbytes} were due")
        if not ask.partial and ask.window is not None:
            tables = tables._replace(seen=tables.lengths.clamp(max=ask.window))
        asked.part = self._part_of(ask, q, pool, tables.cached(), form)
        return ()

    def _attend_new(self, asked: PendingQuestion, vectors: Tensor) -> tuple[Tensor, ...] | None:
        """Append the new keys and values, and return what `_attend` does: attention over the new tokens, merged with
        that over the cached ones. A window of one token leaves the new token only. Sinks are in its denominator.

        Return None if attention over the cached tokens has failed, which the engine was told.
        """
        ask, tables = asked.question, asked.tables
        if asked.part is None:
            return None
        q, (pool, form) = asked.queries, self._pool(ask)
        self._append(asked, vectors, pool, form)
        (out, lse), rows = asked.part, tables.rows.long()
        options, new_lse = AttentionOptions(ask.scale, 1, ask.softcap, self._sinks_of(asked)), lse[rows]
        pages, lengths = tables.tables[rows], tables.lengths[rows]
        new = self.kernels.decode_attention(q[rows], pool, pages, lengths, options, form, new_lse)
        out[rows] = merge([out[rows], new], [lse[rows], new_lse])
        if not ask.partial:
            return (out,)
        lse[rows] = torch.logaddexp(lse[rows], new_lse)
        return out, lse

    def _begun(self, asked: PendingQuestion) -> tuple[Tensor, Tensor, CacheFormat | None]:
        """Return the queries, the pages, and their format, after a check and the copies of pages."""
        tables = asked.tables
        check(asked.question, tables, self.sinks.get(asked.layer))
        pool, form = self._pool(asked.question)
        for source, target in tables.copies.tolist():
            pool[target].copy_(pool[source])
        return asked.queries, pool, form

    def _append(self, asked: PendingQuestion, vectors: Tensor, pool: Tensor, form: CacheFormat | None) -> None:
        ask, tables = asked.question, asked.tables
        k, v = vectors.view(DTYPES[ask.dtype]).view(2, len(tables.pages), ask.kv_heads, ask.head_dim)
        self.kernels.append(k, v, pool, tables.pages, tables.offsets, form)

    def _sinks_of(self, asked: PendingQuestion) -> Tensor | None:
        return self.sinks[asked.layer] if asked.question.sinks else None

    def _part_of(
        self, ask: WorkerQuestion, q: Tensor, pool: Tensor, tables: WorkerTables, form: CacheFormat | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention over the tokens in these pages, and its log-sum-exp: -inf for sequences without any.

        Kernels take one window for all sequences, so sequences that see equally many tokens are computed together.
        """
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        whole = tables.seen == tables.lengths
        for seen in {None: 0, **dict.fromkeys(tables.seen[~whole].tolist())}:
            chosen = whole if seen is None else (tables.seen == seen) & ~whole
            rows = torch.nonzero(chosen & (tables.seen > 0)).flatten()
            if len(rows):
                options, found = AttentionOptions(ask.scale, seen, ask.softcap), lse[rows]
                pages, lengths = tables.tables[rows], tables.lengths[rows]
                out[rows] = self.kernels.decode_attention(q[rows], pool, pages, lengths, options, form, found)
                lse[rows] = found
        return out, lse

    def _pool(self, ask: WorkerQuestion) -> tuple[Tensor, CacheFormat | None]:
        if ask.bits:
            form = CacheFormat(ask.bits, ask.kv_heads, ask.page_tokens, ask.head_dim)
            shape: tuple[int, ...] = (ask.pages, form.page_bytes)
        else:
            form, shape = None, (ask.pages, 2, ask.kv_heads, ask.page_tokens, ask.head_dim)
        dtype = DTYPES[ask.pool_dtype]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._part(ask.handle, ask.start, nbytes).view(dtype).view(shape), form
