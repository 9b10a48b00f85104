"""Probes that cannot fail: the error of one is a value."""

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
