"""What ran out of memory, by the errors of tasks."""

import errno
import re

import torch

from flexengine.errors import OutOfMemory
from flexengine.places import place_of
from flexengine.runtime.execute import Shortage, TaskFailed
from flexengine.runtime.lane import forget_variables

_UNITS = {"bytes": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB|B)\b", re.IGNORECASE)
# Texts of out-of-memory errors that torch raises as plain RuntimeError.
_IN_RAM = ("DefaultCPUAllocator",)
_ON_GPU = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "STATUS_ALLOC_FAILED")


def shortage_of(error: BaseException, gpu: bool) -> Shortage | None:
    """Return the Shortage that `error` reports; None for other errors, and for a full disk.

    The variables of ended frames in the error's traceback are cleared, to free their tensors.

    Args:
        error: any error of a job; a TaskFailed names the task that ran out of memory.
        gpu: whether the compute device is a GPU; RAM is then the host tier, else the device tier.
    """
    ram, what = "host" if gpu else "device", "the job's regions"
    cause = error
    if isinstance(error, TaskFailed):
        cause, what = error.cause, str(error.task)
    if isinstance(cause, OutOfMemory):
        # CPU kernels report tier "device" for RAM even if RAM is the host tier. Their errors have no capacity, unlike a
        # ledger's, and torch's GPU allocator raises another type, so this case is unambiguous.
        tier = cause.tier if cause.capacity or cause.tier != "device" else ram
        result = None if place_of(tier).disk else Shortage(tier, cause.what, cause.needed)
    elif isinstance(cause, torch.OutOfMemoryError) or _says(cause, _ON_GPU):
        result = Shortage("device", what, _requested(cause))
    elif isinstance(cause, MemoryError) or _says(cause, _IN_RAM) or getattr(cause, "errno", None) == errno.ENOMEM:
        result = Shortage(ram, what, _requested(cause))
    else:
        result = None
    if result is not None:
        forget_variables(error)
    return result


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _requested(error: BaseException) -> int:
    """Return the bytes of the allocation that failed; 0 if the message does not state them."""
    match = _REQUESTED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
