"""Attention of prompt pieces whose earlier tokens lie in pages: against sums in float64 over what the pages hold."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.errors import InvalidInput
from flexengine.kernels import Kernels
from flexengine.kernels.base import AttentionOptions, Past, PromptCall
from flexengine.kernels.reference import ReferenceKernels
from tests.helpers.builds import NATIVE, ONE_BUILD, kernels_named
from tests.helpers.held import held

KINDS: tuple[Any, ...] = (torch.float32, torch.bfloat16, torch.float16, 8, 4, 2)  # dtype or bits
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"window": 40}, {"window": 3}, {"softcap": 2.0}, {"sinks": True}, {"window": 90, "softcap": 3.0, "sinks": True},
)  # fmt: skip


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def cached(kind: Any, length: int, kv_heads: int, dim: int, page_tokens: int = 16) -> tuple[Past, Tensor, Tensor]:
    """Random tokens on shuffled pages, with K and V [length, kv_heads, dim] as the pages hold them. What lies beyond
    the last token is NaN."""
    count = -(-length // page_tokens)
    table = torch.randperm(count + 2)[:count].int()
    if isinstance(kind, int):
        form = CacheFormat(kind, kv_heads, page_tokens, dim)
        pool = torch.full((count + 2, form.page_bytes), 255, dtype=torch.uint8)
    else:
        form, pool = None, torch.full((count + 2, 2, kv_heads, page_tokens, dim), math.nan, dtype=kind)
    at, plain = torch.arange(length), ReferenceKernels()
    plain.append(*torch.randn(2, length, kv_heads, dim), pool, table[at // page_tokens], (at % page_tokens).int(), form)
    k, v = held(pool, table, length, form)
    return Past(pool, table, length, form), k.float(), v.float()


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window=None, softcap=None, sinks=None) -> Tensor:
    """q [T, heads, dim] at the last T positions of k, v [S, kv_heads, dim]; float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(len(k))[-len(q) :, None], torch.arange(len(k))
    seen = (key <= position) & (key > position - (window or len(k)))
    weights = scores.exp() * seen
    total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp()[:, None])
    return torch.einsum("hts,shd->thd", weights / total[..., None], v)


def agree(kernel: Kernels, kind: Any, heads: tuple[int, int, int], past: int, count: int, **options: Any) -> None:
    """One piece of `count` tokens after `past` cached ones. heads: of queries, of keys, their width."""
    (n, kv_heads, dim), page_tokens = heads, options.pop("page_tokens", 16)
    given, old_k, old_v = cached(kind, past, kv_heads, dim, page_tokens)
    q = torch.randn(n, count, dim).transpose(0, 1)
    k, v = torch.randn(2, count, kv_heads, dim + 4)[..., :dim]
    if "sinks" in options:
        options["sinks"] = torch.randn(n)
    found = kernel.attend_prompt(q[None], k[None], v[None], AttentionOptions(dim**-0.5, **options), past=given)
    assert found.dtype == q.dtype
    assert found.is_contiguous()
    expected = dense(q, torch.cat([old_k, k]), torch.cat([old_v, v]), dim**-0.5, **options)
    torch.testing.assert_close(found[0].double(), expected, atol=4e-6, rtol=4e-6)


class TestPieces:
    """Tests that every set of kernels must pass."""

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (6, 1, 24), (2, 2, 256)], ids=str)
    def test_formats_and_heads(self, kernel: Kernels, kind: Any, heads: tuple[int, int, int]) -> None:
        agree(kernel, kind, heads, past=100, count=37)

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("kind", [torch.float32, 4], ids=str)
    def test_options(self, kernel: Kernels, kind: Any, options: dict[str, Any]) -> None:
        agree(kernel, kind, (4, 2, 32), past=150, count=20, **options)

    def test_prompts_of_several_lengths(self, kernel: Kernels) -> None:
        """Together they are the same as alone, and written in place."""
        given, _, _ = cached(8, 70, 2, 32)
        shapes: list[tuple[int, int, Past | None]] = [(3, 20, None), (1, 300, None), (1, 33, given), (2, 1, None)]
        prompts = []
        for rows, count, past in shapes:
            q, (k, v) = torch.randn(rows, count, 4, 32), torch.randn(2, rows, count, 2, 32)
            prompts.append(PromptCall(q, k, v, torch.full(q.shape, math.nan), past))
        options: dict[str, Any] = {"window": 50, "softcap": 3.0, "sinks": torch.randn(4)}
        kernel.attend_prompts(prompts, AttentionOptions(0.2, **options))
        for q, k, v, out, past in prompts:
            assert torch.equal(out, kernel.attend_prompt(q, k, v, AttentionOptions(0.2, **options), past=past))
        kernel.attend_prompts([], AttentionOptions(0.2))

    def test_memory_of_the_result_must_fit(self, kernel: Kernels) -> None:
        q, (k, v) = torch.randn(1, 9, 4, 32), torch.randn(2, 1, 9, 2, 32)
        expected = kernel.attend_prompt(q, k, v, AttentionOptions(0.2))
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.zeros(q.shape, dtype=dtype)
            given = [x.to(dtype) for x in (q, k, v)]
            assert kernel.attend_prompt(*given, AttentionOptions(0.2), out=out) is out
            assert torch.equal(out, expected) if dtype == q.dtype else out.any()
        for wrong in (out, torch.zeros(1, 8, 4, 32), torch.zeros(1, 9, 32, 4).transpose(2, 3)):
            with pytest.raises(InvalidInput, match="out is"):
                kernel.attend_prompt(q, k, v, AttentionOptions(0.2), out=wrong)

    def test_a_bad_page_is_found_before_anything_is_written(self, kernel: Kernels) -> None:
        given, _, _ = cached(torch.float32, 70, 2, 32)
        q, (k, v) = torch.randn(1, 9, 4, 32), torch.randn(2, 1, 9, 2, 32)
        outs = torch.zeros(2, *q.shape)
        wrong = given._replace(table=given.table + 1000)
        with pytest.raises(InvalidInput, match="page"):
            kernel.attend_prompts(
                [PromptCall(q, k, v, outs[0]), PromptCall(q, k, v, outs[1], wrong)], AttentionOptions(0.2)
            )
        assert not outs[1].any()
        if kernel.name == "native":
            assert not outs.any()

    @pytest.mark.parametrize(("past", "count"), [(1, 1), (16, 1), (63, 70), (64, 64), (130, 300)])
    @pytest.mark.parametrize("page_tokens", [1, 16, 100])
    def test_borders(self, kernel: Kernels, past: int, count: int, page_tokens: int) -> None:
        agree(kernel, torch.float32, (3, 3, 20), past, count, page_tokens=page_tokens)

    @pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, 8, 2], ids=str)
    @pytest.mark.parametrize(("past", "count", "window"), [(150, 20, 40), (300, 9, 3), (200, 130, 90), (65, 1, 2)])
    def test_pages_before_the_window_are_never_looked_at(
        self, kernel: Kernels, kind: Any, past: int, count: int, window: int
    ) -> None:
        """They hold NaN, and lie on one page."""
        whole, old_k, old_v = cached(kind, past, 2, 32)
        gone = max(0, past + 1 - window) // 16
        pool, table = whole.pool.clone(), whole.table.clone()
        spare = next(page for page in range(len(pool)) if page not in table)
        pool[spare] = math.nan if pool.is_floating_point() else 255
        table[:gone] = spare
        q, (k, v) = torch.randn(count, 4, 32), torch.randn(2, count, 2, 32)
        given = whole._replace(pool=pool, table=table)
        found = kernel.attend_prompt(q[None], k[None], v[None], AttentionOptions(0.2, window=window), past=given)
        expected = dense(q, torch.cat([old_k, k]), torch.cat([old_v, v]), 0.2, window)
        torch.testing.assert_close(found[0].double(), expected, atol=4e-6, rtol=4e-6)

    def test_in_small_blocks(self, kernel: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flexengine.kernels.reference.SCORES", 4 * 40 * 7)
        monkeypatch.setattr("flexengine.kernels.reference.CACHED", 2 * 2 * 32 * 40)
        for options in OPTIONS:
            agree(kernel, 8, (4, 2, 32), past=150, count=100, **options)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, kernel: Kernels, dtype: torch.dtype) -> None:
        past, k, v = cached(dtype, 50, 2, 64)
        q, (new_k, new_v) = torch.randn(1, 9, 4, 64).to(dtype), torch.randn(2, 1, 9, 2, 64).to(dtype)
        found = kernel.attend_prompt(q, new_k, new_v, AttentionOptions(0.125), past=past)
        assert found.dtype == dtype
        expected = dense(q[0], torch.cat([k, new_k[0].float()]), torch.cat([v, new_v[0].float()]), 0.125)
        torch.testing.assert_close(found[0].double(), expected, atol=1e-2, rtol=1e-2)
        mixed, wide = (kernel.attend_prompt(q.float(), x, y, AttentionOptions(0.125), past=past)
                       for x, y in ((new_k, new_v), (new_k.float(), new_v.float())))  # fmt: skip
        assert torch.equal(mixed, wide)

    @ONE_BUILD
    def test_misfits_are_refused(self, kernel: Kernels) -> None:
        past, _, _ = cached(torch.float32, 50, 2, 64)
        q, k = torch.randn(1, 9, 4, 64), torch.randn(1, 9, 2, 64)
        for wrong in (past._replace(length=0), past._replace(length=65), past._replace(table=past.table[:3])):
            with pytest.raises(InvalidInput, match=r"cached tokens and .* pages"):
                kernel.attend_prompt(q, k, k, AttentionOptions(0.125), past=wrong)
        with pytest.raises(InvalidInput, match="does not continue"):
            kernel.attend_prompt(q[..., :32], k[..., :32], k[..., :32], AttentionOptions(0.125), past=past)
        with pytest.raises(InvalidInput, match="does not continue"):
            kernel.attend_prompt(*(torch.cat([x, x]) for x in (q, k, k)), AttentionOptions(0.125), past=past)

    @ONE_BUILD
    def test_unknown_pages_are_refused(self, kernel: Kernels) -> None:
        past, _, _ = cached(torch.float32, 50, 2, 64)
        k = torch.randn(1, 9, 2, 64)
        for page in (-1, len(past.pool)):
            table = past.table.clone()
            table[2] = page
            with pytest.raises(InvalidInput, match="pages among"):
                kernel.attend_prompt(k, k, k, AttentionOptions(0.125), past=past._replace(table=table))

    @pytest.mark.slow
    def test_scratch_is_bounded_whatever_the_past(self, kernel: Kernels) -> None:
        """Tensors alive at once beside the arguments and the result, for pasts of 1k and 6k tokens."""
        q, k = torch.randn(1, 64, 8, 64), torch.randn(1, 64, 8, 64)
        bound = kernel.prompt_scratch(8, 8, 64) + q.nbytes
        for kind in (torch.float32, 4):
            for length in (1000, 6000):
                past, _, _ = cached(kind, length, 8, 64)
                held = most_alive(lambda past=past: kernel.attend_prompt(q, k, k, AttentionOptions(0.125), past=past))  # type: ignore[misc]
                assert held - q.nbytes <= min(bound, 2**26)
                assert held >= q.nbytes
                if kernel.name == "native":
                    assert held < q.nbytes + 4096

    def test_scratch_is_bounded_for_many_queries_and_few_keys(self, kernel: Kernels) -> None:
        """Long pieces after a short past: blocks of 16 keys, whose queries and sums take more than the scores."""
        q, k = torch.randn(1, 1500, 16, 128), torch.randn(1, 1500, 4, 128)
        past, _, _ = cached(torch.float32, 16, 4, 128)
        held = most_alive(lambda: kernel.attend_prompt(q, k, k, AttentionOptions(0.125), past=past))
        assert held - q.nbytes <= kernel.prompt_scratch(16, 4, 128)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("name", NATIVE)
def test_bits_depend_on_nothing_beside_a_query(name: str, window: int | None, rounded: bool) -> None:
    """Not on where a prompt is cut, on how many prompts or threads there are."""
    kernel, options = kernels_named(name), AttentionOptions(0.2, window=window, rounded=rounded)
    for heads, kv_heads, dim in ((4, 4, 40), (6, 2, 64), (3, 3, 64), (9, 3, 64), (1, 1, 19)):
        past, k, v = cached(torch.float32, 300, kv_heads, dim)
        q = torch.randn(300, heads, dim)
        whole = kernel.attend_prompt(q[None], k[None], v[None], options)[0]
        for low, high in ((16, 300), (130, 131), (64, 200)):
            piece = kernel.attend_prompt(
                *(x[None, low:high] for x in (q, k, v)),
                options,
                past=past._replace(length=low),
            )
            assert torch.equal(piece[0], whole[low:high])
        pair = kernel.attend_prompt(*(torch.stack([x.flip(0), x]) for x in (q, k, v)), options)
        assert torch.equal(pair[1], whole)
        torch.set_num_threads(1)
        assert torch.equal(kernel.attend_prompt(q[None], k[None], v[None], options)[0], whole)
        torch.set_num_threads(2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_rounded_products(name: str, options: dict[str, Any]) -> None:
    """Against sums in float64 over numbers that torch rounds to bf16, where the CPU multiplies pairs of them. A weight
    is off by at most 2^-9 of itself, as it is rounded too. Other CPUs compute as exactly as without rounding."""
    kernel, sinks = kernels_named(name), options.get("sinks")
    shapes = ((9, 3, 64, 70, 130), (4, 4, 37, 0, 200), (8, 1, 80, 0, 65), (2, 2, 128, 9, 1))
    for heads, kv_heads, dim, past, count in shapes:
        given, old_k, old_v = cached(8, past, kv_heads, dim) if past else (None, *torch.zeros(2, 0, kv_heads, dim))
        q, (k, v) = torch.randn(count, heads, dim), torch.randn(2, count, kv_heads, dim)
        more = options | ({"sinks": torch.randn(heads)} if sinks else {})
        asked = AttentionOptions(dim**-0.5, **more, rounded=True)
        found = kernel.attend_prompt(q[None], k[None], v[None], asked, given)[0].double()
        every_k, every_v = torch.cat([old_k, k]), torch.cat([old_v, v])
        if kernel.bf16:
            factor = dim**-0.5 * (1.0 if "softcap" in options else math.log2(math.e))
            q, every_k, every_v = (x.bfloat16().float() for x in (q * factor, every_k, every_v))
            most = dense(q, every_k, every_v.abs(), dim**-0.5 / factor, **more)
            exact = dense(q, every_k, every_v, dim**-0.5 / factor, **more)
            assert ((found - exact).abs() <= 2.0**-8 * most + 1e-5).all()
            assert (found - exact).abs().max() > 1e-6  # weights are rounded
        else:
            torch.testing.assert_close(found, dense(q, every_k, every_v, dim**-0.5, **more), atol=4e-6, rtol=4e-6)


def most_alive(call: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator had given out at once during `call`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(accumulate(changes), default=0)
