"""Bytes of buffers for delegated attention, and for reads from disks."""

from typing import Any, Protocol

from flexengine.errors import InvalidInput
from flexengine.places import further_disks, is_worker
from flexengine.plan.capacity import Capacity
from flexengine.plan.facts import ModelFacts
from flexengine.plan.sizes import ALIGN, aligned, delegated
from flexengine.policy import Policy

DELEGATION, DESKS = "delegation buffers", "buffers of attention workers"
READ, READ_BUFFERS = 4 << 20, 3  # bytes of a long read from disk, and number of buffers, as in tier/disk.py
HUGE = 2 << 20  # bytes of a huge page
SHORT_READ, SHORT_READERS = READ // 4, 4  # bytes of a short read, and threads with one buffer each


class Booked(Protocol):
    """The part of a `plan.layout.Layout` that is read and booked here; its attributes are described there."""

    policy: Policy
    places: tuple[str, ...]
    stored_bytes: dict[str, int]
    pools: dict[str, Any]
    cache_buffer: int
    hidden_buffer: int
    hidden_home: dict[str, int]
    delegation: dict[str, int]
    desks: dict[str, int]

    def book(self, tier: str, what: str, nbytes: int) -> None:
        """Add bytes of a purpose to the account of a place."""


def book_delegation(layout: Booked, model: ModelFacts, capacity: Capacity) -> None:
    """Book buffers of delegated attention for all sequences, so that no gpu_batch waits for another.

    The host also has a workspace for the kernels' output of one gpu_batch.
    """
    policy, rows = layout.policy, delegated(layout.policy, layout.places)
    if policy.works and not any(map(is_worker, rows)):
        raise InvalidInput(f"the policy's share of {policy.works:g} on attention workers is no sequence of a block of"
                           f" {policy.block_size}; raise the share, or leave it out")  # fmt: skip
    if policy.delegate and capacity.shared:
        raise InvalidInput("policy delegate is true, but on device 'cpu' RAM is the device, and attention"
                           " always runs there; set delegate to false")  # fmt: skip
    for place in rows:
        if (members := len(policy.team(place, layout.places))) > 1:
            layout.desks[place] = aligned(rows[place] * (model.sent + model.fetched + 4 * model.heads))
            layout.book("device" if capacity.shared else "host", DESKS, members * layout.desks[place])
    by_cpu = [n for place, n in rows.items() if not is_worker(place)]
    if policy.delegate and not by_cpu:
        raise InvalidInput(f"policy delegate is true, but no sequence of a block of {policy.block_size} has"
                           f" cache on the host, whose share is {policy.cache[1]:g}; raise the share, or set delegate"
                           " to false")  # fmt: skip
    layout.delegation = {place: aligned(n * model.sent) for place, n in rows.items()}
    for tier in ("device",) if capacity.shared else ("device", "host"):
        layout.book(tier, DELEGATION, sum(layout.delegation.values()))
    if by_cpu:
        workspace_rows = min(sum(by_cpu), policy.gpu_batch_size)
        layout.book("host", "delegation workspace", aligned(workspace_rows * model.fetched))


def read_buffers(model: ModelFacts, layout: Booked) -> int:
    """Return the bytes of RAM buffers of all disks in use. Data is read into these buffers, then converted.

    A disk has buffers for short reads and, if any read is long, for long reads. Consecutive weights are one read. Only
    the part of a buffer that the longest read fills takes RAM, in huge pages if the read is long.
    """
    expert = max((block.read_bytes for block in model.blocks if block is not None and block.experts), default=0)
    longest = max(model.stored_bytes, layout.cache_buffer, layout.hidden_buffer, expert)
    long = READ_BUFFERS * min(READ, aligned(longest, HUGE)) if longest >= SHORT_READ else 0
    each = aligned(long) + SHORT_READERS * aligned(min(SHORT_READ, longest) + 2 * ALIGN)
    used = {place for place, nbytes in layout.stored_bytes.items() if nbytes}
    used |= layout.pools.keys() | layout.hidden_home.keys()
    return each * (1 + len(used.intersection(further_disks(layout.places))))
