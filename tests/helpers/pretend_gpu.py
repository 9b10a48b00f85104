"""A GPU's streams and events on a virtual clock, in place of torch.cuda's: for tests on machines without a GPU.

Work is queued by `queue(seconds)` on the current stream and takes that long there; nothing ever waits for real.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

_local = threading.local()


class Stream:
    """now: virtual seconds at which everything queued so far has ended. reached: how far the GPU has come, None: to
    the end."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached: float | None = None

    def wait_event(self, event: "Event") -> None:
        self.now = max(self.now, event.at)

    def synchronize(self) -> None:
        self.reached = None


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.at, self.stream = enable_timing, -1.0, Stream()

    def record(self, stream: Stream) -> None:
        self.at, self.stream = stream.now, stream

    def query(self) -> bool:
        return self.stream.reached is None or self.at <= self.stream.reached

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        """fp32 milliseconds, as cudaEventElapsedTime gives them."""
        assert self.timing, "this event has no time"
        assert end.timing, "this event has no time"
        assert self.query(), "this event has not been reached"
        assert end.query(), "this event has not been reached"
        return float(np.float32((end.at - self.at) * 1e3))


@contextmanager
def current(stream: Stream) -> Iterator[None]:
    _local.stream = stream
    yield
    _local.stream = None


def queue(seconds: float) -> None:
    """Work on the current stream; in a thread without one, nothing."""
    if (stream := getattr(_local, "stream", None)) is not None:
        stream.now += seconds


def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts them in the place of torch.cuda's; returns torch.cuda."""
    for name, value in (("Stream", Stream), ("Event", Event), ("stream", current)):
        monkeypatch.setattr(torch.cuda, name, value)
    return torch.cuda
