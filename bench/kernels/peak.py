"""The peak rates of this machine, and with them the least time of a product."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HELD = 1 << 28  # bytes read: more than a CPU's caches hold
ROUNDS = 1_000_000


@dataclass(frozen=True)
class Peak:
    """Peak rates of all threads together.

    Attributes:
        fp32, bf16, int8: products and additions per second.
        read: bytes per second.
    """

    fp32: float
    bf16: float
    int8: float
    read: float

    def seconds(self, operations: float, nbytes: float, compute: str) -> float:
        """Return the least time of `operations` with weights of `nbytes` bytes, which are read once meanwhile."""
        return max(operations / {"fp32": self.fp32, "bf16": self.bf16, "int8": self.int8}[compute], nbytes / self.read)


def _library() -> ctypes.CDLL:
    from flexengine.kernels import build

    library = build.load(sources=[Path(__file__).with_name("peak.cpp")])
    library.peak_fp32.argtypes = [ctypes.c_int64, ctypes.c_float]
    library.peak_bf16.argtypes = [ctypes.c_int64, ctypes.c_float]
    library.peak_bf16.restype = ctypes.c_int64
    library.peak_int8.argtypes = [ctypes.c_int64, ctypes.c_int32]
    library.peak_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    library.peak_products.restype = ctypes.c_int64
    return library


def _least(call: Callable[[], object]) -> float:
    """Return the least seconds of ten calls."""
    found = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - start)
    return found


@cache
def measure() -> Peak:
    """Measure dots and fused products on one core, times torch's number of threads, and reads by all threads."""
    import torch

    library, threads = _library(), torch.get_num_threads()
    operations = 2.0 * library.peak_products() * ROUNDS * threads
    buffer = torch.ones(HELD, dtype=torch.uint8)
    return Peak(
        fp32=operations / _least(lambda: library.peak_fp32(ROUNDS, 1.0)),
        bf16=library.peak_bf16(1, 1.0) * operations / _least(lambda: library.peak_bf16(ROUNDS, 1.0)),
        int8=4 * operations / _least(lambda: library.peak_int8(ROUNDS, 0x01010101)),
        read=HELD / _least(lambda: library.peak_read(buffer.data_ptr(), HELD, threads)),
    )
