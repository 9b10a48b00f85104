"""Routes: the lanes of copies between each place and the device, and of attention computed at a place."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from flexengine.places import (
    HOST,
    TIERS,
    attention_lanes,
    disk_lanes,
    is_disk,
    is_staged,
    is_worker,
    link_lanes,
    link_of,
    workers_of,
)


@dataclass(frozen=True)
class Routes:
    """Lanes between each place and the device.

    Attributes:
        load: by place, the lanes from the place to the device. Two lanes mean that data passes through host staging.
        store: by place, the lanes from the device to the place.
        attend: by place that computes attention, the lanes of SEND, ATTEND and FETCH.
    """

    load: dict[str, tuple[str, ...]]
    store: dict[str, tuple[str, ...]]
    attend: dict[str, tuple[str, str, str]]

    @staticmethod
    @cache
    def between(places: tuple[str, ...], staged: bool) -> "Routes":
        """Return the routes of a machine. Every disk and attention worker has a lane for reads and a lane for writes.

        Each further disk, and each worker, also has lanes of its own between host and device. A lane runs its tasks in
        order, so on a common lane data of a fast disk would wait for data of a slow disk.

        Args:
            places: all places of the machine.
            staged: whether data between a disk or a worker and the device passes through host staging. If not, RAM is
                the device, and no attention is delegated to the host.
        """
        load: dict[str, tuple[str, ...]] = {HOST: ("h2d",)}
        store: dict[str, tuple[str, ...]] = {HOST: ("d2h",)}
        for place in filter(is_staged, places):
            (read, write), (up, down) = disk_lanes(place), link_lanes(place)
            load[place] = (read, up) if staged else (read,)
            store[place] = (down, write) if staged else (write,)
        attend = {HOST: ("d2h", "cpu", "h2d")} if staged else {}
        return Routes(load, store, attend | {worker: attention_lanes(worker) for worker in workers_of(places)})


STAGED, DIRECT = Routes.between(TIERS, staged=True), Routes.between(TIERS, staged=False)  # of machines with one disk

_WAY = ("enter", "read", "cpu", "h2d", "device", "d2h", "write", "leave")


def by_way(lanes: Iterable[str]) -> list[str]:
    """Return lanes in the order in which data passes them: disk reads, host, h2d, device, d2h, disk writes. Lanes of
    further disks follow the lane of the first disk, lanes of workers those of disks."""
    return sorted(lanes, key=lambda lane: (_stop(lane), len(lane), lane))  # disk_read before disk2_read


def _stop(lane: str) -> int:
    name = lane.rpartition("_")[2] if is_disk(lane) or is_worker(lane) else link_of(lane)
    return _WAY.index(name) if name in _WAY else len(_WAY)
