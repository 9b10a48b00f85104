"""The sets of kernels that tests compare: the references, and the native ones as they are built for other machines."""

import pytest

from flexengine.kernels import Kernels, ReferenceKernels, build, cpu
from flexengine.kernels.cuda import CudaKernels

BUILDS = {
    "native": (), "avx512": ("-mno-avx512vnni", "-mno-avx512bf16"), "avx2": ("-mno-avx512f", "-mno-avxvnni"),
    "portable": ("-DFLEX_PORTABLE",),
}  # fmt: skip


def kernels_named(name: str) -> Kernels:
    """The set of that name; the test is skipped where it cannot be had."""
    if name == "reference":
        return ReferenceKernels()
    if name == "cuda":  # plain torch so far, so its arithmetic can be checked anywhere
        return CudaKernels()
    try:
        built = cpu.load_native(*BUILDS[name])
    except build.BuildFailed as error:
        pytest.skip(f"cannot build {name}: {error}")
    if (wanted := {"avx512": 512, "avx2": 256}.get(name)) and built.simd != wanted:
        pytest.skip(f"no {name} here")
    return built
