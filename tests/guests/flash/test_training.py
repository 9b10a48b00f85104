"""Training of predictors on planted activity, thresholds by counting, and the division of the stretches."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexengine.errors import InvalidInput
from flexengine.guests.flash.predictors import PredictionErrors, Predictor
from flexengine.guests.flash.traces import RecordedLayer
from flexengine.guests.flash.training import (
    PROBE,
    Settings,
    TrainingText,
    _read,
    divide,
    errors,
    ranks,
    train,
    with_threshold,
)
from flexengine.lossy import Lossy

STRETCHES, TOKENS, WIDTH, NEURONS, HIDDEN = 80, 32, 24, 40, 4
CPU = torch.device("cpu")


def planted(offset: float = 1.3) -> RecordedLayer:
    """Neurons are active where a product of rank HIDDEN exceeds `offset` standard deviations."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STRETCHES, TOKENS, WIDTH, generator=generator) * 3 + 1
    down = torch.randn(HIDDEN, WIDTH, generator=generator)
    up = torch.randn(NEURONS, HIDDEN, generator=generator)
    scores = (x - 1) @ down.T @ up.T
    active = scores > offset * scores.std((0, 1))
    return RecordedLayer(x.half(), torch.from_numpy(np.packbits(active.numpy(), axis=-1)), NEURONS)


def test_planted_activity_is_learned() -> None:
    recorded = planted()
    predictor, found = train(recorded, Settings(misses=0.04, rank=2 * HIDDEN), CPU)
    assert found.active_share == pytest.approx(recorded.active()[9::10].float().mean())
    assert found.misses <= 0.08  # the threshold was chosen on other tokens
    assert found.false_alarms <= 0.05
    assert predictor.rank == 2 * HIDDEN
    x, active = recorded.x[9::10].flatten(0, 1), recorded.active()[9::10].flatten(0, 1)
    assert predictor.a is not None
    assert predictor.bias is not None
    scores = x.float() @ predictor.a.float().T @ predictor.b.float().T + predictor.bias
    predicted = scores > predictor.threshold
    assert int((predicted & ~active).sum()) / int((~active).sum()) == pytest.approx(found.false_alarms, abs=1e-3)
    assert int((~predicted & active).sum()) / int(active.sum()) == pytest.approx(found.misses, abs=1e-3)


def test_training_is_repeatable() -> None:
    first, second = (train(planted(), Settings(rank=4, seed=2), CPU) for _ in range(2))
    assert torch.equal(first[0].b, second[0].b)
    assert first[1] == second[1]


def test_neurons_that_are_never_active_are_not_predicted() -> None:
    predictor, found = train(planted(offset=100.0), Settings(rank=4), CPU)
    assert (found.active, found.predicted, found.misses, found.false_alarms) == (0, 0, 0.0, 0.0)
    assert math.isfinite(predictor.threshold)


@pytest.mark.parametrize("misses", [0.01, 0.05, 0.5])
def test_the_threshold_is_the_highest_with_few_misses(misses: float) -> None:
    """Against all scores in order."""
    recorded, generator = planted(), torch.Generator().manual_seed(2)
    predictor = Predictor(torch.eye(WIDTH), torch.randn(NEURONS, WIDTH, generator=generator), torch.zeros(NEURONS))
    active = recorded.active().flatten(0, 1)
    positive = predictor.scores(recorded.x.flatten(0, 1).float())[active].sort().values
    found, counted = with_threshold(predictor, recorded.flat(CPU), misses)
    missed = int((positive <= found.threshold).sum())
    assert missed == counted.missed == sum(1 for n in range(1, len(positive)) if n <= misses * len(positive))
    assert counted == errors(found, recorded.flat(CPU))


def test_active_neurons_are_the_bits() -> None:
    recorded = planted()
    assert torch.equal(
        recorded.active(), torch.from_numpy(np.unpackbits(recorded.bits.numpy(), axis=-1, count=NEURONS)).bool()
    )
    flat = recorded.active().flatten(0, 1)
    assert torch.equal(recorded.flat(CPU).active(slice(3, 90)), flat[3:90])
    assert torch.equal(recorded.flat(CPU).active(torch.tensor([7, 2])), flat[[7, 2]])


def test_errors_are_shares_of_active_and_of_inactive_neurons() -> None:
    found = PredictionErrors(total=100, active=20, predicted=24, missed=4)  # 16 found, 8 false alarms among 80
    assert (found.misses, found.false_alarms) == (0.2, 0.1)
    assert (found.active_share, found.predicted_share) == (0.2, 0.24)
    assert found + PredictionErrors(1, 1, 1, 1) == PredictionErrors(101, 21, 25, 5)
    assert PredictionErrors(0, 0, 0, 0).misses == 0.0


def test_division() -> None:
    train, choose, measure = divide(25)
    assert sorted(train + choose + measure) == list(range(25))
    assert (choose, measure) == ([8, 18], [9, 19])


def test_ranks() -> None:
    assert ranks(4096, 16384, None) == (128, 512, 1024)
    assert ranks(192, 1536, None) == (32, 48)
    assert ranks(24, 40, None) == (24,)
    assert ranks(24, 40, 8) == (8,)
    assert ranks(24, 40, 100) == (24,)


@pytest.mark.parametrize("misses", [0.0, -0.1, 0.51, math.nan])
def test_shares_of_misses_out_of_range(misses: float) -> None:
    with pytest.raises(InvalidInput, match=r"^misses is"):
        Settings(misses)


def test_ranks_out_of_range() -> None:
    with pytest.raises(InvalidInput, match=r"^rank is 0"):
        Settings(rank=0)


def test_of_a_stretch_that_cannot_be_read_no_wrong_number_is_told() -> None:
    """The stretches are read in two parts, and a result has its number in its part."""
    failed = [SimpleNamespace(error=None, index=0), SimpleNamespace(error="too long", index=1)]
    answers = iter([failed[:1] * PROBE, failed])
    engine: Any = SimpleNamespace(
        core=SimpleNamespace(lossy=Lossy()), planner=SimpleNamespace(), score=lambda *_: next(answers)
    )
    recorder: Any = SimpleNamespace(watching=nullcontext, shares=[0.1])
    with pytest.raises(InvalidInput, match="cannot read a stretch of the text: too long"):
        _read(engine, TrainingText("the text", ((1, 2, 3),) * (PROBE + 2)), recorder)
