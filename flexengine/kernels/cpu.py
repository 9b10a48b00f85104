"""The native kernels: the C++ code in this folder, called through ctypes, which releases the GIL."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any, Literal

import torch
from torch import Tensor

from flexengine.codec.cache import WIDEST, CacheFormat
from flexengine.codec.packed import Packed
from flexengine.codec.records import PLAIN, RecordForm
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.kernels import base, build, checks, structs
from flexengine.kernels.cached import append_call, decode_call, pieces_of, prompt_call, prompts_call
from flexengine.kernels.paged import PagedAttention, Prompts
from flexengine.kernels.pages import bad_sequence, bad_token
from flexengine.kernels.recycled import ALIGNED
from flexengine.kernels.reference import ReferenceKernels
from flexengine.kernels.steps import KINDS, Steps
from flexengine.kernels.structs import CODES

BLOCK = 64  # bytes of a block of plain numbers in neurons.h
STREAM = 2 << 20  # bytes; stores of `convert` to targets of this size or more bypass the CPU's cache


class NativeKernels(ReferenceKernels):
    """Kernels in C++, see base.Kernels. Tensors on a GPU, or of other dtypes than fp32, bf16, fp16, use plain torch.

    Attributes:
        simd: vector width in bits that the library was compiled for; 0 for portable code.
        bf16: whether the library multiplies pairs of bf16. If not, numbers are rounded to bf16 and multiplied in fp32.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        structs.check(library)

        def bound(name: str, returns: Any = None, takes: Any = (c_void_p,)) -> Any:
            function = getattr(library, f"flex_{name}")
            function.argtypes, function.restype = list(takes), returns
            return function

        self._decode, self._append = bound("decode", c_int64), bound("append", c_int64)
        self._decode_bytes, self._append_check = bound("decode_bytes", c_int64), bound("append_check", c_int64)
        self._prompts = bound("prompts", c_int64, (c_void_p, c_int64))
        self._prompt_scratch, self._prompts_bytes = bound("prompt_scratch", c_int64), bound("prompts_bytes", c_int64)
        self._pack = bound("pack", takes=(c_void_p, c_int64, c_int64, c_void_p, c_int32))
        self._panel = int(bound("panel", c_int64, ())())
        self._run, self._spent = bound("run", takes=(c_void_p, c_int64, c_int32)), bound("spent")
        self._record_products, self._record_sum = bound("record_products", c_int64), bound("record_sum", c_int64)
        self._record_elements = bound("record_elements", c_int64)
        numbers = (c_int64, c_int32, c_int32, c_int64, c_int32)
        self._convert = bound("convert", takes=(c_void_p, c_void_p, *numbers))
        self.simd, self.bf16 = int(library.flex_simd()), bool(library.flex_bf16())

    def steps(self) -> Steps:
        """Return an empty list of steps."""
        return Steps(self._run, self.bf16)

    def spent(self) -> dict[str, float]:
        """Return the seconds of all steps of this process so far, by kind. Steps that ran beside each other count as
        the first of them."""
        nanoseconds = (c_int64 * len(KINDS))()
        self._spent(ctypes.addressof(nanoseconds))
        return {kind: value * 1e-9 for kind, value in zip(KINDS, nanoseconds, strict=True)}

    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None = None
    ) -> None:
        if not _native(k, v, pool, pages, offsets):
            return super().append(k, v, pool, pages, offsets, form)
        room = checks.check_append(k, v, pool, pages, offsets, form)
        k, v, pages, offsets = _rows(k), _rows(v), _int32(pages), _int32(offsets)
        call = append_call(k, v, pool, pages, offsets, form, room)
        if bad := self._append(ctypes.addressof(call)):
            raise bad_token(bad - 1, room)

    def paged(
        self, heads: int, pool: Tensor, tables: Tensor, lengths: Tensor, window: int | None, form: CacheFormat | None,
        pages: Tensor, offsets: Tensor, prompts: Sequence[Prompts] = (), memory: Tensor | None = None,
    ) -> PagedAttention | None:  # fmt: skip
        if not _native(pool, tables, lengths, pages, offsets):
            return None
        room = checks.check_pool(pool, form)
        tables, lengths, pages, offsets = (_int32(x) for x in (tables, lengths, pages, offsets))
        checks.check_pieces(prompts, len(lengths), len(pages), room)
        row = torch.empty(1, 1, 1, dtype=torch.float32).expand(len(pages), heads, room.dim)  # for its shape
        kv = row[:, : room.kv_heads]
        append = append_call(kv, kv, pool, pages, offsets, form, room)
        if bad := self._append_check(ctypes.addressof(append)):
            raise bad_token(bad - 1, room)
        given = (heads, pool, tables, lengths, window, form, pages, offsets, *pieces_of(prompts))
        found = PagedAttention(*given, room, pool, split=0)
        if len(lengths):
            options = (window or 0, 1.0, 1.0, 0.0)
            decode = decode_call(row[: len(lengths)], pool, tables, lengths, form, room, options, (None,) * 5)
            if (nbytes := self._decode_bytes(ctypes.addressof(decode))) < 0:
                raise bad_sequence(-nbytes - 1, room)
            found = found._replace(split=-(-nbytes // ALIGNED) * ALIGNED)
        needed = found.split
        if prompts:
            call = prompts_call(row, kv, kv, None, found, 1.0, None, None)
            if (nbytes := self._prompts_bytes(ctypes.addressof(call))) < 0:
                raise bad_sequence(-nbytes - 1, room)
            needed += nbytes
        if memory is None or memory.nbytes < needed:
            try:
                memory = torch.empty(needed, dtype=torch.uint8)
            except RuntimeError as error:
                raise no_memory("the scratch memory of attention", needed) from error
        return found._replace(memory=memory)

    def decode_attention(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: Tensor | None = None, form: CacheFormat | None = None,
        topk: float | None = None, with_lse: bool = False,
    ) -> Any:  # fmt: skip
        if not _native(q, pool, tables, lengths):
            return super().decode_attention(
                q, pool, tables, lengths, scale, window, softcap, sinks, form, topk, with_lse
            )
        checks.check_decode(q, pool, tables, lengths, form)
        checks.check_options(window, softcap, sinks, q.shape[1])
        checks.check_topk(topk, with_lse)
        n, heads, dim = q.shape
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        out = torch.empty((n, heads, dim), dtype=q.dtype)
        lse = torch.empty((n, heads), dtype=torch.float32) if with_lse else None
        options = (window or 0, 1.0 if topk is None else topk, scale, softcap or 0.0)
        self._attend(q, pool, tables, lengths, form, options, (out, sinks, lse, None))
        return out if lse is None else (out, lse)

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
        form: CacheFormat | None = None,
    ) -> Tensor:
        if not _native(q, pool, tables, lengths):
            return super().choose(q, pool, tables, lengths, scale, topk, window, softcap, form)
        room = checks.check_decode(q, pool, tables, lengths, form)
        checks.check_options(window, softcap, None, q.shape[1])
        checks.check_topk(topk)
        chosen = torch.zeros((len(q), room.kv_heads, tables.shape[1] * room.page_tokens), dtype=torch.bool)
        options = (window or 0, topk, scale, softcap or 0.0)
        self._attend(q, pool, tables, lengths, form, options, (None, None, None, chosen))
        return chosen

    def _attend(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, form: CacheFormat | None,
        options: tuple[int, float, float, float], others: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        """Call flex_decode.

        Args:
            q, pool, tables, lengths, form: as in `decode_attention`.
            options: (window, topk, scale, softcap).
            others: (out, sinks, lse, chosen).
        """
        room = checks.check_pool(pool, form)
        q, tables, lengths = _rows(q), _int32(tables), _int32(lengths)
        call = decode_call(q, pool, tables, lengths, form, room, options, (*others, None))
        status = self._decode(ctypes.addressof(call))
        if status > 0:
            raise bad_sequence(status - 1, room)
        if status < 0:
            raise no_memory("the partial results of decode attention", -status)

    def attend_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, past: base.Past | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not _native(q, k, v, *(() if past is None else past[:2])):
            return super().attend_prompt(q, k, v, scale, window, softcap, sinks, past, out)
        checks.check_prompt(q, k, v, out)
        direct = out is not None and out.dtype == torch.float32
        sums = out if out is not None and direct else torch.empty(q.shape, dtype=torch.float32, device="cpu")
        self._attend_prompts([base.PromptCall(q, k, v, sums, past)], scale, window, softcap, sinks)
        if out is None:
            return sums.to(q.dtype)
        return out if direct else out.copy_(sums)

    def attend_prompts(
        self, prompts: Sequence[base.PromptCall], scale: float, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if not all(_native(p.q, p.k, p.v, *(p.past or ())[:2]) and p.q.dtype == torch.float32 for p in prompts):
            return super().attend_prompts(prompts, scale, window, softcap, sinks)
        for p in prompts:
            checks.check_prompt(p.q, p.k, p.v, p.out)
        self._attend_prompts(prompts, scale, window, softcap, sinks)

    def _attend_prompts(
        self, prompts: Sequence[base.PromptCall], scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute attention in one call. The results are in fp32."""
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        calls, kept = (structs.Prompt * len(prompts))(), list[Any]()
        for number, prompt in enumerate(prompts):
            checks.check_options(window, softcap, sinks, prompt.q.shape[2])
            q, k, v = (_rows(x.float()) for x in prompt[:3])
            if (past := prompt.past) is not None:
                checks.check_past(q, k, past := past._replace(table=_int32(past.table)))
            kept.append(given := base.PromptCall(q, k, v, prompt.out, past))
            calls[number] = prompt_call(given, scale, window, softcap, sinks)
        status = self._prompts(ctypes.addressof(calls), len(calls))
        if status > 0:
            past = prompts[status - 1].past
            assert past is not None
            raise bad_sequence(0, checks.check_pool(past.pool, past.form))
        if status < 0:
            raise no_memory("the scratch memory of prompt attention", -status)

    def prompt_scratch(self, heads: int, kv_heads: int, head_dim: int) -> int:
        threads = torch.get_num_threads()
        call = structs.Prompt(heads=heads, kv_heads=kv_heads, dim=head_dim, batch=1, queries=1 << 30, threads=threads)
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
        if not _native(x, weight) or x.shape[-1:] == (0,):
            return super().linear(x, weight, bias, compute)
        checks.check_linear(x, weight, bias)
        if weight.shape[1] > 1 and weight.stride(1) != 1:  # a transposed matrix
            x = x if compute is None else x.bfloat16().float()
            out = x.new_zeros(*x.shape[:-1], len(weight)) if bias is None else bias.expand(*x.shape[:-1], -1).clone()
            self.add_weighted(out.view(-1, len(weight)), x.reshape(-1, x.shape[-1]), weight.t())
            return out
        steps = self.steps()
        out = steps.linear(_rows(x.reshape(-1, x.shape[-1])), weight, _contiguous(bias), compute, packed=packed)
        steps.run()
        return out.view(*x.shape[:-1], weight.shape[0])

    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        if not _native(a, rows) or not len(rows):
            return super().add_weighted(out, a, rows)
        checks.check_add_weighted(out, a, rows)
        steps = self.steps()
        steps.add_weighted(out, _rows(a), rows)
        steps.run()

    def product(
        self, x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None = None, compute: base.Compute | None = None
    ) -> Tensor:
        if not _native(x, weight) or form.columns == 0:
            return super().product(x, weight, form, bias, compute)
        checks.check_product(x, weight, form, bias)
        steps = self.steps()
        out = steps.product(_rows(x.reshape(-1, form.columns)), weight, form, _contiguous(bias), compute)
        steps.run()
        return out.view(*x.shape[:-1], form.rows)

    def record_vectors(self, records: Tensor, form: RecordForm, index: int) -> Tensor:
        if form.coded is None or not _native(records) or not _in_blocks(form):
            return super().record_vectors(records, form, index)
        out = torch.empty((len(records), form.width), dtype=torch.float32, device="cpu")
        checks.check_records(out, form.width, records, places := torch.arange(len(records)), form, index)
        self._with_records(self._record_elements, out, records, places, form, index, (out, None, None, None))
        return out

    def record_products(
        self, x: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, bias: Tensor | None = None
    ) -> Tensor:
        if not _native(x, records, places) or not _in_blocks(form):
            return super().record_products(x, records, places, form, index, bias)
        checks.check_record_products(x, records, places, form, index, bias)
        bias = None if bias is None else bias.contiguous()
        out = torch.empty((len(x), len(places)), dtype=torch.float32, device="cpu")
        self._with_records(self._record_products, x, records, places, form, index, (out, bias, None, None))
        return out.to(x.dtype)

    def record_sum(
        self, a: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, start: Tensor | None = None
    ) -> Tensor:
        if not _native(a, records, places) or not _in_blocks(form):
            return super().record_sum(a, records, places, form, index, start)
        checks.check_record_sum(a, records, places, form, index, start)
        start = None if start is None else start.contiguous()
        out = torch.empty((len(a), form.width), dtype=torch.float32, device="cpu")
        scratch = torch.empty(sum((4 * rows + 8) * (len(places) + 2) for rows in (len(a), 1)), dtype=torch.uint8)
        self._with_records(self._record_sum, a, records, places, form, index, (out, None, scratch, start))
        return out

    @staticmethod
    def _with_records(
        function: Any, x: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int,
        others: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        """Call a function of neurons.cpp.

        Args:
            x, records, places, form, index: as in `record_products` and `record_sum`.
            others: (out, bias, scratch, start).
        """
        rows, places = _rows(x.float()), places.contiguous()
        out = others[0]
        assert out is not None
        call = structs.Records(
            *(x.data_ptr() for x in (rows, records, places)),
            *(None if x is None else x.data_ptr() for x in (others[1], others[3], out, others[2])),
            *(len(rows), len(places), len(records), form.nbytes, index * form.vector_bytes, form.width),
            *(rows.stride(0), out.stride(0)),
            *(CODES[PLAIN[form.kind]] if form.coded is None else form.coded.bits * 16, torch.get_num_threads()),
        )
        if bad := function(ctypes.addressof(call)):
            raise checks.bad_place(places, bad - 1, records)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        if not _fp32(x, weight) or x.numel() == 0:
            return super().rms_norm(x, weight, eps, shift)
        checks.check_norm(x, weight)
        steps = self.steps()
        out = steps.norm(_rows(x.reshape(-1, x.shape[-1])), weight.contiguous(), eps, shift)
        steps.run()
        return out.view(x.shape)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not _fp32(x, cos, sin) or cos.shape[0] != 1 or x.shape[0] != 1:
            return super().rotate(x, cos, sin)
        checks.check_rotate(x, cos, sin)
        steps = self.steps()
        out = steps.rotate(_rows(x)[0].transpose(0, 1), cos[0].contiguous(), sin[0].contiguous())
        steps.run()
        return out[None].transpose(1, 2)

    def gate(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        if not _fp32(gate, up) or not (gate.is_contiguous() and up.is_contiguous()):
            return super().gate(gate, up, act)
        checks.check_gate(gate, up, act)
        steps = self.steps()
        steps.gate(gate, up, act)
        steps.run()
        return gate

    def convert(self, source: Tensor, target: Tensor, threads: int = 1) -> None:
        if not _native(source, target) or source.dtype not in CODES or target.dtype not in CODES:
            return super().convert(source, target)
        checks.check_convert(source, target)
        codes = CODES[source.dtype], CODES[target.dtype]
        self._convert(source.data_ptr(), target.data_ptr(), source.numel(), *codes, STREAM, threads)


def load_native(*flags: str) -> NativeKernels:
    """Return the native kernels; `flags` are for the compiler. Raise build.BuildFailed if they cannot be built."""
    return NativeKernels(build.load(*flags))


def no_memory(what: str, needed: int) -> OutOfMemory:
    """Return the error for a failed allocation of `needed` bytes in a native kernel."""
    return OutOfMemory("device", what, needed, remedy="lower --device-mem, or end what else takes memory")


def _native(*tensors: Tensor) -> bool:
    """Return whether all tensors are on the CPU, and floats have a dtype that the library supports."""
    return all(x.device.type == "cpu" and (x.dtype in CODES or not x.dtype.is_floating_point) for x in tensors)


def _fp32(*tensors: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)


def _in_blocks(form: RecordForm) -> bool:
    """Return whether vectors are whole blocks of their format in neurons.h. Other widths, which are rare, are not."""
    if form.coded is not None:
        return form.coded.group == WIDEST[form.coded.bits]
    return form.width * PLAIN[form.kind].itemsize % BLOCK == 0


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _int32(x: Tensor) -> Tensor:
    if x.dtype != torch.int32:
        raise InvalidInput(f"page tables, offsets and lengths are int32, not {x.dtype}")
    return x.contiguous()
