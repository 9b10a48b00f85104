"""Products with the formats of quantised safetensors checkpoints: as with the matrix that decoders in numpy give."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexengine.codec.forms import Form, make_form
from flexengine.codec.layouts import NATIVE
from flexengine.codec.mixed import Mixed
from flexengine.kernels import Kernels, load
from flexengine.kernels.base import Compute
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import ExpertCall, ExpertGate, Stacked, gated
from flexengine.kernels.steps import KINDS
from tests.codec import test_by_inputs as by_inputs
from tests.codec import test_flat_blocks as flat_blocks
from tests.codec import test_scaled as scaled
from tests.kernels.test_blocks import rounded

COMPUTES: tuple[Compute | None, ...] = (None, "bf16", "int8")
COUNTS = (1, 2, 7, 17, 70)
# Formats that the native kernels read, and rows and columns of matrices: of few that fill registers and parts of 32.
SCALED = [name for name in scaled.NAMES if name != "fp8-24x40"] + ["fp8-24x48", "w4-128-byteszeros", "mxfp8-32-f16"]
BY_INPUTS = [name for name in by_inputs.NAMES if name != "gptq4-100"] + ["gptq4-16-zeros", "gptq4-1280-f32"]
FLAT = list(flat_blocks.NAMES)
NAMES = [*SCALED, *BY_INPUTS, *FLAT]
SOME = ["fp8-128x128", "nvfp4-16-divides", "w4-128", "w4-row-packedzeros", "w8-row-signed", "gptq3-128-zeros",
        "gptq4-64-zeros-ordered", "awq4-128", "nf4-64-nested256"]  # fmt: skip


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def shapes(name: str) -> list[tuple[int, int]]:
    if name in BY_INPUTS:
        columns = 1280 if "1280" in name else 64 if "3" in name[:5] else 336 if "2" in name[:5] else 328
        return [(96, columns), (32, 640)]
    if name in FLAT:
        return [(37, 384), (1, 128), (130, 640)]
    return [(37, 333 if name[0] == "w" or "fp8" in name else 334), (1, 64), (130, 1100)]


@functools.cache
def case(name: str, rows: int, columns: int, special: bool = False) -> tuple[Form, Tensor, Tensor]:
    """Return a format, a matrix in it, and what numpy decodes, fp32 [rows, columns]; special: with scales that go wrong
    most easily."""
    with np.errstate(all="ignore"):
        if name in FLAT:
            form, data, right = flat_blocks.case(name, special, rows, columns)
            return form, torch.from_numpy(data), torch.from_numpy(right)
        form, module = make_form(name, rows, columns), by_inputs if name in BY_INPUTS else scaled
        data = module.encoded(form, special)
        codes, scales = data[: form.sizes[0]], data[form.sizes[0] : sum(form.sizes[:2])]
        if not special and name in BY_INPUTS:
            size = 4 if form.scales == "f32" else 2
            values = torch.rand(form.sizes[2] // size) + 0.5
            kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
            data[sum(form.sizes[:2]) :][: form.sizes[2]] = values.to(kinds[form.scales]).view(torch.uint8)
        if not special and "fp8" in name:
            codes[codes & 127 == 127] = 5  # NaN
        if not special and form_scale(form) in ("e8m0", "e4m3"):
            scales[:] = np.random.default_rng(0).integers(60, 110, len(scales))
        right = module.decoded(form, data)
    return form, torch.from_numpy(data), torch.from_numpy(np.ascontiguousarray(right, dtype=np.float32))


def form_scale(form: Any) -> str:
    return str(getattr(form, "scale_kind", ""))


def same(found: Tensor, right: Tensor) -> bool:
    """Whether all numbers are equal; NaN equals NaN."""
    return bool(((found == right) | (found.isnan() & right.isnan())).all())


def test_which_formats_are_native() -> None:
    kinds = {form.layout.kind for name in NAMES if (form := case(name, *shapes(name)[0])[0]).layout}
    assert kinds == {*NATIVE}
    others = [("fp8-24x40", 64, 80), ("gptq4-100", 32, 200), ("nf4-64", 4, 100), ("fp8-tensor", 1, 3)]
    assert all(make_form(name, rows, columns).native is None for name, rows, columns in others)
    no_dots = {name for name in NAMES if not case(name, *shapes(name)[0])[0].layout.dots}  # type: ignore[union-attr]
    assert no_dots == {name for name in NAMES if "p8" in name or "ordered" in name or name in FLAT or "q4-16" in name}


@pytest.mark.parametrize("name", NAMES)
def test_fp32(kernel: Kernels, name: str) -> None:
    for rows, columns in shapes(name):
        form, data, right = case(name, rows, columns)
        bias = torch.randn(rows)
        for count in COUNTS:
            x, own = torch.randn(count, columns), bias if count % 2 else None
            found = kernel.product(x, data, form, own)
            expected = x.double() @ right.double().T + (0 if own is None else bias.double())
            bound = (x.abs().double() @ right.abs().double().T + bias.abs()) * (columns + 1) * 2.0**-24
            assert ((found - expected).abs() <= bound).all(), (rows, count)
            if kernel.name == "native":  # in the same order
                assert torch.equal(found, kernel.linear(x, right, own)), (rows, count)


@pytest.mark.parametrize("name", NAMES)
def test_special_scales_and_codes(kernel: Kernels, name: str) -> None:
    """Also codes that are NaN: a row with one is NaN."""
    rows, columns = 96, 1280
    form, data, right = case(name, rows, columns, True)
    x = torch.randn(3, columns)
    if kernel.name == "native":
        assert same(kernel.product(x, data, form), kernel.linear(x, right))
    else:
        assert same(kernel.encoded_rows(data, form, torch.arange(rows)), right)


@pytest.mark.parametrize("name", NAMES)
def test_bf16(kernel: Kernels, name: str) -> None:
    for rows, columns in shapes(name):
        form, data, right = case(name, rows, columns)
        weight = right.bfloat16() if (pairs := getattr(kernel, "bf16", False)) else right
        for count in (1, 7, 140):
            x = torch.randn(count, columns)
            found = kernel.product(x, data, form, None, "bf16")
            expected = x.bfloat16().double() @ weight.double().T
            bound = x.abs().double() @ weight.abs().double().T * 1.01 * (columns + 1) * 2.0**-24
            assert ((found - expected).abs() <= bound).all(), (rows, count)
            if pairs and columns % 2 == 0:
                assert torch.equal(found, kernel.linear(x, weight, None, "bf16")), (rows, count)


@pytest.mark.parametrize("name", NAMES)
def test_16_bits(kernel: Kernels, name: str) -> None:
    """Of x, whose dtype the weights are rounded to, at most, and so is the result."""
    if not kernel.narrow:
        pytest.skip("these kernels compute in fp32")
    for rows, columns in shapes(name):
        form, data, right = case(name, rows, columns)
        bias = torch.randn(rows)
        for count in (1, 7, 70):
            x = torch.randn(count, columns, dtype=torch.bfloat16)
            expected = x.double() @ right.double().T + bias
            bound = 2.0**-8 * (expected.abs() + x.abs().double() @ right.abs().double().T) + 1e-6
            assert ((kernel.product(x, data, form, bias) - expected).abs() <= bound).all(), (rows, count)


@pytest.mark.parametrize("name", NAMES)
def test_int8(kernel: Kernels, name: str) -> None:
    for rows, columns in shapes(name):
        form, data, right = case(name, rows, columns)
        bias = torch.randn(rows)
        groups = torch.nn.functional.pad(right.double().abs(), (0, -columns % 16)).view(rows, -1, 16)
        # Zero points are summed apart from codes: both are larger than their difference.
        sizes = (3 * groups.amax(2, keepdim=True)).expand(groups.shape).flatten(1)[:, :columns]
        for count in COUNTS:
            x = torch.randn(count, columns) * 10.0 ** torch.randint(-3, 3, (count, 1))
            found, near = kernel.product(x, data, form, bias, "int8"), rounded(x)
            expected = near @ right.double().T + bias
            size = near.abs() @ sizes.T + bias.abs()
            assert ((found - expected).abs() <= size * (columns + 8) * 2.0**-24).all(), (rows, count)


@pytest.mark.parametrize("name", ["fp8-128x128", "fp8-row-bf16", "fp8-tensor"])
def test_int8_with_numbers_of_fp8_is_exact(kernel: Kernels, name: str) -> None:
    """No number of FP8 is rounded: sums of whole numbers have no error. A code that is NaN spoils one output."""
    rows, columns = 130, 1100
    form, data, _ = case(name, rows, columns)
    data = data.clone()
    codes, scales = data[: form.sizes[0]], data[form.sizes[0] :]  # type: ignore[attr-defined]
    codes.copy_(torch.randint(-56, 57, codes.shape).float().to(torch.float8_e4m3fn).view(torch.uint8))
    scales.view(torch.bfloat16 if "bf16" in name else torch.float32).fill_(0.25)
    right = codes.view(torch.float8_e4m3fn).view(rows, columns).double() * 0.25
    for count in (1, 7, 70):
        x = torch.randint(-127, 128, (count, columns)).float()
        x[:, ::64] = 127.0  # scales of 1
        found = kernel.product(x, data, form, None, "int8")
        assert torch.equal(found.double(), x.double() @ right.T), count
    codes[37 * columns + 5] = 0x7F
    assert kernel.product(x, data, form, None, "int8").isnan().any(0).nonzero().flatten().tolist() == [37]


def test_int8_of_fp8_multiplies_codes_where_pairs_are_multiplied() -> None:
    kernel = native()
    for name, fits in (("fp8-128x128", True), ("fp8-tensor", True), ("fp8-24x48", False), ("mxfp8-32", False)):
        form, data, _ = case(name, *shapes(name)[0])
        steps = kernel.steps()
        steps.product(torch.randn(3, form.columns), data, form, None, "int8")
        kinds = [KINDS[kind] for _, kind, _ in steps._steps]
        assert kinds == (["round", "dots"] if fits and kernel.bf16 else ["narrow", "decoded"]), name


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", SOME)
def test_a_row_does_not_depend_on_the_rest(kernel: Kernels, name: str, compute: Compute | None) -> None:
    if kernel.name != "native":
        pytest.skip("plain torch is tested with other formats")
    form, data, _ = case(name, *shapes(name)[0])
    x, bias = torch.randn(530, form.columns), torch.randn(form.rows)
    torch.set_num_threads(1)
    whole = kernel.product(x, data, form, bias, compute)
    for threads, counts in ((1, (1, 2, 5, 6, 7, 33, 100, 140, 513)), (2, (1, 9, 530))):
        torch.set_num_threads(threads)
        for rows in counts:
            low = int(torch.randint(531 - rows, ()))
            found = kernel.product(x[low : low + rows], data, form, bias, compute)
            assert torch.equal(found, whole[low : low + rows]), (threads, rows, low)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_may_begin_anywhere_and_nothing_else_counts(kernel: Kernels, name: str, compute: Compute | None) -> None:
    form, data, _ = case(name, *shapes(name)[0])
    x, moved = torch.randn(20, form.columns), torch.full((form.nbytes + 99,), 255, dtype=torch.uint8)
    moved[7 : 7 + form.nbytes] = data
    expected = kernel.product(x, data, form, None, compute)
    assert expected.isfinite().all()
    assert torch.equal(kernel.product(x, moved[7 : 7 + form.nbytes], form, None, compute), expected)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(
    kernel: Kernels, name: str, compute: Compute | None, value: float
) -> None:
    form, data, _ = case(name, *shapes(name)[0])
    x = torch.randn(20, form.columns)
    expected = kernel.product(x, data, form, None, compute)
    bad = x.clone()
    bad[7, 60] = value
    found = kernel.product(bad, data, form, None, compute)
    others = torch.arange(20) != 7
    assert not found[7].isfinite().any()
    assert torch.equal(found[others], expected[others])


def native() -> NativeKernels:
    kernel: Any = load()
    if not isinstance(kernel, NativeKernels):
        pytest.skip("native kernels cannot be built here")
    return kernel


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("names", [("w4-128", "fp8-128x128"), ("fp8-row", "fp8-row"), ("awq4-128", "w4-128")])
def test_steps_of_matrices_of_several_formats(names: tuple[str, str], compute: Compute | None, rows: int) -> None:
    """As a fused projection has: the products write to one result, and add a residual."""
    kernel = native()
    cases = [case(name, 96, 640) for name in names]
    form = Mixed(192, 640, tuple(part for part, *_ in cases))
    assert form.in_steps
    x, bias, residual = torch.randn(rows, 640), torch.randn(192), torch.randn(rows, 192)
    steps = kernel.steps()
    found = steps.product(x, torch.cat([data for _, data, _ in cases]), form, bias, compute, residual)
    steps.run()
    alone = [kernel.product(x, data, part, None, compute) for part, data, _ in cases]
    torch.testing.assert_close(found, torch.cat(alone, 1) + bias + residual, rtol=1e-5, atol=1e-4)


EXPERTS = [("mxfp4-32", "mxfp4-32"), ("fp8-128x128", "w4-32-f16"), ("gptq4-128-zeros", "awq4-64-bf16")]


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("names", EXPERTS)
@pytest.mark.parametrize("mixed", [False, True])
def test_experts_in_one_call(compute: Compute | None, names: tuple[str, str], mixed: bool) -> None:
    """The sums are those of products with one expert's matrices after the other. mixed: gate and up apart."""
    kernel, gate = native(), ExpertGate("sigmoid")
    up, down = stacked(names[0], 512, 256, mixed), stacked(names[1], 256, 256, False)
    x, out = torch.randn(40, 256), torch.full((40, 256), torch.nan)
    chosen, shares = torch.rand(40, 4).topk(2).indices, torch.rand(40, 2)
    ExpertCall(kernel, up, gate, down, compute).run((up, down), x, chosen, shares, out)
    expected = torch.zeros(40, 256)
    for token in range(40):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            y = x[token : token + 1]
            assert up.form is not None
            assert down.form is not None
            middle = gated(kernel, gate, kernel.product(y, up.weight[expert], up.form, None, compute))
            expected[token] += share * kernel.product(middle, down.weight[expert], down.form, None, compute)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def stacked(name: str, rows: int, columns: int, mixed: bool) -> Stacked:
    """Return matrices of four experts."""
    part, data, _ = case(name, rows // (1 + mixed), columns)
    form = Mixed(rows, columns, (part, part)) if mixed else part
    whole = torch.cat([data, data]) if mixed else data
    return Stacked(torch.stack([whole] * 4), None, form)
