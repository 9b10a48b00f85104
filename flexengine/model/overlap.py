"""Three steps of work that overlap: a thread makes items, a pool of threads changes them, a thread consumes them.

Items keep their order. The first step waits once `depth` items are not consumed yet.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class Channel(Generic[T]):
    """Items on the way from one thread to one other thread.

    Args:
        depth: the most items in the channel, at least 1.
    """

    def __init__(self, depth: int) -> None:
        self._items, self._depth = deque[T](), depth
        self._changed = threading.Condition()
        self._ended = self._stopped = False

    def put(self, item: T) -> bool:
        """Add an item as soon as there is room. Return False, without adding the item, if the receiver has stopped."""
        with self._changed:
            while len(self._items) >= self._depth and not self._stopped:
                self._changed.wait()
            if not self._stopped:
                self._items.append(item)
                self._changed.notify_all()
            return not self._stopped

    def end(self) -> None:
        """Tell the receiver that no further item comes."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop all items, and refuse further ones. Called by the receiver."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        """Yield items until the sender has ended."""
        while True:
            with self._changed:
                while not self._items and not self._ended:
                    self._changed.wait()
                if not self._items:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item
            del item  # while this thread waits, only the caller may hold it


def overlap(
    make: Iterable[A], change: Callable[[A], B], consume: Callable[[B], None], depth: int, workers: int = 1,
    begin: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Call `consume(change(item))` for every item of `make`, in order.

    `make` runs in a thread, `change` in `workers` threads and in the caller's context (contextvars), `consume` in a
    thread. At most depth + 2 items exist: one is being made, `depth` wait or are being changed, one is being consumed.
    All threads have ended when this function returns or raises.

    The error that belongs to the earliest item is raised. All items before it are consumed, so that finished work is
    not lost; so are items that were changed before an interrupt.

    Args:
        make: yields the items.
        change: returns a changed item.
        consume: takes a changed item.
        depth: the most items that wait, at least 1.
        workers: threads that change items.
        begin: called first in each of these threads.

    Raises:
        The first error of a step; an interrupt of the caller's thread in any case.
    """
    of_making, of_others = list[BaseException](), list[BaseException]()
    channel, context, ended = Channel[Future[B]](depth), copy_context(), threading.Event()
    pool = ThreadPoolExecutor(workers, "flexengine-changing", begin)

    def making() -> None:
        try:
            for item in make:
                if not channel.put(pool.submit(context.copy().run, change, item)):
                    return
                del item
        except BaseException as error:  # raised by the caller
            if not ended.is_set():  # else the pool refused the item, as it is shut down
                of_making.append(error)
        finally:
            channel.end()

    def consuming() -> None:
        try:
            for item in channel:
                consume(item.result())
                del item
        except BaseException as error:  # raised by the caller
            of_others.append(error)
        finally:
            channel.stop()
            ended.set()

    threads = [threading.Thread(target=work, name=f"flexengine-{work.__name__}", daemon=True)
               for work in (making, consuming)]  # fmt: skip
    try:
        for thread in threads:
            thread.start()
        ended.wait()
    finally:
        ended.set()
        if threads[1].ident is None:  # it could not be started
            channel.stop()
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt, `consuming` ends at the first
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
        pool.shutdown()
    errors = of_others or of_making
    try:
        if errors:
            raise errors[0]
    finally:
        of_others.clear()  # else the error holds this frame, which holds the error
        of_making.clear()
        del errors
