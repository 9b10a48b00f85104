"""The order in which rows enter, and the prefixes that they share.

Requests are read in windows of WINDOW_TOKENS. In a window, requests with a common prefix are put one after the other,
so that the prefix is computed once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexengine.job.prompts import Request
from flexengine.job.rows import Row
from flexengine.schedule.prefixes import Stem, Tokens, order_of, stems_of

WINDOW_TOKENS = 1 << 19  # of prompts; about 20 MB in RAM
MAX_BAD = 1000  # rows with an error that are held at once


class Arranged(NamedTuple):
    """A request and the longest stem of each of its sequences."""

    request: Request
    stems: list[Stem | None]


def prefixes_of(request: Request) -> list[Tokens]:
    """Return the tokens that each of a request's sequences can share. The first token whose logits a sequence needs is
    its own."""
    if request.choices:
        return [target.context[:-1] for target in request.targets]
    return [request.prompt_ids[:-1]] * request.sampling.n


def arrange(requests: Sequence[Request], shares: bool) -> list[Arranged]:
    """Return the requests in the order in which they enter, with their stems. shares: whether there may be stems."""
    if not shares:
        return [Arranged(request, [None] * len(request.sizes)) for request in requests]
    prefixes = [prefixes_of(request) for request in requests]
    order = order_of([own[0] for own in prefixes])
    stems = iter(stems_of([prefix for i in order for prefix in prefixes[i]]))
    return [Arranged(requests[i], [next(stems) for _ in prefixes[i]]) for i in order]


class Arrangement:
    """The rows of a job, read from a feed one window at a time.

    Attributes:
        shares: whether sequences share common prefixes.
        feed: requests, and rows with an error. Rows that are not read yet remain in the iterator.
    """

    def __init__(self, feed: Iterator[Request | Row], shares: bool) -> None:
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
