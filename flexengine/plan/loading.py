"""Seconds of the first sweep's additional work: it reads the weights that stay in memory, copies those that are planned
on further disks, and writes to RAM for the first time."""

from flexengine.places import DEVICE, DISK, HOST, is_disk
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.layout import Layout
from flexengine.plan.problem import WEIGHTS, Linear, fraction

LOADED = 8 << 20  # bytes of one read of resident weights
RESIDENT = (DEVICE, HOST)  # places in memory, whose weights are read once


def reading(hardware: Hardware, layout: Layout) -> float:
    """Return the seconds of reading all weights that are not used from the checkpoint itself, with nothing beside. The
    same lane writes those of further disks."""
    read = sum(nbytes for place, nbytes in layout.stored.items() if place != DISK)
    return read / at(hardware.checkpoint_read, LOADED) + copying(hardware, layout)


def copying(hardware: Hardware, layout: Layout) -> float:
    """Return the seconds of writing weights to further disks."""
    return sum(nbytes / at(hardware.links[f"{place}_write"], LOADED)
               for place, nbytes in layout.stored.items() if nbytes and is_disk(place) and place != DISK)  # fmt: skip


def touched(hardware: Hardware, layout: Layout, missing: float) -> tuple[float, float]:
    """Return the seconds of page faults of new RAM: of the KV cache as it fills, and of all else in the first sweep.

    Args:
        missing: share of the resident weights that are not yet in RAM.
    """
    tiers = RESIDENT if hardware.shared or hardware.kind == "sim" else (HOST,)
    booked = [(what, n) for tier in tiers for what, n in layout.account[tier].items()]
    cache, weights = (sum(n for what, n in booked if what == name) for name in ("KV cache", "weights"))
    rest, rate = sum(n for _, n in booked) - cache - (1 - missing) * weights, hardware.touch
    busy = hardware.touch_busy if hardware.kind != "cuda" else 0.0  # a GPU computes without the processor
    return (cache / (busy or rate), rest / rate) if rate else (0.0, 0.0)


def load_resident(hardware: Hardware, nbytes: float) -> dict[str, Linear]:
    """Return the work, by lane, of reading weights once into new RAM, or of copying them to further disks.

    A copy is read and written in the lane of the checkpoint's disk. Page faults take the processor that computes where
    there is no GPU. Else they are a lane of their own ("touch"), as they overlap disk reads.

    Args:
        nbytes: of all weights.
    """
    read = nbytes / at(hardware.checkpoint_read, LOADED)
    faults = nbytes / hardware.touch if hardware.touch else 0.0
    lane = "touch" if hardware.kind == "cuda" else "device"
    seconds = {place: 0.0 if hardware.kind == "cuda" and place == "device" else faults for place in RESIDENT}
    reads = dict.fromkeys(RESIDENT, read)
    for disk in (place for place in hardware.places if is_disk(place) and place != DISK):
        reads[disk] = read + nbytes / at(hardware.links[f"{disk}_write"], LOADED)
    work = {"disk_read": reads, lane: seconds}
    return {lane: Linear(0.0, {fraction(WEIGHTS, place): s for place, s in by.items()}) for lane, by in work.items()}
