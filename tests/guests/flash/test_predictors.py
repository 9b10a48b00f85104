"""Predictors: scores by the formula, and the same bits for a token in any batch."""

import pytest
import torch
from torch import Tensor

from flexengine.guests.flash.predictors import Predictor

TOKENS, WIDTH, NEURONS, RANK = 19, 48, 112, 8


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(dtype: torch.dtype = torch.bfloat16) -> Predictor:
    a, b, bias = (matrix(RANK, WIDTH, seed=1), matrix(NEURONS, RANK, seed=2), matrix(NEURONS, seed=3))
    return Predictor(a.to(dtype), b.to(dtype), bias, threshold=0.5)


X = matrix(TOKENS, WIDTH, seed=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores(dtype: torch.dtype) -> None:
    predictor = low_rank(dtype)
    expected = X.double() @ predictor.a.double().T @ predictor.b.double().T + predictor.bias
    scores = predictor.scores(X)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(predictor.active(X), scores > 0.5)


def test_a_token_has_the_same_scores_in_every_batch() -> None:
    predictor = low_rank()
    scores = predictor.scores(X)
    for tokens in (1, 2, 5, 16):
        for low in range(0, TOKENS, tokens):
            assert torch.equal(predictor.scores(X[low : low + tokens]), scores[low : low + tokens])


def test_sizes() -> None:
    predictor = low_rank()
    assert (predictor.rank, predictor.neurons) == (RANK, NEURONS)
    assert predictor.nbytes == 2 * RANK * (WIDTH + NEURONS) + 4 * NEURONS
    moved = predictor.to(torch.device("cpu"), torch.float16)
    assert {tensor.dtype for tensor in moved.tensors.values()} == {torch.float16}
