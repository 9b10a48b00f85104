"""Native kernels of a layer as steps: one call runs them one after the other, in one parallel region.

Recorded steps run again with other tensors of the same shapes: only the addresses in their structs change.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flexengine.kernels import base, structs
from flexengine.kernels.paged import PagedAttention
from flexengine.kernels.recycled import ALIGNED
from flexengine.kernels.structs import CODES, address

if TYPE_CHECKING:
    from flexengine.codec.forms import Form

BLOCKS = 16  # of quantized_gemm.h
COMPUTES: dict[str | None, int] = {None: 0, "bf16": 1, "int8": 2}  # enum Compute of quantized_gemm.h
# In the order of enum Kind.
KINDS = ("linear", "decoded", "round", "dots", "narrow", "norm", "rotate", "gate", "append", "attend", "merge",
         "prompts", "add")  # fmt: skip
ACTS = (*base.ACTS, "sigmoid", "softplus", "clip", "scale")  # in the order of enum Act of elementwise.h
PAIRINGS = ("halves", "pairs", "pairs to halves")  # in the order of enum Pairing of elementwise.h
WORD = 8  # bytes of an address
ACROSS = 2  # in linear.h
ROUNDED = 2  # of Narrow.wide


class RecordedSteps:
    """Steps with the addresses of other tensors.

    Every address in the structs is found again as an offset in an argument, in a result, or in one block of memory for
    the intermediate results.

    Args:
        arguments: tensors that are given to the steps.
        results: those of the tensors that the steps have allocated that are returned.
    """

    def __init__(self, steps: "Steps", arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._run, self._threads, made = steps._run, steps._threads, steps._made
        self.results = [(tuple(x.shape), x.dtype) for x in results]  # shape and dtype of each
        own = {x.data_ptr() for x in results}
        if not own <= {x.data_ptr() for x in made}:
            raise RuntimeError("a result does not begin where a tensor of the steps begins")
        inner = [x for x in made if x.data_ptr() not in own]
        self._arrays: dict[int, tuple[Any, Any]] = {}  # by number of times: see `_repeated`
        self.nbytes = 0  # of the block
        parts = list[tuple[int, int, int, int]]()  # address, bytes, number of the base, offset from it
        for number, x in enumerate((*arguments, *results)):
            parts.append((x.data_ptr(), _extent(x), number, 0))
        for x in inner:
            parts.append((x.data_ptr(), _extent(x), len(arguments) + len(results), self.nbytes))
            self.nbytes += -(-_extent(x) // ALIGNED) * ALIGNED
        parts.sort()
        self._lay_out(steps._steps, parts)

    def _lay_out(self, calls: Sequence[tuple[ctypes.Structure, int, bool]], parts: Sequence[tuple[int, ...]]) -> None:
        """Copy the structs one after the other, and note where they have addresses."""
        slots, bases, offsets = list[int](), list[int](), list[int]()
        starts = [part[0] for part in parts]
        self._kinds, self._structs = list[tuple[int, int, bool]](), b""  # kinds: (word of the struct, kind, beside)
        for call, kind, beside in calls:
            at = len(self._structs) // WORD
            self._kinds.append((at, kind, beside))
            self._structs += bytes(call)
            for name, kind_of in call._fields_:  # type: ignore[misc]
                to = getattr(call, name)
                if kind_of is not ctypes.c_void_p or to is None:
                    continue
                start, nbytes, number, offset = parts[max(0, bisect_right(starts, to) - 1)]
                if not start <= to < start + nbytes:
                    raise RuntimeError(f"{type(call).__name__}.{name} has the address of a tensor that is not given")
                slots.append(at + getattr(type(call), name).offset // WORD)
                bases.append(number)
                offsets.append(offset + to - start)
        self._slots, self._bases, self._offsets = (np.array(x, dtype=np.int64) for x in (slots, bases, offsets))

    def run(self, *addresses: Sequence[int]) -> None:
        """Run the steps once for each argument, one after the other. addresses: of the arguments, then of contiguous
        memory for the results, then of the block, at a multiple of 64. The arguments have the shapes, strides and
        dtypes of the recorded ones."""
        steps = self.placed(*addresses)
        self._run(steps.ctypes.data, len(steps), self._threads)

    def placed(self, *addresses: Sequence[int]) -> Any:
        """Return an array of struct Step, one row each, all for the first argument first. It is overwritten by the next
        call with as many arguments. addresses: as for `run`."""
        bases = np.array(addresses, dtype=np.int64)
        if (found := self._arrays.get(len(bases))) is None:
            found = self._arrays[len(bases)] = self._repeated(len(bases))
        steps, copies = found
        copies[:, self._slots] = bases[:, self._bases] + self._offsets
        return steps

    def _repeated(self, times: int) -> tuple[Any, Any]:
        """Return the array of Step, one row each, and the structs that they point to, [times, words]."""
        copies = np.tile(np.frombuffer(self._structs, dtype=np.int64), (times, 1))
        rows = (copies.ctypes.data + row * copies.strides[0] for row in range(times))
        steps = b"".join(bytes(structs.Step(row + at * WORD, *rest)) for row in rows for at, *rest in self._kinds)
        return np.frombuffer(steps, dtype=np.int64).reshape(-1, ctypes.sizeof(structs.Step) // WORD), copies


def _extent(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    if x.numel() == 0:
        return 0
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


class Steps:
    """Steps that `run` runs. A method adds a step and returns its result, which has values after `run`.

    A step may read the results of the steps before it. Arguments are not checked. All tensors are on the CPU, and fp32
    unless stated otherwise; matrices have a stride of 1 along a row.

    Args:
        run: flex_run of the library.
        pairs: whether the CPU multiplies pairs of bf16.
    """

    def __init__(self, run: Any, pairs: bool) -> None:
        self._run, self._pairs = run, pairs
        self._steps: list[tuple[ctypes.Structure, int, bool]] = []
        self._kept: list[Any] = []  # tensors that the steps read or write
        self._made: list[Tensor] = []  # of these, the ones that are allocated here
        self._inner: list[Tensor] = []  # of these, the ones that a slice of `parts` needs
        self._free: list[Tensor] | None = None  # of these, the ones that the present slice does not use yet
        self._rounded: dict[tuple[Any, ...], Tensor] = {}
        self._threads = torch.get_num_threads()

    def run(self) -> None:
        """Run the steps."""
        calls = self.array()
        self._run(ctypes.addressof(calls), len(calls), self._threads)

    def array(self) -> Any:
        """Return the steps as an array of struct Step."""
        steps = [structs.Step(ctypes.addressof(call), kind, beside) for call, kind, beside in self._steps]
        return (structs.Step * len(steps))(*steps)

    def new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous tensor that steps write."""
        nbytes = prod(shape) * dtype.itemsize
        free = self._free or []
        if fitting := [(made.nbytes, number) for number, made in enumerate(free) if made.nbytes >= nbytes]:
            made = free.pop(min(fitting)[1])
            return made.view(-1).view(torch.uint8)[:nbytes].view(dtype).view(shape)
        self._made.append(made := torch.empty(shape, dtype=dtype))
        if self._free is not None:
            self._inner.append(made)
        return made

    def parts(self, rows: int, most: int) -> Iterator[slice]:
        """Yield slices of `rows` rows, of at most `most` rows each, for the same steps with each.

        Tensors that `new` returns for a slice are overwritten by steps of the next slice, and of later calls.
        """
        low = 0
        for number in range(count := -(-rows // most)):
            high = low + (rows - low - 1) // (count - number) + 1  # the first ones are the largest
            self._free = list(self._inner)
            self._rounded.clear()  # its keys are addresses
            yield slice(low, high)
            low = high
        self._free = None
        self._rounded.clear()

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: base.Compute | None = None,
        residual: Tensor | None = None, beside: bool = False, packed: bool = False, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add a product with a plain weight; see base.Kernels.linear.

        Args:
            x: [rows, k].
            weight, bias, compute, packed: as there. A transposed weight has a stride of 1 along columns.
            residual: [rows, n], contiguous, added to the result; None for none.
            beside: whether the step before does not write x.
            out: receives the result, [rows, n], contiguous; None allocates it.
        """
        out = self.new((x.shape[0], weight.shape[0])) if out is None else out
        pairs, across = False, weight.shape[1] > 1 and weight.stride(1) != 1
        weight = weight.t() if across else weight
        if compute == "bf16" and not across:
            even = weight.shape[1] % 2 == weight.stride(0) % 2 == 0
            pairs = self._pairs and weight.dtype == torch.bfloat16 and even
            x, beside = self._narrow(x, wide=not pairs, beside=beside)
        call = structs.Linear(
            *(x.data_ptr(), weight.data_ptr(), address(bias), address(residual), out.data_ptr()),
            *(*out.shape, x.shape[1], x.stride(0), weight.stride(0) // (1 + pairs), out.stride(0)),
            *(CODES[weight.dtype], pairs, ACROSS * across, packed, self._threads),
        )
        self._add("linear", call, (x, weight, bias, residual, out), beside)
        return out

    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        """Add the kernel base.Kernels.add_weighted."""
        call = structs.Linear(
            *(a.data_ptr(), rows.data_ptr(), None, None, out.data_ptr()),
            *(*out.shape, a.shape[1], a.stride(0), rows.stride(0), out.stride(0)),
            *(CODES[rows.dtype], False, True, False, self._threads),
        )
        self._add("linear", call, (a, rows, out))

    def product(
        self, x: Tensor, weight: Tensor, form: "Form", bias: Tensor | None = None,
        compute: base.Compute | None = None, residual: Tensor | None = None, beside: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add a product with an encoded weight; see base.Kernels.product. Other arguments are those of `linear`.
        form: with `in_steps`."""
        out = self.new((x.shape[0], form.rows)) if out is None else out
        parts = [*form.matrices()]
        if len(parts) > 1:
            for row, start, part in parts:
                run, own = slice(row, row + part.rows), weight[start : start + part.nbytes]
                given = None if bias is None else bias[run], compute, None if residual is None else residual[:, run]
                self.product(x, own, part, *given, beside or row > 0, out[:, run])
            return out
        group, code = form.group, form.native
        assert code is not None
        groups, blocks = -(-form.columns // group), code >= BLOCKS
        rows, scratch, source = x.shape[0], None, x
        layout = structs.layout_of(form)
        where = 0 if layout is None else ctypes.addressof(layout)
        if compute == "int8" and form.layout and not (form.layout.dots or (form.layout.pairs and self._pairs)):
            (source, beside), compute = self._narrow(x, wide=ROUNDED, beside=beside), None
        if compute == "bf16":
            source, beside = self._narrow(x, wide=not self._pairs, beside=beside)

        def call(scratch: Tensor | None) -> Any:
            return structs.Product(
                *(source.data_ptr(), weight.data_ptr(), address(bias), address(residual), out.data_ptr()),
                *(address(scratch), rows, form.rows, source.shape[1], source.stride(0), out.stride(0)),
                *(groups, where, code, group, COMPUTES[compute], self._threads),
            )

        if compute == "int8":
            key = (x.data_ptr(), rows, groups, group, blocks)
            if (scratch := self._rounded.get(key)) is None:
                numbers = 1 + group // 16 + group // 32 if blocks else 2  # fp32, beside the codes of a group
                scratch = self.new((rows * groups * (group + 4 * numbers),), torch.uint8)
                self._rounded[key] = scratch
                self._add("round", call(scratch), (scratch,), beside)
                beside = False
        kind = "decoded" if scratch is None else "dots"
        self._add(kind, call(scratch), (source, weight, bias, residual, out), beside)
        return out

    def _narrow(self, x: Tensor, wide: int, beside: bool) -> tuple[Tensor, bool]:
        """Return x rounded to bf16, or to int8 in fp32 (wide: ROUNDED), once for all products with it, and whether the
        product can run beside the last step."""
        key = (x.data_ptr(), *x.shape, wide)
        if (found := self._rounded.get(key)) is not None:
            return found, beside
        rows, n = x.shape
        out = self._rounded[key] = self.new((rows, n if wide else (n + 1) // 2))
        call = structs.Narrow(x.data_ptr(), out.data_ptr(), rows, n, x.stride(0), wide)
        self._add("narrow", call, (x, out), beside)
        return out, False

    def norm(
        self, x: Tensor, weight: Tensor | None, eps: float, shift: float = 0.0, beside: bool = False,
        bias: Tensor | None = None, centred: bool = False, out: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add an RMS norm of x [rows, n] or [tokens, heads, n], see base.Kernels.rms_norm; or a layer norm.

        Args:
            weight: [n], or [heads, n]; None for ones.
            bias: of the weight's shape, added to the result; None for none.
            centred: whether the mean of a row is subtracted first, as in torch.nn.functional.layer_norm.
            residual: contiguous, of x's shape, added to the result; None for none.
            out: as in `linear`.
        """
        out = self.new(x.shape) if out is None else out
        heads, x_head = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        w_head = x.shape[-1] if weight is not None and weight.dim() == 2 else 0
        call = structs.Norm(
            *(x.data_ptr(), address(weight), address(bias), address(residual), out.data_ptr()),
            *(x.shape[0] * heads, x.shape[-1], heads, x.stride(0), x_head, w_head, eps, shift, centred),
        )
        self._add("norm", call, (x, weight, bias, residual, out), beside)
        return out

    def rotate(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        beside: bool = False,
        out: Tensor | None = None,
        pairing: str = "halves",
        extra: Tensor | None = None,
    ) -> Tensor:
        """Add rotary positions of x [tokens, heads, dim], see base.Kernels.rotate.

        Args:
            cos, sin: [tokens, turned]: the first elements of heads are turned; None for none.
            out: [tokens, heads, width], with a stride of 1 along a head: x, `extra` and zeros; None allocates it,
                without zeros.
            pairing: which elements are turned together, one of PAIRINGS.
            extra: [tokens or 1, heads], an element of each head after x; None for none.
        """
        out = self.new(x.shape) if out is None else out
        angle_row = 0 if cos is None else cos.stride(0)
        extra_row = 0 if extra is None or len(extra) == 1 else extra.stride(0)
        turned = 0 if cos is None else cos.shape[1]
        strides = x.stride(0), x.stride(1), out.stride(0), out.stride(1), angle_row, extra_row
        call = structs.Rotate(
            *(address(y) for y in (x, cos, sin, extra, out)),
            *(*x.shape, turned, out.shape[2], *strides, PAIRINGS.index(pairing)),
        )
        self._add("rotate", call, (x, cos, sin, extra, out), beside)
        return out

    def gate(self, gate: Tensor, up: Tensor | None, act: str, limit: float = 0.0, out: Tensor | None = None) -> Tensor:
        """Add act(gate) * up, see base.Kernels.gate. Each of them may be columns of a larger matrix.

        Args:
            gate: [rows, n], or of any shape if all are contiguous.
            up: of gate's shape, or [rows, n * each], whose `each` neighbours have one gate; None for ones.
            act: one of ACTS.
            limit: of "clip", and factor of "scale".
            out: receives the result, of up's shape; None overwrites `gate`.
        """
        out = gate if out is None else out
        used = [x for x in (gate, up, out) if x is not None]
        each = max(1, (gate if up is None else up).numel() // max(1, gate.numel()))
        whole = each == 1 and all(x.is_contiguous() for x in used)
        rows, n = (1, gate.numel()) if whole else gate.shape
        strides = gate.stride(0), 0 if up is None else up.stride(0), out.stride(0)
        call = structs.Gate(
            *(gate.data_ptr(), address(up), out.data_ptr(), rows, n, each, *strides, ACTS.index(act), limit)
        )
        self._add("gate", call, (gate, up, out))
        return out

    def add(self, x: Tensor, y: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        """Add x + factor * y, of matrices of one shape. out: as in `linear`."""
        out = self.new(x.shape) if out is None else out
        call = structs.Add(*(x.data_ptr(), y.data_ptr(), out.data_ptr(), *x.shape, x.stride(0), y.stride(0), factor))
        self._add("add", call, (x, y, out))
        return out

    def append_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, to: PagedAttention, options: base.AttentionOptions
    ) -> Tensor:
        """Add the kernels base.Kernels.append, decode_attention and attend_prompts. Return attention, [tokens, heads,
        head_dim].

        Args:
            q: [tokens, heads, head_dim].
            k, v: [tokens, kv_heads, head_dim].
            to: pages, for these numbers of tokens and heads.
            options: scale, softcap and sinks (fp32, contiguous) are used.
        """
        out, n, options = self.new(q.shape), len(to.lengths), options._replace(window=to.window, rounded=to.rounded)

        def append(tokens: slice) -> None:
            where = (k[tokens], v[tokens], to.pool, to.pages[tokens], to.offsets[tokens])
            self._add("append", structs.append_call(*where, to.form, to.room), (*where, to))

        if n:
            append(slice(n))
            where = (to.pool, to.tables, to.lengths, to.room, options, to.form)
            decode = structs.decode_call(q[:n], *where, out=out, memory=to.memory, sinks=options.sinks)
            self._add("attend", decode, (q, out, to, options))
            self._add("merge", decode, (q, out, to, options))
        if to.pieces is not None:
            call = structs.batch_call((q, k, v), out, to, options, to.memory[to.split :])
            self._add("prompts", call, (q, k, v, out, to, options))
            append(slice(n, None))  # it may overwrite pages that the prompts' queries see
        return out

    def _add(self, kind: str, call: ctypes.Structure, kept: tuple[Any, ...], beside: bool = False) -> None:
        self._steps.append((call, KINDS.index(kind), beside))
        self._kept.append(kept)
