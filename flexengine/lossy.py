"""What a job may trade for speed and room: switches whose results differ from the checkpoint's own."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

from flexengine.errors import InvalidInput

WEIGHTS = ("int8", "int4", "int3", "int2")
FITTED = ("int4", "int3", "int2")  # those whose scales are fitted, so that it matters to what
CACHE = {"bf16": 0, "int8": 8, "int4": 4, "int2": 2}  # bits of a code; 0: kept as numbers
COMPUTE = ("bf16", "int8")
BUNDLED = "bundled"  # text to calibrate with that needs no file


@dataclass(frozen=True)
class Lossy:
    """weights, cache: in how many bits they are kept. compute: in what products are taken. topk: share of the past
    values that attention reads. calibrate: a UTF-8 file, or BUNDLED, whose tokens decide which errors of encoded
    weights matter. None everywhere is exact."""

    weights: str | None = None
    compute: str | None = None
    cache: str | None = None
    topk: float | None = None
    calibrate: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("weights", WEIGHTS), ("compute", COMPUTE), ("cache", CACHE)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise InvalidInput(
                    f"{name} is {value!r}; it must be one of {', '.join(known)}, or left out to be exact"
                )
        share = self.topk
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1):
            raise InvalidInput(f"topk is {share!r}; it must be a share above 0 and below 1, or left out to be exact")
        if self.calibrate is not None and (not isinstance(self.calibrate, str) or not self.calibrate):
            raise InvalidInput(f"calibrate is {self.calibrate!r}; it must be the name of a text file, or {BUNDLED!r}")
        if self.calibrate is not None and self.coded not in FITTED:
            kept = "none are encoded" if self.coded is None else f"they are {self.coded}, which is not fitted"
            raise InvalidInput(f"calibrate is {self.calibrate!r}, but it is for weights that are fitted, and {kept};"
                               f" let weights be one of {', '.join(FITTED)}, or leave it out")  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.given)

    @property
    def given(self) -> dict[str, Any]:
        """The switches that are set, by name: what a job's manifest keeps."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def coded(self) -> str | None:
        """How the layers' matrices are encoded, if they are: products of integers need integers."""
        return self.weights or ("int8" if self.compute == "int8" else None)

    @property
    def cache_bits(self) -> int:
        """Bits of an element of keys and values that are encoded; 0: they are not."""
        return CACHE[self.cache] if self.cache else 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.given.items()) or "exact"


EXACT = Lossy()
SWITCHES = tuple(f.name for f in fields(Lossy))
# What a planner may be allowed to choose from, by name; the least lossy of a kind first.
ALLOW: dict[str, tuple[str, str | float]] = {
    **{f"{codec}-weights": ("weights", codec) for codec in WEIGHTS},
    **{f"{codec}-compute": ("compute", codec) for codec in COMPUTE},
    **{f"{codec}-cache": ("cache", codec) for codec in CACHE},
    "topk": ("topk", 0.1),
}
QUALITY = {
    "exact": (),
    "near": ("int8-weights", "int8-compute", "int8-cache"),
    "small": ("int8-weights", "int4-weights", "int8-compute", "int8-cache", "int4-cache"),
}


def choices(allowed: Iterable[str]) -> tuple[Lossy, ...]:
    """Every combination of what is allowed, exact first. Raises InvalidInput for a name that is not in ALLOW."""
    values: dict[str, list[Any]] = {name: [None] for name in SWITCHES}
    wanted = list(allowed)
    if unknown := [name for name in wanted if name not in ALLOW]:
        raise InvalidInput(f"{unknown[0]!r} cannot be allowed; what can is {', '.join(ALLOW)}")
    for name, (switch, value) in ALLOW.items():
        if name in wanted:
            values[switch].append(value)
    made = (Lossy(*combination) for combination in product(*values.values()))
    return tuple(sorted(dict.fromkeys(made), key=lambda lossy: len(lossy.given)))
