"""The memory rows of the linear program: bytes of each memory as linear functions of the fractions.

They are read off the corners: layouts with everything that may move on one place, one layout for each place. Between
corners a purpose's bytes are a straight line in the fractions of one kind of data. A layout differs from that line by:

* rounding to whole tensors, sequences and gpu_batches;
* buffers and staging: the program counts them at full size as soon as a kind may leave the device;
* the KV cache: the program counts the pages held at the mean job's peak under the schedule, while `layout` reserves
  pages for the longest sequences if memory is left.
"""

from collections.abc import Mapping

from flexengine.plan.capacity import Capacity
from flexengine.plan.layout import DELEGATION, Layout
from flexengine.plan.problem import CACHE, HIDDEN, WEIGHTS, Linear, Memory, fraction

# Purposes of a layout's account whose bytes depend on the placement of one kind of data.
_KIND = {"weights": WEIGHTS, "weight slots": WEIGHTS, "weight staging": WEIGHTS, "hidden states": HIDDEN,
         DELEGATION: CACHE}  # fmt: skip


def memories(corners: Mapping[str, Layout], cache: Mapping[str, float], capacity: Capacity) -> tuple[Memory, ...]:
    """Return a row per memory that has a limit.

    Args:
        corners: by tier, the layout with everything that may move on that tier, in memory without limits.
        cache: by tier, bytes of the whole KV cache if it lies there.
        capacity: of the machine.
    """
    used = {tier: _bytes(corners, tier, cache[tier]) for tier in corners}
    limits = capacity.limits
    if capacity.shared:
        used["device"], limits["host"] = used["device"] + used["host"], None
    return tuple(Memory(tier, used[tier], float(limit)) for tier, limit in limits.items() if limit is not None)


def _bytes(corners: Mapping[str, Layout], tier: str, cache: float) -> Linear:
    """Return the bytes of one tier."""
    accounts = {at: layout.account[tier] for at, layout in corners.items()}
    delegates = any(layout.policy.delegate for layout in corners.values())
    line = Linear(0.0)
    for what in dict.fromkeys(what for account in accounts.values() for what in account):
        booked = {at: float(account.get(what, 0)) for at, account in accounts.items()}
        if what == "KV cache":
            line += Linear(0.0, {fraction(CACHE, tier): cache})
        elif what == "paused forwards":  # of delegated sequences, or of gpu_batches at home on the device
            line += _between(booked, CACHE if delegates else HIDDEN)
        elif what in _KIND:
            line += _between(booked, _KIND[what])
        else:
            line += Linear(max(booked.values()))
    return line


def _between(booked: Mapping[str, float], kind: str) -> Linear:
    """Return the straight line between the bytes booked with all of a kind on each tier."""
    least = min(booked.values())
    return Linear(least, {fraction(kind, at): nbytes - least for at, nbytes in booked.items() if nbytes > least})
