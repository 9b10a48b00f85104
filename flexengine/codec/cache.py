"""A KV cache in fewer bits: how the encoded tokens of one layer lie in a page.

A page is a string of bytes. For K, then V, for every key/value head, it holds one panel:

    codes    [page_tokens, row_bytes] uint8, one row a token
    scale    [groups, page_tokens] fp16
    minimum  [groups, page_tokens] fp16

x' = minimum + code * scale. A token's bytes depend on that token alone. Within a group of g elements, byte i holds the
codes of elements i + e * g * bits / 8 for e = 0, 1, ..., the first in the lowest bits: so neighbouring bytes, widened,
are neighbouring elements, without a shuffle.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.base import pack, packed_bytes, unpack
from flexengine.codec.groupwise import HALF, Groupwise
from flexengine.errors import InvalidInput

BITS = (8, 4, 2)
GROUPS = (64, 32, 16, 8)
WIDEST = {8: 64, 4: 32, 2: 64}  # group, by bits: what kernels/coded.h multiplies as codes


class Part(NamedTuple):
    """Where the K, or V, of tokens lies in a panel: of each token `width` bytes at offset * width from every start."""

    width: int
    starts: tuple[int, ...]


class Panels(NamedTuple):
    """Views of the pages of a pool: codes [n_pages, 2, kv_heads, page_tokens, row_bytes]; scale and minimum
    [n_pages, 2, kv_heads, groups, page_tokens]. Index 1 is 0 for K, 1 for V."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor


@dataclass(frozen=True)
class CacheForm:
    """K and V of one layer in `bits` bits, in groups along the elements of a head, each token by itself."""

    bits: int
    kv_heads: int
    page_tokens: int
    dim: int

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
        """Elements that share a scale and a minimum."""
        return next(group for group in GROUPS if group <= WIDEST[self.bits] and self.dim % group == 0)

    @property
    def groups(self) -> int:
        """Groups of one row."""
        return self.dim // self.group

    @property
    def row_bytes(self) -> int:
        """Codes of one token's K, or V, of one head."""
        return packed_bytes(self.dim, self.bits)

    @property
    def panel_bytes(self) -> int:
        """K, or V, of one head in one page."""
        return self.page_tokens * (self.row_bytes + 4 * self.groups)

    @property
    def parts(self) -> tuple[Part, Part]:
        """Codes, and scales with minima."""
        codes = self.page_tokens * self.row_bytes
        return Part(self.row_bytes, (0,)), Part(2, tuple(range(codes, self.panel_bytes, 2 * self.page_tokens)))

    @property
    def pieces(self) -> int:
        """Places in a panel where parts of a token's K, or V, lie: its codes, each scale, each minimum."""
        return sum(len(part.starts) for part in self.parts)

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all heads, scales and minima included."""
        return 2 * self.kv_heads * self.panel_bytes // self.page_tokens

    @property
    def page_bytes(self) -> int:
        return 2 * self.kv_heads * self.panel_bytes

    @cached_property
    def codec(self) -> Groupwise:
        """What encodes a group: of fewer than 8 bits with the range that costs least."""
        return Groupwise(f"cache{self.bits}", self.bits, self.group, fitted=self.bits < 8, alike=True)

    def panels(self, pool: Tensor) -> Panels:
        """pool: uint8 [n_pages, page_bytes], contiguous, at an even address."""
        panels = pool.view(len(pool), 2, self.kv_heads, self.panel_bytes)
        split = self.page_tokens * self.row_bytes
        codes = panels[..., :split].unfold(-1, self.row_bytes, self.row_bytes)
        halves = panels[..., split:].view(torch.float16).unfold(-1, self.page_tokens, self.page_tokens)
        return Panels(codes, halves[..., : self.groups, :], halves[..., self.groups :, :])

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 [..., row_bytes], scale and minimum fp16 [..., groups] of rows [..., dim].

        A group with a number that is not finite, or beyond 65504, has neither: it comes back as NaN.
        """
        groups = x.float().reshape(*x.shape[:-1], self.groups, self.group)
        bad = ~(groups.abs() <= HALF.max).all(-1)
        codes, scale, minimum = self.codec.fit(groups.masked_fill(bad[..., None], 0.0))
        together = codes.view(*groups.shape[:-1], 8 // self.bits, -1).transpose(-1, -2).flatten(-3)
        nothing = float("nan")
        return pack(together, self.bits), scale.masked_fill(bad, nothing), minimum.masked_fill(bad, nothing)

    def decode(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """The rows [..., dim] in fp32 again, nearly."""
        together = unpack(codes, self.bits).reshape(*scale.shape, -1, 8 // self.bits)
        groups = together.transpose(-1, -2).flatten(-2).float()
        rows: Tensor = minimum.float()[..., None] + groups * scale.float()[..., None]
        return rows.flatten(-2)
