"""Results into output files: JSON lines in input order, whatever order they finish in."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from flexengine.config import Result
from flexengine.errors import InvalidInput
from flexengine.job.openai import batch_line
from flexengine.job.rows import Row

Encode = Callable[[Row, Result], bytes]
_ONLY_IF_ASKED_FOR = ("logprobs", "samples")


def check_output(path: str | os.PathLike[str] | None, input_path: str | os.PathLike[str] | None = None) -> None:
    """Raises InvalidInput if results cannot be written to `path`; to be called before any work. None is stdout."""
    if path is None:
        return
    try:
        target = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise InvalidInput(f"output {path} cannot be reached: {error}; name another --output") from error
    if target.is_dir():
        raise InvalidInput(f"output {path} is a directory; name a file in it")
    if not target.parent.is_dir():
        raise InvalidInput(f"output {path}: the directory {target.parent} does not exist; create it first")
    if input_path is not None and target == Path(input_path).resolve():
        raise InvalidInput(f"output {path} is the input file; results would replace the prompts")
    if not os.access(target if _is_special(target) else target.parent, os.W_OK):
        raise InvalidInput(f"output {path}: {target.parent} is not writable")


def journal_path(output: str | os.PathLike[str] | None) -> Path | None:
    """The journal of an output file, beside it. None for what keeps none: stdout, devices, pipes."""
    target = None if output is None else Path(output).resolve()
    return None if target is None or _is_special(target) else target.with_name(target.name + ".journal")


def part_path(output: str | os.PathLike[str]) -> Path:
    """Where an output file is put together."""
    target = Path(output).resolve()
    return target.with_name(target.name + ".part")


def output_row(row: Row, result: Result) -> dict[str, Any]:
    """The fields of an output row: the caller's, then those of Result (`logprobs` and `samples` only if there are any).

    Result's fields win over input fields of the same name (`index`, `error`, ...).
    """
    ours = {k: v for k, v in vars(result).items() if v is not None or k not in _ONLY_IF_ASKED_FOR}
    return {**row.fields, **ours}


def encode_row(row: Row, result: Result) -> bytes:
    """One output line, UTF-8, ending in a newline. What UTF-8 cannot hold (half a surrogate pair) is escaped."""
    try:
        return encode_fields(output_row(row, result))
    except (RecursionError, TypeError, ValueError) as error:
        if not row.fields:
            raise
        note = f"input fields left out, they cannot be written as JSON: {type(error).__name__}"
        result.error = f"{result.error}; {note}" if result.error else note
        return encode_row(Row(row.index, row.line), result)


def encode_fields(fields: dict[str, Any]) -> bytes:
    """A JSON object as one line of UTF-8. A number that JSON has not (the logarithm of 0) becomes null."""
    try:
        text = json.dumps(fields, ensure_ascii=False, default=vars, allow_nan=False)
    except ValueError:
        fields = _finite(json.loads(json.dumps(fields, default=vars)))
        text = json.dumps(fields, ensure_ascii=False)
    try:
        return (text + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(fields, default=vars) + "\n").encode("ascii")


def line_encoder(model: str, created: int) -> Encode:
    """The line of any row: an OpenAI batch line where one came in, else encode_row's.

    model, created (seconds since 1970): what batch lines carry.
    """

    def encode(row: Row, result: Result) -> bytes:
        if not row.is_batch:
            return encode_row(row, result)
        return encode_fields(batch_line(row, result, model, created))

    return encode


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ResultWriter:
    """Writes results, given in any order, as lines in the order of `rows`, each as soon as it is its turn.

    rows: with indices 0, 1, 2, ...; read again in step, so that only results which wait for an earlier one are held.
    output: a device or pipe (/dev/null), written directly; None: `stream` (default: standard output).
    encode: the line of a row.

    Attributes: done, failed (results taken so far without and with an error).
    """

    def __init__(
        self,
        rows: Iterable[Row],
        output: str | os.PathLike[str] | None = None,
        stream: BinaryIO | None = None,
        encode: Encode = encode_row,
    ) -> None:
        self.done = self.failed = 0
        self._rows = iter(rows)
        self._output, self._stream, self.encode = output, stream, encode
        self._waiting: dict[int, Result] = {}
        self._next = 0

    def __enter__(self) -> "ResultWriter":
        if self._output is None:
            self._file = self._stream or sys.stdout.buffer
            return self
        try:
            self._file = open(self._output, "wb")
        except OSError as error:
            raise InvalidInput(f"output {self._output} cannot be written: {error.strerror}") from error
        return self

    def write(self, result: Result) -> None:
        """Takes one finished row; writes it and those that waited for it, if it is their turn."""
        if result.index < self._next or result.index in self._waiting:
            raise RuntimeError(f"row {result.index} was finished twice")
        self._waiting[result.index] = result
        if result.error is None:
            self.done += 1
        else:
            self.failed += 1
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._file.write(self.encode(next(self._rows), ready))
            self._next += 1
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._output is None:
            self._file.flush()
        else:
            self._file.close()
        if kind is None and self._waiting:
            raise RuntimeError(f"row {self._next} was never finished; {len(self._waiting)} later rows were")


def write_output(
    output: str | os.PathLike[str], rows: Iterable[Row], results: Iterator[Result], encode: Encode = encode_row
) -> None:
    """Puts the output file in place: all rows in order, each with the next of `results`.

    The file appears complete or not at all: it is written beside its place, fsynced and renamed. What was begun is
    removed after an exception.
    """
    part, target = part_path(output), Path(output).resolve()
    try:
        part.unlink(missing_ok=True)  # a link there would lead elsewhere
        with part.open("xb") as file:
            for row, result in zip(rows, results, strict=True):
                file.write(encode(row, result))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Puts the names in a directory on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
