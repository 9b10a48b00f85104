"""The lossy choices that `flexengine quality` measures, and their cost: negative log-likelihood against the exact
model's, paired over stretches of text."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from flexengine.errors import InvalidInput
from flexengine.lossy import BUNDLED, CACHE, COMPUTE, FITTED, MIXED, WEIGHTS, Formats, Lossy, weights_text

SHARES = (0.1, 0.25)
# Values of each switch that are measured if none is given. Flash mode needs a sparse model with predictors, and
# sparsify a pass of the exact model over a text.
ALL: Mapping[str, Iterable[Any]] = {
    "weights": WEIGHTS,
    "compute": COMPUTE,
    "cache": CACHE,
    "sparse_attention": SHARES,
    "flash": (),
    "sparsify": (),
}


def asked(
    given: Mapping[str, Sequence[Any] | None],
    together: bool = False,
    calibrate: str | None = None,
    budget: str | None = None,
) -> list[Lossy]:
    """Return the choices to measure: each given value of a switch alone, or all values if none is given. Raise
    InvalidInput for `together` with fewer than two switches, `calibrate` without a choice that has a use for it, or one
    of `budget` and weights `mixed` without the other.

    Args:
        given: values by switch.
        together: add every combination of one value of each given switch.
        calibrate: a calibration text. Every choice whose weights are fitted is added again with calibration; weights
            `mixed` are always calibrated, and `sparsify` finds its thresholds on this text.
        budget: budget of weights `mixed`.
    """
    some: dict[str, Iterable[Any]] = {name: values for name in ALL if (values := given.get(name))}
    if together and len(some) < 2:
        raise InvalidInput("--all-together combines choices; give at least two kinds, such as --weights and --cache")
    if budget is not None and MIXED not in some.get("weights", ()):
        fault = f"--budget is {budget}, but no choice has {MIXED} weights"
        raise InvalidInput(f"{fault}; give --weights {MIXED}, too, or leave it out")
    mixed: dict[str, Any] = {"budget": budget, "calibrate": calibrate}

    def lossy_of(switches: Mapping[str, Any]) -> Lossy:
        text = {"calibrate": calibrate} if switches.get("sparsify") is not None else {}
        return Lossy(**switches, **(mixed if switches.get("weights") == MIXED else text))

    alone = [lossy_of({name: value}) for name, values in (some or ALL).items() for value in values]
    every = product(*some.values()) if together else ()
    plain = list(dict.fromkeys([*alone, *(lossy_of(dict(zip(some, each, strict=True))) for each in every)]))
    if calibrate is None:
        return plain
    if not any(lossy.fitted or not lossy.decided or lossy.sparsify is not None for lossy in plain):
        fault = f"calibration on {calibrate} is for weights that are fitted, and for sparsify, and no choice has any"
        remedy = f"give --weights with one of {', '.join(FITTED)}, or --sparsify, too, or leave it out"
        raise InvalidInput(f"{fault}; {remedy}")
    both = ((x, replace(x, calibrate=calibrate)) if x.fitted or x.file else (x,) for x in plain)
    return list(dict.fromkeys(lossy for pair in both for lossy in pair))


def run_words(lossy: Lossy) -> list[str]:
    """Return the options of `run` that set these switches."""
    words = []
    for name, value in lossy.enabled.items():
        if name == "calibrate" and value != BUNDLED:
            words += ["--calibration-text", value]
        elif name == "calibrate":
            words += [] if lossy.weights == MIXED else ["--calibrate"]
        elif name == "weights" and lossy.file:
            words += ["--layer-bits", lossy.file]
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


@dataclass(frozen=True)
class Scored:
    """Scores of the stretches under one choice."""

    logprobs: tuple[tuple[float, ...], ...]  # log probabilities of the forced tokens, one tuple per stretch
    likeliest: tuple[tuple[int, ...], ...]  # the model's most likely tokens at the same positions
    weights: int  # bytes of all weights
    cache: int  # KV cache bytes of a token, summed over layers
    # Seconds of prefill and decoding. Weights that stay in memory are read before, so that the formats of a model
    # differ only by the time to compute and to stream.
    seconds: float
    bits: Formats | None = None  # format of each layer, None if all layers have one


@dataclass(frozen=True)
class LossyCost:
    """The cost of a choice. weights, cache, seconds and bits are those of `Scored`."""

    lossy: Lossy
    nll: float = math.nan  # mean negative log-likelihood of a token, in nats
    more: float = math.nan  # increase of `nll` over the exact model
    error: float | None = None  # standard error of `more`, paired over stretches; None for a single stretch
    perplexity: float = math.nan  # exp(nll)
    same: float = math.nan  # share of the positions at which the likeliest token equals the exact model's
    weights: int = 0
    cache: int = 0
    seconds: float = 0.0
    bits: Formats | None = None
    refused: str | None = None  # why the choice could not be measured; None if it was

    @property
    def name(self) -> str:
        """Return the choice as text, with the formats that weights `mixed` got."""
        return f"{self.lossy} ({weights_text(self.bits)})" if self.bits and not self.lossy.decided else str(self.lossy)


def cost(lossy: Lossy, exact: Scored, scored: Scored) -> LossyCost:
    """Return the cost of a choice, by the scores with the exact model and with the choice."""
    nll = -statistics.fmean(value for row in scored.logprobs for value in row)
    pairs = zip(exact.logprobs, scored.logprobs, strict=True)
    apart = [statistics.fmean(a) - statistics.fmean(b) for a, b in pairs]  # stretches are assumed to be independent
    more, error = statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else None
    perplexity = math.exp(nll) if nll < 700 else math.inf
    likeliest = zip(exact.likeliest, scored.likeliest, strict=True)
    same = statistics.fmean(a == b for rows in likeliest for a, b in zip(*rows, strict=True))
    of_run = (scored.weights, scored.cache, scored.seconds, scored.bits)
    return LossyCost(lossy, nll, more, error, perplexity, same, *of_run)
