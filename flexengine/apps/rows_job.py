"""Rows that an app makes, as the input of one resumable job, and the rows of its output."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from flexengine.job.files import write_whole
from flexengine.job.results import encode_fields, journal_path


class RowsJob(NamedTuple):
    """The files of a job."""

    rows: Path
    results: Path

    @classmethod
    def named(cls, stem: Path, rows_end: str = ".jsonl") -> Self:
        """Return the files beside each other whose names begin as `stem`."""
        return cls(*(stem.with_name(f"{stem.name}{end}") for end in (rows_end, ".results.jsonl")))

    @property
    def journal(self) -> Path:
        """Return the journal beside the results."""
        path = journal_path(self.results)
        assert path is not None  # the results are a plain file
        return path

    @property
    def began(self) -> bool:
        """Return whether a run has begun the job."""
        return self.rows.exists() and self.journal.exists()

    def has(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether the input has these rows."""
        return self.rows.exists() and self.rows.read_bytes() == _encoded(rows)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the input, unless it has these rows."""
        if not self.has(rows):
            write_whole(self.rows, _encoded(rows))

    def outputs(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the output."""
        with self.results.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _encoded(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(encode_fields(dict(row)) for row in rows)
