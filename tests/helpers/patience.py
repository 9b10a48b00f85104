"""A limit for work that may hang."""

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 20.0  # seconds after which something hangs


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
