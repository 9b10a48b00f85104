"""Packing of codes of a few bits into bytes."""

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes; count is a multiple of 8."""
    return count * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes packed into bytes, the first code in the lowest bits: uint8 [..., n * bits / 8].

    Args:
        codes: uint8 [..., n], below 2^bits; n is a multiple of 8.
        bits: bits of a code.
    """
    if bits == 8:
        return codes
    count, shifts, bytes_at = _word(bits, codes.device)
    words = (codes.reshape(*codes.shape[:-1], -1, count).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)
    return ((words[..., None] >> bytes_at) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` packed, uint8 [..., n]."""
    if bits == 8:
        return packed
    _, shifts, bytes_at = _word(bits, packed.device)
    words = (packed.reshape(*packed.shape[:-1], -1, len(bytes_at)).to(torch.int32) << bytes_at).sum(
        -1, dtype=torch.int32
    )
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)


def _word(bits: int, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Return the smallest number of codes that fill whole bytes, and the shifts of these codes and of these bytes."""
    count, nbytes = (8, 3) if bits == 3 else (8 // bits, 1)
    codes, octets = (torch.arange(n, dtype=torch.int32, device=device) for n in (count, nbytes))
    return count, codes * bits, octets * 8
