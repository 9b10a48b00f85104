"""Places, where data is between uses: the device, host RAM, one or more disks, and attention workers; and their lanes.

Attention workers hold KV cache and compute attention over it: worker1, worker2, ... In a policy, all of them together
are place "workers".

Every place has a capacity, a ledger, a route of lanes to the device (`Routes`), and rates of these
lanes (`plan.hardware`). Places are listed from near to far: device, host, disk, disk2, disk3, ... The checkpoint's
files and the first offload directory are place "disk". Each further offload directory is another place.

A place and a lane equal their names. Files, messages and dictionaries hold names; `place_of` and `lane_of` look up the
objects.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cache

MOST_DISKS, MOST_WORKERS, MOST_ENGINES = 8, 64, 64
COPIES = ("h2d", "d2h")  # links between host and device


class Lane(str):
    """A serial resource that runs tasks in order."""

    # the disk or attention worker whose data passes the lane; None for lanes of the device and the host
    place: "Place | None"
    way: str  # read, write, h2d, d2h, send, attend or fetch; the lane's own name if it has no place
    link: str  # h2d or d2h for a lane that uses this link, as several lanes may; else the lane's own name
    of_disk: bool  # whether it reads or writes a disk
    # whether it moves pages of an attention worker to or from RAM, or questions and answers, or attends
    of_worker: bool
    queues: bool  # whether it queues its work on the GPU, if there is one. Other lanes work in their own thread.

    def __new__(cls, name: str, way: str = "", place: "Place | None" = None) -> "Lane":
        lane = super().__new__(cls, name)
        lane.place, lane.way = place, way or name
        lane.link = lane.way if lane.way in COPIES else name
        apart = None if lane.way in COPIES else place
        lane.of_disk, lane.of_worker = apart is not None and apart.disk, apart is not None and apart.worker
        lane.queues = lane.way not in ("read", "write", "cpu", "attend")
        return lane

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return lane_of, (str(self),)


class Place(str):
    """A place."""

    disk: bool  # whether it is a disk
    worker: bool  # whether it is an attention worker
    filed: bool  # whether it is an attention worker that holds pages in a file, beside others in memory
    lanes: tuple[Lane, ...]  # that read and write a disk, or pages of an attention worker; () for other places
    links: tuple[Lane, ...]  # of data from host staging to the device, and back; all share the links h2d and d2h
    attention: tuple[Lane, ...]  # of questions to an attention worker, its attention, and its answers; () for others

    def __new__(cls, name: str, disk: bool = False, worker: bool = False, filed: bool = False) -> "Place":
        place = super().__new__(cls, name)
        place.disk, place.worker, place.filed = disk, worker, filed
        place.lanes = place.links = place.attention = ()
        if place.staged:
            place.lanes = tuple(Lane(f"{name}_{way}", way, place) for way in ("read", "write"))
            place.links = tuple(Lane(f"{way}_{name}", way, place) for way in COPIES)
        if name in ("host", "disk"):  # the first disk has no links of its own
            place.links = tuple(map(Lane, COPIES))
        if worker:
            names = {"send": f"{name}_send", "attend": name, "fetch": f"{name}_fetch"}
            place.attention = tuple(Lane(lane, way, place) for way, lane in names.items())
        return place

    @property
    def staged(self) -> bool:
        """Whether data between it and a GPU passes through host staging."""
        return self.disk or self.worker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return place_of, (str(self),)


DEVICE, HOST, DISK = TIERS = (Place("device"), Place("host"), Place("disk", disk=True))  # the places of every machine
WORKERS = Place("workers")  # all attention workers, in a policy
_DISKS = (DISK, *(Place(f"{DISK}{number}", disk=True) for number in range(2, MOST_DISKS + 1)))
_WORKERS = tuple(Place(f"worker{number}", worker=True) for number in range(1, MOST_WORKERS + 1))
_FILED = tuple(Place(f"workerfile{number}", worker=True, filed=True) for number in range(1, MOST_WORKERS + 1))
USED_READ = Lane("disk_used_read", "read", DISK)  # row in a trace: reads of used rows overlap tasks of the disk's lane
_PLACES = {str(place): place for place in (DEVICE, HOST, WORKERS, *_DISKS, *_WORKERS, *_FILED)}
_LANES = {str(lane): lane for place in _PLACES.values() for lane in (*place.lanes, *place.links, *place.attention)}
_LANES[USED_READ] = USED_READ


def place_of(name: str) -> Place:
    """Return the place with a name; for a name of no place, a place without properties."""
    return _PLACES.get(name) or Place(name)


def lane_of(name: str) -> Lane:
    """Return the lane with a name; for other names a lane without a place."""
    return name if isinstance(name, Lane) else _LANES.get(name) or Lane(name)


def place_names(disks: int = 1) -> tuple[Place, ...]:
    """Return the places of a machine, from near to far. disks: number of offload directories."""
    return (DEVICE, HOST, *_DISKS[:disks])


def worker_names(count: int, filed: int = 0) -> tuple[Place, ...]:
    """Return the places of a number of attention workers. count: number of all workers. filed: how many of them, the
    last ones, hold pages in a file."""
    return _WORKERS[: count - filed] + _FILED[:filed]


def disks_of(places: Iterable[str]) -> tuple[Place, ...]:
    """Return the disks among places."""
    return tuple(place for place in map(place_of, places) if place.disk)


def further_disks(places: Iterable[str]) -> tuple[Place, ...]:
    """Return the disks after the first one. places: all places of a machine."""
    return tuple(place for place in disks_of(places) if place != DISK)


def workers_of(places: Iterable[str]) -> tuple[Place, ...]:
    """Return the attention workers among places."""
    return tuple(place for place in map(place_of, places) if place.worker)


def workers_in_memory(places: Iterable[str]) -> tuple[Place, ...]:
    """Return the attention workers among places that do not hold their pages in a file. They share the KV cache; the
    others take sequences that find no room there."""
    return tuple(worker for worker in workers_of(places) if not worker.filed)


def off_device(places: Container[str]) -> tuple[Place, ...]:
    """Return the places in `places` except the device, from near to far."""
    return tuple(place for place in (HOST, *_DISKS) if place in places)


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
