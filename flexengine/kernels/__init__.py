"""Implementations of `base.Kernels`: `load` returns the fastest one for the CPU, `load_for` the one for a device."""

import logging
import os
from functools import cache
from threading import Lock

import torch

from flexengine.activity import message
from flexengine.errors import InvalidInput
from flexengine.kernels.base import Kernels
from flexengine.kernels.build import BuildFailed
from flexengine.kernels.cpu import load_native

__all__ = ["Kernels", "choice", "load", "load_for"]


def load_for(device: torch.device) -> Kernels:
    """Return the kernels for tensors on a device. FLEXENGINE_KERNELS=reference selects plain torch, on a GPU too."""
    return load() if device.type == "cpu" else _load_cuda()


@cache
def _load_cuda() -> Kernels:
    from flexengine.kernels.cuda import CudaKernels, sum_in_fp32  # not without a GPU

    sum_in_fp32()
    return CudaKernels(fused=choice() != "reference")


def load() -> Kernels:
    """Return the native kernels, or after one message the plain torch kernels if the native ones cannot be built.

    The choice is made once per process, also if several threads call at the same time. The environment variable
    FLEXENGINE_KERNELS=reference selects the plain torch kernels. Raise InvalidInput if the variable has another value
    than native or reference, or torch was built without oneDNN.
    """
    with _loading:
        return _load()


_loading = Lock()


@cache
def _load() -> Kernels:
    if choice() == "reference":
        return _reference()
    try:
        return load_native()
    except BuildFailed as error:
        slow = "attention and products with encoded weights run several times slower"
        message(f"{slow}: {error}", logging.WARNING)
        return _reference()


def _reference() -> Kernels:
    from flexengine.kernels.onednn import has_onednn  # neither beside the native kernels
    from flexengine.kernels.reference import ReferenceKernels

    if not has_onednn():
        raise InvalidInput(f"torch {torch.__version__} was built without oneDNN, and only its products and those of the"
                           " native kernels are independent of the batch; install g++, or a build of torch with oneDNN,"
                           " as pip's for Linux")  # fmt: skip
    return ReferenceKernels()


def choice() -> str:
    """Return the value of FLEXENGINE_KERNELS, "" if it is not set. Raise InvalidInput if it names no kernels."""
    name = os.environ.get("FLEXENGINE_KERNELS", "")
    if name not in ("", "native", "reference"):
        raise InvalidInput(f"FLEXENGINE_KERNELS is {name!r}; set it to native or reference, or unset it")
    return name
