"""Results into an output file: JSON lines in input order, whatever order they finish in."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from flexengine.config import Result
from flexengine.errors import FlexError, InvalidInput
from flexengine.job.prompts import Row


def check_output(path: str | os.PathLike[str] | None, input_path: str | os.PathLike[str] | None = None) -> None:
    """Raises InvalidInput if results cannot be written to `path`; to be called before any work. None is stdout."""
    if path is None:
        return
    target = Path(path).resolve()
    if target.is_dir():
        raise InvalidInput(f"output {path} is a directory; name a file in it")
    if not target.parent.is_dir():
        raise InvalidInput(f"output {path}: the directory {target.parent} does not exist; create it first")
    if input_path is not None and target == Path(input_path).resolve():
        raise InvalidInput(f"output {path} is the input file; results would replace the prompts")
    if not os.access(target if _is_special(target) else target.parent, os.W_OK):
        raise InvalidInput(f"output {path}: {target.parent} is not writable")


def output_row(row: Row, result: Result) -> dict[str, Any]:
    """The fields of an output row: the caller's, then those of Result.

    Result's fields win over input fields of the same name (`index`, `error`, ...).
    """
    return {**row.fields, **asdict(result)}


def encode_row(row: Row, result: Result) -> bytes:
    """One output line, UTF-8, ending in a newline. What UTF-8 cannot hold (half a surrogate pair) is escaped."""
    try:
        fields = output_row(row, result)
        try:
            return (json.dumps(fields, ensure_ascii=False) + "\n").encode("utf-8")
        except UnicodeEncodeError:
            return (json.dumps(fields) + "\n").encode("ascii")
    except (RecursionError, TypeError, ValueError) as error:
        if not row.fields:
            raise
        note = f"input fields left out, they cannot be written as JSON: {type(error).__name__}"
        result.error = f"{result.error}; {note}" if result.error else note
        return encode_row(Row(row.index, row.line), result)


class ResultWriter:
    """Writes (row, result) pairs, given in any order, as JSON lines in the order of row.index (0, 1, 2, ...).

    Lines go to `<output>.part`, which is fsynced and renamed to `output` when the block ends without an exception;
    after an exception the .part file stays, with every line up to the first unfinished row. A device or pipe
    (/dev/null) is written directly; without an output, lines go to `stream` (default: standard output).

    Attributes: done, failed (rows written so far without and with an error).
    """

    def __init__(self, output: str | os.PathLike[str] | None, stream: BinaryIO | None = None) -> None:
        self.done = self.failed = 0
        self._target = None if output is None else Path(output).resolve()
        self._stream = stream
        self._part: Path | None = None
        self._waiting: dict[int, bytes] = {}
        self._next = 0

    def __enter__(self) -> "ResultWriter":
        if self._target is None:
            self._file = self._stream or sys.stdout.buffer
            return self
        special = _is_special(self._target)
        self._part = None if special else self._target.with_name(self._target.name + ".part")
        try:
            self._file = (self._part or self._target).open("wb")
        except OSError as error:
            raise InvalidInput(f"output {self._part or self._target} cannot be written: {error.strerror}") from error
        return self

    def write(self, row: Row, result: Result) -> None:
        """Takes one finished row; writes it and those that waited for it, if it is their turn."""
        if row.index < self._next or row.index in self._waiting:
            raise FlexError(f"row {row.index} was finished twice")
        self._waiting[row.index] = encode_row(row, result)
        if result.error is None:
            self.done += 1
        else:
            self.failed += 1
        while (line := self._waiting.pop(self._next, None)) is not None:
            self._file.write(line)
            self._next += 1
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._target is None:
            self._file.flush()
        else:
            with self._file:
                self._file.flush()
                if self._part is not None:
                    os.fsync(self._file.fileno())
        if kind is not None:
            return
        if self._waiting:
            raise FlexError(f"row {self._next} was never finished; {len(self._waiting)} later rows were")
        if self._part is not None and self._target is not None:
            os.replace(self._part, self._target)
            _sync_directory(self._target.parent)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
