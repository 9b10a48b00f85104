"""The experts of a layer in one native call: steps that are recorded for one row of one expert run for all of them."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.kernels import base, structs
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.recycled import ALIGNED
from flexengine.kernels.steps import KINDS, Steps
from flexengine.kernels.structs import CODES, address

GATED = 1 << 10  # as in experts.h
GATED_ACTS = ("sigmoid", "tanh", "erf", "relu", "relu squared")  # in the order of enum GatedAct of experts.h
_WHOLE = {KINDS.index("narrow"), GATED}  # kinds of steps whose rows do not depend on experts, or on other rows
_KEPT = 8 << 20  # bytes; most memory that stays from call to call, which the planner books (plan/sizes.py)
_TOGETHER = 7 << 20  # bytes of rows that are computed at once, so that they stay in L3

Gated = structs._struct("Gated", "experts.h")
ExpertStep = structs._struct("ExpertStep", "experts.h")
ExpertAddress = structs._struct("ExpertAddress", "experts.h")
Experts = structs._struct("Experts", "experts.h")


class ExpertGate(NamedTuple):
    """What experts compute between their products.

    With a gate: min(act(gate), act_most) * (clamp(up, -up_most, up_most) + shift). Without: act(x).
    """

    act: str  # a name of GATED_ACTS; "sigmoid": x * sigmoid(alpha * x), which is SiLU for an alpha of 1
    alpha: float = 1.0
    gated: bool = True
    mixed: bool = False  # whether gates and ups alternate; else all gates come first
    act_most: float = float("inf")
    up_most: float = float("inf")
    shift: float = 0.0

    def call(self, x: Tensor, out: Tensor) -> Any:
        """Return a struct Gated for x [rows, n or 2 n], with a stride of 1 along a row, and out [rows, n], contiguous,
        both fp32."""
        return Gated(
            x.data_ptr(),
            out.data_ptr(),
            *out.shape,
            x.stride(0),
            self.alpha,
            self.act_most,
            self.up_most,
            self.shift,
            GATED_ACTS.index(self.act),
            self.gated,
            self.mixed,
        )


def gated(kernels: NativeKernels, gate: ExpertGate, x: Tensor) -> Tensor:
    """Return the result of `gate` for x, fp32 [rows, n] or, with a gate, [rows, 2 n], contiguous."""
    out = x.new_empty(len(x), x.shape[1] // (2 if gate.gated else 1))
    call = gate.call(x, out)  # in memory until the function has returned
    structs.bound(kernels.library, "gated")(ctypes.addressof(call))
    return out


class Stacked(NamedTuple):
    """The matrices of one product of all experts."""

    weight: Tensor  # [places, n, k], or [places, k, n] if `across`; encoded uint8 [places, bytes]
    bias: Tensor | None  # fp32 [experts, n], contiguous
    form: Form | None  # of encoded matrices; its products are steps
    across: bool = False
    packed: bool = False  # whether plain matrices are reordered, each as by base.Kernels.pack

    @property
    def format(self) -> tuple[Any, ...]:
        """All that a recorded call depends on."""
        shape = self.weight.shape[1:], self.weight.stride(), self.weight.dtype
        return *shape, self.bias is None, self.form, self.across, self.packed

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class ExpertMemory:
    """Memory for intermediate results that the calls of a model share, one call at a time."""

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """Return at least so many bytes, uint8. They stay for the next call if they are at most _KEPT."""
        if nbytes > _KEPT:
            return torch.empty(nbytes, dtype=torch.uint8)
        if nbytes > self.block.nbytes:
            self.release()
            self.block = torch.empty(nbytes, dtype=torch.uint8)
        return self.block


class ExpertCall:
    """The recorded steps of experts of one format. Not for several threads at a time.

    Args:
        up, down: the first product's matrices, and the last one's; others of the same formats may be given to `run`.
        gate: between the products.
        compute: dtype that rows are rounded to before products, see model.linear.Product.
        memory: that it may use; None for memory of its own.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        up: Stacked,
        gate: ExpertGate,
        down: Stacked,
        compute: base.Compute | None,
        memory: ExpertMemory | None = None,
    ) -> None:
        structs.check(kernels.library)
        self._run = structs.bound(kernels.library, "experts", c_int64)
        self._bytes = structs.bound(kernels.library, "experts_bytes", c_int64)
        self._memory = memory or ExpertMemory()
        steps, first = kernels.steps(), [matrix.tensors for matrix in (up, down)]
        columns = up.form.columns if up.form else up.weight.shape[1 if up.across else 2]
        x = steps.new((1, columns))
        middle = _product(steps, x, up, compute)
        inner = steps.new((1, middle.shape[1] // (2 if gate.gated else 1)))
        steps._steps.append((gate.call(middle, inner), GATED, False))
        out = _product(steps, inner, down, compute)
        self.columns, self.rows = columns, out.shape[1]
        given = [tensor for pair in first for tensor in pair]
        self._row_bytes = [made.nbytes for made in steps._made]
        self._input = next(i for i, made in enumerate(steps._made) if made is x)
        self._output = next(i for i, made in enumerate(steps._made) if made is out)
        self._lay_out(steps, given)

    def _lay_out(self, steps: Steps, given: Sequence[Tensor]) -> None:
        """Copy the structs, and note where they have addresses: bases are the given tensors, then the rows' memory."""
        regions = [(x.data_ptr(), x[0].nbytes, number, 0, *_strides(x)) for number, x in enumerate(given)]
        for number, x in enumerate(steps._made, len(given)):
            regions.append((x.data_ptr(), x.nbytes, number, x.nbytes, 0, 0))
        texts, calls, addresses, at = list[bytes](), list[Any](), list[Any](), 0
        for call, kind, _ in steps._steps:
            own = [_address_of(call, field[0], regions) for field in call._fields_ if field[1] is c_void_p]
            found = [entry for entry in own if entry is not None]
            addresses += found
            at_rows, at_threads = type(call).rows.offset, getattr(type(call), "threads", None)
            calls.append(
                ExpertStep(
                    at,
                    size := ctypes.sizeof(call),
                    len(found),
                    at_rows,
                    -1 if at_threads is None else at_threads.offset,
                    kind,
                    kind in _WHOLE,
                )
            )
            texts.append(bytes(call))
            at += size
        self._text = ctypes.create_string_buffer(b"".join(texts))
        self._steps, self._addresses = (ExpertStep * len(calls))(*calls), (ExpertAddress * len(addresses))(*addresses)
        self._bases = np.zeros(len(given) + len(steps._made), dtype=np.int64)

    def run(
        self,
        matrices: Sequence[Stacked],
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        out: Tensor,
        places: Tensor | None = None,
        fresh: bool = True,
    ) -> None:
        """Add the weighted sums of the experts' results to `out`, or write them there if it is `fresh`.

        Args:
            matrices: of the first and of the last product, of the recorded formats.
            x: fp32 [tokens, k], with a stride of 1 along a row.
            chosen: int64 [tokens, top], numbers of experts, contiguous.
            shares: fp32 [tokens, top], contiguous.
            out: fp32 [tokens, n], contiguous. The order of a token's sums is that of the experts.
            places: int64 [experts], the index of each expert's matrices, -1 for experts that are left out, contiguous;
                None if it is the expert's number.

        Raises:
            IndexError: `chosen` has a number that no expert has.
        """
        given = [tensor.data_ptr() for matrix in matrices for tensor in matrix.tensors]
        experts = len(matrices[0].weight) if places is None else len(places)
        call = Experts(
            x=x.data_ptr(),
            chosen=chosen.data_ptr(),
            shares=shares.data_ptr(),
            places=address(places),
            out=out.data_ptr(),
            calls=ctypes.addressof(self._text),
            steps=ctypes.addressof(self._steps),
            addresses=ctypes.addressof(self._addresses),
            bases=self._bases.ctypes.data,
            tokens=len(x),
            top=chosen.shape[1],
            experts=experts,
            k=self.columns,
            n=self.rows,
            x_row=x.stride(0),
            capacity=_capacity(len(x), chosen.shape[1], sum(self._row_bytes)),
            count=len(self._steps),
            threads=torch.get_num_threads(),
            fresh=fresh,
        )
        offsets = np.cumsum([0, *(-(-size * call.capacity // ALIGNED) * ALIGNED for size in self._row_bytes)])
        needed = self._bytes(ctypes.addressof(call)) + int(offsets[-1]) + ALIGNED
        memory = self._memory.take(needed)
        start = -(-memory.data_ptr() // ALIGNED) * ALIGNED
        self._bases[: len(given)], self._bases[len(given) :] = given, start + offsets[:-1]
        call.inputs, call.outputs = (start + int(offsets[i]) for i in (self._input, self._output))
        call.memory = start + int(offsets[-1])
        if bad := self._run(ctypes.addressof(call)):
            raise IndexError(f"a router chose expert {int(chosen.view(-1)[bad - 1])} of {experts}")


def _capacity(tokens: int, top: int, row_bytes: int) -> int:
    """Return the most rows that are computed at once: no fewer than an expert can have, so that weights are read once,
    and so few that they take little more memory than the planner books for activations."""
    return min(max(1, tokens * top), max(tokens, _TOGETHER // row_bytes))


def _product(steps: Steps, x: Tensor, matrix: Stacked, compute: base.Compute | None) -> Tensor:
    weight, bias = matrix.weight[0], None if matrix.bias is None else matrix.bias[0]
    if matrix.form is not None:
        return steps.product(x, weight, matrix.form, bias, compute)
    rounding: base.Compute | None = "bf16" if compute == "bf16" and weight.dtype == torch.bfloat16 else None
    if not matrix.across:
        return steps.linear(x, weight, bias, rounding, packed=matrix.packed)
    if rounding:
        x, _ = steps._narrow(x, wide=True, beside=False)
    out = steps.new((1, weight.shape[1]))
    call = structs.Linear(
        *(x.data_ptr(), weight.data_ptr(), address(bias), None, out.data_ptr()),
        *(*out.shape, x.shape[1], x.stride(0), weight.stride(0), out.stride(0)),
        *(CODES[weight.dtype], False, 2, False, 1),
    )
    steps._add("linear", call, (x, weight, bias, out))
    return out


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the bytes from one expert's matrix to the next one's by their places, and by the experts' numbers."""
    nbytes = x.stride(0) * x.element_size()
    return (0, nbytes) if x.dim() == 2 and x.dtype == torch.float32 else (nbytes, 0)


def _address_of(call: Any, name: str, regions: Sequence[tuple[int, ...]]) -> Any:
    """Return the ExpertAddress of a field; None for a null pointer."""
    if (value := getattr(call, name)) is None:
        return None
    for start, nbytes, number, row, place, expert in regions:
        if start <= value < start + nbytes:
            return ExpertAddress(getattr(type(call), name).offset, number, value - start, row, place, expert)
    raise RuntimeError(f"{type(call).__name__}.{name} has the address of a tensor that is not given")
