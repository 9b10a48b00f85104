"""The native kernels: the C++ code in this folder, called through ctypes, which releases the GIL."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import Form
from flexengine.errors import OutOfMemory
from flexengine.kernels import base, build, checks, structs
from flexengine.kernels.cached import DecodeOptions, append_call, batch_call, decode_call, pieces_of, prompt_call
from flexengine.kernels.formats import kernels_of
from flexengine.kernels.native_neurons import NativeNeurons
from flexengine.kernels.operands import contiguous, in_rows, int32, is_fp32, is_native
from flexengine.kernels.paged import PagedAttention, PromptPieces
from flexengine.kernels.pages import bad_sequence, bad_token
from flexengine.kernels.recycled import ALIGNED
from flexengine.kernels.steps import KINDS, Steps
from flexengine.kernels.structs import CODES

STREAM = 2 << 20  # bytes; stores of `convert` to targets of this size or more bypass the CPU's cache


class NativeKernels(NativeNeurons):
    """Kernels in C++, see base.Kernels. Tensors on a GPU, or of other dtypes than fp32, bf16, fp16, use plain torch.

    Attributes:
        simd: vector width in bits that the library was compiled for; 0 for portable code.
        bf16: whether the library multiplies pairs of bf16. If not, numbers are rounded to bf16 and multiplied in fp32.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        structs.check(library)
        super().__init__(library)
        bound = partial(structs.bound, library)
        self._decode, self._append = bound("decode", c_int64), bound("append", c_int64)
        self._decode_bytes, self._append_check = bound("decode_bytes", c_int64), bound("append_check", c_int64)
        self._prompts = bound("prompts", c_int64, (c_void_p, c_int64))
        self._prompt_scratch, self._batch_bytes = bound("prompt_scratch", c_int64), bound("batch_bytes", c_int64)
        self._pack = bound("pack", takes=(c_void_p, c_int64, c_int64, c_void_p, c_int32))
        self._panel = int(bound("panel", c_int64, ())())
        self._run, self._spent = bound("run", takes=(c_void_p, c_int64, c_int32)), bound("spent")
        encoded = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int32)
        self.decode_rows = bound("encoded_rows", takes=encoded)
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
        if not is_native(k, v, pool, pages, offsets):
            return super().append(k, v, pool, pages, offsets, form)
        room = checks.check_append(k, v, pool, pages, offsets, form)
        k, v, pages, offsets = in_rows(k), in_rows(v), int32(pages), int32(offsets)
        call = append_call(k, v, pool, pages, offsets, form, room)
        if bad := self._append(ctypes.addressof(call)):
            raise bad_token(bad - 1, room)

    def paged(
        self, heads: int, pool: Tensor, tables: Tensor, lengths: Tensor, window: int | None, form: CacheFormat | None,
        pages: Tensor, offsets: Tensor, prompts: Sequence[PromptPieces] = (), memory: Tensor | None = None,
    ) -> PagedAttention | None:  # fmt: skip
        if not is_native(pool, tables, lengths, pages, offsets):
            return None
        room = checks.check_pool(pool, form)
        tables, lengths, pages, offsets = (int32(x) for x in (tables, lengths, pages, offsets))
        checks.check_pieces(prompts, len(lengths), pages, offsets, room)
        row = torch.empty(1, 1, 1, dtype=torch.float32).expand(len(pages), heads, room.dim)  # for its shape
        kv = row[:, : room.kv_heads]
        append = append_call(kv, kv, pool, pages, offsets, form, room)
        if bad := self._append_check(ctypes.addressof(append)):
            raise bad_token(bad - 1, room)
        given = (heads, pool, tables, lengths, window, form, pages, offsets, *pieces_of(prompts))
        found = PagedAttention(*given, room, pool, split=0)
        if len(lengths):
            options = DecodeOptions(1.0, window)
            decode = decode_call(row[: len(lengths)], pool, tables, lengths, form, room, options)
            if (nbytes := self._decode_bytes(ctypes.addressof(decode))) < 0:
                raise bad_sequence(-nbytes - 1, room)
            found = found._replace(split=-(-nbytes // ALIGNED) * ALIGNED)
        needed = found.split
        if prompts:
            call = batch_call(row, kv, kv, None, found, 1.0, None, None)
            if (nbytes := self._batch_bytes(ctypes.addressof(call))) < 0:
                raise bad_sequence(len(lengths) + sum(p.rows for p in prompts[: -nbytes - 1]), room)
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
        if not is_native(q, pool, tables, lengths):
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
        options = DecodeOptions(scale, window, softcap, topk)
        self._attend(q, pool, tables, lengths, form, options, out=out, sinks=sinks, lse=lse)
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
        if not is_native(q, pool, tables, lengths):
            return super().choose(q, pool, tables, lengths, scale, topk, window, softcap, form)
        room = checks.check_decode(q, pool, tables, lengths, form)
        checks.check_options(window, softcap, None, q.shape[1])
        checks.check_topk(topk)
        chosen = torch.zeros((len(q), room.kv_heads, tables.shape[1] * room.page_tokens), dtype=torch.bool)
        options = DecodeOptions(scale, window, softcap, topk)
        self._attend(q, pool, tables, lengths, form, options, chosen=chosen)
        return chosen

    def _attend(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, form: CacheFormat | None,
        options: DecodeOptions, **tensors: Tensor | None,
    ) -> None:  # fmt: skip
        """Call flex_decode. Arguments are as in `decode_attention` and `decode_call`."""
        room = checks.check_pool(pool, form)
        q, tables, lengths = in_rows(q), int32(tables), int32(lengths)
        call = decode_call(q, pool, tables, lengths, form, room, options, **tensors)
        status = self._decode(ctypes.addressof(call))
        if status > 0:
            raise bad_sequence(status - 1, room)
        if status < 0:
            raise no_memory("the partial results of decode attention", -status)

    def attend_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, past: base.Past | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not is_native(q, k, v, *(() if past is None else past[:2])):
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
        if not all(is_native(p.q, p.k, p.v, *(p.past or ())[:2]) and p.q.dtype == torch.float32 for p in prompts):
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
        calls, kept = (structs.PromptArgs * len(prompts))(), list[Any]()
        for number, prompt in enumerate(prompts):
            checks.check_options(window, softcap, sinks, prompt.q.shape[2])
            q, k, v = (in_rows(x.float()) for x in prompt[:3])
            past, room = prompt.past, None
            if past is not None:
                past = past._replace(table=int32(past.table))
                room = checks.check_past(q, k, past)
            kept.append(given := base.PromptCall(q, k, v, prompt.out, past))
            calls[number] = prompt_call(given, room, scale, window, softcap, sinks)
        status = self._prompts(ctypes.addressof(calls), len(calls))
        if status > 0:
            past = prompts[status - 1].past
            assert past is not None
            raise bad_sequence(0, checks.check_pool(past.pool, past.form))
        if status < 0:
            raise no_memory("the scratch memory of prompt attention", -status)

    def prompt_scratch(self, heads: int, kv_heads: int, head_dim: int) -> int:
        threads = torch.get_num_threads()
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": head_dim, "batch": 1, "queries": 1 << 30}
        call = structs.PromptArgs(**sizes, threads=threads)
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
        if not is_native(x, weight) or x.shape[-1:] == (0,):
            return super().linear(x, weight, bias, compute)
        checks.check_linear(x, weight, bias)
        if weight.shape[1] > 1 and weight.stride(1) != 1:  # a transposed matrix
            x = x if compute is None else x.bfloat16().float()
            out = x.new_zeros(*x.shape[:-1], len(weight)) if bias is None else bias.expand(*x.shape[:-1], -1).clone()
            self.add_weighted(out.view(-1, len(weight)), x.reshape(-1, x.shape[-1]), weight.t())
            return out
        steps = self.steps()
        out = steps.linear(in_rows(x.reshape(-1, x.shape[-1])), weight, contiguous(bias), compute, packed=packed)
        steps.run()
        return out.view(*x.shape[:-1], weight.shape[0])

    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        if not is_native(a, rows) or not len(rows):
            return super().add_weighted(out, a, rows)
        checks.check_add_weighted(out, a, rows)
        steps = self.steps()
        steps.add_weighted(out, in_rows(a), rows)
        steps.run()

    def product(
        self, x: Tensor, weight: Tensor, form: Form, bias: Tensor | None = None, compute: base.Compute | None = None
    ) -> Tensor:
        kernels = kernels_of(form, "cpu") if is_native(x, weight) else None
        if kernels is None:
            return super().product(x, weight, form, bias, compute)
        checks.check_product(x, weight, form, bias)
        out = kernels.product(self, in_rows(x.reshape(-1, form.columns)), weight, form, contiguous(bias), compute)
        if out is None:
            return super().product(x, weight, form, bias, compute)
        return out.view(*x.shape[:-1], form.rows)

    def encoded_rows(self, weight: Tensor, form: Form, ids: Tensor) -> Tensor:
        kernels = kernels_of(form, "cpu") if is_native(weight, ids) else None
        if kernels is None or kernels.rows is None:
            return super().encoded_rows(weight, form, ids)
        checks.check_encoded_rows(weight, form, ids)
        return kernels.rows(self, weight, form, ids.contiguous())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        if not is_fp32(x, weight) or x.numel() == 0:
            return super().rms_norm(x, weight, eps, shift)
        checks.check_norm(x, weight)
        steps = self.steps()
        out = steps.norm(in_rows(x.reshape(-1, x.shape[-1])), weight.contiguous(), eps, shift)
        steps.run()
        return out.view(x.shape)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not is_fp32(x, cos, sin) or cos.shape[0] != 1 or x.shape[0] != 1:
            return super().rotate(x, cos, sin)
        checks.check_rotate(x, cos, sin)
        steps = self.steps()
        out = steps.rotate(in_rows(x)[0].transpose(0, 1), cos[0].contiguous(), sin[0].contiguous())
        steps.run()
        return out[None].transpose(1, 2)

    def gate(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        if not is_fp32(gate, up) or not (gate.is_contiguous() and up.is_contiguous()):
            return super().gate(gate, up, act)
        checks.check_gate(gate, up, act)
        steps = self.steps()
        steps.gate(gate, up, act)
        steps.run()
        return gate

    def convert(self, source: Tensor, target: Tensor, threads: int = 1) -> None:
        if not is_native(source, target) or source.dtype not in CODES or target.dtype not in CODES:
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
