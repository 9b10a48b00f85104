"""Results as lines of an output: where they may be written, and their JSON."""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flexengine.config import Result
from flexengine.errors import InvalidInput
from flexengine.job.files import is_stream, part_path, stdout_is_open
from flexengine.job.row_fields import KEPT, RESULTS, kept_name
from flexengine.job.rows import Row

Encode = Callable[[Row, Result], bytes]
_OPTIONAL = ("logprobs", "samples", "scores")  # fields that are left out if they are None
_OTHER_FORMATS = (".gz", ".zst", ".bz2", ".xz", ".zip", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx")


def check_output(path: str | os.PathLike[str] | None, input_path: str | os.PathLike[str] | None = None) -> None:
    """Raise InvalidInput if results cannot be written to `path`. Called before all work. path: the output; None is
    stdout."""
    if path is None:
        if not stdout_is_open():
            raise InvalidInput("stdout is closed, so results cannot be written to it; name an --output file")
        return
    if is_stream(path) and not _is_input(path, input_path):
        if not os.access(path, os.W_OK):
            raise InvalidInput(f"output {path} cannot be written to; name another output")
        return
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise InvalidInput(f"output {path} is a directory; name a file in it")
        with suppress(FileNotFoundError):
            os.lstat(f"{target}.journal")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        if getattr(error, "errno", 0) == errno.ENAMETOOLONG:
            raise resolve_name("flexengine.job.bad_paths:long_output")(path, target) from error
        raise InvalidInput(f"output {path} cannot be reached: {error}; name another output") from error
    if not target.parent.is_dir():
        raise InvalidInput(f"output {path}: the directory {target.parent} does not exist; create it first")
    if _is_input(path, input_path):
        raise InvalidInput(f"output {path} is the input file, whose prompts would be replaced; name another output")
    if target.suffix.lower() in _OTHER_FORMATS:
        fault = f"output {path}: results are JSON lines, uncompressed, which {target.suffix} does not name"
        raise InvalidInput(f"{fault}; name it {target.stem.partition('.')[0]}.jsonl")
    if not os.access(target.parent, os.W_OK):
        raise InvalidInput(f"output {path}: {target.parent} is not writable; name another output")


def _is_input(path: str | os.PathLike[str], input_path: str | os.PathLike[str] | None) -> bool:
    """Return whether two names lead to one file. A file that was redirected to stdin is found, too."""
    return input_path is not None and os.path.realpath(path) == os.path.realpath(input_path)


def journal_path(output: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of an output file's journal, beside it. Return None for streams, which have no journal."""
    if output is None or is_stream(output):
        return None
    target = Path(output).resolve()
    return target.with_name(target.name + ".journal")


def files_beside(output: str | os.PathLike[str], name: str) -> dict[str, Path]:
    """Return the files that a job writes beside its output, which messages call `name`, by the names that messages
    use."""
    if (journal := journal_path(output)) is None:
        return {}
    return {f"the unfinished part of {name}": part_path(output), f"the journal of {name}": journal}


def present_fields(value: Any) -> dict[str, Any]:
    """Return the columns of a Result or the fields of a Completion, without those of _OPTIONAL that are None."""
    fields = value.columns() if isinstance(value, Result) else vars(value)
    return {k: v for k, v in fields.items() if v is not None or k not in _OPTIONAL}


def encode_row(row: Row, result: Result) -> bytes:
    """Return an output line in UTF-8 with its newline: the fields of the input row, see `kept_name`, then those of
    the Result. If the input fields cannot be written as JSON, leave them out and say so in the result's error."""
    try:
        alike = any(name in RESULTS or str(name).startswith(KEPT) for name in row.fields)
        own = {kept_name(name): value for name, value in row.fields.items()} if alike else row.fields
        return encode_fields({**own, **present_fields(result)})
    except (RecursionError, TypeError, ValueError) as error:
        if not row.fields:
            raise
        note = f"the input fields are left out, as they cannot be written as JSON: {type(error).__name__}"
        result.error = f"{result.error}; {note}" if result.error else note
        return encode_row(Row(row.index, row.line), result)


def encode_fields(fields: dict[str, Any]) -> bytes:
    """Return a JSON object as a line of UTF-8. Infinity and NaN become null. If the text has half a surrogate pair, all
    characters beyond ASCII are escaped."""
    try:
        text = json.dumps(fields, ensure_ascii=False, default=present_fields, allow_nan=False)
    except ValueError:
        fields = finite(fields)
        text = json.dumps(fields, ensure_ascii=False)
    try:
        return (text + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(fields, default=present_fields) + "\n").encode("ascii")


def logprob_of(entry: Mapping[str, Any]) -> float:
    """Return the log probability of a token or score in an output row. `encode_fields` writes null for -inf."""
    value = entry["logprob"]
    return -math.inf if value is None else float(value)


def line_encoder(model: str, created: int) -> Encode:
    """Return a function that returns the output line of a row: an OpenAI batch line for a batch line, else as
    `encode_row`. model: model name in batch lines. created: time in batch lines, in seconds since 1970."""

    def encode(row: Row, result: Result) -> bytes:
        if not row.is_batch:
            return encode_row(row, result)
        from flexengine.job.openai import batch_line  # most files have no such line

        return encode_fields(batch_line(row, result, model, created))

    return encode


def finite(value: Any) -> Any:
    """Return the value as JSON has it, with None for infinity (the logarithm of 0) and NaN."""
    return json.loads(json.dumps(value, default=present_fields), parse_constant=lambda _: None)
