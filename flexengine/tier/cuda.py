"""A GPU's tiers: its own memory as the device tier, and RAM that it reads and writes by itself as the host tier."""

import contextlib
import resource
import warnings
from typing import Any

import torch

from flexengine.errors import OutOfMemory
from flexengine.tier.base import Home, Tier, aligned
from flexengine.tier.ledger import Ledger
from flexengine.tier.limits import usable_memory
from flexengine.tier.memory import MemoryTier, mapped

CONVERTED = 16 << 20  # bytes of the host's elements that are on the GPU at once to be converted there


class PinnedTier(MemoryTier):
    """RAM whose pages the CUDA runtime has locked, so that copies run at the link's full rate beside everything else.

    Every region is a mapping of its own of exactly the bytes that the ledger books. torch's own pinned memory is cut to
    powers of two: a matrix of 129 MiB would take 256.

    Memory that cannot be locked is used as it is, which is said once: copies are then slower and hold up their lane.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name, ledger)
        self._locked: set[int] = set()  # addresses
        self._told = False

    def _buffer(self, nbytes: int, what: str) -> torch.Tensor:
        if not nbytes:  # a mapping has at least a page
            return super()._buffer(nbytes, what)
        room = mapped(nbytes)
        if error := register(room):
            self._refused(nbytes, what, error)
        else:
            self._locked.add(room.data_ptr())
        return room

    def _refused(self, nbytes: int, what: str, error: str) -> None:
        """Raises OutOfMemory if RAM is short; else warns, as it is a limit of locked memory."""
        if usable_memory() < nbytes:
            raise OutOfMemory(self.name, what, nbytes, remedy="lower --host-mem, or end what else takes memory")
        if not self._told:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            most = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
            warnings.warn(
                f"host memory cannot be locked ({what}, {nbytes:,} bytes: {error}), so copies to and from the GPU are"
                f" slower; the limit of locked memory is {most}: raise it by ulimit -l, in a container by --ulimit"
                " memlock=-1", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        self._told = True

    def free(self, region: Home, what: str) -> None:
        self._unlock(region.place.data_ptr())
        super().free(region, what)

    def _unlock(self, address: int) -> None:
        if address in self._locked:
            self._locked.remove(address)
            unregister(address)

    def load(self, region: Home, target: torch.Tensor) -> None:
        if not target.is_cuda:
            super().load(region, target)
            return
        source, flat = self.view(region), target.view(-1)
        step = max(1, len(source) if source.dtype == flat.dtype else CONVERTED // source.itemsize)
        for part, there in zip(torch.split(source, step), torch.split(flat, step), strict=True):
            there.copy_(part, non_blocking=True)  # the stream's order keeps one piece at a time
        self.count(read=region.nbytes)

    def store(self, source: torch.Tensor, region: Home) -> None:
        if not source.is_cuda:
            super().store(source, region)
            return
        self.view(region).copy_(source.view(-1), non_blocking=True)
        self.count(written=region.nbytes)

    def close(self) -> None:
        for address in list(self._locked):
            self._unlock(address)


class CudaTier(Tier):
    """Regions of GPU memory, each one allocation of the caching allocator, made once and kept."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self.ledger = name, ledger

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Home:
        size = aligned(nbytes)
        with self.ledger.booked(size, what):
            return Home(torch.empty(size, dtype=torch.uint8, device="cuda"), 0, nbytes, dtype)

    def free(self, region: Home, what: str) -> None:
        self.ledger.release(aligned(region.nbytes), what)

    def view(self, region: Home) -> torch.Tensor:
        place: torch.Tensor = region.place
        return place[region.start : region.start + region.nbytes].view(region.dtype)

    def load(self, region: Home, target: torch.Tensor) -> None:
        target.view(-1).copy_(self.view(region))

    def store(self, source: torch.Tensor, region: Home) -> None:
        self.view(region).copy_(source.view(-1))


def register(room: torch.Tensor) -> str:
    """Lock the pages of a mapping for the GPU. Return the runtime's error in words, "" if there was none."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(room.data_ptr(), room.nbytes, 0)
    if int(error) == int(cudart.cudaError.success):
        return ""
    _forget_error()
    return f"{cudart.cudaGetErrorString(error)} ({int(error)})"


def _forget_error() -> None:
    """Launch a kernel: it reports, and clears, the error that the runtime keeps of the last call that failed."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def unregister(address: int) -> None:
    """Unlock what `register` locked, once no copy from or to it is under way."""
    torch.cuda.synchronize()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)


def free_memory() -> int:
    """Free bytes of the current GPU."""
    return int(torch.cuda.mem_get_info()[0])


def total_memory() -> int:
    """Bytes of the current GPU, free or not."""
    return int(torch.cuda.mem_get_info()[1])


def available() -> bool:
    return torch.cuda.is_available()


def give_back() -> None:
    """Return what torch keeps of freed GPU memory, so that larger pieces can be had of it. cuBLAS has a workspace for
    every stream that multiplied, and each job has streams of its own."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # only in builds for CUDA
        clear()
    torch.cuda.empty_cache()


def synchronize() -> None:
    """Waits until what this thread queued on the GPU is done."""
    torch.cuda.current_stream().synchronize()
