"""Attention modules of transformers whose queries are computed before keys and values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexengine.model.build import build
from flexengine.model.forward import Attend, Pass, PausingLayer, Query, attend
from flexengine.model.linear import FastLinear, Product, use_product
from flexengine.model.queries import recorded, separable, use_queries_first

SIZE, HEADS = 8, 2
FUSED = {"phi3", "gpt2", "gpt-neox", "bloom"}


class Attention(nn.Module):
    """A module like those of transformers. mix: changes queries before the attention function."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.mix, self.layer_idx = mix, 0

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        q, k, v = (x.view(1, -1, HEADS, SIZE // HEADS).transpose(1, 2) for x in (self.mix(q, k), k, v))
        return self.o_proj(attend(self, q, k, v, None)[0].reshape(1, -1, SIZE))  # type: ignore[no-any-return]


def model_of(mix: Callable[[Tensor, Tensor], Tensor], device: str = "meta") -> nn.Module:
    """Return a model of one layer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(PausingLayer(nn.Sequential(Attention(mix)), 0)).requires_grad_(False)
    use_product(model, Product(torch.float32))
    return model


def paused(model: nn.Module, hidden: Tensor, queries_first: bool, answer: Tensor) -> tuple[list[Any], Tensor]:
    """Return the pauses of a pass at attention, and its result. answer: of the attention function."""
    current, events = Pass(model), list[Any]()
    current.queries_first = queries_first
    event = current.switch(hidden)
    while not current.dead:
        if isinstance(event, Query | Attend):
            events.append(event)
        event = current.switch(answer if isinstance(event, Attend) else getattr(event, "hidden", None))
    return events, event


def tried(model: nn.Module) -> bool:
    """Return whether the queries of a model can go first."""
    hidden = torch.empty(1, 3, SIZE, device="meta")
    with recorded(model) as calls:
        paused(model, hidden, False, torch.empty(1, 3, HEADS, SIZE // HEADS, device="meta"))
    return separable(calls)


def test_a_pass_is_the_same_with_queries_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same q, k, v and result to the bit, and no product is computed twice."""
    products = list[int]()
    forward = FastLinear.forward

    def counted(self: FastLinear, x: Tensor) -> Tensor:
        products.append(id(self))
        return forward(self, x)

    monkeypatch.setattr(FastLinear, "forward", counted)
    model = model_of(lambda q, k: 2 * q, "cpu")
    rng = torch.Generator().manual_seed(1)
    hidden, answer = torch.randn(1, 5, SIZE, generator=rng), torch.randn(1, 5, HEADS, SIZE // HEADS, generator=rng)
    (plain,), result = paused(model, hidden, False, answer)
    use_queries_first(model)
    use_queries_first(model)  # as for a second job
    for first in (True, False, True):
        products.clear()
        events, again = paused(model, hidden, first, answer)
        assert torch.equal(again, result)
        for mine, other in zip(events[-1][1:4], plain[1:4], strict=True):
            assert torch.equal(mine, other)
        assert len(products) == len(set(products)) == 4
        assert [type(event) for event in events] == ([Query, Attend] if first else [Attend])
        if first:
            assert torch.equal(events[0].attend.q, plain.q)
            assert events[0].attend.k.shape == plain.k.shape
            assert not events[0].attend.k.any()


def test_passes_of_several_gpu_batches_take_turns() -> None:
    """A pass that is between its two runs keeps its own queries."""
    model = model_of(lambda q, k: q, "cpu")
    use_queries_first(model)
    passes, found = [Pass(model), Pass(model)], list[Any]()
    for number, each in enumerate(passes):
        each.queries_first = True
        hidden = torch.full((1, 2, SIZE), float(number + 1))
        each.switch(hidden)
        found.append(each.switch(hidden))
    for query, each in zip(found, passes, strict=True):
        event = each.switch()
        assert torch.equal(event.q, query.attend.q)
        each.throw()
    assert not torch.equal(found[0].attend.q, found[1].attend.q)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        (lambda q, k: q, True),
        (lambda q, k: q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True)), True),  # a norm
        (lambda q, k: q.clamp_(-1, 1), True),  # the same if done twice
        (lambda q, k: q.mul_(2), False),  # in place, so not the same if done twice
        (lambda q, k: q + k, False),
        (lambda q, k: q * (k.mean() > 0), False),
    ],
    ids=["plain", "norm", "clamp", "in place", "sum", "condition"],
)
def test_a_trial_finds_queries_that_depend_on_keys(mix: Any, expected: bool) -> None:
    model = model_of(mix)
    assert tried(model) is expected
    assert type(model[0].layer[0].q_proj).forward is FastLinear.forward  # type: ignore[union-attr,index]
    assert "forward" not in vars(model[0].layer[0].q_proj)  # type: ignore[union-attr,index]


def test_a_layer_without_three_projections_is_refused() -> None:
    model = model_of(lambda q, k: q)
    model[0].layer[0].k_proj = nn.Identity()  # type: ignore[union-attr,index]
    assert not tried(model)


def test_families(families: Any, tmp_path: Path) -> None:
    """Families with one projection for all three compute queries together with keys and values."""
    for name in ("opt", "llama", "qwen3", "gemma2", "gpt-oss", "qwen3-moe", *FUSED):
        skeleton = build(families(name).directory, torch.float32)
        assert skeleton.queries_apart is (name not in FUSED), name
