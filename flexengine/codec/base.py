"""The interface of codecs, which encode matrices in fewer bytes, and the packing of codes of a few bits into bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)


class Part(NamedTuple):
    """Shape and dtype of one tensor of an encoded matrix, which consists of several."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Codec(ABC):
    """An encoding of matrices [rows, columns].

    In a weight, rows are output channels and columns inputs. In a KV cache, rows are tokens and columns the elements of
    a head. Encoding computes in fp32 and is deterministic: equal numbers give equal bits on every machine.
    """

    name: str

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Return shape and dtype of each tensor of an encoded matrix. Raise InvalidInput for an unsupported shape."""

    @abstractmethod
    def encode(self, x: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors of the encoded matrix, named as by `parts`.

        Args:
            x: [rows, columns].
            importance: [columns], weight of each column's squared error; None for equal weights.

        Raises:
            InvalidInput: a number is not finite or beyond the range of the codec.
        """

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """Return the dequantized matrix, fp32 [rows, columns]."""

    @abstractmethod
    def slack(self, x: Tensor) -> Tensor:
        """Return the largest possible error of each element after encoding and decoding, [rows, columns].

        The bound holds for codecs that do not fit the range, and without importance.
        """

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of an encoded matrix."""
        return sum(part.nbytes for part in self.parts(rows, columns).values())


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes; count is a multiple of 8."""
    return count * bits // 8


def _word(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the smallest number of codes that fills whole bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes packed into bytes, the first code in the lowest bits: uint8 [..., n * bits / 8].

    Args:
        codes: uint8 [..., n], below 2^bits; n is a multiple of 8.
        bits: bits of a code.
    """
    if bits == 8:
        return codes
    each, octets = _word(bits)
    wide = codes.reshape(*codes.shape[:-1], -1, each).to(torch.int32)
    shifts = torch.arange(each, dtype=torch.int32, device=codes.device) * bits
    words = (wide << shifts).sum(-1, dtype=torch.int32)
    places = torch.arange(octets, dtype=torch.int32, device=codes.device) * 8
    return ((words[..., None] >> places) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` packed, uint8 [..., n]."""
    if bits == 8:
        return packed
    each, octets = _word(bits)
    places = torch.arange(octets, dtype=torch.int32, device=packed.device) * 8
    wide = packed.reshape(*packed.shape[:-1], -1, octets).to(torch.int32)
    words = (wide << places).sum(-1, dtype=torch.int32)
    shifts = torch.arange(each, dtype=torch.int32, device=packed.device) * bits
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)
