"""The encoded prompts of a job, kept in a temporary file from the survey to the run, so that each is tokenized once."""

import pickle
import tempfile
from array import array
from collections.abc import Iterator
from typing import Any

from flexengine.config import SamplingParams
from flexengine.job.prompts import Request
from flexengine.job.rows import Row

MEMORY_BYTES = 16 << 20  # more is written to a file without a name


class RequestSpool:
    """Requests, and rows with an error, in the order in which they were added. Prompts as they were given are left out,
    but for rows with an error.

    Args:
        defaults: sampling parameters that most requests have.
    """

    def __init__(self, defaults: SamplingParams) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - it lives as long as this object
        self._defaults, self._count = defaults, 0
        self.complete = True  # False once the file could not be written

    def add(self, item: Request | Row) -> None:
        """Add an item. If the disk is full, drop all items."""
        if not self.complete:
            return
        try:
            pickle.dump(self._packed(item), self._file, pickle.HIGHEST_PROTOCOL)
            self._count += 1
        except (OSError, pickle.PicklingError, TypeError, AttributeError):  # a row's data may be of any type
            self.complete = False
            self._file.close()

    def _packed(self, item: Request | Row) -> Any:
        if isinstance(item, Row):
            return Row(item.index, item.line, error=item.error)
        sampling = None if item.sampling == self._defaults else item.sampling
        return item.index, item.line, array("i", item.prompt_ids), sampling, item.choices

    def items(self) -> Iterator[Request | Row]:
        """Yield all items, once. Then, or if the generator is closed, free the memory or the file."""
        with self._file as file:
            file.seek(0)
            for _ in range(self._count):
                item = pickle.load(file)
                if isinstance(item, Row):
                    yield item
                    continue
                index, line, ids, sampling, choices = item
                yield Request(index, tuple(ids), sampling or self._defaults, line, choices)
