"""Conversion of prompts to requests, and the survey: a count of all rows by size, before the job is planned."""

import pickle
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from flexengine.activity import activity, message
from flexengine.config import SamplingParams
from flexengine.engine.arrange import Arranged, Arrangement
from flexengine.errors import InvalidInput
from flexengine.job.chat import fault
from flexengine.job.prompts import Request, encode
from flexengine.job.rows import Row, row_of
from flexengine.model.stop import check_stops
from flexengine.plan.formatting import count
from flexengine.plan.workload import Size, Workload
from flexengine.schedule.prefixes import Stem, stems_above

MEMORY_BYTES = 16 << 20  # of encoded prompts; more is written to a file without a name
_ENDLESS = 1 << 40  # context in tokens of a model whose config has no limit


class Refused:
    """Counts the rows that cannot be run, and holds the error of the first one."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def __str__(self) -> str:
        left = "is" if self.count == 1 else "are"
        return f"{count(self.count, 'row', 'rows')} cannot be run and {left} left out; the first: {self.first}"

    def note(self, row: Row) -> None:
        """Count a row that cannot be run."""
        self.count, self.first = self.count + 1, self.first or row.error or ""

    def report(self, workload: Workload, name: str) -> None:
        """Report the number of rows that cannot be run, if any, as a message. name: the input file, for the message.

        Raises:
            InvalidInput: the file has no row that can be run.
        """
        if not workload.count:
            raise InvalidInput(f"{name} has no row that can be run; {self if self.count else 'it is empty'}")
        if self.count:
            message(str(self))


class RequestSpool:
    """The encoded prompts of a job, in a temporary file from the survey to the run, so that each is tokenized once.

    Requests, and rows with an error, are in the order in which they were added. Prompts as they were given are left
    out, but for rows with an error.

    Args:
        defaults: sampling parameters that most requests have.
    """

    def __init__(self, defaults: SamplingParams) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - it lives as long as this object
        self._defaults, self._count = defaults, 0
        self.complete = True  # False once the file could not be written

    def add(self, item: Request | Row) -> None:
        """Add an item. If the disk is full, drop all items."""
        if not self.complete:
            return
        try:
            pickle.dump(self._packed(item), self._file, pickle.HIGHEST_PROTOCOL)
            self._count += 1
        except (OSError, pickle.PicklingError, TypeError, AttributeError):  # a row's data may be of any type
            self.complete = False
            self._file.close()

    def _packed(self, item: Request | Row) -> Any:
        if isinstance(item, Row):
            return Row(item.index, item.line, error=item.error)
        sampling = None if item.sampling == self._defaults else item.sampling
        return item.index, item.line, array("i", item.prompt_ids), sampling, item.choices

    def items(self) -> Iterator[Request | Row]:
        """Yield all items, once. Then, or if the generator is closed, free the memory or the file."""
        with self._file as file:
            file.seek(0)
            for _ in range(self._count):
                item = pickle.load(file)
                if isinstance(item, Row):
                    yield item
                    continue
                index, line, ids, sampling, choices = item
                yield Request(index, tuple(ids), sampling or self._defaults, line, choices)


class Tally:
    """Counts the sequences of requests, and the tokens that they share."""

    def __init__(self) -> None:
        self.sizes: Counter[Size] = Counter()
        self.spared: dict[Size, float] = {}  # tokens, summed over the sequences of a size
        self.stems = self.longest = 0
        self.nested = 1
        self.scored: int | None = None

    def add(self, requests: Iterable[Arranged]) -> None:
        """Add the requests of one window."""
        stems = set[Stem]()
        for request, longest in requests:
            self.sizes.update(request.sizes)
            if request.choices:
                self.scored = (self.scored or 0) + sum(len(target.continuation) - 1 for target in request.targets)
            for size, stem in zip(request.sizes, longest, strict=True):
                above = stems_above(stem)
                self.nested = max(self.nested, len(above))
                stems.update(above)
                if above:
                    spared = sum((s.end - s.start) * (1 - 1 / s.sequences) for s in above)
                    self.spared[size] = self.spared.get(size, 0.0) + spared
        self.stems += len(stems)
        self.longest = max([self.longest, *(stem.end for stem in stems)])

    def workload(self) -> Workload:
        """Return the counts."""
        spared = {size: tokens / self.sizes[size] for size, tokens in self.spared.items()}
        return Workload(self.sizes, spared, self.stems, self.longest, self.nested, self.scored)


class PromptReader:
    """Converts prompts to requests for one model."""

    def __init__(self, tokenizer: Any, context: int | None, vocabulary: int) -> None:
        """Convert prompts with this tokenizer.

        Args:
            tokenizer: None if the checkpoint has none.
            context: most tokens of a sequence; None if there is no limit.
            vocabulary: number of tokens that the model has.
        """
        self.tokenizer, self.context, self.vocabulary = tokenizer, context or _ENDLESS, vocabulary
        self.shares = False  # whether sequences share common prefixes
        self.unscored: str | None = None  # why this model cannot score; None if it can

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidInput if sampling parameters of a whole job cannot be used with this model, as every row would
        be refused."""
        if unknown := next((token for token in params.stop_token_ids if token >= self.vocabulary), None):
            raise InvalidInput(
                f"stop_token_ids holds {unknown}, but the model has {self.vocabulary:,} tokens; give ids from 0 to"
                f" {self.vocabulary - 1}"
            )
        check_stops(params, self.tokenizer)

    def check_chat(self, chat: bool) -> None:
        """Raise InvalidInput if prompts are to be run as a user's messages and this model has no chat template for
        them, as every prompt would be refused. chat: whether they are."""
        if chat and (reason := fault(self.tokenizer)) is not None:
            raise InvalidInput(
                f"--chat (chat=True in Python) runs prompts as a user's messages, but {reason}; leave it out, or take"
                " an instruction-tuned model"
            )

    def requests(
        self, prompts: Iterable[Any], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[Request | Row]:
        """Yield a request per prompt, in order, or a row with an error if the prompt cannot be run. Requests among the
        prompts are yielded unchanged.

        Args:
            params: sampling parameters of all prompts, or of each prompt. Those of a row replace them.
        """
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Request):
                yield prompt
                continue
            row = _row(prompt, i)
            defaults = params if isinstance(params, SamplingParams) else params[i]
            scored = row.is_scored and row.error is None
            if scored and self.unscored:
                yield row.refused(f"cannot be scored with this model: {self.unscored}")
                continue
            encoder = resolve_name("flexengine.engine.scoring:encode_scored") if scored else encode
            item = encoder(row, self.tokenizer, self.context, defaults, self.vocabulary)
            try:
                if isinstance(item, Request):
                    check_stops(item.sampling, self.tokenizer)
                yield item
            except InvalidInput as error:
                yield row.refused(str(error))

    def replayed(
        self,
        spool: RequestSpool,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams],
        with_prompts: bool,
    ) -> Iterator[Request | Row]:
        """Yield what `requests` yields for these prompts, of which `survey` filled the spool.

        Args:
            with_prompts: whether the items have their prompts as they were given. If False, the prompts are iterated
                only if the spool is not complete.
        """
        if not spool.complete:
            yield from self.requests(prompts, params)
        elif not with_prompts:
            yield from spool.items()
        else:
            for i, (prompt, item) in enumerate(zip(prompts, spool.items(), strict=True)):
                if isinstance(prompt, Request):
                    yield prompt
                    continue
                row = _row(prompt, i)
                if isinstance(item, Request):
                    yield replace(item, prompt=row.prompt)
                else:
                    yield replace(row, error=item.error)

    def survey(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams],
        refused: Refused | None = None,
        spool: RequestSpool | None = None,
    ) -> Workload:
        """Return the number of sequences of each size, from which the job is planned.

        Args:
            refused: counts the rows that cannot be run; None if they need not be counted.
            spool: gets all requests, and rows with an error, in order; None to drop them.
        """
        for each in [params] if isinstance(params, SamplingParams) else params:
            self.check(each)
        tally = Tally()
        total = len(prompts) if isinstance(prompts, Sized) else None
        text = "tokenizing all prompts, as the plan depends on their lengths"
        with activity("tokenizing", text, total, "rows") as work:

            def counted() -> Iterator[Request | Row]:
                for item in self.requests(prompts, params):
                    work.advance()
                    if spool is not None:
                        spool.add(item)
                    yield item

            arrangement = Arrangement(counted(), self.shares)
            while not arrangement.ended:
                arrangement.read()
                tally.add(arrangement.ready)
                if refused is not None:
                    for row in arrangement.bad:
                        refused.note(row)
                arrangement.ready.clear()
                arrangement.bad.clear()
        return tally.workload()


def _row(prompt: object, index: int) -> Row:
    return prompt if isinstance(prompt, Row) else row_of(prompt, index)
