"""Products with weights in GGUF's block types, and rows of them: as with the matrix that gguf-py decodes."""

import functools
from typing import Any

import gguf.quants
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from flexengine.codec.forms import Form, make_form
from flexengine.codec.gguf_blocks import BLOCKS, NATIVE
from flexengine.kernels import Kernels, load
from flexengine.kernels.base import Compute
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import ExpertCall, ExpertGate, Stacked, gated
from tests.helpers.gguf_blocks import random_blocks, special_blocks

COMPUTES: tuple[Compute | None, ...] = (None, "bf16", "int8")
# Rows of the matrix that do not fill registers, and numbers of blocks that do not fill a chunk of 256 columns.
SHAPES = [(37, 3), (1, 1), (64, 9), (130, 18)]
COUNTS = (1, 2, 3, 7, 17, 70)


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


@functools.cache
def decoded(kind: str, rows: int, columns: int) -> tuple[Form, Tensor, Tensor]:
    """Return a format, a matrix in it, and what gguf-py decodes, fp32 [rows, columns]."""
    blocks = random_blocks(kind, rows * columns // BLOCKS[kind].columns)
    right = gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()])
    return make_form(kind, rows, columns), blocks.flatten(), torch.from_numpy(right).view(rows, columns)


def matrix(kind: str, rows: int, blocks: int) -> tuple[Form, Tensor, Tensor]:
    """Return `decoded` of a matrix of some blocks of 32 columns, or fewer of 256."""
    return decoded(kind, rows, 32 * blocks if BLOCKS[kind].columns == 32 else 256 * (-(-blocks // 8)))


def rounded(x: Tensor) -> Tensor:
    """Return x in 8 bits by groups of 64 columns, in float64, as base.Kernels.product says."""
    parts = []
    for part in x.split(64, 1):
        scale = part.abs().amax(1, keepdim=True) / 127
        code = (part / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
        parts.append(torch.where(scale > 0, code, 0.0).double() * scale.double())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", [*NATIVE, "iq3_s"])
def test_rows(kernel: Kernels, kind: str) -> None:
    form, data, right = matrix(kind, 37, 9)
    for count in (0, 1, 9, 300):
        ids = torch.randint(37, (count,))
        assert torch.equal(kernel.encoded_rows(data, form, ids).view(torch.int32), right[ids].view(torch.int32))


@pytest.mark.parametrize("kind", NATIVE)
def test_rows_with_special_scales(kernel: Kernels, kind: str) -> None:
    blocks = special_blocks(kind)
    right = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()]))
    form = make_form(kind, len(blocks), BLOCKS[kind].columns)
    found = kernel.encoded_rows(blocks.flatten(), form, torch.arange(form.rows))
    same = (found.view(torch.int32) == right.view(torch.int32)) | (found.isnan() & right.isnan())
    assert same.all(), right[~same][:5]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NATIVE)
def test_fp32(kernel: Kernels, kind: str, shape: tuple[int, int]) -> None:
    form, data, right = matrix(kind, *shape)
    bias = torch.randn(form.rows)
    for count in COUNTS:
        x, own = torch.randn(count, form.columns), bias if count % 2 else None
        found = kernel.product(x, data, form, own)
        expected = x.double() @ right.double().T + (0 if own is None else bias.double())
        bound = (x.abs().double() @ right.abs().double().T + bias.abs()) * (form.columns + 1) * 2.0**-24
        assert ((found - expected).abs() <= bound).all(), count
        if kernel.name == "native":  # in the same order
            assert torch.equal(found, kernel.linear(x, right, own)), count


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NATIVE)
def test_bf16(kernel: Kernels, kind: str, shape: tuple[int, int]) -> None:
    form, data, right = matrix(kind, *shape)
    weight = right.bfloat16() if (pairs := getattr(kernel, "bf16", False)) else right
    for count in (*COUNTS, 140):
        x = torch.randn(count, form.columns)
        found = kernel.product(x, data, form, None, "bf16")
        expected = x.bfloat16().double() @ weight.double().T
        bound = x.abs().double() @ weight.abs().double().T * 1.01 * (form.columns + 1) * 2.0**-24
        assert ((found - expected).abs() <= bound).all(), count
        if pairs:
            assert torch.equal(found, kernel.linear(x, weight, None, "bf16")), count


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NATIVE)
def test_int8(kernel: Kernels, kind: str, shape: tuple[int, int]) -> None:
    form, data, right = matrix(kind, *shape)
    bias = torch.randn(form.rows)
    for count in COUNTS:
        x = torch.randn(count, form.columns) * 10.0 ** torch.randint(-3, 3, (count, 1))
        found = kernel.product(x, data, form, bias, "int8")
        near = rounded(x)
        expected = near @ right.double().T + bias
        # Minima are summed apart from codes: in the K types both are larger than the numbers themselves.
        size = near.abs() @ _sizes(kind, data, form).T + bias.abs()
        terms = form.columns // 4 + 8 if kernel.name == "native" else form.columns + 4
        assert ((found - expected).abs() <= size * terms * 2.0**-24).all(), count


def _sizes(kind: str, data: Tensor, form: Form) -> Tensor:
    """Return a bound of the sizes of scale * code and of the minimum, fp64 [rows, columns]."""
    right = form.dequantize(data).double()
    groups = right.view(form.rows, -1, 16)
    return (3 * groups.abs().amax(2, keepdim=True)).expand(groups.shape).reshape(right.shape)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("kind", NATIVE)
def test_a_row_does_not_depend_on_the_rest(kernel: Kernels, kind: str, compute: Compute | None) -> None:
    if kernel.name != "native":
        pytest.skip("plain torch is tested with other formats")
    form, data, _ = matrix(kind, 70, 9)
    x, bias = torch.randn(530, form.columns), torch.randn(70)
    torch.set_num_threads(1)
    whole = kernel.product(x, data, form, bias, compute)
    for threads, counts in ((1, (1, 2, 5, 6, 7, 33, 100, 140, 513)), (2, (1, 9, 530))):
        torch.set_num_threads(threads)
        for rows in counts:
            low = int(torch.randint(531 - rows, ()))
            found = kernel.product(x[low : low + rows], data, form, bias, compute)
            assert torch.equal(found, whole[low : low + rows]), (threads, rows, low)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("kind", NATIVE)
def test_bytes_may_begin_anywhere_and_nothing_else_counts(kernel: Kernels, kind: str, compute: Compute | None) -> None:
    form, data, _ = matrix(kind, 50, 9)
    x, moved = torch.randn(20, form.columns), torch.full((form.nbytes + 99,), 255, dtype=torch.uint8)
    moved[7 : 7 + form.nbytes] = data
    expected = kernel.product(x, data, form, None, compute)
    assert expected.isfinite().all()
    assert torch.equal(kernel.product(x, moved[7 : 7 + form.nbytes], form, None, compute), expected)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q8_0"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(
    kernel: Kernels, kind: str, compute: Compute | None, value: float
) -> None:
    form, data, _ = matrix(kind, 40, 9)
    x = torch.randn(20, form.columns)
    expected = kernel.product(x, data, form, None, compute)
    bad = x.clone()
    bad[7, 70] = value
    found = kernel.product(bad, data, form, None, compute)
    others = torch.arange(20) != 7
    assert not found[7].isfinite().any()
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("rows", [1, 64])
def test_steps_of_mixed_types_share_their_input(compute: Compute | None, rows: int) -> None:
    """As q, k and v of one layer have: each is rounded as its own product wants."""
    kernel: Any = load()
    if not isinstance(kernel, NativeKernels):
        pytest.skip("native kernels cannot be built here")
    x, steps = torch.randn(rows, 256), kernel.steps()
    packed = make_form("int4", 48, 256)
    weights = [(packed, packed.encode(torch.randn(48, 256)))]
    weights += [matrix(kind, 48, 8)[:2] for kind in ("q4_k", "q6_k", "q8_0")]
    found = [steps.product(x, data, form, None, compute, x[:, :48].contiguous(), beside=i > 0)
             for i, (form, data) in enumerate((*weights, *weights))]  # fmt: skip
    steps.run()
    for (form, data), y in zip((*weights, *weights), found, strict=True):
        alone = kernel.product(x, data, form, None, compute)
        torch.testing.assert_close(y, alone + x[:, :48], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("kinds", [("q4_k", "q6_k"), ("mxfp4", "q8_0")])
def test_experts_in_one_call(compute: Compute | None, kinds: tuple[str, str]) -> None:
    """The sums are those of products with one expert's matrices after the other."""
    kernel: Any = load()
    if not isinstance(kernel, NativeKernels):
        pytest.skip("native kernels cannot be built here")
    gate, up, down = ExpertGate("sigmoid"), stacked(kinds[0], 512, 256), stacked(kinds[1], 256, 256)
    x, out = torch.randn(40, 256), torch.full((40, 256), torch.nan)
    chosen = torch.rand(40, 4).topk(2).indices
    shares = torch.rand(40, 2)
    ExpertCall(kernel, up, gate, down, compute).run((up, down), x, chosen, shares, out)
    expected = torch.zeros(40, 256)
    for token in range(40):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            y = x[token : token + 1]
            assert up.form is not None
            assert down.form is not None
            middle = gated(kernel, gate, kernel.product(y, up.weight[expert], up.form, None, compute))
            expected[token] += share * kernel.product(middle, down.weight[expert], down.form, None, compute)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def stacked(kind: str, rows: int, columns: int) -> Stacked:
    """Return matrices of four experts."""
    blocks = [random_blocks(kind, rows * columns // BLOCKS[kind].columns, seed=expert) for expert in range(4)]
    return Stacked(torch.stack([x.flatten() for x in blocks]), None, make_form(kind, rows, columns))
