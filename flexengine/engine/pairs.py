"""The arguments of `Engine.score` as rows that are scored."""

from collections.abc import Sequence
from typing import Any

from flexengine.config import shown
from flexengine.errors import InvalidInput
from flexengine.job.rows import Row

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
            raise InvalidInput(
                f"context is {shown(context)} beside one continuation; it must be text or token ids, or"
                " continuation must be a list, too"
            )
        return [_pair(context, continuation)], True
    if not isinstance(continuation, Sequence):
        raise InvalidInput(f"continuation is {shown(continuation)}; it must be text or token ids, or a list of these")
    contexts: Any = [context] * len(continuation) if _is_one(context) else context
    if not isinstance(contexts, Sequence):
        raise InvalidInput(f"context is {shown(context)}; it must be text or token ids, or a list of these")
    if len(contexts) != len(continuation):
        raise InvalidInput(
            f"context has {len(contexts)} entries, but continuation has {len(continuation)}; give one"
            " context for each continuation, or one for all"
        )
    return [_pair(one, other) for one, other in zip(contexts, continuation, strict=True)], False


def _is_one(value: object) -> bool:
    """Return whether a value is text or at least one token id, not a list of these."""
    return isinstance(value, str) or (isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], int))


def _pair(context: Any, continuation: Any) -> Pair:
    for name, value in (("context", context), ("continuation", continuation)):
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            raise InvalidInput(f"a {name} is {shown(value)}; it must be text or a list of token ids")
    if isinstance(context, str) != isinstance(continuation, str):
        raise InvalidInput(
            f"context is {shown(context)} and continuation is {shown(continuation)}; give both as text,"
            " or both as token ids"
        )
    return context, continuation


def rows_of(pairs: Sequence[Pair]) -> list[Row]:
    """Return a row to score per pair."""
    return [
        Row(i, 0, {"context": context, "continuation": continuation}, scored=True)
        for i, (context, continuation) in enumerate(pairs)
    ]
