"""How an attention worker computes answers: new tokens are appended, and a device attends to their sequences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.guests.attention_workers import messages
from flexengine.guests.attention_workers.devices import PageDevice
from flexengine.guests.attention_workers.messages import DTYPES, WorkerQuestion, WorkerTables
from flexengine.kernels.base import AttentionOptions

Parts = tuple[Tensor, ...] | None  # of an answer: none yet, or none that the engine still waits for


@dataclass
class PendingQuestion:
    """A question."""

    ticket: int
    layer: int
    question: WorkerQuestion
    vectors: Tensor  # q, then k, then v; q alone if it goes first; on the device when it is computed
    tables: WorkerTables
    placed: WorkerTables  # the same on the device
    # attention over the cached tokens, and its log-sum-exp; None before it is computed
    part: tuple[Tensor, Tensor] | None = None

    @property
    def queries(self) -> Tensor:
        """Return the queries, [sequences, heads, head_dim]."""
        ask, sequences = self.question, len(self.tables.lengths)
        flat = self.vectors.view(DTYPES[ask.dtype])[: sequences * ask.heads * ask.head_dim]
        return flat.view(sequences, ask.heads, ask.head_dim)


class Answers:
    """Computes answers to the questions of one engine.

    Args:
        device: where pages are.
        sinks: fp32 [heads] on the device, by layer.
        pages: returns bytes of memory for pages, from its handle, first byte and number of bytes.
    """

    def __init__(
        self, device: PageDevice, sinks: Mapping[int, Tensor], pages: Callable[[int, int, int], Tensor]
    ) -> None:
        self.device, self._sinks, self._pages = device, sinks, pages

    def attend(self, asked: PendingQuestion) -> tuple[Tensor, ...]:
        """Append the new keys and values, and return attention, [sequences, heads, head_dim]. If other workers hold
        other tokens, also return its log-sum-exp, fp32 [sequences, heads]."""
        ask, placed = asked.question, asked.placed
        q, pool, form = self._begun(asked)
        self._append(asked, asked.vectors[q.nbytes :], pool, form)
        if ask.partial:
            return self._part_of(asked, q, pool, asked.tables, form)
        options = AttentionOptions(ask.scale, ask.window, ask.softcap, self._sinks_of(asked), ask.topk)
        return (self.device.kernels.decode_attention(q, pool, placed.tables, placed.lengths, options, form),)

    def attend_cached(self, asked: PendingQuestion) -> tuple[Tensor, ...]:
        """Compute attention over the tokens before the new ones, and its log-sum-exp. Return no part of the answer."""
        ask, tables = asked.question, asked.tables
        if ask.topk is not None:
            raise ValueError("queries cannot go first if the new token decides which values are read")
        q, pool, form = self._begun(asked)
        if len(asked.vectors) > q.nbytes:
            raise ValueError(f"{len(asked.vectors)} bytes of queries came, but {q.nbytes} were due")
        if not ask.partial and ask.window is not None:
            tables = tables._replace(seen=tables.lengths.clamp(max=ask.window))
        asked.part = self._part_of(asked, q, pool, tables.cached(), form)
        return ()

    def attend_new(self, asked: PendingQuestion, vectors: Tensor) -> Parts:
        """Append the new keys and values, and return what `attend` does: attention over the new tokens, merged with
        that over the cached ones. A window of one token leaves the new token only. Sinks are in its denominator.

        Return None if attention over the cached tokens has failed, which the engine was told.
        """
        ask, tables = asked.question, asked.placed
        if asked.part is None:
            return None
        q, (pool, form) = asked.queries, self._pool(ask)
        self._append(asked, self.device.put(vectors), pool, form)
        (out, lse), rows = asked.part, tables.rows.long()
        options, new_lse = AttentionOptions(ask.scale, 1, ask.softcap, self._sinks_of(asked)), lse[rows]
        pages, lengths = tables.tables[rows], tables.lengths[rows]
        new = self.device.kernels.decode_attention(q[rows], pool, pages, lengths, options, form, new_lse)
        out[rows] = messages.merge([out[rows], new], [lse[rows], new_lse])
        if not ask.partial:
            return (out,)
        lse[rows] = torch.logaddexp(lse[rows], new_lse)
        return out, lse

    def _begun(self, asked: PendingQuestion) -> tuple[Tensor, Tensor, CacheFormat | None]:
        """Return the queries, the pages, and their format, after a check and the copies of pages."""
        tables = asked.tables
        messages.check(asked.question, tables, self._sinks.get(asked.layer))
        pool, form = self._pool(asked.question)
        for source, target in tables.copies.tolist():
            pool[target].copy_(pool[source])
        asked.vectors = self.device.put(asked.vectors)
        return asked.queries, pool, form

    def _append(self, asked: PendingQuestion, vectors: Tensor, pool: Tensor, form: CacheFormat | None) -> None:
        ask, tables = asked.question, asked.placed
        k, v = vectors.view(DTYPES[ask.dtype]).view(2, len(tables.pages), ask.kv_heads, ask.head_dim)
        self.device.kernels.append(k, v, pool, tables.pages, tables.offsets, form)

    def _sinks_of(self, asked: PendingQuestion) -> Tensor | None:
        return self._sinks[asked.layer] if asked.question.sinks else None

    def _part_of(
        self, asked: PendingQuestion, q: Tensor, pool: Tensor, tables: WorkerTables, form: CacheFormat | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention over the tokens in these pages, and its log-sum-exp: -inf for sequences without any.

        Kernels take one window for all sequences, so sequences that see equally many tokens are computed together.

        Args:
            tables: the question's, or with other lengths, in RAM.
        """
        ask, put = asked.question, self.device.put
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device)
        whole = tables.seen == tables.lengths
        for seen in {None: 0, **dict.fromkeys(tables.seen[~whole].tolist())}:
            chosen = whole if seen is None else (tables.seen == seen) & ~whole
            here = torch.nonzero(chosen & (tables.seen > 0)).flatten()
            if len(here):
                rows, lengths = put(here), put(tables.lengths[here])
                options, found = AttentionOptions(ask.scale, seen, ask.softcap), lse[rows]
                pages = asked.placed.tables[rows]
                out[rows] = self.device.kernels.decode_attention(q[rows], pool, pages, lengths, options, form, found)
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
        return self._pages(ask.handle, ask.start, nbytes).view(dtype).view(shape), form
