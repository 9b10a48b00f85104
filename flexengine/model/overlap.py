"""Three steps of work that overlap: a thread makes items, a pool of threads changes them, a thread consumes them.

Items keep their order. The first step waits once `depth` items are not consumed yet.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from queue import SimpleQueue
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def overlap(
    make: Iterable[A],
    change: Callable[[A], B],
    consume: Callable[[B], None],
    depth: int,
    workers: int = 1,
    begin: Callable[[], None] | None = None,
) -> None:
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
    errors, context, ended = list[BaseException](), copy_context(), threading.Event()
    waiting, room = SimpleQueue[Future[B] | None](), threading.Semaphore(depth)
    pool = ThreadPoolExecutor(workers, "flexengine-changing", begin)

    def making() -> None:
        try:
            for item in make:
                future = pool.submit(context.copy().run, change, item)
                del item
                room.acquire()
                if ended.is_set():
                    return
                waiting.put(future)
        except BaseException as error:  # raised by the caller, after the items before it
            if not ended.is_set():  # else the pool refused the item, as it is shut down
                failed = Future[B]()
                failed.set_exception(error)
                waiting.put(failed)
        finally:
            waiting.put(None)

    def consuming() -> None:
        try:
            for future in iter(waiting.get, None):
                room.release()
                consume(future.result())
                del future
        except BaseException as error:  # raised by the caller
            errors.append(error)
        finally:
            ended.set()
            room.release()  # `making` may wait for it

    threads = [
        threading.Thread(target=work, name=f"flexengine-{work.__name__}", daemon=True) for work in (making, consuming)
    ]
    try:
        for thread in threads:
            thread.start()
        ended.wait()
    finally:
        ended.set()
        room.release()
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt, `consuming` ends at the first
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
        pool.shutdown()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # else the error holds this frame, which holds the error
