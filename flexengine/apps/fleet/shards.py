"""Shards: parts of a job that one actor runs in one call, and their results, as bytes for Ray."""

import math
import pickle
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

from flexengine.config import Result
from flexengine.job.journal import decode_record, encode_record, result_of, value_of
from flexengine.job.rows import Row

PER_ACTOR = 4  # shards of an actor, at least, so that all actors end at about the same time
MOST_ROWS = 2048  # of a shard, as a lost actor repeats its shard


def shard_rows(rows: int, actors: int) -> int:
    """Return how many rows a shard has. rows: rows to run."""
    return max(1, min(MOST_ROWS, math.ceil(rows / (PER_ACTOR * actors))))


def shards(rows: Iterable[Row], size: int) -> Iterator[bytes]:
    """Yield rows in shards of `size` rows, without the fields that only the output needs. They may be of any type that
    a table can hold, so they are pickled, as Ray pickles whatever it sends."""
    left = iter(rows)
    while part := [_to_run(row) for row in islice(left, size)]:
        yield pickle.dumps(part)


def _to_run(row: Row) -> Row:
    request = {} if row.error else row.request
    return Row(row.index, row.line, error=row.error, request=request, chat=row.chat, scored=row.scored)


def rows_of(shard: bytes) -> list[Row]:
    """Return the rows of a shard."""
    return cast(list[Row], pickle.loads(shard))


def packed(results: Iterable[Result]) -> bytes:
    """Return results as records of a journal, without their prompts."""
    lines = []
    for result in results:
        result.prompt = None  # the output has the row's own fields
        lines.append(encode_record(value_of(result)))
    return b"".join(lines)


def results_of(lines: bytes) -> Iterator[Result]:
    """Yield results that `packed` packed. Raise ValueError if a record is damaged."""
    for line in lines.splitlines(keepends=True):
        value: dict[str, Any] | None = decode_record(line)
        if value is None:
            raise ValueError("a record of an actor's results is damaged")
        yield result_of(value)
