"""bench.flash.planted_experts and what bench.flash.experts counts: planted choices against transformers' routers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from bench.flash.experts import SHAPES, requests
from bench.flash.experts_side import Choices, worsened, worth
from bench.flash.planted_experts import correlation
from bench.models import make

TINY = SHAPES["tiny"]


@torch.no_grad()
def test_tokens_count_and_their_experts_are_repeated_as_planned(tmp_path: Path) -> None:
    make(TINY, tmp_path, workers=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chosen = list[torch.Tensor]()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: chosen.append(out[2]))
    ids = torch.arange(TINY.vocab)[None]
    logits = model(ids).logits[0]
    assert torch.equal(logits.argmax(-1), (ids[0] + 1) % TINY.vocab)
    shares = [float((each[1:, :, None] == each[:-1, None]).any(-1).float().mean()) for each in chosen]
    assert sum(shares) / len(shares) == pytest.approx(TINY.repeated, abs=0.03)
    assert all(len(each.unique()) == TINY.experts for each in chosen)


def test_correlations() -> None:
    """Independent scores repeat active / experts; equal ones repeat all."""
    assert correlation(2 / 8, 8, 2) == pytest.approx(0, abs=0.02)
    assert correlation(0.9999, 8, 2) > 0.99
    assert correlation(0.5, 8, 2) < correlation(0.7, 8, 2)


def test_guesses_are_made_worse() -> None:
    named = torch.arange(20_000).view(-1, 2) % 8
    router = SimpleNamespace(module=torch.nn.Linear(4, 8))
    kept = float((worsened(lambda router, hidden: named, 0.6)(router, None) == named).float().mean())
    assert kept == pytest.approx(0.6 + 0.4 / 8, abs=0.02)


def test_choices() -> None:
    """Of one row, after its prompt: two layers, three tokens."""
    choices, layers = Choices(1), (object(), object())
    calls = {0: [[[4, 5], [6, 7]], [[0, 1]], [[1, 2]], [[1, 2]]], 1: [[[0, 1], [0, 1]], [[3, 4]], [[5, 6]], [[7, 0]]]}
    for number, chosen in calls.items():
        for each in chosen:
            choices.note(layers[number], torch.tensor(each))
    assert choices.report() == {"distinct": [3, 6], "repeated": (0.5 + 1 + 0 + 0) / 4}


def test_worth() -> None:
    counts = {"chosen": 4, "right": 3, "missing": 2, "found": 1}
    assert worth(counts) == counts | {"guessed": 0.75, "missing_guessed": 0.5}
    nothing = dict.fromkeys(counts, 0)
    assert worth(nothing) == nothing


def test_rows_differ() -> None:
    first, second = requests(2, TINY.vocab)
    assert first.prompt_token_ids != second.prompt_token_ids
