"""Memory that belongs together: taken one region at a time, given back as a whole."""

import torch

from flexengine.tier.base import Home
from flexengine.tier.machine import Machine


class Regions:
    """What one part of the worker holds of the tiers. If a region cannot be had, those before it are given back."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._held: list[tuple[str, Home, str]] = []

    def take(self, tier: str, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Home:
        """A region of a tier, booked as `what`. Raises OutOfMemory or, where a file cannot be had, InvalidInput."""
        try:
            home = self._machine.tier(tier).allocate(nbytes, what, dtype)
        except BaseException:
            self.free()
            raise
        self._held.append((tier, home, what))
        return home

    def free(self) -> None:
        """Gives all of it back."""
        while self._held:
            tier, home, what = self._held.pop()
            self._machine.tier(tier).free(home, what)
