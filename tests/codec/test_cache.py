"""The form of an encoded cache: sizes, and which bits lie where."""

import math

import pytest
import torch

from flexengine.codec.cache import BITS, CacheFormat
from flexengine.codec.packed import ALIKE
from flexengine.errors import InvalidInput
from tests.helpers.groupwise import slack


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class TestForm:
    """Sizes, and which bits lie where."""

    @pytest.mark.parametrize("dim", [64, 128])
    def test_four_bits_are_5_of_16(self, dim: int) -> None:
        """As every 32 codes bring a scale and a minimum of 16 bits."""
        form = CacheFormat(4, 3, 32, dim)
        assert form.page_bytes == 32 * 5 / 16 * (2 * 3 * dim * 2)

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize(("dim", "group"), [(8, 8), (16, 16), (20 * 4, 16), (96, 32), (64, 64), (192, 64)])
    def test_groups(self, bits: int, dim: int, group: int) -> None:
        form, group = CacheFormat(bits, 1, 16, dim), min(group, 32) if bits == 4 else group
        assert form.group == group
        assert form.page_bytes == 16 * 2 * (dim * bits // 8 + 4 * dim // group)
        assert sum(len(part.starts) for part in form.parts) == 1 + 2 * dim // group

    @pytest.mark.parametrize(("bits", "dim"), [(3, 64), (4, 60), (4, 0), (16, 64)])
    def test_what_is_refused(self, bits: int, dim: int) -> None:
        with pytest.raises(InvalidInput, match=f"{bits} bits"):
            CacheFormat(bits, 2, 16, dim)

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("dim", [8, 80, 128])
    def test_every_bit_is_where_the_form_says(self, bits: int, dim: int) -> None:
        form, x = CacheFormat(bits, 1, 16, dim), torch.randn(3, dim)
        codes, scale, minimum = form.encode(x)
        stride = form.group * bits // 8
        for row in range(3):
            values = []
            for d in range(dim):
                group, place = divmod(d, form.group)
                byte = int(codes[row, group * stride + place % stride])
                code = byte >> (place // stride * bits) & (2**bits - 1)
                values.append(float(minimum[row, group]) + code * float(scale[row, group]))
            torch.testing.assert_close(form.dequantize(codes, scale, minimum)[row], torch.tensor(values))

    @pytest.mark.parametrize("bits", BITS)
    def test_errors(self, bits: int) -> None:
        """8 bits: half a step. Fewer: the least squared error of the ranges tried, each by itself in float64."""
        form, x = CacheFormat(bits, 1, 16, 64), torch.randn(200, 64).exp()
        off = (form.dequantize(*form.encode(x)) - x).double()
        if bits == 8:
            assert bool((off.abs() <= slack(form.codec, x)).all())
            return
        errors, groups = [], x.unflatten(1, (-1, form.group)).double()
        for share in ALIKE:
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            cut = (1 - share) / 2 * (high - low)
            minimum = (low + cut).half().double()
            step = ((high - cut - minimum) / (2**bits - 1)).half().double()
            codes = ((groups - minimum) / step).round().clamp(0, 2**bits - 1)
            errors.append(((minimum + codes * step - groups) ** 2).sum(-1))
        least = torch.stack(errors).amin(0)
        torch.testing.assert_close((off.view_as(groups) ** 2).sum(-1), least, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 7e4])
    def test_a_group_that_cannot_be_held_is_not_a_number(self, bad: float) -> None:
        form, x = CacheFormat(4, 1, 16, 128), torch.randn(2, 128)
        x[1, 70] = bad
        found = form.dequantize(*form.encode(x))
        assert bool(found[1, 64:96].isnan().all())
        assert not found[0].isnan().any()
        assert not found[1, :64].isnan().any()
        assert not found[1, 96:].isnan().any()
