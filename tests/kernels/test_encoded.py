"""Matrices as products read them, and every product with them: right, and by row whatever rows share the batch."""

import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexengine.codec.packed import Groupwise, Packed
from flexengine.errors import InvalidInput
from flexengine.kernels import Kernels, load
from flexengine.kernels.base import Compute
from flexengine.kernels.reference import ReferenceKernels
from tests.helpers.builds import ONE_BUILD
from tests.helpers.groupwise import twice

BITS, GROUPS = (2, 3, 4, 8), (32, 64, 128)
SHAPES = [(37, 200), (16, 32), (1, 33), (100, 576)]
# Each pair of bits and group, of bits and shape, and of group and shape.
CASES = [(bits, group, SHAPES[0]) for bits in BITS for group in GROUPS]
CASES += [
    (bits, GROUPS[(i + j) % len(GROUPS)], shape) for i, bits in enumerate(BITS) for j, shape in enumerate(SHAPES[1:])
]
COMPUTES: tuple[Compute | None, ...] = (None, "bf16", "int8")
COUNTS = (0, 1, 2, 3, 5, 8, 17, 70)


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def packed(bits: int, group: int, rows: int, columns: int) -> Packed:
    return Packed(Groupwise("test", bits, group), rows, columns)


def encoded(bits: int, group: int, rows: int, columns: int) -> tuple[Packed, Tensor]:
    form = packed(bits, group, rows, columns)
    return form, form.encode(torch.randn(rows, columns) + 0.3)


def by_group(x: Tensor, group: int) -> list[Tensor]:
    return list(x.split(group, 1))


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes int64 [M, columns] and the fp32 scale of each, [M, columns]."""
    codes, scales = [], []
    for part in by_group(x, group):
        scale = part.abs().amax(1, keepdim=True) / 127
        code = (part / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
        codes.append(torch.where(scale > 0, code, 0.0).long())
        scales.append(scale.expand(part.shape))
    return torch.cat(codes, 1), torch.cat(scales, 1)


def integers(x: Tensor, weight: Tensor, form: Packed) -> tuple[Tensor, Tensor]:
    """The formula of `product` by int8, in float64 around sums of integers; and the sum of its terms' sizes."""
    codes, *halves = form.codec.encode(weight)
    raw = codes.flatten(1)[:, : form.columns].long()
    q, scale = rounded(x, form.codec.group)
    total = torch.zeros(len(x), form.rows, dtype=torch.float64)
    size = torch.zeros_like(total)
    for g, (left, right) in enumerate(zip(by_group(q, form.codec.group), by_group(raw, form.codec.group), strict=True)):
        worth = scale[:, g * form.codec.group].double()[:, None]
        ws, least = (half[:, g].double()[None] for half in halves)
        dots, sums = (left @ right.T).double(), left.sum(1, keepdim=True).double()
        total += worth * (ws * dots + least * sums)
        size += worth * (ws * dots.abs() + least.abs() * left.abs().sum(1, keepdim=True))
    return total, size


class TestPacked:
    """The layout itself."""

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("group", GROUPS)
    def test_size(self, bits: int, group: int) -> None:
        assert packed(bits, group, 16, group).nbytes == 16 * (group * bits // 8 + 4)
        assert packed(bits, group, 17, group + 1).nbytes == 4 * packed(bits, group, 16, group).nbytes

    def test_share_of_fp16(self) -> None:
        assert packed(4, 64, 4096, 1024).nbytes == 0.28125 * 2 * 4096 * 1024

    @pytest.mark.parametrize(("bits", "group", "shape"), CASES)
    def test_is_the_codec_in_another_order(self, bits: int, group: int, shape: tuple[int, int]) -> None:
        form, x = packed(bits, group, *shape), torch.randn(shape)
        data, expected = form.encode(x), twice(form.codec, x)
        assert data.dtype == torch.uint8
        assert data.shape == (form.nbytes,)
        assert torch.equal(form.dequantize(data), expected)
        ids = torch.randint(shape[0], (9,))
        assert torch.equal(form.dequantize_rows(data, ids), expected[ids])

    def test_importance_is_passed_on(self) -> None:
        form = Packed(Groupwise("test", 2, 32, fitted=True), 20, 70)
        x, matters = torch.randn(20, 70), torch.rand(70)
        expected = twice(form.codec, x, matters)
        assert torch.equal(form.dequantize(form.encode(x, matters)), expected)

    @pytest.mark.parametrize("bits", BITS)
    def test_where_a_code_lies(self, bits: int) -> None:
        """By hand: one row of two blocks, whose codes are known, bit for bit as the table at the head says."""
        form = packed(bits, 32, 20, 64)
        x = torch.zeros(20, 64)
        codes = torch.randint(2**bits, (64,))
        codes[0], codes[1], codes[32], codes[33] = 0, 2**bits - 1, 0, 2**bits - 1  # so a step is 1
        row = 18
        x[row] = codes.float()
        block = form.encode(x).view(2, 2, -1)[row // 16]
        for column in range(64):
            data, d = block[column // 32], column % 32
            quad, byte = d // 4, 4 * (row % 16) + d % 4
            found, low, at = 0, 0, 64
            for width in {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}[bits]:
                each = 8 // width
                vector = data[at + quad // each * 64 + byte]
                found |= (int(vector) >> quad % each * width & (2**width - 1)) << low
                at, low = at + 16 * 32 * width // 8, low + width
            assert found == codes[column], column


class TestRows:
    """Rows of an encoded matrix, by every set of kernels."""

    @pytest.mark.parametrize(("bits", "group", "shape"), CASES)
    def test_are_those_of_the_whole_matrix(
        self, kernel: Kernels, bits: int, group: int, shape: tuple[int, int]
    ) -> None:
        form, x = packed(bits, group, *shape), torch.randn(shape) + 0.3
        expected = twice(form.codec, x)
        for count in (0, 1, 9, 600):
            ids = torch.randint(shape[0], (count,))
            found = kernel.encoded_rows(form.encode(x), form, ids)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected[ids])

    def test_misfits_are_refused(self) -> None:
        form, data = encoded(4, 64, 37, 200)
        kernel = load()
        for ids, weight, message in (
            (torch.tensor([0, 37]), data, "rows 0 to 37 of a weight with 37 rows"),
            (torch.tensor([-1]), data, "rows -1 to -1"),
            (torch.tensor([1]).int(), data, r"and int64 \[n\]"),
            (torch.tensor([1]), data[1:], r"must be uint8 \[6912\] contiguous"),
        ):
            with pytest.raises(InvalidInput, match=message):
                kernel.encoded_rows(weight, form, ids)


class TestProduct:
    """Tests that every implementation must pass."""

    @pytest.mark.parametrize(("bits", "group", "shape"), CASES)
    def test_fp32(self, kernel: Kernels, bits: int, group: int, shape: tuple[int, int]) -> None:
        form, data = encoded(bits, group, *shape)
        decoded, bias = form.dequantize(data).double(), torch.randn(shape[0])
        for count in COUNTS:
            x = torch.randn(count, shape[1])
            found = kernel.product(x, data, form, bias if count % 2 else None)
            expected = x.double() @ decoded.T + (bias.double() if count % 2 else 0)
            bound = (x.abs().double() @ decoded.abs().T + bias.abs()) * (shape[1] + 1) * 2.0**-24
            assert found.dtype == torch.float32
            assert found.shape == (count, shape[0])
            assert ((found - expected).abs() <= bound).all(), count

    @pytest.mark.parametrize(("bits", "group", "shape"), CASES)
    def test_int8(self, kernel: Kernels, bits: int, group: int, shape: tuple[int, int]) -> None:
        form, weight = packed(bits, group, *shape), torch.randn(shape) + 0.3
        data, bias = form.encode(weight), torch.randn(shape[0])
        for count in COUNTS[1:]:
            x = torch.randn(count, shape[1])
            expected, size = integers(x, weight, form)
            if count % 2:
                expected += bias
            found = kernel.product(x, data, form, bias if count % 2 else None, compute="int8")
            # Native kernels round a few times per group; plain torch multiplies in fp32, once per column.
            terms = 4 * form.blocks[1] + 4 if kernel.name == "native" else shape[1] + 4
            bound = (size + bias.abs() + expected.abs()) * terms * 2.0**-24
            assert ((found - expected).abs() <= bound).all(), count
        assert kernel.product(torch.zeros(0, shape[1]), data, form, bias, compute="int8").shape == (0, shape[0])

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("shape", [*SHAPES, (70, 2), (130, 1030)])
    def test_bf16(self, kernel: Kernels, bits: int, shape: tuple[int, int]) -> None:
        """x is rounded to bf16, and the weight as well or not at all; what is summed is right to fp32's last bits."""
        form, data = encoded(bits, 64, *shape)
        decoded, bias = form.dequantize(data), torch.randn(shape[0])
        rounds = getattr(kernel, "bf16", False)
        weight = (decoded.bfloat16() if rounds else decoded).double()
        for count in (*COUNTS, 130):
            x = torch.randn(count, shape[1])
            found = kernel.product(x, data, form, bias if count % 2 else None, "bf16")
            expected = x.bfloat16().double() @ weight.T + (bias.double() if count % 2 else 0)
            bound = (x.abs().double() @ weight.abs().T * 1.01 + bias.abs()) * (shape[1] + 1) * 2.0**-24
            assert found.dtype == torch.float32
            assert ((found - expected).abs() <= bound).all(), count

    @pytest.mark.parametrize("bits", BITS)
    def test_the_largest_codes(self, kernel: Kernels, bits: int) -> None:
        """Sums of integers at their largest leave no 16 bits on the way."""
        form, weight = packed(bits, 128, 40, 256), torch.zeros(40, 256)
        weight[:, ::2] = 2.0**bits - 1  # steps of 1
        weight[20:] = 2.0**bits - 1
        weight[20:, 5::128] = 0
        signs = torch.tensor([1.0, -1.0, 1.0])[:, None] * torch.ones(3, 256)
        signs[2, 1::2] = -1
        expected = 127 * signs.double() @ weight.double().T
        found = kernel.product(127 * signs, form.encode(weight), form, compute="int8")
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("compute", COMPUTES)
    @pytest.mark.parametrize(("bits", "group", "shape"), [
        (2, 64, (1, 33)), (3, 32, (53, 800)), (4, 64, (200, 1030)), (4, 32, (64, 512)), (8, 128, (75, 1030)),
    ])  # fmt: skip
    def test_of_a_row_does_not_depend_on_the_rest(
        self, kernel: Kernels, bits: int, group: int, shape: tuple[int, int], compute: Compute | None
    ) -> None:
        if kernel.name == "cuda":
            pytest.skip("on a GPU what computes is chosen by the number of rows")
        form, data = encoded(bits, group, *shape)
        x, bias = torch.randn(530, shape[1]), torch.randn(shape[0])
        torch.set_num_threads(1)
        whole = kernel.product(x, data, form, bias, compute)
        plans = [(1, (1, 2, 3, 5, 6, 7, 16, 33, 100, 513, 530)), (2, (1, 9, 530))]
        if kernel.name == "reference":
            plans = [(1, (1, 5, 100))]  # all the rest is linear_fp32's, which tests of its own cover
        for threads, counts in plans:
            torch.set_num_threads(threads)
            for rows in counts:
                low = int(torch.randint(531 - rows, ()))
                found = kernel.product(x[low : low + rows], data, form, bias, compute)
                assert torch.equal(found, whole[low : low + rows]), (threads, rows, low)
        torch.set_num_threads(1)
        order, loud = torch.randperm(530), x.clone()
        loud[1:] *= 1e30
        assert torch.equal(kernel.product(x[order], data, form, bias, compute), whole[order])
        assert torch.equal(kernel.product(loud, data, form, bias, compute)[0], whole[0])

    @pytest.mark.parametrize("compute", COMPUTES)
    def test_shapes_and_strides(self, kernel: Kernels, compute: Compute | None) -> None:
        form, data = encoded(4, 32, 37, 70)
        for shape in ((70,), (1, 70), (2, 3, 70), (2, 1, 4, 70), (0, 70), (2, 0, 70)):
            x = torch.randn(shape)
            one = kernel.product(x.reshape(-1, 70), data, form, None, compute)
            found = kernel.product(x, data, form, None, compute)
            assert found.shape == (*shape[:-1], 37)
            assert torch.equal(found.reshape(-1, 37), one)
        wide = torch.randn(9, 100)
        for x in (wide[:, 3:73], wide[::2, :70], torch.randn(70, 9).T, torch.randn(4, 3, 70).transpose(0, 1)):
            assert torch.equal(
                kernel.product(x, data, form, None, compute), kernel.product(x.contiguous(), data, form, None, compute)
            )

    @pytest.mark.parametrize("compute", COMPUTES)
    @pytest.mark.parametrize("bits", BITS)
    def test_data_may_begin_anywhere(self, kernel: Kernels, bits: int, compute: Compute | None) -> None:
        form, data = encoded(bits, 64, 50, 130)
        x = torch.randn(20, 130)
        moved = torch.zeros(form.nbytes + 6, dtype=torch.uint8)[6:]
        moved.copy_(data)
        assert torch.equal(kernel.product(x, moved, form, None, compute), kernel.product(x, data, form, None, compute))

    def test_zeros(self, kernel: Kernels) -> None:
        form, data = encoded(3, 32, 20, 100)
        x, bias = torch.randn(5, 100), torch.randn(20)
        x[2], x[3, 32:64] = 0, 0
        for compute in COMPUTES:
            found = kernel.product(x, data, form, bias, compute)
            assert torch.equal(found[2], bias)
            assert found.isfinite().all()

    @pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 1e35])
    def test_tiny_and_huge(self, kernel: Kernels, size: float) -> None:
        form, weight = packed(4, 64, 20, 130), torch.randn(20, 130)
        data, x = form.encode(weight), torch.randn(7, 130) * size
        exact = x.double() @ form.dequantize(data).double().T
        slack = x.abs().double() @ form.dequantize(data).abs().double().T
        lost = 130 * 2.0**-126  # where numbers have fewer than 24 bits, or are taken for zero
        assert ((kernel.product(x, data, form) - exact).abs() <= slack * 1e-5 + lost).all()
        integer, around = integers(x, weight, form)
        found = kernel.product(x, data, form, compute="int8").double()
        assert ((found - integer).abs() <= around * 2e-5 + lost).all()

    @pytest.mark.parametrize("compute", COMPUTES)
    def test_nothing_overflows_before_the_result_does(self, kernel: Kernels, compute: Compute | None) -> None:
        form = packed(4, 128, 20, 100)
        data = form.encode(torch.full((20, 100), 2.0**-10))
        size = 1.75 * 2.0**127  # in bf16, too
        found = kernel.product(torch.full((3, 100), size), data, form, compute=compute)
        torch.testing.assert_close(found, torch.full((3, 20), size / 1024 * 100))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("rows", [1, 5, 40])
    def test_what_is_not_finite_stays_in_its_row(self, kernel: Kernels, value: float, rows: int) -> None:
        form, data = encoded(4, 64, 40, 200)
        x, bias = torch.randn(rows, 200), torch.randn(40)
        for compute in COMPUTES:
            expected = kernel.product(x, data, form, bias, compute)
            for row, column in ((0, 0), (rows // 2, 77), (rows - 1, 199)):
                bad = x.clone()
                bad[row, column] = value
                found = kernel.product(bad, data, form, bias, compute)
                assert not found[row].isfinite().any()
                assert found[row].isnan().all() or compute != "int8"
                others = torch.arange(rows) != row
                assert torch.equal(found[others], expected[others])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("bits", BITS)
    def test_16_bits(self, kernel: Kernels, bits: int, dtype: torch.dtype) -> None:
        """16-bit dtypes of x, of dequantized weights, and of the result."""
        form, data = encoded(bits, 32, 37, 70)
        x, bias = torch.randn(90, 70).to(dtype), torch.randn(37)
        if not kernel.narrow:
            with pytest.raises(InvalidInput, match=str(dtype)):
                kernel.product(x, data, form)
            return
        decoded, rounding = form.dequantize(data), torch.finfo(dtype).eps
        fused = os.environ.get("TRITON_INTERPRET") == "1"  # plain torch does not round what it decodes
        if fused and dtype == torch.bfloat16:  # Triton's interpreter cuts off what a GPU rounds
            decoded = (decoded.view(torch.int32) & -(2**16)).view(torch.float32)
        decoded = decoded.to(dtype).double() if fused else decoded.double()
        slack = (x.abs().double() @ decoded.abs().T + bias.abs()) * 72 * 2.0**-24
        for count in (1, 20, 65) if fused else (20,):
            found, exact = kernel.product(x[:count], data, form), x[:count].double() @ decoded.T
            assert found.dtype == dtype
            if count <= 64:  # a CPU's own product of 16 bits, in place of cuBLAS's, need not sum in fp32
                assert ((found - exact).abs() <= rounding / 2 * exact.abs() + slack[:count]).all()
            torch.testing.assert_close(found.double(), exact, rtol=2 * rounding, atol=16 * rounding)
            biased = kernel.product(x[:count], data, form, bias).double()
            torch.testing.assert_close(biased, exact + bias, rtol=2 * rounding, atol=16 * rounding)
            integers = kernel.product(x[:count], data, form, bias, compute="int8")
            expected = ReferenceKernels().product(x[:count].float(), data, form, bias, compute="int8")
            torch.testing.assert_close(integers, expected.to(dtype), rtol=2 * rounding, atol=1e-4)

    def test_in_runs_of_outputs(self, kernel: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        form, data = encoded(4, 32, 70, 20)
        x, bias = torch.randn(2, 3, 20), torch.randn(70)
        expected = kernel.product(x, data, form, bias)
        monkeypatch.setattr("flexengine.kernels.reference.WIDENED", 4 * 20 * 33)
        torch.testing.assert_close(kernel.product(x, data, form, bias), expected)

    @pytest.mark.parametrize(("call", "named"), [
        (lambda x, w, f, k: k.product(x, w[:-1], f), "575"),
        (lambda x, w, f, k: k.product(x, w.view(2, -1), f), "288"),
        (lambda x, w, f, k: k.product(x, w.view(torch.int8), f), "int8"),
        (lambda x, w, f, k: k.product(x, torch.zeros(2 * len(w), dtype=torch.uint8)[::2], f), "contiguous"),
        (lambda x, w, f, k: k.product(x.double(), w, f), "float64"),
        (lambda x, w, f, k: k.product(x[:, :-1], w, f), "63"),
        (lambda x, w, f, k: k.product(x[0, 0], w, f), "64"),
        (lambda x, w, f, k: k.product(x, w, f, torch.zeros(15)), "15"),
        (lambda x, w, f, k: k.product(x, w, f, torch.zeros(16).double()), "float64"),
        (lambda x, w, f, k: k.product(x, w, f, torch.zeros(16, 1), True), "16, 1"),
    ])  # fmt: skip
    @ONE_BUILD
    def test_misfits_are_refused(
        self, kernel: Kernels, call: Callable[[Tensor, Tensor, Packed, Kernels], Tensor], named: str
    ) -> None:
        form, data = encoded(4, 64, 16, 64)
        with pytest.raises(InvalidInput, match=named) as caught:
            call(torch.zeros(3, 64), data, form, kernel)
        assert str(form.nbytes) in str(caught.value)
