"""Three steps of work that overlap: a thread makes items, the caller's thread changes them, a thread consumes them.

Items keep their order. A step that is ahead waits once `depth` of its items are not taken yet.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


def overlap(make: Iterable[A], change: Callable[[A], B], consume: Callable[[B], None], depth: int) -> None:
    """Call `consume(change(item))` for every item of `make`.

    `make` runs in a thread, `change` in the caller's thread, `consume` in a thread. At most depth + 2 items exist
    before they are changed, and depth + 2 after: `depth` in a channel, one with each of its ends. Both threads have
    ended when this function returns or raises.

    The first error of a step is raised. Items that were made before an error of `make` are consumed, and items that
    were changed before an error of `change`, or before an interrupt, are consumed, so that finished work is not lost.

    Args:
        make: yields the items.
        change: returns a changed item.
        consume: takes a changed item.
        depth: the most items that wait between two steps.

    Raises:
        The first error of a step; an interrupt of the caller's thread in any case.
    """
    errors: list[BaseException] = []
    made, changed = Channel[A](depth), Channel[B](depth)

    def making() -> None:
        try:
            for item in make:
                if not made.put(item):
                    return
                del item
        except BaseException as error:  # raised by the caller
            errors.append(error)
        finally:
            made.end()

    def consuming() -> None:
        try:
            for item in changed:
                consume(item)
                del item
        except BaseException as error:  # raised by the caller
            errors.append(error)
        finally:
            changed.stop()

    threads = [threading.Thread(target=work, name=f"flexengine-{work.__name__}", daemon=True)
               for work in (making, consuming)]  # fmt: skip
    try:
        for thread in threads:
            thread.start()
        for item in made:
            if not changed.put(change(item)):
                break
            del item
    except Exception as error:
        errors.append(error)
    finally:
        made.stop()
        changed.end()
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # else the error holds this frame, which holds the error
