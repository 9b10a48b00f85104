"""Kinds of messages between an engine and an attention worker, and the layout of questions.

| kind | from | numbers | body |
|---|---|---|---|
| HELLO | engine | version of the protocol, number that the engine has drawn | version of flexengine |
| HELLO | worker | protocol, bytes for the engine, bytes of the worker, bytes/s of its file or 0, its number | name |
| REFUSE | worker | | why it does not serve the engine |
| BEAT | both | | none; shows that the process lives |
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
| ASK | engine | ticket, layer | a Question, then q, k, v unless they are in shared memory; only q if `first` |
| CACHED | worker | ticket | none; attention of a `first` question over the cached tokens is computed |
| ADD | engine | ticket, first byte, bytes | k, v of a `first` question, unless they are in shared memory |
| ANSWER | worker | ticket | attention, then its log-sum-exp if `partial`; none if they are in shared memory |
| FAILED | worker | ticket | why it could not answer |
| BYE | engine | | none; the connection ends |
"""

import enum
import struct
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

PROTOCOL = 3  # raise it with every change of messages or of their meaning
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
NONE = -1  # a window, softcap or share that is not given


class Kind(enum.IntEnum):
    HELLO = 1
    REFUSE = 2
    BEAT = 3
    ALLOCATE = 4
    READY = 5
    FREE = 6
    WRITE = 7
    READ = 8
    DATA = 9
    TABLES = 10
    SINKS = 11
    ASK = 12
    ANSWER = 13
    FAILED = 14
    BYE = 15
    SHARE = 16
    ADD = 17
    CACHED = 18
    ALONE = 19


_QUESTION = struct.Struct("<16q3d4q")


@dataclass(frozen=True)
class Question:
    """Attention of one gpu_batch in one layer, over pages of one worker.

    Attributes:
        handle: number of the memory that holds the pages.
        start: first byte of the layer's pages.
        pages: number of pages.
        page_tokens: tokens of a page.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: elements of a head.
        bits: bits of an encoded element; 0 if pages are not encoded.
        pool_dtype: index in DTYPES of the elements of pages.
        dtype: index in DTYPES of q, k, v and the output.
        batch: number of the gpu_batch, whose tables came before.
        group: group of layers.
        window: tokens that a query sees; NONE for all.
        sinks: 1 if the layer has sinks, which came before.
        partial: 1 if other workers hold other tokens of the sequences. The window is then in the page tables.
        first: 1 if queries go first: keys and values follow in a message ADD.
        scale: factor of the scores.
        softcap: cap of the scores; NONE for none.
        topk: share of the values that are read; NONE for all.
        shared: handle of shared memory for q, k, v and the output; NONE if messages hold them.
        at: first byte of q, k, v in it, or of q if `first`.
        nbytes: their bytes.
        out: first byte of the output in it.
    """

    handle: int
    start: int
    pages: int
    page_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    bits: int
    pool_dtype: int
    dtype: int
    batch: int
    group: int
    window: int
    sinks: int
    partial: int
    first: int
    scale: float
    softcap: float
    topk: float
    shared: int = NONE
    at: int = 0
    nbytes: int = 0
    out: int = 0

    def pack(self) -> Tensor:
        """Return the question as uint8 [QUESTION_BYTES]."""
        return torch.frombuffer(bytearray(_QUESTION.pack(*astuple(self))), dtype=torch.uint8)

    @staticmethod
    def unpack(body: Tensor) -> "Question":
        """Return the question in uint8 [QUESTION_BYTES]."""
        return Question(*_QUESTION.unpack(body.numpy().tobytes()))


QUESTION_BYTES = _QUESTION.size


def text(words: str) -> Tensor:
    """Return text as a body."""
    return torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)


def words(body: Tensor) -> str:
    """Return the text in a body."""
    return body.numpy().tobytes().decode(errors="replace")
