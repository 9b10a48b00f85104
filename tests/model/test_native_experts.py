"""model.experts: the native call of experts against transformers' own experts, of every kind of gate."""

import copy
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import ExpertGate, ExpertMemory, Experts
from flexengine.model import experts, gates
from flexengine.model.gates import find_gate
from flexengine.model.linear import Product, use_product
from flexengine.model.router import MIXTURE
from flexengine.model.skeleton import ParamRef
from flexengine.plan.sizes import EXPERTS_KEPT
from flexengine.worker import resident

HIDDEN, INNER, EXPERTS, TOP = 48, 36, 5, 2
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "hidden_act": "silu",
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2", "moe_latent_size": None,
    "swiglu_alpha": 1.702, "swiglu_limit": 1.5, "alpha": 1.702, "limit": 1.5,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("native")
# By class: what the probes find between the products.
KNOWN = {
    "mixtral.modeling_mixtral:MixtralExperts": ExpertGate("sigmoid"),
    "qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts": ExpertGate("sigmoid"),
    "gpt_oss.modeling_gpt_oss:GptOssExperts": ExpertGate(
        "sigmoid", 1.702, mixed=True, act_most=1.391658, up_most=1.5, shift=1.0
    ),
    "aria.modeling_aria:AriaExperts": ExpertGate("sigmoid"),
    "nemotron_h.modeling_nemotron_h:NemotronHExperts": ExpertGate("relu squared", gated=False),
}


def made(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Return random experts of a class, computed by the engine, and the same ones as transformers computes them.
    dtype: of matrices; biases are held in fp32."""
    config = SimpleNamespace(**SIZES | options, _experts_implementation="eager")
    module = resolve_name(f"transformers.models.{name}")(config)
    for p in module.parameters():
        p.data = (torch.randn(p.shape) / p.shape[-1] ** 0.5).to(dtype if p.dim() == 3 else torch.float32)
    own = copy.deepcopy(module).double()
    module.config = SimpleNamespace(_experts_implementation=experts.EXPERTS)
    use_product(nn.ModuleList([module]), Product(torch.float32))
    return module, own


def tokens(rows: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(rows)])
    return torch.randn(rows, hidden), chosen, torch.rand(rows, TOP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KNOWN)
def test_experts_of_transformers(name: str, dtype: torch.dtype, native: NativeKernels) -> None:
    module, own = made(name, dtype)
    found = find_gate(module, native)
    assert found is not None
    assert found._replace(act_most=0.0) == KNOWN[name]._replace(act_most=0.0)
    assert found.act_most == pytest.approx(KNOWN[name].act_most, rel=1e-5)
    for rows in (1, 2, 30):
        x, chosen, shares = tokens(rows)
        assert experts.native_experts(module, x) is not None
        expected = own(x.double(), chosen, shares.double())
        torch.testing.assert_close(module(x, chosen, shares).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("act", "known"), [
    ("gelu", "erf"), ("gelu_pytorch_tanh", "tanh"), ("relu", "relu"), ("quick_gelu", "sigmoid"),
])  # fmt: skip
def test_other_activations(act: str, known: str, native: NativeKernels) -> None:
    module, own = made("mixtral.modeling_mixtral:MixtralExperts", hidden_act=act)
    found = find_gate(module, native)
    assert found == ExpertGate(known, 1.702 if act == "quick_gelu" else 1.0)
    x, chosen, shares = tokens(7)
    expected = own(x.double(), chosen, shares.double())
    torch.testing.assert_close(module(x, chosen, shares).double(), expected, atol=2e-5, rtol=2e-5)


def softened(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.tanh(gate) * up


def lowered(x: Tensor) -> Tensor:
    """A gate whose limit below is seen by random numbers only."""
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate.clamp(min=-8)) * up


def moved(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate + 1) * up


@pytest.mark.parametrize("gate", [softened, lowered, moved])
def test_other_gates_are_computed_one_by_one(gate: Any) -> None:
    module, own = made("mixtral.modeling_mixtral:MixtralExperts")
    module.__dict__["_apply_gate"] = own.__dict__["_apply_gate"] = gate
    own.config._experts_implementation = "batched_mm"  # it calls `_apply_gate`
    x, chosen, shares = tokens(7)
    assert experts.native_experts(module, x) is None
    expected = own(x.double(), chosen, shares.double())
    torch.testing.assert_close(module(x, chosen, shares).double(), expected, atol=2e-5, rtol=2e-5)


class OfLayer(nn.Module):
    """A gate that depends on the number of its layer."""

    has_gate, layer_idx = True, 3

    def _apply_gate(self, x: Tensor) -> Tensor:
        return x * self.layer_idx


def test_gates_with_other_settings_are_probed_on_their_own() -> None:
    """A list, a dict, a hook or a layer's number may make the gates of two layers differ."""
    (module, _), (other, _) = (made("mixtral.modeling_mixtral:MixtralExperts") for _ in range(2))
    other.config, other.__dict__["product"] = module.config, module.product
    known = gates.gate_settings(module)
    assert known is not None
    module.__dict__["by_rows"], other.__dict__["packed"], other.layer_idx = (3, ["up"]), {"up"}, 3
    assert gates.gate_settings(module) == gates.gate_settings(other) == known
    for value in ([1.5], (1.5,), {"most": 1.5}, 1.5):
        other.limits = value
        assert gates.gate_settings(other) not in (known, None)
    del other.limits
    with_hook = other.act_fn.register_forward_hook(lambda *_: None)
    assert gates.gate_settings(other) is None
    with_hook.remove()
    assert gates.gate_settings(other) == known
    assert gates.gate_settings(OfLayer()) is None


def test_layers_with_other_numbers_of_experts(native: NativeKernels) -> None:
    """They share a call; the struct of each has its own number, and gives the module's result."""
    layers = [made("mixtral.modeling_mixtral:MixtralExperts", num_local_experts=n)[0] for n in (TOP, EXPERTS, TOP)]
    use_product(nn.ModuleList(layers), Product(torch.float32))
    (x, _, shares), chosen, out = tokens(7), torch.tensor([[0, 1]] * 7), torch.full((7, HIDDEN), torch.nan)
    natives = [experts.native_experts(layer, x) for layer in layers]
    assert len({id(n.call) for n in natives if n is not None}) == 1
    found, kept = experts.placed([n for n in natives if n is not None], x, chosen, shares, out)
    assert [Experts.from_address(place).experts for place in found] == [TOP, EXPERTS, TOP]
    for layer, place in zip(layers, found, strict=True):
        native.run_items(np.array([[place, MIXTURE, 1]]))
        assert torch.equal(out, layer(x, chosen, shares))
    del kept


def test_a_fault_of_the_kernels_is_no_other_gate(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised; a fault of the module's code, as of `raising`, means a gate that the kernels do not compute."""

    def raising(*args: Any) -> Any:
        raise MemoryError("no room")

    module, _ = made("mixtral.modeling_mixtral:MixtralExperts")
    monkeypatch.setattr(gates, "gated", raising)
    with pytest.raises(MemoryError, match="no room"):
        find_gate(module, native)
    module.__dict__["_apply_gate"] = raising
    assert find_gate(module, native) is None


def test_watched_experts_are_computed_one_by_one() -> None:
    module, own = made("qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts")
    seen = dict[str, list[int]](gate_up_proj=[], down_proj=[])
    module.__dict__["watch"] = {name: lambda expert, x, to=to: to.append(expert) for name, to in seen.items()}
    x, chosen, shares = tokens(4)
    expected = own(x.double(), chosen, shares.double())
    torch.testing.assert_close(module(x, chosen, shares).double(), expected, atol=2e-5, rtol=2e-5)
    assert seen["gate_up_proj"] == seen["down_proj"] == sorted(set(chosen.flatten().tolist()))


def one_by_one(module: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert, picked in experts.by_expert(chosen, EXPERTS):
        experts.add_expert(module, x, shares, picked, out, expert, expert)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_reordered_matrices_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """As resident ones are, in the call and one by one."""
    hidden, inner = 70, 72
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner}
    module, _ = made(name, dtype, **sizes)
    given = [(rows, tokens(rows, hidden)) for rows in (1, 9, 40)]
    before = [(module(*some), one_by_one(module, *some)) for _, some in given]
    matrices = [ParamRef(module, n, tuple(p.shape)) for n, p in module.named_parameters() if p.dim() == 3]
    for param in matrices:
        resident.pack_resident(param, param.holder[param.name].data)
    assert module.packed == {param.name for param in matrices}
    for (_, some), (together, single) in zip(given, before, strict=True):
        assert torch.equal(module(*some), together)
        assert torch.equal(one_by_one(module, *some), single)
    resident.note_plain(matrices[0])
    assert "packed" not in module.__dict__


def test_the_call_gives_the_sums_of_single_products() -> None:
    """Bit by bit what one product after the other gives, except for the activation's last bits."""
    module, _ = made("nemotron_h.modeling_nemotron_h:NemotronHExperts", mlp_hidden_act="relu")
    x, chosen, shares = tokens(20)
    assert torch.equal(module(x, chosen, shares), one_by_one(module, x, chosen, shares))


def test_large_matrices_across_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed copy of one would take memory that no ledger has."""
    module, _ = made("gpt_oss.modeling_gpt_oss:GptOssExperts", hidden_size=70, intermediate_size=72)
    param = ParamRef(module, "gate_up_proj", tuple(module.gate_up_proj.shape))
    before = module.gate_up_proj.data.clone()
    monkeypatch.setattr(resident, "TURNED", before[0].nbytes - 1)
    resident.pack_resident(param, module.gate_up_proj.data)
    assert torch.equal(module.gate_up_proj.data, before)
    assert "packed" not in module.__dict__
    monkeypatch.setattr(resident, "TURNED", before[0].nbytes)
    resident.pack_resident(param, module.gate_up_proj.data)
    assert module.packed == {"gate_up_proj"}


def test_calls_of_a_model_share_memory_that_ends_with_the_job() -> None:
    (one, _), (two, _) = (
        made("qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts", moe_intermediate_size=n) for n in (36, 40)
    )
    use_product(nn.ModuleList([two]), one.product)
    assert one.product is two.product
    some = tokens(9)
    first = one(*some)
    two(*some)
    calls = experts._calls[one.product]
    assert len(calls.formats) == 2
    assert {id(call._memory) for call in calls.formats.values()} == {id(calls.memory)}
    assert calls.memory.block.nbytes
    experts.release(one.product)
    assert not calls.memory.block.nbytes
    assert torch.equal(one(*some), first)
    experts.release(Product(torch.float32))  # of a model without calls


def test_more_memory_than_is_booked_does_not_stay() -> None:
    memory = ExpertMemory()
    assert memory.take(EXPERTS_KEPT).data_ptr() == memory.take(100).data_ptr()
    assert memory.take(EXPERTS_KEPT + 1).nbytes > EXPERTS_KEPT == memory.block.nbytes
