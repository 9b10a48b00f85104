"""bitsandbytes in 4 bits against a decoder in numpy: blocks that cross rows, nested scales, special ones."""

import numpy as np
import pytest
import torch

from flexengine.codec.flat_blocks import FlatBlocks
from flexengine.codec.forms import make_form
from flexengine.errors import InvalidInput
from tests.codec.test_scaled import SPECIAL, same_bits
from tests.helpers.quantised import FP4, NF4, Array

RNG = np.random.default_rng(2)
NAMES = ["nf4-64", "fp4-64", "nf4-128", "nf4-64-nested256", "fp4-64-nested256"]


def case(name: str, special: bool, rows: int = 334, columns: int = 2100) -> tuple[FlatBlocks, Array, Array]:
    """A form, its bytes, and the matrix by the definition. 2100 is no multiple of a block."""
    kind, block, *nested = name.split("-")
    form = FlatBlocks(rows, columns, kind, int(block), 256 if nested else 0, 0.125 if nested else 0.0)
    count = -(-rows * columns // int(block))
    codes, table = RNG.integers(0, 256, rows * columns // 2, dtype=np.uint8), NF4 if kind == "nf4" else FP4
    top = RNG.uniform(0.01, 3, -(-count // 256) if nested else count).astype(np.float32)
    if special:
        top = RNG.choice(SPECIAL["f32"], len(top)).astype("<u4").view(np.float32)
    parts = [codes, top, table]
    absmax = top
    if nested:
        own, numbers = RNG.integers(0, 256, count, dtype=np.uint8), RNG.uniform(-1, 1, 256).astype(np.float32)
        parts = [codes, own, table, top, numbers]
        absmax = (numbers[own] * np.repeat(top, 256)[:count]).astype(np.float32) + np.float32(0.125)
    both = np.stack([codes >> 4, codes & 15], 1).reshape(-1)
    right = table[both] * np.repeat(absmax, int(block))[: rows * columns]
    data = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])
    return form, data, right.reshape(rows, columns)


@pytest.mark.parametrize("columns", [2100, 2176])  # blocks cross rows, or do not
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_decodes_as_bitsandbytes_defines(name: str, special: bool, columns: int) -> None:
    with np.errstate(all="ignore"):
        form, data, right = case(name, special, columns=columns)
    assert len(data) == form.nbytes
    assert same_bits(form.dequantize(torch.from_numpy(data)), right)


def test_rows_alone_are_those_of_the_matrix() -> None:
    form, data, right = case("nf4-64-nested256", False, 40, 102)
    shifted = torch.zeros(form.nbytes + 1, dtype=torch.uint8)[1:]
    shifted.copy_(torch.from_numpy(data))
    ids = torch.tensor([39, 0, 0, 7])
    assert same_bits(form.dequantize_rows(shifted, ids), right[ids.numpy()])


def test_names() -> None:
    assert [make_form(name, 4, 64).name for name in NAMES] == NAMES
    for name in ("nf4-x", "nf5-64", "nf4-64-nestedx"):
        with pytest.raises(InvalidInput, match="there is no format"):
            make_form(name, 4, 64)
    with pytest.raises(InvalidInput, match=r"\[3, 33\] in nf4-64 needs whole bytes"):
        make_form("nf4-64", 3, 33)
