"""Attention over chosen keys in pages, against a masked softmax over all keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.kernels import load
from flexengine.kernels.base import AttentionOptions, Kernels
from flexengine.kernels.paged import PromptPieces
from flexengine.kernels.reference import ReferenceKernels
from flexengine.model.adapters.sparse import ChosenKeys
from flexengine.worker.cache import chosen
from flexengine.worker.cache.tables import Tables
from tests.worker.test_gpu_buffers import held

HEADS, KV_HEADS, PAGE, DIM, TOP = 4, 2, 5, 16, 7
# (tokens before, new tokens): decode steps below and beyond TOP, prompts of equal length, and two later pieces.
PIECES = [(3, 1), (22, 1), (6, 1), (7, 1), (0, 11), (0, 11), (4, 12), (13, 9)]
DECODE = 4


@pytest.fixture(params=[ReferenceKernels, load])
def kernel(request: pytest.FixtureRequest, two_threads: None) -> Any:
    return request.param()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1, 1 << 20])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_chosen_keys(
    kernel: Kernels, dtype: torch.dtype, most: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "MOST_BYTES", most)
    torch.manual_seed(0)
    ends = [past + count for past, count in PIECES]
    pages = [-(-end // PAGE) for end in ends]
    ids = torch.randperm(sum(pages) + 2)[: sum(pages)].int()  # no sequence reads the other two pages
    owned = torch.split(ids, pages)
    pool = torch.full((sum(pages) + 2, 2, KV_HEADS, PAGE, DIM), torch.nan, dtype=dtype)
    whole = [torch.randn(2, end, KV_HEADS, DIM).to(dtype).float() for end in ends]
    for (past, _), table, kv in zip(PIECES, owned, whole, strict=True):
        for s in range(past):
            pool[table[s // PAGE], :, :, s % PAGE] = kv[:, s].to(dtype)
    k, v = torch.cat([kv[:, past:] for (past, _), kv in zip(PIECES, whole, strict=True)], 1)
    q = torch.randn(len(k), HEADS, DIM)
    places = [(table[s // PAGE], s % PAGE) for (past, _), table, end in zip(PIECES, owned, ends, strict=True)
              for s in range(past, end)]  # fmt: skip
    tables = Tables(
        torch.nn.utils.rnn.pad_sequence([*owned[:DECODE]], batch_first=True), torch.tensor(ends[:DECODE]).int(),
        *(torch.tensor(column).int() for column in zip(*places, strict=True)), None,
        [PromptPieces(4, 2, 11, 0, None), PromptPieces(26, 1, 12, 4, owned[6]), PromptPieces(38, 1, 9, 13, owned[7])],
        [], [], [],
    )  # fmt: skip
    positions = torch.cat([torch.arange(past, end) for (past, _), end in zip(PIECES, ends, strict=True)])
    tokens = (positions >= TOP).nonzero()[:, 0]
    picked = torch.stack([torch.randperm(int(p) + 1)[:TOP].sort().values for p in positions[tokens]]).int()
    options = AttentionOptions(0.3, sinks=torch.randn(HEADS) if sinks else None)
    found = chosen.attend(kernel, options, (q, k, v), pool, tables, ChosenKeys(tokens, picked, None))
    expected, first = torch.empty(q.shape), 0
    for (past, count), kv in zip(PIECES, whole, strict=True):
        for i in range(first, first + count):
            seen = picked[tokens == i][0].long() if i in tokens else torch.arange(past + i - first + 1)
            expected[i] = _plain(q[i], kv[:, seen], options)
        first += count
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


def test_places_of_chosen_keys_take_4_bytes_each() -> None:
    """Beside the result, what is held does not grow with the number of chosen keys."""
    count, top = 2000, 200
    pool, numbers = torch.empty(500, 2, 1, PAGE, 8), torch.arange(count).int()
    table, one = torch.empty(0, 0).int(), torch.empty(0).int()
    prompts = [PromptPieces(0, 1, count, 0, None)]
    tables = Tables(table, one, numbers // PAGE + 3, numbers % PAGE, None, prompts, [], [], [])
    tokens = torch.arange(top, count)
    picked = torch.stack([torch.randperm(int(p) + 1)[:top].sort().values for p in tokens]).int()
    choice = ChosenKeys(tokens, picked, None)
    assert torch.equal(chosen._places(pool, tables, choice), picked + 3 * PAGE)
    assert held(lambda: chosen._places(pool, tables, choice), picked, tokens) < 64 * count


def _plain(q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of one query [heads, dim] over kv [2, keys, kv_heads, dim]."""
    k, v = kv.repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("hd,khd->hk", q, k) * options.scale
    sinks = torch.empty(HEADS, 0) if options.sinks is None else options.sinks[:, None]
    return torch.einsum("hk,khd->hd", torch.cat([scores, sinks], 1).softmax(1)[:, : len(k)], v)
