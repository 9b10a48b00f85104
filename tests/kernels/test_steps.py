"""Several kernels in one call: the same results as in calls of their own, for any number of threads."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flexengine.codec.packed import Groupwise, Packed
from flexengine.errors import InvalidInput
from flexengine.kernels.base import ACTS, Compute
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.paged import PagedTokens, PromptPieces
from flexengine.kernels.steps import PAIRINGS, RecordedSteps, Steps
from flexengine.model.native.describe import RotaryRecord, rotated
from tests.helpers.builds import NATIVE, kernels_named

WIDTH, WIDE = 192, 320


@pytest.fixture(scope="module", params=NATIVE)
def kernel(request: pytest.FixtureRequest) -> NativeKernels:
    return cast(NativeKernels, kernels_named(request.param))


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 7, 64, 600])
@pytest.mark.parametrize(
    ("bits", "dtype", "compute"),
    [(None, torch.float32, None), (None, torch.bfloat16, None), (None, torch.bfloat16, "bf16"),
     (None, torch.float16, None), (4, None, None), (4, None, "bf16"), (4, None, "int8"), (8, None, "int8")],
)  # fmt: skip
def test_a_chain_of_steps(
    kernel: NativeKernels, threads: int, rows: int, bits: int | None, dtype: Any, compute: Compute | None
) -> None:
    """A norm, two products beside each other, a gate, and a product that is added to the norm's input."""
    torch.manual_seed(rows)
    x, scale = torch.randn(rows, WIDTH), torch.randn(WIDTH)
    shapes = ((WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE))
    plain = [torch.randn(shape) / 10 for shape in shapes]
    biases: list[Tensor | None] = [torch.randn(WIDE), None, torch.randn(WIDTH)]
    forms = [Packed(Groupwise("test", bits, 64), *shape) if bits else None for shape in shapes]
    weights = [w.to(dtype) if form is None else form.encode(w) for w, form in zip(plain, forms, strict=True)]

    def alone(x: Tensor, i: int) -> Tensor:
        if (form := forms[i]) is not None:
            return kernel.product(x, weights[i], form, biases[i], compute)
        return kernel.linear(x, weights[i], biases[i], "bf16" if compute == "bf16" else None)

    def added(x: Tensor, i: int, **how: Any) -> Tensor:
        if (form := forms[i]) is not None:
            return steps.product(x, weights[i], form, biases[i], compute, **how)
        return steps.linear(x, weights[i], biases[i], compute, **how)

    normed = kernel.rms_norm(x, scale, 1e-5)
    first, second = alone(normed, 0), alone(normed, 1)
    gated = kernel.gate(first.clone(), second, "silu")
    expected = x + alone(gated, 2)
    steps = kernel.steps()
    a = steps.norm(x, scale, 1e-5)
    b, c = added(a, 0), added(a, 1, beside=True)
    kept = b
    result = added(steps.gate(b, c, "silu"), 2, residual=x)
    steps.run()
    assert torch.equal(a, normed)
    assert torch.equal(c, second)
    assert torch.equal(kept, gated)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 64), (2, 2048), (1, 16385)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_norm(kernel: NativeKernels, threads: int, shape: tuple[int, int], with_bias: bool) -> None:
    """Also of numbers far from 0, and of a view with longer rows."""
    torch.manual_seed(0)
    wide = torch.randn(shape[0], shape[1] + 3) * 3 + torch.tensor([[100.0], [0.0]]).repeat(35, 1)[: shape[0]]
    x, weight, bias = wide[:, 1:-2], torch.randn(shape[1]), torch.randn(shape[1]) if with_bias else None
    steps = kernel.steps()
    ours = steps.norm(x, weight, 1e-5, bias=bias, centred=True)
    steps.run()
    doubles = None if bias is None else bias.double()
    expected = torch.nn.functional.layer_norm(x.double(), shape[1:], weight.double(), doubles, 1e-5)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("count", [1, 15, 17, 1003])
def test_an_activation_without_a_gate(kernel: NativeKernels, threads: int, count: int) -> None:
    x = torch.randn(1, count) * 4
    for act in ACTS:
        steps = kernel.steps()
        ours = steps.gate(x.clone(), None, act)
        steps.run()
        assert torch.equal(ours, kernel.gate(x.clone(), torch.ones_like(x), act))


@pytest.mark.parametrize("count", [1, 16, 33])
def test_gates_of_attention_and_limits(kernel: NativeKernels, threads: int, count: int) -> None:
    """With a number for each element, or for several neighbours; of columns of a larger matrix, too."""
    torch.manual_seed(0)
    wide = torch.randn(70, count + 3) * 9
    x, ones, up = wide[:, 1:-2], torch.randn(70, count), torch.randn(70, 5 * count)
    x[3, 0] = float("nan")
    for act, function in (("sigmoid", torch.sigmoid), ("softplus", torch.nn.functional.softplus)):
        steps = kernel.steps()
        whole = steps.gate(x.clone(), ones, act)
        each = steps.gate(x, up, act, out=steps.new(up.shape))
        steps.run()
        expected = function(x.double())
        torch.testing.assert_close(whole.double(), expected * ones.double(), rtol=2e-6, atol=2e-6, equal_nan=True)
        expected = expected.repeat_interleave(5, 1) * up.double()
        torch.testing.assert_close(each.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    steps, kept = kernel.steps(), x.clone()
    steps.gate(x, None, "clip", 4.0)
    scaled = steps.gate(kept.clone(), None, "scale", 0.7)
    steps.run()
    assert torch.equal(x.nan_to_num(7.0), kept.clamp(-4, 4).nan_to_num(7.0))
    assert torch.equal(scaled.nan_to_num(7.0), (kept * 0.7).nan_to_num(7.0))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotary_positions_of_the_ends_of_heads(kernel: NativeKernels, threads: int, pairing: str) -> None:
    """Of a part that all heads share, written beside another one, with zeros behind."""
    torch.manual_seed(0)
    first, shared, cos, sin = torch.randn(70, 3, 7), torch.randn(70, 8), torch.randn(70, 8), torch.randn(70, 8)
    steps = kernel.steps()
    out = steps.new((70, 3, 20))
    steps.rotate(first, None, None, out=out[..., :7])
    steps.rotate(shared[:, None].expand(-1, 3, -1), cos, sin, True, out[..., 7:], pairing)
    steps.run()
    turned = rotated(RotaryRecord(pairing, "each"), shared[:, None], cos, sin)
    assert turned is not None
    torch.testing.assert_close(out, torch.cat((first, turned.expand(-1, 3, -1), torch.zeros(70, 3, 5)), -1))


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("compute", [None, "bf16", "int8"])
def test_recorded_steps_run_again_with_other_tensors(
    kernel: NativeKernels, threads: int, rows: int, compute: Compute | None
) -> None:
    """The arguments of every run are at other addresses. One of them is a view that begins inside of its memory."""
    form = Packed(Groupwise("test", 4, 64), WIDE, WIDTH)

    def arguments() -> list[Tensor]:
        weight = torch.randn(WIDE, WIDTH).bfloat16()
        return [torch.randn(rows + 2, WIDTH)[1:-1], torch.randn(WIDTH), weight, form.encode(torch.randn(WIDE, WIDTH)),
                torch.randn(WIDE)]  # fmt: skip

    def added(steps: Steps, x: Tensor, scale: Tensor, weight: Tensor, encoded: Tensor, bias: Tensor) -> list[Tensor]:
        normed = steps.norm(x, scale, 1e-5)
        gate = steps.linear(normed, weight, bias, compute)
        up = steps.product(normed, encoded, form, None, compute, beside=True)
        return [steps.gate(gate, up, "silu"), steps.norm(x, scale, 1e-3)]

    first = arguments()
    steps = kernel.steps()
    recorded = RecordedSteps(steps, first, added(steps, *first))
    for given in (first, arguments(), arguments()):
        results = [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in recorded.results]
        block = torch.empty(recorded.nbytes, dtype=torch.uint8)
        recorded.run([x.data_ptr() for x in (*given, *results, block)])
        once = kernel.steps()
        expected = added(once, *given)
        once.run()
        for mine, other in zip(results, expected, strict=True):
            assert torch.equal(mine, other)


def test_steps_with_a_tensor_that_is_not_given_are_not_recorded(kernel: NativeKernels) -> None:
    steps, x = kernel.steps(), torch.randn(3, WIDTH)
    out = steps.norm(x, torch.ones(WIDTH), 1e-5)
    with pytest.raises(RuntimeError, match=r"Norm\.weight has the address of a tensor that is not given"):
        RecordedSteps(steps, [x], [out])


def test_seconds_are_counted_by_kind(kernel: NativeKernels, threads: int) -> None:
    x, weight = torch.randn(256, 1024), torch.randn(1024, 1024)
    before = kernel.spent()
    steps = kernel.steps()
    steps.linear(steps.norm(x, torch.ones(1024), 1e-5), weight)
    steps.run()
    more = {kind: seconds - before[kind] for kind, seconds in kernel.spent().items()}
    assert 0.5e9 < 2 * 256 * 1024 * 1024 / more["linear"] < 1e14  # products per second of any CPU
    assert more["norm"] > 0  # it includes the start of threads
    assert not any(seconds for kind, seconds in more.items() if kind not in ("linear", "norm"))


def test_pages_outside_of_the_pool_are_found_before_a_call(kernel: NativeKernels) -> None:
    pool, one = torch.zeros(4, 2, 1, 8, 16), torch.ones(1, dtype=torch.int32)
    for table, length, page, offset in ((4, 1, 0, 0), (0, 9, 0, 0), (0, 1, 4, 0), (0, 1, 0, 8)):
        with pytest.raises(InvalidInput, match=r"pages among the pool's 4|page must be below 4"):
            kernel.paged(2, pool, PagedTokens(table * one[None], length * one, page * one, offset * one))


def test_prompts_that_do_not_fit_their_pages_are_found_before_a_call(kernel: NativeKernels) -> None:
    pool, none, two = torch.zeros(4, 2, 1, 8, 16), torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for prompt, message in (
        (PromptPieces(0, 1, 2, 3, torch.tensor([4]).int()), "pages among the pool's 4"),
        (PromptPieces(0, 1, 2, 9, torch.tensor([1]).int()), "9 cached tokens do not fit in 1 pages of 8 tokens"),
        (PromptPieces(0, 1, 2, 1, None), "1 cached tokens do not fit in 0 pages"),
        (PromptPieces(0, 2, 1, 1, torch.tensor([1]).int()), "only one prompt after cached tokens"),
        (PromptPieces(1, 1, 2, 0, None), "from token 0 on"),
        (PromptPieces(0, 1, 3, 0, None), "has 3 tokens, but there are 2 pages and 2 offsets"),
    ):
        with pytest.raises(InvalidInput, match=message):
            kernel.paged(2, pool, PagedTokens(none.view(0, 1), none, two, two, [prompt]))


def test_parts_of_rows_share_memory(kernel: NativeKernels) -> None:
    """Every row has the result of a call without parts, and the parts take the memory of the largest."""
    x, scale, weight = torch.randn(11, WIDTH), torch.randn(WIDTH), torch.randn(WIDTH, WIDTH)
    outs, sizes = [], []
    for most in (11, 4):
        steps = kernel.steps()
        out = steps.new(x.shape)
        slices = list[slice]()
        for rows in steps.parts(len(x), most):
            slices.append(rows)
            normed = steps.norm(x[rows], scale, 1e-5)
            steps.linear(normed, weight, compute="bf16", residual=x[rows], out=out[rows])
        sizes.append(RecordedSteps(steps, [x, scale, weight], [out]).nbytes)
        assert [row for rows in slices for row in range(len(x))[rows]] == [*range(len(x))]
        steps.run()
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert len(slices) == 3
    assert sizes[1] < 0.5 * sizes[0]


def test_no_steps(kernel: NativeKernels) -> None:
    kernel.steps().run()


def test_many_steps_run_in_parts(kernel: NativeKernels, threads: int) -> None:
    """More steps than a parallel region has, some of them beside each other where a region ends."""
    steps, x, scale = kernel.steps(), torch.randn(300, WIDTH), torch.randn(WIDTH)
    source, expected, outputs = x, x, list[Tensor]()
    for number in range(100):
        outputs.append(steps.norm(source, scale + number % 5, 1e-5, beside=number % 5 > 0))
        if number % 5 == 4:
            source = outputs[-2]
    steps.run()
    for number in range(100):
        assert torch.equal(outputs[number], kernel.rms_norm(expected, scale + number % 5, 1e-5))
        if number % 5 == 4:
            expected = outputs[number - 1]
