"""Products with records of neurons, and sums of them, against float64 products with what the records decode to."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flexengine.codec.records import CODED, PLAIN, RecordForm
from flexengine.errors import InvalidInput
from flexengine.kernels import Kernels
from flexengine.kernels.cpu import NativeKernels
from tests.helpers.builds import ONE_BUILD

KINDS = (*PLAIN, *CODED)
ROOM = 211  # records in memory


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def recorded(kind: str, width: int, room: int = ROOM, gated: bool = True) -> tuple[RecordForm, Tensor]:
    form = RecordForm(kind, width, gated)
    return form, form.encode(*torch.randn(form.vectors, room, width))


def sparse(rows: int, n: int, zeros: float = 0.5) -> Tensor:
    return torch.randn(rows, n).masked_fill(torch.rand(rows, n) < zeros, 0.0)


def close(found: Tensor, first: Tensor, second: Tensor, bias: Tensor | float = 0.0) -> None:
    """Assert that a result is first @ second + bias, but for rounding of fp32 sums and of the result's dtype."""
    first, second = first.double(), second.double()
    exact, size = first @ second + bias, first.abs() @ second.abs() + abs(bias)
    slack = size * (second.shape[0] + 4) * 2.0**-24 + exact.abs() * torch.finfo(found.dtype).eps
    assert found.shape == exact.shape
    assert bool(((found - exact).abs() <= slack).all())


def check(kernel: Kernels, form: RecordForm, records: Tensor, rows: int, places: Tensor) -> None:
    """Compare both kernels with float64 for every vector of the records."""
    x, a, bias = torch.randn(rows, form.width), sparse(rows, len(places)), torch.randn(len(places))
    for index in range(form.vectors):
        v = form.decode(records, index)[places]
        close(kernel.record_products(x, records, places, form, index), x, v.T)
        close(kernel.record_products(x, records, places, form, index, bias), x, v.T, bias)
        close(kernel.record_sum(a, records, places, form, index), a, v)


@pytest.fixture
def one_thread() -> Iterator[Callable[[], None]]:
    """Return a function that limits torch to one thread for the rest of the test."""
    threads = torch.get_num_threads()
    yield lambda: torch.set_num_threads(1)
    torch.set_num_threads(threads)


class TestResults:
    """Numbers, shapes and dtypes."""

    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20])
    @pytest.mark.parametrize("kind", KINDS)
    def test_rows(self, kernel: Kernels, kind: str, rows: int) -> None:
        form, records = recorded(kind, 192)
        check(kernel, form, records, rows, torch.randperm(ROOM)[:77])

    @pytest.mark.parametrize("width", [8, 24, 40, 64, 320, 1088, 2048])
    @pytest.mark.parametrize("kind", KINDS)
    def test_widths(self, kernel: Kernels, kind: str, width: int) -> None:
        form, records = recorded(kind, width, 50, gated=False)
        check(kernel, form, records, 3, torch.randperm(50)[:33])

    @pytest.mark.parametrize("width", [8, 64, 320, 4160])
    @pytest.mark.parametrize("kind", KINDS)
    def test_vectors_are_decoded_exactly(self, kernel: Kernels, kind: str, width: int) -> None:
        form, records = recorded(kind, width, 70)
        for index in range(form.vectors):
            found = kernel.record_vectors(records, form, index)
            assert torch.equal(found.float(), form.decode(records, index))
            assert kind in CODED or found.data_ptr() == records.data_ptr() + index * form.vector_bytes

    @pytest.mark.parametrize("width", [1, 7, 33])
    def test_plain_numbers_of_any_width(self, kernel: Kernels, width: int) -> None:
        for kind in PLAIN:
            form, records = recorded(kind, width, 50)
            check(kernel, form, records, 2, torch.randperm(50)[:21])

    @pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 65, 150])
    @pytest.mark.parametrize("kind", ["bfloat16", "int4"])
    def test_counts(self, kernel: Kernels, kind: str, count: int) -> None:
        form, records = recorded(kind, 256)
        for rows in (1, 3, 8):
            check(kernel, form, records, rows, torch.randperm(ROOM)[:count])

    @pytest.mark.parametrize("kind", KINDS)
    def test_so_many_bytes_that_threads_share_them(self, kernel: Kernels, kind: str) -> None:
        form, records = recorded(kind, 1024, 600)
        for rows in (1, 4, 8):
            check(kernel, form, records, rows, torch.randperm(600)[:590])

    def test_a_place_may_be_used_twice(self, kernel: Kernels) -> None:
        form, records = recorded("float16", 64)
        check(kernel, form, records, 2, torch.tensor([5, 3, 5, 210, 0]))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_factors_of_16_bits(self, kernel: Kernels, kind: str, dtype: torch.dtype) -> None:
        form, records = recorded(kind, 128)
        places = torch.randperm(ROOM)[:40]
        x, a, bias = torch.randn(3, 128).to(dtype), sparse(3, 40).to(dtype), torch.randn(40)
        v = form.decode(records, 1)[places]
        products, total = (kernel.record_products(x, records, places, form, 1, bias),
                           kernel.record_sum(a, records, places, form, 1))  # fmt: skip
        assert (products.dtype, total.dtype) == (dtype, torch.float32)
        if kernel.name == "cuda" and PLAIN.get(kind) == dtype:  # torch's own product on a CPU may round the sum early
            torch.testing.assert_close(products.double(), x.double() @ v.double().T + bias, atol=0.2, rtol=2e-2)
            return
        close(products, x, v.T, bias)
        close(total, a, v)

    def test_strides(self, kernel: Kernels) -> None:
        form, records = recorded("bfloat16", 64)
        places, x, a = torch.randperm(ROOM)[:60:2], torch.randn(64, 3).T, sparse(3, 61)[:, ::2][:, :30]
        bias, v = torch.randn(60)[::2], form.decode(records, 2)[places]
        close(kernel.record_products(x, records, places, form, 2, bias), x, v.T, bias)
        close(kernel.record_sum(a, records, places, form, 2), a, v)

    def test_start(self, kernel: Kernels) -> None:
        form, records = recorded("float16", 128)
        places, a, start = torch.randperm(ROOM)[:40], sparse(3, 40), torch.randn(3, 128)
        v = form.decode(records, 1)[places]
        found = kernel.record_sum(a, records, places, form, 1, start)
        torch.testing.assert_close(found.double(), start.double() + a.double() @ v.double(), atol=1e-4, rtol=1e-4)
        if kernel.name != "cuda" and kernel.name != "reference":  # parts, one after the other, give the same bits
            part = start
            for low in range(0, 40, 13):
                part = kernel.record_sum(a[:, low : low + 13], records, places[low : low + 13], form, 1, part)
            assert torch.equal(part, found)
        with pytest.raises(InvalidInput, match="start"):
            kernel.record_sum(a, records, places, form, 1, start[:2])

    def test_nothing(self, kernel: Kernels) -> None:
        form, records = recorded("float32", 64)
        none, some = torch.zeros(0, dtype=torch.int64), torch.arange(5)
        assert kernel.record_products(torch.ones(2, 64), records, none, form, 0).shape == (2, 0)
        assert kernel.record_products(torch.ones(0, 64), records, some, form, 0).shape == (0, 5)
        assert torch.equal(kernel.record_sum(torch.ones(2, 0), records, none, form, 0), torch.zeros(2, 64))
        assert kernel.record_sum(torch.ones(0, 5), records, some, form, 0).shape == (0, 64)
        assert torch.equal(kernel.record_sum(torch.zeros(2, 5), records, some, form, 0), torch.zeros(2, 64))


class TestIndependence:
    """What a row's result may not depend on. Kernels for a GPU promise none of this."""

    @pytest.fixture(autouse=True)
    def on_cpus(self, kernel: Kernels) -> None:
        if kernel.name == "cuda":
            pytest.skip("kernels for a GPU promise this only within rounding")

    @pytest.mark.parametrize("width", [40, 1088])
    @pytest.mark.parametrize("kind", KINDS)
    def test_products(self, kernel: Kernels, kind: str, width: int, one_thread: Callable[[], None]) -> None:
        """A number is the same alone, in any order of places, with its record elsewhere, and from one thread."""
        form, records = recorded(kind, width, 300, gated=False)
        x, bias, places = torch.randn(9, width), torch.randn(260), torch.randperm(300)[:260]
        whole = kernel.record_products(x, records, places, form, 1, bias)
        order, moved = torch.randperm(260)[:101], torch.randperm(300)
        elsewhere = torch.empty_like(records)
        elsewhere[moved] = records
        one_thread()
        for rows in (slice(3, 4), slice(1, 3), slice(0, 8), slice(2, 9)):
            found = kernel.record_products(x[rows], elsewhere, moved[places[order]], form, 1, bias[order])
            assert torch.equal(found, whole[rows][:, order])
        alone = kernel.record_products(x[4:5], records, places[77:78], form, 1, bias[77:78])
        assert torch.equal(alone, whole[4:5, 77:78])

    @pytest.mark.parametrize("width", [40, 1088])
    @pytest.mark.parametrize("kind", KINDS)
    def test_sums(self, kernel: Kernels, kind: str, width: int, one_thread: Callable[[], None]) -> None:
        """A row is the same alone, without its zeros, with its records elsewhere, and from one thread."""
        form, records = recorded(kind, width, 300, gated=False)
        a, places = sparse(9, 260, zeros=0.7), torch.randperm(300)[:260]
        whole = kernel.record_sum(a, records, places, form, 1)
        moved, elsewhere = torch.randperm(300), torch.empty_like(records)
        elsewhere[moved] = records
        one_thread()
        for rows in (slice(3, 4), slice(1, 3), slice(0, 8), slice(2, 9)):
            some = a[rows].ne(0).any(0)
            assert torch.equal(kernel.record_sum(a[rows], records, places, form, 1), whole[rows])
            found = kernel.record_sum(a[rows][:, some], elsewhere, moved[places[some]], form, 1)
            assert torch.equal(found, whole[rows])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_of_zero_do_not_count(self, kernel: Kernels, kind: str, bad: float) -> None:
        """Also if the vector is not finite; only rows with another weight show it."""
        form = RecordForm(kind, 256)
        vectors = torch.randn(2, 40, 256)
        finite = form.encode(*vectors)
        vectors[1, 7, 100] = bad
        records, places, a = form.encode(*vectors), torch.randperm(40), sparse(5, 40, zeros=0.3)
        at = int((places == 7).nonzero())
        a[:, at] = torch.tensor([0.0, -0.0, 1.0, 0.0, 2.0])
        found, expected = (kernel.record_sum(a, x, places, form, 1) for x in (records, finite))
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
        assert not found[[2, 4], 100].isfinite().any()

    def test_zeros_have_one_sign(self, kernel: Kernels) -> None:
        """An underflow to -0 becomes 0 if zeros follow, so it must if none do."""
        form = RecordForm("float32", 64)
        records, places = form.encode(*torch.full((2, 2, 64), -1e-30)), torch.tensor([0, 1])
        alone = kernel.record_sum(torch.tensor([[1e-30]]), records, places[:1], form, 0)
        beside = kernel.record_sum(torch.tensor([[1e-30, 0.0], [0.0, 1.0]]), records, places, form, 0)[:1]
        assert torch.equal(alone.view(torch.int32), beside.view(torch.int32))

    def test_records_without_weights_are_not_read(self, kernel: Kernels) -> None:
        form, records = recorded("int8", 256, gated=False)
        a = sparse(1, ROOM)
        expected = kernel.record_sum(a, records, torch.arange(ROOM), form, 1)
        records[a[0] == 0] = 255  # scales and minima are NaN
        assert torch.equal(kernel.record_sum(a, records, torch.arange(ROOM), form, 1), expected)


class TestMisfits:
    """What is refused."""

    @pytest.mark.parametrize(("call", "named"), [
        (lambda k, r, f, p: k.record_products(torch.ones(2, 63), r, p, f, 0), "63"),
        (lambda k, r, f, p: k.record_products(torch.ones(64), r, p, f, 0), r"\[64\]"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r[:, :-1], p, f, 0), "511"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r[::2], p, f, 0), "contiguous"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r.view(torch.int8), p, f, 0), "int8"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r, p.int(), f, 0), "int32"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r, p[None], f, 0), r"\[1, 5\]"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r, p, f, 2), "0 to 1, not 2"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r, p, f, 0, torch.ones(4)), r"bias \[4\]"),
        (lambda k, r, f, p: k.record_products(torch.ones(2, 64), r, p, f, 0, torch.ones(5).half()), "float16"),
        (lambda k, r, f, p: k.record_sum(torch.ones(2, 4), r, p, f, 0), r"\[2, 4\]"),
        (lambda k, r, f, p: k.record_sum(torch.ones(2, 5), r, p, f, -1), "not -1"),
    ])  # fmt: skip
    @ONE_BUILD
    def test_misfits_are_refused(
        self, kernel: Kernels, call: Callable[[Kernels, Tensor, RecordForm, Tensor], Tensor], named: str
    ) -> None:
        form, records = recorded("float32", 64, gated=False)
        with pytest.raises(InvalidInput, match=named):
            call(kernel, records, form, torch.arange(5))

    @pytest.mark.parametrize("place", [-1, ROOM])
    @ONE_BUILD
    def test_bad_places(self, kernel: Kernels, place: int) -> None:
        if kernel.name == "cuda":
            pytest.skip("the CUDA kernels trust their places, so as never to wait for the GPU")
        form, records = recorded("float32", 64)
        places = torch.tensor([0, 4, place])
        with pytest.raises(InvalidInput, match=f"place {place} at index 2"):
            kernel.record_products(torch.ones(2, 64), records, places, form, 0)
        with pytest.raises(InvalidInput, match=f"place {place} at index 2"):
            kernel.record_sum(torch.ones(2, 3), records, places, form, 0)

    def test_large_sums_are_cut(self, kernel: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels in torch decode a limited number of records at a time."""
        if isinstance(kernel, NativeKernels):
            pytest.skip("native kernels decode in registers")
        monkeypatch.setattr("flexengine.kernels.reference.WIDENED", 4 * 64 * 10)
        monkeypatch.setattr("flexengine.kernels.cuda.BUFFER", 32 * 64 * 10)
        form, records = recorded("int8", 64)
        check(kernel, form, records, 3, torch.randperm(ROOM)[:77])
