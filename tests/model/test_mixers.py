"""Views of states in place of a cache of transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import LinearAttentionLayer

from flexengine.errors import UnsupportedModel
from flexengine.kernels.paged import PromptPieces
from flexengine.model.adapters import mamba
from flexengine.model.forward import PausingLayer
from flexengine.model.mixers import Field, PausingMixer, StateRecords, StateView, refuse_others
from flexengine.model.peak import Peak


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 3))
def test_a_view_keeps_what_a_cache_of_transformers_keeps(lengths: list[int], kernel: int, batch: int) -> None:
    own, view = LinearAttentionLayer(), StateView({})
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        x = torch.randn(batch, 3, length, generator=generator)
        state = torch.randn(batch, 2, 4, generator=generator)
        assert view.has_previous_state(0) == own.has_previous_state[0]
        found = view.update_conv_state(x, 0, conv_kernel_size=kernel)
        assert torch.equal(found, own.update_conv_state(x, conv_kernel_size=kernel))
        view.update_recurrent_state(state, 0)
        own.update_recurrent_state(state)
        for mine, kept in (
            (view.get_conv_state(0), own.conv_states[0]), (view.get_recurrent_state(0), own.recurrent_states[0]),
        ):  # fmt: skip
            assert mine is not None
            assert torch.equal(mine, kept)


def test_states_of_a_record_lie_apart() -> None:
    pages = torch.zeros(3, 256, dtype=torch.uint8)
    first = Field(("conv", 0), (3, 2), torch.bfloat16, 0)
    second = Field(("recurrent", 0), (2, 5), torch.float32, 64)
    second.of(pages).index_copy_(0, torch.tensor([2]), torch.full((1, 10), 7.0))
    first.of(pages).index_copy_(0, torch.tensor([2, 0]), torch.ones(2, 6, dtype=torch.bfloat16))
    assert second.of(pages).tolist() == [[0.0] * 10, [0.0] * 10, [7.0] * 10]
    assert first.of(pages).tolist() == [[1.0] * 6, [0.0] * 6, [1.0] * 6]
    assert int((pages != 0).sum()) == 2 * 6 * 2 + 10 * 2  # bytes of 1.0 in bf16: 80 3f; of 7.0: 00 00 e0 40


@pytest.mark.parametrize("module", ["mamba", "falcon_mamba", "jamba"])
def test_the_scan_goes_on_where_it_stopped(module: str) -> None:
    """In three parts it gives what transformers' scan of the whole gives, but for rounding of softplus and exp, which
    depends on a number's place in a vector."""
    import importlib

    own = importlib.import_module(f"transformers.models.{module}.modeling_{module}").mamba_selective_scan
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, dt, z, a = random(2, 6, 11), random(2, 6, 11), random(2, 6, 11), -random(6, 4).exp()
    b, c, d, bias = random(2, 4, 11), random(2, 4, 11), random(6), random(6)
    whole, last = own(x, dt, a, b, c, d, z, delta_bias=bias, delta_softplus=True, return_last_state=True)
    outs, state = [], None
    for part in (slice(0, 5), slice(5, 6), slice(6, 11)):
        mamba._given.states = iter([] if state is None else [state])
        cut = [t[..., part] for t in (x, dt, b, c, z)]
        out, state = mamba.selective_scan(cut[0], cut[1], a, cut[2], cut[3], d, cut[4], delta_bias=bias)
        outs.append(out)
    assert state is not None
    torch.testing.assert_close(torch.cat(outs, -1), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-6, atol=1e-6)


class Copying(torch.nn.Module):
    """Returns its input, and keeps the sum of each sequence's tokens as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, cache: StateView) -> torch.Tensor:
        self.shapes.append(tuple(x.shape))
        before = cache.get_recurrent_state(0)
        cache.update_recurrent_state(x.sum(1) + (0 if before is None else before), 0)
        return x


class PausingCopy(PausingMixer, Copying):
    fields = (Field(("recurrent", 0), (2,), torch.float32, 0),)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300)), max_size=4), st.integers(0, 9), st.integers(1, 4))
def test_calls_of_a_module_are_limited(groups: list[tuple[int, int]], decode: int, grain: int) -> None:
    """Also if prompts are short, as a module fills its chunks. Each sequence's state is that of its own tokens."""
    module = PausingCopy()
    module.grain, module.most_tokens, module.most_sequences = grain, 3 * grain, 4
    prompts, first = [], decode
    for rows, length in groups:
        prompts.append(PromptPieces(first, rows, length, 0, None))
        first += rows * length
    counts = [1] * decode + [length for rows, length in groups for _ in range(rows)]
    numbers = torch.arange(len(counts)).flip(0).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    pages = torch.zeros(max(1, len(counts)), 64, dtype=torch.uint8)
    hidden = torch.arange(2.0 * first).view(1, first, 2) % 97
    if not first:
        return
    records = StateRecords(pages, numbers, decode, prompts)
    outs = list(module._pieces(lambda xs, view: Copying.forward(module, *xs, view), (hidden,), records))
    assert torch.equal(torch.cat(outs, 1), hidden)
    sums = [part.sum(0) for part in hidden[0].split(counts)]
    assert torch.equal(module.fields[0].of(pages), torch.stack(sums).flip(0))
    whole = [shape for shape in module.shapes if shape[1] > 1]
    assert all(rows * -(-tokens // grain) * grain <= 3 * grain or rows == 1 for rows, tokens, _ in whole)
    assert all(tokens <= 3 * grain for _, tokens, _ in whole)


def test_the_peak_counts_tensors_that_exist_at_once() -> None:
    with Peak() as seen:
        a = torch.empty(1000, device="meta")
        b = a + 1  # 8,000 bytes
        b.mul_(2)
        view = b[10:]
        del a, b
        c = view.double()  # 4,000 and 7,920
        del c, view
        torch.empty(5, device="meta")
    assert seen.most == 4000 + 990 * 8


class OwnAttention(torch.nn.Module):
    """An attention that does not call that of the registry."""

    def forward(self, hidden: torch.Tensor, cache: object = None) -> torch.Tensor:
        return hidden.cumsum(1)


def test_an_attention_beside_a_state_must_call_the_registry() -> None:
    """It would see the tokens of its own call only."""
    block = torch.nn.Module()
    block.mixer, block.around = PausingCopy(), torch.nn.Sequential(torch.nn.Linear(2, 2))
    layer = PausingLayer(block, 3)
    refuse_others(layer)
    block.around.append(OwnAttention())
    with pytest.raises(UnsupportedModel, match="layer 3 has OwnAttention, which did not call attention"):
        refuse_others(layer)
