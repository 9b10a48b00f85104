"""Tokens and sampling state of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexengine.config import SamplingParams
from flexengine.model.sample import Sampled
from flexengine.model.stop import Stops


@dataclass
class SequenceText:
    """Tokens and sampling state of a sequence.

    Attributes:
        row: number of the input row.
        sample: number of the row's sample.
        prompt: token ids.
        sampling: sampling parameters.
        stops: checks whether the sequence ends.
        targets: tokens to score. Target i follows prompt token len(prompt) - len(targets) + i. No token is sampled.
        generated: tokens generated so far.
        logprobs: one entry per generated token, if requested.
        scores: the scored targets.
        ended: reason of an end before the token limit; None if there is none.
        error: reason why the sequence has no result; None if there is none.
    """

    row: int
    sample: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: Stops
    targets: tuple[int, ...] = ()
    generated: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Sampled] = field(default_factory=list)
    ended: str | None = None
    error: str | None = None

    def tokens(self, start: int, count: int) -> Sequence[int]:
        """Return `count` tokens from `start` on. They must be all in the prompt, or all generated."""
        length = len(self.prompt)
        return self.prompt[start : start + count] if start < length else self.generated[start - length :][:count]

    def scored(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return (index, target) of the tokens that predict a target, among `count` tokens from `start` on."""
        first = len(self.prompt) - len(self.targets)
        return [(p - start, self.targets[p - first]) for p in range(max(start, first), start + count)]
