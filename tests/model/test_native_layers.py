"""Layers as two calls of native kernels: which ones are, and that they compute what transformers' modules compute."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from flexengine import kernels
from flexengine.guests.flash.feed_forward import RecordDown
from flexengine.kernels import recycled
from flexengine.kernels.reference import ReferenceKernels
from flexengine.model.linear import FastLinear
from flexengine.model.native.layer import release
from flexengine.model.queries import use_queries_first
from flexengine.model.skeleton import Skeleton
from tests.helpers.native_layers import NATIVE_FAMILIES, arguments, changed, opened, ran

EXACT = ("llama", "mistral", "qwen2", "qwen3")  # to the bit: their modules use the same kernels in the same order


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


def in_bf16(skeleton: Skeleton) -> None:
    """Round the weights of all linear modules of layers to bf16."""
    for slot in (slot for layer in skeleton.layers for slot in layer.values() if slot.linear):
        slot.bind(nn.Parameter(slot.holder[slot.name].bfloat16(), requires_grad=False))


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_a_layer_computes_what_its_modules_compute(families: Any, family: str) -> None:
    skeleton, layers = opened(families(family).directory)
    hidden, positions = arguments(skeleton)
    for layer in layers:
        assert layer.native.usable(hidden, positions)
        ours, theirs = ran(layer, hidden, positions), ran(layer, hidden, positions, native=False)
        for mine, other in zip(ours, theirs, strict=True):
            if family in EXACT:
                assert torch.equal(mine, other)
            else:
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("compute", [None, "bf16"])
@pytest.mark.parametrize("tokens", [8, 1100])  # parts of 512 rows
@pytest.mark.parametrize("family", sorted({*NATIVE_FAMILIES} - {"mixtral"}))  # torch's router: not to the bit here
def test_of_the_last_layer_only_rows_with_logits_are_computed(
    families: Any, monkeypatch: pytest.MonkeyPatch, family: str, tokens: int, compute: str | None
) -> None:
    """The others are 0, also in memory that was used before. If over half of the rows have logits, all are computed."""
    monkeypatch.setattr(recycled, "SMALL", 0)
    skeleton, layers = opened(families(family).directory)
    assert [layer.native.last for layer in layers] == [False] * (len(layers) - 1) + [True]
    in_bf16(skeleton)
    skeleton.product.compute = compute
    hidden, positions = arguments(skeleton, tokens)
    half = torch.randperm(tokens)[: tokens // 2].tolist()
    for layer in layers:
        every = [x.clone() for x in ran(layer, hidden, positions)]
        for keep in ([tokens - 1], [], [3, 0, 1], half, [*range(1, tokens)]):
            some = ran(layer, hidden, positions, keep=torch.tensor(keep).long(), recycles=True)
            keys_and_values = zip(some[1:3], every[1:3], strict=True)
            assert all(torch.equal(one, other) for one, other in keys_and_values)
            zero = [i for i in range(tokens) if i not in keep] if layer is layers[-1] and len(keep) <= len(half) else []
            computed = keep if zero else [*range(tokens)]
            for one, other in ((some[0].transpose(1, 2), every[0].transpose(1, 2)), (some[3], every[3])):
                assert torch.equal(one[:, computed], other[:, computed])
                assert not one[:, zero].any()


def test_a_run_finds_what_names_do_not_tell(families: Any, tmp_path: Path) -> None:
    """Granite has LLaMA's modules, but scales what it adds to the residual."""
    for number, multiplier in enumerate((1.0, 0.7)):
        model = changed(families("llama").directory, tmp_path / str(number), "Granite", residual_multiplier=multiplier)
        skeleton, layers = opened(model)
        assert {layer.native.usable(*arguments(skeleton)) for layer in layers} == {True}
        assert {layer.native.record.factors for layer in layers} == {(multiplier, multiplier)}


def test_a_trial_finds_what_only_large_numbers_change(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As clip_qkv of OLMo."""
    own = llama.LlamaAttention.forward

    def clipped(self: Any, hidden_states: Tensor, **rest: Any) -> Any:
        hooks = [part.register_forward_hook(lambda *x: x[2].clamp(-50, 50)) for part in (self.q_proj, self.k_proj)]
        result = own(self, hidden_states, **rest)
        for hook in hooks:
            hook.remove()
        return result

    for forward in (own, clipped):
        monkeypatch.setattr(llama.LlamaAttention, "forward", forward)
        skeleton, layers = opened(families("llama").directory)
        assert {layer.native.usable(*arguments(skeleton)) for layer in layers} == {forward is own}
        assert len(skeleton.as_modules) == (0 if forward is own else len(layers))


@pytest.mark.parametrize("name", ["LlamaDecoderLayer", "LlamaModel"])
def test_code_of_others_is_computed_by_its_modules(families: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A trial of the first layer would not show that the others differ."""

    class Other(getattr(llama, name)):  # type: ignore[misc]
        pass

    monkeypatch.setattr(llama, name, Other)
    _, layers = opened(families("llama").directory)
    assert [layer.native for layer in layers] == [None] * len(layers)


def test_layer_norms_after_the_residual_are_found(families: Any, tmp_path: Path) -> None:
    """As in OPT-350m."""
    for before in (True, False):
        model = changed(families("opt").directory, tmp_path / str(before), "OPT", do_layer_norm_before=before)
        skeleton, layers = opened(model)
        assert {layer.native.usable(*arguments(skeleton)) for layer in layers} == {True}
        assert {any(layer.native.record.closing) for layer in layers} == {not before}


def test_layers_of_one_class_with_other_settings_have_records_of_their_own(families: Any, tmp_path: Path) -> None:
    """Some layers of SmolLM3 have no rotary positions."""
    model = changed(families("llama").directory, tmp_path / "m", "SmolLM3", no_rope_layers=[1, 0, 1, 0], pad_token_id=0)
    skeleton, layers = opened(model)
    hidden, positions = arguments(skeleton)
    assert {layer.native.usable(hidden, positions) for layer in layers} == {True}
    assert [layer.native.record.rotary is not None for layer in layers] == [True, False, True, False]


def test_modules_are_used_where_they_are_watched_or_changed(families: Any) -> None:
    skeleton, layers = opened(families("llama").directory)
    layer, (hidden, positions) = layers[0], arguments(skeleton)
    usable = layer.native.usable
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
    assert not layers[1].native.usable(hidden, positions)


def test_modules_are_used_where_neurons_are_records(families: Any) -> None:
    """Their weights are not in the layer's slot."""
    skeleton, layers = opened(families("opt").directory)
    arguments_of, fc2 = arguments(skeleton), layers[0].layer.fc2
    assert layers[0].native.usable(*arguments_of)
    fc2.__class__ = RecordDown
    assert not layers[0].native.usable(*arguments_of)
    fc2.__class__ = FastLinear
    assert layers[0].native.usable(*arguments_of)


def test_a_weight_that_is_not_in_memory_is_an_error(families: Any) -> None:
    skeleton, layers = opened(families("opt").directory)
    slot = next(slot for name, slot in skeleton.layers[0].items() if "fc2.weight" in name)
    slot.bind(nn.Parameter(torch.empty(slot.shape, device="meta"), requires_grad=False))
    with pytest.raises(RuntimeError, match="not in memory"):
        ran(layers[0], *arguments(skeleton))


def test_calls_follow_a_change_of_the_rounding_of_activations(families: Any) -> None:
    """Calls that were recorded with one rounding do not run with another."""
    skeleton, layers = opened(families("llama").directory)
    in_bf16(skeleton)
    hidden, positions = arguments(skeleton)
    outputs = []
    for compute in (None, "bf16", None):
        skeleton.product.compute = compute
        ours, theirs = ran(layers[0], hidden, positions), ran(layers[0], hidden, positions, native=False)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        outputs.append(ours[-1])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_layers_share_memory_until_it_is_released(families: Any) -> None:
    skeleton, layers = opened(families("llama").directory)
    hidden, positions = arguments(skeleton)
    ran(layers[0], hidden, positions)
    ran(layers[1], hidden, positions)
    assert layers[0].native.kind.scratch is layers[1].native.kind.scratch
    assert layers[0].native.kind.scratch.block.nbytes > 0
    weight = weakref.ref(layers[0].layer.self_attn.q_proj.weight)
    release(skeleton.model)
    assert layers[0].native.kind.scratch.block.nbytes == 0
    for slot in skeleton.layers[0].values():
        slot.bind(nn.Parameter(torch.empty(slot.shape, device="meta"), requires_grad=False))
    gc.collect()
    assert weight() is None


def test_without_native_kernels_the_modules_are_used(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", ReferenceKernels)
    skeleton, layers = opened(families("llama").directory)
    hidden, positions = arguments(skeleton)
    assert not layers[0].native.usable(hidden, positions)


def test_a_row_is_the_same_in_any_company(families: Any) -> None:
    skeleton, layers = opened(families("qwen2").directory)
    hidden, (cos, sin) = arguments(skeleton, 700)
    whole = ran(layers[0], hidden, (cos, sin))
    for low, high in ((0, 1), (3, 17), (690, 700)):
        part = ran(layers[0], hidden[:, low:high], (cos[:, low:high], sin[:, low:high]))
        for mine, other in zip(part[:3], whole[:3], strict=True):
            assert torch.equal(mine, other[:, :, low:high])
