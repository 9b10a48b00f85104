"""Tiers for a GPU: its own memory as the device tier, and pinned RAM as the host tier."""

import contextlib
import logging
import os
import resource
from typing import Any

import torch

from flexengine.activity import message
from flexengine.errors import OutOfMemory, size
from flexengine.system.limits import usable_memory
from flexengine.tier.base import Ledger, Region
from flexengine.tier.machine import Machine
from flexengine.tier.memory import MemoryTier, mapped

CONVERTED = 16 << 20  # bytes of elements that `PinnedTier.load` copies to the GPU at once to convert them there


class PinnedTier(MemoryTier):
    """RAM whose pages the CUDA runtime has locked, so that copies run at the link's full rate and asynchronously.

    Every region is one mapping of exactly the bytes that the ledger books. torch's own pinned memory is rounded up to
    powers of two: a matrix of 129 MiB would take 256 MiB.

    Pages are huge and written before they are locked. On a machine with 16 cores and an H200 this took 0.05 s per GB;
    locking new small pages took 0.43 s, and new huge ones 0.2 s.

    Memory that cannot be locked is used unlocked, after one message: copies are then slower and block their lane.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name, ledger)
        self._locked: set[int] = set()  # addresses
        self._warned = False

    def _buffer(self, nbytes: int, what: str) -> torch.Tensor:
        if not nbytes:  # a mapping cannot be empty
            return super()._buffer(nbytes, what)
        room, usable = mapped(nbytes, huge=True), usable_memory()
        if nbytes < usable:
            room.fill_(0)  # the page faults, by all of torch's threads: locking makes them one by one
        if not (error := register(room)):
            self._locked.add(room.data_ptr())
            return room
        if usable < nbytes:
            raise OutOfMemory(self.name, what, nbytes, remedy="lower --host-mem, or end what else takes memory")
        if not self._warned:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            most = "unlimited" if limit == resource.RLIM_INFINITY else size(limit)
            message(f"host memory cannot be locked ({what}, {size(nbytes)}: {error}), so copies to and from the GPU"
                    f" are slower; the limit of locked memory is {most}: raise it by ulimit -l, in a container by"
                    " --ulimit memlock=-1", logging.WARNING)  # fmt: skip
        self._warned = True
        return room

    def free(self, region: Region, what: str) -> None:
        self._unlock(region.place.data_ptr())
        super().free(region, what)

    def _unlock(self, address: int) -> None:
        if address in self._locked:
            self._locked.remove(address)
            unregister(address)

    def load(self, region: Region, target: torch.Tensor) -> None:
        if not target.is_cuda:
            super().load(region, target)
            return
        source, flat = self.view(region), target.view(-1)
        step = max(1, len(source) if source.dtype == flat.dtype else CONVERTED // source.itemsize)
        for part, target_part in zip(torch.split(source, step), torch.split(flat, step), strict=True):
            target_part.copy_(part, non_blocking=True)  # in stream order, so one unconverted piece is alive at a time
        self.count(read=region.nbytes)

    def store(self, source: torch.Tensor, region: Region) -> None:
        if not source.is_cuda:
            super().store(source, region)
            return
        self.view(region).copy_(source.view(-1), non_blocking=True)
        self.count(written=region.nbytes)

    def close(self) -> None:
        for address in list(self._locked):
            self._unlock(address)


class CudaTier(MemoryTier):
    """GPU memory. Each region is one tensor of the caching allocator."""

    def _buffer(self, nbytes: int, what: str) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def receive_reads(self, region: Region) -> None:
        """Do nothing: no disk reads into GPU memory."""

    def load(self, region: Region, target: torch.Tensor) -> None:
        target.view(-1).copy_(self.view(region))

    def store(self, source: torch.Tensor, region: Region) -> None:
        self.view(region).copy_(source.view(-1))


class CudaMachine(Machine):
    """A machine with a CUDA GPU. Work that a thread queues on it ends later."""

    gpu, compute, lanes = True, torch.device("cuda"), "stream"

    def synchronize(self) -> None:
        wait_for_stream()

    def keep_until_read(self, x: torch.Tensor) -> None:
        x.record_stream(torch.cuda.current_stream())  # torch gives freed memory to the stream that allocated it

    def keep_freed(self, room: bool = True) -> None:
        """Do nothing: few of the job's tensors are in RAM."""

    def give_back(self) -> None:
        """Return freed memory that malloc and torch hold to the system, so that larger allocations succeed.

        cuBLAS keeps a workspace per stream that ran a matrix product. Each job creates new streams, so the workspaces
        are freed too.
        """
        super().give_back()
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:  # only in builds for CUDA
            clear()
        torch.cuda.empty_cache()


def register(room: torch.Tensor) -> str:
    """Lock the pages of a mapping for the GPU. Return the error message of the CUDA runtime, "" for success."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(room.data_ptr(), room.nbytes, 0)
    if int(error) == int(cudart.cudaError.success):
        return ""
    _forget_error()
    return f"{cudart.cudaGetErrorString(error)} ({int(error)})"


def unregister(address: int) -> None:
    """Unlock pages after all queued GPU work has ended: copies may still use them."""
    torch.cuda.synchronize()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)


def _forget_error() -> None:
    """Clear the last error of the CUDA runtime by launching a kernel, which reports this error and resets it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def memory() -> tuple[int, int]:
    """Return the free bytes of the current GPU, and all its bytes."""
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def product_name() -> str:
    """Return the name of the current GPU's product."""
    return torch.cuda.get_device_name()


def own_stream() -> None:
    """Let this thread queue its work on a stream of its own."""
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def wait_for_stream() -> None:
    """Wait for the work that this thread has queued."""
    torch.cuda.current_stream().synchronize()


def empty_cache() -> None:
    """Return freed memory that torch holds to the GPU."""
    torch.cuda.empty_cache()


def gpus() -> list[dict[str, Any]]:
    """Return all GPUs that torch sees: name of the product, bytes of memory (total, free), and compute capability, such
    as "9.0". The CUDA runtime then keeps some hundred MB of each until the process ends."""
    seen = []
    for number in range(visible_gpus()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        seen.append(dict(name=about.name, total=total, free=free, capability=f"{about.major}.{about.minor}"))
    return seen


def visible_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    return torch.cuda.device_count()


_hidden = dict[str, str]()  # what `all_gpus` returns
_gpus = 1  # GPUs of this machine that the processes of a pipeline share


def take_one(number: int) -> None:
    """Let this process see one GPU only, before it uses any: GPU `number` modulo the number of visible GPUs."""
    global _gpus
    if (count := visible_gpus()) > 1:
        _gpus = count
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if len(visible) == count else list(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = names[number % count]
        _hidden["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def all_gpus() -> dict[str, str]:
    """Return the environment variable with which a new process sees all GPUs that this one saw before `take_one`."""
    return dict(_hidden)


def sharing(processes: int) -> int:
    """Return the number of processes that share a GPU. processes: number of processes on this machine."""
    return -(-processes // _gpus)
