"""Products with dense matrices, and sums of their rows, against float64."""

from typing import Literal

import pytest
import torch

from flexengine.kernels import Kernels


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (20, 256), (43, 576), (100, 270), (7, 3), (60, 1300)])
def test_linear(kernel: Kernels, n: int, k: int, dtype: torch.dtype) -> None:
    """Row tails, column tails, more than one span, odd k, few rows and many."""
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    x = torch.randn(k + 5, 201).T[:, :k]  # strides that no kernel likes
    for rows in (*range(1, 23), 80, 201):
        found = kernel.linear(x[:rows], weight, bias if rows % 2 else None)
        expected = x[:rows].double() @ weight.double().T + (bias.double() if rows % 2 else 0)
        torch.testing.assert_close(found.double(), expected, atol=3e-5 * k**0.5, rtol=1e-5)
    assert kernel.linear(x.reshape(3, 67, k), weight).shape == (3, 67, n)
    across = torch.randn(k, n).to(dtype).T
    torch.testing.assert_close(kernel.linear(x, across, bias).double(), x.double() @ across.double().T + bias.double(),
                               atol=3e-5 * k**0.5, rtol=1e-5)  # fmt: skip
    apart = torch.randn(n, k + 9).to(dtype)[:, 4 : 4 + k]
    torch.testing.assert_close(kernel.linear(x, apart).double(), x.double() @ apart.double().T,
                               atol=3e-5 * k**0.5, rtol=1e-5)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "width"), [(1, 16), (20, 256), (43, 570), (600, 72), (7, 3), (1100, 20)])
def test_add_weighted(kernel: Kernels, n: int, width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(n, width + 9).to(dtype)[:, 5 : 5 + width]
    a, start = torch.randn(n + 5, 201).T[:, :n], torch.randn(201, width)
    whole = start.clone()
    kernel.add_weighted(whole, a, rows)
    torch.testing.assert_close(whole.double(), start.double() + a.double() @ rows.double(),
                               atol=3e-5 * n**0.5, rtol=1e-5)  # fmt: skip
    for low, high in ((0, 1), (3, 5), (10, 26), (100, 201)):
        out = start[low:high].clone()
        kernel.add_weighted(out, a[low:high], rows)
        assert torch.equal(out, whole[low:high])


@pytest.mark.parametrize("compute", [None, "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(64, 16), (128, 576), (165, 1030), (300, 7), (9, 32)])
def test_a_packed_weight_gives_the_same_bits(
    kernel: Kernels, n: int, k: int, dtype: torch.dtype, compute: Literal["bf16"] | None
) -> None:
    """Rows that fill no panel, several spans, few rows and many. An odd number of 16 bits has no whole units."""
    weight, x, bias = torch.randn(n, k).to(dtype), torch.randn(300, k), torch.randn(n)
    reordered = weight.clone()
    done = kernel.pack(reordered, threads=2)
    assert done is (kernel.name == "native" and n >= kernel._panel and k * dtype.itemsize % 4 == 0)  # type: ignore[attr-defined]
    assert torch.equal(reordered, weight) is not done
    for rows in (0, 1, 2, 5, 6, 7, 13, 64, 300):
        expected = kernel.linear(x[:rows], weight, bias, compute)
        assert torch.equal(kernel.linear(x[:rows], reordered, bias, compute, packed=done), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (53, 800), (200, 1030), (7, 3), (64, 512)])
def test_linear_of_a_row_does_not_depend_on_the_rest(kernel: Kernels, n: int, k: int, dtype: torch.dtype) -> None:
    weight, x, bias = torch.randn(n, k).to(dtype), torch.randn(513, k), torch.randn(n)
    whole, threads = kernel.linear(x, weight, bias), torch.get_num_threads()
    try:
        for torch_threads in (1, threads):
            torch.set_num_threads(torch_threads)
            for rows in (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 100, 160, 161, 257, 512, 513):
                low = int(torch.randint(514 - rows, ()))
                found = kernel.linear(x[low : low + rows], weight, bias)
                assert torch.equal(found, whole[low : low + rows]), (rows, low)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_widens_every_number_exactly(kernel: Kernels, dtype: torch.dtype, rows: int) -> None:
    """A weight of one number per row and zeros; infinities stay, NaN stays NaN."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weight = torch.zeros(2**16, 35, dtype=dtype)
    weight[torch.arange(2**16), torch.arange(2**16) % 35] = numbers
    expected = numbers.float().expand(rows, -1)
    found = kernel.linear(torch.ones(rows, 35), weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_linear_in_runs_of_outputs(kernel: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.kernels.reference.WIDENED", 4 * 20 * 7)
    x, weight, bias = torch.randn(2, 3, 20), torch.randn(45, 20).half(), torch.randn(45)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(kernel.linear(x, weight, bias).double(), expected, atol=1e-5, rtol=1e-5)
