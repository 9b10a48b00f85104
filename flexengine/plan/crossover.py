"""The context lengths at which keeping the KV cache at attention workers beats keeping it near, by predicted seconds.

Both sides run the same number of rows with the same tokens to generate, with the plan's block. The near side has the
whole cache on the device, or on the host with and without delegation, whichever is predicted to be fastest. Each side
holds as many sequences as its memory has room for, so long contexts shrink the block of the near side first.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from flexengine.errors import OutOfMemory
from flexengine.places import DEVICE, HOST, workers_of
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.min_memory import planned
from flexengine.plan.prediction import Prediction
from flexengine.plan.workload import Workload
from flexengine.policy import REQUESTS, Policy

SHORTEST, LONGEST = 16, 1 << 17  # prompt tokens that are tried
CLOSE = 1.02  # ratio of two lengths that count as one
ROUNDING = 1e-9  # relative difference of seconds that may be one of rounding, which depends on the CPU


class PromptRange(NamedTuple):
    """Lengths of prompts, in tokens. last: None for no end among the lengths that are tried."""

    first: int
    last: int | None


def near(cost: Cost, policy: Policy) -> Prediction | None:
    """Return the fastest prediction of a policy with its KV cache near; None if none fits."""
    places = (DEVICE,) if cost.hardware.shared else (DEVICE, HOST)
    found = []
    for place in places:
        cache = (float(place == DEVICE), float(place == HOST), 0.0)
        for delegate in (False, True)[: 1 + (place == HOST)]:
            other = replace(policy, cache=cache, delegate=delegate, partition=REQUESTS, queries_first=False)
            found.append(_predicted(cost, other))
    return min(filter(None, found), key=lambda p: p.total_seconds, default=None)


def span(model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy) -> list[PromptRange]:
    """Return the lengths of prompts for which a policy with attention workers beats the same policy without them."""
    output = max(1, round(sum(n * times for (_, n), times in workload.sizes.items()) / max(1, workload.count)))

    def workers_win(prompt: int) -> bool | None:
        """Return whether workers are faster; None if no side has room for one prompt."""
        cost = Cost(model, hardware, Workload({(prompt, output): max(1, workload.count)}))
        far, other = _predicted(cost, policy), near(cost, policy)
        if far is None or max(map(far.layout.room, workers_of(far.layout.pools)), default=0) < prompt + output:
            return None if other is None else False
        return other is None or far.total_seconds < other.total_seconds * (1 - ROUNDING)

    return list(spans(workers_win))


def spans(wins: Callable[[int], bool | None]) -> Iterator[PromptRange]:
    """Yield the lengths for which a condition holds: found at powers of two, their ends by bisection.

    Args:
        wins: the condition at a length; None beyond the last length that can be asked.
    """
    lengths, won = [], list[bool]()
    length = SHORTEST
    while length <= LONGEST and (known := wins(length)) is not None:
        lengths.append(length)
        won.append(known)
        length *= 2
    first = lengths[0] if won and won[0] else None
    for (low, before), (high, after) in pairwise(zip(lengths, won, strict=True)):
        if before == after:
            continue
        end = _end(wins, low, high, before)
        if after:
            first = end
        elif first is not None:
            yield PromptRange(first, end)
            first = None
    if first is not None:
        yield PromptRange(first, None)


def _end(wins: Callable[[int], bool | None], low: int, high: int, before: bool) -> int:
    """Return about the length between two where the condition changes from `before`."""
    while high > low * CLOSE and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bool(wins(middle)) == before else (low, middle)
    return high


def _predicted(cost: Cost, policy: Policy) -> Prediction | None:
    try:
        return cost.predict(lay_out(cost.model, policy, cost.workload, planned(cost.hardware.capacity)))
    except OutOfMemory:
        return None
