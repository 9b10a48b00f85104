"""Memory that belongs together: taken one region at a time, given back as a whole."""

from contextlib import ExitStack

import torch

from flexengine.tier.base import Region
from flexengine.tier.machine import Machine


class Regions:
    """What one part of the worker holds of the tiers. If something cannot be had, what came before it is given back."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._held = ExitStack()

    def take(self, tier: str, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        """A region of a tier, booked as `what`. Raises OutOfMemory or, where a file cannot be had, InvalidInput."""
        try:
            home = self._machine.tier(tier).allocate(nbytes, what, dtype)
        except BaseException:
            self.free()
            raise
        self._held.callback(self._machine.tier(tier).free, home, what)
        return home

    def keep_room(self, tier: str, nbytes: int, what: str) -> None:
        """Books what others (torch) will allocate. Raises OutOfMemory."""
        ledger = self._machine.tier(tier).ledger
        try:
            ledger.reserve(nbytes, what)
        except BaseException:
            self.free()
            raise
        self._held.callback(ledger.release, nbytes, what)

    def free(self) -> None:
        """Gives all of it back."""
        self._held.close()
