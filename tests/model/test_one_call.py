"""Whole layers, and several layers, as one call of native kernels: the bits of layers that pause at attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine import kernels
from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import AttentionOptions, Past
from flexengine.kernels.paged import PagedAttention, PagedTokens, PromptPieces
from flexengine.model.forward import Attend, Inputs, Layer, Pass, PausingLayer
from flexengine.model.native.layer import MOST_PRODUCTS
from flexengine.model.skeleton import Skeleton
from tests.helpers.native_layers import NATIVE_FAMILIES, arguments, called, changed, opened


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def pool_of(kind: str, kv_heads: int, dim: int, pages: int = 12) -> tuple[Tensor, CacheFormat | None]:
    """Return a random pool of pages of 4 tokens, and its format."""
    values = torch.randn(pages, 2, kv_heads, 4, dim)
    if kind != "int8":
        return values.to(getattr(torch, kind)), None
    form = CacheFormat(8, kv_heads, 4, dim)
    pool = torch.zeros(pages, form.page_bytes, dtype=torch.uint8)
    for page in range(pages):
        k, v = (values[page, i].transpose(0, 1) for i in range(2))
        kernels.load().append(k, v, pool, torch.full((4,), page).int(), torch.arange(4).int(), form)
    return pool, form


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_a_layer_that_decodes_is_one_call(families: Any, family: str, kind: str, window: int | None) -> None:
    """It appends, and computes the bits of a layer that pauses at attention."""
    skeleton, layers = opened(families(family).directory)
    hidden, positions = arguments(skeleton, 3)
    heads, kv_heads, dim, _ = layers[0].native.sizes
    pool, form = pool_of(kind, kv_heads, dim)
    tables = torch.tensor([[3, 0, 0], [7, 1, 9], [2, 5, 0]]).int()
    lengths = torch.tensor([1, 10, 8]).int()
    pages, offsets = torch.tensor([3, 9, 5]).int(), torch.tensor([0, 1, 3]).int()
    kernel, results = kernels.load(), []
    for whole in (False, True):
        own = pool.clone()
        current = Pass(lambda: called(layers[0], hidden, positions))
        assert isinstance(current.switch(), Layer)
        found = kernel.paged(heads, own, PagedTokens(tables, lengths, pages, offsets), window, form)
        current.paged = [found] if whole else []
        event = current.switch(hidden)
        if not whole:
            assert isinstance(event, Attend)
            q, k, v = (x[0].transpose(0, 1) for x in event[1:4])
            kernel.append(k, v, own, pages, offsets, form)
            out = kernel.decode_attention(
                q, own, tables, lengths, AttentionOptions(event.scale, window, event.softcap), form
            )
            event = current.switch(out[None])
        assert current.dead
        results.append((event, own))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


class Mixed:
    """A gpu_batch of two sequences that decode, a prompt with cached tokens, and two prompts without.

    Args:
        layer: a layer of the model.
        length: tokens of each of the last two prompts.
    """

    def __init__(self, layer: PausingLayer, kind: str, length: int) -> None:
        self.heads, kv_heads, self.dim, _ = layer.native.sizes
        self.rounded = kind == "bfloat16"  # one of the formats shows that calls pass it on
        own = -(-length // 4)  # pages of a prompt
        self.pool, self.form = pool_of(kind, kv_heads, self.dim, 12 + 2 * own)
        self.tables, self.lengths = torch.tensor([[3, 0], [7, 1]]).int(), torch.tensor([1, 6]).int()
        at = torch.arange(length)
        self.pages = torch.cat([torch.tensor([3, 1, 10, 10, 11]), *(12 + i * own + at // 4 for i in range(2))]).int()
        self.offsets = torch.cat([torch.tensor([0, 1, 2, 3, 0]), at % 4, at % 4]).int()
        table = torch.tensor([8, 10, 11]).int()
        self.prompts = [PromptPieces(2, 1, 3, 6, table), PromptPieces(5, 2, length, 0, None)]
        self.tokens = 5 + 2 * length

    def paged(self, pool: Tensor, window: int | None = None) -> PagedAttention:
        tokens = PagedTokens(self.tables, self.lengths, self.pages, self.offsets, self.prompts)
        found = kernels.load().paged(self.heads, pool, tokens, window, self.form, rounded=self.rounded)
        assert found is not None
        return found

    def attended(self, event: Attend, pool: Tensor, window: int | None = None) -> Tensor:
        """Return attention by a call for each part of the gpu_batch, and append the tokens."""
        kernel, options = kernels.load(), AttentionOptions(event.scale, window, event.softcap, rounded=self.rounded)
        q, k, v = (x[0].transpose(0, 1) for x in event[1:4])
        kernel.append(k[:2], v[:2], pool, self.pages[:2], self.offsets[:2], self.form)
        parts = [kernel.decode_attention(q[:2], pool, self.tables, self.lengths, options, self.form)]
        for p in self.prompts:
            own = [x[p.first :][: p.rows * p.length].unflatten(0, (p.rows, p.length)) for x in (q, k, v)]
            past = None if p.table is None else Past(pool, p.table, p.past, self.form)
            parts.append(kernel.attend_prompt(*own, options, past).flatten(0, 1))
        kernel.append(k[2:], v[2:], pool, self.pages[2:], self.offsets[2:], self.form)
        return torch.cat(parts)[None]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("length", [4, 400])
def test_a_layer_with_prompts_is_one_call(
    families: Any, family: str, kind: str, window: int | None, length: int
) -> None:
    """It computes the bits of a layer that pauses at attention, also if it computes rows in several parts."""
    skeleton, layers = opened(families(family).directory)
    mixed, results = Mixed(layers[0], kind, length), []
    hidden, positions = arguments(skeleton, mixed.tokens)
    for whole in (False, True, True):
        pool = mixed.pool.clone()
        current = Pass(lambda: called(layers[0], hidden, positions))
        assert isinstance(current.switch(), Layer)
        current.paged = [mixed.paged(pool, window)] if whole else []
        event = current.switch(hidden)
        if not whole:
            assert isinstance(event, Attend)
            event = current.switch(mixed.attended(event, pool, window))
        assert current.dead
        results.append((event, pool))
    for out, pool in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(pool, results[0][1])


def test_a_call_recorded_for_prompts_without_cached_tokens_reads_cached_ones(families: Any) -> None:
    skeleton, layers = opened(families("llama").directory)
    mixed, results = Mixed(layers[0], "float32", 4), []
    hidden, positions = arguments(skeleton, mixed.tokens)
    cached, other = mixed.prompts
    for whole in (False, True):
        for prompts in ([PromptPieces(2, 1, 3, 0, None), other], [cached, other]):
            mixed.prompts, pool = prompts, mixed.pool.clone()
            current = Pass(lambda: called(layers[0], hidden, positions))
            current.switch()
            current.paged = [mixed.paged(pool)] if whole else []
            event = current.switch(hidden)
            results.append(event if whole else current.switch(mixed.attended(event, pool)))
    assert len(layers[0].native.kind._calls) == 3  # before, after, whole
    assert all(torch.equal(one, two) for one, two in zip(results[:2], results[2:], strict=True))
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("length", [4, 300])  # many layers in a parallel region, and several regions per layer
@pytest.mark.parametrize("most", [MOST_PRODUCTS, 1])
def test_layers_with_prompts_are_one_call_except_the_last(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, length: int
) -> None:
    """A call has a limit of work. Of the last layer, only rows with logits are computed."""
    monkeypatch.setattr("flexengine.model.native.layer.MOST_PRODUCTS", most)
    skeleton, layers = opened(changed(families("llama").directory, tmp_path / "m", "Llama", num_hidden_layers=6))
    mixed, count, results = Mixed(layers[0], "float32", length), len(layers), []
    hidden, positions = arguments(skeleton, mixed.tokens)
    keep = torch.tensor([0, 1, 4, mixed.tokens - 1])

    def model() -> Tensor:
        x = hidden
        for layer in layers:
            x = called(layer, x, positions)
        return x

    for ahead, paused in ((1, [*range(count)]), (count, [0, count - 1] if most > 1 else [*range(count)]), (0, None)):
        pools = [mixed.pool + number for number in range(count)]
        paged = mixed.paged(pools[0])  # all layers share its memory
        current, seen, attended = Pass(model), list[int](), list[int]()
        current.inputs = Inputs(keep[None], keep[None], keep)
        event: Any = current.switch()
        while not current.dead:
            if isinstance(event, Attend):
                attended.append(seen[-1])
                event = current.switch(mixed.attended(event, pools[seen[-1]]))
                continue
            seen.append(event.index)
            current.paged = [paged._replace(pool=pool) for pool in pools[event.index :][:ahead]]
            event = current.switch(event.hidden)
        assert paused is None or (seen, attended) == (paused, [count - 1])
        results.append((event[:, keep], torch.stack(pools)))
    for out, pool in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(pool, results[0][1])


class Decoded:
    """Three sequences that decode in all layers of a model, with pages of its own for each layer."""

    def __init__(self, skeleton: Skeleton, layers: list[PausingLayer]) -> None:
        self.layers = layers
        self.hidden, self.positions = arguments(skeleton, 3)
        heads, kv_heads, dim, _ = layers[0].native.sizes
        self.pools = [torch.randn(12, 2, kv_heads, 4, dim) for _ in layers]
        tables, lengths = torch.tensor([[3, 0, 0], [7, 1, 9], [2, 5, 0]]).int(), torch.tensor([1, 10, 8]).int()
        places = torch.tensor([3, 9, 5]).int(), torch.tensor([0, 1, 3]).int()
        first = kernels.load().paged(heads, self.pools[0], PagedTokens(tables, lengths, *places))
        self.paged = [first._replace(pool=pool) for pool in self.pools]

    def ran(self, ahead: int, change: Any = lambda number, x: x) -> tuple[Tensor, list[int]]:
        """Return the output, and the numbers of the layers at which the pass paused.

        Args:
            ahead: layers whose pages the pass gets at each pause.
            change: gets the number of each layer and its input, and returns what the layer gets.
        """

        def model() -> Tensor:
            x = self.hidden
            for number, layer in enumerate(self.layers):
                x = called(layer, change(number, x), self.positions)
            return x

        current, seen = Pass(model), list[int]()
        event: Any = current.switch()
        while not current.dead:
            assert isinstance(event, Layer)
            seen.append(event.index)
            current.paged = self.paged[event.index :][:ahead]
            event = current.switch(event.hidden)
        return event, seen


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_layers_that_decode_are_one_call(families: Any, family: str) -> None:
    """Layers are computed together once a pass has shown that each gets the output of the one before."""
    decoded = Decoded(*opened(families(family).directory))
    count, start = len(decoded.layers), [pool.clone() for pool in decoded.pools]
    results = []
    for ahead, paused in ((count, [*range(count)]), (1, [*range(count)]), (count, [0]), (2, [*range(0, count, 2)])):
        for pool, values in zip(decoded.pools, start, strict=True):
            pool.copy_(values)
        out, seen = decoded.ran(ahead)
        assert seen == paused
        results.append((out, [pool.clone() for pool in decoded.pools]))
    for out, pools in results[1:]:
        assert torch.equal(out, results[0][0])
        assert all(torch.equal(one, other) for one, other in zip(pools, results[0][1], strict=True))


def test_layers_with_work_between_them_are_not_one_call(families: Any) -> None:
    decoded = Decoded(*opened(families("llama").directory))
    count = len(decoded.layers)

    def scaled(number: int, x: Tensor) -> Tensor:
        return x * 2 if number == 1 else x

    for _ in range(2):
        _, seen = decoded.ran(count, scaled)
    assert seen == [0, 1]
    decoded.ran(count)  # now the layers are joined
    with pytest.raises(RuntimeError, match="layer 1 was computed ahead"):
        decoded.ran(count, scaled)
