"""Memory of one part of the worker, and copies of weights, KV pages and hidden states between a tier and the device.

A route has one leg, or two legs through host staging (disk - host - GPU). Each leg is a task in its own lane.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine


class Regions(ExitStack):
    """Regions of tiers that are freed together. An error in `take` or `keep_room` frees all of them first."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

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
        self.callback(self._machine.tier(tier).free, region, what)
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
        self.callback(ledger.release, nbytes, what)

    def free(self) -> None:
        """Free all regions, and release all booked bytes."""
        self.close()


class Transfer(NamedTuple):
    """Bytes that are copied together."""

    pieces: Sequence[Region]  # regions on the tier, in order
    stage: Region | None  # region in host staging; None if the route has one leg
    device: Region  # region on the device


class Mover:
    """Copies parts on one machine. teams: tiers to use in place of the machine's, by name."""

    def __init__(self, machine: Machine, teams: Mapping[str, Tier] | None = None) -> None:
        self.machine, self._teams = machine, teams or {}

    def _tier(self, name: str) -> Tier:
        return self._teams.get(name) or self.machine.tier(name)

    def load(self, tier: str, hop: int, parts: Iterable[Transfer]) -> None:
        """Copy parts one leg toward the device. hop: 0 for the leg from the tier, 1 for the leg from staging."""
        host, device = self.machine.host, self.machine.device
        if hop:
            host.load_all([(part.stage, device.view(part.device)) for part in parts if part.stage is not None])
            return
        pairs: list[tuple[Region, Tensor]] = []
        for part in parts:
            pairs += spread(part.pieces, device.view(part.device) if part.stage is None else host.view(part.stage))
        self._tier(tier).load_all(pairs)

    def store(self, tier: str, hop: int, parts: Iterable[Transfer]) -> None:
        """Copy parts one leg from the device toward their tier. hop: 0 for the leg from the device, 1 for the leg from
        staging."""
        host, device = self.machine.host, self.machine.device
        staging: list[tuple[Tensor, Region]] = []
        pairs: list[tuple[Tensor, Region]] = []
        for part in parts:
            if part.stage is not None and not hop:
                staging.append((device.view(part.device), part.stage))
            else:
                source = device.view(part.device) if part.stage is None else host.view(part.stage)
                pairs += [(flat, piece) for piece, flat in spread(part.pieces, source)]
        if staging:
            host.store_all(staging)
        if pairs:
            self._tier(tier).store_all(pairs)


def spread(pieces: Sequence[Region], target: Tensor) -> list[tuple[Region, Tensor]]:
    """Return each piece with its part of the target."""
    flat, pairs, start = target.view(-1), list[tuple[Region, Tensor]](), 0
    for piece in pieces:
        count = piece.nbytes // piece.dtype.itemsize
        pairs.append((piece, flat[start : start + count]))
        start += count
    return pairs


def part_of(pieces: Sequence[Region], start: int, nbytes: int) -> list[Region]:
    """Return bytes start .. start + nbytes - 1 of the joined pieces, as pieces."""
    parts, offset = list[Region](), 0
    for piece in pieces:
        low, high = max(start, offset), min(start + nbytes, offset + piece.nbytes)
        if low < high:
            parts.append(piece.part(low - offset, high - low))
        offset += piece.nbytes
    return parts


def consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, as (first, last + 1). numbers: rising."""
    starts = [i for i, number in enumerate(numbers) if not i or number != numbers[i - 1] + 1]
    return [(numbers[low], numbers[high - 1] + 1) for low, high in pairwise([*starts, len(numbers)])]


def pick_rows(tier: Tier, pieces: Sequence[Region], numbers: Sequence[int], width: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix, [rows, width] in RAM.

    Args:
        pieces: the matrix, on the tier.
        numbers: numbers of the rows, rising.
        width: elements of a row.
    """
    row = width * pieces[0].dtype.itemsize
    if all(piece.nbytes % row == 0 for piece in pieces):
        stored, low, before = torch.empty(len(numbers), width, dtype=pieces[0].dtype), 0, 0
        for piece in pieces:
            end = before + piece.nbytes // row
            if low < (high := bisect_left(numbers, end, low)):
                tier.pick(piece, torch.tensor(numbers[low:high]) - before, row, stored[low:high].view(torch.uint8))
            low, before = high, end
        return stored.to(dtype)
    rows, pairs, first = torch.empty(len(numbers), width, dtype=dtype), list[tuple[Region, Tensor]](), 0
    for low, high in consecutive(numbers):  # consecutive rows are one read
        pairs += spread(part_of(pieces, low * row, (high - low) * row), rows[first : first + high - low])
        first += high - low
    tier.load_all(pairs)
    return rows
