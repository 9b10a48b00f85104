"""What base.Kernels says, by several means: `load()` gives the best there is, `load_for()` that of a device."""

import os
import warnings
from functools import cache
from threading import Lock

import torch

from flexengine.errors import InvalidInput
from flexengine.kernels.base import Kernels
from flexengine.kernels.build import BuildFailed
from flexengine.kernels.cpu import load_native
from flexengine.kernels.cuda import CudaKernels, sum_in_fp32
from flexengine.kernels.reference import ReferenceKernels, has_onednn

__all__ = ["CudaKernels", "Kernels", "ReferenceKernels", "choice", "load", "load_for"]


def load_for(device: torch.device) -> Kernels:
    """The kernels for tensors on a device. FLEXENGINE_KERNELS=reference asks for plain torch on a GPU too."""
    return load() if device.type == "cpu" else _load_cuda()


@cache
def _load_cuda() -> Kernels:
    sum_in_fp32()
    return CudaKernels(fused=choice() != "reference")


def load() -> Kernels:
    """The native kernels, or with one warning the plain torch ones where they cannot be built. Decided once a process,
    whichever threads call first.

    The environment variable FLEXENGINE_KERNELS=reference asks for the latter.

    Raises:
        InvalidInput: the variable has another value, or torch has no oneDNN.
    """
    with _loading:
        return _load()


_loading = Lock()


@cache
def _load() -> Kernels:
    if not has_onednn():
        raise InvalidInput(f"torch {torch.__version__} was built without oneDNN, whose products alone are the same in"
                           " every batch; install a build that has it, as pip's for Linux do")  # fmt: skip
    if choice() == "reference":
        return ReferenceKernels()
    try:
        return load_native()
    except BuildFailed as error:
        warnings.warn(f"kernels run in plain torch, several times slower: {error}", RuntimeWarning, stacklevel=2)
        return ReferenceKernels()


def choice() -> str:
    """Return which kernels FLEXENGINE_KERNELS names; empty for the best. Raises InvalidInput for another value."""
    name = os.environ.get("FLEXENGINE_KERNELS", "")
    if name not in ("", "native", "reference"):
        raise InvalidInput(f"FLEXENGINE_KERNELS is {name!r}; it may be native or reference")
    return name
