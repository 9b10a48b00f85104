"""The bench of a ReLU model trained on the spot: masks, loss, and the division of the text, on a tiny model."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from bench.flash import relu_model
from bench.flash.relu_lm import masked
from bench.flash.relu_model import LEARN, TEST, TRAIN, Shape, blocks, ids_of, nll, rows_of, source, train, watching
from tests.helpers.relu import CONTEXT, make_relu

ROWS = rows_of(ids_of("def f(x):\n    return x + 1\n" * 20), 4, CONTEXT - 1)


def test_the_oracles_mask_changes_nothing(tmp_path: Path) -> None:
    model = make_relu(tmp_path)
    firsts = [block.fc1 for block in blocks(model)]
    dense = nll(model, ROWS)
    with torch.no_grad(), masked(model, lambda number, x: linear(x, firsts[number].weight, firsts[number].bias) > 0):
        assert nll(model, ROWS) == pytest.approx(dense, abs=1e-6)
    with torch.no_grad(), masked(model, lambda number, x: torch.zeros(len(x), 48, dtype=torch.bool)):
        nothing = nll(model, ROWS)
    for block in blocks(model):
        block.fc2.weight.data.zero_()
    assert nothing == pytest.approx(nll(model, ROWS), abs=1e-6)
    assert abs(nothing - dense) > 1e-3


def test_loss_is_that_of_transformers(tmp_path: Path) -> None:
    model = make_relu(tmp_path)
    with torch.no_grad():
        assert nll(model, ROWS) == pytest.approx(float(model(ROWS, labels=ROWS).loss), rel=1e-5)


def test_parts_of_the_text_differ() -> None:
    found = {part: source(part) for part in (TRAIN, LEARN, TEST)}
    assert len(found[TRAIN]) > 5 * len(found[LEARN])
    assert min(map(len, found.values())) > 200_000


def test_the_penalty_makes_activations_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = source(TEST)[:200_000]  # all of TRAIN takes half a minute to tokenize
    monkeypatch.setattr(relu_model, "source", lambda part: text)
    sizes = dict(width=16, layers=2, heads=2, neurons=64, context=16, rows=2, steps=60)
    shares = []
    for sparsity in (0.0, 30.0):
        made = train(Shape(**sizes, sparsity=sparsity), tmp_path / str(sparsity))  # type: ignore[arg-type]
        shares.append(made["train_active"])
    assert shares[1] < 0.5 * shares[0]
    with watching(make_relu(tmp_path)) as found:
        assert found == []
