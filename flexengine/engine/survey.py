"""Prompts into requests, and a look at all of them beforehand: how many there are of each size."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.prompts import Request, encode
from flexengine.job.rows import Row, row_of
from flexengine.model.stop import check_stops
from flexengine.plan.words import count
from flexengine.plan.workload import Workload

_ENDLESS = 1 << 40  # tokens, for models that name no limit


class Refused:
    """Counts rows that cannot be run, and remembers why the first cannot."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        left = "is" if self.count == 1 else "are"
        return f"{count(self.count, 'row', 'rows')} cannot be run and {left} left out; the first: {self.first}"

    def note(self, row: Row) -> None:
        """Tells of such a row."""
        self.count, self.first = self.count + 1, self.first or row.error or ""

    def report(self, found: Workload, name: str, say: Callable[[str], None]) -> None:
        """Says how many there are, if any. Raises InvalidInput if file `name` has no other row."""
        if not found.count:
            raise InvalidInput(f"{name} has no row that can be run; {self if self else 'it is empty'}")
        if self:
            say(str(self))


def forced(
    rows: Iterable[tuple[Iterable[int], Iterable[int]]], context: int | None, vocabulary: int
) -> list[Request]:
    """Requests that take given continuations. rows: (prompt, continuation) in token ids. Raises InvalidInput, naming
    the row, if one of them is empty, holds an unknown token or is too long for the context."""
    made = []
    for i, (prompt, continuation) in enumerate(rows):
        begin, rest = tuple(prompt), tuple(continuation)
        unknown = sum(type(t) is not int or not 0 <= t < vocabulary for t in (*begin, *rest))
        size = f"row {i} has {len(begin)} + {len(rest)} tokens"
        if not begin or not rest or unknown:
            raise InvalidInput(f"{size}, {unknown} of them unknown; prompt and continuation need one each, all of them"
                               f" from 0 to {vocabulary - 1}")  # fmt: skip
        if context is not None and len(begin) + len(rest) > context:
            raise InvalidInput(f"{size}; the model's context is {context}")
        made.append(Request(i, begin, SamplingParams(len(rest), logprobs=1, ignore_eos=True), forced=rest))
    return made


class Reader:
    """Reads prompts as one model does. tokenizer: None if the checkpoint has none; context: most tokens of a sequence,
    None for any; vocabulary: how many tokens there are."""

    def __init__(self, tokenizer: Any, context: int | None, vocabulary: int) -> None:
        self.tokenizer, self.context, self.vocabulary = tokenizer, context or _ENDLESS, vocabulary

    def requests(self, prompts: Iterable[Any], params: SamplingParams) -> Iterator[Request | Row]:
        """The prompts in order; those that cannot be run as rows with an error. What is a request already stays."""
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Request):
                yield prompt
                continue
            row = prompt if isinstance(prompt, Row) else row_of(prompt, i)
            item = encode(row, self.tokenizer, self.context, params, self.vocabulary)
            try:
                if isinstance(item, Request):
                    check_stops(item.sampling, self.tokenizer)
                yield item
            except InvalidInput as error:
                yield row.refused(str(error))

    def survey(self, prompts: Iterable[Any], params: SamplingParams, refused: Refused | None = None) -> Workload:
        """The sizes of all sequences to come: what a plan is made from. refused: told of the other rows. Prompts are
        tokenised again when it is their turn, which costs little beside generating, so that no memory grows with their
        number."""
        sizes: Counter[tuple[int, int]] = Counter()
        for item in self.requests(prompts, params):
            if isinstance(item, Request):
                sizes[len(item.prompt_ids), item.sampling.max_tokens] += item.sampling.n
            elif refused is not None:
                refused.note(item)
        return Workload(sizes)
