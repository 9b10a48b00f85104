"""Lossy switches: they save time and memory, and results then differ from those of the checkpoint's own numbers."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

from flexengine.errors import InvalidInput

WEIGHTS = ("int8", "int4", "int3", "int2")
FITTED = ("int4", "int3", "int2")  # their scales are fitted to importances, so calibration changes the result
CACHE = {"bf16": 0, "int8": 8, "int4": 4, "int2": 2}  # bits of a code; 0: floating point, no codes
COMPUTE = ("bf16", "int8")
BUNDLED = "bundled"  # name of the calibration text that comes with the package


@dataclass(frozen=True)
class Lossy:
    """The lossy switches. All None is exact.

    Attributes:
        weights: format in which matrices are stored, from WEIGHTS.
        compute: format in which matrices are multiplied, from COMPUTE.
        cache: format in which keys and values are stored, from CACHE.
        sparse_attention: share of the past values that decode attention reads, in (0, 1).
        calibrate: name of a UTF-8 file, or BUNDLED. The exact model reads this text to measure which errors of encoded
            weights matter.

    Raises:
        InvalidInput: a value is not allowed, or `calibrate` is set for weights that are not in FITTED.
    """

    weights: str | None = None
    compute: str | None = None
    cache: str | None = None
    sparse_attention: float | None = None
    calibrate: str | None = None

    @property
    def alters_cache(self) -> bool:
        """Return whether attention reads other keys and values than those that were computed, or not all of them."""
        return self.cache is not None or self.sparse_attention is not None

    def __post_init__(self) -> None:
        for name, known in (("weights", WEIGHTS), ("compute", COMPUTE), ("cache", CACHE)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise InvalidInput(
                    f"{name} is {value!r}; it must be one of {', '.join(known)}, or left out to be exact"
                )
        share = self.sparse_attention
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1):
            raise InvalidInput(f"sparse_attention is {share!r}; it must be a share above 0 and below 1, or left out to"
                               " be exact")  # fmt: skip
        if self.calibrate is not None and (not isinstance(self.calibrate, str) or not self.calibrate):
            raise InvalidInput(f"calibrate is {self.calibrate!r}; it must be the name of a text file, or {BUNDLED!r}")
        if self.calibrate is not None and self.coded not in FITTED:
            why = "no weights are encoded" if self.coded is None else f"{self.coded} weights are not fitted"
            raise InvalidInput(f"calibrate is {self.calibrate!r}, but it is for weights that are fitted, and {why};"
                               f" set weights to one of {', '.join(FITTED)}, or leave calibrate out")  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.enabled)

    @property
    def enabled(self) -> dict[str, Any]:
        """Return the switches that are set, by name, as a job's manifest stores them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def coded(self) -> str | None:
        """Return the integer format of the layers' matrices, or None if they are not encoded. compute="int8" multiplies
        integers, so without `weights` it encodes the matrices as int8."""
        return self.weights or ("int8" if self.compute == "int8" else None)

    @property
    def cache_bits(self) -> int:
        """Return the bits per element of encoded keys and values; 0 if they are not encoded."""
        return CACHE[self.cache] if self.cache else 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.enabled.items()) or "exact"

    @property
    def described(self) -> str:
        """Return the switches as text, with the command that measures their cost."""
        return f"{self}; flexengine quality shows what that costs" if self else str(self)


EXACT = Lossy()
SWITCHES = tuple(f.name for f in fields(Lossy))
# The switches that the planner may be allowed to choose, by name. Of each switch the least lossy value comes first.
ALLOW: dict[str, tuple[str, str | float]] = {
    **{f"{codec}-weights": ("weights", codec) for codec in WEIGHTS},
    **{f"{codec}-compute": ("compute", codec) for codec in COMPUTE},
    **{f"{codec}-cache": ("cache", codec) for codec in CACHE},
    "sparse-attention": ("sparse_attention", 0.1),
}
QUALITY = {
    "exact": (),
    "near": ("int8-weights", "int8-compute", "int8-cache"),
    "small": ("int8-weights", "int4-weights", "int8-compute", "int8-cache", "int4-cache"),
}


def choices(allowed: Iterable[str]) -> tuple[Lossy, ...]:
    """Return every combination of the allowed switches, exact first, then by number of switches.

    Args:
        allowed: names in ALLOW.

    Raises:
        InvalidInput: a name is not in ALLOW.
    """
    values: dict[str, list[Any]] = {name: [None] for name in SWITCHES}
    names = list(allowed)
    if unknown := [name for name in names if name not in ALLOW]:
        raise InvalidInput(f"{unknown[0]!r} cannot be allowed; choose from {', '.join(ALLOW)}")
    for name, (switch, value) in ALLOW.items():
        if name in names:
            values[switch].append(value)
    made = (Lossy(*combination) for combination in product(*values.values()))
    return tuple(sorted(dict.fromkeys(made), key=lambda lossy: len(lossy.enabled)))
