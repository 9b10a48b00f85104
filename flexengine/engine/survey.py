"""Conversion of prompts to requests, their order, and the survey: a count of all rows by size, before a job is planned.

Requests are read in windows of WINDOW_TOKENS. In a window, requests with a common prefix are put one after the other,
so that the prefix is computed once.
"""

import logging
import pickle
import re
import tempfile
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from datetime import datetime
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from flexengine.activity import activity, message
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, listed
from flexengine.job.bounds import most_characters
from flexengine.job.row_fields import MOST_NAMES, meant_field, misspelt
from flexengine.job.rows import Request, Row, encode, is_chat, row_of
from flexengine.model.skeleton import Skeleton
from flexengine.model.tokenizer import check_edits
from flexengine.plan.formatting import count
from flexengine.plan.workload import Size, Workload
from flexengine.schedule.prefixes import Stem, order_of, stems_above, stems_of
from flexengine.words import command_words

Params = SamplingParams | Sequence[SamplingParams]  # of all prompts, or of each prompt
MEMORY_BYTES = 16 << 20  # of encoded prompts; more is written to a file without a name
_ENDLESS = 1 << 40  # context in tokens of a model whose config has no limit
WINDOW_TOKENS = 1 << 19  # of prompts; about 20 MB in RAM
MAX_BAD = 1000  # rows with an error that are held at once


class Refused:
    """Counts the rows that cannot be run, and holds the error of the first one."""

    count, first = 0, ""

    def __str__(self) -> str:
        left = "is" if self.count == 1 else "are"
        return f"{count(self.count, 'row', 'rows')} cannot be run and {left} left out; the first: {self.first}"

    def note(self, row: Row) -> None:
        """Count a row that cannot be run."""
        self.count, self.first = self.count + 1, self.first or row.error or ""

    def report(self, workload: Workload, name: str) -> None:
        """Report the number of rows that cannot be run, if any, as a message. name: the input file, for the message.
        Raise InvalidInput if the file has no row that can be run."""
        if not workload.count:
            raise InvalidInput(f"{name} has no row that can be run; {self}")
        if self.count:
            message(str(self))


class RequestSpool:
    """The encoded prompts of a job, in a temporary file from the survey to the run, so that each is tokenized once.
    Prompts as they were given are left out. defaults: sampling parameters that most requests have, and then share."""

    def __init__(self, defaults: SamplingParams) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - it lives as long as this object
        self._defaults, self._count = defaults, 0
        self.complete = True  # False once the file could not be written

    def add(self, item: Request | Row) -> None:
        """Add an item. If the disk is full, or an item cannot be written, drop all items."""
        if not self.complete:
            return
        try:
            pickle.dump(self._packed(item), self._file, pickle.HIGHEST_PROTOCOL)
            self._count += 1
        # Parameters may be of a class of the user.
        except (OSError, pickle.PicklingError, RecursionError, TypeError, AttributeError):
            self.complete = False
            self._file.close()

    def _packed(self, item: Request | Row) -> Any:
        if isinstance(item, Row):
            return Row(item.index, item.line, error=item.error)
        sampling = None if item.sampling == self._defaults else item.sampling
        return item.index, item.line, array("i", item.prompt_ids), sampling, item.choices, item.own_seed

    def items(self, prompts: Iterable[Any] | None) -> Iterator[Request | Row]:
        """Yield all items in order, once. Then, or if the generator is closed, free the memory or file. prompts: those
        from which the items were made; None leaves them out."""
        with self._file as file:
            file.seek(0)
            stored = (self._unpacked(pickle.load(file)) for _ in range(self._count))
            if prompts is None:
                yield from stored
                return
            for number, (prompt, item) in enumerate(zip(prompts, stored, strict=True)):
                row = row_of(prompt, number)
                yield replace(item, prompt=row.prompt) if isinstance(item, Request) else replace(row, error=item.error)

    def _unpacked(self, stored: Any) -> Request | Row:
        if isinstance(stored, Row):
            return stored
        index, line, ids, sampling, choices, own_seed = stored
        return Request(index, tuple(ids), sampling or self._defaults, line, choices, own_seed=own_seed)


class Arranged(NamedTuple):
    """A request and the longest stem of each of its sequences."""

    request: Request
    stems: list[Stem | None]


def arrange(requests: Sequence[Request], shares: int) -> list[Arranged]:
    """Return the requests in the order in which they enter, with their stems. shares: as `Core.shares`."""
    if not shares:
        return [Arranged(request, [None] * len(request.sizes)) for request in requests]

    def shared(ids: tuple[int, ...]) -> tuple[int, ...]:
        # The first token whose logits a sequence needs is its own, so it is not shared. If stems have a grain, another
        # one is not, either (`schedule.grain`).
        return ids[: max(0, len(ids) - 1 - (shares > 1)) // shares * shares]

    wholes = [
        [target.context for target in each.targets] if each.choices else [each.prompt_ids] * each.sampling.n
        for each in requests
    ]
    prefixes = [[shared(ids) for ids in own] for own in wholes]
    order = order_of([own[0] for own in prefixes], shares)
    stems = iter(stems_of([prefix for i in order for prefix in prefixes[i]], shares))
    return [Arranged(requests[i], [next(stems) for _ in prefixes[i]]) for i in order]


class Arrangement:
    """The rows of a job, read from a feed one window at a time. Rows that are not read yet remain in the iterator.
    shares: as `Core.shares`."""

    def __init__(self, feed: Iterator[Request | Row], shares: int) -> None:
        self.feed, self.shares = feed, shares
        self.bad: deque[Row] = deque()  # rows with an error that are read
        self.ready: deque[Arranged] = deque()  # requests that are read, in the order in which they enter
        self.ended = False

    def read(self) -> None:
        """Read the next window, unless requests are ready, or rows with an error wait to be reported."""
        requests, tokens = list[Request](), 0
        while not (self.ready or self.ended) and tokens < WINDOW_TOKENS and len(self.bad) < MAX_BAD:
            item = next(self.feed, None)
            if item is None:
                self.ended = True
            elif isinstance(item, Row):
                self.bad.append(item)
            else:
                requests.append(item)
                tokens += sum(prompt for prompt, _ in item.sizes)
        self.ready.extend(arrange(requests, self.shares))


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
    """Converts prompts to requests for one model. Chat templates read the local time `now`, when the job began; None is
    the time of each conversion."""

    def __init__(
        self, tokenizer: Any, skeleton: Skeleton, shares: int, memory: int | None = None, eos: set[int] | None = None
    ) -> None:
        """Convert prompts for the model of `skeleton`.

        Args:
            tokenizer: None if the checkpoint has none.
            shares: as `Core.shares`.
            memory: bytes of RAM that were given, the most that tokenizing a text may take; None is a constant limit.
            eos: the model's end tokens; None if it generates nothing.
        """
        self.most = most_characters(memory)
        self.tokenizer, self.context = tokenizer, skeleton.context_length or _ENDLESS
        self.now: datetime | None = None
        self.shares, self.vocabulary = shares, skeleton.head[1][0]
        self._checked: Any = None  # texts of the last row that were looked up: most jobs have the same for all rows
        self._unused = set[str]()  # variables of chat templates that were reported as unused
        self._doubled = False  # whether a message has named a doubled first token
        self._eos = eos  # None after the end of turns was looked at
        self._names = set[str]()  # of fields that were looked at, the first MOST_NAMES
        self.unscored = skeleton.head_module.step.fault  # why this model cannot score; None if it can

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidInput if sampling parameters of a whole job cannot be used with this model, as every row would
        be refused."""
        if unknown := next((token for token in params.stop_token_ids if token >= self.vocabulary), None):
            fault = f"stop_token_ids holds {unknown}, but the model has {self.vocabulary:,} tokens"
            raise InvalidInput(f"{fault}; give ids from 0 to {self.vocabulary - 1}")
        check_edits(params, self.tokenizer, self.vocabulary)

    def check_chat(self, chat: bool) -> None:
        """Raise InvalidInput if prompts are to be run as a user's messages and this model has no chat template for
        them, as every prompt would be refused. chat: whether they are."""
        if not chat:
            return
        from flexengine.job.chats import chat_fault  # jobs without chats do without

        if (reason := chat_fault(self.tokenizer)) is not None:
            fault = f"--chat (chat=True in Python) runs prompts as a user's messages, but {reason}"
            raise InvalidInput(f"{fault}; leave it out, or take an instruction-tuned model")

    def requests(self, prompts: Iterable[Any], params: Params) -> Iterator[Request | Row]:
        """Yield a request per prompt, in order, or a row with an error if the prompt cannot be run. Parameters of a row
        replace `params`."""
        for i, prompt in enumerate(prompts):
            row = row_of(prompt, i)
            if not isinstance(prompt, str | Row):  # fields of files were reported when they were opened
                self._report_misspelt(row)
            defaults = params if isinstance(params, SamplingParams) else params[i]
            scored = row.is_scored and row.error is None
            if scored and self.unscored:
                yield row.refused(f"cannot be scored with this model: {self.unscored}")
                continue
            score = "flexengine.engine.scoring:encode_scored"
            encoder = resolve_name(score) if scored else partial(encode, now=self.now)
            try:
                with command_words():  # errors of rows are those of the command; `Session.stream` changes them
                    item = encoder(row, self.tokenizer, self.context, defaults, self.vocabulary, most=self.most)
                if isinstance(item, Request):
                    edits = item.sampling.stop, item.sampling.bad_words, item.sampling.logit_bias
                    if edits != self._checked:
                        check_edits(item.sampling, self.tokenizer, self.vocabulary)
                        self._checked = edits
                    self._report_unused(item.sampling.chat_template_kwargs or {})
                    self._report_doubled(item)
                    if self._eos is not None and not scored and is_chat(row.request, row.chat):
                        self._report_unended(item.sampling, self._eos)
                yield item
            except InvalidInput as error:
                yield row.refused(str(error))
            except RecursionError:
                yield row.refused("a field is nested too deeply")

    def _report_misspelt(self, row: Row) -> None:
        """Report fields that are not read and resemble one that is, once each."""
        new = [name for name in row.fields if isinstance(name, str) and name not in self._names]
        del new[MOST_NAMES - len(self._names) :]
        self._names.update(new)
        if meant := {name: ours for name in new if (ours := meant_field(name, row.prompt is not None))}:
            message(misspelt(meant), logging.WARNING)

    def _report_unused(self, variables: Iterable[str]) -> None:
        """Report variables that no chat template of the model has, once each: transformers ignores them silently."""
        if new := [name for name in variables if name not in self._unused]:
            templates = str(getattr(self.tokenizer, "chat_template", None) or new)
            self._unused.update(new)
            if unused := [name for name in new if not re.search(rf"\b{re.escape(name)}\b", templates)]:
                text = f"the model's chat template does not use {listed(unused, last=', ')}, so it has no effect"
                message(text, logging.WARNING)

    def _report_doubled(self, request: Request) -> None:
        """Report, once, a text that begins with the token that the tokenizer puts before it."""
        first = getattr(self.tokenizer, "bos_token_id", None)
        text = isinstance(request.prompt, str) and not request.choices
        if self._doubled or not text or first is None or request.prompt_ids[:2] != (first, first):
            return
        self._doubled = True
        name = self.tokenizer.bos_token
        fault = f"prompts begin with {name!r}, which the tokenizer adds, too, so that it is there twice"
        message(f"{fault}: leave it out of the text, or send messages or prompt_token_ids", logging.WARNING)

    def _report_unended(self, sampling: SamplingParams, eos: Collection[int]) -> None:
        """Report, for the first conversation, that the chat template ends turns with a token that ends no text."""
        from flexengine.model.turn_ends import unended  # jobs without chats do without

        self._eos = None
        if text := "" if sampling.ignore_eos else unended(self.tokenizer, sampling, eos):
            message(text, logging.WARNING)

    def survey(
        self,
        prompts: Iterable[Any],
        params: Params,
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
                    # MAX_BAD rows may be held at once, so without their fields.
                    yield Row(item.index, item.line, error=item.error) if isinstance(item, Row) else item

            arrangement = Arrangement(counted(), self.shares)
            while not arrangement.ended:
                arrangement.read()
                tally.add(arrangement.ready)
                if refused is not None:
                    for row in arrangement.bad:
                        refused.note(row)
                arrangement.ready.clear()
                arrangement.bad.clear()
        return replace(tally.workload(), reading=getattr(prompts, "reading", 0))
