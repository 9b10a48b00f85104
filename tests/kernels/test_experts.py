"""All experts of a layer in one call, against float64 formulas, and by row whatever rows share the call."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexengine.codec.forms import Form, make_form
from flexengine.codec.gguf_blocks import BLOCKS
from flexengine.kernels import base, experts
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import Apart, ExpertCall, ExpertGate, Stacked, gated
from flexengine.model.router import MIXTURE
from tests.helpers.builds import NATIVE, kernels_named
from tests.helpers.gguf_blocks import random_blocks

EXPERTS, TOP = 6, 2
SILU = ExpertGate("sigmoid")
CLAMPED = ExpertGate("sigmoid", alpha=1.702, mixed=True, act_most=6.9, up_most=1.5, shift=1.0)
FINE = 2e-6  # relative error of fp32 products and gates
PLAIN = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=NATIVE)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    found = kernels_named(request.param)
    assert isinstance(found, NativeKernels)
    return found


def formula(gate: ExpertGate, x: Tensor) -> Tensor:
    """The gate in the dtype of x."""
    first, up = x, torch.ones_like(x)
    if gate.gated:
        first, up = (x[..., ::2], x[..., 1::2]) if gate.mixed else x.chunk(2, -1)
        up = up.clamp(-gate.up_most, gate.up_most) + gate.shift
    acts = {
        "sigmoid": lambda y: y * torch.sigmoid(gate.alpha * y),
        "tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "erf": torch.nn.functional.gelu, "relu": torch.relu, "relu squared": lambda y: torch.relu(y).square(),
    }  # fmt: skip
    return acts[gate.act](first).clamp(max=gate.act_most) * up


def matrices(kind: str, n: int, k: int, bias: bool, across: bool = False) -> tuple[Stacked, Tensor]:
    """Return random matrices of experts, and what they stand for, fp64 [experts, n, k]."""
    w, b = torch.randn(EXPERTS, n, k) / k**0.5, torch.randn(EXPERTS, n) if bias else None
    if kind in PLAIN:
        w = w.to(getattr(torch, kind))
        held = w.transpose(1, 2).contiguous() if across else w
        return Stacked(held, b, None, across), w.double()
    form: Form = make_form(kind, n, k)
    if kind in BLOCKS:
        data = random_blocks(kind, EXPERTS * form.nbytes // BLOCKS[kind].nbytes).view(EXPERTS, -1)
    else:
        data = torch.stack([form.encode(x) for x in w])
    return Stacked(data, b, form, False), torch.stack([form.dequantize(x) for x in data]).double()


def expected(
    x: Tensor, chosen: Tensor, shares: Tensor, up: tuple[Stacked, Tensor], gate: ExpertGate,
    down: tuple[Stacked, Tensor], rounded: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the sums in fp64, token by token, and how far they move if rounding takes the other neighbour.

    rounded: whether products round their input to bf16. Numbers between the products are exact to FINE of the largest
    one of their row only, so those that close to the middle of two bf16 numbers may become either of them.
    """
    out, flips = torch.zeros(2, len(x), down[1].shape[1], dtype=torch.float64)
    for t, j in product(range(len(x)), range(chosen.shape[1])):
        expert, share = int(chosen[t, j]), shares[t, j].double()
        y = formula(gate, _multiplied(up, x[t].double(), expert, rounded)[None])[0]
        out[t] += share * _multiplied(down, y, expert, rounded)
        if rounded:
            near = FINE * (y.abs() + y.abs().max())
            flips[t] += share * (down[1][expert].abs() @ ((y + near).bfloat16() - (y - near).bfloat16()).double())
    return out, flips


def _multiplied(matrix: tuple[Stacked, Tensor], y: Tensor, expert: int, rounded: bool) -> Tensor:
    stacked, w = matrix
    y = w[expert] @ (y.bfloat16().double() if rounded else y)
    return y if stacked.bias is None else y + stacked.bias[expert].double()


def assert_sums(found: Tensor, wanted: Tensor, flips: Tensor, tolerance: float) -> None:
    """Compare sums, allowing `tolerance` and the flips of `expected`."""
    excess = ((found.double() - wanted).abs() - flips - tolerance * (1 + wanted.abs())).max()
    assert excess <= 0, f"a sum is off by {excess:.3g} more than it may be"


def routed(rows: int) -> tuple[Tensor, Tensor]:
    """Return chosen experts and shares. Expert 4 is never chosen, expert 1 by most tokens."""
    scores = torch.randn(rows, EXPERTS)
    scores[:, 4] = -100
    scores[:, 1] += 2
    found = scores.softmax(-1).topk(TOP)
    return found.indices, found.values


def run(call: ExpertCall, pair: tuple[Stacked, Stacked], x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    out = torch.full((len(x), call.rows), torch.nan)
    call.run(pair, x, chosen, shares, out)
    return out


FORMATS = [("float32", None), ("bfloat16", None), ("bfloat16", "bf16"), ("float16", None), ("float16", "bf16"),
           *product(("int8", "int4"), (None, "bf16", "int8"))]  # fmt: skip


@pytest.mark.parametrize(("kind", "compute"), FORMATS)
@pytest.mark.parametrize(("hidden", "inner", "bias", "gate"), [
    (64, 48, False, SILU), (131, 37, True, CLAMPED), (600, 130, False, ExpertGate("relu squared", gated=False)),
])  # fmt: skip
def test_sums(
    native: NativeKernels,
    kind: str,
    compute: base.Compute | None,
    hidden: int,
    inner: int,
    bias: bool,
    gate: ExpertGate,
) -> None:
    """Few rows and many, column tails, several spans, experts without rows; then each row alone, bit by bit."""
    up = matrices(kind, inner * (1 + gate.gated), hidden, bias)
    down = matrices(kind, hidden, inner, bias)
    call, pair = ExpertCall(native, up[0], gate, down[0], compute), (up[0], down[0])
    x = torch.randn(90, hidden + 7)[:, :hidden]
    chosen, shares = routed(90)
    whole = run(call, pair, x, chosen, shares)
    # An encoded weight, and a bf16 one, round x to bf16; a CPU that multiplies pairs of bf16 rounds the weight, too. x
    # rounded to int8 has 127 steps up to the largest number.
    rounds = compute == "bf16" and kind != "float16"
    if rounds and native.bf16:
        up, down = ((stacked, w.bfloat16().double()) for stacked, w in (up, down))
    assert_sums(whole, *expected(x, chosen, shares, up, gate, down, rounds), 0.06 if compute == "int8" else 2e-4)
    for low, high in ((0, 1), (1, 4), (7, 20), (60, 90)):
        part = run(call, pair, x[low:high], chosen[low:high].contiguous(), shares[low:high].contiguous())
        assert torch.equal(part, whole[low:high])


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("compute", [None, "bf16"])
@pytest.mark.parametrize("hidden", [70, 1100])
def test_matrices_across(native: NativeKernels, kind: str, compute: base.Compute | None, hidden: int) -> None:
    """Matrices [in, out], as gpt-oss has them; 1,100 columns are three spans of linear.h."""
    up, down = (matrices(kind, *shape, bias=True, across=True) for shape in ((96, hidden), (hidden, 48)))
    call, pair = ExpertCall(native, up[0], CLAMPED, down[0], compute), (up[0], down[0])
    x, (chosen, shares) = torch.randn(40, hidden), routed(40)
    whole = run(call, pair, x, chosen, shares)
    rounds = compute == "bf16" and kind == "bfloat16"
    assert_sums(whole, *expected(x, chosen, shares, up, CLAMPED, down, rounds), 2e-4)
    assert torch.equal(run(call, pair, x[3:4], chosen[3:4], shares[3:4]), whole[3:4])


def test_parts_add_up_to_the_same_bits(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in several calls, their matrices at other places; and rows in several parts of a call."""
    up, down = matrices("bfloat16", 96, 64, False), matrices("bfloat16", 64, 48, False)
    call, pair = ExpertCall(native, up[0], SILU, down[0], None), (up[0], down[0])
    x, (chosen, shares) = torch.randn(50, 64), routed(50)
    whole = run(call, pair, x, chosen, shares)
    monkeypatch.setattr(experts, "_capacity", lambda *sizes: 7)
    assert torch.equal(run(call, pair, x, chosen, shares), whole)
    order = torch.randperm(EXPERTS)
    moved = [Stacked(stacked.weight[order], None, None, False) for stacked in pair]
    where, out = order.argsort(), torch.zeros_like(whole)
    for some in ([0, 1], [2], [3, 4, 5]):
        places = torch.full((EXPERTS,), -1)
        places[some] = where[some]
        call.run(moved, x, chosen, shares, out, places, fresh=False)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("kind", ["int8", "int4", "q4_0", "q5_1", "q8_0", "q4_k", "q6_k"])
def test_int8_products_are_those_of_each_expert(native: NativeKernels, kind: str) -> None:
    """Bit by bit, although the call rounds a token once for all its experts."""
    up, down = matrices(kind, 512, 512, False)[0], matrices(kind, 512, 256, False)[0]
    assert up.form is not None
    assert down.form is not None
    x, (chosen, shares) = torch.randn(70, 512), routed(70)
    out = torch.zeros(70, 512)
    for expert in range(EXPERTS):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        y = native.product(x[tokens], up.weight[expert], up.form, None, "int8")
        y = native.product(gated(native, SILU, y), down.weight[expert], down.form, None, "int8")
        out[tokens] += y * shares[tokens, place, None]
    assert torch.equal(run(ExpertCall(native, up, SILU, down, "int8"), (up, down), x, chosen, shares), out)


def anywhere(stacked: Stacked) -> Stacked:
    """The same matrices, each in memory of its own."""
    copies = [matrix.clone() for matrix in stacked.weight]
    return stacked._replace(weight=stacked.weight.to("meta"), apart=Apart(copies))


@pytest.mark.parametrize("bias", [False, True])
def test_matrices_anywhere_in_memory(native: NativeKernels, bias: bool) -> None:
    up, down = (matrices("bfloat16", *shape, bias=bias)[0] for shape in ((96, 64), (64, 48)))
    call, x, (chosen, shares) = ExpertCall(native, up, SILU, down, None), torch.randn(50, 64), routed(50)
    whole = run(call, (up, down), x, chosen, shares)
    for pair in ((anywhere(up), down), (up, anywhere(down)), (anywhere(up), anywhere(down)), (up, down)):
        assert torch.equal(run(call, pair, x, chosen, shares), whole)
        assert torch.equal(run(ExpertCall(native, pair[0], SILU, pair[1], None), pair, x, chosen, shares), whole)


@pytest.mark.parametrize(("dtype", "compute"), [
    ("bfloat16", None), ("bfloat16", "bf16"), ("float32", None), ("float16", None),
])  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_matrices_in_pieces(native: NativeKernels, bias: bool, dtype: str, compute: base.Compute | None) -> None:
    """Gates and ups in two files, or more pieces: the same bits as of whole matrices."""
    up, down = (matrices(dtype, *shape, bias=bias)[0] for shape in ((96, 64), (64, 48)))
    x, (chosen, shares) = torch.randn(50, 64), routed(50)
    whole = run(ExpertCall(native, up, SILU, down, compute), (up, down), x, chosen, shares)

    def cut(stacked: Stacked, *sizes: int) -> Stacked:
        pieces = [[m.clone() for m in piece] for piece in stacked.weight.split(list(sizes), dim=1)]
        return stacked._replace(weight=stacked.weight.to("meta"), apart=Apart(*pieces))

    for pair in ((cut(up, 48, 48), down), (up, cut(down, 13, 50, 1)), (cut(up, 33, 63), cut(down, 32, 32))):
        assert pair[0].format + pair[1].format != up.format + down.format
        assert torch.equal(run(ExpertCall(native, pair[0], SILU, pair[1], compute), pair, x, chosen, shares), whole)
        for stacked, own in zip(pair, (up, down), strict=True):
            assert stacked.apart is None or torch.equal(stacked.apart.matrix(2), own.weight[2])


def test_layers_after_each_other(native: NativeKernels) -> None:
    """Structs of several layers at once, with matrices that follow each other or do not; each gives what `run` does."""
    layers = [tuple(matrices("bfloat16", *shape, bias=False)[0] for shape in ((96, 64), (64, 48))) for _ in range(3)]
    layers[1] = (anywhere(layers[1][0]), layers[1][1])
    call, x, (chosen, shares) = ExpertCall(native, *_with_gate(layers[0])), torch.randn(9, 64), routed(9)
    expected, out = [run(call, layer, x, chosen, shares) for layer in layers], torch.full((9, 64), torch.nan)
    rows, kept = call.placed([call.bound(layer) for layer in layers], x, chosen, shares, out)
    for row, wanted in zip(rows, expected, strict=True):
        native.run_items(np.array([[row.ctypes.data, MIXTURE, 1]]))
        assert torch.equal(out, wanted)
    del kept
    chosen[4, 1] = EXPERTS
    with pytest.raises(IndexError, match="an expert that its layer does not have"):
        native.run_items(np.array([[rows[0].ctypes.data, MIXTURE, 1]]))


def _with_gate(layer: tuple[Stacked, ...]) -> Any:
    return layer[0], SILU, layer[1], None


def test_no_expert_is_computed(native: NativeKernels) -> None:
    up, down = matrices("float32", 96, 64, False), matrices("float32", 64, 48, False)
    call, out = ExpertCall(native, up[0], SILU, down[0], None), torch.full((3, 64), torch.nan)
    call.run((up[0], down[0]), torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2), out,
             torch.full((EXPERTS,), -1))  # fmt: skip
    assert torch.equal(out, torch.zeros(3, 64))


@pytest.mark.parametrize("number", [-1, EXPERTS])
def test_a_number_that_no_expert_has(native: NativeKernels, number: int) -> None:
    up, down = matrices("float32", 96, 64, False), matrices("float32", 64, 48, False)
    chosen = torch.tensor([[0, 1], [2, number]])
    with pytest.raises(IndexError, match=f"chose expert {number} of {EXPERTS}"):
        run(ExpertCall(native, up[0], SILU, down[0], None), (up[0], down[0]), torch.randn(2, 64), chosen,
            torch.ones(2, 2))  # fmt: skip


@pytest.mark.parametrize("act", experts.GATED_ACTS)
@pytest.mark.parametrize("columns", [1, 16, 37])
@pytest.mark.parametrize("alike", [
    ExpertGate("sigmoid"), ExpertGate("sigmoid", gated=False), ExpertGate("sigmoid", alpha=1.702, mixed=True),
    ExpertGate("sigmoid", act_most=2.5, up_most=1.25, shift=1.0),
])  # fmt: skip
def test_gates(native: NativeKernels, act: str, columns: int, alike: ExpertGate) -> None:
    gate = alike._replace(act=act)
    for scale in (0.01, 1.0, 3.0, 30.0, 500.0):
        x = torch.randn(1, columns * (1 + gate.gated)) * scale
        least = 3e-7 * scale * (1 + scale)  # GELU of numbers like -4 cancels digits, and is multiplied
        torch.testing.assert_close(gated(native, gate, x).double(), formula(gate, x.double()), atol=least, rtol=2e-6)


def test_gates_of_numbers_that_are_not_finite(native: NativeKernels) -> None:
    x = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [torch.inf, 1.0], [-torch.inf, 1.0]])
    found = gated(native, ExpertGate("sigmoid", act_most=7.0, up_most=7.0), x)[:, 0]
    assert found[:2].isnan().all()
    assert found[2] == 7.0
