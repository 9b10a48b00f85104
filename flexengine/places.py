"""Names of places, where data is between uses: the device, host RAM, and one or more disks.

Every place has a capacity, a ledger, a route of lanes to the device (`schedule.routes.Routes`), and rates of these
lanes (`plan.hardware`). Places are listed from near to far: device, host, disk, disk2, disk3, ... The checkpoint's
files and the first offload directory are place "disk". Each further offload directory is another place.
"""

from collections.abc import Container
from functools import lru_cache

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)  # the places of every machine
MOST_DISKS = 8


@lru_cache
def place_names(disks: int = 1) -> tuple[str, ...]:
    """Return the places of a machine, from near to far. disks: number of offload directories."""
    return (*TIERS, *(f"{DISK}{number}" for number in range(2, disks + 1)))


def further_disks(places: tuple[str, ...]) -> tuple[str, ...]:
    """Return the disks after the first one. places: all places of a machine."""
    return places[len(TIERS) :]


def disk_lanes(disk: str) -> tuple[str, str]:
    """Return the lanes that read and write a disk."""
    return f"{disk}_read", f"{disk}_write"


def off_device(places: Container[str]) -> tuple[str, ...]:
    """Return the places in `places` except the device, from near to far."""
    return tuple(place for place in place_names(MOST_DISKS)[1:] if place in places)


def link_lanes(disk: str) -> tuple[str, str]:
    """Return the lanes of a disk's data from host staging to the device, and back. All disks share the link."""
    return ("h2d", "d2h") if disk == DISK else (f"h2d_{disk}", f"d2h_{disk}")


def link_of(lane: str) -> str:
    """Return the link that a lane uses: h2d or d2h for lanes of further disks, else the lane's own name."""
    return lane.partition(f"_{DISK}")[0]


def is_disk(name: str) -> bool:
    """Return whether a place is a disk, or a lane reads or writes a disk."""
    return name.startswith(DISK)
