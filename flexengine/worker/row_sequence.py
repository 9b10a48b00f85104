"""A sequence from admission to its result."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.model.sample import NONFINITE, Sampled, logprob_entry
from flexengine.model.tokenizer import Stops
from flexengine.schedule.sweeps import Sequence


@dataclass(eq=False)
class RowSequence(Sequence):
    """A sequence of an input row. The schedule owns the counts that it inherits, the engine all else."""

    row: int = 0  # number of the input row
    sample: int = 0  # number of the row's sample
    noise_row: int = 0  # see Request
    prompt: tuple[int, ...] = ()  # token ids
    sampling: SamplingParams = field(default_factory=SamplingParams)  # sampling parameters
    stops: Stops | None = None  # checks whether the sequence ends; None in a process that ends no sequences
    # Tokens to score. Target i follows prompt token len(prompt) - len(targets) + i. No token is sampled.
    targets: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)  # tokens generated so far, or the scored targets
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # one entry per token of `token_ids`, if requested
    scores: list[Sampled] = field(default_factory=list)  # the scored targets
    ended: str | None = None  # reason of an end before the token limit; None if there is none
    error: str | None = None  # reason why the sequence has no result; None if there is none

    def tokens(self, start: int, count: int) -> abc.Sequence[int]:
        """Return `count` tokens from `start` on. They must be all in the prompt, or all generated."""
        length = len(self.prompt)
        return self.prompt[start : start + count] if start < length else self.token_ids[start - length :][:count]

    def predicting(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return (index, target) of the tokens that predict a target, among `count` tokens from `start` on."""
        first = len(self.prompt) - len(self.targets)
        return [(p - start, self.targets[p - first]) for p in range(max(start, first), start + count)]

    def append(self, sampled: Sampled, tokenizer: Any) -> bool:
        """Append a sampled token. Return whether it was the last one."""
        if sampled.token == NONFINITE:
            edited = self.sampling.bad_words or self.sampling.min_tokens
            forbidden = ", or bad_words and min_tokens forbid every token" if edited else ""
            self.error = f"its logits are not finite after {len(self.token_ids)} tokens{forbidden}"
            return True
        self.token_ids.append(sampled.token)
        assert self.stops is not None
        try:
            if sampled.logprob is not None:
                self.logprobs.append(logprob_entry(sampled, tokenizer))
            self.ended = self.stops.reason(self.token_ids)
        except InvalidInput as error:
            self.error = str(error)
            return True
        return self.ended is not None

    def score(self, scores: list[Sampled], tokenizer: Any) -> None:
        """Record the scored targets."""
        if any(each.token == NONFINITE for each in scores):
            self.error = "its logits are not finite"
            return
        self.scores, self.token_ids = scores, [each.token for each in scores]
        if self.sampling.logprobs is not None:
            try:
                self.logprobs = [logprob_entry(each, tokenizer) for each in scores]
            except InvalidInput as error:
                self.error = str(error)
