"""Attention whose scores get a number for each distance, over pages, against transformers' eager attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.inkling import modeling_inkling

from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.paged import PromptPieces
from flexengine.kernels.reference import ReferenceKernels
from flexengine.model.adapters.inkling import ByDistance
from flexengine.worker.cache import distances

PAGE, HEADS, KV_HEADS, DIM, RANK, EXTENT = 4, 4, 2, 8, 3, 6
SCALE = 1 / DIM
PAST = {"decode": 9, "new": 0, "same": 0, "piece": 11}  # tokens before
NEW = {"decode": 1, "new": 7, "same": 7, "piece": 3}
FIRST = {"decode": 0, "piece": 3, "new": 7, "same": 9}  # pages


def eager(q: Tensor, k: Tensor, v: Tensor, states: Tensor, profiles: Tensor, window: int | None) -> Tensor:
    """Return transformers' attention [queries, heads, dim] of the last tokens of a sequence. k, v: of all tokens."""
    module: Any = modeling_inkling.InklingRelativeLogits(RANK, EXTENT)
    module.proj.data = profiles
    at, keys = torch.arange(len(k) - len(q), len(k)), torch.arange(len(k))
    bias = module(states[None], at, keys)
    distance = at[:, None] - keys
    seen = (distance >= 0) & (distance < (window or len(k)))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    owner: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False)
    out: Tensor = modeling_inkling.eager_attention_forward(owner, *parts, mask, SCALE, position_bias=bias)[0]
    return out[0]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("most", [1 << 26, 1])
def test_numbers_by_distance_are_added_to_scores(
    window: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step, two new prompts and a later piece of one; queries together, and one by one."""
    monkeypatch.setattr(distances, "ADDED", most)
    torch.manual_seed(0)
    pool, profiles = torch.full((11, 2, KV_HEADS, PAGE, DIM), torch.nan), torch.randn(RANK, EXTENT)
    ring = 2 if window else len(pool)  # pages of a sequence, which repeat where a window leaves tokens behind
    whole = {name: [torch.randn(PAST[name] + NEW[name], KV_HEADS, DIM) for _ in range(2)] for name in PAST}
    tables, places = dict[str, Tensor](), list[tuple[int, int]]()
    for name, past in PAST.items():
        at = [(FIRST[name] + token // PAGE % ring, token % PAGE) for token in range(past + NEW[name])]
        for token, (page, offset) in enumerate(at[:past]):
            pool[page, :, :, offset] = torch.stack([x[token] for x in whole[name]])
        tables[name] = torch.tensor([page for page, offset in at[::PAGE]], dtype=torch.int32)
        places += at[past:]
    count = sum(NEW.values())
    q, states = torch.randn(count, HEADS, DIM), torch.randn(count, HEADS, RANK)
    k, v = (torch.cat([whole[name][i][PAST[name] :] for name in PAST]) for i in range(2))
    pages, offsets = torch.tensor(places, dtype=torch.int32).t().contiguous()
    view: Any = SimpleNamespace(
        lengths=torch.tensor([10], dtype=torch.int32), tables=tables["decode"][None], kept=None, pages=pages,
        offsets=offsets, prompts=[PromptPieces(1, 2, 7, 0, None), PromptPieces(15, 1, 3, 11, tables["piece"])],
    )  # fmt: skip
    options, added = AttentionOptions(SCALE, window), ByDistance(states, profiles)
    out, first = distances.attend(ReferenceKernels(), options, (q, k, v), pool, view, added), 0
    for name, new in NEW.items():
        some = slice(first, first + new)
        wanted = eager(q[some], *whole[name], states[some], profiles, window)
        torch.testing.assert_close(out[0, some], wanted, rtol=1e-5, atol=1e-5)
        first += new
    for token, (page, offset) in enumerate(places):
        assert torch.equal(pool[page, :, :, offset], torch.stack([k[token], v[token]]))
