"""Routes: the lanes of copies between each place and the device, and of attention computed at a place."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from flexengine.places import HOST, TIERS, lane_of, place_of, workers_of


@dataclass(frozen=True)
class Routes:
    """Lanes between each place and the device."""

    # By place, the lanes from the place to the device. Two lanes mean that data passes through host staging.
    load: dict[str, tuple[str, ...]]
    store: dict[str, tuple[str, ...]]  # by place, the lanes from the device to the place
    attend: dict[str, tuple[str, ...]]  # by place that computes attention, the lanes of SEND, ATTEND and FETCH

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
        for place in (place for place in map(place_of, places) if place.staged):
            (read, write), (up, down) = place.lanes, place.links
            load[place] = (read, up) if staged else (read,)
            store[place] = (down, write) if staged else (write,)
        attend: dict[str, tuple[str, ...]] = {HOST: ("d2h", "cpu", "h2d")} if staged else {}
        return Routes(load, store, attend | {worker: worker.attention for worker in workers_of(places)})


STAGED, DIRECT = Routes.between(TIERS, staged=True), Routes.between(TIERS, staged=False)  # of machines with one disk

_WAYS = ("enter", "read", "cpu", "h2d", "device", "d2h", "write", "leave")


def by_way(lanes: Iterable[str]) -> list[str]:
    """Return lanes in the order in which data passes them: disk reads, host, h2d, device, d2h, disk writes. Lanes of
    further disks follow the lane of the first disk, lanes of workers those of disks."""
    stops = {way: number for number, way in enumerate(_WAYS)}
    return sorted(lanes, key=lambda lane: (stops.get(lane_of(lane).way, len(stops)), len(lane), lane))  # disk, disk2
