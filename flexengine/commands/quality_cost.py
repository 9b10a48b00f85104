"""Statistics of lossy choices: negative log-likelihood against the exact model's, paired over stretches of text."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flexengine.lossy import Formats, Lossy, weights_text


@dataclass(frozen=True)
class Scored:
    """Scores of the stretches under one choice.

    Attributes:
        logprobs: log probabilities of the forced tokens, one tuple per stretch.
        likeliest: the model's most likely tokens at the same positions.
        weights: bytes of all weights.
        cache: KV cache bytes of a token, summed over layers.
        seconds: seconds of prefill and decoding. Weights that stay in memory are read before, so that the formats of a
            model differ only by the time to compute and to stream.
        bits: format of each layer, None if all layers have one.
    """

    logprobs: tuple[tuple[float, ...], ...]
    likeliest: tuple[tuple[int, ...], ...]
    weights: int
    cache: int
    seconds: float
    bits: Formats | None = None


@dataclass(frozen=True)
class LossyCost:
    """The cost of a choice.

    Attributes:
        nll: mean negative log-likelihood of a token, in nats.
        more: increase of `nll` over the exact model.
        error: standard error of `more`, paired over stretches; None for a single stretch.
        perplexity: exp(nll).
        same: share of the positions at which the likeliest token equals the exact model's.
        weights: bytes of all weights.
        cache: KV cache bytes of a token, summed over layers.
        seconds: see Scored.
        bits: see Scored.
        refused: why the choice could not be measured; None if it was.
    """

    lossy: Lossy
    nll: float = math.nan
    more: float = math.nan
    error: float | None = None
    perplexity: float = math.nan
    same: float = math.nan
    weights: int = 0
    cache: int = 0
    seconds: float = 0.0
    bits: Formats | None = None
    refused: str | None = None

    @property
    def name(self) -> str:
        """Return the choice as text, with the formats that weights `mixed` got."""
        return f"{self.lossy} ({weights_text(self.bits)})" if self.bits and not self.lossy.decided else str(self.lossy)


def cost(lossy: Lossy, exact: Scored, scored: Scored) -> LossyCost:
    """Return the cost of a choice.

    Args:
        exact: scores of the exact model.
        scored: scores with the choice.
    """
    nll = mean_nll(scored.logprobs)
    more, error = increase(exact.logprobs, scored.logprobs)
    perplexity = math.exp(nll) if nll < 700 else math.inf
    same = agreement(exact.likeliest, scored.likeliest)
    of_run = {name: getattr(scored, name) for name in ("weights", "cache", "seconds", "bits")}
    return LossyCost(lossy, nll, more, error, perplexity, same, **of_run)


def mean_nll(logprobs: Sequence[Sequence[float]]) -> float:
    """Return the mean negative log-likelihood over all tokens of all stretches, in nats."""
    return -statistics.fmean(value for row in logprobs for value in row)


def increase(exact: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Return the mean of nll(other) - nll(exact) over stretches of equal length, and its standard error, which is None
    for a single stretch. Stretches, not tokens, are assumed to be independent."""
    apart = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(exact, other, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else None
    return statistics.fmean(apart), error


def agreement(exact: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the share of positions at which both have the same token."""
    pairs = [a == b for row, col in zip(exact, other, strict=True) for a, b in zip(row, col, strict=True)]
    return sum(pairs) / len(pairs)
