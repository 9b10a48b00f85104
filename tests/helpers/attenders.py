"""A second attender: plain torch in a thread of its own, reached by messages."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.model.forward import Attend
from flexengine.schedule.batches import Batch
from flexengine.worker.attend import Attender
from flexengine.worker.cache import Cache, View, copy_pages
from flexengine.worker.cache.tables import Tables


class Message(NamedTuple):
    """Queries, keys and values of a gpu_batch, each [tokens, heads, head_dim], and the options of its attention."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class PlainAttender(Attender):
    """Computes attention over exact pages of the host with einsum and softmax, in a thread that only its messages
    reach.

    Attributes:
        answered: number of gpu_batches and layers whose attention it computed.
    """

    answered = 0

    def __init__(self, cache: Cache, dtype: torch.dtype) -> None:
        self.cache = cache
        self._thread = ThreadPoolExecutor(1)
        self._asked: dict[int, tuple[Message, int]] = {}  # by gpu_batch: on the device; width of a head's output
        self._sent: dict[int, Message] = {}
        self._computed: dict[int, Tensor] = {}
        self._fetched: dict[int, Tensor] = {}

    def begin(self, batches: Mapping[int, Batch]) -> None:
        assert all(piece.count == 1 for batch in batches.values() for piece in batch.pieces)
        for by_batch in (self._asked, self._sent, self._computed, self._fetched):
            by_batch.clear()

    def ask(self, k: int, event: Attend, view: View) -> None:
        width, event = event.v.shape[-1], self.cache.prepared(event, view)
        qkv = (x[0].transpose(0, 1).clone() for x in (event.q, event.k, event.v))
        sinks = None if event.sinks is None else event.sinks.clone()
        self._asked[k] = Message(event.layer, *qkv, event.scale, event.window, event.softcap, sinks), width

    def send(self, k: int) -> None:
        message, _ = self._asked[k]
        self._sent[k] = Message(*(x.cpu() if isinstance(x, Tensor) else x for x in message))

    def attend(self, k: int, view: View) -> None:
        message = self._sent.pop(k)
        pool, form = self.cache.on_host(message.layer)
        assert form is None
        work: Future[Tensor] = self._thread.submit(_attention, message, pool, self.cache.tables(view, message.layer))
        self._computed[k] = work.result()
        self.answered += 1

    def fetch(self, k: int) -> None:
        message, _ = self._asked[k]
        self._fetched[k] = self._computed.pop(k).to(message.q)

    def answer(self, k: int) -> Tensor:
        return self.cache.restored(self._fetched.pop(k)[None], self._asked[k][1])

    def close(self) -> None:
        self._thread.shutdown()
        self.begin({})


@torch.no_grad()
def _attention(message: Message, pool: Tensor, tables: Tables) -> Tensor:
    """Append keys and values to the pool, [pages, 2, kv_heads, page_tokens, head_dim], and return attention."""
    copy_pages(pool, tables)
    pages, offsets = tables.pages.long(), tables.offsets.long()
    pool[pages, 0, :, offsets], pool[pages, 1, :, offsets] = message.k, message.v
    out = torch.empty_like(message.q)
    group = message.q.shape[1] // message.k.shape[1]
    for i, length in enumerate(tables.lengths.tolist()):
        kv = pool[tables.tables[i, : -(-length // pool.shape[3])].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)
        seen = slice(max(0, length - (message.window or length)), length)
        k, v = (x[seen].repeat_interleave(group, 1).double() for x in kv)  # [tokens, heads, head_dim]
        scores = torch.einsum("hd,thd->ht", message.q[i].double(), k) * message.scale
        if message.softcap:
            scores = message.softcap * torch.tanh(scores / message.softcap)
        if message.sinks is not None:
            scores = torch.cat([scores, message.sinks.double()[:, None]], 1)
        out[i] = torch.einsum("ht,thd->hd", scores.softmax(1)[:, : len(k)], v)
    return out
