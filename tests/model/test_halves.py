"""Layers as calls of native kernels: which ones are, and that they compute what transformers' modules compute."""

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import Past
from flexengine.kernels.paged import PagedAttention, Prompts
from flexengine.kernels.reference import ReferenceKernels
from flexengine.model.forward import Attend, Inputs, Layer, Pass, PausingLayer
from flexengine.model.halves import MOST_PRODUCTS, release
from flexengine.model.linear import FastLinear
from flexengine.model.neurons import RecordDown
from flexengine.model.queries import use_queries_first
from flexengine.model.skeleton import Skeleton, build

HALVED = ("llama", "mistral", "qwen2", "qwen3", "opt")
CLOSE = ("opt",)  # not to the bit: torch computes layer norms by another order of sums
OTHERS = ("gemma2", "gemma3", "phi3", "gpt2", "olmo2", "mixtral", "gpt-oss", "bloom")
TOKENS = 5


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def opened(directory: Path) -> tuple[Skeleton, list[PausingLayer]]:
    """Return a skeleton whose layers have random weights, and the layers."""
    skeleton = build(directory, torch.float32)
    for layer in skeleton.layers:
        for slot in layer.values():
            values = torch.randn(slot.shape) * (0.2 if len(slot.shape) > 1 else 1.0)
            slot.bind(nn.Parameter(values, requires_grad=False))
    return skeleton, [module for module in skeleton.model.modules() if isinstance(module, PausingLayer)]


def changed(directory: Path, target: Path, kind: str, **fields: Any) -> Path:
    """Copy a checkpoint, with another architecture in its config."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), **fields}
    (target / "config.json").write_text(json.dumps(config))
    return target


def arguments(skeleton: Skeleton, tokens: int = TOKENS) -> tuple[Tensor, Any]:
    """Return hidden states, and cosines and sines of a layer; None if its positions are not rotary."""
    config = skeleton.config.get_text_config()
    width, dim = config.hidden_size, getattr(config, "head_dim", None) or skeleton.cache.head_dim
    if config.model_type == "opt":
        return torch.randn(1, tokens, width), None
    return torch.randn(1, tokens, width), (torch.randn(1, tokens, dim), torch.randn(1, tokens, dim))


def called(layer: PausingLayer, hidden: Tensor, positions: Any) -> Any:
    return layer(hidden) if positions is None else layer(hidden, position_embeddings=positions)


def ran(
    layer: PausingLayer, hidden: Tensor, positions: Any, halves: bool = True, keep: Tensor | None = None
) -> list[Tensor]:
    """Return q times the scale of attention, k, v and the output of a layer.

    Args:
        halves: whether it may be computed as two calls.
        keep: tokens with logits; None for all.
    """
    kept, layer.halves = layer.halves, layer.halves if halves else None
    events, answer = list[Any](), hidden
    try:
        current = Pass(lambda: called(layer, hidden, positions))
        ids = torch.arange(hidden.shape[1])[None]
        current.inputs = Inputs(ids, ids, ids[0] if keep is None else keep)
        event: Any = current.switch()
        while not current.dead:
            if isinstance(event, Attend):
                events.append(event)
                answer = torch.sin(torch.arange(event.q.numel())).view(1, event.q.shape[2], event.q.shape[1], -1)
            event = current.switch(answer)
    finally:
        layer.halves = kept
    (attend,) = events
    return [attend.q * attend.scale, attend.k, attend.v, event]


@pytest.mark.parametrize("family", HALVED)
def test_a_layer_computes_what_its_modules_compute(families: Any, family: str) -> None:
    skeleton, layers = opened(families(family).directory)
    hidden, positions = arguments(skeleton)
    for layer in layers:
        assert layer.halves.usable(hidden, positions)
        ours, theirs = ran(layer, hidden, positions), ran(layer, hidden, positions, halves=False)
        for mine, other in zip(ours, theirs, strict=True):
            if family in CLOSE:
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(mine, other)  # the same kernels in the same order


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


@pytest.mark.parametrize("keep", [[], [4], [3, 0, 1]])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_after_the_last_layer_only_rows_with_logits_are_computed(families: Any, keep: list[int], family: str) -> None:
    skeleton, layers = opened(families(family).directory)
    assert [layer.halves.last for layer in layers] == [False] * (len(layers) - 1) + [True]
    hidden, positions = arguments(skeleton)
    for layer in layers:
        some, every = ran(layer, hidden, positions, keep=torch.tensor(keep).long()), ran(layer, hidden, positions)
        assert all(torch.equal(one, other) for one, other in zip(some[:3], every[:3], strict=True))
        assert torch.equal(some[3][:, keep], every[3][:, keep])
        others = [i for i in range(TOKENS) if i not in keep]
        assert torch.equal(some[3], every[3]) if layer is not layers[-1] else not some[3][:, others].any()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", HALVED)
def test_a_layer_that_decodes_is_one_call(families: Any, family: str, kind: str, window: int | None) -> None:
    """It appends, and computes the bits of a layer that pauses at attention."""
    skeleton, layers = opened(families(family).directory)
    hidden, positions = arguments(skeleton, 3)
    attention: Any = layers[0].layer.self_attn
    dim, heads = attention.head_dim, attention.q_proj.out_features // attention.head_dim
    pool, form = pool_of(kind, attention.k_proj.out_features // dim, dim)
    tables = torch.tensor([[3, 0, 0], [7, 1, 9], [2, 5, 0]]).int()
    lengths = torch.tensor([1, 10, 8]).int()
    pages, offsets = torch.tensor([3, 9, 5]).int(), torch.tensor([0, 1, 3]).int()
    kernel, results = kernels.load(), []
    for whole in (False, True):
        own = pool.clone()
        current = Pass(lambda: called(layers[0], hidden, positions))
        assert isinstance(current.switch(), Layer)
        found = kernel.paged(heads, own, tables, lengths, window, form, pages, offsets)
        current.paged = [found] if whole else []
        event = current.switch(hidden)
        if not whole:
            assert isinstance(event, Attend)
            q, k, v = (x[0].transpose(0, 1) for x in event[1:4])
            kernel.append(k, v, own, pages, offsets, form)
            out = kernel.decode_attention(q, own, tables, lengths, event.scale, window, event.softcap, None, form)
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
        attention: Any = layer.layer.self_attn
        self.dim = attention.head_dim
        self.heads, kv_heads = (m.out_features // self.dim for m in (attention.q_proj, attention.k_proj))
        own = -(-length // 4)  # pages of a prompt
        self.pool, self.form = pool_of(kind, kv_heads, self.dim, 12 + 2 * own)
        self.tables, self.lengths = torch.tensor([[3, 0], [7, 1]]).int(), torch.tensor([1, 6]).int()
        at = torch.arange(length)
        self.pages = torch.cat([torch.tensor([3, 1, 10, 10, 11]), *(12 + i * own + at // 4 for i in range(2))]).int()
        self.offsets = torch.cat([torch.tensor([0, 1, 2, 3, 0]), at % 4, at % 4]).int()
        table = torch.tensor([8, 10, 11]).int()
        self.prompts = [Prompts(2, 1, 3, 6, table), Prompts(5, 2, length, 0, None)]
        self.tokens = 5 + 2 * length

    def paged(self, pool: Tensor, window: int | None = None) -> PagedAttention:
        where = (self.form, self.pages, self.offsets, self.prompts)
        found = kernels.load().paged(self.heads, pool, self.tables, self.lengths, window, *where)
        assert found is not None
        return found

    def attended(self, event: Attend, pool: Tensor, window: int | None = None) -> Tensor:
        """Return attention by a call for each part of the gpu_batch, and append the tokens."""
        kernel, options = kernels.load(), (event.scale, window, event.softcap)
        q, k, v = (x[0].transpose(0, 1) for x in event[1:4])
        kernel.append(k[:2], v[:2], pool, self.pages[:2], self.offsets[:2], self.form)
        parts = [kernel.decode_attention(q[:2], pool, self.tables, self.lengths, *options, None, self.form)]
        for p in self.prompts:
            own = [x[p.first :][: p.rows * p.length].unflatten(0, (p.rows, p.length)) for x in (q, k, v)]
            past = None if p.table is None else Past(pool, p.table, p.past, self.form)
            parts.append(kernel.attend_prompt(*own, *options, None, past).flatten(0, 1))
        kernel.append(k[2:], v[2:], pool, self.pages[2:], self.offsets[2:], self.form)
        return torch.cat(parts)[None]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", HALVED)
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
        for prompts in ([Prompts(2, 1, 3, 0, None), other], [cached, other]):
            mixed.prompts, pool = prompts, mixed.pool.clone()
            current = Pass(lambda: called(layers[0], hidden, positions))
            current.switch()
            current.paged = [mixed.paged(pool)] if whole else []
            event = current.switch(hidden)
            results.append(event if whole else current.switch(mixed.attended(event, pool)))
    assert len(layers[0].halves.kind._calls) == 3  # before, after, whole
    assert all(torch.equal(one, two) for one, two in zip(results[:2], results[2:], strict=True))
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("length", [4, 300])  # many layers in a parallel region, and several regions per layer
@pytest.mark.parametrize("most", [MOST_PRODUCTS, 1])
def test_layers_with_prompts_are_one_call_except_the_last(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, length: int
) -> None:
    """A call has a limit of work. After the last layer, only rows with logits are computed."""
    monkeypatch.setattr("flexengine.model.halves.MOST_PRODUCTS", most)
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
        attention: Any = layers[0].layer.self_attn
        dim, heads = attention.head_dim, attention.q_proj.out_features // attention.head_dim
        self.pools = [torch.randn(12, 2, attention.k_proj.out_features // dim, 4, dim) for _ in layers]
        tables, lengths = torch.tensor([[3, 0, 0], [7, 1, 9], [2, 5, 0]]).int(), torch.tensor([1, 10, 8]).int()
        places = torch.tensor([3, 9, 5]).int(), torch.tensor([0, 1, 3]).int()
        first = kernels.load().paged(heads, self.pools[0], tables, lengths, None, None, *places)
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


@pytest.mark.parametrize("family", OTHERS)
def test_other_layers_keep_their_modules(families: Any, family: str) -> None:
    _, layers = opened(families(family).directory)
    assert all(layer.halves is None for layer in layers)


def test_a_trial_finds_what_names_do_not_tell(families: Any, tmp_path: Path) -> None:
    """Granite has LLaMA's modules, but scales what it adds to the residual."""
    for number, multiplier in enumerate((1.0, 0.7)):
        model = changed(families("llama").directory, tmp_path / str(number), "Granite", residual_multiplier=multiplier)
        skeleton, layers = opened(model)
        hidden, positions = arguments(skeleton)
        assert {layer.halves.usable(hidden, positions) for layer in layers} == {multiplier == 1.0}


def test_layer_norms_after_the_residual_are_found_by_the_trial(families: Any, tmp_path: Path) -> None:
    """As in OPT-350m."""
    for before in (True, False):
        model = changed(families("opt").directory, tmp_path / str(before), "OPT", do_layer_norm_before=before)
        skeleton, layers = opened(model)
        assert {layer.halves.usable(*arguments(skeleton)) for layer in layers} == {before}


def test_layers_of_one_class_with_other_settings_have_trials_of_their_own(families: Any, tmp_path: Path) -> None:
    """Some layers of SmolLM3 have no rotary positions."""
    model = changed(families("llama").directory, tmp_path / "m", "SmolLM3", no_rope_layers=[1, 0, 1, 0], pad_token_id=0)
    skeleton, layers = opened(model)
    hidden, positions = arguments(skeleton)
    assert [layer.halves.usable(hidden, positions) for layer in layers] == [True, False, True, False]


def test_modules_are_used_where_they_are_watched_or_changed(families: Any) -> None:
    skeleton, layers = opened(families("llama").directory)
    layer, (hidden, positions) = layers[0], arguments(skeleton)
    usable = layer.halves.usable
    assert usable(hidden, positions)
    hook = layer.layer.mlp.down_proj.register_forward_pre_hook(lambda *_: None)
    assert not usable(hidden, positions)
    hook.remove()
    assert usable(hidden, positions)
    assert not usable(hidden.bfloat16(), positions)
    assert not usable(hidden, (positions[0][..., :-2], positions[1][..., :-2]))
    assert not usable(hidden, None)
    layer.layer.mlp.act_fn = nn.Tanh()
    assert not usable(hidden, positions)
    use_queries_first(skeleton.model)
    assert not layers[1].halves.usable(hidden, positions)


def test_modules_are_used_where_neurons_are_records(families: Any) -> None:
    """Their weights are not in the layer's slot."""
    skeleton, layers = opened(families("opt").directory)
    arguments_of, fc2 = arguments(skeleton), layers[0].layer.fc2
    assert layers[0].halves.usable(*arguments_of)
    fc2.__class__ = RecordDown
    assert not layers[0].halves.usable(*arguments_of)
    fc2.__class__ = FastLinear
    assert layers[0].halves.usable(*arguments_of)


def test_a_weight_that_is_not_in_memory_is_an_error(families: Any) -> None:
    skeleton, layers = opened(families("opt").directory)
    slot = next(slot for name, slot in skeleton.layers[0].items() if "fc2.weight" in name)
    slot.bind(nn.Parameter(torch.empty(slot.shape, device="meta"), requires_grad=False))
    with pytest.raises(RuntimeError, match="not in memory"):
        ran(layers[0], *arguments(skeleton))


def test_calls_follow_a_change_of_the_rounding_of_activations(families: Any) -> None:
    """Calls that were recorded with one rounding do not run with another."""
    skeleton, layers = opened(families("llama").directory)
    for slot in skeleton.layers[0].values():
        if slot.linear:
            slot.bind(nn.Parameter(slot.holder[slot.name].bfloat16(), requires_grad=False))
    hidden, positions = arguments(skeleton)
    outputs = []
    for compute in (None, "bf16", None):
        skeleton.product.compute = compute
        ours, theirs = ran(layers[0], hidden, positions), ran(layers[0], hidden, positions, halves=False)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        outputs.append(ours[-1])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_layers_share_memory_until_it_is_released(families: Any) -> None:
    skeleton, layers = opened(families("llama").directory)
    hidden, positions = arguments(skeleton)
    ran(layers[0], hidden, positions)
    ran(layers[1], hidden, positions)
    assert layers[0].halves.kind.scratch is layers[1].halves.kind.scratch
    assert layers[0].halves.kind.scratch.block.nbytes > 0
    weight = weakref.ref(layers[0].layer.self_attn.q_proj.weight)
    release(skeleton.model)
    assert layers[0].halves.kind.scratch.block.nbytes == 0
    for slot in skeleton.layers[0].values():
        slot.bind(nn.Parameter(torch.empty(slot.shape, device="meta"), requires_grad=False))
    gc.collect()
    assert weight() is None


def test_without_native_kernels_the_modules_are_used(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", ReferenceKernels)
    skeleton, layers = opened(families("llama").directory)
    hidden, positions = arguments(skeleton)
    assert not layers[0].halves.usable(hidden, positions)


def test_a_row_is_the_same_in_any_company(families: Any) -> None:
    skeleton, layers = opened(families("qwen2").directory)
    hidden, (cos, sin) = arguments(skeleton, 700)
    whole = ran(layers[0], hidden, (cos, sin))
    for low, high in ((0, 1), (3, 17), (690, 700)):
        part = ran(layers[0], hidden[:, low:high], (cos[:, low:high], sin[:, low:high]))
        for mine, other in zip(part[:3], whole[:3], strict=True):
            assert torch.equal(mine, other[:, :, low:high])
