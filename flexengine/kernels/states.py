"""Native kernels for states of sequences: gated delta rules, Mamba 1 and 2, and short convolutions.

Tokens of several pieces of sequences are packed. Each state is changed in place, in its record. A piece's results and
state are bitwise the same for any other pieces, any cut of a sequence into pieces, and any number of threads. All
tensors are fp32, on the CPU; parameters may have other dtypes.
"""

import ctypes
from ctypes import c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.errors import InvalidInput
from flexengine.kernels import structs
from flexengine.kernels.cpu import NativeKernels

MOST_TAPS = 16  # of a short convolution, as in states.h
UNLIMITED = (-torch.inf, torch.inf)


class Pieces(NamedTuple):
    """Consecutive tokens of sequences."""

    starts: Tensor  # int64 [pieces + 1]: first token of each piece among the packed ones, and their number
    numbers: Tensor  # int64 [pieces]: the record of each piece
    fresh: Tensor  # bool [pieces]: whether the state before the piece is zero, whatever its record holds


def delta_rule(
    kernels: NativeKernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    pieces: Pieces,
    norm: bool,
) -> Tensor:
    """Return the outputs [tokens, heads, dv] of a gated delta rule. For each token, head by head,

        S = diag(exp(g)) S;  d = beta (v - S^T k);  S = S + k d^T;  o = S^T q / sqrt(dk).

    Args:
        q, k: [tokens, key heads, dk]. Each key head serves consecutive heads.
        v: [tokens, heads, dv].
        g: [tokens, heads], or [tokens, heads, dk] for a decay of each channel (Kimi delta attention).
        beta: [tokens, heads].
        states: [records, heads, dk, dv], each record contiguous.
        norm: whether q and k are divided by their lengths: by sqrt(sum of squares + 1e-6).
    """
    (tokens, heads, dv), (key_heads, dk) = v.shape, k.shape[1:]
    if q.shape != k.shape or g.shape[:2] != (tokens, heads) or beta.shape != (tokens, heads) or heads % key_heads:
        raise _unfit(q=q, k=k, v=v, g=g, beta=beta)
    q, k, v = map(_in_rows, (q, k, v))
    g = _in_rows(g) if g.dim() == 3 else g
    _check(pieces, tokens, states, (heads, dk, dv), q, k, v, g, beta)
    out = torch.empty(tokens, heads, dv, dtype=torch.float32, device="cpu")
    strides = (x.stride(i) for x in (q, k, v, g, beta) for i in range(2))
    addresses = (x.data_ptr() for x in (q, k, v, g, beta, states, out))
    call = structs.Delta(
        *addresses,
        None,
        *_addresses(pieces),
        *strides,
        len(pieces.numbers),
        heads,
        key_heads,
        dk,
        dv,
        states.stride(0),
        dk**-0.5,
        norm,
        g.dim() == 3,
        torch.get_num_threads(),
    )
    _run(kernels, "delta", call)
    return out


def scan(
    kernels: NativeKernels,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    pieces: Pieces,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    soft: bool = True,
    limits: tuple[float, float] = UNLIMITED,
) -> Tensor:
    """Return the outputs [tokens, heads, dim] of the scan of Mamba 2. For each token, head by head, with
    t = softplus(dt + bias) within `limits`,

        S = exp(t a) S + (t x) b^T;  y = S c + skip x.

    Args:
        x: [tokens, heads, dim].
        dt: [tokens, heads].
        a, skip, bias: [heads].
        b, c: [tokens, groups, size]. Each group serves consecutive heads.
        states: [records, heads, dim, size], each record contiguous.
        soft: whether there is a softplus.
    """
    (tokens, heads, dim), (groups, size) = x.shape, b.shape[1:]
    if dt.shape != (tokens, heads) or b.shape != c.shape or len(b) != tokens or heads % groups:
        raise _unfit(x=x, dt=dt, b=b, c=c)
    if any(each is not None and each.shape != (heads,) for each in (a, skip, bias)):
        raise _unfit(x=x, a=a)
    x, b, c = map(_in_rows, (x, b, c))
    a = a.float().contiguous()
    skip, bias = (None if each is None else each.float().contiguous() for each in (skip, bias))
    _check(pieces, tokens, states, (heads, dim, size), x, dt, b, c)
    out = torch.empty(tokens, heads, dim, dtype=torch.float32, device="cpu")
    strides = (each.stride(i) for each in (x, dt, b, c) for i in range(2))
    addresses = (structs.address(each) for each in (x, dt, a, b, c, skip, bias, states, out))
    call = structs.Scan(
        *addresses,
        None,
        *_addresses(pieces),
        *strides,
        len(pieces.numbers),
        heads,
        groups,
        dim,
        size,
        states.stride(0),
        *limits,
        soft,
        torch.get_num_threads(),
    )
    _run(kernels, "scan", call)
    return out


def selective_scan(
    kernels: NativeKernels,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    pieces: Pieces,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    soft: bool = True,
    z: Tensor | None = None,
) -> Tensor:
    """Return the outputs [tokens, channels] of the scan of Mamba 1. For each token, channel by channel, with
    t = softplus(dt + bias),

        S = exp(t a) S + t x b;  y = (S . c + skip x) silu(z).

    Args:
        x, dt, z: [tokens, channels].
        a: [channels, size].
        skip, bias: [channels].
        b, c: [tokens, size].
        states: [records, channels, size], each record contiguous.
        soft: whether there is a softplus.
    """
    (tokens, channels), size = x.shape, b.shape[-1]
    alike = (dt, x) if z is None else (dt, z, x)
    if any(each.shape != x.shape for each in alike) or b.shape != (tokens, size) or c.shape != b.shape:
        raise _unfit(x=x, dt=dt, b=b, c=c)
    if a.shape != (channels, size) or any(each is not None and each.shape != (channels,) for each in (skip, bias)):
        raise _unfit(x=x, a=a)
    x, b, c, z = (None if each is None else _in_rows(each) for each in (x, b, c, z))  # type: ignore[assignment]
    a, skip, bias = (None if each is None else each.float().contiguous() for each in (a, skip, bias))  # type: ignore[assignment]
    _check(pieces, tokens, states, (channels, size), x, dt, b, c, z)
    out = torch.empty(tokens, channels, dtype=torch.float32, device="cpu")
    addresses = (structs.address(each) for each in (x, dt, a, b, c, skip, bias, z, states, out))
    strides = (x.stride(0), *dt.stride(), b.stride(0), c.stride(0), 0 if z is None else z.stride(0))
    sizes = (len(pieces.numbers), channels, size, states.stride(0), soft, torch.get_num_threads())
    _run(kernels, "select", structs.Select(*addresses, None, *_addresses(pieces), *strides, *sizes))
    return out


def convolve(
    kernels: NativeKernels, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, pieces: Pieces
) -> Tensor:
    """Return the outputs [tokens, channels] of a causal convolution of each channel over the tokens of a sequence.

    Args:
        x: [tokens, channels].
        weight: [channels, taps], of MOST_TAPS taps or fewer. The last one is for the token itself.
        bias: [channels], or None.
        silu: whether an activation follows.
        states: [records, channels, columns], each record contiguous: the last `columns` tokens of x, taps - 1 or more.
    """
    (tokens, channels), taps, columns = x.shape, weight.shape[1], states.shape[-1]
    if weight.shape[0] != channels or not 0 < taps <= min(MOST_TAPS, columns + 1):
        raise _unfit(x=x, weight=weight, states=states)
    x, weight, bias = _in_rows(x), weight.float().t().contiguous(), None if bias is None else bias.float().contiguous()
    _check(pieces, tokens, states, (channels, columns), x)
    out = torch.empty(tokens, channels, dtype=torch.float32, device="cpu")
    addresses = (structs.address(each) for each in (x, weight, bias, states, out))
    call = structs.Conv(
        *addresses,
        *_addresses(pieces),
        x.stride(0),
        len(pieces.numbers),
        channels,
        taps,
        columns,
        states.stride(0),
        silu,
        torch.get_num_threads(),
    )
    _run(kernels, "conv", call, scratch=False)
    return out


def _run(kernels: NativeKernels, name: str, call: Any, scratch: bool = True) -> None:
    if scratch:
        nbytes = structs.bound(kernels.library, f"{name}_bytes", c_int64)(ctypes.addressof(call))
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        call.scratch = memory.data_ptr()
    structs.bound(kernels.library, name)(ctypes.addressof(call))


def _check(pieces: Pieces, tokens: int, states: Tensor, shape: tuple[int, ...], *floats: Tensor | None) -> None:
    """Raise InvalidInput unless the pieces are those of the tokens, their records have room for the states, and these
    and `floats` are fp32."""
    if any(x is not None and (x.dtype != torch.float32 or x.device.type != "cpu") for x in (states, *floats)):
        raise InvalidInput("kernels of states compute in fp32, on the CPU")
    if tuple(states.shape[1:]) != shape or not states[:1].is_contiguous():
        raise InvalidInput(f"states {list(states.shape)} do not fit: a record must be {list(shape)}, contiguous")
    starts, numbers, fresh = pieces
    sizes = starts.diff()
    if len(starts) != len(numbers) + 1 or len(fresh) != len(numbers) or not len(numbers):
        raise InvalidInput(f"{len(starts)} bounds and {len(fresh)} marks do not fit {len(numbers)} pieces")
    if int(starts[0]) or int(starts[-1]) != tokens or int(sizes.min()) < 1:
        raise InvalidInput(f"pieces from {starts.tolist()} on do not fit {tokens} tokens")
    if int(numbers.min()) < 0 or int(numbers.max()) >= len(states):
        raise InvalidInput(f"a piece's record is not among the {len(states)}")


def _addresses(pieces: Pieces) -> tuple[int, int, int]:
    assert all(x.is_contiguous() for x in pieces)
    return pieces.starts.data_ptr(), pieces.numbers.data_ptr(), pieces.fresh.data_ptr()


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _unfit(**tensors: Tensor) -> InvalidInput:
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    return InvalidInput(f"{shapes} do not fit together")
