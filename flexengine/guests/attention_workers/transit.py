"""RAM that an engine and a worker on one machine both map, through which pages pass to and from the worker's device.

A page is copied to this memory once, and from it by the device. Through a socket it would be copied three times: to the
system, from it, and to the device.
"""

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexengine.errors import WorkerLost
from flexengine.guests.attention_workers.messages import MOST_SPANS, MessageKind

T = TypeVar("T")
PART, PARTS = 1 << 20, 16  # bytes of a part; parts, each of which holds one transfer at a time


class PageSpan(NamedTuple):
    """Bytes of pages, and a tensor in RAM that they are copied from or to."""

    handle: int  # of the memory that holds the pages
    start: int  # first byte in it
    tensor: Tensor  # contiguous


class Transit(Generic[T]):
    """The memory of one engine, in parts. Threads may call all methods at the same time.

    Args:
        transfer: sends a transfer, as `Client.transfer`.
        memory: uint8 [PARTS * PART], which the worker maps, too.
    """

    def __init__(
        self,
        transfer: Callable[[MessageKind, int, Tensor, Callable[[Any], None], Callable[[], None]], T],
        memory: Tensor,
    ) -> None:
        self._transfer, self._parts = transfer, memory.numpy().reshape(-1, PART)
        self._free = queue.SimpleQueue[int]()
        for number in range(len(self._parts)):
            self._free.put(number)

    def write(self, spans: Iterable[PageSpan]) -> None:
        """Copy tensors to pages. Return when all bytes are in parts: the worker copies them before it reads later
        messages. Raise WorkerLost."""
        for packed in _packed(spans):
            number = self._free.get()
            self._copy(number, packed, MessageKind.PUT)
            self._begin(MessageKind.PUT, number, packed)

    def read(self, spans: Iterable[PageSpan]) -> T | None:
        """Begin to copy pages to tensors. Return what ends when all bytes have come; None if there are none. Raise
        WorkerLost."""
        last = None  # answers come in order
        for packed in _packed(spans):
            last = self._begin(MessageKind.GET, self._free.get(), packed)
        return last

    def _begin(self, kind: MessageKind, number: int, packed: Sequence[PageSpan]) -> T:
        """Send a transfer of a part, which is free again when it has ended."""

        def release(_: Any) -> None:
            self._free.put(number)

        def arrived() -> None:
            if kind == MessageKind.GET:
                self._copy(number, packed, kind)

        rows = torch.tensor([(span.handle, span.start, len(span.tensor)) for span in packed])
        try:
            return self._transfer(kind, number * PART, rows, release, arrived)
        except WorkerLost:
            self._free.put(number)  # another thread may wait for a part, and gets the same error
            raise

    def _copy(self, number: int, packed: Sequence[PageSpan], kind: MessageKind) -> None:
        """Copy tensors to a part, or from it for GET. By one thread: torch's many would wait for a busy processor."""
        part, first = self._parts[number], 0
        for span in packed:
            piece, tensor = part[first : first + len(span.tensor)], span.tensor.numpy()
            np.copyto(*((piece, tensor) if kind == MessageKind.PUT else (tensor, piece)))
            first += len(piece)


def _packed(spans: Iterable[PageSpan]) -> Iterator[list[PageSpan]]:
    """Yield the spans, as uint8, cut into lists that fit into a part."""
    packed, room = list[PageSpan](), PART
    for handle, start, tensor in spans:
        flat, done = tensor.view(-1).view(torch.uint8), 0
        while done < len(flat):
            piece = flat[done : done + room]
            packed.append(PageSpan(handle, start + done, piece))
            done, room = done + len(piece), room - len(piece)
            if not room or len(packed) == MOST_SPANS:
                yield packed
                packed, room = [], PART
    if packed:
        yield packed
