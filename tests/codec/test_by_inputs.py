"""GPTQ and AWQ against decoders in numpy, from the packers' definitions: strings of bits, and AutoAWQ's order."""

import numpy as np
import pytest
import torch

from flexengine.codec.by_inputs import ByInputs
from flexengine.codec.forms import make_form
from flexengine.errors import InvalidInput
from tests.codec.test_scaled import SPECIAL, same_bits, scale_values
from tests.helpers.quantised import Array, awq_codes, codes_of

RNG = np.random.default_rng(1)
NAMES = ["gptq2-64-zeros", "gptq3-128-zeros", "gptq3-32", "gptq4-128-zeros", "gptq4-100", "gptq4-64-zeros-ordered",
         "gptq8-128-ordered-bf16", "gptq8-1280-zeros", "awq4-128", "awq4-64-bf16", "awq4-1280"]  # fmt: skip


def decoded(form: ByInputs, data: Array) -> Array:
    """The matrix, by the definitions of the packers, fp32 [rows, columns]."""
    rows, columns, groups = form.rows, form.columns, -(-form.columns // form.width)
    parts = np.split(data, np.cumsum(form.sizes)[:-1])
    words, zeros = parts[0].view("<i4"), parts[1].view("<i4").reshape(groups, -1)
    if form.kind == "gptq":
        codes = codes_of(words.reshape(-1, rows), form.bits, columns)
        points = codes_of(zeros.T, form.bits, rows).T + form.less
    else:
        codes, points = awq_codes(words.reshape(columns, -1)), awq_codes(zeros)
    scales = scale_values(parts[2], form.scales).reshape(groups, rows)
    group = parts[3].view("<i4") if form.ordered else np.arange(columns) // form.width
    return ((codes - points[group]).astype(np.float32) * scales[group]).T


def encoded(form: ByInputs, special: bool = False) -> Array:
    data = RNG.integers(0, 256, form.nbytes, dtype=np.uint8)
    first, nbytes = sum(form.sizes[:2]), form.sizes[2]
    if special:
        data[first : first + nbytes] = RNG.choice(SPECIAL[form.scales], nbytes // 2).astype("<u2").view(np.uint8)
    if form.ordered:
        groups = RNG.permutation(np.arange(form.columns) // form.width).astype("<i4")
        data[first + nbytes :] = groups.view(np.uint8)
    return data


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_decodes_as_the_packers_define(name: str, special: bool) -> None:
    """20,000 groups of 32 numbers and more."""
    form = make_form(name, 544, 1280)
    assert isinstance(form, ByInputs)
    assert form.name == name
    data = encoded(form, special)
    with np.errstate(all="ignore"):
        right = decoded(form, data)
    assert same_bits(form.dequantize(torch.from_numpy(data)), right)


@pytest.mark.parametrize("name", NAMES)
def test_rows_alone_are_those_of_the_matrix(name: str) -> None:
    form = make_form(name, 96, 1280)
    data = torch.zeros(form.nbytes + 1, dtype=torch.uint8)[1:]  # a file's offset may be odd in a buffer
    data.copy_(torch.from_numpy(encoded(form)))
    ids = torch.tensor([95, 0, 0, 31, 32])
    assert torch.equal(form.dequantize_rows(data, ids).nan_to_num(7), form.dequantize(data)[ids].nan_to_num(7))
    assert [*form.spans(0, 96)] == [(0, form.nbytes)]


@pytest.mark.parametrize(("name", "shape", "text"), [
    ("gptq4-128", (32, 1284), "needs multiples of 8"), ("gptq3-128", (33, 1280), "needs multiples of 32"),
    ("awq4-128", (12, 1280), "needs multiples of 8"), ("gptq4-x", (32, 1280), "there is no format 'gptq4-x'"),
])  # fmt: skip
def test_names_and_shapes_that_are_refused(name: str, shape: tuple[int, int], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make_form(name, *shape)
