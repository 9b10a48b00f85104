"""Seconds of reading resident weights and of page faults of new RAM. Both happen during the first sweep."""

from flexengine.plan.hardware import Hardware, at
from flexengine.plan.layout import Layout
from flexengine.plan.problem import PLACES, WEIGHTS, Linear, fraction

RESIDENT_READ_BYTES = 8 << 20  # of one read of resident weights
RESIDENT = tuple(place for place in PLACES if place != "disk")  # tiers whose weights are read once


def reading(hardware: Hardware, layout: Layout) -> float:
    """Return the seconds of reading all resident weights if no other lane is busy."""
    return sum(layout.stored[place] for place in RESIDENT) / at(hardware.checkpoint_read, RESIDENT_READ_BYTES)


def touched(hardware: Hardware, layout: Layout, missing: float) -> tuple[float, float]:
    """Return the seconds of page faults of new RAM: in the KV cache, and in everything else.

    The KV cache's page faults happen as it fills, all others in the first sweep.

    Args:
        missing: share of the resident weights that are not yet in RAM.
    """
    tiers = RESIDENT if hardware.shared or hardware.kind == "sim" else ("host",)
    booked = [(what, n) for tier in tiers for what, n in layout.account[tier].items()]
    cache, weights = (sum(n for what, n in booked if what == name) for name in ("KV cache", "weights"))
    rest, rate = sum(n for _, n in booked) - cache - (1 - missing) * weights, hardware.touch
    busy = hardware.touch_busy if hardware.kind != "cuda" else 0.0  # a GPU computes without the processor
    return (cache / (busy or rate), rest / rate) if rate else (0.0, 0.0)


def load_resident(hardware: Hardware, nbytes: float) -> dict[str, Linear]:
    """Return the work, by lane, of reading resident weights once into new RAM.

    Without a GPU, page faults take the processor that computes. With a GPU, they are a lane of their own ("touch"),
    because they overlap disk reads.

    Args:
        nbytes: of all weights.
    """
    read = nbytes / at(hardware.checkpoint_read, RESIDENT_READ_BYTES)
    faults = nbytes / hardware.touch if hardware.touch else 0.0
    lane = "touch" if hardware.kind == "cuda" else "device"
    seconds = {place: 0.0 if hardware.kind == "cuda" and place == "device" else faults for place in RESIDENT}
    work = {"disk_read": dict.fromkeys(RESIDENT, read), lane: seconds}
    return {lane: Linear(0.0, {fraction(WEIGHTS, place): s for place, s in by.items()}) for lane, by in work.items()}
