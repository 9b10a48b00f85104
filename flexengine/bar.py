"""The progress bar: on standard error, and without a thread of its own."""

import sys
from typing import Any

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[misc]
    """tqdm without its monitor thread, as malloc gives each new thread an arena of its own. Other tqdm bars in the
    process keep their monitor thread."""

    monitor_interval = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(file=sys.stderr, dynamic_ncols=True, mininterval=0.5, **options)
