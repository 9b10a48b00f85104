"""Facts about this machine and this installation, and findings: what stops or slows jobs. No fact's failure stops the
others: each is caught and reported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """The error of a probe, instead of its facts."""

    error: str


def attempt(probe: Callable[[], T]) -> T | Failed:
    """Return what the probe returns, or its error."""
    try:
        return probe()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
