"""GPU memory as the device tier."""

import torch

from flexengine.tier.base import Home, Tier, aligned
from flexengine.tier.ledger import Ledger


class CudaTier(Tier):
    """Regions of GPU memory, each one allocation of the caching allocator, made once and kept."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self.ledger = name, ledger

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Home:
        size = aligned(nbytes)
        self.ledger.reserve(size, what)
        return Home(torch.empty(size, dtype=torch.uint8, device="cuda"), 0, nbytes, dtype)

    def free(self, home: Home, what: str) -> None:
        self.ledger.release(aligned(home.nbytes), what)

    def view(self, home: Home) -> torch.Tensor:
        place: torch.Tensor = home.place
        return place[home.start : home.start + home.nbytes].view(home.dtype)

    def load(self, home: Home, target: torch.Tensor) -> None:
        target.view(-1).copy_(self.view(home))

    def store(self, source: torch.Tensor, home: Home) -> None:
        self.view(home).copy_(source.view(-1))


def free_memory() -> int:
    """Free bytes of the current GPU."""
    return int(torch.cuda.mem_get_info()[0])


def available() -> bool:
    return torch.cuda.is_available()


def give_back() -> None:
    """Returns what torch keeps of freed GPU memory, so that larger pieces can be had of it."""
    torch.cuda.empty_cache()


def settle() -> None:
    """Waits until what this thread queued on the GPU is done."""
    torch.cuda.current_stream().synchronize()
