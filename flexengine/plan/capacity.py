"""The bytes that each place of a machine may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flexengine.places import DISK, TIERS, place_names


@dataclass(frozen=True)
class Capacity:
    """Bytes of each place, None for no limit.

    Attributes:
        device, host, disk: of the places of every machine. disk: the first offload directory.
        shared: whether host and device are one memory (a machine without a GPU).
        staged: whether data between a disk and the device stops in host staging, as they are not directly connected.
        more_disks: of the further offload directories, in order.
    """

    device: int | None
    host: int | None
    disk: int | None
    shared: bool
    staged: bool
    more_disks: tuple[int | None, ...] = ()

    @cached_property
    def places(self) -> tuple[str, ...]:
        """Return all places, from near to far."""
        return place_names(1 + len(self.more_disks))

    @cached_property
    def limits(self) -> dict[str, int | None]:
        """Return the bytes by place."""
        sizes = (self.device, self.host, self.disk, *self.more_disks)
        return dict(zip(self.places, sizes, strict=True))

    def limited(self, limits: Mapping[str, int | None]) -> "Capacity":
        """Return the capacity with other limits of some places."""
        known = {**self.limits, **limits}
        more = tuple(known[place] for place in self.places if place not in TIERS)
        return replace(self, device=known["device"], host=known["host"], disk=known[DISK], more_disks=more)
