"""Every set of kernels against a dense softmax in float64, written here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.kernels import Kernels
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.cpu import NativeKernels
from tests.helpers.builds import ONE_BUILD
from tests.helpers.held import held
from tests.helpers.softmax import dense

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = (1, 32, 5, 64, 67, 130)


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


@dataclass
class Cache:
    """A pool with sequences of `lengths` on shuffled pages; k, v: what they hold, each [length, kv_heads, d]."""

    pool: Tensor
    tables: Tensor
    lengths: Tensor
    k: list[Tensor]
    v: list[Tensor]

    def expected(self, q: Tensor, scale: float, **options) -> Tensor:
        pairs = zip(self.k, self.v, strict=True)
        return torch.cat([dense(q[i : i + 1], k, v, scale, **options) for i, (k, v) in enumerate(pairs)])


def cached(kv_heads: int, dim: int, page_tokens: int, lengths=LENGTHS, dtype=torch.float32) -> Cache:
    counts = [-(-length // page_tokens) for length in lengths]
    free = torch.randperm(sum(counts) + 3).tolist()
    pool = torch.full((len(free), 2, kv_heads, page_tokens, dim), math.nan, dtype=dtype)  # unused: never read
    tables = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
    cache = Cache(pool, tables, torch.tensor(lengths, dtype=torch.int32), [], [])
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        k, v = torch.randn(2, length, kv_heads, dim).to(dtype)
        pages = [free.pop() for _ in range(count)]
        tables[i, :count] = torch.tensor(pages, dtype=torch.int32)
        places = torch.arange(length)
        page, offset = tables[i, places // page_tokens].long(), places % page_tokens
        pool[page, 0, :, offset], pool[page, 1, :, offset] = k, v
        cache.k.append(k)
        cache.v.append(v)
    return cache


def strided(*shape: int, dtype=torch.float32) -> Tensor:
    """A view whose last dimension is contiguous and whose first two are swapped and padded."""
    first, heads, dim = shape
    return torch.randn(heads, first + 1, dim + 3).to(dtype).transpose(0, 1)[:first, :, :dim]


def close(found: Tensor, expected: Tensor, dtype=torch.float32) -> None:
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


class TestKernels:
    """Tests that every implementation must pass."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("dim", "group", "dtype"), [
        (dim, group, DTYPES[(i + j) % len(DTYPES)])
        for i, dim in enumerate([16, 20, 64, 80, 128]) for j, group in enumerate([1, 2, 3, 4, 8])
    ])  # fmt: skip
    def test_decode(self, kernel: Kernels, dim: int, group: int, dtype: torch.dtype) -> None:
        cache = cached(2, dim, 16, dtype=dtype)
        q = torch.randn(len(LENGTHS), 2 * group, dim)
        out = kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths, AttentionOptions(dim**-0.5))
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        close(out, cache.expected(q, dim**-0.5))

    @pytest.mark.parametrize("page_tokens", [1, 4, 32, 100])
    def test_page_sizes(self, kernel: Kernels, page_tokens: int) -> None:
        cache = cached(3, 20, page_tokens)
        q = torch.randn(len(LENGTHS), 9, 20)
        close(
            kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.3)),
            cache.expected(q, 0.3),
        )

    @pytest.mark.parametrize("options", [
        {"window": 1}, {"window": 7}, {"window": 64}, {"window": 1000}, {"softcap": 5.0}, {"sinks": True},
        {"window": 50, "softcap": 1.0, "sinks": True},
    ], ids=str)  # fmt: skip
    def test_options(self, kernel: Kernels, options: dict) -> None:
        cache = cached(2, 64, 16)
        q = 2 * torch.randn(len(LENGTHS), 6, 64)
        if "sinks" in options:
            options = {**options, "sinks": 4 * torch.randn(6)}
        found = kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.25, **options))
        close(found, cache.expected(q, 0.25, **options))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_query_dtype_and_strides(self, kernel: Kernels, dtype: torch.dtype) -> None:
        cache = cached(2, 64, 16, dtype=dtype)
        q = strided(len(LENGTHS), 8, 64, dtype=dtype)
        out = kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.125))
        assert out.dtype == dtype
        close(out, cache.expected(q, 0.125), dtype)

    @pytest.mark.parametrize("window", [None, 2500])
    def test_long_sequences_and_extreme_scores(self, kernel: Kernels, window: int | None) -> None:
        cache = cached(1, 64, 32, lengths=(3000, 2, 1025))
        q = 30 * torch.randn(3, 4, 64)  # scores of hundreds: exp must not overflow, and the maximum moves between parts
        options = {"window": window, "sinks": torch.full((4,), 500.0)}
        found = kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths, AttentionOptions(1.0, **options))
        expected = cache.expected(q, 1.0, **options)
        torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=2e-3)  # fp32 scores of 700 are 6e-5 apart

    def test_result_does_not_depend_on_the_rest(self, kernel: Kernels) -> None:
        cache = cached(2, 64, 16, lengths=(1500, 70, 33))
        q = torch.randn(3, 8, 64)
        whole = kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.125))
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            for i in range(3):
                one = slice(i, i + 1)
                alone = kernel.decode_attention(
                    q[one], cache.pool, cache.tables[one], cache.lengths[one], AttentionOptions(0.125)
                )
                assert torch.equal(alone, whole[one])
        finally:
            torch.set_num_threads(threads)

    def test_empty_batch(self, kernel: Kernels) -> None:
        pool = torch.zeros(4, 2, 2, 16, 64)
        none = torch.zeros(0, dtype=torch.int32)
        assert kernel.decode_attention(
            torch.zeros(0, 4, 64), pool, none.view(0, 3), none, AttentionOptions(1.0)
        ).shape == (0, 4, 64)
        kernel.append(torch.zeros(0, 2, 64), torch.zeros(0, 2, 64), pool, none, none)
        assert kernel.attend_prompt(*(torch.zeros(0, 5, 4, 64) for _ in range(3)), AttentionOptions(1.0)).shape == (
            0,
            5,
            4,
            64,
        )
        kernel.convert(torch.zeros(0), torch.zeros(0, dtype=torch.bfloat16))
        assert kernel.linear(torch.zeros(0, 64), torch.zeros(7, 64).half()).shape == (0, 7)

    @pytest.mark.parametrize("source", DTYPES)
    @pytest.mark.parametrize("target", DTYPES)
    @pytest.mark.parametrize("dim", [20, 64])
    def test_append(self, kernel: Kernels, source: torch.dtype, target: torch.dtype, dim: int) -> None:
        pool = torch.zeros(9, 2, 3, 4, dim, dtype=target)
        k, v = strided(11, 3, dim, dtype=source), strided(11, 3, dim, dtype=source)
        places = torch.randperm(9 * 4)[:11]
        pages, offsets = (places // 4).int(), (places % 4).int()
        expected = pool.clone()
        for t in range(11):
            expected[pages[t], 0, :, offsets[t]] = k[t].to(target)
            expected[pages[t], 1, :, offsets[t]] = v[t].to(target)
        kernel.append(k, v, pool, pages, offsets)
        assert torch.equal(pool, expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_append_then_decode(self, kernel: Kernels, dtype: torch.dtype) -> None:
        cache = cached(2, 64, 16, dtype=dtype)
        places = cache.lengths.long()
        pages = cache.tables[torch.arange(len(LENGTHS)), places // 16]
        fresh = pages < 0  # the new token starts a page
        used = set(cache.tables.flatten().tolist())
        spare = [p for p in range(cache.pool.shape[0]) if p not in used]
        pages[fresh] = torch.tensor(spare[: int(fresh.sum())], dtype=torch.int32)
        cache.tables[torch.arange(len(LENGTHS)), places // 16] = pages
        k, v = strided(len(LENGTHS), 2, 64), strided(len(LENGTHS), 2, 64)
        kernel.append(k, v, cache.pool, pages, (places % 16).int())
        cache.k = [torch.cat([old, new[None].to(dtype)]) for old, new in zip(cache.k, k, strict=True)]
        cache.v = [torch.cat([old, new[None].to(dtype)]) for old, new in zip(cache.v, v, strict=True)]
        q = torch.randn(len(LENGTHS), 6, 64)
        close(
            kernel.decode_attention(q, cache.pool, cache.tables, cache.lengths + 1, AttentionOptions(0.1)),
            cache.expected(q, 0.1),
        )

    def test_append_many(self, kernel: Kernels) -> None:
        k, v = torch.randn(2, 600, 2, 64)
        pool = torch.zeros(40, 2, 2, 16, 64)
        places = torch.randperm(640)[:600].int()
        kernel.append(k, v, pool, places // 16, places % 16)
        assert torch.equal(pool[places // 16, 0, :, places % 16], k)
        assert torch.equal(pool[places // 16, 1, :, places % 16], v)

    @pytest.mark.parametrize("length", [0, -1, 99])
    @ONE_BUILD
    def test_bad_lengths(self, kernel: Kernels, length: int) -> None:
        if kernel.name == "cuda":
            pytest.skip("the CUDA kernels trust their tables, so as never to wait for the GPU")
        cache = cached(2, 16, 16, lengths=(20, 40))
        lengths = torch.tensor([20, length], dtype=torch.int32)
        with pytest.raises(InvalidInput, match="sequence 1"):
            kernel.decode_attention(torch.zeros(2, 2, 16), cache.pool, cache.tables, lengths, AttentionOptions(1.0))

    @pytest.mark.parametrize("page", [-1, 8])
    @ONE_BUILD
    def test_bad_pages(self, kernel: Kernels, page: int) -> None:
        if kernel.name == "cuda":
            pytest.skip("the CUDA kernels trust their tables, so as never to wait for the GPU")
        cache = cached(2, 16, 16, lengths=(20, 40))
        tables = cache.tables.clone()
        tables[1, 2] = page
        with pytest.raises(InvalidInput, match="sequence 1"):
            kernel.decode_attention(torch.zeros(2, 2, 16), cache.pool, tables, cache.lengths, AttentionOptions(1.0))
        k, place = torch.zeros(2, 2, 16), torch.tensor([0, page], dtype=torch.int32)
        before = cache.pool.clone()
        with pytest.raises(InvalidInput, match="token 1"):
            kernel.append(k, k, cache.pool, place, place * 0)
        with pytest.raises(InvalidInput, match="token 0"):
            kernel.append(k, k, cache.pool, place * 0, place * 0 + 16)
        assert torch.equal(cache.pool.nan_to_num(), before.nan_to_num())

    @pytest.mark.parametrize(("shape", "options"), [
        ((2, 3, 16), {}), ((2, 2, 17), {}), ((3, 2, 16), {}),
        ((2, 2, 16), {"window": 0}), ((2, 2, 16), {"softcap": 0.0}), ((2, 2, 16), {"sinks": torch.zeros(3)}),
    ])  # fmt: skip
    @ONE_BUILD
    def test_misfits_of_attention_are_refused(self, kernel: Kernels, shape: Any, options: dict[str, Any]) -> None:
        c = cached(2, 16, 16, lengths=(20, 40))
        with pytest.raises(InvalidInput):
            kernel.decode_attention(torch.zeros(shape), c.pool, c.tables, c.lengths, AttentionOptions(1.0, **options))

    @pytest.mark.parametrize("call", [
        lambda x, c: x.decode_attention(
            torch.zeros(2, 2, 16), c.pool.transpose(2, 3), c.tables, c.lengths, AttentionOptions(1.0)
        ),
        lambda x, c: x.append(torch.zeros(2, 1, 16), torch.zeros(2, 1, 16), c.pool, c.lengths, c.lengths),
        lambda x, c: x.append(torch.zeros(3, 2, 16), torch.zeros(3, 2, 16), c.pool, c.lengths, c.lengths),
        lambda x, c: x.attend_prompt(*(torch.zeros(1, n, 2, 16) for n in (3, 2, 2)), AttentionOptions(1.0)),
        lambda x, c: x.linear(torch.zeros(2, 16), torch.zeros(3, 17).half()),
        lambda x, c: x.linear(torch.zeros(2, 16), torch.zeros(3, 16).double()),
        lambda x, c: x.linear(torch.zeros(2, 16), torch.zeros(16).expand(3, 16)),
        lambda x, c: x.add_weighted(torch.zeros(2, 16), torch.zeros(2, 3), torch.zeros(3, 17)),
        lambda x, c: x.add_weighted(torch.zeros(2, 16).half(), torch.zeros(2, 3), torch.zeros(3, 16)),
        lambda x, c: x.add_weighted(torch.zeros(2, 16), torch.zeros(2, 3), torch.zeros(16, 3).T),
        lambda x, c: x.add_weighted(torch.zeros(2, 16), torch.zeros(2, 4), torch.zeros(3, 16).half()),
        lambda x, c: x.linear(torch.zeros(2, 16).double(), torch.zeros(3, 16).half()),
        lambda x, c: x.linear(torch.zeros(2, 16), torch.zeros(6, 32).half()[::2, ::2]),
        lambda x, c: x.linear(torch.zeros(2, 16), torch.zeros(3, 16).half(), torch.zeros(2)),
        lambda x, c: x.linear(torch.zeros(2, 16), torch.zeros(3, 16).half(), torch.zeros(3).half()),
        lambda x, c: x.convert(torch.zeros(3), torch.zeros(4)),
        lambda x, c: x.convert(torch.zeros(6)[::2], torch.zeros(3)),
    ])  # fmt: skip
    @ONE_BUILD
    def test_misfits_are_refused(self, kernel: Kernels, call: Callable[[Kernels, Cache], object]) -> None:
        with pytest.raises(InvalidInput):
            call(kernel, cached(2, 16, 16, lengths=(20, 40)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("queries", "keys"), [(1, 1), (9, 9), (1, 40), (7, 40), (150, 150), (140, 200)])
    def test_prompt(self, kernel: Kernels, queries: int, keys: int, dtype: torch.dtype) -> None:
        q = torch.randn(2, 4, queries, 20).to(dtype).transpose(1, 2)
        k, v = torch.randn(2, 2, keys, 2, 24).to(dtype)[..., :20]
        out = kernel.attend_prompt(q, k, v, AttentionOptions(0.2))
        assert out.dtype == dtype
        assert out.is_contiguous()
        close(out, torch.stack([dense(*x, 0.2) for x in zip(q, k, v, strict=True)]), dtype)

    @pytest.mark.slow
    @pytest.mark.parametrize("keys", [33, 150])
    @pytest.mark.parametrize("options", [
        {"window": 1}, {"window": 10}, {"window": 149}, {"window": 500}, {"softcap": 3.0}, {"sinks": True},
        {"window": 20, "softcap": 3.0, "sinks": True},
    ], ids=str)  # fmt: skip
    def test_prompt_options(self, kernel: Kernels, options: dict, keys: int) -> None:
        for queries in (keys, keys - 12):
            q, k, v = torch.randn(1, queries, 4, 16), torch.randn(1, keys, 2, 16), torch.randn(1, keys, 2, 16)
            if "sinks" in options:
                options = {**options, "sinks": 2 * torch.randn(4)}
            close(
                kernel.attend_prompt(q, k, v, AttentionOptions(0.5, **options))[0],
                dense(q[0], k[0], v[0], 0.5, **options),
            )

    def test_prompt_in_small_blocks(self, kernel: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flexengine.kernels.reference.SCORES", 4 * 40 * 7)
        q, k, v = torch.randn(1, 30, 4, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16)
        close(
            kernel.attend_prompt(q, k, v, AttentionOptions(0.5, softcap=4.0))[0],
            dense(q[0], k[0], v[0], 0.5, softcap=4.0),
        )

    def test_prompt_without_memory(self, kernel: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        if not isinstance(kernel, NativeKernels):
            pytest.skip("it takes its memory from torch")
        scratch: list[int] = []
        call = kernel._prompts
        monkeypatch.setattr(kernel, "_prompts", lambda *args: scratch.append(call(*args)) or -4096)
        q, k = torch.randn(1, 9, 4, 64), torch.randn(1, 9, 2, 64)
        with pytest.raises(OutOfMemory, match=r"scratch.* needs 4.10 kB, but the system has no more; lower --dev"):
            kernel.attend_prompt(q, k, k, AttentionOptions(1.0))
        assert scratch == [0]

    def test_prompt_in_chunks_is_the_whole_and_the_next_token_is_a_decode(self, kernel: Kernels) -> None:
        cache = cached(2, 64, 16, lengths=(50,))
        k, v = held(cache.pool, cache.tables[0], 50)
        q = torch.randn(1, 50, 4, 64)
        options = {"scale": 0.125, "window": 20, "softcap": 3.0, "sinks": torch.randn(4)}
        whole = kernel.attend_prompt(q, k[None], v[None], AttentionOptions(**options))
        chunk = kernel.attend_prompt(q[:, 30:45], k[None, :45], v[None, :45], AttentionOptions(**options))
        torch.testing.assert_close(chunk, whole[:, 30:45])
        last = kernel.decode_attention(q[:, -1], cache.pool, cache.tables, cache.lengths, AttentionOptions(**options))
        torch.testing.assert_close(last, whole[:, -1])

    @pytest.mark.parametrize("threads", [2, 5])
    def test_convert_in_threads(self, kernel: Kernels, threads: int) -> None:
        for count in (1, 64, 1000, 2**20 + 7):
            values, found = torch.randn(count).half(), torch.zeros(count + 2)
            kernel.convert(values, found[1:-1], threads)
            same_bits(found[1:-1], values.float())
            assert not found[0]
            assert not found[-1]

    @pytest.mark.parametrize("source", DTYPES)
    @pytest.mark.parametrize("target", [*DTYPES, torch.float64])
    def test_convert_is_bitwise_torch(self, kernel: Kernels, source: torch.dtype, target: torch.dtype) -> None:
        if source.itemsize == 2:
            values = torch.arange(-(2**15), 2**15).to(torch.int16).view(source)  # all there are
        else:
            values = torch.cat([torch.randint(-(2**31), 2**31, (2**16,)).int().view(source), ties()])
        for part in (values, values[3:70], values[:0], values[5:6]):
            found = torch.empty(part.numel() + 1, dtype=target)[1:]  # not aligned
            kernel.convert(part, found)
            same_bits(found, part.to(target))

    @pytest.mark.parametrize("target", DTYPES)
    @pytest.mark.parametrize("source", DTYPES)
    def test_convert_large(self, kernel: Kernels, source: torch.dtype, target: torch.dtype) -> None:
        values = torch.randn(2**21 + 2**18 + 13).to(source)  # over the size from which stores bypass the cache
        found = torch.zeros(values.numel() + 5, dtype=target)
        kernel.convert(values, found[3:-2])
        same_bits(found[3:-2], values.to(target))
        assert not found[:3].any()
        assert not found[-2:].any()


def ties() -> Tensor:
    """fp32 numbers at, just below and just above the midpoint of neighbours in bf16 and fp16, subnormals too."""
    bits = [(torch.arange(2**16) << 16) + 0x8000 + d for d in (-1, 0, 1)]
    halves = torch.arange(0x7C00).to(torch.int16).view(torch.float16).double()
    middle = ((halves[:-1] + halves[1:]) / 2).float().view(torch.int32).long()
    bits += [sign + middle + d for d in (-1, 0, 1) for sign in (0, 2**31)]
    edges = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 2.0**-25, 2.0**-24, 1e-45, math.inf, 0.0])
    return torch.cat([(torch.cat(bits) & 0xFFFFFFFF).to(torch.int32).view(torch.float32), edges, -edges])


def same_bits(found: Tensor, expected: Tensor) -> None:
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.dtype.itemsize]
    assert torch.equal(found[~nan].view(integer), expected[~nan].view(integer))
