"""Out-of-memory errors of a running job, from torch (GPU or RAM), a ledger or the operating system, as one type."""

import errno
import re

import torch

from flexengine.errors import OutOfMemory
from flexengine.places import is_disk
from flexengine.runtime.frames import forget_variables

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB|B)\b", re.IGNORECASE)
# Texts of out-of-memory errors that torch raises as plain RuntimeError.
_IN_RAM = ("DefaultCPUAllocator",)
_ON_GPU = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "STATUS_ALLOC_FAILED")


class Shortage(Exception):
    """A job ran out of memory in a tier.

    Attributes:
        tier: device, host, or an attention worker.
        what: data or computation that needed the memory.
        needed: bytes requested; 0 if the error does not state them.
    """

    def __init__(self, tier: str, what: str, needed: int = 0) -> None:
        self.tier, self.what, self.needed = tier, what, needed
        size = f" ({needed:,} bytes)" if needed else ""
        super().__init__(f"{tier} memory ran out: there was no room for {what}{size}")


def shortage(error: BaseException, gpu: bool) -> Shortage | None:
    """Return the Shortage that `error` reports; None for other errors, and for a full disk.

    The variables of ended frames in the error's traceback are cleared, to free their tensors.

    Args:
        error: any error of a job.
        gpu: whether the compute device is a GPU; RAM is then the host tier, else the device tier.
    """
    ram = "host" if gpu else "device"
    if isinstance(error, OutOfMemory):
        result = None if is_disk(error.tier) else Shortage(_tier(error, ram), error.what, error.needed)
    elif isinstance(error, torch.OutOfMemoryError) or _says(error, _ON_GPU):
        result = Shortage("device", _task(error), _requested(error))
    elif isinstance(error, MemoryError) or _says(error, _IN_RAM) or getattr(error, "errno", None) == errno.ENOMEM:
        result = Shortage(ram, _task(error), _requested(error))
    else:
        result = None
    if result is not None:
        forget_variables(error)
    return result


def _tier(error: OutOfMemory, ram: str) -> str:
    """Return the tier that ran out of memory.

    CPU kernels report tier "device" for RAM even if RAM is the host tier; `ram` is then returned. Their errors have no
    capacity, unlike a ledger's, and torch's GPU allocator raises another type, so this case is unambiguous.
    """
    return error.tier if error.capacity or error.tier != "device" else ram


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _requested(error: BaseException) -> int:
    """Return the bytes of the allocation that failed; 0 if the message does not state them."""
    match = _REQUESTED.search(str(error))
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    return int(float(match[1]) * units[match[2].lower()]) if match else 0


def _task(error: BaseException) -> str:
    """Return the name of the failed task, from the note that the executor adds."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix("in task: ") for note in notes if note.startswith("in task: ")), "the job's regions")
