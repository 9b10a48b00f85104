"""The product of every pair of dtypes: right, and for a row the same bits whatever rows share its batch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.errors import InvalidInput
from flexengine.kernels.cpu import NativeKernels
from flexengine.model.linear import FastLinear, Invariance, Product, numerics, use_product

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 160, 161, 257, 513)
SHAPES = [(1, 64), (1, 1000), (5, 17), (9, 1), (2, 4), (31, 2048), (192, 576), (257, 31), (100, 1030)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "reference"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Product]:
    if request.param != "native":
        monkeypatch.setenv("FLEXENGINE_KERNELS", "reference")
    kernels._load.cache_clear()
    yield Product(torch.float32)
    kernels._load.cache_clear()


def operands(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(max(ROWS), k), torch.randn(n, k).to(dtype), torch.randn(n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_depend_on_the_rest(product: Product, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(n, k, dtype)
    torch.set_num_threads(1)
    whole, plain = product(x, weight, bias), product(x, weight)
    for threads, counts in ((1, ROWS), (2, (1, 17, max(ROWS)))):
        torch.set_num_threads(threads)
        for rows in counts:
            for low in {0, (max(ROWS) - rows) // 2, max(ROWS) - rows}:
                part = slice(low, low + rows)
                assert torch.equal(product(x[part], weight, bias), whole[part]), (threads, rows, low)
            assert torch.equal(product(x[part], weight), plain[part]), (threads, rows, low)


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (70, 2), (130, 66)])
def test_products_of_bf16(product: Product, n: int, k: int) -> None:
    """Of rounded activations, right to fp32's last bits; and by row whatever rows there are besides."""
    x, weight, bias = operands(n, k, torch.bfloat16)
    product.compute = "bf16"
    whole, near = product(x, weight, bias), x.bfloat16().double()
    bound = (near.abs() @ weight.abs().double().T + bias.abs().double()) * (k + 1) * 2.0**-24
    assert ((whole.double() - near @ weight.double().T - bias.double()).abs() <= bound).all()
    for threads, counts in ((1, ROWS), (2, (1, 17))):
        torch.set_num_threads(threads)
        for rows in counts:
            part = slice(max(ROWS) - rows, max(ROWS))
            assert torch.equal(product(x[part], weight, bias), whole[part]), (threads, rows)
    strided = torch.randn(k, 7).T
    assert torch.equal(product(strided, weight), product(strided.contiguous(), weight))


def test_only_weights_in_bf16_are_multiplied_in_it(product: Product) -> None:
    x = torch.randn(5, 40)
    for dtype in (torch.float32, torch.float16):
        weight, product.compute = torch.randn(30, 40).to(dtype), None
        exact, product.compute = product(x, weight), "bf16"
        assert torch.equal(product(x, weight), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_among_other_rows_in_another_order(product: Product, dtype: torch.dtype) -> None:
    x, weight, bias = operands(100, 300, dtype)
    order = torch.randperm(max(ROWS))
    assert torch.equal(product(x[order], weight, bias), product(x, weight, bias)[order])
    huge = x.clone()
    huge[1:] *= 1e30
    assert torch.equal(product(huge, weight, bias)[0], product(x, weight, bias)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_is_the_formula(product: Product, n: int, k: int, dtype: torch.dtype) -> None:
    """Within the worst-case bound of sums of k products in fp32, and a tenth of it at larger k."""
    x, weight, bias = operands(n, k, dtype)
    bound = (x.abs().double() @ weight.abs().double().T + bias.abs().double()) * (k + 1) * 2.0**-24
    expected = x.double() @ weight.double().T + bias.double()
    for rows in ROWS[::3]:
        error = (product(x[:rows], weight, bias).double() - expected[:rows]).abs()
        assert (error <= bound[:rows] * (0.1 if k > 100 else 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(product: Product, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 20).to(dtype)
    for shape in ((20,), (1, 20), (1, 1, 20), (2, 3, 20), (0, 20), (2, 0, 20)):
        x = torch.randn(shape)
        torch.testing.assert_close(product(x, weight), x @ weight.float().T)
    strided = torch.randn(20, 7).T
    torch.testing.assert_close(product(strided, weight), strided @ weight.float().T)


def test_a_transposed_fp32_weight(product: Product) -> None:
    x, weight = torch.randn(33, 300), torch.randn(300, 70).t()
    whole = product(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    for rows in (1, 2, 17):
        assert torch.equal(product(x[:rows], weight), whole[:rows])


def test_meta_tensors_and_other_activations(product: Product) -> None:
    x = torch.zeros(2, 8, device="meta")
    assert product(x, torch.zeros(3, 8, dtype=torch.bfloat16, device="meta")).shape == (2, 3)
    x = torch.randn(2, 8).bfloat16()
    weight = torch.randn(3, 8).bfloat16()
    assert torch.equal(Product(torch.bfloat16)(x, weight), nn.functional.linear(x, weight))
    with pytest.raises(NotImplementedError, match="bfloat16"):
        product(x, weight)


def test_linear_layers_take_it_over(product: Product) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20, bias=False))
    x = torch.randn(5, 40)
    expected, names = model(x), list(model.state_dict())
    use_product(model, product)
    assert [type(module) for module in model] == [FastLinear, nn.ReLU, FastLinear]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("left", "right"), [
    ((6, 512, 16), (6, 16, 1)),  # of a Mamba's states
    ((6, 3, 40, 24), (6, 3, 24, 40)),
    ((0, 3, 4), (0, 4, 2)),
])  # fmt: skip
def test_batched_products_do_not_depend_on_other_sequences(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left), torch.randn(right)
    with Invariance(Product(torch.float32)):
        for whole in (a @ b, torch.matmul(a, b), a.matmul(b)):
            assert whole.shape == (*left[:-1], right[-1])
            for low, high in [(0, 1), (2, 3), (1, 4), (3, 6)][: len(a)]:
                assert torch.equal(whole[low:high], a[low:high].clone() @ b[low:high].clone())
    torch.testing.assert_close(whole, torch.matmul(a.double(), b.double()).float())


@pytest.mark.parametrize("heads", [1, 2])
def test_batched_products_with_weights_of_heads(heads: int) -> None:
    """[heads, 1, ...] by [heads, sequences, ...], as in Zamba."""
    weight, x = torch.randn(heads, 1, 40, 64), torch.randn(heads, 6, 64, 1)
    with Invariance(Product(torch.float32)):
        whole = weight @ x
        assert all(torch.equal(whole[:, i : i + 1], weight @ x[:, i : i + 1].clone()) for i in range(6))
    torch.testing.assert_close(whole, (weight.double() @ x.double()).float())


def test_a_weight_times_columns_does_not_depend_on_other_columns(product: Product) -> None:
    """[out, in] by [sequences, in, tokens], as in Mamba 1."""
    weight, x = nn.Parameter(torch.randn(1536, 48), requires_grad=False), torch.randn(9, 48, 1)
    with Invariance(product):
        steps, prompt = weight @ x, weight @ x.transpose(0, 2)
        assert torch.equal(steps, torch.cat([weight @ x[i : i + 1].clone() for i in range(9)]))
        assert torch.equal(steps.transpose(0, 2), prompt)
        for low, end in ((0, 1), (1, 4), (4, 9)):
            assert torch.equal(prompt[:, :, low:end], weight @ x[low:end].transpose(0, 2).clone())
    torch.testing.assert_close(steps.double(), weight.double() @ x.double(), atol=1e-4, rtol=1e-5)


def test_numerics_tell_apart_how_bf16_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels._load.cache_clear()
    found = kernels.load()
    if not isinstance(found, NativeKernels):
        pytest.skip("no native kernels")
    one = numerics()
    monkeypatch.setattr(found, "bf16", not found.bf16)
    assert numerics() != one


def test_numerics_names_what_computes(product: Product) -> None:
    found, native = numerics(), isinstance(kernels.load(), NativeKernels)
    assert kernels.load().name in found
    assert found.startswith("native " if native else f"onednn {torch.backends.cpu.get_cpu_capability()}")


def test_a_torch_without_onednn_is_refused(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL gives a row other bits in other batches, and with other numbers of threads."""
    native = isinstance(kernels.load(), NativeKernels)
    monkeypatch.setattr("flexengine.kernels.onednn.has_onednn", lambda: False)
    kernels._load.cache_clear()
    if native:  # which need no oneDNN
        assert isinstance(kernels.load(), NativeKernels)
        return
    with pytest.raises(InvalidInput, match=r"torch .* without oneDNN.*install g\+\+"):
        kernels.load()
