"""Pieces of prompts of models with states, whose modules compute prompts in chunks of tokens."""

from dataclasses import replace
from typing import Any

from flexengine.schedule.batches import Piece, split_prompt


def split_on_grid(grain: int, *args: Any) -> list[Piece]:
    """Return the pieces of `split_prompt(*args)`, which begin at multiples of a grain, as do the first token and the
    budget. None but a whole prompt has a single token: the last two pieces share then. The budget is two grains or
    more."""
    pieces = split_prompt(*args)
    if len(pieces) < 2 or pieces[-1].count > 1:
        return pieces
    *others, before, last = pieces
    scored = min(grain, before.scored)  # of the tokens that change over
    return [
        *others,
        replace(before, count=before.count - grain, scored=before.scored - scored),
        replace(last, start=last.start - grain, count=last.count + grain, scored=last.scored + scored),
    ]
