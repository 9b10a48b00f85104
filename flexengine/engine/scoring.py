"""Conversion of contexts and continuations to requests that are scored (teacher forcing)."""

from collections.abc import Sequence
from typing import Any

from flexengine.config import SamplingParams, shown
from flexengine.engine.survey import Reader
from flexengine.errors import InvalidInput
from flexengine.job.prompts import Request, check_text
from flexengine.job.rows import Row
from flexengine.model.tokenizer import opening, token_ids

Pair = tuple[Any, Any]  # context and continuation, both text or both token ids


def pairs_of(context: object, continuation: object) -> tuple[list[Pair], bool]:
    """Return the pairs to score, and whether there is one pair that was not given as a list.

    Args:
        context: text or token ids, or a list of either.
        continuation: text or token ids, or a list of either. One context is paired with each of them.

    Raises:
        InvalidInput: an argument is neither text nor token ids nor a list of either, the lists have different lengths,
            or a context and its continuation are of different kinds.
    """
    if _is_one(continuation):
        if not (_is_one(context) or context == []):
            raise InvalidInput(f"context is {shown(context)} beside one continuation; it must be text or token ids, or"
                               " continuation must be a list, too")  # fmt: skip
        return [_pair(context, continuation)], True
    if not isinstance(continuation, Sequence):
        raise InvalidInput(f"continuation is {shown(continuation)}; it must be text or token ids, or a list of these")
    contexts: Any = [context] * len(continuation) if _is_one(context) else context
    if not isinstance(contexts, Sequence):
        raise InvalidInput(f"context is {shown(context)}; it must be text or token ids, or a list of these")
    if len(contexts) != len(continuation):
        raise InvalidInput(f"context has {len(contexts)} entries, but continuation has {len(continuation)}; give one"
                           " context for each continuation, or one for all")  # fmt: skip
    return [_pair(one, other) for one, other in zip(contexts, continuation, strict=True)], False


def _is_one(value: object) -> bool:
    """Return whether a value is text or at least one token id, not a list of these."""
    return isinstance(value, str) or (isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], int))


def _pair(context: Any, continuation: Any) -> Pair:
    for name, value in (("context", context), ("continuation", continuation)):
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            raise InvalidInput(f"a {name} is {shown(value)}; it must be text or a list of token ids")
    if isinstance(context, str) != isinstance(continuation, str):
        raise InvalidInput(f"context is {shown(context)} and continuation is {shown(continuation)}; give both as text,"
                           " or both as token ids")  # fmt: skip
    return context, continuation


def requests_of(pairs: Sequence[Pair], reader: Reader) -> list[Request | Row]:
    """Return a request per pair, or a row with an error for a pair that cannot be scored.

    Args:
        reader: has the tokenizer and the limits of the model.
    """
    return [_request(index, pair, reader) for index, pair in enumerate(pairs)]


def _request(index: int, pair: Pair, reader: Reader) -> Request | Row:
    try:
        begin, rest = _ids(pair, reader.tokenizer)
        unknown = sum(type(t) is not int or not 0 <= t < reader.vocabulary for t in (*begin, *rest))
        size = f"has {len(begin)} + {len(rest)} tokens"
        if not begin or not rest or unknown:
            raise InvalidInput(f"{size}, {unknown} of them unknown; context and continuation must have at least one"
                               f" token each, all from 0 to {reader.vocabulary - 1}")  # fmt: skip
        if len(begin) + len(rest) > reader.context:
            raise InvalidInput(f"{size}; the model's context is {reader.context} tokens, so shorten the row")
    except InvalidInput as error:
        return Row(index, 0, {"prompt": pair[0]}).refused(str(error))
    sampling = SamplingParams(len(rest), logprobs=1, ignore_eos=True)
    return Request(index, begin, sampling, forced=rest, prompt=pair[0])


def _ids(pair: Pair, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    context, continuation = pair
    if not isinstance(context, str):
        return tuple(context or _first(tokenizer)), tuple(continuation)
    if tokenizer is None:
        raise InvalidInput("the checkpoint has no tokenizer, so text cannot be scored; give token ids")
    check_text("context", context)
    check_text("continuation", continuation)
    try:
        begin, rest = split(tokenizer, context, continuation)
    except InvalidInput:
        raise
    except Exception as error:  # a tokenizer may raise any error; only this row fails
        raise InvalidInput(f"context and continuation cannot be tokenised: {type(error).__name__}: {error}") from error
    return tuple(begin), tuple(rest)


def split(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, as `TemplateLM` of lm-evaluation-harness does.

    White space at the end of the context is moved to the continuation, as most tokenizers join it with the next word.
    The continuation's tokens are those of the whole text after as many tokens as the context has alone. An empty
    context is the beginning-of-sequence token, or the end-of-sequence token if there is none.
    """
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    if not context:
        begin, rest = _first(tokenizer), token_ids(tokenizer, continuation, special=False)
        return (begin, rest) if rest[:1] != begin else (begin, rest[1:])
    alone, whole = (token_ids(tokenizer, text, special=False) for text in (context, context + continuation))
    return opening(tokenizer) + alone, whole[len(alone) :]


def _first(tokenizer: Any) -> list[int]:
    """Return the token that stands for an empty context. Raise InvalidInput if the tokenizer has none."""
    names = ("bos_token_id", "eos_token_id")
    first = next((token for name in names if (token := getattr(tokenizer, name, None)) is not None), None)
    if first is None:
        raise InvalidInput("the context is empty, and the model has no token that begins or ends a sequence; give a"
                           " context of at least one token")  # fmt: skip
    return [first]
