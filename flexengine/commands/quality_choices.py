"""The lossy choices that `flexengine quality` measures, by the options of its command line."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from flexengine.errors import InvalidInput
from flexengine.lossy import BUNDLED, CACHE, COMPUTE, FITTED, MIXED, WEIGHTS, Lossy

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
    """Return the choices to measure: each given value of a switch alone, or all values if none is given.

    Args:
        given: values by switch.
        together: add every combination of one value of each given switch.
        calibrate: a calibration text. Every choice whose weights are fitted is added again with calibration; weights
            `mixed` are always calibrated, and `sparsify` finds its thresholds on this text.
        budget: budget of weights `mixed`.

    Raises:
        InvalidInput: `together` with fewer than two switches, `calibrate` without a choice that has a use for it, or
            one of `budget` and weights `mixed` without the other.
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
    return [word for name, value in lossy.enabled.items() for word in _words(name, value, lossy)]


def _words(switch: str, value: Any, lossy: Lossy) -> list[str]:
    if switch == "calibrate":
        if value == BUNDLED:
            return [] if lossy.weights == MIXED else ["--calibrate"]
        return ["--calibration-text", str(value)]
    if switch == "weights" and lossy.file:
        return ["--layer-bits", lossy.file]
    return [f"--{switch.replace('_', '-')}", str(value)]
