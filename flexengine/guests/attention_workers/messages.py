"""Kinds of messages between an engine and an attention worker, and the layout of questions.

| kind | from | numbers | body |
|---|---|---|---|
| HELLO | engine | version of the protocol, number that the engine has drawn | version of flexengine |
| HELLO | worker | protocol, bytes for the engine, bytes of the worker, bytes/s of its file or 0, its number | name |
| REFUSE | worker | | why it does not serve the engine |
| BEAT | both | | none; shows that the process lives (`wire.link`) |
| ALLOCATE | engine | handle, bytes | none |
| READY | worker | handle, 1 or 0 (too little memory, or it cannot be mapped), then bytes as in HELLO | none |
| SHARE | engine | handle, bytes, 1 or 0: whether they count as pages | an open file, which both processes map |
| FREE | engine | handle | none |
| ALONE | engine | 1 begins, 0 ends | none; no other engine measures this worker meanwhile; READY answers 1 |
| WRITE | engine | handle, first byte | bytes for the memory |
| READ | engine | ticket, handle, first byte, bytes | none |
| DATA | worker | ticket | bytes of the memory |
| TABLES | engine | gpu_batch, group, pages of a table, new tokens, copies | page tables, see `tables.Tables` |
| SINKS | engine | layer | fp32 [heads] |
| ASK | engine | ticket, layer | a WorkerQuestion, then q, k, v unless they are in shared memory; only q if `first` |
| CACHED | worker | ticket | none; attention of a `first` question over the cached tokens is computed |
| ADD | engine | ticket, first byte, bytes | k, v of a `first` question, unless they are in shared memory |
| ANSWER | worker | ticket | attention, then its log-sum-exp if `partial`; none if they are in shared memory |
| FAILED | worker | ticket | why it could not answer |
| BYE | engine | | none; the connection ends |
"""

import enum
import struct
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

PROTOCOL = 3  # raise it with every change of messages or of their meaning
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
NONE = -1  # in a packed question, for a field that is None
# Kinds of messages, numbered from 1; see the table. BEAT is that of `wire.link`.
MessageKind = enum.IntEnum(
    "MessageKind",
    "HELLO REFUSE BEAT ALLOCATE READY FREE WRITE READ DATA TABLES SINKS ASK ANSWER FAILED BYE SHARE ADD CACHED ALONE",
)

_QUESTION = struct.Struct("<16q3d4q")


@dataclass(frozen=True, kw_only=True)
class WorkerQuestion:
    """Attention of one gpu_batch in one layer, over pages of one worker."""

    NBYTES: ClassVar = _QUESTION.size  # packed

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
    window: int | None = None  # tokens that a query sees; None for all
    sinks: bool = False  # whether the layer has sinks, which came before
    # whether other workers hold other tokens of the sequences. The window is then in the page tables.
    partial: bool = False
    first: bool = False  # whether queries go first: keys and values follow in a message ADD
    scale: float  # factor of the scores
    softcap: float | None = None  # cap of the scores; None for none
    topk: float | None = None  # share of the values that are read; None for all
    shared: int | None = None  # handle of shared memory for q, k, v and the output; None if messages hold them
    at: int = 0  # first byte of q, k, v in it, or of q if `first`
    nbytes: int = 0  # their bytes
    out: int = 0  # first byte of the output in it

    def pack(self) -> Tensor:
        """Return the question as uint8 [NBYTES]."""
        values = (getattr(self, name) for name in _NAMES)
        packed = _QUESTION.pack(*(NONE if value is None else value for value in values))
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @staticmethod
    def unpack(body: Tensor) -> "WorkerQuestion":
        """Return the question in uint8 [NBYTES]."""
        values = dict(zip(_NAMES, _QUESTION.unpack(body.numpy().tobytes()), strict=True))
        missing = (name for name in ("window", "softcap", "topk", "shared") if values[name] == NONE)
        return WorkerQuestion(**values | dict.fromkeys(missing))


_NAMES = tuple(field.name for field in fields(WorkerQuestion))


def text(words: str) -> Tensor:
    """Return text as a body."""
    return torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)


def words(body: Tensor) -> str:
    """Return the text in a body."""
    return body.numpy().tobytes().decode(errors="replace")
