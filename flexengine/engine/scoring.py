"""Rows that are scored: log probabilities of given continuations or texts.

A row to score has one of

    context, continuation    the log probability of the continuation after the context
    context, choices         the same for each of several continuations
    text                     the log probability of the whole text (rolling log likelihood)

as text or token ids. Other rows generate.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, is_missing, json_kind, shown
from flexengine.job.bounds import BoundedTokenizer, check_known, check_text
from flexengine.job.foreign import whole
from flexengine.job.near_names import renamed
from flexengine.job.python_arguments import argument
from flexengine.job.rows import (
    PROMPT_KINDS,
    SCORED_KINDS,
    Request,
    Row,
    Target,
    checked_ids,
    tokenized,
    without_place,
)
from flexengine.model.tokenizer import opening, token_ids
from flexengine.records import as_list, plain

MAX_CHOICES = 1000


def encode_scored(
    row: Row, tokenizer: Any, context: int, defaults: SamplingParams, vocabulary: int, most: int | None = None
) -> Request | Row:
    """Return the request of a row that is scored, or the row with an error.

    Args:
        row: `is_scored` holds for it.
        tokenizer: None if the checkpoint has none; only token ids are allowed then.
        context: most tokens that the model computes in one sequence.
        defaults: `logprobs` says whether the result has those of each token, unless the row has a field of this name.
        vocabulary: token ids must be smaller.
        most: most characters of a text that are tokenized at once; None is MOST_CHARACTERS.
    """
    try:
        choices = _Reading(tokenizer, context, vocabulary, most).choices(row.request)
        own = row.request.get("logprobs")
        own = defaults.logprobs if own is None or isinstance(own, list) else own  # a list is of an earlier job
        sampling = SamplingParams(1, logprobs=whole(own), ignore_eos=True)
    except InvalidInput as error:
        return row.refused(str(error))
    return Request(row.index, choices[0][0].context, sampling, row.line, choices=choices, prompt=row.prompt)


class _Reading:
    """Conversion of a row's fields to targets, for one model."""

    def __init__(self, tokenizer: Any, context: int, vocabulary: int, most: int | None) -> None:
        self.tokenizer, self.context, self.vocabulary, self.most = tokenizer, context, vocabulary, most

    def choices(self, request: Mapping[str, Any]) -> tuple[tuple[Target, ...], ...]:
        """Return the targets of a row by choice. Raise InvalidInput for fields that cannot be scored."""
        kind = _kind_of(request)
        if kind == "text":
            return (tuple(self.windows(request["text"])),)
        context = request.get("context")
        context = "" if context is None else context
        if kind == "continuation":
            return ((self.target(context, request[kind], "continuation"),),)
        given = request[kind]
        if isinstance(given, str) or not isinstance(given, Sequence) or not given or len(given) > MAX_CHOICES:
            raise InvalidInput(f"choices is {shown(given)}; it must be an array of 1 to {MAX_CHOICES} continuations")
        return tuple((self.target(context, each, f"choices[{i}]"),) for i, each in enumerate(given))

    def target(self, context: Any, continuation: Any, name: str) -> Target:
        """Return the target of a pair. name: of the continuation, for messages."""
        if continuation == "":
            raise InvalidInput(f"{name} is empty; give a text of at least one character")
        if isinstance(context, str) and isinstance(continuation, str):
            check_text("context", context)
            check_text(name, continuation)
            bounded = None if self.tokenizer is None else BoundedTokenizer(self.tokenizer, self.context + 1, self.most)
            pair = partial(split, bounded, context, continuation)
            begin, rest = tokenized(name, self.tokenizer, pair, "token ids")
        elif isinstance(continuation, str) or (isinstance(context, str) and context):
            raise InvalidInput(f"context is {shown(context)} and {name} is {shown(continuation)}; give both as text, or"
                               " both as token ids")  # fmt: skip
        else:
            begin = checked_ids("context", context, self.vocabulary) if context else tuple(first_token(self.tokenizer))
            rest = checked_ids(name, continuation, self.vocabulary)
        size = f"context and {name} have {len(begin)} + {len(rest)} tokens"
        if continuation and not rest:
            raise InvalidInput(f"{name} is {shown(continuation)}, which has no token of its own: the tokenizer joins it"
                               " with the end of the context, or takes it for the token that begins a sequence; move"
                               " the last word of the context to it")  # fmt: skip
        if not begin or not rest:
            raise InvalidInput(f"{size}; each must have at least one")
        if len(begin) + len(rest) - 1 > self.context:
            raise InvalidInput(f"{size}; the model's context is {self.context} tokens, so shorten them")
        check_known([*begin, *rest], self.tokenizer, self.vocabulary)
        return Target(tuple(begin), tuple(rest))

    def windows(self, text: Any) -> list[Target]:
        """Return the targets of a whole text. Each token is predicted once.

        A text that is longer than the model's context is cut. As in lm-evaluation-harness, the first part follows the
        token that begins a sequence, and each later part as many tokens of the text as the model's context can hold
        beside the part, at least one.
        """
        if isinstance(text, str):
            check_text("text", text)
            unlimited = sys.maxsize  # tokens
            bounded = None if self.tokenizer is None else BoundedTokenizer(self.tokenizer, unlimited, self.most)
            encode = partial(token_ids, bounded, text, special=False)
            ids = tokenized("text", self.tokenizer, encode, "token ids")
        else:
            ids = checked_ids("text", text, self.vocabulary)
        if not ids:
            raise InvalidInput("text is empty after tokenisation; it must have at least one token")
        first, most = first_token(self.tokenizer), self.context
        check_known([*first, *ids], self.tokenizer, self.vocabulary)
        targets, done = [Target(tuple(first), tuple(ids[:most]))], min(most, len(ids))
        while done < len(ids):
            end = min(done + most, len(ids))
            targets.append(Target(tuple(ids[end - most - 1 : done]), tuple(ids[done:end])))
            done = end
        return targets


def _kind_of(request: Mapping[str, Any]) -> str:
    """Return which of SCORED_KINDS a row has. Raise InvalidInput if it has several, or fields of another kind."""
    present = [kind for kind in SCORED_KINDS if request.get(kind) is not None]
    if not present and (nulls := [kind for kind in SCORED_KINDS if kind in request]):
        raise InvalidInput(f"{' and '.join(nulls)} {'is' if len(nulls) == 1 else 'are'} null or empty; give a text")
    if not present:
        hint = renamed((*SCORED_KINDS, *PROMPT_KINDS), request)
        given = f"its fields are {shown(list(request))}{hint and f'; {hint}'}"
        fault = f"has none of {', '.join(SCORED_KINDS)} to score, and none of {', '.join(PROMPT_KINDS)} to run"
        raise InvalidInput(f"{fault} ({given})")
    if len(present) > 1:
        raise InvalidInput(f"has {' and '.join(present)}; exactly one of {', '.join(SCORED_KINDS)} is needed")
    if present == ["text"] and request.get("context") is not None:
        raise InvalidInput("has context and text; a context needs a continuation or choices, and text has no context")
    if present != ["text"] and request.get("context") is None:
        hint = renamed(["context"], () if "context" in request else request)
        fault = f"has {present[0]}, but no context (its fields are {shown(list(request))}{hint and f'; {hint}'})"
        raise InvalidInput(f'{fault}; give one: in JSON "" is the beginning of a text')
    return present[0]


def split(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, as `TemplateLM` of lm-evaluation-harness does.

    White space at the end of the context is moved to the continuation, as most tokenizers join it with the next word.
    The continuation's tokens are those of the whole text after as many tokens as the context has alone. An empty
    context is the beginning-of-sequence token, or the end-of-sequence token if there is none. A context that begins
    with the tokens that the tokenizer puts before a text gets no further ones.
    """
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    if not context:
        begin, rest = first_token(tokenizer), token_ids(tokenizer, continuation, special=False)
        return (begin, rest) if rest[:1] != begin else (begin, rest[1:])
    alone, whole = (token_ids(tokenizer, text, special=False) for text in (context, context + continuation))
    begin = opening(tokenizer)
    return (alone if begin and alone[: len(begin)] == begin else begin + alone), whole[len(alone) :]


def first_token(tokenizer: Any) -> list[int]:
    """Return the token that stands for an empty context. Raise InvalidInput if the tokenizer has none."""
    names = ("bos_token_id", "eos_token_id")
    first = next((token for name in names if (token := getattr(tokenizer, name, None)) is not None), None)
    if first is None:
        raise InvalidInput("the context is empty, and the model has no token that begins or ends a sequence; give a"
                           " context of at least one token")  # fmt: skip
    return [first]


def rows_of(context: object, continuation: object) -> tuple[list[Row], bool]:
    """Return a row to score per pair, and whether there is one pair that was not given as a list. Raise InvalidInput if
    an argument is neither text nor token ids nor a list, the lists have different lengths, or a single context and its
    continuation are of different kinds. A row of a list has an error instead.

    Args:
        context: text or token ids, or a list of either.
        continuation: text or token ids, or a list of either. One context is paired with each of them.
    """
    context, continuation = (
        plain(as_list(argument(name, value))) for name, value in (("context", context), ("continuation", continuation))
    )
    if _is_one(continuation):
        if not (_is_one(context) or context == []):
            fault = f"context is {shown(context)} beside one continuation"
            raise InvalidInput(f"{fault}; it must be text or token ids, or continuation must be a list, too")
        row = _row(0, context, continuation)
        if row.error is not None:
            raise InvalidInput(without_place(row.error))
        return [row], True
    if not isinstance(continuation, Sequence):
        raise InvalidInput(f"continuation is {shown(continuation)}; it must be text or token ids, or a list of these")
    contexts: Any = [context] * len(continuation) if _is_one(context) else context
    if not isinstance(contexts, Sequence):
        raise InvalidInput(f"context is {shown(context)}; it must be text or token ids, or a list of these")
    if len(contexts) != len(continuation):
        fault = f"context has {len(contexts)} entries, but continuation has {len(continuation)}"
        raise InvalidInput(f"{fault}; give one context for each continuation, or one for all")
    return [_row(i, *pair) for i, pair in enumerate(zip(contexts, continuation, strict=True))], False


def _is_one(value: object) -> bool:
    """Return whether a value is text or at least one token id, not a list of these."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return isinstance(value, str)
    return bool(value) and all(isinstance(whole(v), int) for v in value)


def _row(index: int, context: Any, continuation: Any) -> Row:
    row = Row(index, 0, {"context": context, "continuation": continuation}, scored=True)
    for name, value in (("context", context), ("continuation", continuation)):
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            kind = json_kind(value) if is_missing(value) else shown(value)
            return row.refused(f"{name} is {kind}; it must be text or a list of token ids")
    if isinstance(context, str) != isinstance(continuation, str):
        fault = f"context is {shown(context)} and continuation is {shown(continuation)}"
        return row.refused(f"{fault}; give both as text, or both as token ids")
    return row
