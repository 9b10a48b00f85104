"""The sets of kernels that tests compare: the references, and the native ones as they are built for other machines."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.kernels import Kernels, build, cpu
from flexengine.kernels.cuda import CudaKernels
from flexengine.kernels.reference import ReferenceKernels

# avx2: without the instruction for products of bytes (VNNI), which machines with AVX-512 have, so that both are run.
# What other machines would run is compiled with -O2, which takes two thirds of the time.
BUILDS = {"native": (), "avx2": ("-mno-avx512f", "-mno-avxvnni", "-O2"), "portable": ("-DFLEX_PORTABLE", "-O2")}

# Compiling the two for other machines takes half a minute of CPU time.
NATIVE = ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in BUILDS if name != "native")]
KERNELS = ["reference", "cuda", *NATIVE]
# One of each class: builds share the Python code that checks arguments.
ONE_BUILD = pytest.mark.parametrize("kernel", ["reference", "cuda", "native"], indirect=True)


def kernels_named(name: str) -> Kernels:
    """Return the set of kernels of that name; skip the test if it is not available on this machine."""
    if name == "reference":
        return ReferenceKernels()
    if name == "cuda":  # plain torch so far, so its arithmetic can be checked anywhere
        return CudaKernels()
    try:
        built = cpu.load_native(*BUILDS[name])
    except build.BuildFailed as error:
        pytest.skip(f"cannot build {name}: {error}")
    if name == "avx2" and built.simd != 256:
        pytest.skip("no AVX2 here")
    return built


def attended(kernels: Kernels, q: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """Return the result of `Kernels.decode_attention`, and the log of its denominator."""
    lse = q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    return kernels.decode_attention(q, *where, lse=lse), lse
