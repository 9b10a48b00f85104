"""Norms, rotary positions and gates in one pass: against the formulas in fp64 and against transformers' own modules."""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.stablelm.configuration_stablelm import StableLmConfig
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from flexengine.errors import InvalidInput
from flexengine.kernels import Kernels
from flexengine.model.native import fused
from flexengine.model.native.fused import use_fused
from tests.helpers.builds import NATIVE, kernels_named

KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_quick": lambda x: x * (1.702 * x).sigmoid(),
    "relu_squared": lambda x: nn.functional.relu(x).square(),
}


@pytest.fixture(scope="module", params=["reference", *NATIVE])
def kernel(request: pytest.FixtureRequest) -> Kernels:
    return kernels_named(request.param)


@pytest.fixture(autouse=True)
def seed(two_threads: None) -> None:
    torch.manual_seed(0)


class TestKernels:
    @pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 64), (70, 576), (1, 16385)])
    @pytest.mark.parametrize("shift", [0.0, 1.0])
    def test_norm(self, kernel: Kernels, shape: tuple[int, ...], shift: float) -> None:
        x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
        wide = x.double()
        expected = (weight.double() + shift) * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(kernel.rms_norm(x, weight, 1e-5, shift).double(), expected, rtol=2e-6, atol=1e-6)

    @pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (3, 4, 32), (70, 9, 64), (5, 2, 80)])
    def test_rotate_is_what_transformers_does_to_the_last_bit(
        self, kernel: Kernels, tokens: int, heads: int, dim: int
    ) -> None:
        x = torch.randn(1, tokens, heads, dim).transpose(1, 2)
        cos, sin = torch.randn(2, 1, tokens, dim)
        expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
        assert torch.equal(kernel.rotate(x, cos, sin), expected)

    @pytest.mark.parametrize("count", [1, 15, 17, 100_003])
    @pytest.mark.parametrize("act", KNOWN)
    def test_gate(self, kernel: Kernels, count: int, act: str) -> None:
        gate, up = torch.randn(count) * 4, torch.randn(count)
        gate[0] = -100.0
        expected = KNOWN[act](gate.double()) * up.double()
        close = 4e-6 if act == "gelu" else 2e-6
        torch.testing.assert_close(kernel.gate(gate.clone(), up, act).double(), expected, rtol=2e-6, atol=close)

    @pytest.mark.parametrize("build", NATIVE)
    def test_a_row_is_the_same_in_any_company(self, build: str) -> None:
        kernel = kernels_named(build)
        x, up, weight, before = torch.randn(700, 100), torch.randn(700, 100), torch.randn(100), torch.get_num_threads()
        q, cos, sin = torch.randn(1, 2, 700, 100), *torch.randn(2, 1, 700, 100)

        def all_of(rows: slice) -> list[Tensor]:
            return [
                kernel.rms_norm(x[rows], weight, 1e-6),
                *(kernel.gate(x[rows].clone(), up[rows], act) for act in KNOWN),
                kernel.rotate(q[:, :, rows], cos[:, rows], sin[:, rows])[0].transpose(0, 1),
            ]

        whole = all_of(slice(0, 700))
        try:
            torch.set_num_threads(1)
            for rows in (slice(0, 1), slice(3, 13), slice(699, 700)):
                assert all(torch.equal(part, x[rows]) for part, x in zip(all_of(rows), whole, strict=True))
        finally:
            torch.set_num_threads(before)

    def test_numbers_that_are_none_stay_visible(self, kernel: Kernels) -> None:
        x = torch.randn(3, 40)
        x[1, 7] = float("nan")
        normed = kernel.rms_norm(x, torch.ones(40), 1e-6)
        assert normed[1].isnan().all()
        assert normed[0].isfinite().all()
        for act in KNOWN:
            gated = kernel.gate(x.clone(), torch.ones(3, 40), act)
            assert gated[1, 7].isnan()
            assert gated.isnan().sum() == 1

    def test_operands_that_do_not_fit_are_refused(self, kernel: Kernels) -> None:
        x = torch.randn(4, 48)
        with pytest.raises(InvalidInput, match="48"):
            kernel.rms_norm(x, torch.ones(64), 1e-6)
        with pytest.raises(InvalidInput, match="one shape"):
            kernel.gate(x, torch.ones(2, 48), "silu")
        with pytest.raises(InvalidInput, match="one of"):
            kernel.gate(x, x, "tanh")
        with pytest.raises(InvalidInput, match="even"):
            kernel.rotate(torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 4, 8))


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One number, of calls of fused rotary functions made in the test."""
    calls, make = [0], fused._rotated

    def counting(own: Callable[..., Any]) -> Callable[..., Any]:
        function = make(own)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(fused, "_rotated", counting)
    fused._fused.cache_clear()
    yield calls
    fused._fused.cache_clear()


class TestModules:
    @pytest.mark.parametrize("norm", [llama.LlamaRMSNorm, Gemma2RMSNorm])
    def test_a_norm_computes_what_it_did(self, norm: type[nn.Module]) -> None:
        module = norm(48)
        module.weight.data.normal_()
        x = torch.randn(2, 3, 48)
        expected = module(x)
        use_fused(module)
        assert type(module).__name__ == f"Fused{norm.__name__}"
        torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)

    def test_other_dtypes_take_the_modules_own_way(self) -> None:
        module = llama.LlamaRMSNorm(48).to(torch.bfloat16)
        x = torch.randn(2, 48).to(torch.bfloat16)
        expected = module(x)
        use_fused(module)
        assert torch.equal(module(x), expected)

    def test_what_is_written_otherwise_stays(self) -> None:
        class Centred(llama.LlamaRMSNorm):
            def forward(self, hidden_states: Tensor) -> Tensor:
                return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

        for module in (Centred(8), nn.LayerNorm(8), nn.SiLU()):
            before = type(module)
            use_fused(module)
            assert type(module) is before

    def test_rotary_positions_of_part_of_a_head_stay_with_their_model(self, rotated: list[int]) -> None:
        """Phi-3 turns a part of each head if there are fewer cosines, by a function of the same name."""
        config = phi3.Phi3Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, pad_token_id=0)
        config._attn_implementation = "eager"
        module, x, angles = phi3.Phi3Attention(config, 0), torch.randn(1, 6, 64), tuple(torch.randn(2, 1, 6, 8))
        expected, _ = module(x, angles, None)
        use_fused(module)
        assert torch.equal(module(x, angles, None)[0], expected)
        assert rotated == [1]

    @pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "relu"])
    def test_a_gated_mlp_computes_what_it_did(self, act: str) -> None:
        config = llama.LlamaConfig(hidden_size=40, num_attention_heads=4, intermediate_size=72, hidden_act=act)
        module = llama.LlamaMLP(config)
        x = torch.randn(1, 5, 40)
        expected = module(x)
        use_fused(module)
        assert type(module) is not llama.LlamaMLP
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)

    def test_a_gated_mlp_with_limits_stays(self) -> None:
        """Limits that only large numbers exceed."""
        config = SimpleNamespace(
            hidden_size=8, intermediate_size=12, hidden_act="silu", swiglu_limit=10.0, mlp_bias=False
        )
        module = deepseek_v4.DeepseekV4MLP(config)
        use_fused(module)
        assert type(module) is deepseek_v4.DeepseekV4MLP

    def test_attention_computes_what_it_did_with_other_rotary_functions_left_alone(self, rotated: list[int]) -> None:
        config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
        config._attn_implementation = "eager"
        module, x = llama.LlamaAttention(config, 0), torch.randn(1, 6, 64)
        angles = tuple(torch.randn(2, 1, 6, 16))
        expected, _ = module(x, angles, None)
        use_fused(module)
        assert type(module).__name__ == "FusedLlamaAttention"
        assert torch.equal(module(x, angles, None)[0], expected)
        assert rotated == [1]

    def test_a_decorated_attention_is_fused_inside_its_decorators(self, rotated: list[int]) -> None:
        """A decorator that does not call the attention's own code leaves nothing to fuse."""

        def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                kwargs["position_embeddings"] = kwargs.pop("angles")
                return function(*args, **kwargs)

            return call

        @wraps(llama.LlamaAttention.forward)
        def other(*args: Any, **kwargs: Any) -> str:
            return "other"

        config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
        config._attn_implementation = "eager"
        decorated = type("Decorated", (llama.LlamaAttention,), {"forward": renamed(llama.LlamaAttention.forward)})
        module, x, angles = decorated(config, 0), torch.randn(1, 6, 64), tuple(torch.randn(2, 1, 6, 16))
        expected, _ = module(x, angles=angles, attention_mask=None)
        use_fused(module)
        assert type(module).__name__ == "FusedDecorated"
        assert torch.equal(module(x, angles=angles, attention_mask=None)[0], expected)
        assert rotated == [1]
        strange = type("Strange", (llama.LlamaAttention,), {"forward": other})(config, 0)
        use_fused(strange)
        assert strange(x) == "other"

    def test_a_rotary_function_that_halves_otherwise_is_not_taken_for_the_known_one(self) -> None:
        """Its code is Llama's to the letter; what it calls is not."""

        def rotate_half(x: Tensor) -> Tensor:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

        own = llama.apply_rotary_pos_emb
        names = {**own.__globals__, "rotate_half": rotate_half}
        other = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
        forward = llama.LlamaAttention.forward
        taken = {**forward.__globals__, "apply_rotary_pos_emb": other}
        copy = FunctionType(forward.__code__, taken, "forward", forward.__defaults__, forward.__closure__)
        interleaved = type("Interleaved", (llama.LlamaAttention,), {"forward": copy})
        config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
        module = interleaved(config, 0)
        use_fused(module)
        assert type(module) is interleaved

    def test_a_function_that_has_become_a_module_is_no_match(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", nn.Identity())
        module = StableLmAttention(StableLmConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4), 0)
        use_fused(module)
        assert isinstance(module, StableLmAttention)

    def test_transformers_itself_is_left_alone(self) -> None:
        before = llama.LlamaAttention.forward, llama.apply_rotary_pos_emb, llama.LlamaMLP.forward
        config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=96)
        model = llama.LlamaModel(config)
        use_fused(model)
        names = {type(m).__name__ for m in model.modules()}
        assert {"FusedLlamaAttention", "FusedLlamaMLP", "FusedLlamaRMSNorm"} <= names
        assert before == (llama.LlamaAttention.forward, llama.apply_rotary_pos_emb, llama.LlamaMLP.forward)
