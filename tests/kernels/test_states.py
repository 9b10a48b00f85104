"""Kernels of states: the numbers of transformers' functions, in any pieces and any company."""

import importlib
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexengine.errors import InvalidInput
from flexengine.kernels import states
from flexengine.kernels.cpu import NativeKernels
from tests.helpers.builds import NATIVE, kernels_named

CLOSE = 2e-6  # relative; two forms of one function of transformers differ by up to 7e-7
PIECES = (1, 7, 16, 64, 1000)


@pytest.fixture(scope="module", params=NATIVE)
def native(request: pytest.FixtureRequest) -> Any:
    return kernels_named(request.param)


def functions(kind: str, *names: str) -> list[Any]:
    """Functions of a modeling file, in plain torch."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return [inspect.unwrap(getattr(module, name)) for name in names]


def far(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


class Numbers:
    """Random inputs of one sequence, [tokens, ...] each, and the results of transformers and of kernels."""

    shape: tuple[int, ...]

    def __init__(self, tokens: int) -> None:
        self.rng = torch.Generator().manual_seed(tokens)
        self.given: list[Tensor] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def own(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def kernel(self, kernels: NativeKernels, given: list[Tensor], records: Tensor, pieces: states.Pieces) -> Tensor:
        raise NotImplementedError


class Delta(Numbers):
    def __init__(self, tokens: int, heads: tuple[int, int], dims: tuple[int, int], channels: bool, norm: bool) -> None:
        super().__init__(tokens)
        (key_heads, count), (dk, dv) = heads, dims
        self.shape, self.channels, self.norm = (count, *dims), channels, norm
        decay = -torch.nn.functional.softplus(self.random(tokens, count, *[dk] * channels))
        q, k = (self.random(tokens, key_heads, dk) / (1 if norm else dk**0.5) for _ in range(2))
        self.given = [q, k, self.random(tokens, count, dv), decay, self.random(tokens, count).sigmoid()]

    def own(self) -> tuple[Tensor, Tensor]:
        kind, name = (
            ("kimi_linear", "chunk_kimi_delta_attention")
            if self.channels
            else (
                "qwen3_next",
                "torch_chunk_gated_delta_rule",
            )
        )
        (chunk,) = functions(kind, name)
        q, k, v, g, beta = (x[None] for x in self.given)
        options = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": self.norm}
        out, state = chunk(q, k, v, g=g, beta=beta, **options)
        return out[0], state[0]

    def kernel(self, kernels: NativeKernels, given: list[Tensor], records: Tensor, pieces: states.Pieces) -> Tensor:
        q, k, v, g, beta = given
        return states.delta_rule(kernels, q, k, v, g, beta, records, pieces, self.norm)


class Scan(Numbers):
    def __init__(self, tokens: int, heads: tuple[int, int], dims: tuple[int, int], limits: tuple[float, float]) -> None:
        super().__init__(tokens)
        (groups, count), (dim, size) = heads, dims
        self.shape, self.limits = (count, *dims), limits
        self.a, self.skip, self.bias = -self.random(count).exp(), self.random(count), self.random(count)
        bc = (self.random(tokens, groups, size) for _ in range(2))
        self.given = [self.random(tokens, count, dim), self.random(tokens, count), *bc]

    def own(self) -> tuple[Tensor, Tensor]:
        (chunks,) = functions("mamba2", "mamba2_chunk_scan")
        x, dt, b, c = (each[None] for each in self.given)
        out, state = chunks(
            x,
            dt,
            self.a,
            b,
            c,
            chunk_size=64,
            D=self.skip,
            dt_bias=self.bias,
            dt_softplus=True,
            return_final_states=True,
            dt_limit=self.limits,
        )
        return out[0], state[0]

    def kernel(self, kernels: NativeKernels, given: list[Tensor], records: Tensor, pieces: states.Pieces) -> Tensor:
        x, dt, b, c = given
        return states.scan(kernels, x, dt, self.a, b, c, records, pieces, self.skip, self.bias, True, self.limits)


class Select(Numbers):
    def __init__(self, tokens: int, channels: int, size: int) -> None:
        super().__init__(tokens)
        self.shape, self.a = (channels, size), -self.random(channels, size).exp()
        self.skip, self.bias = self.random(channels), self.random(channels)
        wide, narrow = ([self.random(tokens, n) for _ in range(count)] for n, count in ((channels, 3), (size, 2)))
        self.given = [*wide, *narrow]

    def own(self) -> tuple[Tensor, Tensor]:
        (scan,) = functions("mamba", "mamba_selective_scan")
        x, dt, z, b, c = (each.t()[None] for each in self.given)
        options = {"delta_bias": self.bias, "delta_softplus": True, "return_last_state": True}
        out, state = scan(x, dt, self.a, b, c, D=self.skip, z=z, **options)
        return out[0].t(), state[0]

    def kernel(self, kernels: NativeKernels, given: list[Tensor], records: Tensor, pieces: states.Pieces) -> Tensor:
        x, dt, z, b, c = given
        return states.selective_scan(kernels, x, dt, self.a, b, c, records, pieces, self.skip, self.bias, True, z)


class Convolution(Numbers):
    def __init__(self, tokens: int, channels: int, taps: int, columns: int, silu: bool, bias: bool) -> None:
        super().__init__(tokens)
        self.shape, self.silu = (channels, columns), silu
        self.weight, self.bias = self.random(channels, taps), self.random(channels) if bias else None
        self.given = [self.random(tokens, channels)]

    def own(self) -> tuple[Tensor, Tensor]:
        (fn,) = functions("mamba2", "causal_conv1d_fn")
        x = self.given[0].t()[None]
        out = fn(x, self.weight, self.bias, "silu" if self.silu else None)[0].t()
        return out, torch.nn.functional.pad(x[0], (self.shape[1], 0))[:, -self.shape[1] :]

    def kernel(self, kernels: NativeKernels, given: list[Tensor], records: Tensor, pieces: states.Pieces) -> Tensor:
        return states.convolve(kernels, given[0], self.weight, self.bias, self.silu, records, pieces)


ENDLESS = (0.0, torch.inf)
CASES = {
    "delta rule": (Delta, (2, 4), (128, 128), False, True),
    "delta rule, ragged": (Delta, (1, 3), (20, 10), False, True),
    "delta rule, no norm": (Delta, (2, 2), (64, 80), False, False),
    "Kimi": (Delta, (2, 2), (128, 128), True, True),
    "Kimi, ragged": (Delta, (3, 3), (10, 36), True, True),
    "Mamba 2": (Scan, (2, 8), (64, 128), ENDLESS),
    "Mamba 2, ragged": (Scan, (3, 3), (21, 10), ENDLESS),
    "Mamba 2, limits": (Scan, (1, 4), (16, 16), (0.3, 0.9)),
    "Mamba 1": (Select, 300, 16),
    "Mamba 1, ragged": (Select, 33, 10),
    "convolution": (Convolution, 300, 4, 4, True, True),
    "convolution of three": (Convolution, 33, 3, 3, False, False),
    "convolution of seven": (Convolution, 40, 7, 7, True, False),
    "longer state": (Convolution, 17, 4, 6, True, True),
}  # fmt: skip


def pieces_of(sizes: list[int], numbers: list[int], fresh: list[bool]) -> states.Pieces:
    return states.Pieces(torch.tensor([0, *sizes]).cumsum(0), torch.tensor(numbers), torch.tensor(fresh))


def whole(kernels: NativeKernels, case: Numbers) -> tuple[Tensor, Tensor]:
    """Outputs and state of a sequence alone in one piece."""
    records = torch.full((1, *case.shape), torch.nan)
    out = case.kernel(kernels, case.given, records, pieces_of([len(case.given[0])], [0], [True]))
    return out, records[0]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_transformers(native: NativeKernels, name: str) -> None:
    kind, *args = CASES[name]
    for tokens in (1, 17, 150):
        case = kind(tokens, *args)
        for found, expected in zip(whole(native, case), case.own(), strict=True):
            assert far(found, expected) < CLOSE


@pytest.mark.parametrize("name", CASES)
def test_pieces_give_the_same_bits(native: NativeKernels, name: str) -> None:
    """Two sequences in pieces of 1, 7, 16, 64 and more tokens side by side, in records that hold anything before, give
    what each of them gives alone in one piece."""
    kind, *args = CASES[name]
    one, two = kind(130, *args), kind(75, *args)
    # The second sequence has the parameters of the first.
    two.__dict__.update({k: v for k, v in vars(one).items() if k not in ("given", "rng")})
    expected = [whole(native, case) for case in (one, two)]
    for size in PIECES:
        records, found = torch.full((4, *one.shape), torch.nan), [list[Tensor](), list[Tensor]()]
        for at in range(0, 130, size):
            rows = [(s, case) for s, case in enumerate((one, two)) if at < len(case.given[0])]
            parts = [[x[at : at + size] for x in case.given] for _, case in rows]
            sizes = [len(part[0]) for part in parts]
            given = [torch.cat(x) for x in zip(*parts, strict=True)]
            pieces = pieces_of(sizes, [(3, 1)[s] for s, _ in rows], [at == 0] * len(rows))
            for (s, _), out in zip(rows, one.kernel(native, given, records, pieces).split(sizes), strict=True):
                found[s].append(out)
        for outs, number, (out, state) in zip(found, (3, 1), expected, strict=True):
            assert torch.equal(torch.cat(outs), out)
            assert torch.equal(records[number], state)
        assert bool(records[[0, 2]].isnan().all())  # others are untouched


@pytest.mark.parametrize("name", ["delta rule", "Kimi, ragged", "Mamba 2", "Mamba 1", "convolution"])
def test_rows_of_larger_tensors(name: str) -> None:
    """Inputs may be slices of a projection; records may lie apart."""
    kind, *args = CASES[name]
    case, kernels = kind(20, *args), kernels_named("native")
    expected, state = whole(kernels, case)
    wide = [torch.cat([x, x + 1], -1)[..., : x.shape[-1]] for x in case.given]
    assert not all(x.is_contiguous() for x in wide)
    size = state.numel()
    apart = torch.full((3, size + 16), torch.nan)
    records = apart[:, :size].unflatten(1, case.shape)
    assert torch.equal(case.kernel(kernels, wide, records, pieces_of([20], [2], [True])), expected)
    assert torch.equal(records[2], state)
    assert bool(apart[2, size:].isnan().all())


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.booleans())
@settings(deadline=None, max_examples=20)
def test_any_sizes(keys: int, share: int, dk: int, dv: int, tokens: int, channels: bool) -> None:
    kernels = kernels_named("native")
    cases = (
        Delta(tokens, (keys, keys * share if not channels else keys), (dk, dv), channels, True),
        Scan(tokens, (keys, keys * share), (dk, dv), ENDLESS),
    )
    for case in cases:
        for found, expected in zip(whole(kernels, case), case.own(), strict=True):
            assert far(found, expected) < 1e-5


def test_threads_do_not_change_bits() -> None:
    kernels, case, threads = kernels_named("native"), Delta(40, (2, 4), (64, 64), False, True), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(whole(kernels, case))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("sizes", "numbers", "words"), [
    ([5], [7], "record is not among the 2"), ([5], [-1], "record is not among"), ([4], [0], "do not fit 5 tokens"),
    ([5, 0], [0, 1], "do not fit 5 tokens"),
])  # fmt: skip
def test_pieces_that_do_not_fit(sizes: list[int], numbers: list[int], words: str) -> None:
    case = Delta(5, (1, 1), (16, 16), False, True)
    pieces = pieces_of(sizes, numbers, [True] * len(numbers))
    with pytest.raises(InvalidInput, match=words):
        case.kernel(kernels_named("native"), case.given, torch.zeros(2, 1, 16, 16), pieces)


def test_dtypes() -> None:
    """Parameters may be narrow; other tensors may not."""
    kernels, pieces, case = kernels_named("native"), pieces_of([5], [0], [True]), Convolution(5, 40, 4, 4, True, True)
    narrow = case.weight.bfloat16()
    found, expected = (
        states.convolve(kernels, case.given[0], weight, None, False, torch.zeros(1, 40, 4), pieces)
        for weight in (narrow, narrow.float())
    )
    assert torch.equal(found, expected)
    for x, records in (
        (case.given[0].bfloat16(), torch.zeros(1, 40, 4)),
        (case.given[0], torch.zeros(1, 40, 4).half()),
    ):
        with pytest.raises(InvalidInput, match="fp32"):
            states.convolve(kernels, x, narrow, None, False, records, pieces)


def test_shapes_that_do_not_fit() -> None:
    kernels, pieces = kernels_named("native"), pieces_of([5], [0], [True])
    delta, conv = Delta(5, (1, 1), (16, 16), False, True), Convolution(5, 8, 4, 4, True, True)
    with pytest.raises(InvalidInput, match="a record must be"):
        delta.kernel(kernels, delta.given, torch.zeros(2, 1, 16, 17), pieces)
    with pytest.raises(InvalidInput, match="do not fit together"):
        delta.kernel(kernels, [*delta.given[:4], torch.zeros(5, 2)], torch.zeros(2, 1, 16, 16), pieces)
    with pytest.raises(InvalidInput, match="do not fit together"):
        conv.kernel(kernels, conv.given, torch.zeros(2, 8, 2), pieces)
