"""A KV cache in fewer bits: the layout of a page that holds encoded tokens of one layer.

A page is an array of bytes. For K, then V, for every key/value head, it holds one panel:

    codes    [page_tokens, row_bytes] uint8, one row per token
    scale    [groups, page_tokens] fp16
    minimum  [groups, page_tokens] fp16

A dequantized element is minimum + code * scale. The bytes of a token depend on this token alone. Within a group of g
elements, byte i holds the codes of elements i + e * g * bits / 8 for e = 0, 1, ..., the first code in the lowest bits.
So a kernel that widens neighbouring bytes gets neighbouring elements without a shuffle.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.errors import InvalidInput

if TYPE_CHECKING:
    from flexengine.codec.packed import Groupwise

BITS = (8, 4, 2)
GROUPS = (64, 32, 16, 8)
# Largest group by bits; kernels/quantized_attention.h multiplies groups of this size as codes.
WIDEST = {8: 64, 4: 32, 2: 64}


class PanelPart(NamedTuple):
    """Location of one kind of data of a token's K, or V, in a panel. The token at `offset` in its page has its bytes at
    start + offset * width."""

    width: int  # bytes per token and start
    starts: tuple[int, ...]  # byte offsets in the panel


class Panels(NamedTuple):
    """Views of the pages of a pool. Index 1 is 0 for K, 1 for V."""

    codes: Tensor  # uint8 [n_pages, 2, kv_heads, page_tokens, row_bytes]
    scale: Tensor  # fp16 [n_pages, 2, kv_heads, groups, page_tokens]
    minimum: Tensor  # fp16, likewise


@dataclass(frozen=True)
class CacheFormat:
    """Format of the encoded K and V of one layer. Groups run along the elements of a head, token by token."""

    bits: int  # of a code
    kv_heads: int
    page_tokens: int
    dim: int  # elements of a head

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.dim < 8 or self.dim % 8 or self.kv_heads < 1 or self.page_tokens < 1:
            raise InvalidInput(
                f"an encoded cache of {self.bits} bits, {self.kv_heads} heads of {self.dim} and pages of"
                f" {self.page_tokens} tokens: bits must be one of {BITS}, heads a multiple of 8 wide"
            )

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group}"

    @property
    def group(self) -> int:
        """Number of elements that share a scale and a minimum."""
        return next(group for group in GROUPS if group <= WIDEST[self.bits] and self.dim % group == 0)

    @property
    def groups(self) -> int:
        """Number of groups in one token's K, or V, of one head."""
        return self.dim // self.group

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one token's K, or V, of one head."""
        return self.dim * self.bits // 8

    @property
    def panel_bytes(self) -> int:
        """Bytes of K, or V, of one head in one page."""
        return self.page_tokens * (self.row_bytes + 4 * self.groups)

    @property
    def parts(self) -> tuple[PanelPart, PanelPart]:
        """Location of the codes, and of the scales with the minima."""
        codes = self.page_tokens * self.row_bytes
        halves = range(codes, self.panel_bytes, 2 * self.page_tokens)
        return PanelPart(self.row_bytes, (0,)), PanelPart(2, tuple(halves))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of its tokens in all heads, with scales and minima."""
        return 2 * self.kv_heads * self.panel_bytes

    @cached_property
    def codec(self) -> "Groupwise":
        """The codec of a group. Below 8 bits it tries several ranges and takes the one with the least error."""
        from flexengine.codec.packed import Groupwise  # here and below: few jobs encode

        return Groupwise(f"cache{self.bits}", self.bits, self.group, fitted=self.bits < 8, alike=True)

    def panels(self, pool: Tensor) -> Panels:
        """Return views of a pool, which is uint8 [n_pages, page_bytes], contiguous, at an even address."""
        panels = pool.view(len(pool), 2, self.kv_heads, self.panel_bytes)
        split = self.page_tokens * self.row_bytes
        codes = panels[..., :split].unfold(-1, self.row_bytes, self.row_bytes)
        halves = panels[..., split:].view(torch.float16).unfold(-1, self.page_tokens, self.page_tokens)
        return Panels(codes, halves[..., : self.groups, :], halves[..., self.groups :, :])

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes uint8 [..., row_bytes], scale and minimum fp16 [..., groups] of rows [..., dim].

        A group with a number that is not finite, or beyond 65504, gets NaN as scale and minimum and decodes to NaN.
        """
        from flexengine.codec.packed import HALF, pack

        groups = x.float().reshape(*x.shape[:-1], self.groups, self.group)
        bad = ~(groups.abs() <= HALF.max).all(-1)
        codes, scale, minimum = self.codec.fit(groups.masked_fill(bad[..., None], 0.0))
        packed = pack(codes.view(*codes.shape[:-1], 8 // self.bits, -1), self.bits).flatten(-3)
        return packed, scale.masked_fill(bad, torch.nan), minimum.masked_fill(bad, torch.nan)

    def dequantize(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the dequantized rows, fp32 [..., dim]."""
        from flexengine.codec.packed import unpack

        groups = unpack(codes.reshape(*scale.shape, 1, -1), self.bits).flatten(-2).float()
        rows: Tensor = minimum.float()[..., None] + groups * scale.float()[..., None]
        return rows.flatten(-2)
