"""The memory of an attention worker as a tier: pages of prompts are stored there, and read for later chunks."""

import contextlib
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexengine.errors import InvalidInput, OutOfMemory, WorkerLost
from flexengine.guests.attention_workers.client import Client
from flexengine.places import worker_names
from flexengine.tier.base import Ledger, Region, Tier, aligned

WAIT_SECONDS = 0.5  # between two attempts to connect to a worker that was lost


class WorkerTier(Tier):
    """Memory of one worker. `Region.place` is the handle of the memory.

    Attributes:
        client: connection to the worker.
        engines: engines that share the worker, of which this is one: each takes at most an equal part of its memory.
    """

    def __init__(self, connect: Callable[[str], Client], name: str, engines: int = 1) -> None:
        """Connect to the worker of a place. connect: starts the worker, or connects to a running one; gets the name of
        the place; may raise WorkerLost."""
        self._connect, self.client, self.name, self.engines = connect, connect(name), name, engines
        self.ledger = Ledger(self.name, self._room())
        self._earlier = (0, 0)  # bytes of questions and answers of lost workers
        self._held: dict[int, tuple[int, str]] = {}  # by handle: bytes of a region, and their purpose

    def renew(self) -> None:
        """Replace a lost worker by a new one. Regions stay, with undefined contents.

        Raises:
            WorkerLost: there is no new worker, or other engines hold all its memory.
            OutOfMemory: the new worker has too little memory for the regions.
        """
        self.client.close()
        client = self._connected()
        self._earlier, self.client = self.attention_bytes, client
        self.ledger.capacity = self._room()
        for handle, (size, what) in self._held.items():
            if client.allocate(size, handle=handle) is None:
                raise OutOfMemory(self.name, what, size)

    def _connected(self) -> Client:
        for wait in (WAIT_SECONDS,) * int(self.client.patience / WAIT_SECONDS):
            with contextlib.suppress(WorkerLost, OutOfMemory):
                return self._connect(self.name)
            time.sleep(wait)
        try:
            return self._connect(self.name)
        except OutOfMemory as error:
            why = "other engines hold all its memory now; run the same command again when one of them has ended"
            raise WorkerLost(self.name, self.client.name, why) from error

    def _room(self) -> int:
        client = self.client
        return min(client.memory, (client.memory + client.others) // self.engines)

    def rename(self, name: str) -> None:
        self.name = self.ledger.name = name
        self.client.rename(name)

    @property
    def local_bytes(self) -> int:
        return self.client.memory + self.client.others if self.client.shares else 0

    @property
    def attention_bytes(self) -> tuple[int, int]:
        return self._earlier[0] + self.client.asked, self._earlier[1] + self.client.answered

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        size = aligned(nbytes)
        with self.ledger.booked(size, what):
            if (handle := self.client.allocate(size)) is None:
                held = f", as other engines hold {self.client.others:,} bytes of the worker"
                raise OutOfMemory(self.name, what + held * (self.client.others > 0), size)
        self._held[handle] = size, what
        return Region(handle, 0, nbytes, dtype)

    def free(self, region: Region, what: str) -> None:
        del self._held[region.place]
        self.client.free(region.place)
        self.ledger.release(aligned(region.nbytes), what)

    def load_all(self, pairs: Sequence[tuple[Region, Tensor]]) -> None:
        waiting = [self.client.read(region.place, region.start, target) for region, target in pairs]
        for pending in waiting:
            pending.wait()
        self.count(read=sum(region.nbytes for region, _ in pairs))

    def store(self, source: Tensor, region: Region) -> None:
        self.client.write(region.place, region.start, source)
        self.count(written=region.nbytes)

    def close(self) -> None:
        self.client.close()


def worker_tiers(connects: Sequence[Callable[[str], Client]], engines: int = 1) -> list[WorkerTier]:
    """Return a tier for each worker, named by its place: first the workers in memory, then those with pages in a file,
    if some are in memory. Raise the error of the first that cannot be connected, after ending the others. engines: as
    in WorkerTier."""
    with contextlib.ExitStack() as connected:
        tiers = list[WorkerTier]()
        for connect, name in zip(connects, worker_names(len(connects)), strict=True):
            tiers.append(WorkerTier(connect, name, engines))
            connected.callback(tiers[-1].close)
            for other in tiers[:-1]:
                if other.client.pool == tiers[-1].client.pool:
                    both = f"{other.client.name} and {tiers[-1].client.name}"
                    raise InvalidInput(f"{both} are one attention worker with two addresses; name each worker once")
        connected.pop_all()
    tiers.sort(key=lambda tier: tier.client.file_rate > 0)
    filed = sum(tier.client.file_rate > 0 for tier in tiers)
    for tier, name in zip(tiers, worker_names(len(tiers), filed if filed < len(tiers) else 0), strict=True):
        tier.rename(name)
    return tiers
