"""The rows of an input file. A bad row becomes a row with an error; only an unusable file raises."""

import hashlib
import os
import sys
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.activity import advance
from flexengine.errors import InvalidInput
from flexengine.job.reading import OpenReader, ReadOptions
from flexengine.job.rows import Row
from flexengine.job.source import FORMATS, InputFile
from flexengine.job.streams import STDIN

_BLOCK_BYTES = 2**20


class InputScan(NamedTuple):
    """What one reading of the whole input counts."""

    total: int
    sha256: str  # hex digest of all bytes of the input after decompression, including those beyond the limit
    only_texts: bool  # whether all rows without an error have a text as prompt, and none is an OpenAI batch line


class InputRows(AbstractContextManager["InputRows"]):
    """The rows of an input file. Every `iter()` reads the file again from its beginning. Memory does not grow with the
    file. Use as a context manager, or call `close`.

    Iterating raises InvalidInput if the file has changed since it was opened, if compressed data, a Parquet or an Arrow
    file is damaged, or if an array in JSON is invalid from some line on.

    Attributes:
        prompt_column, chat, score: the arguments of these names.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prompt_column: str | None = None,
        limit: int | None = None,
        form: str | None = None,
        chat: bool = False,
        score: bool = False,
    ) -> None:
        """Open an input file.

        Args:
            path: a file, or a stream (a pipe, a device, /dev/fd/3), which is copied to a temporary file as it can be
                read only once. "-" is standard input from its present position.
            prompt_column: field or column that holds the prompt; other prompt fields are then data. A column named
                messages or prompt_token_ids is read as such. None reads any of PROMPT_KINDS, or `prompt` in CSV and
                TSV files.
            limit: most rows to read; None reads all.
            form: one of `source.FORMATS`; None takes the format of the file's suffix, jsonl for a stream without one.
                A jsonl line may be an OpenAI batch line, see `read_json.is_batch_line`.
            chat: run each prompt that is text as a user's message, through the model's chat template. Rows with
                messages or token ids, and OpenAI batch lines, are run as they are.
            score: score rows without a prompt; see `Row.scored`.

        Raises:
            InvalidInput: the file is missing, unreadable or a directory; its format is unknown; a table cannot be
                opened or lacks the column; or `prompt_column` is given for a txt file.
        """
        self.path = Path(STDIN if path == "-" else path)
        self.prompt_column, self.chat, self.score = prompt_column, chat, score
        self._scan: InputScan | None = None
        self._limit = None if limit is None else min(limit, sys.maxsize)
        self._source = InputFile(self.path, form)
        self.form = self._source.form  # its format, one of `source.FORMATS`
        try:
            self._state = self._source.state
            module, _, name = FORMATS[self.form].reader.partition(":")
            open_reader: OpenReader = getattr(import_module(module), name)
            self._read = open_reader(ReadOptions(self._source, prompt_column, score))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Row]:
        return self.hashed(None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary copy, if there is one. Without this call it is removed with the object."""
        self._source.close()

    @property
    def size(self) -> int:
        """Bytes of the input, before decompression; 0 if it is gone."""
        state = self._source.state
        return state[2] if state else 0

    @property
    def changed(self) -> bool:
        """Whether the file has another size, time or inode than when it was opened."""
        return self._source.state != self._state

    def hashed(self, digest: Any) -> Iterator[Row]:
        """Return an iterator of the rows that adds all bytes of the input to a digest of hashlib, also those beyond the
        limit. digest: None for no digest."""
        if self.changed:
            raise InvalidInput(f"input {self.path} has changed since it was opened; start the job again")
        return self._rows(digest)

    def _rows(self, digest: Any) -> Iterator[Row]:
        with self._source.open(digest) as file:
            for row in islice(self._read(file), self._limit):
                marked = (self.chat or self.score) and not row.is_batch
                yield replace(row, chat=self.chat, scored=self.score) if marked else row
            while digest is not None and file.read(_BLOCK_BYTES):
                pass

    def scan(self) -> InputScan:
        """Return the counts of the whole input. The first call reads it once.

        Memory is 8 bytes for each OpenAI batch line, and more if lines share a custom_id; see `openai.duplicate_ids`.

        Raises:
            InvalidInput: OpenAI batch lines share a custom_id, or as for iterating.
        """
        if self._scan is not None:
            return self._scan
        total, only_texts, digest, hashes = 0, True, hashlib.sha256(), array("q")
        for row in self.hashed(digest):
            total += 1
            advance()
            only_texts = only_texts and (row.error is not None or (not row.is_batch and isinstance(row.prompt, str)))
            if row.custom_id:
                hashes.append(hash(row.custom_id))
        if hashes:
            from flexengine.job.openai import duplicate_ids  # most files have no custom_id

            if repeated := duplicate_ids(self, hashes):
                listed = ", ".join(f"{name!r} (lines {first} and {second})" for name, first, second in repeated)
                raise InvalidInput(
                    f"every custom_id must be unique, but these are found twice: {listed}; change one of each"
                )
        self._scan = InputScan(total, digest.hexdigest(), only_texts)
        return self._scan
