"""Input files into rows, rows into requests. A bad row becomes a row with an error; only a bad file raises."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput

MAX_LINE_BYTES = 64 * 2**20
PROMPT_KINDS = ("prompt", "messages", "prompt_token_ids")
OVERRIDES = ("max_tokens", "temperature", "seed", "ignore_eos")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One input row.

    index: 0-based among the rows (blank lines do not count).
    line: 1-based line of the file; 0 if the row did not come from a file.
    fields: what the caller sent, kept for the output; empty if the line could not be read.
    error: why this row cannot be run, naming its line; None if nothing is known against it.
    """

    index: int
    line: int
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Request:
    """A row ready to run: `prompt_ids` are token ids in [0, vocab), prompt + max_tokens fit the context."""

    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


def read_rows(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Row]:
    """Rows of a .jsonl/.json (one object per line) or .txt (one prompt per line) file, in order, at most `limit`.

    Reads bytes line by line, so that one line of bad UTF-8 or JSON costs one error row. Blank lines are skipped.
    Raises InvalidInput at once for a missing or unreadable file, a directory or an unknown suffix.
    """
    path = Path(path)
    parse = {".jsonl": _json_row, ".json": _json_row, ".txt": _text_row}.get(path.suffix.lower())
    if parse is None:
        raise InvalidInput(
            f"input {path} has suffix {path.suffix!r}; accepted are .jsonl and .json (one JSON object per line)"
            " and .txt (one prompt per line)"
        )
    if path.is_dir():
        raise InvalidInput(f"input {path} is a directory; it must be a .jsonl, .json or .txt file")
    try:
        if not path.is_fifo():  # whose writer would take the reader's end for the end of the job
            path.open("rb").close()
    except OSError as error:
        raise InvalidInput(
            f"input {path} cannot be read ({error.strerror}); it must be a .jsonl, .json or .txt file"
        ) from error
    return islice(_rows(path, parse), None if limit is None else min(limit, sys.maxsize))


def row_of(prompt: object, index: int) -> Row:
    """The row of a prompt given in Python: a string, or a mapping with the fields of a JSONL row."""
    if isinstance(prompt, str):
        return Row(index, 0, {"prompt": prompt})
    if isinstance(prompt, Mapping):
        return Row(index, 0, dict(prompt))
    return _fail(Row(index, 0), f"is {type(prompt).__name__}; it must be a string or a row (dict)")


def encode(
    row: Row, tokenizer: Any, context_length: int, defaults: SamplingParams, vocab_size: int | None = None
) -> Request | Row:
    """The request of a row, or the row with its error.

    tokenizer: a transformers tokenizer, or None if the checkpoint has none (then only prompt_token_ids rows work).
    context_length: most tokens of prompt and continuation together.
    vocab_size: prompt_token_ids must lie below it; the tokenizer's if not given.
    """
    if row.error is not None:
        return row
    try:
        sampling = replace(defaults, **{k: row.fields[k] for k in OVERRIDES if row.fields.get(k) is not None})
        ids = _prompt_ids(row.fields, tokenizer, len(tokenizer) if vocab_size is None and tokenizer else vocab_size)
        total = len(ids) + sampling.max_tokens
        if total > context_length:
            raise InvalidInput(
                f"prompt of {len(ids)} tokens + max_tokens {sampling.max_tokens} = {total} tokens,"
                f" more than the model's context of {context_length}"
            )
    except InvalidInput as error:
        return _fail(row, str(error))
    return Request(row.index, ids, sampling)


def _fail(row: Row, reason: str) -> Row:
    where = f"line {row.line}" if row.line else f"prompt {row.index}"
    return replace(row, error=f"{where}: {reason}")


def _rows(path: Path, parse: Any) -> Iterator[Row]:
    with path.open("rb") as file:
        index = 0
        for line, raw in enumerate(_lines(file), start=1):
            if raw is not None and not raw.strip():
                continue
            row = Row(index, line)
            yield _fail(row, f"is longer than {MAX_LINE_BYTES:,} bytes") if raw is None else parse(row, raw)
            index += 1


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines without their end and without a leading BOM; None for one over MAX_LINE_BYTES, which is never held."""
    first = True
    while raw := file.readline(MAX_LINE_BYTES + 1):
        if too_long := len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(2**20)
        yield None if too_long else (raw.removeprefix(_BOM) if first else raw).rstrip(b"\r\n")
        first = False


def _text_row(row: Row, raw: bytes) -> Row:
    try:
        return replace(row, fields={"prompt": raw.decode("utf-8")})
    except UnicodeDecodeError as error:
        return _fail(row, f"invalid UTF-8 at byte {error.start}")


def _json_row(row: Row, raw: bytes) -> Row:
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        return _fail(row, f"invalid UTF-8 at byte {error.start}")
    except RecursionError:
        return _fail(row, "invalid JSON: nested too deeply")
    except ValueError as error:
        return _fail(row, f"invalid JSON: {error}")
    if not isinstance(value, dict):
        return _fail(row, f"holds a JSON {type(value).__name__}; a row must be an object such as {{\"prompt\": ...}}")
    return replace(row, fields=value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _prompt_ids(fields: Mapping[str, Any], tokenizer: Any, vocab_size: int | None) -> tuple[int, ...]:
    present = [kind for kind in PROMPT_KINDS if fields.get(kind) is not None]
    if len(present) != 1:
        raise InvalidInput(f"has {' and '.join(present) or 'none'} of {', '.join(PROMPT_KINDS)}; exactly one is needed")
    kind = present[0]
    if kind == "prompt_token_ids":
        return _given_ids(fields[kind], vocab_size)
    _check_text(kind, fields[kind])
    if tokenizer is None:
        raise InvalidInput(f"the checkpoint has no tokenizer, so {kind} cannot be used; send prompt_token_ids")
    try:
        ids = tokenizer(fields[kind], verbose=False) if kind == "prompt" else _chat_ids(tokenizer, fields[kind])
        ids = tuple(int(i) for i in (ids["input_ids"] if isinstance(ids, Mapping) else ids))
    except Exception as error:  # a chat template or a tokenizer may raise anything; it is this row's problem only
        raise InvalidInput(f"{kind} cannot be tokenised: {type(error).__name__}: {error}") from error
    if not ids:
        raise InvalidInput(f"{kind} is empty after tokenisation")
    return ids


def _chat_ids(tokenizer: Any, messages: list[Any]) -> Any:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)


def _check_text(kind: str, value: Any) -> None:
    """Raises InvalidInput unless `value` is text, or messages of text, that can be written as UTF-8."""
    if kind == "prompt":
        texts = [value]
        if not isinstance(value, str):
            raise InvalidInput(f"prompt is {type(value).__name__}; it must be a string")
    else:
        if not isinstance(value, list) or not value:
            raise InvalidInput("messages must be a non-empty list of {role, content} objects")
        texts = [part for message in value for part in _message_texts(message)]
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{kind} holds half a surrogate pair, which is no character") from error


def _message_texts(message: Any) -> tuple[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidInput("messages must be a list of objects whose role and content are strings")
    return role, content


def _given_ids(value: Any, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidInput("prompt_token_ids must be a non-empty list of token ids")
    top = math.inf if vocab_size is None else vocab_size
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidInput(f"prompt_token_ids holds {token!r}; token ids are whole numbers")
        if not 0 <= token < top:
            raise InvalidInput(f"prompt_token_ids holds {token}; token ids lie in [0, {top})")
    return tuple(value)
