"""Limits for what may hang. No test needs a quick machine: limits are long, and only end what would last for ever."""

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds after which something hangs


def until(condition: Callable[[], Any]) -> Any:
    """Return condition() once it is true. Fail if it does not become true in time."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)
    return found


def in_time(work: Callable[[], Any]) -> Any:
    """Return work(), or fail if it does not end in time."""
    found: list[Any] = []

    def body() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it hangs"
    value, error = found[0]
    if error is not None:
        raise error
    return value
