"""Every codec passes the same class: errors within the formula's, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.codec.packed import BITS, CODECS, GROUPS, Groupwise, Packed, pack, unpack
from flexengine.errors import InvalidInput
from tests.helpers.groupwise import slack, twice

SHAPES = [(1, 1), (3, 64), (64, 3), (7, 130), (129, 65), (32, 256)]
PLAIN = [Groupwise(f"{bits} by {group}", bits, group) for bits in BITS for group in GROUPS]
FITTED = [codec for codec in CODECS.values() if codec.fitted]


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a matrix whose rows and columns have different magnitudes, some far from 0."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=rng) * torch.rand(rows, 1, generator=rng).exp()
    return x + 3 * (torch.rand(1, columns, generator=rng) > 0.8)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packing(bits: int) -> None:
    """Codes come back, and lie in as many bytes as their bits fill, the first one lowest."""
    codes = torch.randint(0, 2**bits, (5, 64, 3), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack(codes, bits)
    assert (packed.shape, packed.dtype) == ((5, 64 * bits // 8, 3), torch.uint8)
    assert torch.equal(unpack(packed, bits), codes)
    assert int(packed[0, 0, 0]) == sum(int(c) << (bits * i) for i, c in enumerate(codes[0, : 8 // bits, 0].tolist()))


@pytest.mark.parametrize("codec", [*PLAIN, *FITTED], ids=lambda c: c.name)
class TestCodec:
    """Tests that every codec must pass."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_sizes(self, codec: Groupwise, shape: tuple[int, int]) -> None:
        codes, scale, minimum = codec.encode(random_matrix(*shape))
        groups = -(-shape[1] // codec.group)
        assert (codes.shape, codes.dtype) == ((shape[0], groups, codec.group), torch.uint8)
        assert int(codes.max()) < 2**codec.bits
        assert [(x.shape, x.dtype) for x in (scale, minimum)] == 2 * [((shape[0], groups), torch.float16)]

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
    def test_errors_are_bounded(self, codec: Groupwise, shape: tuple[int, int], scale: float) -> None:
        x = scale * random_matrix(*shape)
        found = twice(codec, x)
        assert found.dtype == torch.float32
        if codec not in FITTED:  # which clip
            assert bool(((found - x).abs() <= slack(codec, x)).all())

    def test_what_lies_on_the_grid_comes_back(self, codec: Groupwise) -> None:
        """Equal numbers, zeros among them, are exact where 16 bits hold them."""
        for value in (0.0, 1.0, -2.5):
            x = torch.full((3, 70), value)
            assert torch.allclose(twice(codec, x), x, rtol=1e-6)

    def test_it_is_deterministic_and_row_by_row(self, codec: Groupwise) -> None:
        x = random_matrix(64, 192)
        first, again, some = codec.encode(x), codec.encode(x.clone()), codec.encode(x[10:20])
        assert all(map(torch.equal, first, again))
        assert all(torch.equal(a, b[10:20]) for a, b in zip(some, first, strict=True))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_is_no_number_is_refused(self, codec: Groupwise, bad: float) -> None:
        x = random_matrix(4, 64)
        x[2, 5] = bad
        with pytest.raises(InvalidInput, match=codec.name):
            codec.encode(x)

    def test_sixteen_bit_input(self, codec: Groupwise) -> None:
        x = random_matrix(5, 64).bfloat16()
        assert all(map(torch.equal, codec.encode(x), codec.encode(x.float())))


def test_four_bits_are_nine_thirtyseconds_of_sixteen() -> None:
    assert Packed(CODECS["int4"], 4096, 11008).nbytes == 4096 * 11008 * 2 * 0.28125


def test_more_bits_and_smaller_groups_err_less() -> None:
    x = random_matrix(64, 512)

    def error(bits: int, group: int, **more: Any) -> float:
        return float(((twice(Groupwise("x", bits, group, **more), x) - x) ** 2).mean())

    assert error(2, 64) > 3 * error(3, 64) > 9 * error(4, 64) > 100 * error(8, 64)
    assert error(4, 128) > error(4, 64) > error(4, 32)
    assert error(4, 64, fitted=True) < 0.95 * error(4, 64)


def test_importance_moves_the_error_to_where_it_matters_less() -> None:
    codec, x = Groupwise("x", 3, 64, fitted=True), random_matrix(64, 512)
    importance = torch.ones(512)
    importance[::4] = 100.0

    def error(matters: Tensor | None) -> float:
        return float(((twice(codec, x, matters) - x) ** 2)[:, ::4].mean())

    assert error(importance) < 0.9 * error(None)


def test_numbers_beyond_sixteen_bits_are_refused() -> None:
    with pytest.raises(InvalidInput, match="beyond 65504"):
        CODECS["int4"].encode(torch.full((2, 64), 1e5))


@pytest.mark.parametrize(("bits", "group"), [(5, 64), (4, 48)])
def test_other_bits_and_groups_are_refused(bits: int, group: int) -> None:
    with pytest.raises(InvalidInput, match="bits must be one of"):
        Groupwise("odd", bits, group)
