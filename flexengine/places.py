"""Names of places, where data is between uses: the device, host RAM, and one or more disks.

Attention workers are further places, which hold KV cache and compute attention over it: worker1, worker2, ... In a
policy, all of them together are place "workers".

Every place has a capacity, a ledger, a route of lanes to the device (`schedule.routes.Routes`), and rates of these
lanes (`plan.hardware`). Places are listed from near to far: device, host, disk, disk2, disk3, ... The checkpoint's
files and the first offload directory are place "disk". Each further offload directory is another place.
"""

from collections.abc import Container, Iterable
from functools import lru_cache

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)  # the places of every machine
WORKERS = "workers"  # all attention workers, in a policy
_FILED = "workerfile"  # begin of the names of attention workers that hold pages in a file, beside others in memory
MOST_DISKS = 8
MOST_WORKERS = 64


@lru_cache
def place_names(disks: int = 1) -> tuple[str, ...]:
    """Return the places of a machine, from near to far. disks: number of offload directories."""
    return (*TIERS, *(f"{DISK}{number}" for number in range(2, disks + 1)))


@lru_cache
def worker_names(count: int, filed: int = 0) -> tuple[str, ...]:
    """Return the places of a number of attention workers.

    Args:
        count: number of all workers.
        filed: how many of them, the last ones, hold pages in a file.
    """
    names = (f"worker{number}" for number in range(1, count - filed + 1))
    return (*names, *(f"{_FILED}{number}" for number in range(1, filed + 1)))


def further_disks(places: Iterable[str]) -> tuple[str, ...]:
    """Return the disks after the first one. places: all places of a machine."""
    return tuple(place for place in places if is_disk(place) and place != DISK)


def workers_of(places: Iterable[str]) -> tuple[str, ...]:
    """Return the attention workers among places."""
    return tuple(filter(is_worker, places))


def workers_in_memory(places: Iterable[str]) -> tuple[str, ...]:
    """Return the attention workers among places that do not hold their pages in a file. They share the KV cache; the
    others take sequences that find no room there."""
    return tuple(place for place in places if is_worker(place) and not is_filed(place))


def disk_lanes(place: str) -> tuple[str, str]:
    """Return the lanes that read and write a disk, or pages of an attention worker."""
    return f"{place}_read", f"{place}_write"


def off_device(places: Container[str]) -> tuple[str, ...]:
    """Return the places in `places` except the device, from near to far."""
    return tuple(place for place in place_names(MOST_DISKS)[1:] if place in places)


def attention_lanes(worker: str) -> tuple[str, str, str]:
    """Return the lanes of questions to an attention worker, of its attention, and of its answers."""
    return f"{worker}_send", worker, f"{worker}_fetch"


def link_lanes(place: str) -> tuple[str, str]:
    """Return the lanes of a disk's or worker's data from host staging to the device, and back. All share the link."""
    return ("h2d", "d2h") if place == DISK else (f"h2d_{place}", f"d2h_{place}")


def link_of(lane: str) -> str:
    """Return the link that a lane uses: h2d or d2h for lanes of further disks and workers, else the lane's own name."""
    return lane[:3] if lane.startswith(("h2d_", "d2h_")) else lane


def is_disk(name: str) -> bool:
    """Return whether a place is a disk, or a lane reads or writes a disk."""
    return name.startswith(DISK)


def is_worker(name: str) -> bool:
    """Return whether a place is an attention worker, or a lane is one of its lanes."""
    return name.startswith("worker") and name != WORKERS


def is_filed(place: str) -> bool:
    """Return whether a place is an attention worker that holds pages in a file, beside other workers in memory."""
    return place.startswith(_FILED)


def is_staged(place: str) -> bool:
    """Return whether data between a place and a GPU passes through host staging."""
    return is_disk(place) or is_worker(place)
