"""Block types of GGUF files against gguf-py's own decoder: random blocks, and the scales that go wrong most easily."""

import functools
from collections.abc import Callable

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from flexengine.codec.forms import FORMS, make_form
from flexengine.codec.gguf_blocks import BLOCKS
from flexengine.errors import InvalidInput
from flexengine.kernels.reference import ReferenceKernels
from tests.helpers.gguf_blocks import HALVES, random_blocks, special_blocks

KINDS = sorted(BLOCKS)


@functools.cache
def expected(kind: str, special: bool) -> tuple[Tensor, Tensor]:
    """Return blocks, uint8 [n, nbytes], and what gguf-py decodes, fp32 [n, columns]."""
    blocks = special_blocks(kind) if special else random_blocks(kind, 20_000)
    with np.errstate(all="ignore"):
        decoded = gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()])
    return blocks, torch.from_numpy(decoded)


def same_bits(found: Tensor, right: Tensor) -> bool:
    """Whether all numbers have the same bits; a NaN may have any."""
    bits = (found.view(torch.int32) == right.view(torch.int32)) | (found.isnan() & right.isnan())
    return found.shape == right.shape and bool(bits.all())


@pytest.mark.parametrize("kind", KINDS)
def test_geometry_is_ggmls(kind: str) -> None:
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]] == BLOCKS[kind][:2]


def test_every_type_is_registered() -> None:
    assert {name for name, path in FORMS.items() if "gguf_blocks" in path} == {*BLOCKS}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_gguf_py(kind: str, special: bool) -> None:
    blocks, right = expected(kind, special)
    form = make_form(kind, len(blocks) // 4, 4 * right.shape[1])
    found = form.dequantize(blocks.flatten())
    assert same_bits(found, right.view(found.shape))
    if special and kind in HALVES and HALVES[kind]:
        assert found.isnan().any()  # the cases are there
        assert ((found != 0) & (found.abs() < 2.0**-20)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_is_that_of_the_matrix(kind: str) -> None:
    blocks, right = expected(kind, False)
    form = make_form(kind, 40, 3 * right.shape[1])
    data = torch.zeros(form.nbytes + 7, dtype=torch.uint8)[7:]  # a file's offset may be odd in a buffer
    data.copy_(blocks[:120].flatten())
    ids = torch.tensor([39, 0, 0, 17])
    assert same_bits(form.dequantize_rows(data, ids), right[:120].view(40, -1)[ids])
    assert same_bits(form.dequantize_rows(data, ids[:1]), right[:120].view(40, -1)[ids[:1]])
    assert form.nbytes == 40 * form.step_bytes == 120 * BLOCKS[kind].nbytes


@pytest.mark.parametrize("kind", ["q4_0", "q6_k", "mxfp4"])
def test_reference_kernels_multiply(kind: str) -> None:
    blocks, right = expected(kind, False)
    form, x, bias = make_form(kind, 50, 2 * right.shape[1]), torch.randn(5, 2 * right.shape[1]), torch.randn(50)
    exact = x.double() @ right[:100].view(50, -1).double().T + bias
    size = x.abs().double() @ right[:100].view(50, -1).abs().double().T + bias.abs()
    found = ReferenceKernels().product(x, blocks[:100].flatten(), form, bias)
    assert ((found - exact).abs() <= size * (form.columns + 1) * 2.0**-24).all()


@pytest.mark.parametrize(("make", "text"), [
    (lambda: make_form("q4_k", 4, 384), r"\[4, 384\] cannot be in Q4_K: .* whole blocks of 256 columns"),
    (lambda: make_form("q8_0", 0, 32), r"\[0, 32\] cannot be in Q8_0: it needs at least one row"),
    (lambda: make_form("q5_1", 2, 32).encode(torch.zeros(2, 32)), "weights in Q5_1 are read from GGUF files only"),
])  # fmt: skip
def test_misfits_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make()
