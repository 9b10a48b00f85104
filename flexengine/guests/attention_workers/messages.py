"""Kinds of messages between an engine and an attention worker, and the layout of questions.

| kind | from | numbers | body |
|---|---|---|---|
| HELLO | engine | version of the protocol, number that the engine has drawn | version of flexengine, see `text` |
| HELLO | worker | protocol, bytes for the engine, bytes of the worker, its rate or 0, number | name, kind of memory |
| REFUSE | worker | | why it does not serve the engine, or no longer |
| BEAT | both | | none; shows that the process lives (`wire.link`) |
| ALLOCATE | engine | handle, bytes | none |
| READY | worker | handle, 1 or 0 (too little memory, or it cannot be mapped), then bytes as in HELLO | none |
| SHARE | engine | handle, bytes, 1 for pages, 2 if pages pass through them | an open file, which both map |
| FREE | engine | handle | none |
| ALONE | engine | 1 begins, 0 ends | none; no other engine measures this worker meanwhile; READY answers 1 |
| WAITS | worker | | what an engine that said ALONE waits for |
| WRITE | engine | handle, first byte | bytes for the memory |
| READ | engine | ticket, handle, first byte, bytes | none |
| DATA | worker | ticket | bytes of the memory; none if PUT or GET has ended |
| PUT | engine | ticket, first byte in shared memory | int64 [n, 3]: handle, first byte, bytes; copied to pages |
| GET | engine | as PUT | as PUT; copied from pages |
| TABLES | engine | gpu_batch, group, pages of a table, new tokens, copies | page tables, see WorkerTables |
| SINKS | engine | layer | fp32 [heads] |
| ASK | engine | ticket, layer, bytes of the question | question, and, unless shared, q, k, v or, if `first`, q |
| CACHED | worker | ticket | none; attention of a `first` question over the cached tokens is computed |
| ADD | engine | ticket, first byte, bytes | k, v of a `first` question, unless they are in shared memory |
| ANSWER | worker | ticket | attention, then its log-sum-exp if `partial`; none if they are in shared memory |
| FAILED | worker | ticket | why it could not answer |
| BYE | engine | | none; the connection ends |
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.guests.wire.link import MOST_BODY, MOST_TEXT, Broken

PROTOCOL = 7  # raise it with every change of messages or of their meaning
MOST_SPANS = 1024  # rows of a message PUT or GET
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
# Kinds of messages, numbered from 1; see the table. BEAT is that of `wire.link`.
MessageKind = enum.IntEnum(
    "MessageKind",
    "HELLO REFUSE BEAT ALLOCATE READY FREE WRITE READ DATA TABLES SINKS ASK ANSWER FAILED BYE SHARE ADD CACHED ALONE"
    " WAITS PUT GET",
)
# Most bytes of a body that an engine takes, by kind. It compares those of DATA and ANSWER with what it has asked for.
TO_ENGINE: dict[int, int] = {
    **dict.fromkeys((MessageKind.HELLO, MessageKind.REFUSE, MessageKind.FAILED, MessageKind.WAITS), MOST_TEXT),
    **dict.fromkeys((MessageKind.READY, MessageKind.CACHED), 0),
    **dict.fromkeys((MessageKind.DATA, MessageKind.ANSWER), MOST_BODY),
}


def to_worker(pages: int, records: int) -> dict[int, int]:
    """Return the most bytes of a body that a worker takes, by kind. pages, records: bytes of its memory for pages, and
    for page tables and questions."""
    kinds = MessageKind
    limits: dict[int, int] = {kinds.SHARE: 1, kinds.WRITE: pages}
    limits |= dict.fromkeys((kinds.TABLES, kinds.SINKS, kinds.ASK, kinds.ADD), records)
    limits |= dict.fromkeys((kinds.PUT, kinds.GET), MOST_SPANS * 24)
    return limits | dict.fromkeys((kinds.ALLOCATE, kinds.FREE, kinds.ALONE, kinds.READ, kinds.BYE), 0)


def text(words: str) -> Tensor:
    """Return text as a body. That of HELLO and REFUSE is UTF-8 in all protocols, so that processes of different
    versions can say why they part."""
    return torch.frombuffer(bytearray(words.encode()[:MOST_TEXT]), dtype=torch.uint8)


def words(body: Tensor) -> str:
    """Return the text in a body."""
    return body.numpy().tobytes().decode(errors="replace")


class WorkerQuestion(NamedTuple):
    """Attention of one gpu_batch in one layer, over pages of one worker."""

    handle: int  # number of the memory that holds the pages
    start: int  # first byte of the layer's pages
    pages: int  # number of pages
    page_tokens: int  # tokens of a page
    heads: int  # query heads
    kv_heads: int  # KV heads
    head_dim: int  # elements of a head
    bits: int  # bits of an encoded element; 0 if pages are not encoded
    pool_dtype: int  # index in DTYPES of the elements of pages
    dtype: int  # index in DTYPES of q, k, v and the output
    batch: int  # number of the gpu_batch, whose tables came before
    group: int  # group of layers
    scale: float  # factor of the scores
    window: int | None = None  # tokens that a query sees; None for all
    softcap: float | None = None  # cap of the scores; None for none
    topk: float | None = None  # share of the values that are read; None for all
    sinks: bool = False  # whether the layer has sinks, which came before
    # whether other workers hold other tokens of the sequences. The window is then in the page tables.
    partial: bool = False
    first: bool = False  # whether queries go first: keys and values follow in a message ADD
    shared: int | None = None  # handle of shared memory for q, k, v and the output; None if messages hold them
    at: int = 0  # first byte of q, k, v in it, or of q if `first`
    nbytes: int = 0  # their bytes
    out: int = 0  # first byte of the output in it


class WorkerTables(NamedTuple):
    """Page tables of a gpu_batch for a group of layers, all int32."""

    tables: Tensor  # [sequences, pages], pages of each sequence
    lengths: Tensor  # [sequences], tokens of each sequence in these pages, with the new one if it is here
    seen: Tensor  # [sequences], number of the last of them that the query sees
    pages: Tensor  # [new tokens], page of each new token
    offsets: Tensor  # [new tokens], its offset in the page
    rows: Tensor  # [new tokens], its sequence
    copies: Tensor  # [copies, 2], pages (from, to) that are copied before tokens are appended

    def cached(self) -> "WorkerTables":
        """Return the tables without the new tokens."""
        new = torch.zeros_like(self.lengths)
        new[self.rows.long()] = 1
        return self._replace(lengths=self.lengths - new, seen=self.seen - new)

    @staticmethod
    def unpack(numbers: Tensor, pages: int, new: int, copies: int) -> "WorkerTables":
        """Return the page tables in the body of a message. Raise Broken if it has a wrong length."""
        negative = min(pages, new, copies) < 0
        sequences, rest = (0, 1) if negative else divmod(len(numbers) - 3 * new - 2 * copies, pages + 2)
        if rest or sequences < 0:
            raise Broken(f"page tables of {len(numbers)} numbers came, which fit no number of sequences")
        sizes = [sequences * pages, sequences, sequences, new, new, new, 2 * copies]
        tables, lengths, seen, at, offsets, rows, both = torch.split(numbers, sizes)
        return WorkerTables(tables.view(sequences, pages), lengths, seen, at, offsets, rows, both.view(copies, 2))


def check(ask: WorkerQuestion, tables: WorkerTables, sinks: Tensor | None) -> None:
    """Raise ValueError if a question or its tables name memory that does not exist: kernels read without checks."""
    sizes = (ask.pages, ask.page_tokens, ask.heads, ask.kv_heads, ask.head_dim)
    if min(sizes) < 1 or ask.heads % ask.kv_heads:
        raise ValueError(
            f"pages, page_tokens, heads, kv_heads and head_dim are {sizes}; they must be at least 1, and"
            " kv_heads must divide heads"
        )
    if not (0 <= ask.dtype < len(DTYPES) and 0 <= ask.pool_dtype < len(DTYPES)):
        raise ValueError(f"dtypes are numbers {ask.dtype} and {ask.pool_dtype}; they must be 0 to {len(DTYPES) - 1}")
    if ask.topk is not None and not 0 <= ask.topk <= 1:
        raise ValueError(f"the share of values is {ask.topk}; it must be 0 to 1")
    if ask.sinks and (sinks is None or len(sinks) != ask.heads):
        raise ValueError(f"the layer has {0 if sinks is None else len(sinks)} sinks, but {ask.heads} heads")
    if len(tables.pages) != len(tables.lengths) and not ask.partial:
        raise ValueError(f"{len(tables.pages)} new tokens came for {len(tables.lengths)} sequences")
    limits = {"page tables": (tables.tables, ask.pages), "pages": (tables.pages, ask.pages),
              "offsets": (tables.offsets, ask.page_tokens), "copied pages": (tables.copies, ask.pages),
              "rows": (tables.rows, len(tables.lengths)),
              "lengths": (tables.lengths, tables.tables.shape[1] * ask.page_tokens + 1),
              "seen tokens": (tables.seen, tables.tables.shape[1] * ask.page_tokens + 1)}  # fmt: skip
    for what, (numbers, end) in limits.items():
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
            raise ValueError(f"{what} hold {int(numbers.min())} to {int(numbers.max())}; they must be below {end}")
    grown = tables.lengths[tables.rows.long()] if ask.partial else tables.lengths
    if grown.numel() and int(grown.min()) < 1:
        raise ValueError("lengths hold 0; they must be at least 1")


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None) -> Tensor:
    """Return attention over the union of disjoint sets of keys and values, which lie on different devices, from the
    results over each set.

    Args:
        outs: [n, heads, head_dim] per set.
        lses: fp32 [n, heads] per set, logs of the denominators, see `lse` of Kernels.decode_attention; -inf for
            a set without keys, whose `outs` is ignored. Sinks may be part of one set's denominator only.
        sinks: fp32 [heads] of no set, which add to the denominator only; None if there are none.

    Returns:
        [n, heads, head_dim] in the dtype of `outs`, summed in fp32. The log of the merged denominator, without `sinks`,
        is torch.logsumexp of `lses`.
    """
    logs = torch.stack(list(lses)).float()
    total = torch.logsumexp(logs, 0)
    shares = torch.exp(logs - total)[..., None]
    parts = torch.stack([out.float() for out in outs])
    out = (parts.masked_fill(shares == 0, 0.0) * shares).sum(0).to(outs[0].dtype)
    return out if sinks is None else (out.float() * torch.sigmoid(total - sinks)[..., None]).to(out.dtype)
