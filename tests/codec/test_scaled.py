"""Formats of quantised safetensors checkpoints against decoders in numpy, from the formats' specifications."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flexengine.codec.forms import make_form
from flexengine.codec.scaled import SCALES, Scaled
from flexengine.errors import InvalidInput
from flexengine.kernels.reference import ReferenceKernels
from tests.helpers.quantised import E2M1, Array, codes_of, e4m3_values, e8m0, spread

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 331, 2000  # neither is a multiple of a block
SPECIAL = {  # bytes of scales that go wrong most easily: zero, subnormal, the largest, infinite and NaN
    "f32": [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x80000000],
    "f16": [0, 1, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7E00, 0x8000],
    "bf16": [0, 1, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7FC0, 0x8000],
    "e8m0": [0, 1, 2, 127, 253, 254, 255, 254],
    "e4m3": [0, 1, 7, 8, 0x7E, 0x7F, 0xFF, 0x80],
}
NAMES = [
    "fp8-128x128", "fp8-24x40", "fp8-row", "fp8-tensor", "fp8-128x128-bf16", "fp8-128x128-e8m0", "mxfp8-32", "mxfp4-32",
    "nvfp4-16-divides", "nvfp4-16-multiplies", "w4-128", "w4-32-f16", "w4-row-packedzeros", "w4-128-f32-packedzeros",
    "w8-row-signed", "w8-64", "w8-row-f32-127ths-signed", "w8-128-packedzeros", "w8-128-byteszeros-signed",
    "w8-tensor-signed", "w4-32-byteszeros", "w8-tensor-byteszeros",
]  # fmt: skip


def scale_values(data: Array, kind: str) -> Array:
    """Numbers of scales; data: uint8, flat."""
    if kind == "f32":
        return data.view("<f4")
    if kind == "f16":
        return data.view("<f2").astype(np.float32)
    if kind == "bf16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return e8m0(data) if kind == "e8m0" else e4m3_values()[data]


def decoded(form: Scaled, data: Array) -> Array:
    """The matrix, by the formats' definitions, fp32 [rows, columns]."""
    codes, scales, *more = np.split(data, np.cumsum(form.sizes)[:-1])
    rows, columns = form.rows, form.columns
    codes = codes.reshape(rows, -1)
    if form.family in ("fp8", "mxfp8"):
        numbers = e4m3_values()[codes]
    elif form.family in ("mxfp4", "nvfp4"):
        numbers = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(rows, -1)]
    elif form.signed:
        numbers = codes.view(np.int8).astype(np.float32)
    else:
        bits = 4 if form.family == "w4" else 8
        words = np.ascontiguousarray(codes).view("<i4").T
        numbers = codes_of(words, bits, columns).T.astype(np.float32)
        numbers -= 0 if form.zeros == "packed" else 2 ** (bits - 1)
    grid = (form.block[0] or rows, form.block[1] or columns)
    down, right = -(-rows // grid[0]), -(-columns // grid[1])
    each = scale_values(scales, form.scale_kind).reshape(down, right)
    if form.whole and form.whole != "127ths":
        factor = more.pop().view("<f4")
        each = each / factor if form.whole == "divides" else each * factor
    if form.zeros == "packed":
        points = codes_of(more[0].view("<i4").reshape(-1, right), 4 if form.family == "w4" else 8, rows)
        numbers = numbers - spread(points.astype(np.float32), (rows, columns), grid)
    elif form.zeros:
        points = more[0].view(np.int8).reshape(down, right)
        numbers = numbers - spread(points.astype(np.float32), (rows, columns), grid)
    found = numbers[:, :columns] * spread(each, (rows, columns), grid)
    return found * np.float32(7.874015718698502e-3) if form.whole == "127ths" else found


def encoded(form: Scaled, special: bool) -> Array:
    """Random bytes; special: with scales from SPECIAL."""
    data = RNG.integers(0, 256, form.nbytes, dtype=np.uint8)
    start, nbytes = form.sizes[0], form.sizes[1]
    size, kind = SCALES[form.scale_kind][0], form.scale_kind
    choice = RNG.choice(SPECIAL[kind], nbytes // size) if special else None
    scales = data[start : start + nbytes]
    if choice is not None:
        scales[:] = choice.astype({4: "<u4", 2: "<u2", 1: "u1"}[size]).view(np.uint8)
    elif kind not in ("e8m0", "e4m3"):  # scales of a usual size: random bits have all
        values = torch.from_numpy(RNG.uniform(0.001, 0.1, nbytes // size).astype(np.float32))
        scales[:] = values.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]).view(
            torch.uint8
        )
    if form.whole and form.whole != "127ths":
        data[-4:] = np.array([0.37], "<f4").view(np.uint8)
    return data


def same_bits(found: Tensor, right: Array) -> bool:
    """Whether all numbers have the same bits; a NaN may have any."""
    expected = torch.from_numpy(np.ascontiguousarray(right, dtype=np.float32))
    bits = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    return found.shape == expected.shape and bool(bits.all())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_decodes_as_the_format_is_defined(name: str, special: bool) -> None:
    """20,000 groups of 32 numbers and more."""
    form = make_form(name, ROWS, COLUMNS)
    assert isinstance(form, Scaled)
    data = encoded(form, special)
    with np.errstate(all="ignore"):
        right = decoded(form, data)
    if special and "-tensor" not in name:
        assert not np.isfinite(right).all()
    assert same_bits(form.dequantize(torch.from_numpy(data)), right)


@pytest.mark.parametrize("name", NAMES)
def test_rows_alone_are_those_of_the_matrix(name: str) -> None:
    form = make_form(name, 300, 250 if name.startswith("w") else 256)
    whole = torch.from_numpy(encoded(form, False))
    shifted = torch.zeros(form.nbytes + 3, dtype=torch.uint8)[3:]  # a file's offset may be odd in a buffer
    shifted.copy_(whole)
    right, ids = form.dequantize(whole), torch.tensor([299, 0, 0, 17])
    assert torch.equal(form.dequantize_rows(shifted, ids).nan_to_num(7), right[ids].nan_to_num(7))
    for low, high in (0, form.step), (form.step, 300), (300 // form.step * form.step, 300):
        if low < high:
            part = torch.cat([shifted[start : start + nbytes] for start, nbytes in form.spans(low, high)])
            alone = form.with_rows(high - low)
            assert len(part) == alone.nbytes
            assert torch.equal(alone.dequantize(part).nan_to_num(7), right[low:high].nan_to_num(7))


@pytest.mark.parametrize("name", ["fp8-128x128", "mxfp4-32", "w4-128"])
def test_reference_kernels_multiply(name: str) -> None:
    form = make_form(name, 70, 320)
    data = torch.from_numpy(encoded(form, False))
    data[: form.sizes[0]] &= 0x3F  # no NaN
    if name == "mxfp4-32":
        data[form.sizes[0] :] = 127
    weight, x, bias = form.dequantize(data), torch.randn(5, 320), torch.randn(70)
    exact = x.double() @ weight.double().T + bias
    size = x.abs().double() @ weight.abs().double().T + bias.abs()
    found = ReferenceKernels().product(x, data, form, bias)
    assert ((found - exact).abs() <= size * 321 * 2.0**-24).all()


@pytest.mark.parametrize(("name", "text"), [
    ("fp8-12y", "there is no format 'fp8-12y'"), ("mxfp4-31x", "no format"), ("w5-32", "no format"),
    ("fp8-row-more", "no format"), ("mxfp4-32", r"a matrix \[4, 33\] in mxfp4-32 needs whole bytes"),
])  # fmt: skip
def test_names_and_shapes_that_are_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make_form(name, 4, 33)


def test_it_does_not_encode() -> None:
    with pytest.raises(InvalidInput, match="fp8-row is a format of checkpoints; encode weights as int8"):
        make_form("fp8-row", 4, 32).encode(torch.zeros(4, 32))
