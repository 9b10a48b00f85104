"""RAM: the host tier, and on a machine without a GPU the device tier too."""

import torch

from flexengine.kernels import load as load_kernels
from flexengine.tier.base import ALIGN, Home, Tier, aligned
from flexengine.tier.ledger import Ledger


def aligned_buffer(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """uint8 `[nbytes]` in RAM whose address is a multiple of ALIGN."""
    room = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=pinned)
    skip = -room.data_ptr() % ALIGN
    return room[skip : skip + nbytes]


class MemoryTier(Tier):
    """Regions of RAM. `pinned` pages are locked so that a GPU copies from them at full speed."""

    def __init__(self, name: str, ledger: Ledger, pinned: bool = False) -> None:
        self.name, self.ledger, self.pinned = name, ledger, pinned
        self._convert = load_kernels().convert

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Home:
        size = aligned(nbytes)
        self.ledger.reserve(size, what)
        return Home(aligned_buffer(size, self.pinned), 0, nbytes, dtype)

    def free(self, home: Home, what: str) -> None:
        self.ledger.release(aligned(home.nbytes), what)

    def view(self, home: Home) -> torch.Tensor:
        place: torch.Tensor = home.place
        return place[home.start : home.start + home.nbytes].view(home.dtype)

    def load(self, home: Home, target: torch.Tensor) -> None:
        source = self.view(home)
        if target.is_cuda:
            target.view(-1).copy_(source, non_blocking=self.pinned)
        else:
            self._convert(source, target.view(-1))
        self.bytes_read += home.nbytes

    def store(self, source: torch.Tensor, home: Home) -> None:
        target = self.view(home)
        if source.is_cuda:
            target.copy_(source.view(-1), non_blocking=self.pinned)
        else:
            self._convert(source.view(-1), target)
        self.bytes_written += home.nbytes
