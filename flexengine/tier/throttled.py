"""A tier behind slower links."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flexengine.tier.base import Region, Tier

MAX_DEBT_SECONDS = 1e-4  # shorter sleeps are put off: a sleep lasts 0.06 ms too long on an idle core, or more if busy


class Throttled(Tier):
    """A tier behind slower links: each call copies, then sleeps until a link of the given rate (bytes per second; None
    for unlimited), with `latency` seconds more, would have finished. Each direction carries one transfer at a time. A
    transfer that ends at most MAX_DEBT_SECONDS too early does not sleep: the next transfer sleeps for both."""

    def __init__(
        self, inner: Tier, read_rate: float | None = None, write_rate: float | None = None, latency: float = 0.0
    ) -> None:
        self.inner, self.name, self.ledger = inner, inner.name, inner.ledger
        self.rates, self.latency = {"read": read_rate, "write": write_rate}, latency
        self.slowed = self.rates, latency
        self._free = {"read": 0.0, "write": 0.0}  # time at which a direction is free again
        self._owed = {"read": 0.0, "write": 0.0}  # seconds that the last transfer of a direction did not sleep
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.inner.bytes_read

    @property
    def bytes_written(self) -> int:  # type: ignore[override]
        return self.inner.bytes_written

    def count(self, read: int = 0, written: int = 0) -> None:
        self.inner.count(read, written)

    def _wait(self, way: str, nbytes: int, began: float) -> None:
        if (rate := self.rates[way]) is None and not self.latency:
            return
        with self._lock:
            free, owed = self._free[way], self._owed[way]
            seconds = self.latency + (nbytes / rate if rate is not None else 0.0)
            end = self._free[way] = (free if began < free else began + owed) + seconds
            pause = end - time.perf_counter()
            self._owed[way] = pause if 0 < pause <= MAX_DEBT_SECONDS else 0.0
        if pause > MAX_DEBT_SECONDS:
            time.sleep(pause)

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        return self.inner.allocate(nbytes, what, dtype)

    def free(self, region: Region, what: str) -> None:
        self.inner.free(region, what)

    def receive_reads(self, region: Region) -> None:
        self.inner.receive_reads(region)

    def view(self, region: Region) -> torch.Tensor:
        return self.inner.view(region)

    def load_all(self, pairs: Sequence[tuple[Region, torch.Tensor]]) -> None:
        began = time.perf_counter()
        self.inner.load_all(pairs)
        self._wait("read", sum(region.nbytes for region, _ in pairs), began)

    def pick(self, region: Region, rows: torch.Tensor, width: int, target: torch.Tensor) -> None:
        began = time.perf_counter()
        self.inner.pick(region, rows, width, target)
        self._wait("read", target.nbytes, began)

    def read_by(self, read: Callable[[], int]) -> None:
        def waiting() -> int:
            began, nbytes = time.perf_counter(), read()
            self._wait("read", nbytes, began)
            return nbytes

        self.inner.read_by(waiting)

    def put(self, source: torch.Tensor, region: Region, rows: torch.Tensor) -> None:
        began = time.perf_counter()
        self.inner.put(source, region, rows)
        self._wait("write", source.nbytes, began)

    def store_all(self, pairs: Sequence[tuple[torch.Tensor, Region]]) -> None:
        began = time.perf_counter()
        self.inner.store_all(pairs)
        self._wait("write", sum(region.nbytes for _, region in pairs), began)

    def checkpoint(self, path: Path, start: int, nbytes: int, dtype: torch.dtype) -> Region:
        return self.inner.checkpoint(path, start, nbytes, dtype)

    def close(self) -> None:
        self.inner.close()
