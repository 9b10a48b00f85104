"""The bench of bits per layer: ranks by hand, LLM-PQ's formula, and measured costs of a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.bits.__main__ import by_chance, ranks, spearman
from bench.bits.layers import PROMPT, Layered
from bench.bits.mixes import first_layers, layer_bytes, random_harms
from bench.bits.variance import Inputs, factor, omegas

SIZES = [{None: 160, "int8": 80, "int4": 40, "int3": 30}] * 4


def test_ranks() -> None:
    assert ranks([5.0, 1.0, 5.0, 7.0]) == [2.5, 1.0, 2.5, 4.0]
    assert spearman([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
    assert abs(by_chance([float(n) for n in range(30)])["mean"]) < 0.05


def test_uses_of_a_budget() -> None:
    assert [layer_bytes(SIZES, bits) for bits in (3, 3.5, 4, 5, 8)] == [120, 140, 160, 200, 320]
    assert first_layers(SIZES, 200) == ("int8", "int4", "int4", "int4")
    assert first_layers(SIZES, 159) == ("int4", "int4", "int4", "int3")
    harms = random_harms([{"int4": 1.0, "int3": 4.0}] * 3, seed=1)
    assert len({layer["int4"] for layer in harms}) == 3
    assert all(layer["int3"] == pytest.approx(4 * layer["int4"]) for layer in harms)


def test_factors() -> None:
    """Inputs 1 and 3: mean 2, variance 1."""
    inputs = Inputs()
    inputs.add(torch.tensor([[1.0, 3.0]]))
    assert (inputs.mean, inputs.variance) == (2.0, 1.0)
    assert factor(inputs, "deterministic") == 0.25
    assert factor(inputs, "stochastic") == pytest.approx(5 / 6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, initializer_range=0.3)  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_omega_of_a_layer(tiny: Path) -> None:
    """The first layer's query, key and value matrices have the normed embeddings as inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    rows, seen = [[1, 2, 3, 4], [5, 6, 7, 8]], []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for row in rows:
        model(torch.tensor([row]))
    x, weight = torch.cat(seen).double(), model.model.layers[1].mlp.down_proj.weight.detach()
    part = 24 * float((weight.max() - weight.min()) / 15) ** 2 * float(x.var(correction=0)) / 4
    whole = omegas(tiny, rows)
    others = sum(omegas_of(model, rows, name) for name, _ in matrices(model) if name != "mlp.down_proj")
    assert whole["deterministic"][1]["int4"] == pytest.approx(part + others, rel=1e-5)


def matrices(model: Any) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.model.layers[1].named_modules() if isinstance(m, torch.nn.Linear)]


def omegas_of(model: Any, rows: list[list[int]], name: str) -> float:
    module, seen = dict(matrices(model))[name], list[Any]()
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    for row in rows:
        model(torch.tensor([row]))
    hook.remove()
    step = float(module.weight.max() - module.weight.min()) / 15
    return float(module.in_features * step**2 * torch.cat(seen).var(correction=0) / 4)


def test_costs_of_a_layer(tiny: Path) -> None:
    """Those of a whole pass with the changed layer; none with the model's own weights, which stay."""
    rows = torch.randint(97, (2, PROMPT + 8), generator=torch.Generator().manual_seed(1)).tolist()
    layered = Layered(tiny, rows)
    own = dict(layered.matrices(1))
    assert layered.costs(1, {name: w.detach().clone() for name, w in own.items()}) == [(0.0, 0.0)] * 2
    changed = {name: w.detach() * 1.1 for name, w in own.items()}
    found = layered.costs(1, changed)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)

    def logprobs() -> Any:
        with torch.no_grad():
            return model(torch.tensor(rows)).logits[:, PROMPT - 1 : -1].double().log_softmax(-1)

    exact = logprobs()
    model.load_state_dict({**model.state_dict(), **changed})
    other, targets = logprobs(), torch.tensor(rows)[:, PROMPT:, None]
    more = (exact - other).gather(2, targets).mean((1, 2))
    divergence = (exact.exp() * (exact - other)).sum(-1).mean(1)
    for (a, b), c, d in zip(found, more.tolist(), divergence.tolist(), strict=True):
        assert (a, b) == (pytest.approx(c, abs=1e-5), pytest.approx(d, abs=1e-5))
