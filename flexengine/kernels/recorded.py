"""Steps that run again with other tensors of the same shapes: only the addresses in their structs change."""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flexengine.kernels.recycled import ALIGNED
from flexengine.kernels.structs import Step

WORD = 8  # bytes of an address


class RecordedSteps:
    """Steps with the addresses of other tensors.

    Every address in the structs is found again as an offset in an argument, in a result, or in one block of memory for
    the intermediate results.

    Attributes:
        results: shape and dtype of each result.
        nbytes: size of the block.

    Args:
        run: flex_run of the library.
        calls: (struct, kind, beside) of each step.
        threads: threads that compute.
        arguments: tensors that are given to the steps.
        made: tensors that the steps have allocated.
        results: those of `made` that are returned.
    """

    def __init__(
        self, run: Any, calls: Sequence[tuple[ctypes.Structure, int, bool]], threads: int, arguments: Sequence[Tensor],
        made: Sequence[Tensor], results: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self._run, self._threads = run, threads
        self.results = [(tuple(x.shape), x.dtype) for x in results]
        own = {x.data_ptr() for x in results}
        if not own <= {x.data_ptr() for x in made}:
            raise RuntimeError("a result does not begin where a tensor of the steps begins")
        inner = [x for x in made if x.data_ptr() not in own]
        self._arrays: dict[int, tuple[Any, Any]] = {}  # by number of times: see `_repeated`
        self.nbytes = 0
        parts = list[tuple[int, int, int, int]]()  # address, bytes, number of the base, offset from it
        for number, x in enumerate((*arguments, *results)):
            parts.append((x.data_ptr(), _extent(x), number, 0))
        for x in inner:
            parts.append((x.data_ptr(), _extent(x), len(arguments) + len(results), self.nbytes))
            self.nbytes += -(-_extent(x) // ALIGNED) * ALIGNED
        parts.sort()
        self._lay_out(calls, parts)

    def _lay_out(self, calls: Sequence[tuple[ctypes.Structure, int, bool]], parts: Sequence[tuple[int, ...]]) -> None:
        """Copy the structs one after the other, and note where they have addresses."""
        slots, bases, offsets = list[int](), list[int](), list[int]()
        starts = [part[0] for part in parts]
        self._kinds, self._structs = list[tuple[int, int, bool]](), b""  # kinds: (word of the struct, kind, beside)
        for call, kind, beside in calls:
            at = len(self._structs) // WORD
            self._kinds.append((at, kind, beside))
            self._structs += bytes(call)
            for name, kind_of in call._fields_:  # type: ignore[misc]
                address = getattr(call, name)
                if kind_of is not ctypes.c_void_p or address is None:
                    continue
                start, nbytes, base, offset = parts[max(0, bisect_right(starts, address) - 1)]
                if not start <= address < start + nbytes:
                    raise RuntimeError(f"{type(call).__name__}.{name} has the address of a tensor that is not given")
                slots.append(at + getattr(type(call), name).offset // WORD)
                bases.append(base)
                offsets.append(offset + address - start)
        self._slots, self._bases, self._offsets = (np.array(x, dtype=np.int64) for x in (slots, bases, offsets))

    def run(self, *addresses: Sequence[int]) -> None:
        """Run the steps once for each argument, one after the other.

        Args:
            addresses: of the arguments, then of contiguous memory for the results, then of the block, at a multiple of
                64. The arguments have the shapes, strides and dtypes of the recorded ones.
        """
        bases = np.array(addresses, dtype=np.int64)
        if (found := self._arrays.get(len(bases))) is None:
            found = self._arrays[len(bases)] = self._repeated(len(bases))
        steps, structs = found
        structs[:, self._slots] = bases[:, self._bases] + self._offsets
        self._run(steps.ctypes.data, len(steps), self._threads)

    def _repeated(self, times: int) -> tuple[Any, Any]:
        """Return the array of Step, one row each, and the structs that they point to, [times, words]."""
        structs = np.tile(np.frombuffer(self._structs, dtype=np.int64), (times, 1))
        rows = (structs.ctypes.data + row * structs.strides[0] for row in range(times))
        steps = b"".join(bytes(Step(row + at * WORD, *rest)) for row in rows for at, *rest in self._kinds)
        return np.frombuffer(steps, dtype=np.int64).reshape(-1, ctypes.sizeof(Step) // WORD), structs


def _extent(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    if x.numel() == 0:
        return 0
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()
