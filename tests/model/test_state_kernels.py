"""Which modules with states run with kernels: those that kernels compute alike, and whose sequences can be packed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.kernels import states
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.paged import PromptPieces
from flexengine.kernels.reference import ReferenceKernels
from flexengine.model import mixers, state_kernels
from flexengine.model.build import build_from
from flexengine.model.mixers import Field, StateRecords, StateView
from flexengine.model.state_doors import RecordView, Unsuited, _temporary
from flexengine.model.state_kernels import KernelForward, kernel_forward, use_kernels
from tests.helpers.architectures import config_classes
from tests.helpers.tiny_models import tiny_config

STATE = "they keep a state beside keys and values"


@pytest.fixture
def native() -> NativeKernels:
    found = kernels.load()
    if not isinstance(found, NativeKernels):
        pytest.skip("no native kernels")
    return found


def opened(kind: str, found: kernels.Kernels, dtype: torch.dtype = torch.float32) -> Any:
    with torch.no_grad():
        skeleton = build_from(tiny_config(config_classes()[kind]), Path("model"), dtype)
        use_kernels(skeleton, found)
    return skeleton


@pytest.mark.parametrize(("kind", "expected"), [
    ("qwen3_next", "which kernels change"), ("kimi_linear", "which kernels change"),
    ("falcon_h1", "which kernels change"), ("nemotron_h", "which kernels change"), ("lfm2", "which kernels change"),
    ("jamba", "which kernels change"), ("minimax", "and no kernel computes their scan"),
    ("zamba", "and a scan gets a part of a state"),
])  # fmt: skip
def test_modules_that_kernels_compute(native: NativeKernels, kind: str, expected: str) -> None:
    """Calls with kernels have smaller temporary tensors, and decode more sequences."""
    skeleton = opened(kind, native)
    words = {why for why in skeleton.as_modules.values() if why.startswith(STATE)}
    assert words == {f"{STATE}, {expected}"}
    uses = {m.with_kernels is not None for m in mixers.mixers_of(skeleton.model)}
    assert uses == {expected == "which kernels change"}
    mixing, record = skeleton.mixing, max(skeleton.mixing.record_bytes)
    assert (mixing.numerics == "by kernels") == (True in uses)
    assert "by kernels" in mixing.numerics
    if True in uses:
        assert record < mixing.moved_bytes <= record + mixing.sequence_bytes
        assert mixing.sequence_bytes < record or kind == "lfm2"


def test_other_kernels() -> None:
    skeleton = opened("lfm2", ReferenceKernels())
    assert skeleton.mixing.without_kernels is None
    assert skeleton.mixing.numerics == "by modules"
    assert STATE in skeleton.as_modules.values()


@pytest.mark.parametrize(("kind", "name", "words"), [
    ("qwen3_next", "delta_rule", "differs from their delta rule by 1e-03"),
    ("kimi_linear", "convolve", "differs from their convolve"),
    ("jamba", "selective_scan", "differs from their selective scan"),
    ("mamba2", "scan", "differs from their scan by 1e-03"), ("lfm2", "convolve", "differs from their convolve"),
])  # fmt: skip
def test_a_kernel_that_differs_is_dropped(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, words: str
) -> None:
    own: Callable[..., Tensor] = getattr(states, name)
    monkeypatch.setattr(states, name, lambda *args: own(*args) * 1.001)
    skeleton = opened(kind, native)
    assert all(m.with_kernels is None for m in mixers.mixers_of(skeleton.model))
    assert any(words in why for why in skeleton.as_modules.values())
    assert skeleton.mixing.without_kernels


def test_a_state_that_differs_is_noticed(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the outputs of a prompt are right."""
    own = states.scan

    def drifting(found: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, to: Tensor, *args: Any) -> Tensor:
        out = own(found, x, dt, a, b, c, to, *args)
        to.mul_(1.001)
        return out

    monkeypatch.setattr(states, "scan", drifting)
    assert all(m.with_kernels is None for m in mixers.mixers_of(opened("mamba2", native).model))


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    out = nn.functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    return out[:, :, : x.shape[2]] if activation is None else nn.functional.silu(out[:, :, : x.shape[2]])


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    whole = torch.cat([conv_state, x], -1)
    conv_state.copy_(whole[:, :, 1:])
    return causal_conv1d_fn(whole, weight, bias, activation)[:, :, -1:]


class ShortConv(nn.Module):
    """A module like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(8, 8, 4, groups=8, padding=3)
        self.sums = False  # over tokens, also of other sequences
        self.scales = False  # the columns of the convolution
        self.step: str | None = None  # the activation of a step

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        tokens, state, weight = x.shape[1], cache.get_conv_state(0), self.conv1d.weight.squeeze(1)
        columns = (x.cumsum(1) if self.sums else x).transpose(1, 2)
        if state is not None and tokens == 1:
            return causal_conv1d_update(columns, state, weight, self.conv1d.bias, self.step).transpose(1, 2)
        columns = cache.update_conv_state(columns, 0, conv_kernel_size=4)
        if self.scales:
            columns = columns * 2
        return causal_conv1d_fn(columns, weight, self.conv1d.bias)[:, :, -tokens:].transpose(1, 2)


def pausing(**settings: Any) -> Any:
    mixer: Any = ShortConv().requires_grad_(False)
    vars(mixer).update(settings)
    mixer.__class__ = mixers._pausing(ShortConv)
    mixer.fields = (Field(("conv", 0), (8, 4), torch.float32, 0),)
    return mixer


def tried(mixer: Any, native: NativeKernels) -> Any:
    return state_kernels._tried(mixer.to("meta"), 8, torch.float32, native)[0]


def test_code_that_kernels_cannot_have(native: NativeKernels) -> None:
    assert isinstance(tried(pausing(), native), KernelForward)
    assert "packed sequences depend on each other" in tried(pausing(sums=True), native)
    assert tried(pausing(step="silu"), native) == "their steps and prompts have another convolve"
    assert tried(pausing(scales=True), native) == "the columns of a convolution are changed before it"


def test_a_lack_of_memory_is_no_reason(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise other functions would compute, with other bits, in one run of a job than in another."""
    errors = [MemoryError(), torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
    for error in errors:
        monkeypatch.setattr(states, "convolve", Mock(side_effect=error))
        with pytest.raises(type(error)):
            tried(pausing(), native)
    monkeypatch.setattr(states, "convolve", Mock(side_effect=RuntimeError("sizes")))
    assert "a trial with kernels fails (RuntimeError: sizes" in tried(pausing(), native)


def test_calls_are_noted_in_trials_only(native: NativeKernels) -> None:
    mixer, one = pausing(), torch.tensor([0])
    pieces = states.Pieces(torch.tensor([0, 3]), one, one == 0)
    view = RecordView(mixer.fields, torch.zeros(1, 128, dtype=torch.uint8), pieces, hidden=False)
    kernel_forward(mixer, native)(mixer, torch.randn(1, 3, 8), view)
    assert view.used == {("conv", 0)}
    assert not view.calls


def test_copies_of_kernels_are_counted() -> None:
    """A transposed tensor is copied; one whose rows lie side by side is not."""
    x, state = torch.empty(6, 8, device="meta"), torch.empty(2, 8, 4, device="meta")
    pieces = states.Pieces(*[torch.zeros(1)] * 3)
    plain, copied = (
        sum(y.nbytes for y in _temporary(each, None, state, pieces))
        for each in (x, torch.empty(8, 6, device="meta").t())
    )
    assert copied == plain + 6 * 8 * 4 > 6 * 8 * 4


def test_packed_pieces_are_those_of_each_sequence_alone(native: NativeKernels) -> None:
    """Of any cut into calls; the module's own functions compute each sequence."""
    mixer, lengths = pausing(), (5, 5, 1, 3, 9)
    forward = kernel_forward(mixer, native)
    x = torch.randn(1, 2 + sum(lengths), 8)
    numbers = torch.tensor([5, 6]).tolist() + [n for n, length in enumerate(lengths) for _ in range(length)]
    pages = torch.randn(7, 64).view(torch.uint8)
    before = pages.clone()
    prompts = [PromptPieces(2, 2, 5, 0, None), PromptPieces(12, 1, 1, 0, None), PromptPieces(13, 1, 3, 64, None)]
    prompts.append(PromptPieces(16, 1, 9, 0, None))
    records = StateRecords(pages, torch.tensor(numbers), 2, prompts)
    expected, kept = [], {}
    for number, first, length, past in [(5, 0, 1, True), (6, 1, 1, True), (0, 2, 5, False), (1, 7, 5, False),
                                        (2, 12, 1, False), (3, 13, 3, True), (4, 16, 9, False)]:  # fmt: skip
        state = mixer.fields[0].of(before)[number].view(1, 8, 4).clone()
        view = StateView({("conv", 0): state} if past else {})
        expected.append(ShortConv.forward(mixer, x[:, first : first + length], view))
        kept[number] = view.states["conv", 0].flatten()
    for tokens in (1, 2, 4, 512):
        mixer.most_tokens = mixer.most_sequences = tokens
        pages.copy_(before)
        found = torch.cat(list(forward.pieces(mixer, x, records)), 1)
        torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-6, atol=1e-6)
        for number, state in kept.items():
            assert torch.equal(mixer.fields[0].of(pages)[number], state)


def test_a_view_refuses_what_kernels_do_not_see() -> None:
    fields = (Field(("recurrent", 0), (2, 4), torch.float32, 0),)
    pages, pieces = torch.zeros(3, 64, dtype=torch.uint8), states.Pieces(*[torch.zeros(1)] * 3)
    view = RecordView(fields, pages, pieces, hidden=False)
    state = view.get_recurrent_state(0)
    assert state is not None
    with pytest.raises(Unsuited, match="before its scan"):
        view.state_of(state * 2)
    with pytest.raises(Unsuited, match="after its scan"):
        view.update_recurrent_state(state * 2, 0)
    assert view.state_of(state) is state
    with pytest.raises(Unsuited, match="a part of a state"):
        view.state_of(state)
    hidden = RecordView(fields, pages, pieces, hidden=True)
    assert hidden.get_recurrent_state(0) is None
    assert hidden.state_of(None).data_ptr() == pages.data_ptr()
