"""The memory rows of the linear program: bytes of each memory as linear functions of the fractions.

They are computed from the corners: one layout per place, with all data that may move on this place. Between corners,
the bytes of each purpose are linear in the fractions of one kind of data. A real layout differs from this line in three
ways:

* Whole tensors, sequences and gpu_batches are rounded.
* Buffers and staging count at full size in the program as soon as a kind of data may leave the device.
* The program counts KV pages at the mean job's peak under the schedule; `layout` reserves pages for the longest
  sequences if memory is left.
"""

from collections.abc import Mapping

from flexengine.plan.buffers import DELEGATION
from flexengine.plan.capacity import Capacity
from flexengine.plan.fractions import CACHE, HIDDEN, WEIGHTS, fraction
from flexengine.plan.layout import Layout
from flexengine.plan.problem import Affine, MemoryLimit

# Purposes of a layout's account, and the kind of data whose fractions determine their bytes.
_KIND = {"weights": WEIGHTS, "weight slots": WEIGHTS, "weight staging": WEIGHTS, "hidden states": HIDDEN,
         DELEGATION: CACHE}  # fmt: skip


def memories(corners: Mapping[str, Layout], cache: Mapping[str, float], capacity: Capacity) -> tuple[MemoryLimit, ...]:
    """Return one row of the program per memory that has a limit, without attention workers.

    Args:
        corners: by tier, the layout with all data that may move on that tier, planned without memory limits.
        cache: by tier, bytes of the KV cache if all of it is on that tier.
        capacity: capacity of the machine.
    """
    used = {tier: _bytes(corners, tier, cache[tier]) for tier in corners}
    limits = capacity.limits
    if capacity.shared:
        used["device"], limits["host"] = used["device"] + used["host"], None
    return tuple(MemoryLimit(tier, used[tier], float(limit)) for tier in used if (limit := limits[tier]) is not None)


def _bytes(corners: Mapping[str, Layout], tier: str, cache: float) -> Affine:
    """Return the bytes of one tier. cache: as in `memories`, of this tier."""
    accounts = {at: layout.account[tier] for at, layout in corners.items()}
    delegates = any(layout.policy.delegate for layout in corners.values())
    line = Affine(0.0)
    for what in dict.fromkeys(what for account in accounts.values() for what in account):
        booked = {at: float(account.get(what, 0)) for at, account in accounts.items()}
        if what == "KV cache":
            line += Affine(0.0, {fraction(CACHE, tier): cache})
        elif what == "paused forwards":  # held by delegated sequences, else by gpu_batches with hidden states on device
            line += _between(booked, CACHE if delegates else HIDDEN)
        elif what in _KIND:
            line += _between(booked, _KIND[what])
        else:
            line += Affine(max(booked.values()))
    return line


def _between(booked: Mapping[str, float], kind: str) -> Affine:
    """Return the linear function through the corners.

    Args:
        booked: bytes of one purpose, by the tier that has all data of the kind.
    """
    least = min(booked.values())
    return Affine(least, {fraction(kind, at): nbytes - least for at, nbytes in booked.items() if nbytes > least})
