"""Which rows of a job can be held: the longest are set aside where they are why it cannot be."""

from collections.abc import Callable
from typing import TypeVar

from flexengine.errors import ONE_SEQUENCE, OutOfMemory
from flexengine.plan.words import count
from flexengine.plan.workload import Workload

Plan = TypeVar("Plan")


def fitting(workload: Workload, plan: Callable[[Workload], Plan]) -> tuple[Plan, int, OutOfMemory | None]:
    """The plan of as many rows as can be held, the most tokens (prompt and generated) of one of them, and why not more.

    plan: of a workload; raises OutOfMemory if it cannot be held. This does so, too, if the shortest rows cannot, or if
    something else than the KV cache of a single row is too large: then another policy may hold them all.
    """
    totals = sorted({p + n for p, n in workload.sizes})
    low, middle, high = 0, len(totals) - 1, len(totals)
    found: Plan | None = None
    why: OutOfMemory | None = None
    while low < high:
        try:
            found = plan(workload.up_to(totals[middle]))
            low = middle + 1
        except OutOfMemory as error:
            if not error.what.startswith(ONE_SEQUENCE):
                raise
            high, why = middle, error
        middle = (low + high) // 2
    if found is None:
        assert why is not None
        raise why
    return found, totals[low - 1], why


def aside(workload: Workload, largest: int, why: OutOfMemory | None) -> str:
    """What is said of the rows that are set aside; "" if none is."""
    left = workload.count - workload.up_to(largest).count
    rows = count(left, "row", "rows")
    return f"{rows} of more than {largest:,} tokens cannot be held and are left out: {why}" if left else ""
