"""Where the attention of a layer reads and writes the pages of a KV cache, for calls that compute whole layers."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flexengine.codec.cache import CacheFormat


class Room(NamedTuple):
    """Sizes of a pool."""

    pages: int  # number of pages
    kv_heads: int  # key/value heads
    page_tokens: int  # tokens of a page
    dim: int  # elements of a head


class PromptPieces(NamedTuple):
    """Consecutive pieces of equal length: tokens first .. first + rows * length - 1 of the packed batch."""

    first: int  # index of the first token in the packed batch
    rows: int  # number of pieces
    length: int  # tokens of a piece
    past: int  # tokens cached before the piece; 0 if there are several pieces
    table: Tensor | None  # int32 [pages], page table of the piece; None if `past` is 0


class PagedTokens(NamedTuple):
    """The tokens of a gpu_batch in the pages of its sequences."""

    # tables, lengths: as in `Kernels.decode_attention`. These sequences' tokens are the first.
    tables: Tensor
    lengths: Tensor
    # pages, offsets: as in `Kernels.append`, of all tokens.
    pages: Tensor
    offsets: Tensor
    prompts: Sequence[PromptPieces] = ()  # the other tokens, in order


class PagedAttention(NamedTuple):
    """Attention of a gpu_batch in one layer, over cached and new tokens."""

    heads: int  # query heads
    # pool, tables, lengths, window, form: as in `Kernels.decode_attention`. These sequences' tokens are the first.
    pool: Tensor
    tables: Tensor
    lengths: Tensor
    window: int | None
    form: CacheFormat | None
    # pages, offsets: as in `Kernels.append`, of all tokens.
    pages: Tensor
    offsets: Tensor
    # int64 [n, 5], the prompts after these tokens: first token, rows, length, cached tokens, first entry of the page
    # table. None if there are no prompts.
    pieces: Tensor | None
    entries: Tensor  # int32, entries of the prompts' page tables
    room: Room  # sizes of the pool
    memory: Tensor  # scratch memory. Attention of prompts uses the bytes from `split` on
    split: int  # bytes of the scratch memory of decode attention
    rounded: bool = False  # as in `AttentionOptions`

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that calls read or write."""
        pieces = () if self.pieces is None else (self.pieces, self.entries)
        return (self.pool, self.tables, self.lengths, self.pages, self.offsets, self.memory, *pieces)

    @property
    def sizes(self) -> tuple[object, ...]:
        """Values that are equal in all gpu_batches that use one recorded call."""
        pieces = None if self.pieces is None else len(self.pieces)
        plain = (self.heads, self.window, self.form, self.room, self.split, self.rounded)
        return (*plain, self.pool.dtype, *self.tables.shape, len(self.pages), pieces)
