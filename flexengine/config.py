"""Plain values that everything else reads: sizes, sampling parameters, results. No torch here."""

import os
import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip


def parse_size(text: str | int) -> int:
    """Bytes of a size such as 800M, 1.5GB, 16GiB or 123456. Raises InvalidInput."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = float(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
        if match is None or match[2] not in _UNITS:
            raise InvalidInput(f"size {text!r} is not a number with a unit such as 800M, 1.5GB or 16GiB")
        size = float(match[1]) * _UNITS[match[2]]
    if size <= 0:
        raise InvalidInput(f"size {text!r} must be positive")
    return int(size)


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence is continued.

    max_tokens: most tokens generated per prompt.
    temperature: 0 is greedy; otherwise logits are divided by it before sampling.
    seed: with the row's index and the token's index it determines all sampling noise.
    ignore_eos: go on to max_tokens whatever the model says.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InvalidInput(f"max_tokens is {self.max_tokens!r}; it must be a whole number of at least 1")
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise InvalidInput(f"temperature is {self.temperature!r}; it must be a number")
        if not 0 <= self.temperature <= sys.float_info.max:
            raise InvalidInput(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInput(f"seed is {self.seed!r}; it must be a whole number")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")


def from_fields(kind: type, values: dict[str, Any], what: str) -> Any:
    """Builds a dataclass from JSON fields; an unknown name is refused with the names there are."""
    known = {f.name for f in fields(kind) if f.init}
    if unknown := sorted(set(values) - known):
        raise InvalidInput(f"{what} has unknown fields {unknown}; it takes {sorted(known)}")
    return kind(**values)


@dataclass
class Result:
    """What became of one prompt; the fields of an output row.

    finish_reason: "stop" (end-of-sequence token), "length" (max_tokens) or None when `error` is set.
    """

    index: int
    generated_text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


def cache_root() -> Path:
    """$FLEXENGINE_CACHE, or ~/.cache/flexengine."""
    given = os.environ.get("FLEXENGINE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "flexengine"
