"""Memory of one part of the worker: allocated one region at a time, freed as a whole."""

from contextlib import ExitStack
from typing import Self

import torch

from flexengine.tier.base import Region
from flexengine.tier.machine import Machine


class Regions:
    """Regions of tiers that are freed together. An error in `take` or `keep_room` frees all of them first."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def take(self, tier: str, nbytes: int, what: str, dtype: torch.dtype = torch.uint8, reads: bool = False) -> Region:
        """Return a new region of `nbytes` bytes, booked as `what`. reads: whether disks will often write to it; see
        `Tier.receive_reads`.

        Raises:
            OutOfMemory: the tier has too little memory.
            InvalidInput: a disk tier cannot make its file.
        """
        try:
            region = self._machine.tier(tier).allocate(nbytes, what, dtype)
        except BaseException:
            self.free()
            raise
        self._held.callback(self._machine.tier(tier).free, region, what)
        if reads:
            self._machine.tier(tier).receive_reads(region)
        return region

    def keep_room(self, tier: str, nbytes: int, what: str) -> None:
        """Book bytes that torch or a reader of files allocates itself. Raise OutOfMemory if the tier has too few."""
        ledger = self._machine.tier(tier).ledger
        try:
            ledger.reserve(nbytes, what)
        except BaseException:
            self.free()
            raise
        self._held.callback(ledger.release, nbytes, what)

    def free(self) -> None:
        """Free all regions, and release all booked bytes."""
        self._held.close()
