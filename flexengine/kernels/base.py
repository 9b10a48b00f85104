"""What a set of kernels does: attention over a paged KV cache, products with narrow and encoded weights, conversion.

Shapes used throughout:
    pool      [n_pages, 2, kv_heads, page_tokens, head_dim], contiguous; one layer. Index 1 is 0 for K, 1 for V.
    table     the pages of one sequence in order: its token s lies in page table[s // page_tokens],
              at offset s % page_tokens.
    form      how an encoded pool lies: then it is uint8 [n_pages, form.page_bytes], contiguous, at an even address.
    heads     kv_heads * group; query head h reads kv head h // group (grouped-query attention; group 1 is multi-head).
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from flexengine.codec.cache import CacheForm
from flexengine.codec.packed import Packed
from flexengine.errors import InvalidInput

ACTS = ("silu", "gelu_tanh")  # in the order of enum Act of elementwise.h
Compute = Literal["bf16", "int8"]  # what a product rounds to before it multiplies; None: nothing


class Past(NamedTuple):
    """The tokens of one prompt that were cached before: its first `length` ones.

    Attributes:
        pool, form: as above.
        table: int32, at least ceil(length / page_tokens) entries, each a page of the pool. Pages that lie before the
            window of every query are not read.
        length: tokens, at least 1. What the last page holds beyond them is not read.
    """

    pool: Tensor
    table: Tensor
    length: int
    form: CacheForm | None = None


class Kernels(ABC):
    """One implementation of every kernel.

    All sums are taken in fp32, whatever the tensors' dtype. Every method may be called from several threads at once as
    long as no two of them write the same memory. Errors are InvalidInput and name the offending sizes, or OutOfMemory;
    then nothing was written.

    name: "native", "reference" or "cuda", for reports. narrow: whether `product` takes x in 16 bits.
    """

    name: str
    narrow = False

    @abstractmethod
    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheForm | None = None
    ) -> None:
        """Writes token t's K to pool[pages[t], 0, :, offsets[t]] and its V to pool[pages[t], 1, :, offsets[t]].

        k, v: [T, kv_heads, head_dim], any token and head strides; rounded to the pool's dtype (to nearest even), or
            encoded as form.encode does, each token by itself.
        pages, offsets: int32 [T]; no two tokens share a place.
        """

    @overload
    @abstractmethod
    def decode(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int | None = ...,
        softcap: float | None = ..., sinks: Tensor | None = ..., form: CacheForm | None = ...,
        topk: float | None = ..., with_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    @abstractmethod
    def decode(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int | None = ...,
        softcap: float | None = ..., sinks: Tensor | None = ..., form: CacheForm | None = ...,
        topk: float | None = ..., *, with_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @abstractmethod
    def decode(
        self,
        q: Tensor,
        pool: Tensor,
        tables: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        form: CacheForm | None = None,
        topk: float | None = None,
        with_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one new token per sequence over that sequence's cache, the whole batch in one call.

        q: [n, heads, head_dim], any token and head strides. n may be 0.
        tables: int32 [n, max_pages]; entries past a sequence's last page are never looked at, and what pages before
            its window hold does not count.
        lengths: int32 [n], tokens in the cache including the new one, at least 1.
        scale: factor on q . k, usually head_dim ** -0.5.
        window: a query sees the last `window` tokens only (sliding window), itself included.
        softcap: scores become softcap * tanh(score / softcap), after the scale (Gemma 2).
        sinks: [heads], a logit per head that joins the softmax's denominator only (gpt-oss).
        topk: of the t positions a query sees, only the floor(topk * (t - 1)) past ones with the largest weights, the
            earlier of equal ones, and its own are multiplied with their V (FlexGen section 5.2; systems 1.7). Weights
            are not scaled up for that. V that no query head of a kv head wants is not read. From 0 to 1; None: all.
        with_lse: also return log of the softmax's denominator, fp32 [n, heads], for merge.merge. Not with topk.
        Returns [n, heads, head_dim], contiguous, in q's dtype. A sequence's result is bit for bit the same
        whatever else is in the batch, wherever its pages lie, and for any number of threads.
        """

    @abstractmethod
    def choose(
        self,
        q: Tensor,
        pool: Tensor,
        tables: Tensor,
        lengths: Tensor,
        scale: float,
        topk: float,
        window: int | None = None,
        softcap: float | None = None,
        form: CacheForm | None = None,
    ) -> Tensor:
        """Whose V `decode` with the same arguments reads; so the V of others need not be there when it is called.

        Returns bool [n, kv_heads, max_pages * page_tokens], by position: whether some query head of a kv head wants it,
        the sequence's own included. No V is looked at.
        """

    @abstractmethod
    def attend_prompt(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """Return causal attention of B prompts of one length, or of a piece of each.

        Args:
            q: [B, T, heads, head_dim], any strides. Query t sits at position P + S - T + t; P is past.length, or 0.
            k, v: [B, S, kv_heads, head_dim], any strides, S >= T: tokens P to P + S.
            scale, window, softcap, sinks: as in `decode`.
            past: tokens 0 to P, read from their pages; B must be 1.

        Returns:
            [B, T, heads, head_dim], contiguous, in q's dtype. On a CPU with native kernels a query's result is bit for
            bit the same however many queries and prompts are computed together, for any number of threads, and, where
            the pool holds fp32, for any P.

        Beside the result it holds `prompt_scratch` bytes at most, and on a CPU fp32 copies of half-precision q, k, v.
        """

    @abstractmethod
    def prompt_scratch(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return an upper bound, in bytes, of what `attend_prompt` holds with `past`, whatever its length."""

    @abstractmethod
    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: Literal["bf16"] | None = None
    ) -> Tensor:
        """x @ weight.T + bias for a weight stored in fewer bits, of which nothing is lost on the way.

        x: fp32 [..., k], any strides; weight: bf16 or fp16 [n, k], contiguous; bias: fp32 [n]. Returns fp32 [..., n].
        compute: "bf16" first rounds x to bf16; numbers below 1.2e-38 may then count as zeros.
        On a CPU a row's result is bit for bit the same whatever other rows there are, and for any number of threads.
        Beside its result it holds at most about 16 MiB of widened weights, and unless compute is None a copy of x.
        """

    @abstractmethod
    def product(
        self, x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None = None, compute: Compute | None = None
    ) -> Tensor:
        """x @ weight.T + bias for a weight encoded as `form` says.

        x: fp32 [..., form.columns], any strides; weight: uint8 [form.nbytes], contiguous; bias: fp32 [form.rows].
        Returns fp32 [..., form.rows]. A row with numbers that are not finite has none that are in its result.
            Where kernels are narrow, x may be bf16 or fp16: then decoded weights are rounded to that too, sums are
            taken in fp32, and the result is rounded again.
        compute: None multiplies with what form.decode gives. "bf16" first rounds x to bf16, and what is decoded too
            where the CPU multiplies pairs of bf16. "int8" rounds x to 8 bits, by row and by group of
            form.codec.group columns: code q = round(x / s), to nearest even, with s = max |x| / 127. Then, over the
            groups g of columns, with a weight's code, scale and minimum (native kernels sum the codes as integers),
                out[m, c] = bias[c] + sum_g s[m, g] * (scale[c, g] * sum q * code + minimum[c, g] * sum q).
        On a CPU a row's result is bit for bit the same whatever other rows there are, and for any number of threads.
        Beside its result it holds at most about 16 MiB of decoded weights, 64 on a GPU, and unless compute is None a
        copy of x.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        """(weight + shift) * x / sqrt(mean of x's squares + eps) along the last dimension.

        x: [..., n], any strides; weight: [n]. Returns [..., n], contiguous, in x's dtype.
        """

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions: x * cos + (minus its second half, its first half) * sin, head by head.

        x: [B, heads, T, head_dim], any strides; cos, sin: [B, T, head_dim]. Returns [B, heads, T, head_dim].
        """

    @abstractmethod
    def gate(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        """act(gate) * up, which may take gate's memory. act: one of ACTS. Both of one shape and dtype."""

    @abstractmethod
    def convert(self, source: Tensor, target: Tensor, threads: int = 1) -> None:
        """Copies source to target, both 1-D, contiguous and of one size. threads: 1 is the calling thread alone.

        Narrowing rounds to nearest even, as torch does; NaN stays NaN (its payload may differ).
        """


class Room(NamedTuple):
    """What a pool has room for."""

    pages: int
    kv_heads: int
    page_tokens: int
    dim: int


def check_pool(pool: Tensor, form: CacheForm | None) -> Room:
    """Raises InvalidInput unless pool has the shape above."""
    if form is not None:
        fits = pool.dim() == 2 and pool.shape[1] == form.page_bytes and pool.is_contiguous()
        if not fits or pool.dtype != torch.uint8 or pool.storage_offset() % 2:
            raise InvalidInput(
                f"a KV pool in {form.bits} bits is contiguous uint8 [n, {form.page_bytes}] at an even address,"
                f" not {pool.dtype} {list(pool.shape)} at {pool.storage_offset()}"
            )
        return Room(pool.shape[0], form.kv_heads, form.page_tokens, form.dim)
    if pool.dim() != 5 or pool.shape[1] != 2 or not pool.is_contiguous() or not pool.dtype.is_floating_point:
        raise InvalidInput(
            f"a KV pool is contiguous floats [n, 2, kv_heads, page_tokens, head_dim], not {pool.dtype}"
            f" {list(pool.shape)}"
        )
    return Room(pool.shape[0], *pool.shape[2:])


def check_options(window: int | None, softcap: float | None, sinks: Tensor | None, heads: int) -> None:
    """Raises InvalidInput for options that `decode` and `attend_prompt` cannot honour."""
    if window is not None and window < 1:
        raise InvalidInput(f"window is {window}; it must be None or at least 1")
    if softcap is not None and not softcap > 0:
        raise InvalidInput(f"softcap is {softcap}; it must be None or positive")
    if sinks is not None and sinks.shape != (heads,):
        raise InvalidInput(f"sinks has shape {list(sinks.shape)}; it must be [{heads}], one per query head")


def check_append(k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheForm | None) -> Room:
    """Raises InvalidInput unless the shapes fit together."""
    room = check_pool(pool, form)
    wanted = (k.shape[0], room.kv_heads, room.dim)
    if k.shape != wanted or v.shape != wanted or k.dtype != v.dtype:
        raise InvalidInput(
            f"k {list(k.shape)} {k.dtype} and v {list(v.shape)} {v.dtype} do not fit a pool {list(pool.shape)}: "
            f"both must be [tokens, {room.kv_heads}, {room.dim}]"
        )
    if pages.shape != wanted[:1] or offsets.shape != wanted[:1]:
        found = f"{list(pages.shape)}, {list(offsets.shape)}"
        raise InvalidInput(f"{wanted[0]} tokens need as many pages and offsets, not {found}")
    return room


def check_decode(q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, form: CacheForm | None) -> Room:
    """Raises InvalidInput unless the shapes fit together."""
    room = check_pool(pool, form)
    if q.dim() != 3 or q.shape[2] != room.dim or q.shape[1] % room.kv_heads:
        raise InvalidInput(
            f"q {list(q.shape)} does not fit a pool {list(pool.shape)} with {room.kv_heads} heads of {room.dim}:"
            " heads = kv_heads * group"
        )
    if tables.dim() != 2 or tables.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        found = f"{list(tables.shape)}, {list(lengths.shape)}"
        raise InvalidInput(f"{q.shape[0]} queries need as many tables and lengths, not {found}")
    return room


def check_topk(topk: float | None, with_lse: bool = False) -> None:
    """Raises InvalidInput for a share of values that there is not, or one without a denominator of its own."""
    if topk is not None and not 0 <= topk <= 1:
        raise InvalidInput(f"topk is {topk}; it must be None or a share from 0 to 1")
    if topk is not None and with_lse:
        raise InvalidInput(f"topk is {topk}: results that leave values out cannot be merged")


def check_prompt(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises InvalidInput unless the shapes fit together."""
    fits = q.dim() == 4 and k.dim() == 4 and k.shape == v.shape
    fits = fits and k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3]
    if not fits or q.shape[2] % k.shape[2] or k.shape[1] < q.shape[1]:
        raise InvalidInput(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit:"
            " they are [B, T, heads, head_dim] and [B, S, kv_heads, head_dim] with S >= T"
        )


def check_past(q: Tensor, k: Tensor, past: Past) -> Room:
    """Raises InvalidInput unless the cached tokens are those of the one prompt."""
    room = check_pool(past.pool, past.form)
    if q.shape[0] != 1 or (room.kv_heads, room.dim) != tuple(k.shape[2:]):
        raise InvalidInput(
            f"k {list(k.shape)} does not continue a cache of {room.kv_heads} heads of {room.dim}:"
            f" it must be [1, S, {room.kv_heads}, {room.dim}]"
        )
    if not 1 <= past.length <= past.table.numel() * room.page_tokens:
        raise InvalidInput(
            f"{past.length} cached tokens and {past.table.numel()} pages of {room.page_tokens} tokens do not fit:"
            " there must be at least one token, and pages for all"
        )
    return room


def check_norm(x: Tensor, weight: Tensor) -> None:
    """Raises InvalidInput unless the shapes fit together."""
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise InvalidInput(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit: they are [..., n] and [n]")


def check_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises InvalidInput unless the shapes fit together."""
    places = (x.shape[0], *x.shape[2:]) if x.dim() == 4 else ()
    if cos.shape != places or sin.shape != places or places[-1] % 2:
        raise InvalidInput(
            f"x {list(x.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)} do not fit: they are"
            " [B, heads, T, head_dim] with an even head_dim and [B, T, head_dim]"
        )


def check_gate(gate: Tensor, up: Tensor, act: str) -> None:
    """Raises InvalidInput unless the shapes fit together and the function is known."""
    if gate.shape != up.shape or act not in ACTS:
        raise InvalidInput(f"gate {list(gate.shape)} and up {list(up.shape)} have one shape, {act!r} is one of {ACTS}")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises InvalidInput unless the shapes and dtypes fit together."""
    fits = weight.dim() == 2 and weight.is_contiguous() and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    fits = fits and x.dtype == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16)
    if not fits or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.float32)):
        raise InvalidInput(
            f"x {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype} and bias"
            f" {None if bias is None else [*bias.shape, bias.dtype]} do not fit: they are fp32 [..., k], bf16 or fp16"
            " [n, k] contiguous, and fp32 [n]"
        )


def check_product(x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None, narrow: bool = False) -> None:
    """Raises InvalidInput unless the shapes and dtypes fit together. narrow: x may have 16 bits."""
    known = (torch.float32, torch.bfloat16, torch.float16) if narrow else (torch.float32,)
    fits = weight.shape == (form.nbytes,) and weight.is_contiguous() and weight.dtype == torch.uint8
    fits = fits and x.dim() >= 1 and x.shape[-1] == form.columns and x.dtype in known
    if not fits or (bias is not None and (bias.shape != (form.rows,) or bias.dtype != torch.float32)):
        raise InvalidInput(
            f"x {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype} and bias"
            f" {None if bias is None else [*bias.shape, bias.dtype]} do not fit a matrix {[form.rows, form.columns]} in"
            f" {form.codec.name}: they are fp32 [..., {form.columns}], uint8 [{form.nbytes}] contiguous, and fp32"
            f" [{form.rows}]"
        )


def check_convert(source: Tensor, target: Tensor) -> None:
    """Raises InvalidInput unless the tensors may be converted element by element."""
    if source.dim() != 1 or source.shape != target.shape or not (source.is_contiguous() and target.is_contiguous()):
        found = f"{list(source.shape)}, {list(target.shape)}"
        raise InvalidInput(f"convert takes two contiguous 1-D tensors of one size, not {found}")
