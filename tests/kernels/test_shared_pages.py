"""Decode attention of sequences that share pages, whose rows native kernels read once for several sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels import Kernels
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.reference import ReferenceKernels
from tests.helpers.builds import NATIVE, attended
from tests.helpers.held import held
from tests.helpers.softmax import dense

KINDS: tuple[Any, ...] = (torch.float32, torch.bfloat16, torch.float16, 8, 4, 2)  # dtype or bits
Cache = tuple[CacheFormat | None, Tensor, Tensor, Tensor]  # format, pool, tables, lengths
# By sequence: tokens that it shares with the sequence before it, and its tokens. Parts of the kernels have 1024 tokens.
TREES: dict[str, list[tuple[int, int]]] = {
    "a prefix": [(0, 230), (192, 201), (192, 193), (192, 400), (192, 192 + 64)],
    "several parts": [(0, 2400), (2208, 2209), (2208, 3300), (2208, 2300)],
    "prefixes of prefixes": [(0, 1500), (1408, 1410), (1408, 1700), (1088, 1200), (1088, 1089), (96, 100), (96, 1300)],
    "equal sequences": [(0, 128), (128, 128), (128, 128)],
    "others between": [(0, 300), (256, 300), (0, 70), (0, 300), (256, 257), (32, 90)],
    "more than are computed together": [(0, 140), *[(128, 129 + i) for i in range(80)]],
}


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def cached(kind: Any, tree: list[tuple[int, int]], kv_heads: int, dim: int, page_tokens: int) -> Cache:
    """Return the format, the pool, the tables and the lengths of sequences on shuffled pages."""
    form = CacheFormat(kind, kv_heads, page_tokens, dim) if isinstance(kind, int) else None
    counts = [-(-length // page_tokens) for _, length in tree]
    free = torch.randperm(sum(counts) + 2).int().tolist()
    pool = torch.zeros(len(free), 2, kv_heads, page_tokens, dim, dtype=torch.float32 if form else kind)
    if form is not None:
        pool = torch.zeros(len(free), form.page_bytes, dtype=torch.uint8)
    tables = torch.full((len(tree), max(counts)), -7, dtype=torch.int32)
    for i, ((shared, length), count) in enumerate(zip(tree, counts, strict=True)):
        kept = shared // page_tokens
        tables[i, :kept] = tables[i - 1, :kept]
        tables[i, kept:count] = torch.tensor([free.pop() for _ in range(count - kept)], dtype=torch.int32)
        at = torch.arange(kept * page_tokens, length)
        fresh = torch.randn(2, len(at), kv_heads, dim).to(torch.float32 if form else kind)
        if len(at):
            ReferenceKernels().append(*fresh, pool, tables[i, at // page_tokens], (at % page_tokens).int(), form)
    return form, pool, tables, torch.tensor([length for _, length in tree], dtype=torch.int32)


def grown(cache: Cache) -> Cache:
    """Return a cache with at least 40 sequences, on the same pages: kernels share rows only if each thread keeps 8
    pairs of a sequence and a KV head."""
    form, pool, tables, lengths = cache
    order = torch.arange(len(lengths)).repeat_interleave(-(-40 // len(lengths)))
    return form, pool, tables[order], lengths[order]


@pytest.mark.parametrize("tree", TREES.values(), ids=list(TREES))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("kernel", NATIVE, indirect=True)
def test_result_is_that_of_each_sequence_alone(kernel: Kernels, kind: Any, tree: list[tuple[int, int]]) -> None:
    """Bitwise for any number of threads, and close to a softmax in float64."""
    for dim, kv_heads, group, page_tokens in ((64, 2, 3, 32), (80, 1, 1, 16), (32, 3, 8, 64)):
        form, pool, tables, lengths = grown(cached(kind, tree, kv_heads, dim, page_tokens))
        n = len(lengths)
        q, threads = torch.randn(n, kv_heads * group, dim), torch.get_num_threads()

        def call(part: slice) -> tuple[Tensor, Tensor]:
            where = q[part], pool, tables[part], lengths[part], AttentionOptions(dim**-0.5), form  # noqa: B023
            return attended(kernel, *where)

        try:
            torch.set_num_threads(1)
            out, lse = call(slice(None))
            for count in (1, 5):
                torch.set_num_threads(count)
                for i in range(count % 3, n, 3):
                    alone = call(slice(i, i + 1))
                    assert torch.equal(alone[0], out[i : i + 1]), (dim, count, i)
                    assert torch.equal(alone[1], lse[i : i + 1]), (dim, count, i)
        finally:
            torch.set_num_threads(threads)
        for i in range(0, n, 7):
            k, v = held(pool, tables[i], int(lengths[i]), form)
            torch.testing.assert_close(out[i].double(), dense(q[i : i + 1], k, v, dim**-0.5)[0], atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("kernel", NATIVE[:1], indirect=True)
@pytest.mark.parametrize("options", [{"window": 100}, {"window": 1500}, {"softcap": 2.0}, {"topk": 0.3}], ids=str)
def test_options_do_not_depend_on_sharing(kernel: Kernels, options: dict[str, Any]) -> None:
    """Sequences that are longer than the window begin at positions of their own."""
    form, pool, tables, lengths = grown(cached(torch.float32, TREES["prefixes of prefixes"], 2, 64, 32))
    q = torch.randn(len(lengths), 6, 64)
    out = kernel.decode_attention(q, pool, tables, lengths, AttentionOptions(0.125, **options), form=form)
    for i in range(len(lengths)):
        one = slice(i, i + 1)
        alone = kernel.decode_attention(
            q[one], pool, tables[one], lengths[one], AttentionOptions(0.125, **options), form=form
        )
        assert torch.equal(alone, out[one]), i
