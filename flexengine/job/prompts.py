"""Conversion of rows to requests. A row that cannot be run becomes a row with an error; nothing is raised."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, json_kind, shown
from flexengine.job import chat
from flexengine.job.rows import PROMPT_KINDS, Row

OVERRIDES = tuple(f.name for f in fields(SamplingParams))


class Target(NamedTuple):
    """Tokens to score: log probabilities of `continuation` after `context` (teacher forcing). Both have tokens.

    Together they may have one token more than the model's context, as the last token is not computed.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens to compute. The last len(continuation) of them predict the continuation."""
        return self.context + self.continuation[:-1]


@dataclass(frozen=True)
class Request:
    """A row that can be run. Prompt and max_tokens together fit the model's context."""

    index: int
    prompt_ids: tuple[int, ...]  # token ids in [0, vocabulary size)
    sampling: SamplingParams
    line: int = field(default=0, compare=False)
    # What to score, by choice; a long text is scored in several parts. () for a row that generates.
    choices: tuple[tuple[Target, ...], ...] = ()
    prompt: Any = field(default=None, compare=False, repr=False)  # the prompt as it was given; see Result

    @property
    def targets(self) -> list[Target]:
        """The targets of all choices, in order."""
        return [target for choice in self.choices for target in choice]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Prompt tokens, and most tokens to generate, of each of the row's sequences. Scoring takes one sweep, like the
        generation of one token."""
        if self.choices:
            return [(len(target.prompt_ids), 1) for target in self.targets]
        return [(len(self.prompt_ids), self.sampling.max_tokens)] * self.sampling.n


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
        for name in ("max_new_tokens", "max_completion_tokens"):  # other programs' names, which would be read as data
            if request.get(name) is not None and request.get("max_tokens") is None:
                raise InvalidInput(f"{name} is {shown(request[name])}; the field is named max_tokens here: rename it")
        chat.check_format(request)
        sampling = replace(defaults, **{k: request[k] for k in OVERRIDES if request.get(k) is not None})
        known = len(tokenizer) if vocab_size is None and tokenizer else vocab_size
        ids = _prompt_ids(request, tokenizer, known, row.chat)
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


def _prompt_ids(
    request: Mapping[str, Any], tokenizer: Any, vocab_size: int | None, as_message: bool
) -> tuple[int, ...]:
    """Return the token ids of a request's prompt. as_message: run text as a user's message."""
    present = [kind for kind in PROMPT_KINDS if request.get(kind) is not None]
    if len(present) != 1:
        fields = (
            f" (its fields are {shown(list(request))}; --prompt-column, or prompt_column of run_job, names another)"
        )
        raise InvalidInput(
            f"has {' and '.join(present) or 'none'} of {', '.join(PROMPT_KINDS)}; exactly one is needed"
            f"{'' if present else fields}"
        )
    kind = present[0]
    if kind == "messages":
        return _chat_ids(kind, request[kind], request, tokenizer)
    if kind == "prompt" and as_message and isinstance(prompt := request[kind], str):
        return _chat_ids(kind, [chat.user_message(prompt)], request, tokenizer)
    if request.get(chat.TOOLS) and json_kind(request[chat.TOOLS]) == "an array":
        raise InvalidInput(f"tools needs messages, as a chat template writes them; {kind} has none: send messages")
    if kind == "prompt_token_ids":
        return checked_ids(kind, request[kind], vocab_size)
    if not isinstance(prompt := request[kind], str):
        raise InvalidInput(f"prompt is {json_kind(prompt)}; it must be a string")
    check_text(kind, prompt)
    return _tokenized(kind, tokenizer, lambda: tokenizer(prompt, verbose=False))


def _chat_ids(kind: str, given: Any, request: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of messages, with the request's tools. kind: field that the messages are from."""
    messages, tools = chat.messages_of(given), chat.tools_of(request)
    try:
        text = json.dumps([messages, tools], ensure_ascii=False, default=str)
    except RecursionError as error:
        raise InvalidInput("messages are nested too deeply") from error
    check_text(kind, text)
    return _tokenized(kind, tokenizer, lambda: chat.token_ids(tokenizer, messages, tools))


def _tokenized(kind: str, tokenizer: Any, tokenize: Callable[[], Any]) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raise InvalidInput if there are none or they cannot be computed."""
    if tokenizer is None:
        raise InvalidInput(f"the checkpoint has no tokenizer, so {kind} cannot be used; send prompt_token_ids")
    try:
        ids = tokenize()
        ids = tuple(int(i) for i in (ids["input_ids"] if isinstance(ids, Mapping) else ids))
    except InvalidInput:
        raise
    except Exception as error:  # a chat template or a tokenizer may raise any error; only this row fails
        raise InvalidInput(f"{kind} cannot be tokenised: {type(error).__name__}: {error}") from error
    if not ids:
        raise InvalidInput(f"{kind} is empty after tokenisation")
    return ids


def check_text(kind: str, text: str) -> None:
    """Raise InvalidInput if UTF-8 cannot encode the text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{kind} holds half a surrogate pair, which is no character; remove it") from error


def checked_ids(kind: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Return token ids as a tuple. Raise InvalidInput, with the field's name `kind`, if these are no token ids."""
    value = value.tolist() if hasattr(value, "tolist") else value  # an array of numpy, or a tensor of torch
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidInput(f"{kind} is {shown(value)}; it must be an array of token ids that is not empty")
    top = math.inf if vocab_size is None else vocab_size
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidInput(f"{kind} holds {shown(token)}; token ids are whole numbers")
        if not 0 <= token < top:
            raise InvalidInput(f"{kind} holds {token}; token ids lie in [0, {top})")
    return tuple(value)
