"""Scores of given tokens from parts of the logits, and the step from the output projection to the logits."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from flexengine.model.build import build
from flexengine.model.sample import NONFINITE, LogitStep
from flexengine.model.scores import Scores


def scored(logits: Tensor, targets: list[int], rows: int, columns: int) -> Scores:
    """Scores of logits [positions, vocabulary], added in parts of `rows` positions and `columns` tokens."""
    scores = Scores(torch.tensor(targets), rows)
    for token in range(0, logits.shape[1], columns):
        for row, part in scores.parts(logits[None, :, token : token + columns]):
            scores.add(part[0], row, token)
    return scores


@pytest.mark.parametrize(("rows", "columns"), [(64, 50), (64, 7), (3, 50), (1, 1), (2, 49)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scores_are_those_of_log_softmax(rows: int, columns: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 50, generator=generator) * scale
    logits[3, 20], logits[4] = -torch.inf, 2.5  # a token of probability 0; all equal
    targets = [0, 49, 7, 20, 31, 6, 25, 24, 48]
    exact, found = logits.double().log_softmax(-1), scored(logits, targets, rows, columns).results()
    assert [each.token for each in found] == targets
    for i, (each, target) in enumerate(zip(found, targets, strict=True)):
        assert each.logprob == pytest.approx(float(exact[i, target]), rel=1e-6, abs=1e-5)
        ((likeliest, best),) = each.top
        assert likeliest == int(exact[i].argmax())
        assert best == pytest.approx(float(exact[i, likeliest]), rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("columns", [4, 10])
def test_logits_that_are_not_finite(columns: int) -> None:
    logits = torch.zeros(5, 10)
    logits[0, 7], logits[1, 2], logits[2], logits[3, 9] = torch.nan, torch.inf, -torch.inf, -torch.inf
    found = scored(logits, [1, 1, 1, 1, 1], 64, columns).results()
    assert [each.token for each in found] == [NONFINITE, NONFINITE, NONFINITE, 1, 1]
    assert found[3].logprob == pytest.approx(-torch.log(torch.tensor(9.0)).item())


@pytest.mark.parametrize(("family", "values", "step"), [
    ("Llama", {}, lambda x: x),
    ("Gemma2", {"final_logit_softcapping": 3.0, "num_key_value_heads": 2}, lambda x: 3 * torch.tanh(x / 3)),
    ("Cohere", {"logit_scale": 0.25}, lambda x: x * 0.25),
    ("Granite", {"logits_scaling": 8.0}, lambda x: x / 8),
    ("OPT", {"word_embed_proj_dim": 8, "ffn_dim": 8}, lambda x: x),
])  # fmt: skip
def test_the_step_to_the_logits_is_the_model_s_own(
    tmp_path: Any, family: str, values: dict[str, Any], step: Any
) -> None:
    sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config = getattr(transformers, f"{family}Config")(**sizes | values, architectures=[f"{family}ForCausalLM"])
    config.save_pretrained(tmp_path)
    made = build(tmp_path, torch.float32).head_module.step
    assert made.fault is None
    part = torch.randn(1, 5, 11, generator=torch.Generator().manual_seed(2)) * 4
    torch.testing.assert_close(made(part), step(part))
    assert made.given is None


class Mixing(torch.nn.Module):
    """A model whose logits depend on those of other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Identity()
        self.step = LogitStep(self, "model", 4)

    def forward(self, **_: Any) -> Any:
        assert self.step.given is not None
        return transformers.modeling_outputs.CausalLMOutput(logits=self.step.given.softmax(-1))


def test_a_step_that_mixes_tokens_is_refused() -> None:
    assert Mixing().step.fault == "its logits depend on those of other tokens"
