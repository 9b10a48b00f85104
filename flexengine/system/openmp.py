"""The OpenMP library of torch, whose threads the native kernels use, too."""

import ctypes
import os
import re
from functools import cache
from pathlib import Path

OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")
HARD = 2  # omp_pause_hard
_forked: list[bool] = []  # not empty in a fork, whose OpenMP threads are those of the parent: to end them would hang
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def openmp_runtime() -> str | None:
    """Return the path of the OpenMP library that torch calls. Linking it gives one thread pool instead of two. Other
    packages may have loaded others, as scikit-learn does."""
    try:
        areas = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        maps = [(area[0], area[5]) for area in areas if len(area) == 6]
        torch = next(path for _, path in maps if Path(path).name.startswith("libtorch_cpu."))
        called = ctypes.cast(ctypes.CDLL(torch).omp_get_max_threads, ctypes.c_void_p).value or 0
    except (OSError, StopIteration, AttributeError):
        return None
    for area, path in maps:
        first, _, end = area.partition("-")
        if int(first, 16) <= called < int(end, 16) and OPENMP.match(Path(path).name):
            return path
    return None


@cache
def _gomp() -> ctypes.CDLL | None:
    """Return torch's libgomp; None for another OpenMP library, or for one of before OpenMP 5."""
    path = openmp_runtime()
    library = ctypes.CDLL(path) if path and "gomp" in Path(path).name else None
    return library if hasattr(library, "omp_pause_resource_all") else None


def end_idle_threads() -> None:
    """End the OpenMP threads that this thread has started. Its next parallel work starts them again.

    Each thread that computes has OpenMP threads of its own. If all together are more than the processors, libgomp lets
    idle ones sleep at once, so that every kernel has to wake them: a layer of 8 experts took 7.3 ms instead of 4.1.
    """
    if not _forked and (gomp := _gomp()) is not None:
        number = gomp.omp_get_max_threads()  # of this thread; it ends, too
        gomp.omp_pause_resource_all(HARD)
        gomp.omp_set_num_threads(number)
