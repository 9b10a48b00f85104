"""The next token of each row. Noise is a pure function of (seed, row, token index), so batching cannot change it."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """How one row of logits is sampled: temperature 0 is greedy."""

    temperature: float
    seed: int
    row: int
    token: int


def uniform(seed: int, row: int, token: int) -> float:
    """A number in [0, 1) that depends on its three arguments and nothing else."""
    digest = hashlib.blake2b(f"{seed}/{row}/{token}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Token ids of logits `[rows, vocabulary]`. Sampling inverts the running sum of probabilities at one number."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for i, draw in enumerate(draws):
        if draw.temperature > 0:
            row = logits[i].double()
            # From the top down, so that a temperature near 0 gives exp(-inf) = 0 and not inf - inf.
            weights = ((row - row.max()) / draw.temperature).exp().cumsum(0)
            point = weights[-1] * uniform(draw.seed, draw.row, draw.token)
            at = int(torch.searchsorted(weights, point, right=True))
            tokens[i] = min(at, logits.shape[-1] - 1)
    return tokens
