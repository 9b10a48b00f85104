"""Argument structs of the native kernels, with the fields that the C++ text gives them, and functions that fill them.

The functions check no arguments.
"""

import ctypes
import re
from collections.abc import Iterator, Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.errors import InvalidInput
from flexengine.kernels.base import AttentionOptions, PromptCall
from flexengine.kernels.paged import PagedAttention, PromptPieces, Room

if TYPE_CHECKING:
    from flexengine.codec.forms import Form

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Dtype of simd.h
STRUCTS = dict[str, type[ctypes.Structure]]()  # by name in lower case, as in flex_<name>_size
_TYPES = {"double": c_double, "float": c_float, "int32_t": c_int32, "int64_t": c_int64}


@cache
def _text(file: str) -> str:
    return re.sub(r" *//.*", "", (Path(__file__).parent / file).read_text())


def _struct(name: str, file: str) -> Any:
    """Return a struct of a C++ file. Its fields end at an empty line, before its functions."""
    body = re.split(r"\n\n|};", _text(file).partition(f"\nstruct {name} {{\n")[2], maxsplit=1)[0]
    STRUCTS[name.lower()] = made = type(name, (ctypes.Structure,), {"_fields_": list(_fields(body))})
    return made


def _fields(body: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the type of each field; all pointers are addresses."""
    for kind, names in re.findall(r"(?:const )?(\w+)([^;]+);", body):
        for name in names.split(","):
            yield name.strip(" *"), c_void_p if "*" in name else _TYPES[kind]


Add = _struct("Add", "elementwise.h")
Append = _struct("Append", "cache.h")
Batch = _struct("Batch", "prompt.h")
Conv = _struct("Conv", "states.h")
Decode = _struct("Decode", "rows.h")
Delta = _struct("Delta", "states.h")
Gate = _struct("Gate", "elementwise.h")
Layout = _struct("Layout", "decoders.h")
Linear = _struct("Linear", "linear.h")
Narrow = _struct("Narrow", "elementwise.h")
Norm = _struct("Norm", "elementwise.h")
Product = _struct("Product", "quantized_gemm.h")
Prompt = _struct("Prompt", "prompt.h")
Reads = _struct("Reads", "reads.cpp")
Records = _struct("Records", "neurons.h")
Rotate = _struct("Rotate", "elementwise.h")
Scan = _struct("Scan", "states.h")
Select = _struct("Select", "states.h")
Sampling = _struct("Sampling", "sampling.cpp")
Step = _struct("Step", "steps.h")


def bound(library: ctypes.CDLL, name: str, returns: Any = None, takes: Sequence[Any] = (c_void_p,)) -> Any:
    """Return the library's function flex_`name`. returns, takes: types of its result and its arguments."""
    function = getattr(library, f"flex_{name}")
    function.argtypes, function.restype = list(takes), returns
    return function


def check(library: ctypes.CDLL) -> None:
    """Raise RuntimeError if a struct has another size in the library: its fields would be misread."""
    for name, struct in STRUCTS.items():
        native, here = bound(library, f"{name}_size", c_int64, ())(), ctypes.sizeof(struct)
        if native != here:
            raise RuntimeError(f"the argument struct of flex_{name} has {native} bytes in the native kernels but {here}"
                               " here; declare it in C++ as the other structs are")  # fmt: skip


@cache
def layout_of(form: "Form") -> Any:
    """Return the struct Layout of a format; None if it has none."""
    given = form.layout
    if given is None:
        return None
    return Layout(**{name: getattr(given, name) for name, _ in Layout._fields_})


def int32(x: Tensor) -> Tensor:
    """Return x, contiguous. Raise InvalidInput unless it is int32."""
    if x.dtype != torch.int32:
        raise InvalidInput(f"page tables, offsets and lengths are int32, not {x.dtype}")
    return x.contiguous()


def address(x: Tensor | None) -> int | None:
    """Return where a tensor begins; None for none."""
    return None if x is None else x.data_ptr()


def append_call(
    k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None, room: Room
) -> Any:
    """Return the arguments of base.Kernels.append. k, v: with a stride of 1 along a row."""
    return Append(
        *(x.data_ptr() for x in (k, v, pool, pages, offsets)),
        *(k.shape[0], *room, 0 if form is None else form.group),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(CODES[k.dtype], stored(pool, form), torch.get_num_threads()),
    )


def decode_call(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, room: Room, options: AttentionOptions,
    form: CacheFormat | None, **tensors: Tensor | None,
) -> Any:  # fmt: skip
    """Return the arguments of base.Kernels.decode_attention.

    Args:
        q: with a stride of 1 along a row.
        pool, tables, lengths, options, form: as there; sinks are in `tensors`.
        tensors: out, sinks, lse, chosen and memory of struct Decode.
    """
    given = {"q": q, "pool": pool, "tables": tables, "lengths": lengths, **tensors}
    return Decode(
        n=q.shape[0], heads=q.shape[1], pages=room.pages, kv_heads=room.kv_heads, page_tokens=room.page_tokens,
        dim=room.dim, group=0 if form is None else form.group, max_pages=tables.shape[1], q_row=q.stride(0),
        q_head=q.stride(1), window=options.window or 0, topk=1.0 if options.topk is None else options.topk,
        scale=options.scale, softcap=options.softcap or 0.0, q_dtype=CODES[q.dtype], pool_dtype=stored(pool, form),
        threads=torch.get_num_threads(), **{name: address(x) for name, x in given.items()},
    )  # fmt: skip


def prompt_call(prompt: PromptCall, room: Room | None, options: AttentionOptions) -> Any:
    """Return the arguments of base.Kernels.attend_prompt.

    Args:
        prompt: q, k and v in fp32, with a stride of 1 along a row.
        room: sizes of the pool of cached tokens; None if there are none.
        options: sinks in fp32, contiguous.
    """
    q, k, v, out, past = prompt
    cached: tuple[int, ...] = (0, 0, 1, 0)
    pool = table = None
    code = 0
    if past is not None and room is not None:
        cached = (past.length, room.pages, room.page_tokens, 0 if past.form is None else past.form.group)
        pool, table, code = past.pool, past.table, stored(past.pool, past.form)
    (batch, queries, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
    return Prompt(
        *(address(x) for x in (q, k, v, options.sinks, out, pool, table)),
        *(batch, queries, keys, heads, kv_heads, dim, options.window or 0, *cached),
        *(x.stride(i) for x in (q, k, v) for i in range(3)),
        *(options.scale, options.softcap or 0.0, code, options.rounded, torch.get_num_threads()),
    )


def batch_call(
    qkv: tuple[Tensor, Tensor, Tensor], out: Tensor | None, to: PagedAttention, options: AttentionOptions,
    memory: Tensor | None,
) -> Any:  # fmt: skip
    """Return the arguments of the attention of prompts.

    Args:
        qkv: of all tokens, [tokens, heads, head_dim], with a stride of 1 along a row.
        out: receives the result, [tokens, heads, head_dim], contiguous; None to ask for the size of the memory.
        to: what else the call reads.
        options: scale, softcap, sinks and rounded are used.
        memory: scratch memory; None to ask for its size.
    """
    assert to.pieces is not None
    return Batch(
        *(address(x) for x in (*qkv, options.sinks, out, to.pool, to.pieces, to.entries, memory)),
        *(len(to.pieces), qkv[0].shape[1], to.room.kv_heads, to.room.dim, to.window or 0),
        *(to.room.pages, to.room.page_tokens, 0 if to.form is None else to.form.group),
        *(x.stride(i) for x in qkv for i in range(2)),
        *(options.scale, options.softcap or 0.0, stored(to.pool, to.form), options.rounded, torch.get_num_threads()),
    )


def pieces_of(prompts: Sequence[PromptPieces]) -> tuple[Tensor | None, Tensor]:
    """Return `PagedAttention.pieces` and `PagedAttention.entries`."""
    tables = [int32(p.table) for p in prompts if p.table is not None]
    # At least one entry, as a recorded call needs the address, also if its first prompts have no cached tokens.
    entries = torch.cat(tables) if tables else torch.zeros(1, dtype=torch.int32)
    if not prompts:
        return None, entries
    rows, at = list[list[int]](), 0
    for p in prompts:
        rows.append([p.first, p.rows, p.length, p.past, at])
        at += 0 if p.table is None else len(p.table)
    return torch.tensor(rows), entries


def stored(pool: Tensor, form: CacheFormat | None) -> int:
    """Return the code of a pool's format: enum Dtype of simd.h for floats, enum Codes of quantized_kv.h if encoded."""
    return CODES[pool.dtype] if form is None else form.bits * 16
