"""A row of the input, which all file readers yield, and its request, which an engine runs. A row that cannot be run has
an error; nothing is raised."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from flexengine.config import SamplingParams
from flexengine.errors import VISIBLE, InvalidInput, blankness, is_missing, json_kind, library_faults, shown
from flexengine.job.bounds import BoundedTokenizer, check_known, check_text
from flexengine.job.foreign import CHAT_ONLY, FOREIGN, TOOLS, check_format, own_sampling, whole
from flexengine.records import unwrapped

PROMPT_KINDS = ("prompt", "messages", "prompt_token_ids")
CONTEXT = "context"  # field that stands before a continuation or choices
SCORED_KINDS = ("continuation", "choices", "text")  # fields of rows that are scored
PANDAS_ROWS = 'df.to_json("rows.jsonl", orient="records", lines=True)'
_PLACE = re.compile(r"^((line|row) \d+( \(line \d+\))?: )+")


@dataclass(frozen=True)
class Row:
    """One input row."""

    index: int  # number of the row, from 0; blank lines do not count
    # Line of the file on which the row starts, from 1 (in a Parquet or Arrow file: the row's number); 0 if the row is
    # not from a file.
    line: int
    # All fields of the row, kept for the output; empty if the line could not be read.
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why this row cannot be run, beginning with its line; None if no error is known
    # Fields to run, named as in a plain JSONL row: prompt, messages or prompt_token_ids, and sampling fields. Default:
    # `fields`.
    request: dict[str, Any] = field(default_factory=dict)
    custom_id: str | None = None  # id of an OpenAI batch line, "" if the line has no usable one; None for other rows
    # Run a prompt that is text as a user's message, through the model's chat template. Messages and token ids are run
    # as they are.
    chat: bool = False
    scored: bool = False  # score the row, unless it has a prompt

    def __post_init__(self) -> None:
        if not self.request:
            object.__setattr__(self, "request", self.fields)

    @property
    def is_batch(self) -> bool:
        """Return whether the result is written as an OpenAI batch line."""
        return self.custom_id is not None

    @property
    def is_scored(self) -> bool:
        """Return whether the row is scored, not run. A row without a prompt, in a job that scores, is scored."""
        return self.scored and all(self.request.get(kind) is None for kind in PROMPT_KINDS)

    @property
    def prompt(self) -> Any:
        """Return the row's prompt as it was given: text, messages or token ids; the context of a row that is scored.
        Return None if it has none."""
        kinds = (CONTEXT,) if self.is_scored else PROMPT_KINDS
        return next((self.request[kind] for kind in kinds if self.request.get(kind) is not None), None)

    @property
    def place(self) -> str:
        """Return the row's line, or its number if it has no line. Every error of the row begins with this text."""
        return f"line {self.line}" if self.line else f"prompt {self.index}"

    def refused(self, reason: str) -> "Row":
        """Return this row with an error."""
        return replace(self, error=f"{self.place}: {reason}")


def row_of(prompt: object, index: int) -> Row:
    """Return the row of a prompt given in Python: a string, a mapping with the fields of a JSONL row, or a row."""
    if isinstance(prompt, Row):
        return prompt
    prompt = one_of(prompt)
    if isinstance(prompt, str):
        return Row(index, 0, {"prompt": prompt})
    if isinstance(prompt, Mapping):  # pandas has NaN for no value
        cells = {name: unwrapped(value) for name, value in prompt.items()}
        cells |= {k: None for k in (*PROMPT_KINDS, CONTEXT, *SCORED_KINDS) if is_missing(cells.get(k))}
        return Row(index, 0, {k: v for k, v in cells.items() if not is_missing(v)})
    must = "it must be a string or an object with the fields of a row, such as prompt_token_ids"
    return Row(index, 0).refused(f"is {json_kind(whole(prompt))}; {must}")


def one_of(value: Any) -> Any:
    """Return a prompt or a row that pandas, pyarrow or numpy hold: a Series as a dict, a scalar as Python's; others as
    they are."""
    if is_series(value):
        return value.to_dict()
    return unwrapped(value) if hasattr(value, "as_py") or getattr(value, "ndim", None) == 0 else value


def is_series(value: Any) -> bool:
    """Return whether a value is a Series of pandas, which may be a column of a table or a row of it."""
    return type(value).__name__ == "Series" and hasattr(value, "to_dict")


def without_place(error: str) -> str:
    """Return a row's error without the line and the number of the row at its beginning, as in "line 3: ..." and
    "row 2 (line 3): ..."."""
    return _PLACE.sub("", error)


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
    own_seed: bool = False  # whether the seed is a field of the row, whose place then does not matter

    @property
    def noise_row(self) -> int:
        """Return the row's number in sampling noise."""
        return 0 if self.own_seed else self.index

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
    row: Row,
    tokenizer: Any,
    context_length: int,
    defaults: SamplingParams,
    vocab_size: int | None = None,
    now: datetime | None = None,
    most: int | None = None,
) -> Request | Row:
    """Return the request of a row, or the row with an error if it cannot be run.

    Args:
        tokenizer: None if the checkpoint has none; only prompt_token_ids are allowed then.
        context_length: most tokens of prompt and continuation together.
        defaults: sampling parameters of fields that the row does not have.
        vocab_size: token ids must be smaller; None takes the tokenizer's.
        now: local time that chat templates read; None is the time of the call.
        most: most characters of a text; None is MOST_CHARACTERS.
    """
    if row.error is not None:
        return row
    tokenizer = None if tokenizer is None else BoundedTokenizer(tokenizer, context_length, most)
    request = row.request
    try:
        check_format(request)
        sampling = own_sampling(request, defaults)
        if not FOREIGN.isdisjoint(request):
            from flexengine.job.foreign_values import check_foreign  # few rows have such a field

            check_foreign(request, sampling, is_chat(request, row.chat), not row.is_batch)
        known = len(tokenizer) if vocab_size is None and tokenizer else vocab_size
        ids = _prompt_ids(request, tokenizer, known, row.chat, sampling.template_options, now or datetime.now())
        if foreign := [t for t in sampling.stop_token_ids if vocab_size is not None and t >= vocab_size]:
            raise InvalidInput(f"stop_token_ids holds {foreign[0]}; token ids lie in [0, {vocab_size})")
        total = len(ids) + sampling.max_tokens
        if total > context_length:
            limit = f"context of {context_length}, which follows from its config.json"
            size = f"prompt of {len(ids)} tokens + max_tokens {sampling.max_tokens} = {total} tokens"
            raise InvalidInput(f"{size}, more than the model's {limit}; shorten the prompt or lower max_tokens")
        check_known(ids, tokenizer, vocab_size)
    except InvalidInput as error:
        return row.refused(str(error))
    own_seed = request.get("seed") is not None
    return Request(row.index, ids, sampling, row.line, prompt=row.prompt, own_seed=own_seed)


def is_chat(request: Mapping[str, Any], as_message: bool) -> bool:
    """Return whether a request's prompt goes through a chat template. as_message: text does, as a user's message."""
    prompt = request.get("prompt")
    listed = isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)
    return listed or request.get("messages") is not None or (as_message and isinstance(prompt, str))


def _prompt_ids(
    request: Mapping[str, Any],
    tokenizer: Any,
    vocab_size: int | None,
    as_message: bool,
    options: Mapping[str, Any],
    now: datetime,
) -> tuple[int, ...]:
    """Return the token ids of a request's prompt. as_message: run text as a user's message. options, now: as for
    `chat_token_ids`."""
    present = [kind for kind in PROMPT_KINDS if request.get(kind) is not None]
    if nulls := [kind for kind in PROMPT_KINDS if kind in request and not present]:
        raise InvalidInput(f"{nulls[0]} is null or NaN, so missing; give a text, messages or token ids")
    if len(present) != 1:
        fault = f"has {' and '.join(present) or 'none'} of {', '.join(PROMPT_KINDS)}; exactly one is needed"
        from flexengine.job.near_names import without_prompt  # few rows are refused

        raise InvalidInput(fault if present else f"{fault}{without_prompt(request, PROMPT_KINDS)}")
    kind, prompt = present[0], request[present[0]]
    if isinstance(prompt, str) and not VISIBLE.search(prompt):
        raise InvalidInput(f"{kind} is {blankness(prompt)}; give a text")
    if is_chat(request, as_message):
        asked = [{"role": "user", "content": prompt}] if kind == "prompt" and isinstance(prompt, str) else prompt
        return _chat_ids(kind, asked, request, tokenizer, options, now)
    listed = isinstance(prompt, list | tuple) and bool(prompt)
    for name, default in CHAT_ONLY.items():
        if request.get(name) not in (None, default, {}):
            fault = f"{name} needs messages, as it is for a chat template; {kind} has none"
            raise InvalidInput(f"{fault}: send messages, as --chat (engine.chat in Python) does")
    if request.get(TOOLS) and json_kind(request[TOOLS]) == "an array":
        raise InvalidInput(f"tools needs messages, as a chat template writes them; {kind} has none: send messages")
    if kind == "prompt_token_ids" or (listed and all(type(whole(each)) is int for each in prompt)):
        return checked_ids(kind, prompt, vocab_size)
    if not isinstance(prompt, str):
        others = ", an array of messages (objects with role and content) or an array of token ids" if listed else ""
        texts = listed and all(isinstance(each, str) for each in prompt)
        others += "; give each text its own row" * texts
        raise InvalidInput(f"prompt is {json_kind(prompt)}; it must be a string{others}")
    check_text(kind, prompt)
    return _text_ids(kind, tokenizer, lambda: tokenizer(prompt, verbose=False))


def _chat_ids(
    kind: str, given: Any, request: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], now: datetime
) -> tuple[int, ...]:
    """Return the token ids of messages, with the request's tools. kind: field that the messages are from. options, now:
    as for `job.chats.chat_token_ids`."""
    from flexengine.job.chats import chat_token_ids, check_chat, row_messages, tools_of  # jobs without chats do without

    messages, tools = row_messages(given), tools_of(request)
    check_chat(kind, messages, tools)
    return _text_ids(kind, tokenizer, lambda: chat_token_ids(tokenizer, messages, tools, now, options))


def tokenized(kind: str, tokenizer: Any, tokenize: Callable[[], Any], instead: str = "prompt_token_ids") -> Any:
    """Return what `tokenize` returns for a field. Raise InvalidInput if there is no tokenizer or it raises an error.
    kind: name of the field. instead: what to send if there is no tokenizer."""
    if tokenizer is None:
        raise InvalidInput(f"the checkpoint has no tokenizer, so {kind} cannot be used; send {instead}")
    with library_faults(f"{kind} cannot be tokenised"):
        return tokenize()


def _text_ids(kind: str, tokenizer: Any, tokenize: Callable[[], Any]) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raise InvalidInput if there are none or they cannot be computed."""

    def converted() -> tuple[int, ...]:
        found = tokenize()
        return tuple(int(i) for i in (found["input_ids"] if isinstance(found, Mapping) else found))

    ids: tuple[int, ...] = tokenized(kind, tokenizer, converted)
    if not ids:
        raise InvalidInput(f"{kind} is empty after tokenisation")
    return ids


def checked_ids(kind: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Return token ids as a tuple. Raise InvalidInput, with the field's name `kind`, if these are no token ids."""
    value = whole(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidInput(f"{kind} is {shown(value)}; it must be an array of token ids that is not empty")
    top = math.inf if vocab_size is None else vocab_size
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidInput(f"{kind} holds {shown(token)}; token ids are whole numbers")
        if not 0 <= token < top:
            raise InvalidInput(f"{kind} holds {token}; token ids lie in [0, {top})")
    return tuple(value)
