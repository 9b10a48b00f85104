"""Memory that runs out while a job computes, whoever says so: torch on a GPU or in RAM, a ledger, the system."""

import errno
import re

import torch

from flexengine.errors import OutOfMemory
from flexengine.runtime.frames import forget_variables

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB|B)\b", re.IGNORECASE)
# What torch says in RuntimeErrors that have no type of their own.
_IN_RAM = ("DefaultCPUAllocator",)
_ON_GPU = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "STATUS_ALLOC_FAILED")


class Shortage(Exception):
    """Memory of `tier` (device or host) that a job was to have and did not get. what: was to lie or to be computed
    there; needed: bytes of it, 0 if nobody says."""

    def __init__(self, tier: str, what: str, needed: int = 0) -> None:
        self.tier, self.what, self.needed = tier, what, needed
        size = f" ({needed:,} bytes)" if needed else ""
        super().__init__(f"{tier} memory ran out: there was no room for {what}{size}")


def shortage(error: BaseException, gpu: bool) -> Shortage | None:
    """What an error says of memory that ran out; None if it is about something else, or about a full disk. gpu: whether
    computing happens on one, so that RAM is the host's.

    Frames of the error's traceback that have ended forget their variables, or their tensors would stay.
    """
    ram = "host" if gpu else "device"
    if isinstance(error, OutOfMemory):
        found = None if error.tier == "disk" else Shortage(_tier(error, ram), error.what, error.needed)
    elif isinstance(error, torch.OutOfMemoryError) or _says(error, _ON_GPU):
        found = Shortage("device", _where(error), _asked(error))
    elif isinstance(error, MemoryError) or _says(error, _IN_RAM) or getattr(error, "errno", None) == errno.ENOMEM:
        found = Shortage(ram, _where(error), _asked(error))
    else:
        found = None
    if found is not None:
        forget_variables(error)
    return found


def _tier(error: OutOfMemory, ram: str) -> str:
    """The tier to make smaller. Kernels for a CPU call RAM the device, also where it is the host. They give no
    capacity, as ledgers do; and a GPU's allocator raises errors of its own."""
    return error.tier if error.capacity or error.tier != "device" else ram


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _asked(error: BaseException) -> int:
    """Bytes that an allocator was asked for in vain."""
    found = _ASKED.search(str(error))
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    return int(float(found[1]) * units[found[2].lower()]) if found else 0


def _where(error: BaseException) -> str:
    """The task that failed, from the note that the executor adds."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix("in task: ") for note in notes if note.startswith("in task: ")), "the job's regions")
