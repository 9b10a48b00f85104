"""model.router: the kernel's choice of experts against routers of transformers, and the ones it does not compute."""

from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import Routing
from flexengine.model import experts
from flexengine.model.linear import Product, is_experts, use_product
from flexengine.model.router import use_routing

HIDDEN, EXPERTS, TOP = 40, 21, 3  # experts fill no vector
SIZES = {
    "hidden_size": HIDDEN, "moe_intermediate_size": 24, "intermediate_size": 24, "hidden_act": "silu",
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), EXPERTS), "num_experts_per_tok": TOP,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "router_jitter_noise": 0.0,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("native")
KNOWN = {
    ("qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock", True): Routing("softmax", TOP, True),
    ("qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock", False): Routing("softmax", TOP),
    ("olmoe.modeling_olmoe:OlmoeSparseMoeBlock", False): Routing("softmax", TOP),
    ("mixtral.modeling_mixtral:MixtralSparseMoeBlock", True): Routing("softmax", TOP, True),
    ("gpt_oss.modeling_gpt_oss:GptOssMLP", False): Routing("softmax", TOP, True),
    ("deepseek_v3.modeling_deepseek_v3:DeepseekV3MoE", True): None,  # groups, a correction, shared experts
    ("qwen2_moe.modeling_qwen2_moe:Qwen2MoeSparseMoeBlock", True): None,  # a shared expert with a gate
}


class Kind:
    """Stands for a kind of layers."""


def made(name: str, normalised: bool) -> Any:
    """Return a block of transformers with random weights, computed by the engine."""
    config = SimpleNamespace(**SIZES, norm_topk_prob=normalised, _experts_implementation="eager")
    config.shared_expert_intermediate_size = 24
    block = resolve_name(f"transformers.models.{name}")(config)
    for p in block.parameters():
        p.data = torch.randn(p.shape) / p.shape[-1] ** 0.5
    for module in block.modules():
        if is_experts(module):
            module.config = SimpleNamespace(_experts_implementation=experts.EXPERTS)
    use_product(block, Product(torch.float32))
    return block.eval()


@pytest.mark.parametrize(("name", "normalised"), KNOWN)
def test_routers_of_transformers(name: str, normalised: bool, native: NativeKernels) -> None:
    """What the probe finds, and that the module and the call give what the module gave before."""
    block, x = made(name, normalised), torch.randn(37, HIDDEN)
    with torch.no_grad():
        before = block(x[None])
        state = torch.get_rng_state()
        mixture = use_routing(block, Kind())
        assert torch.equal(torch.get_rng_state(), state)
        assert (None if mixture is None else mixture.routing) == KNOWN[name, normalised]
        after = block(x[None])
    if mixture is None:
        assert torch.equal(*(y[0] if isinstance(y, tuple) else y for y in (before, after)))
        return
    (one, two) = (y[0] if isinstance(y, tuple) else y for y in (before, after))
    torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)
    router: Any = mixture.router
    logits, shares, chosen = router(x)
    own = mixture.compute(x, logits, torch.empty)
    assert own is not None
    assert torch.equal(own, two.reshape(own.shape))  # bit by bit, as layers may run either way
    alone = [router(row[None]) for row in x]
    assert torch.equal(torch.cat([y[1] for y in alone]), shares)
    assert torch.equal(torch.cat([y[2] for y in alone]), chosen)
    hook = block.register_forward_hook(lambda *_: None)
    assert mixture.compute(x, logits, torch.empty) is None  # the module must run
    hook.remove()


@pytest.mark.parametrize("shared", ["softmax", "sigmoids"])
def test_shares_by_their_formula(shared: str, native: NativeKernels) -> None:
    """In fp64, for numbers of experts that fill vectors or not, small and large logits, and equal ones."""
    for number, top, spread in ((16, 1, 1.0), (21, 5, 30.0), (64, 8, 3.0), (130, 130, 1.0)):
        logits = torch.randn(50, number) * spread
        logits[0], logits[1, ::2] = 0.5, 1.5
        chosen, shares = Routing(shared, top, True, 2.0).route(native, logits)
        wide = logits.double()
        picked = wide.gather(1, chosen)
        assert torch.equal(picked, wide.topk(top).values)
        assert all(len(set(row)) == top for row in chosen.tolist())
        assert same_choice(chosen, logits, top)
        of_all = wide.softmax(1).gather(1, chosen)
        expected = {"softmax": of_all, "sigmoids": picked.sigmoid()}[shared]
        expected = expected / expected.sum(1, keepdim=True) * 2
        torch.testing.assert_close(shares.double(), expected, rtol=2e-6, atol=1e-30)
        if shared == "softmax":
            torch.testing.assert_close(shares.double(), picked.softmax(1) * 2, rtol=2e-6, atol=1e-30)


def same_choice(chosen: Tensor, logits: Tensor, top: int) -> bool:
    return torch.equal(chosen.sort(1).values, logits.topk(top).indices.sort(1).values)


@pytest.mark.parametrize(("number", "top"), [(8, 1), (8, 2), (60, 4), (64, 8), (128, 2), (256, 8), (700, 6), (9, 9)])
def test_equal_logits_are_chosen_as_by_torch(number: int, top: int, native: NativeKernels) -> None:
    """torch.topk does not return the first of equals, but always the same ones."""
    logits = torch.cat([torch.randint(0, most, (200, number)) for most in (1, 2, 5, 40)]).float()
    chosen, _ = Routing("softmax", top, True).route(native, logits)
    assert same_choice(chosen, logits, top)
    assert torch.equal(logits.gather(1, chosen), logits.topk(top).values)


def test_other_modules_are_no_routers() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    assert use_routing(Own(), Kind()) is None
