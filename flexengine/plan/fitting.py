"""Plan as many rows of a job as fit in memory: if the longest rows do not fit, they are left out."""

from collections.abc import Callable
from typing import TypeVar

from flexengine.errors import ONE_SEQUENCE, OutOfMemory
from flexengine.plan.formatting import count
from flexengine.plan.workload import Workload

Plan = TypeVar("Plan")


def fitting(workload: Workload, plan: Callable[[Workload], Plan]) -> tuple[Plan, int, OutOfMemory | None]:
    """Return the plan of as many rows as fit, leaving out the longest rows.

    Args:
        workload: all rows.
        plan: function from a workload to its plan. It raises OutOfMemory if the workload does not fit.

    Returns:
        The plan; the most tokens (prompt and generated) of a planned row; the error of the rows left out, or None.

    Raises:
        OutOfMemory: the shortest rows do not fit, or something other than the KV cache of one row is too large. Then
            another policy may fit all rows.
    """
    totals = sorted({p + n for p, n in workload.sizes})
    low, middle, high = 0, len(totals) - 1, len(totals)
    answer: Plan | None = None
    why: OutOfMemory | None = None
    while low < high:
        try:
            answer = plan(workload.up_to(totals[middle]))
            low = middle + 1
        except OutOfMemory as error:
            if not error.what.startswith(ONE_SEQUENCE):
                raise
            high, why = middle, error
        middle = (low + high) // 2
    if answer is None:
        assert why is not None
        raise why
    return answer, totals[low - 1], why


def left_out(workload: Workload, largest: int, why: OutOfMemory | None) -> str:
    """Return the message about rows of more than `largest` tokens, or "" if there are none."""
    left = workload.count - workload.up_to(largest).count
    rows = count(left, "row", "rows")
    return f"{rows} of more than {largest:,} tokens do not fit in memory and are left out: {why}" if left else ""
