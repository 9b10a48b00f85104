"""The least memory for a job: the smallest policies, and the rows that fit."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pkgutil import resolve_name
from typing import TypeVar

from flexengine.errors import ONE_SEQUENCE, OutOfMemory
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import count
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, Split

OVERHEAD = 64 << 20  # bytes for gaps in the heap, modules, tokenizer and threads; measured: 45 to 60 MB
SHORTEST = Workload({(1, 1): 1})
# As module:name, which is imported on first use.
_LEAST, _TOO_LITTLE = "flexengine.plan.too_little:least_bytes", "flexengine.plan.too_little:too_little"
Plan = TypeVar("Plan")


def planned(capacity: Capacity) -> Capacity:
    """Return the capacity that a plan should use. Without a GPU, a part of RAM is left free."""
    if not capacity.shared or capacity.device is None:
        return capacity
    free = min(max(capacity.device // 25, OVERHEAD), capacity.device // 4)
    return replace(capacity, device=capacity.device - free)


def has_room(layout: Layout, capacity: Capacity) -> bool:
    """Return whether a layout leaves OVERHEAD bytes of the device's memory free."""
    booked = layout.total("device") + (layout.total("host") if capacity.shared else 0)
    return capacity.device is None or capacity.device - booked >= OVERHEAD


def smallest(prefill_tokens: int, capacity: Capacity) -> tuple[Policy, ...]:
    """Return the policies that need least of some memory, the fastest first.

    They have a block of one sequence, one slot, and each kind of data on one tier.

    Args:
        prefill_tokens: as in `Policy`.
        capacity: capacity of the machine. Where host and device are one memory, the host tier saves nothing.
    """
    places = [place for place in capacity.places if not place.worker]
    alone: list[Split] = [tuple(float(place == only) for place in places) for only in places]
    homes = [home for home in alone if not (capacity.shared and home[1])]
    weights = alone[2:3] if capacity.shared else [alone[2], alone[1], alone[0]]  # further disks hold copies at most
    return tuple(
        Policy(1, 1, weights=w, cache=c, activations=h, slots=1, prefill_tokens=prefill_tokens)
        for h, c, w in product(homes, homes, weights)
    )


def capacity_for(model: ModelFacts, policies: Sequence[Policy], workload: Workload, capacity: Capacity) -> Capacity:
    """Return the capacity for a plan: `planned`, or as much more as the smallest of the policies needs.

    Raise TooLittle if no policy fits into `capacity`.
    """
    roomy = planned(capacity)
    if any(laid_out(model, policy, workload, roomy) for policy in policies):
        return roomy
    least: int | None = resolve_name(_LEAST)(model, policies, workload, capacity, "device")
    if capacity.shared and least is not None and least <= (capacity.device or 0):
        return replace(capacity, device=least)
    raise resolve_name(_TOO_LITTLE)(model, policies, workload, capacity)


def lay_out_given(model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity) -> Layout:
    """Return the layout of a user's policy. Raise TooLittle if the policy does not fit.

    The layout uses the `planned` capacity if the policy fits into it, else all of the capacity.
    """
    for room in (planned(capacity), capacity):
        with suppress(OutOfMemory):
            return lay_out(model, policy, workload, room)
    raise resolve_name(_TOO_LITTLE)(model, [policy], workload, capacity)


def laid_out(model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity) -> Layout | None:
    """Return the layout; None if the policy does not fit."""
    with suppress(OutOfMemory):
        return lay_out(model, policy, workload, capacity)
    return None


def fitting(workload: Workload, plan: Callable[[Workload], Plan]) -> tuple[Plan, int, OutOfMemory | None]:
    """Return the plan of as many rows as fit, leaving out the longest rows.

    Args:
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
