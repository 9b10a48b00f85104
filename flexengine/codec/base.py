"""Encodings of tensors in fewer bytes: what all of them can do, and how codes of a few bits lie in bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)


class Part(NamedTuple):
    """One of the tensors that an encoded tensor consists of."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Codec(ABC):
    """A form of matrices [rows, columns]; of a weight, rows are output channels and columns inputs; of a KV cache, rows
    are tokens and columns the elements of a head.

    Encoding works on fp32 and gives the same bits for the same numbers everywhere; nothing is random.
    """

    name: str

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The tensors of an encoded matrix. Raises InvalidInput for a shape that this codec cannot hold."""

    @abstractmethod
    def encode(self, x: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """The encoded matrix, as `parts` says. importance: [columns], how much an error of each column matters; None:
        all alike. Raises InvalidInput for numbers that are not finite, or beyond what the form can hold."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """The matrix in fp32 again, nearly."""

    @abstractmethod
    def slack(self, x: Tensor) -> Tensor:
        """[rows, columns]: by how much each element of decode(encode(x)) may differ from x at most, where nothing is
        fitted (no importance, no search)."""

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of an encoded matrix."""
        return sum(part.nbytes for part in self.parts(rows, columns).values())


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes; 8 codes must fill whole bytes together."""
    return count * bits // 8


def _word(bits: int) -> tuple[int, int]:
    """Codes that fill bytes together, and how many bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n] below 2^bits into bytes [..., n * bits / 8], the first code lowest. n: a multiple of 8."""
    if bits == 8:
        return codes
    each, octets = _word(bits)
    wide = codes.reshape(*codes.shape[:-1], -1, each).to(torch.int32)
    shifts = torch.arange(each, dtype=torch.int32, device=codes.device) * bits
    words = (wide << shifts).sum(-1, dtype=torch.int32)
    places = torch.arange(octets, dtype=torch.int32, device=codes.device) * 8
    return ((words[..., None] >> places) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes again, uint8."""
    if bits == 8:
        return packed
    each, octets = _word(bits)
    places = torch.arange(octets, dtype=torch.int32, device=packed.device) * 8
    wide = packed.reshape(*packed.shape[:-1], -1, octets).to(torch.int32)
    words = (wide << places).sum(-1, dtype=torch.int32)
    shifts = torch.arange(each, dtype=torch.int32, device=packed.device) * bits
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)
