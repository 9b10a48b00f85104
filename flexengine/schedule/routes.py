"""Routes: the lanes that bytes pass between each place and the device, and those of attention at a place."""

from dataclasses import dataclass
from functools import cache

from flexengine.places import HOST, TIERS, is_disk, link_lanes


@dataclass(frozen=True)
class Routes:
    """Lanes between each place and the device.

    Attributes:
        load: by place, the lanes from the place to the device. Two lanes mean a stop in host staging.
        store: by place, the lanes from the device to the place.
        attend: by place that computes attention, the lanes of the question, of attention there and of the answer.
    """

    load: dict[str, tuple[str, ...]]
    store: dict[str, tuple[str, ...]]
    attend: dict[str, tuple[str, str, str]]

    @staticmethod
    @cache
    def between(places: tuple[str, ...], staged: bool) -> "Routes":
        """Return the routes of a machine. Every disk has a lane for reads and a lane for writes.

        Each further disk also has lanes of its own on the link between host and device. A lane runs its tasks in order,
        so on a common lane data of a fast disk would wait behind data of a slow one.

        Args:
            places: all places of the machine.
            staged: whether disks and device are not directly connected. If they are, RAM is the device, and nothing is
                delegated to the host.
        """
        load: dict[str, tuple[str, ...]] = {HOST: ("h2d",)}
        store: dict[str, tuple[str, ...]] = {HOST: ("d2h",)}
        for disk in filter(is_disk, places):
            up, down = link_lanes(disk)
            load[disk] = (f"{disk}_read", up) if staged else (f"{disk}_read",)
            store[disk] = (down, f"{disk}_write") if staged else (f"{disk}_write",)
        return Routes(load, store, {HOST: ("d2h", "cpu", "h2d")} if staged else {})


STAGED, DIRECT = Routes.between(TIERS, staged=True), Routes.between(TIERS, staged=False)  # of machines with one disk
