"""The native kernels: the C++ code in this folder, called through ctypes, which releases the GIL."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flexengine.codec.cache import WIDEST, CacheFormat
from flexengine.codec.forms import Form
from flexengine.errors import OutOfMemory
from flexengine.kernels import base, build, checks, structs
from flexengine.kernels.base import AttentionOptions, Kernels, PromptCall, kernels_of
from flexengine.kernels.paged import PagedAttention, PagedTokens, Room
from flexengine.kernels.recycled import ALIGNED
from flexengine.kernels.steps import KINDS, Steps
from flexengine.kernels.structs import CODES, int32

if TYPE_CHECKING:
    from flexengine.codec.records import RecordForm

STREAM = 2 << 20  # bytes; stores of `convert` to targets of this size or more bypass the CPU's cache
BLOCK = 64  # bytes of a block of plain numbers in neurons.h


class NativeKernels(Kernels):
    """Kernels in C++, see base.Kernels. Tensors on a GPU, or of other dtypes than fp32, bf16, fp16, use plain torch."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        structs.check(library)
        self.library = library
        bound = partial(structs.bound, library)
        self._decode, self._append = bound("decode", c_int64), bound("append", c_int64)
        self._decode_bytes, self._append_check = bound("decode_bytes", c_int64), bound("append_check", c_int64)
        self._prompts = bound("prompts", c_int64, (c_void_p, c_int64))
        self._prompt_scratch, self._batch_bytes = bound("prompt_scratch", c_int64), bound("batch_bytes", c_int64)
        names = ("record_products", "record_sum", "record_elements")
        self._record_products, self._record_sum, self._record_elements = (bound(name, c_int64) for name in names)
        self._pack = bound("pack", takes=(c_void_p, c_int64, c_int64, c_void_p, c_int32))
        self._panel = int(bound("panel", c_int64, ())())
        self._run, self._spent = bound("run", takes=(c_void_p, c_int64, c_int32)), bound("spent")
        self._items = bound("items", c_int64, takes=(c_void_p, c_int64, c_int32))
        encoded = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int32)
        self.decode_rows = bound("encoded_rows", takes=encoded)
        numbers = (c_int64, c_int32, c_int32, c_int64, c_int32)
        self._convert = bound("convert", takes=(c_void_p, c_void_p, *numbers))
        self.simd = int(library.flex_simd())  # vector width in bits that it was compiled for; 0 for portable code
        # Whether it multiplies pairs of bf16. If not, numbers are rounded to bf16 and multiplied in fp32.
        self.bf16 = bool(library.flex_bf16())

    @cached_property
    def plain(self) -> Kernels:
        """The kernels in plain torch, for what the library does not compute; few jobs need them."""
        from flexengine.kernels.reference import ReferenceKernels

        return ReferenceKernels()

    def steps(self) -> Steps:
        """Return an empty list of steps."""
        return Steps(self._run, self.bf16)

    def run_items(self, items: Any) -> None:
        """Run an array of struct Item of layers.cpp, int64 [items, 3]. Raise IndexError if one chose an expert that
        does not exist."""
        if self._items(items.ctypes.data, len(items), torch.get_num_threads()):
            raise IndexError("a router chose an expert that its layer does not have")

    def spent(self) -> dict[str, float]:
        """Return the seconds of all steps of this process so far, by kind. Steps that ran beside each other count as
        the first of them."""
        nanoseconds = (c_int64 * len(KINDS))()
        self._spent(ctypes.addressof(nanoseconds))
        return {kind: value * 1e-9 for kind, value in zip(KINDS, nanoseconds, strict=True)}

    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None = None
    ) -> None:
        if not _is_native(k, v, pool, pages, offsets):
            return self.plain.append(k, v, pool, pages, offsets, form)
        room = checks.check_append(k, v, pool, pages, offsets, form)
        k, v, pages, offsets = _in_rows(k), _in_rows(v), int32(pages), int32(offsets)
        call = structs.append_call(k, v, pool, pages, offsets, form, room)
        if bad := self._append(ctypes.addressof(call)):
            raise checks.bad_token(bad - 1, room)

    def paged(
        self, heads: int, pool: Tensor, tokens: PagedTokens, window: int | None = None,
        form: CacheFormat | None = None, memory: Tensor | None = None, rounded: bool = False,
    ) -> PagedAttention | None:  # fmt: skip
        if not _is_native(pool, *tokens[:4]):
            return None
        room = checks.check_pool(pool, form)
        tables, lengths, pages, offsets = (int32(x) for x in tokens[:4])
        checks.check_tokens(tokens, room)
        row = torch.empty(1, 1, 1, dtype=torch.float32).expand(len(pages), heads, room.dim)  # for its shape
        kv = row[:, : room.kv_heads]
        append = structs.append_call(kv, kv, pool, pages, offsets, form, room)
        if bad := self._append_check(ctypes.addressof(append)):
            raise checks.bad_token(bad - 1, room)
        found = PagedAttention(heads, pool, tables, lengths, window, form, pages, offsets,
                               *structs.pieces_of(tokens.prompts), room, pool, split=0, rounded=rounded)  # fmt: skip
        options = AttentionOptions(1.0, window, rounded=rounded)
        if len(lengths):
            call = structs.decode_call(row[: len(lengths)], pool, tables, lengths, room, options, form)
            if (nbytes := self._decode_bytes(ctypes.addressof(call))) < 0:
                raise checks.bad_sequence(-nbytes - 1, room)
            found = found._replace(split=-(-nbytes // ALIGNED) * ALIGNED)
        needed = found.split
        if tokens.prompts:
            call = structs.batch_call((row, kv, kv), None, found, options, None)
            if (nbytes := self._batch_bytes(ctypes.addressof(call))) < 0:
                raise checks.bad_sequence(len(lengths) + sum(p.rows for p in tokens.prompts[: -nbytes - 1]), room)
            needed += nbytes
        if memory is None or memory.nbytes < needed:
            try:
                memory = torch.empty(needed, dtype=torch.uint8)
            except RuntimeError as error:
                raise _no_memory("the scratch memory of attention", needed) from error
        return found._replace(memory=memory)

    def decode_attention(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not _is_native(q, pool, tables, lengths):
            return self.plain.decode_attention(q, pool, tables, lengths, options, form, lse)
        room = checks.check_decode(q, pool, tables, lengths, options, form, lse)
        out = torch.empty(q.shape, dtype=q.dtype)
        sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        q, tables, lengths = _in_rows(q), int32(tables), int32(lengths)
        self._attend(
            structs.decode_call(q, pool, tables, lengths, room, options, form, out=out, sinks=sinks, lse=lse), room
        )
        return out

    def choose(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None,
    ) -> Tensor:  # fmt: skip
        if not _is_native(q, pool, tables, lengths):
            return self.plain.choose(q, pool, tables, lengths, options, form)
        room = checks.check_decode(q, pool, tables, lengths, options, form)
        chosen = torch.zeros((len(q), room.kv_heads, tables.shape[1] * room.page_tokens), dtype=torch.bool)
        q, tables, lengths = _in_rows(q), int32(tables), int32(lengths)
        self._attend(structs.decode_call(q, pool, tables, lengths, room, options, form, chosen=chosen), room)
        return chosen

    def _attend(self, call: Any, room: Room) -> None:
        status = self._decode(ctypes.addressof(call))
        if status > 0:
            raise checks.bad_sequence(status - 1, room)
        if status < 0:
            raise _no_memory("the partial results of decode attention", -status)

    def attend_prompts(self, prompts: Sequence[PromptCall], options: AttentionOptions) -> None:
        if not all(_is_native(p.q, p.k, p.v, *(p.past or ())[:2]) for p in prompts):
            return self.plain.attend_prompts(prompts, options)
        for p in prompts:
            checks.check_prompt(p.q, p.k, p.v, p.out, options)
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.to(torch.float32).contiguous())
        if all(x.dtype == torch.float32 for p in prompts for x in p[:3]):
            return self._attend_prompts(prompts, options)
        for p in prompts:  # one by one, as there are copies in fp32
            q, k, v = p.q.float(), p.k.float(), p.v.float()
            sums = torch.empty(q.shape, dtype=torch.float32, device="cpu")
            self._attend_prompts([PromptCall(q, k, v, sums, p.past)], options)
            p.out.copy_(sums)

    def _attend_prompts(self, prompts: Sequence[PromptCall], options: AttentionOptions) -> None:
        """Compute attention in fp32, in one call."""
        calls, kept = (structs.Prompt * len(prompts))(), list[Any]()
        for number, (*qkv, out, past) in enumerate(prompts):
            q, k, v = map(_in_rows, qkv)
            room = None
            if past is not None:
                past = past._replace(table=int32(past.table))
                room = checks.check_past(q, k, past)
            kept.append(given := PromptCall(q, k, v, out, past))
            calls[number] = structs.prompt_call(given, room, options)
        status = self._prompts(ctypes.addressof(calls), len(calls))
        if status > 0:
            past = prompts[status - 1].past
            assert past is not None
            raise checks.bad_sequence(0, checks.check_pool(past.pool, past.form))
        if status < 0:
            raise _no_memory("the scratch memory of prompt attention", -status)

    def prompt_scratch(self, heads: int, kv_heads: int, head_dim: int) -> int:
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": head_dim, "batch": 1, "queries": 1 << 30}
        call = structs.Prompt(**sizes, threads=torch.get_num_threads())
        return int(self._prompt_scratch(ctypes.addressof(call)))

    def pack(self, weight: Tensor, threads: int = 1) -> bool:
        units = weight.shape[-1] * weight.element_size()
        if weight.dtype not in CODES or not weight.is_contiguous() or len(weight) < self._panel or units % 4:
            return False
        scratch = torch.empty(threads * self._panel * (units // 4), dtype=torch.float32)
        self._pack(weight.data_ptr(), len(weight), units // 4, scratch.data_ptr(), threads)
        return True

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: Literal["bf16"] | None = None,
        packed: bool = False,
    ) -> Tensor:  # fmt: skip
        if not _is_native(x, weight) or x.shape[-1:] == (0,):
            return self.plain.linear(x, weight, bias, compute)
        checks.check_linear(x, weight, bias)
        if weight.shape[1] > 1 and weight.stride(1) != 1:  # a transposed matrix
            x = x if compute is None else x.bfloat16().float()
            out = x.new_zeros(*x.shape[:-1], len(weight)) if bias is None else bias.expand(*x.shape[:-1], -1).clone()
            self.add_weighted(out.view(-1, len(weight)), x.reshape(-1, x.shape[-1]), weight.t())
            return out
        steps = self.steps()
        out = steps.linear(_in_rows(x.reshape(-1, x.shape[-1])), weight, _contiguous(bias), compute, packed=packed)
        steps.run()
        return out.view(*x.shape[:-1], weight.shape[0])

    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        if not _is_native(a, rows) or not len(rows):
            return self.plain.add_weighted(out, a, rows)
        checks.check_add_weighted(out, a, rows)
        steps = self.steps()
        steps.add_weighted(out, _in_rows(a), rows)
        steps.run()

    def product(
        self, x: Tensor, weight: Tensor, form: Form, bias: Tensor | None = None, compute: base.Compute | None = None
    ) -> Tensor:
        kernels = kernels_of(type(form), "cpu") if _is_native(x, weight) else None
        if kernels is None:
            return self.plain.product(x, weight, form, bias, compute)
        checks.check_product(x, weight, form, bias)
        out = kernels.product(self, _in_rows(x.reshape(-1, form.columns)), weight, form, _contiguous(bias), compute)
        if out is None:
            return self.plain.product(x, weight, form, bias, compute)
        return out.view(*x.shape[:-1], form.rows)

    def encoded_rows(self, weight: Tensor, form: Form, ids: Tensor) -> Tensor:
        kernels = kernels_of(type(form), "cpu") if _is_native(weight, ids) else None
        if kernels is None or kernels.rows is None:
            return self.plain.encoded_rows(weight, form, ids)
        checks.check_encoded_rows(weight, form, ids)
        return kernels.rows(self, weight, form, ids.contiguous())

    def record_vectors(self, records: Tensor, form: "RecordForm", index: int) -> Tensor:
        if form.coded is None or not _is_native(records) or not _in_blocks(form):
            return self.plain.record_vectors(records, form, index)
        out = torch.empty((len(records), form.width), dtype=torch.float32, device="cpu")
        checks.check_records(out, form.width, records, places := torch.arange(len(records)), form, index)
        self._with_records(self._record_elements, out, records, places, form, index, out=out)
        return out

    def record_products(
        self, x: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int, bias: Tensor | None = None
    ) -> Tensor:
        if not _is_native(x, records, places) or not _in_blocks(form):
            return self.plain.record_products(x, records, places, form, index, bias)
        checks.check_record_products(x, records, places, form, index, bias)
        out = torch.empty((len(x), len(places)), dtype=torch.float32, device="cpu")
        self._with_records(self._record_products, x, records, places, form, index, out=out, bias=_contiguous(bias))
        return out.to(x.dtype)

    def record_sum(
        self, a: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int, start: Tensor | None = None
    ) -> Tensor:
        if not _is_native(a, records, places) or not _in_blocks(form):
            return self.plain.record_sum(a, records, places, form, index, start)
        checks.check_record_sum(a, records, places, form, index, start)
        out = torch.empty((len(a), form.width), dtype=torch.float32, device="cpu")
        scratch = torch.empty(sum((4 * rows + 8) * (len(places) + 2) for rows in (len(a), 1)), dtype=torch.uint8)
        self._with_records(self._record_sum, a, records, places, form, index, out=out, scratch=scratch,
                           start=_contiguous(start))  # fmt: skip
        return out

    @staticmethod
    def _with_records(
        function: Any, x: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int,
        **tensors: Tensor | None,
    ) -> None:  # fmt: skip
        """Call a function of neurons.cpp. tensors: out, bias, scratch and start of struct Records."""
        rows, places, out = _in_rows(x.float()), places.contiguous(), tensors["out"]
        assert out is not None
        given = {"x": rows, "records": records, "places": places, **tensors}
        call = structs.Records(
            rows=len(rows), n=len(places), room=len(records), nbytes=form.nbytes, shift=index * form.vector_bytes,
            width=form.width, x_row=rows.stride(0), out_row=out.stride(0), threads=torch.get_num_threads(),
            kind=form.coded.bits * 16 if form.coded else CODES[form.dtype],
            **{name: structs.address(tensor) for name, tensor in given.items()},
        )  # fmt: skip
        if bad := function(ctypes.addressof(call)):
            raise checks.bad_place(places, bad - 1, records)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        if not is_fp32(x, weight) or x.numel() == 0:
            return self.plain.rms_norm(x, weight, eps, shift)
        checks.check_norm(x, weight)
        steps = self.steps()
        out = steps.norm(_in_rows(x.reshape(-1, x.shape[-1])), weight.contiguous(), eps, shift)
        steps.run()
        return out.view(x.shape)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not is_fp32(x, cos, sin) or cos.shape[0] != 1 or x.shape[0] != 1:
            return self.plain.rotate(x, cos, sin)
        checks.check_rotate(x, cos, sin)
        steps = self.steps()
        out = steps.rotate(_in_rows(x)[0].transpose(0, 1), cos[0].contiguous(), sin[0].contiguous())
        steps.run()
        return out[None].transpose(1, 2)

    def gate(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        if not is_fp32(gate, up) or not (gate.is_contiguous() and up.is_contiguous()):
            return self.plain.gate(gate, up, act)
        checks.check_gate(gate, up, act)
        steps = self.steps()
        steps.gate(gate, up, act)
        steps.run()
        return gate

    def convert(self, source: Tensor, target: Tensor, threads: int = 1) -> None:
        if not _is_native(source, target) or source.dtype not in CODES or target.dtype not in CODES:
            return self.plain.convert(source, target)
        checks.check_convert(source, target)
        codes = CODES[source.dtype], CODES[target.dtype]
        self._convert(source.data_ptr(), target.data_ptr(), source.numel(), *codes, STREAM, threads)


def load_native(*flags: str) -> NativeKernels:
    """Return the native kernels; `flags` are for the compiler. Raise build.BuildFailed if they cannot be built."""
    return NativeKernels(build.load(*flags))


def _no_memory(what: str, needed: int) -> OutOfMemory:
    """Return the error for a failed allocation of `needed` bytes in a native kernel."""
    return OutOfMemory("device", what, needed, remedy="lower --device-mem, or end what else takes memory")


def _is_native(*tensors: Tensor) -> bool:
    """Return whether all tensors are on the CPU, and floats have a dtype that the library supports."""
    return all(x.device.type == "cpu" and (x.dtype in CODES or not x.dtype.is_floating_point) for x in tensors)


def is_fp32(*tensors: Tensor) -> bool:
    """Return whether all tensors are fp32, on the CPU."""
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)


def _in_rows(x: Tensor) -> Tensor:
    """Return x, copied unless its rows have a stride of 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _in_blocks(form: "RecordForm") -> bool:
    """Return whether vectors are whole blocks of their format in neurons.h. Other widths, which are rare, are not."""
    if form.coded is None:
        return form.vector_bytes % BLOCK == 0
    return form.coded.group == WIDEST[form.coded.bits]
