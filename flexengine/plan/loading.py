"""Seconds of what happens once in a job: weights that stay in memory are read, and new RAM is touched."""

from flexengine.places import DEVICE, DISK, HOST, further_disks, place_of
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.layout import Layout

LOAD_BYTES = 8 << 20  # of one read or write of weights
RESIDENT = (DEVICE, HOST)  # places in memory, whose weights are read once


def reading(hardware: Hardware, layout: Layout) -> float:
    """Return the seconds of reading all weights that are not streamed from the checkpoint, if no other lane is busy.

    The same lane copies weights to further disks, so these writes are included.
    """
    read = sum(nbytes for place, nbytes in layout.stored_bytes.items() if place != DISK)
    copies = (write_seconds(hardware, disk, layout.stored_bytes[disk]) for disk in further_disks(layout.places))
    return read / at(hardware.checkpoint_read, LOAD_BYTES) + sum(copies)


def write_seconds(hardware: Hardware, disk: str, nbytes: float) -> float:
    """Return the seconds of writing copies of weights to a disk."""
    return nbytes / at(hardware.lane_rates(place_of(disk).lanes[1]), LOAD_BYTES)


def touched(hardware: Hardware, layout: Layout, missing: float) -> tuple[float, float]:
    """Return the seconds of page faults of new RAM: in the KV cache, and in everything else.

    The KV cache's page faults happen as it fills, all others in the first sweep.

    Args:
        missing: share of the resident weights that are not yet in RAM.
    """
    tiers = RESIDENT if hardware.shared or hardware.kind == "sim" else (HOST,)
    booked = [(what, n) for tier in tiers for what, n in layout.account[tier].items()]
    cache, weights = (sum(n for what, n in booked if what == name) for name in ("KV cache", "weights"))
    rest = sum(n for _, n in booked) - cache - (1 - missing) * weights
    busy = not hardware.gpu  # a GPU computes without the processor
    return fault_seconds(hardware, rest, cache, busy), fault_seconds(hardware, 0.0, rest)


def fault_seconds(hardware: Hardware, before: float, nbytes: float, busy: bool = False) -> float:
    """Return the seconds of first writes to `nbytes` of RAM, after the process has written to `before` bytes: RAM that
    was freed lately comes first. busy: whether the processor computes at the same time."""
    rates = (hardware.touch_freed, hardware.touch), (hardware.touch_freed_busy, hardware.touch_busy)
    freed, other = (y if busy and y else x for x, y in zip(*rates, strict=True))
    quick = min(nbytes, max(0.0, hardware.freed - before)) if freed else 0.0
    return (quick / freed if quick else 0.0) + ((nbytes - quick) / other if other else 0.0)
