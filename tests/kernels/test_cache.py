"""Attention over an encoded cache, with few of the values, and in parts: against sums in float64, written here."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexengine.codec.cache import BITS, CacheFormat
from flexengine.errors import InvalidInput
from flexengine.guests.attention_workers.messages import merge
from flexengine.kernels import Kernels
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.reference import ReferenceKernels
from tests.helpers.builds import ONE_BUILD, attended
from tests.helpers.held import held

LENGTHS = (1, 31, 32, 33, 1024, 1025, 2100)  # around the borders of pages and of parts
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"window": 40}, {"softcap": 2.0}, {"sinks": True}, {"window": 1100, "softcap": 3.0, "sinks": True},
)  # fmt: skip


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


class Cache(NamedTuple):
    """Sequences on shuffled pages. k, v: what the pool says they hold, [length, kv_heads, dim] in fp32 each."""

    form: CacheFormat | None
    pool: Tensor
    tables: Tensor
    lengths: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


@functools.cache
def cached(
    bits: int | None, dim: int, kv_heads: int = 2, page_tokens: int = 32, lengths: tuple[int, ...] = LENGTHS
) -> Cache:
    """bits None: in fp32."""
    torch.manual_seed(dim)
    form = None if bits is None else CacheFormat(bits, kv_heads, page_tokens, dim)
    counts = [-(-length // page_tokens) for length in lengths]
    free = torch.randperm(sum(counts) + 3).int().tolist()
    if form is None:
        pool = torch.full((len(free), 2, kv_heads, page_tokens, dim), math.nan)
    else:
        pool = torch.full((len(free), form.page_bytes), 255, dtype=torch.uint8)  # scales and minima: NaN
    tables = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
    write, k, v = ReferenceKernels(), [], []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[i, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        at = torch.arange(length)
        fresh = torch.randn(2, length, kv_heads, dim) + torch.randn(2, 1, kv_heads, dim)
        write.append(*fresh, pool, tables[i, at // page_tokens], (at % page_tokens).int(), form)
        keys, values = held(pool, tables[i], length, form)
        k.append(keys)
        v.append(values)
    return Cache(form, pool, tables, torch.tensor(lengths, dtype=torch.int32), tuple(k), tuple(v))


def weights_of(q: Tensor, k: Tensor, scale: float, window=None, softcap=None, sinks=None) -> tuple[Tensor, Tensor]:
    """Softmax weights [heads, seen] in float64, and the log of their denominators [heads]. q: [heads, dim]."""
    seen = k if window is None else k[-window:]
    scores = torch.einsum("hd,shd->hs", q.double(), seen.double().repeat_interleave(len(q) // k.shape[1], 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    total = scores.exp().sum(1) + (0 if sinks is None else sinks.double().exp())
    return scores.exp() / total[:, None], total.log()


def weighed(weights: Tensor, v: Tensor) -> Tensor:
    """[heads, dim] of weights [heads, seen]."""
    seen = v[len(v) - weights.shape[1] :].double().repeat_interleave(len(weights) // v.shape[1], 1)
    return torch.einsum("hs,shd->hd", weights, seen)


def dense(cache: Cache, q: Tensor, scale: float, **options) -> Tensor:
    parts = zip(q, cache.k, cache.v, strict=True)
    return torch.stack([weighed(weights_of(one, k, scale, **options)[0], v) for one, k, v in parts])


def close(found: Tensor, expected: Tensor, tolerance: float = 4e-6) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def given(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.randn(heads)} if "sinks" in options else options


class TestEncodedCache:
    """Tests of pools of codes that every implementation must pass."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
    @pytest.mark.parametrize("bits", BITS)
    def test_append(self, kernel: Kernels, bits: int, dim: int, dtype: torch.dtype) -> None:
        """The bytes of the form's own encoding, and no others."""
        form = CacheFormat(bits, 3, 5, dim)
        k, v = (torch.randn(3, 42, dim + 3).to(dtype).transpose(0, 1)[:41, :, :dim] for _ in range(2))
        places = torch.randperm(9 * 5)[:41]
        pages, offsets = (places // 5).int(), (places % 5).int()
        room = torch.full((2 + 9 * form.page_bytes,), 170, dtype=torch.uint8)
        pool = room[2:].view(9, -1)  # at an address that is only even
        expected = pool.clone()
        for number, x in enumerate((k, v)):
            for panel, part in zip(form.panels(expected), form.encode(x), strict=True):
                if panel.dtype == torch.uint8:  # [pages, 2, kv_heads, tokens, bytes]
                    panel[pages, number, :, offsets] = part
                else:  # [pages, 2, kv_heads, groups, tokens]
                    panel[pages, number, :, :, offsets] = part
        kernel.append(k, v, pool, pages, offsets, form)
        assert torch.equal(pool, expected)

    def test_a_token_does_not_depend_on_others(self, kernel: Kernels) -> None:
        form = CacheFormat(4, 2, 16, 64)
        k, v = torch.randn(2, 900, 2, 64)
        place = torch.arange(900).int()
        whole, alone = (torch.zeros(57, form.page_bytes, dtype=torch.uint8) for _ in range(2))
        kernel.append(k, v, whole, place // 16, place % 16, form)
        for some in (slice(0, 1), slice(1, 500), slice(500, 900)):
            kernel.append(k[some], v[some], alone, place[some] // 16, place[some] % 16, form)
        assert torch.equal(whole, alone)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -7e4])
    @pytest.mark.parametrize("dim", [64, 80])
    def test_what_cannot_be_held_stays_in_its_sequence(self, kernel: Kernels, dim: int, bad: float) -> None:
        form = CacheFormat(4, 1, 16, dim)
        pool, at = torch.zeros(4, form.page_bytes, dtype=torch.uint8), torch.arange(40).int()
        k, v = torch.randn(2, 40, 1, dim)
        k[30, 0, 3] = bad
        kernel.append(k, v, pool, at // 16, at % 16, form)
        tables, lengths = torch.tensor([[0, 1, 2], [0, 1, 3]]).int(), torch.tensor([40, 20]).int()
        found = kernel.decode_attention(torch.randn(2, 2, dim), pool, tables, lengths, AttentionOptions(0.1), form=form)
        assert bool(found[0].isnan().all())
        assert not found[1].isnan().any()

    @pytest.mark.slow
    @pytest.mark.parametrize(("bits", "dim", "group"), [
        (BITS[(i + j) % len(BITS)], dim, group)
        for i, dim in enumerate([16, 64, 80, 96, 128]) for j, group in enumerate([1, 3, 4, 8])
    ])  # fmt: skip
    def test_decode(self, kernel: Kernels, bits: int, dim: int, group: int) -> None:
        cache, q = cached(bits, dim), torch.randn(len(LENGTHS), 2 * group, dim)
        options = given(OPTIONS[(bits + dim // 16 + group) % len(OPTIONS)], 2 * group)
        out = kernel.decode_attention(
            q, cache.pool, cache.tables, cache.lengths, AttentionOptions(dim**-0.5, **options), form=cache.form
        )
        assert out.is_contiguous()
        close(out, dense(cache, q, dim**-0.5, **options))

    @pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
    @pytest.mark.parametrize("page_tokens", [1, 5, 64])
    def test_options_and_page_sizes(self, kernel: Kernels, page_tokens: int, options: dict[str, Any]) -> None:
        for bits, dim in ((8, 16), (4, 64), (2, 192)):
            cache = cached(bits, dim, 3, page_tokens, (1, 5, 63, 70, 130))
            q, options = 2 * torch.randn(5, 9, dim), given(options, 9)
            found = kernel.decode_attention(
                q, cache.pool, cache.tables, cache.lengths, AttentionOptions(dim**-0.5, **options), form=cache.form
            )
            close(found, dense(cache, q, dim**-0.5, **options), 8e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_query_dtype(self, kernel: Kernels, dtype: torch.dtype) -> None:
        cache, q = cached(4, 64), torch.randn(len(LENGTHS), 4, 64).to(dtype)
        found = kernel.decode_attention(
            q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.125), form=cache.form
        )
        assert found.dtype == dtype
        close(found, dense(cache, q, 0.125), 1e-2)

    @pytest.mark.parametrize(("heads", "dim", "pool", "options"), [
        (2, 64, lambda c: c.pool[:, :-2], {}),
        (2, 64, lambda c: c.pool[:, :-2].clone(), {}),
        (2, 64, lambda c: c.pool.view(torch.int8), {}),
        (2, 64, lambda c: c.pool.view(-1)[1 : 1 + c.form.page_bytes * 2].view(2, -1), {}),
        (3, 64, lambda c: c.pool, {}),
        (2, 32, lambda c: c.pool, {}),
        (2, 64, lambda c: c.pool, {"topk": 1.1}),
        (2, 64, lambda c: c.pool, {"topk": -0.1}),
    ])  # fmt: skip
    @ONE_BUILD
    def test_misfits_are_refused(
        self, kernel: Kernels, heads: int, dim: int, pool: Callable[[Cache], Tensor], options: dict[str, Any]
    ) -> None:
        cache = cached(4, 64, 2, 16, (20, 40))
        where = torch.zeros(2, heads, dim), pool(cache), cache.tables, cache.lengths
        with pytest.raises(InvalidInput):
            kernel.decode_attention(*where, AttentionOptions(1.0, **options), cache.form)

    @ONE_BUILD
    def test_other_misfits_are_refused(self, kernel: Kernels) -> None:
        cache = cached(4, 64, 2, 16, (20, 40))
        where, form = (torch.zeros(2, 2, 64), cache.pool, cache.tables, cache.lengths), cache.form
        with pytest.raises(InvalidInput, match="KV pool"):  # without the format
            kernel.decode_attention(*where, AttentionOptions(1.0))
        with pytest.raises(InvalidInput, match="leave out topk or lse"):
            kernel.decode_attention(*where, AttentionOptions(1.0, topk=0.5), form, torch.zeros(2, 2))
        with pytest.raises(InvalidInput, match="lse"):
            kernel.decode_attention(*where, AttentionOptions(1.0), form, torch.zeros(2, 3))
        for shape in ((2, 2, 3, 64), (2, 2, 2, 32)):
            with pytest.raises(InvalidInput):
                kernel.append(*torch.zeros(shape), cache.pool, cache.lengths, cache.lengths, form)

    @ONE_BUILD
    def test_bad_places_are_refused(self, kernel: Kernels) -> None:
        if kernel.name == "cuda":
            pytest.skip("the CUDA kernels trust their tables, so as never to wait for the GPU")
        cache = cached(4, 64, 2, 16, (20, 40))
        tables, lengths = cache.tables.clone(), torch.tensor([20, 99], dtype=torch.int32)
        with pytest.raises(InvalidInput, match="sequence 1"):
            kernel.decode_attention(
                torch.zeros(2, 2, 64), cache.pool, tables, lengths, AttentionOptions(1.0), form=cache.form
            )
        tables[1, 2] = 99
        k, before = torch.zeros(2, 2, 64), cache.pool.clone()
        with pytest.raises(InvalidInput, match="token 1"):
            kernel.append(k, k, cache.pool, tables[1, 1:3], tables[1, 1:3] * 0, cache.form)
        assert torch.equal(before, cache.pool)


@pytest.mark.parametrize("bits", [None, *BITS], ids=lambda bits: f"{bits or 'fp32'}")
class TestDecode:
    """Tests for pools of numbers and of codes."""

    @pytest.mark.parametrize("topk", [None, 0.2])
    def test_a_sequence_does_not_depend_on_the_rest(
        self, kernel: Kernels, bits: int | None, topk: float | None
    ) -> None:
        """Results do not depend on other sequences, threads, or the order of pages."""
        for dim, kv_heads in ((64, 3), (80, 2)):
            cache = cached(bits, dim, kv_heads, 16, (1500, 70, 33))
            q = torch.randn(3, 4 * kv_heads, dim)
            call = functools.partial(
                kernel.decode_attention, options=AttentionOptions(0.125, topk=topk), form=cache.form
            )
            whole, threads = call(q, cache.pool, cache.tables, cache.lengths), torch.get_num_threads()
            order = torch.randperm(len(cache.pool))
            moved = torch.where(cache.tables >= 0, order.argsort()[cache.tables.long()].int(), cache.tables)
            try:
                for count in (1, 2, 5):
                    torch.set_num_threads(count)
                    for i in range(3):
                        one = slice(i, i + 1)
                        alone = call(q[one], cache.pool[order], moved[one], cache.lengths[one])
                        assert torch.equal(alone, whole[one]), (dim, count, i)
            finally:
                torch.set_num_threads(threads)

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, {"window": 500}, {"window": 1200, "softcap": 3.0, "sinks": True}], ids=str)
    @pytest.mark.parametrize("topk", [0.0, 0.1, 0.73])
    def test_topk(self, kernel: Kernels, bits: int | None, topk: float, options: dict[str, Any]) -> None:
        """The largest weights by a full sort; V that is not chosen is NaN."""
        for dim, group in ((64, 4), (16, 1)):
            cache, heads = cached(bits, dim), 2 * group
            q, options = torch.randn(len(LENGTHS), heads, dim), given(options, heads)
            pool, expected = cache.pool.clone(), []
            for i, length in enumerate(LENGTHS):
                weights, _ = weights_of(q[i], cache.k[i], dim**-0.5, **options)
                seen = weights.shape[1]
                order = weights[:, :-1].sort(dim=1, descending=True, stable=True).indices[:, : int(topk * (seen - 1))]
                kept = torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, True)
                kept[:, -1] = True
                expected.append(weighed(weights * kept, cache.v[i]))
                for head, wanted in enumerate(kept.view(2, group, -1).any(1)):
                    t = length - seen + (~wanted).nonzero().flatten()
                    pages, offsets = cache.tables[i, t // 32].long(), t % 32
                    if cache.form is None:
                        pool[pages, 1, head, offsets] = math.nan
                    else:
                        cache.form.panels(pool).minimum[pages, 1, head, :, offsets] = math.nan
            found = kernel.decode_attention(
                q, pool, cache.tables, cache.lengths, AttentionOptions(dim**-0.5, topk=topk, **options), form=cache.form
            )
            close(found, torch.stack(expected))

    @pytest.mark.parametrize("options", [{}, {"window": 500}, {"window": 40, "softcap": 3.0}], ids=str)
    @pytest.mark.parametrize("topk", [0.0, 0.1, 1.0])
    def test_choose(self, kernel: Kernels, bits: int | None, topk: float, options: dict[str, Any]) -> None:
        """The positions that any query head of the kv head chooses, by a full sort; V is not loaded."""
        for dim, group in ((64, 3), (16, 1)):
            cache, heads = cached(bits, dim), 2 * group
            q, pool = torch.randn(len(LENGTHS), heads, dim), cache.pool.clone()
            hollow = pool[:, 1] if cache.form is None else pool[:, cache.form.page_bytes // 2 :]
            hollow.copy_(torch.full_like(hollow, math.nan if cache.form is None else 255))
            found = kernel.choose(
                q, pool, cache.tables, cache.lengths, AttentionOptions(dim**-0.5, topk=topk, **options), form=cache.form
            )
            assert found.shape == (len(LENGTHS), 2, cache.tables.shape[1] * 32)
            assert found.dtype == torch.bool
            for i, length in enumerate(LENGTHS):
                weights, _ = weights_of(q[i], cache.k[i], dim**-0.5, **options)
                seen = weights.shape[1]
                order = weights[:, :-1].sort(dim=1, descending=True, stable=True).indices[:, : int(topk * (seen - 1))]
                kept = torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, True)
                kept[:, -1] = True
                expected = torch.zeros_like(found[i])
                expected[:, length - seen : length] = kept.view(2, group, -1).any(1)
                assert torch.equal(found[i], expected)

    def test_of_equal_weights_the_earlier_count(self, kernel: Kernels, bits: int | None) -> None:
        form = None if bits is None else CacheFormat(bits, 1, 4, 64)
        pool = torch.zeros(5, 2, 1, 4, 64) if form is None else torch.zeros(5, form.page_bytes, dtype=torch.uint8)
        rows, at = torch.randn(3, 1, 64), torch.arange(20).int()
        k, v = rows[torch.tensor([0, 1, 2, 1, 1, 0, 2, 1] * 2 + [0, 1, 2, 0])], torch.randn(20, 1, 64)
        kernel.append(k, v, pool, at // 4, at % 4, form)
        held_k, held_v = held(pool, torch.arange(5).int(), 20, form)
        q = rows[1][None]  # so that the tokens with row 1 come first: 1, 3, 4, 7, 9, 11, 12, 15, 17
        found = kernel.decode_attention(
            q,
            pool,
            torch.arange(5).int()[None],
            torch.tensor([20]).int(),
            AttentionOptions(0.125, topk=0.27),
            form=form,
        )
        weights, _ = weights_of(q[0], held_k, 0.125)
        kept = torch.zeros(20, dtype=torch.bool)
        kept[torch.tensor([1, 3, 4, 7, 9, 19])] = True
        close(found[0], weighed(weights * kept, held_v))

    def test_all_values_is_dense(self, kernel: Kernels, bits: int | None) -> None:
        cache, q = cached(bits, 64), torch.randn(len(LENGTHS), 4, 64)
        everything = kernel.decode_attention(
            q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.125), form=cache.form
        )
        found = kernel.decode_attention(
            q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.125, topk=1.0), form=cache.form
        )
        torch.testing.assert_close(found, everything, atol=3e-6, rtol=3e-6)

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_denominators(self, kernel: Kernels, bits: int | None, options: dict[str, Any]) -> None:
        cache, q, options = cached(bits, 64), torch.randn(len(LENGTHS), 6, 64), given(options, 6)
        where = q, cache.pool, cache.tables, cache.lengths, AttentionOptions(0.125, **options), cache.form
        out, lse = attended(kernel, *where)
        assert torch.equal(out, kernel.decode_attention(*where))
        assert lse.dtype == torch.float32
        close(lse, torch.stack([weights_of(one, k, 0.125, **options)[1] for one, k in zip(q, cache.k, strict=True)]))

    def test_halves_merge_to_the_whole(self, kernel: Kernels, bits: int | None) -> None:
        """Each sequence's pages dealt out to two caches; sinks join one of them."""
        cache, q, sinks = cached(bits, 64, lengths=(64, 90, 1024, 2100)), torch.randn(4, 4, 64), torch.randn(4)

        def call(tables: Tensor, lengths: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return attended(kernel, q, cache.pool, tables, lengths, AttentionOptions(0.125, sinks=sinks), cache.form)

        first = cache.lengths // 64 * 32
        rest = torch.full_like(cache.tables, -7)
        for i, length in enumerate(first.tolist()):
            rest[i, : rest.shape[1] - length // 32] = cache.tables[i, length // 32 :]
        parts = [call(cache.tables, first, sinks=sinks), call(rest, cache.lengths - first)]
        whole, lse = call(cache.tables, cache.lengths, sinks=sinks)
        outs, lses = zip(*parts, strict=True)
        torch.testing.assert_close(merge(outs, lses), whole, atol=3e-6, rtol=3e-6)
        torch.testing.assert_close(torch.logsumexp(torch.stack(lses), 0), lse)


def test_a_part_without_keys_merges_to_the_others() -> None:
    out, lse = torch.randn(3, 4, 16).bfloat16(), torch.randn(3, 4)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    assert torch.equal(merge([out, nothing[0]], [lse, nothing[1]]), out)
