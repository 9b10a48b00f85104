"""Memory limits of a machine, by place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flexengine.errors import InvalidInput
from flexengine.places import DISK, WORKERS, Place, further_disks, place_names, worker_names, workers_of
from flexengine.policy import Policy


@dataclass(frozen=True)
class Capacity:
    """Most bytes of each place; None for no limit."""

    device: int | None  # bytes of the device
    host: int | None  # bytes of host RAM
    disk: int | None  # bytes of the first offload directory
    shared: bool  # whether host and device are one memory (a machine without a GPU)
    staged: bool  # whether data between a disk and the device passes through host staging
    more_disks: tuple[int | None, ...] = ()  # bytes of each further offload directory, in order
    workers: tuple[int | None, ...] = ()  # bytes of each attention worker, in order
    filed: int = 0  # how many of the workers, the last ones, hold pages in a file
    engines: int = 1  # engines that share the workers; `workers` has the part of one

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Return all places, from near to far."""
        return (*place_names(1 + len(self.more_disks)), *worker_names(len(self.workers), self.filed))

    @cached_property
    def limits(self) -> dict[str, int | None]:
        """Return the bytes by place."""
        sizes = (self.device, self.host, self.disk, *self.more_disks, *self.workers)
        return dict(zip(self.places, sizes, strict=True))

    def limited(self, limits: Mapping[str, int | None]) -> "Capacity":
        """Return the capacity with new limits for some places."""
        merged = {**self.limits, **limits}
        more = tuple(merged[place] for place in further_disks(self.places))
        workers = tuple(merged[place] for place in workers_of(self.places))
        return replace(
            self, device=merged["device"], host=merged["host"], disk=merged[DISK], more_disks=more, workers=workers
        )


def check_places(policy: Policy, capacity: Capacity) -> None:
    """Raise InvalidInput if the policy names a place that the machine does not have."""
    if policy.works and not capacity.workers:
        raise InvalidInput(
            f"the policy has a share of the KV cache on {WORKERS}, but there are no attention workers;"
            " start some with flexengine run --attention-workers, or list their memory as workers in"
            " the hardware file of a plan"
        )
    if unknown := [place for place in policy.places if place not in (*capacity.places, WORKERS)]:
        raise InvalidInput(
            f"the policy has a share on {unknown[-1]}, but the machine has {', '.join(capacity.places)};"
            " give --offload-dir once for each disk, or, in a hardware file, add the disk to more_disks"
            " and its rates to links"
        )
