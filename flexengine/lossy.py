"""Lossy switches: they save time and memory, and results then differ from those of the checkpoint's own numbers."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Annotated, Any

from flexengine.config import parse_size
from flexengine.errors import InvalidInput, shown
from flexengine.records import Limit, check, named_fields, refuse
from flexengine.words import python_words

WEIGHTS = ("int8", "int4", "int3", "int2")
FITTED = ("int4", "int3", "int2")  # their scales are fitted to importances, so calibration changes the result
MIXED = "mixed"  # weights whose format is chosen for every layer
CACHE = {"bf16": 0, "int8": 8, "int4": 4, "int2": 2}  # bits of a code; 0: floating point, no codes
COMPUTE = ("bf16", "int8")
ORACLE, PREDICTORS = FLASH = ("oracle", "predictors")
RECORDED = ("int8", "int4")  # of WEIGHTS, those that records of neurons can have
BUNDLED = "bundled"  # name of the calibration text that comes with the package
Formats = Sequence[str | None]  # by layer, a name in WEIGHTS, or None for the checkpoint's own numbers


_Share = Annotated[float | None, Limit(math.ulp(0.0), math.nextafter(1, 0)),
                   "a share above 0 and below 1, or left out to be exact"]  # fmt: skip


def _weights(name: str, value: Any) -> str | Formats | None:
    if isinstance(value, list | tuple):
        wrong = [(layer, each) for layer, each in enumerate(value) if each not in (*WEIGHTS, None)]
        if wrong:
            raise InvalidInput(f"{name} is {shown(wrong[0][1])} for layer {wrong[0][0]}; it must be one of"
                               f" {', '.join(WEIGHTS)}, or None (null in JSON) to be exact")  # fmt: skip
        return tuple(value)
    if value not in (*WEIGHTS, MIXED) and not (isinstance(value, str) and value.endswith(".json")):
        refuse(name, value, f"one of {', '.join(WEIGHTS)}, {MIXED} (with a budget), or the name of a .json file with a"
               " format per layer; or left out to be exact")  # fmt: skip
    return str(value)


@named_fields
@dataclass(frozen=True)
class Lossy:
    """The lossy switches. All None is exact.

    Attributes:
        weights: format in which matrices are stored, from WEIGHTS. Or one format per layer, None for the checkpoint's
            numbers; or the name of a .json file that holds them. Or MIXED: the engine chooses them.
        compute: format in which matrices are multiplied, from COMPUTE.
        cache: format in which keys and values are stored, from CACHE.
        sparse_attention: share of the past values that decode attention reads, in (0, 1).
        calibrate: name of a UTF-8 file, or BUNDLED. The exact model reads this text to measure which errors of encoded
            weights matter. MIXED weights need a text: None is BUNDLED for them.
        budget: for MIXED weights, most bytes of all weights on the device, or text such as "6G". Becomes a number.
        flash: of sparse feed-forward blocks, read only the neurons that become active, from FLASH: ORACLE computes
            which ones these are, from half or a third of the block's weights, and is exact; PREDICTORS guess. Of
            mixtures of experts, ORACLE reads the experts that the router chooses, and is exact.
        sparsify: share of the activations of a feed-forward block that become 0, those of the smallest magnitude, in
            (0, 1). For models whose activation function is never 0, such as SiLU. A threshold per layer is measured on
            the text of `calibrate`; None is BUNDLED.

    Raises:
        InvalidInput: a value is not allowed, `calibrate` is set without `sparsify` for weights of which none is in
            FITTED, `budget` is set for weights that are not MIXED, or these have none, or `flash` is set for weights
            that records cannot have.
    """

    weights: Annotated[str | Formats | None, _weights] = None
    compute: Annotated[str | None, COMPUTE, ", or left out to be exact"] = None
    cache: Annotated[str | None, CACHE, ", or left out to be exact"] = None
    sparse_attention: _Share = None
    calibrate: Annotated[str | None, Limit(1), f"the name of a text file, or {BUNDLED!r}"] = None
    budget: Annotated[int | str | None, "a number of bytes, or one with a unit, such as 6G"] = None
    flash: Annotated[str | None, FLASH, ", or left out to be exact"] = None
    sparsify: _Share = None

    @property
    def alters_cache(self) -> bool:
        """Return whether attention reads other keys and values than those that were computed, or not all of them."""
        return self.cache is not None or self.sparse_attention is not None

    @python_words
    def __post_init__(self) -> None:
        check(self)
        if self.weights != MIXED and self.budget is not None:
            raise InvalidInput(f"budget is {shown(self.budget)}, but it is for {MIXED} weights, and weights is"
                               f" {weights_text(self.weights)}; set weights to {MIXED}, or leave the budget"
                               " out")  # fmt: skip
        if self.weights == MIXED:
            if self.budget is None:
                raise InvalidInput(f"weights is {MIXED!r}, but there is no budget; set the budget to the bytes that all"
                                   " weights may take, such as 6G")  # fmt: skip
            object.__setattr__(self, "budget", parse_size(self.budget, "budget"))
            object.__setattr__(self, "calibrate", self.calibrate or BUNDLED)
        if self.calibrate is not None and self.decided and not self.fitted and self.sparsify is None:
            coded = self.coded
            why = "no weights are encoded" if coded is None else f"{weights_text(coded)} weights are not fitted"
            raise InvalidInput(f"calibrate is {shown(self.calibrate)}, but it is for weights that are fitted, and for"
                               f" sparsify, and {why}; set weights to one of {', '.join(FITTED)}, set sparsify, or"
                               " leave calibrate out")  # fmt: skip
        if self.flash is not None and self.weights not in (None, *RECORDED):
            raise InvalidInput(f"flash is {self.flash!r} with weights {weights_text(self.weights)}; neurons are read in"
                               f" {' or '.join(RECORDED)}: choose one of these, or leave weights out")  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.enabled)

    @property
    def enabled(self) -> dict[str, Any]:
        """Return the switches that are set, by name, as a job's manifest stores them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def sparsity(self) -> tuple[float, str] | None:
        """Return the share of `sparsify` and the name of the text for its thresholds; None without `sparsify`."""
        return None if self.sparsify is None else (self.sparsify, self.calibrate or BUNDLED)

    @property
    def file(self) -> str | None:
        """Return the name of the file that holds a format per layer; None if `weights` names no file."""
        is_file = isinstance(self.weights, str) and self.weights.endswith(".json")
        return str(self.weights) if is_file else None

    @property
    def decided(self) -> bool:
        """Return whether the format of every layer is known: weights are not MIXED, and no file is to be read."""
        return self.weights != MIXED and self.file is None

    @property
    def coded(self) -> str | Formats | None:
        """Return the integer format of the layers' matrices, or one per layer; None if they are not encoded, or not
        decided. compute="int8" multiplies integers, so without `weights` it encodes the matrices as int8."""
        if not self.decided:
            return None
        return self.weights or ("int8" if self.compute == "int8" else None)

    @property
    def fitted(self) -> bool:
        """Return whether the format of some layers is in FITTED."""
        coded = self.coded
        return any(each in FITTED for each in ((coded,) if isinstance(coded, str) else coded or ()))

    @property
    def cache_bits(self) -> int:
        """Return the bits per element of encoded keys and values; 0 if they are not encoded."""
        return CACHE[self.cache] if self.cache else 0

    def __str__(self) -> str:
        texts = self.enabled | ({"weights": weights_text(self.weights)} if self.weights else {})
        if isinstance(self.budget, int):
            texts["budget"] = f"{self.budget / 1e6:g} MB"
        return ", ".join(f"{name} {value}" for name, value in texts.items()) or "exact"

    @property
    def described(self) -> str:
        """Return the switches as text, with the command that measures their cost, if they have one."""
        free = self.enabled == {"flash": ORACLE}
        return f"{self}; flexengine quality shows what that costs" if self and not free else str(self)


def weights_text(weights: str | Formats | None) -> str:
    """Return the format of weights as text. A format per layer is counted, as in "2 x int8 + 28 x int4"."""
    if weights is None or isinstance(weights, str):
        return weights or "exact"
    counts = Counter(weights)
    return " + ".join(f"{counts[each]} x {each or 'exact'}" for each in (None, *WEIGHTS) if counts[each])


EXACT = Lossy()
SWITCHES = tuple(f.name for f in fields(Lossy))
# The switches that the planner may be allowed to choose, by name. Of each switch the least lossy value comes first.
ALLOW: dict[str, tuple[str, str | float]] = {
    **{f"{codec}-weights": ("weights", codec) for codec in WEIGHTS},
    **{f"{codec}-compute": ("compute", codec) for codec in COMPUTE},
    **{f"{codec}-cache": ("cache", codec) for codec in CACHE},
    "sparse-attention": ("sparse_attention", 0.1),
    **{f"flash-{mode}": ("flash", mode) for mode in FLASH},
}
TOKENS_PARTITION = "tokens-partition"  # no switch, but it changes the order of sums
ALLOWED = (*ALLOW, TOKENS_PARTITION)
QUALITY = {
    "exact": (),
    "near": ("int8-weights", "int8-compute", "int8-cache"),
    "small": ("int8-weights", "int4-weights", "int8-compute", "int8-cache", "int4-cache"),
}


def choices(allowed: Iterable[str]) -> tuple[Lossy, ...]:
    """Return every combination of the allowed switches, exact first, then by number of switches. Combinations that
    `Lossy` refuses are left out. Raise InvalidInput if a name is not in ALLOWED. allowed: names in ALLOWED."""
    values: dict[str, list[Any]] = {name: [None] for name in SWITCHES}
    names = [name for name in allowed if name != TOKENS_PARTITION]
    if unknown := [name for name in names if name not in ALLOW]:
        several = ", ".join(QUALITY.get(unknown[0], ()))
        short = several and f"; {unknown[0]} is {several}, as in flexengine run --quality {unknown[0]}"
        raise InvalidInput(f"{shown(unknown[0])} cannot be allowed; choose from {', '.join(ALLOWED)}{short}")
    for name, (switch, value) in ALLOW.items():
        if name in names:
            values[switch].append(value)
    combinations = [dict(zip(SWITCHES, each, strict=True)) for each in product(*values.values())]
    made = [Lossy(**each) for each in combinations if each["flash"] is None or each["weights"] in (None, *RECORDED)]
    return tuple(sorted(dict.fromkeys(made), key=lambda lossy: len(lossy.enabled)))
