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
_PLANS = 64  # numbers of tokens for which a call is kept
_TOGETHER = 7 << 20  # bytes of rows that are computed at once, so that they stay in L3

Gated = structs._struct("Gated", "experts.h")
ExpertStep = structs._struct("ExpertStep", "experts.h")
ExpertAddress = structs._struct("ExpertAddress", "experts.h")
Experts = structs._struct("Experts", "experts.h")
Route = structs._struct("Route", "route.h")
SHARED = ("softmax", "sigmoids")  # in the order of enum Shared of route.h


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


class Routing(NamedTuple):
    """How a token's experts follow from its logits: those of the largest ones. Their shares are, before they are
    divided by their sum (`normalised`) and multiplied by `scale`, see `shared`."""

    shared: str  # "softmax" of all logits, "sigmoids" of each
    # The softmax of the chosen logits is that of all, normalised.
    top: int  # number of experts of a token
    normalised: bool = False
    scale: float = 1.0

    def route(self, kernels: NativeKernels, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts, int64, and their shares, fp32, both [tokens, top]. logits: fp32 [tokens, experts],
        contiguous."""
        shape = len(logits), self.top
        chosen, shares = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
        call = self.call(logits, chosen, shares)
        structs.bound(kernels.library, "route")(ctypes.addressof(call))
        return chosen, shares

    def call(self, logits: Tensor, chosen: Tensor, shares: Tensor) -> Any:
        """Return a struct Route for tensors as of `route`."""
        how = self.top, self.scale, SHARED.index(self.shared), self.normalised, torch.get_num_threads()
        return Route(*(x.data_ptr() for x in (logits, chosen, shares)), *logits.shape, *how)


class Apart:
    """Matrices of experts that do not follow each other in memory. pieces: by place, contiguous, of one shape; several
    of these if the rows of each matrix are in so many pieces, in order."""

    def __init__(self, *pieces: Sequence[Tensor]) -> None:
        self.pieces = [tuple(piece) for piece in pieces]
        self.addresses = [np.array([x.data_ptr() for x in piece], dtype=np.int64) for piece in pieces]

    def matrix(self, place: int) -> Tensor:
        """Return a matrix; a copy if it is in several pieces."""
        parts = [piece[place] for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Stacked(NamedTuple):
    """The matrices of one product of all experts."""

    # [places, n, k], or [places, k, n] if `across`; encoded uint8 [places, bytes]; on the meta device with `apart`
    weight: Tensor
    bias: Tensor | None  # fp32 [experts, n], contiguous
    form: Form | None  # of encoded matrices; its products are steps
    across: bool = False
    packed: bool = False  # whether plain matrices are reordered, each as by base.Kernels.pack
    # Matrices that are anywhere in memory, instead of `weight`; in several pieces only if they are not `across`.
    apart: "Apart | None" = None

    @property
    def format(self) -> tuple[Any, ...]:
        """All that a recorded call depends on."""
        shape = self.weight.shape[1:], self.weight.stride(), self.weight.dtype
        pieces = tuple(len(x) for x in self.firsts) if self.apart and len(self.apart.pieces) > 1 else ()
        return *shape, self.bias is None, self.form, self.across, self.packed, pieces

    @property
    def firsts(self) -> list[Tensor]:
        """The pieces of the matrix of place 0."""
        return [piece[0] for piece in self.apart.pieces] if self.apart else [self.weight[0]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What calls read. With `apart`, the first are the pieces of the matrix of place 0."""
        weights = [x[None] for x in self.firsts] if self.apart else [self.weight]
        return (*weights,) if self.bias is None else (*weights, self.bias)


class Bound(NamedTuple):
    """Where the matrices of a layer are."""

    experts: int
    addresses: list[int]  # of `Stacked.tensors`
    table: int  # address of Experts.tables; 0 if all matrices follow each other
    kept: Any  # what must stay in memory


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
        kinds = [KINDS[kind] if kind < len(KINDS) else "" for _, kind, _ in steps._steps[:2]]
        self._rounded = kinds == ["round", "dots"]  # tokens are rounded once, not for each of their experts
        for call, kind, _ in steps._steps[self._rounded :]:
            own = [_address_of(call, field[0], regions) for field in call._fields_ if field[1] is c_void_p]
            found = [entry for entry in own if entry is not None]
            addresses += found
            at_rows, at_threads = type(call).rows.offset, getattr(type(call), "threads", None)
            threads, size = -1 if at_threads is None else at_threads.offset, ctypes.sizeof(call)
            calls.append(ExpertStep(at, size, len(found), at_rows, threads, kind, kind in _WHOLE))
            texts.append(bytes(call))
            at += size
        self._text = ctypes.create_string_buffer(b"".join(texts))
        self._steps, self._addresses = (ExpertStep * len(calls))(*calls), (ExpertAddress * len(addresses))(*addresses)
        self._bases = np.zeros(len(given) + len(steps._made), dtype=np.int64)
        self._tables = np.zeros((0, 0), dtype=np.int64)  # Experts.tables
        self._plans = dict[tuple[int, ...], tuple[Any, Any, int]]()  # see `_planned`

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
        call, offsets, needed = self._planned(len(x), chosen.shape[1], experts, torch.get_num_threads())
        memory = self._memory.take(needed)
        start = -(-memory.data_ptr() // ALIGNED) * ALIGNED
        self._bases[: len(given)], self._bases[len(given) :] = given, start + offsets[:-1]
        call.x, call.x_row, call.out, call.fresh = x.data_ptr(), x.stride(0), out.data_ptr(), fresh
        call.chosen, call.shares, call.places = chosen.data_ptr(), shares.data_ptr(), address(places)
        call.tables, call.memory = self._table(matrices, experts), start + int(offsets[-1])
        call.inputs, call.outputs = (start + int(offsets[i]) for i in (self._input, self._output))
        if bad := self._run(ctypes.addressof(call)):
            raise IndexError(f"a router chose expert {int(chosen.view(-1)[bad - 1])} of {experts}")

    def bound(self, matrices: Sequence[Stacked]) -> Bound:
        """Return where a layer's matrices are, for `placed`. Arguments as for `run`."""
        table, experts = None, len(matrices[0].weight)
        if any(matrix.apart for matrix in matrices):
            _fill_table(table := np.zeros((len(self._bases), experts), dtype=np.int64), matrices)
        addresses = [x.data_ptr() for matrix in matrices for x in matrix.tensors]
        return Bound(experts, addresses, 0 if table is None else table.ctypes.data, (matrices, table))

    def placed(
        self, layers: Sequence[Bound], x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return an array of struct Experts, a row for each layer, which write to `out`, and what they refer to.

        Args:
            layers: what `bound` has returned for each layer.
            x, chosen, shares, out: as for `run`.
        """
        given, experts = len(self._bases) - len(self._row_bytes), layers[0].experts
        call, offsets, needed = self._planned(len(x), chosen.shape[1], experts, torch.get_num_threads())
        memory = self._memory.take(needed)
        start = -(-memory.data_ptr() // ALIGNED) * ALIGNED
        bases = np.empty((len(layers), len(self._bases)), dtype=np.int64)
        bases[:, given:] = start + offsets[:-1]
        bases[:, :given] = [layer.addresses for layer in layers]
        call.x, call.x_row, call.out, call.fresh = x.data_ptr(), x.stride(0), out.data_ptr(), True
        call.chosen, call.shares, call.places, call.tables = chosen.data_ptr(), shares.data_ptr(), None, None
        call.memory = start + int(offsets[-1])
        call.inputs, call.outputs = (start + int(offsets[i]) for i in (self._input, self._output))
        rows = np.tile(np.frombuffer(bytes(call), dtype=np.int64), (len(layers), 1))
        rows[:, Experts.bases.offset // 8] = bases.ctypes.data + np.arange(len(layers)) * bases.strides[0]
        rows[:, Experts.tables.offset // 8] = [layer.table for layer in layers]
        return rows, (bases, layers, memory)

    def _planned(self, tokens: int, top: int, experts: int, threads: int) -> tuple[Any, Any, int]:
        """Return an Experts without addresses of tensors, where rows and the call's own memory begin in a block, and
        the bytes of the block."""
        key = tokens, top, experts, threads
        if (found := self._plans.get(key)) is not None:
            return found
        call = Experts(
            calls=ctypes.addressof(self._text),
            steps=ctypes.addressof(self._steps),
            addresses=ctypes.addressof(self._addresses),
            bases=self._bases.ctypes.data,
            tokens=tokens,
            top=top,
            experts=experts,
            k=self.columns,
            n=self.rows,
            capacity=_capacity(tokens, top, sum(self._row_bytes)),
            count=len(self._steps),
            threads=threads,
            rounded=self._rounded,
        )
        offsets = np.cumsum([0, *(-(-size * call.capacity // ALIGNED) * ALIGNED for size in self._row_bytes)])
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        needed = self._bytes(ctypes.addressof(call)) + int(offsets[-1]) + ALIGNED
        self._plans[key] = made = call, offsets, needed
        return made

    def _table(self, matrices: Sequence[Stacked], experts: int) -> int | None:
        """Return the address of Experts.tables; None if all matrices follow each other."""
        if not any(matrix.apart for matrix in matrices):
            return None
        if self._tables.shape[1] != experts:
            self._tables = np.zeros((len(self._bases), experts), dtype=np.int64)
        _fill_table(self._tables, matrices)
        return int(self._tables.ctypes.data)


def _fill_table(table: Any, matrices: Sequence[Stacked]) -> None:
    """Write the addresses of matrices that do not follow each other. table: int64 [bases, experts]."""
    number = 0
    for matrix in matrices:
        own = matrix.apart.addresses if matrix.apart else [0]
        for piece, addresses in enumerate(own):
            table[number + piece] = addresses
        number += len(own) + (matrix.bias is not None)


def _capacity(tokens: int, top: int, row_bytes: int) -> int:
    """Return the most rows that are computed at once: no fewer than an expert can have, so that weights are read once,
    and so few that they take little more memory than the planner books for activations."""
    return min(max(1, tokens * top), max(tokens, _TOGETHER // row_bytes))


def _product(steps: Steps, x: Tensor, matrix: Stacked, compute: base.Compute | None) -> Tensor:
    (weight, *rest), bias = matrix.firsts, None if matrix.bias is None else matrix.bias[0]
    if matrix.form is not None:
        return steps.product(x, weight, matrix.form, bias, compute)
    rounding: base.Compute | None = "bf16" if compute == "bf16" and weight.dtype == torch.bfloat16 else None
    if rest:
        out = steps.new((1, matrix.weight.shape[1]))
        parts = out.split_with_sizes([len(piece) for piece in (weight, *rest)], dim=1)
        biases = [None] * len(parts) if bias is None else bias.split_with_sizes([part.shape[1] for part in parts])
        for piece, own, part in zip((weight, *rest), biases, parts, strict=True):
            steps.linear(x, piece, own, rounding, out=part)
        return out
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
