"""Conversion of rows to requests. A row that cannot be run becomes a row with an error; nothing is raised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.rows import PROMPT_KINDS, Row

OVERRIDES = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True)
class Request:
    """A row that can be run. Prompt and max_tokens together fit the model's context.

    Attributes:
        index: number of the row.
        prompt_ids: token ids in [0, vocabulary size).
        sampling: sampling parameters.
        line: see Row.
        forced: continuation to score (teacher forcing): these tokens replace the sampled ones. () samples.
        prompt: the prompt as it was given; see Result.
    """

    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    line: int = field(default=0, compare=False)
    forced: tuple[int, ...] = ()
    prompt: Any = field(default=None, compare=False, repr=False)


def encode(
    row: Row, tokenizer: Any, context_length: int, defaults: SamplingParams, vocab_size: int | None = None
) -> Request | Row:
    """Return the request of a row, or the row with an error if it cannot be run.

    Args:
        tokenizer: None if the checkpoint has none; only prompt_token_ids are allowed then.
        context_length: most tokens of prompt and continuation together.
        defaults: sampling parameters of fields that the row does not have.
        vocab_size: prompt_token_ids must be smaller; None takes the tokenizer's.
    """
    if row.error is not None:
        return row
    request = row.request
    try:
        sampling = replace(defaults, **{k: request[k] for k in OVERRIDES if request.get(k) is not None})
        ids = _prompt_ids(request, tokenizer, len(tokenizer) if vocab_size is None and tokenizer else vocab_size)
        if foreign := [t for t in sampling.stop_token_ids if vocab_size is not None and t >= vocab_size]:
            raise InvalidInput(f"stop_token_ids holds {foreign[0]}; token ids lie in [0, {vocab_size})")
        total = len(ids) + sampling.max_tokens
        if total > context_length:
            raise InvalidInput(
                f"prompt of {len(ids)} tokens + max_tokens {sampling.max_tokens} = {total} tokens,"
                f" more than the model's context of {context_length}; shorten the prompt or lower max_tokens"
            )
    except InvalidInput as error:
        return row.refused(str(error))
    return Request(row.index, ids, sampling, row.line, prompt=row.prompt)


def _prompt_ids(request: Mapping[str, Any], tokenizer: Any, vocab_size: int | None) -> tuple[int, ...]:
    present = [kind for kind in PROMPT_KINDS if request.get(kind) is not None]
    if len(present) != 1:
        raise InvalidInput(f"has {' and '.join(present) or 'none'} of {', '.join(PROMPT_KINDS)}; exactly one is needed")
    kind = present[0]
    if kind == "prompt_token_ids":
        return _checked_ids(request[kind], vocab_size)
    _check_text(kind, request[kind])
    if tokenizer is None:
        raise InvalidInput(f"the checkpoint has no tokenizer, so {kind} cannot be used; send prompt_token_ids")
    try:
        ids = tokenizer(request[kind], verbose=False) if kind == "prompt" else _chat_ids(tokenizer, request)
        ids = tuple(int(i) for i in (ids["input_ids"] if isinstance(ids, Mapping) else ids))
    except Exception as error:  # a chat template or a tokenizer may raise any error; only this row fails
        raise InvalidInput(f"{kind} cannot be tokenised: {type(error).__name__}: {error}") from error
    if not ids:
        raise InvalidInput(f"{kind} is empty after tokenisation")
    return ids


def _chat_ids(tokenizer: Any, request: Mapping[str, Any]) -> Any:
    return tokenizer.apply_chat_template(
        request["messages"], tools=request.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=True
    )


def _check_text(kind: str, value: Any) -> None:
    """Raise InvalidInput if `value` is not text, or messages of text, that UTF-8 can encode."""
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


def _checked_ids(value: Any, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidInput("prompt_token_ids must be a non-empty list of token ids")
    top = math.inf if vocab_size is None else vocab_size
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidInput(f"prompt_token_ids holds {token!r}; token ids are whole numbers")
        if not 0 <= token < top:
            raise InvalidInput(f"prompt_token_ids holds {token}; token ids lie in [0, {top})")
    return tuple(value)
