"""Checks of kernel arguments: shapes, dtypes and options. Every check raises InvalidInput with the sizes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import Form
from flexengine.errors import InvalidInput
from flexengine.kernels.base import ACTS, AttentionOptions, Past
from flexengine.kernels.paged import PagedTokens, Room

if TYPE_CHECKING:
    from flexengine.codec.records import RecordForm

NARROW = (torch.bfloat16, torch.float16)


def _unfit(expected: str, **tensors: Tensor | None) -> InvalidInput:
    """Return the error for tensors that do not fit together. expected: what they must be, in the same order."""
    shapes = (None if x is None else f"{list(x.shape)} {x.dtype}" for x in tensors.values())
    given = ", ".join(f"{name} {shape}" for name, shape in zip(tensors, shapes, strict=True))
    return InvalidInput(f"{given} do not fit: they must be {expected}")


def bad_sequence(i: int, room: Room) -> InvalidInput:
    """Return the error for sequence i, whose length or page table does not fit the pool."""
    fault = f"sequence {i}: its length must be at least 1 and within its table"
    return InvalidInput(f"{fault}, and its pages among the pool's {room.pages} (of {room.page_tokens} tokens)")


def bad_token(t: int, room: Room) -> InvalidInput:
    """Return the error for token t, whose page or offset lies outside the pool."""
    return InvalidInput(f"token {t}: its page must be below {room.pages} and its offset below {room.page_tokens}")


def bad_place(places: Tensor, at: int, records: Tensor) -> InvalidInput:
    """Return the error for an entry of `places` that is no record."""
    return InvalidInput(f"place {int(places[at])} at index {at} is no record; places are from 0 to {len(records) - 1}")


def check_pool(pool: Tensor, form: CacheFormat | None) -> Room:
    """Return the sizes of `pool`. Raise InvalidInput if its shape or dtype differs from the one in kernels/base.py."""
    if form is not None:
        fits = pool.dim() == 2 and pool.shape[1] == form.page_bytes and pool.is_contiguous()
        if not fits or pool.dtype != torch.uint8 or pool.storage_offset() % 2:
            fault = f"a KV pool in {form.bits} bits must be contiguous uint8 [n, {form.page_bytes}] at an even address"
            raise InvalidInput(f"{fault}, not {pool.dtype} {list(pool.shape)} at {pool.storage_offset()}")
        return Room(pool.shape[0], form.kv_heads, form.page_tokens, form.dim)
    if pool.dim() != 5 or pool.shape[1] != 2 or not pool.is_contiguous() or not pool.dtype.is_floating_point:
        raise InvalidInput(
            f"a KV pool must be contiguous floats [n, 2, kv_heads, page_tokens, head_dim], not {pool.dtype}"
            f" {list(pool.shape)}"
        )
    return Room(pool.shape[0], *pool.shape[2:])


def _check_options(options: AttentionOptions, heads: int) -> None:
    _, window, softcap, sinks, topk, _ = options
    if window is not None and window < 1:
        raise InvalidInput(f"window is {window}; it must be None or at least 1")
    if softcap is not None and not softcap > 0:
        raise InvalidInput(f"softcap is {softcap}; it must be None or positive")
    if sinks is not None and sinks.shape != (heads,):
        raise InvalidInput(f"sinks has shape {list(sinks.shape)}; it must be [{heads}], one per query head")
    if topk is not None and not 0 <= topk <= 1:
        raise InvalidInput(f"topk is {topk}; it must be None or a share from 0 to 1")


def check_append(k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None) -> Room:
    """Return the sizes of `pool`. Raise InvalidInput if the shapes do not fit together."""
    room = check_pool(pool, form)
    expected = (k.shape[0], room.kv_heads, room.dim)
    if k.shape != expected or v.shape != expected or k.dtype != v.dtype:
        raise _unfit(f"[tokens, {room.kv_heads}, {room.dim}], like the pool", k=k, v=v)
    if pages.shape != expected[:1] or offsets.shape != expected[:1]:
        raise _unfit(f"[{expected[0]}], one per token", pages=pages, offsets=offsets)
    return room


def check_decode(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions, form: CacheFormat | None,
    lse: Tensor | None = None,
) -> Room:  # fmt: skip
    """Return the sizes of `pool`. Raise InvalidInput if arguments of `decode_attention` do not fit together."""
    room = check_pool(pool, form)
    if q.dim() != 3 or q.shape[2] != room.dim or q.shape[1] % room.kv_heads:
        raise _unfit(f"[n, heads, {room.dim}] with heads a multiple of {room.kv_heads}, like the pool", q=q, pool=pool)
    n, heads = q.shape[:2]
    if tables.dim() != 2 or tables.shape[0] != n or lengths.shape != (n,):
        raise _unfit(f"[{n}, max_pages] and [{n}], for {n} queries", tables=tables, lengths=lengths)
    _check_options(options, heads)
    if lse is None:
        return room
    if lse.shape != (n, heads) or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise _unfit(f"fp32 [{n}, {heads}], contiguous", lse=lse)
    if options.topk is not None:
        fault = f"topk is {options.topk}: results without all values cannot be merged"
        raise InvalidInput(f"{fault}; leave out topk or lse")
    return room


def check_prompt(q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: AttentionOptions) -> None:
    """Raise InvalidInput if a call of `attend_prompts` does not fit together."""
    fits = q.dim() == 4 and k.dim() == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3]
    if not fits or q.shape[2] % k.shape[2] or k.shape[1] < q.shape[1]:
        raise _unfit("[B, T, heads, head_dim] and twice [B, S, kv_heads, head_dim] with S >= T", q=q, k=k, v=v)
    if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device) or not out.is_contiguous():
        raise InvalidInput(f"out is {list(out.shape)}, {out.dtype}, {out.device}; it must be contiguous,"
                           f" {list(q.shape)}, {q.dtype}, {q.device}")  # fmt: skip
    _check_options(options, q.shape[2])


def check_past(q: Tensor, k: Tensor, past: Past) -> Room:
    """Return the sizes of the pool. Raise InvalidInput if `past` does not fit q and k, or q has several prompts."""
    room = check_pool(past.pool, past.form)
    if q.shape[0] != 1 or (room.kv_heads, room.dim) != tuple(k.shape[2:]):
        fault = f"k {list(k.shape)} does not continue a cache of {room.kv_heads} heads of {room.dim}"
        raise InvalidInput(f"{fault}: it must be [1, S, {room.kv_heads}, {room.dim}]")
    if not 1 <= past.length <= past.table.numel() * room.page_tokens:
        fault = f"{past.length} cached tokens and {past.table.numel()} pages of {room.page_tokens} tokens do not fit"
        raise InvalidInput(f"{fault}: there must be at least one token, and pages for all")
    return room


def check_tokens(tokens: PagedTokens, room: Room) -> None:
    """Raise InvalidInput unless the prompts are all tokens after the decoded ones, and have pages for cached tokens."""
    first = len(tokens.lengths)
    for p in tokens.prompts:
        held = 0 if p.table is None else p.table.numel()
        if p.first != first or p.rows < 1 or p.length < 1 or (p.past and p.rows > 1):
            raise InvalidInput(
                f"{p.rows} prompts of {p.length} tokens from token {p.first} on, after {p.past} cached tokens: there"
                f" must be at least one token, from token {first} on, and only one prompt after cached tokens"
            )
        if not 0 <= p.past <= held * room.page_tokens:
            raise InvalidInput(f"{p.past} cached tokens do not fit in {held} pages of {room.page_tokens} tokens")
        first += p.rows * p.length
    if not first == len(tokens.pages) == len(tokens.offsets):
        raise InvalidInput(
            f"the gpu_batch has {first} tokens, but there are {len(tokens.pages)} pages and {len(tokens.offsets)}"
            " offsets for them"
        )


def check_norm(x: Tensor, weight: Tensor) -> None:
    """Raise InvalidInput if the shapes do not fit together."""
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise _unfit("[..., n] and [n]", x=x, weight=weight)


def check_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise InvalidInput if the shapes do not fit together."""
    expected = (x.shape[0], *x.shape[2:]) if x.dim() == 4 else ()
    if cos.shape != expected or sin.shape != expected or expected[-1] % 2:
        raise _unfit("[B, heads, T, head_dim], head_dim even, and twice [B, T, head_dim]", x=x, cos=cos, sin=sin)


def check_gate(gate: Tensor, up: Tensor, act: str) -> None:
    """Raise InvalidInput if the shapes differ or `act` is not in ACTS."""
    if gate.shape != up.shape or act not in ACTS:
        raise _unfit(f"of one shape, with act one of {ACTS}, not {act!r}", gate=gate, up=up)


def _is_float(x: Tensor, narrow: bool) -> bool:
    return x.dtype == torch.float32 or (narrow and x.dtype in NARROW)


def _rows_of_numbers(x: Tensor) -> bool:
    """Return whether x is a matrix of floating-point numbers whose rows are contiguous, and do not overlap."""
    known = x.dim() == 2 and _is_float(x, narrow=True)
    return known and (x.shape[1] < 2 or x.stride(1) == 1) and (len(x) < 2 or x.stride(0) >= x.shape[1])


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, narrow: bool = False) -> None:
    """Raise InvalidInput if the shapes and dtypes do not fit together. narrow: x may be bf16 or fp16."""
    rows = _rows_of_numbers(weight) or (weight.dim() == 2 and _rows_of_numbers(weight.mT))
    fits = rows and x.dim() >= 1 and x.shape[-1] == weight.shape[1] and _is_float(x, narrow)
    if not fits or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.float32)):
        expected = "fp32 [..., k]; fp32, bf16 or fp16 [n, k] with contiguous rows; and fp32 [n]"
        raise _unfit(expected, x=x, weight=weight, bias=bias)


def check_add_weighted(out: Tensor, a: Tensor, rows: Tensor, narrow: bool = False) -> None:
    """Raise InvalidInput if the shapes and dtypes do not fit together. narrow: a may be bf16 or fp16."""
    fits = _rows_of_numbers(rows) and a.dim() == 2 and a.shape[1] == len(rows) and out.is_contiguous()
    if not (fits and _is_float(a, narrow)) or out.shape != (len(a), rows.shape[1]) or out.dtype != torch.float32:
        expected = "fp32 [T, width] contiguous; fp32 [T, n]; and fp32, bf16 or fp16 [n, width] with contiguous rows"
        raise _unfit(expected, out=out, a=a, rows=rows)


def check_product(x: Tensor, weight: Tensor, form: Form, bias: Tensor | None, narrow: bool = False) -> None:
    """Raise InvalidInput if the shapes and dtypes do not fit together. narrow: x may be bf16 or fp16."""
    fits = weight.shape == (form.nbytes,) and weight.is_contiguous() and weight.dtype == torch.uint8
    fits = fits and x.dim() >= 1 and x.shape[-1] == form.columns and _is_float(x, narrow)
    if not fits or (bias is not None and (bias.shape != (form.rows,) or bias.dtype != torch.float32)):
        raise _unfit(
            f"fp32 [..., {form.columns}], uint8 [{form.nbytes}] contiguous, and fp32 [{form.rows}], for a matrix"
            f" {[form.rows, form.columns]} in {form.name}", x=x, weight=weight, bias=bias
        )  # fmt: skip


def check_encoded_rows(weight: Tensor, form: Form, ids: Tensor) -> None:
    """Raise InvalidInput if the weight has another size than its format, or a row is outside of it."""
    fits = weight.dtype == torch.uint8 and weight.numel() == form.nbytes and weight.is_contiguous()
    if not fits or ids.dtype != torch.int64 or ids.dim() != 1:
        raise _unfit(f"uint8 [{form.nbytes}] contiguous, and int64 [n]", weight=weight, ids=ids)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < form.rows:
        raise InvalidInput(f"rows {int(ids.min())} to {int(ids.max())} of a weight with {form.rows} rows")


def check_records(x: Tensor, columns: int, records: Tensor, places: Tensor, form: "RecordForm", index: int) -> None:
    """Raise InvalidInput if the shapes and dtypes do not fit together. columns: those that x must have."""
    fits = records.dim() == 2 and records.shape[1] == form.nbytes and records.is_contiguous()
    fits = fits and records.dtype == torch.uint8 and places.dim() == 1 and places.dtype == torch.int64
    if not fits or x.dim() != 2 or x.shape[1] != columns or not x.dtype.is_floating_point:
        expected = f"floats [T, {columns}], uint8 [room, {form.nbytes}] contiguous, and int64 [n]"
        raise _unfit(expected, x=x, records=records, places=places)
    if not 0 <= index < form.vectors:
        raise InvalidInput(f"records have vectors 0 to {form.vectors - 1}, not {index}")


def check_record_products(
    x: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int, bias: Tensor | None
) -> None:
    """Raise InvalidInput if the arguments of `record_products` do not fit together."""
    check_records(x, form.width, records, places, form, index)
    if bias is not None and (bias.shape != places.shape or bias.dtype != torch.float32):
        raise _unfit(f"fp32 {list(places.shape)}, one per place", bias=bias)


def check_record_sum(
    a: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int, start: Tensor | None
) -> None:
    """Raise InvalidInput if the arguments of `record_sum` do not fit together."""
    check_records(a, len(places), records, places, form, index)
    if start is not None and (start.shape != (len(a), form.width) or start.dtype != torch.float32):
        raise _unfit(f"fp32 {[len(a), form.width]}, one per row", start=start)


def check_convert(source: Tensor, target: Tensor) -> None:
    """Raise InvalidInput if the tensors are not 1-D, contiguous and of one size."""
    if source.dim() != 1 or source.shape != target.shape or not (source.is_contiguous() and target.is_contiguous()):
        raise _unfit("1-D, contiguous and of one size", source=source, target=target)
