"""A machine in numbers: bytes of each memory, and rates of links and kernels.

They are measured (`flexengine.measure`), or written by hand as JSON to plan for another machine.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from flexengine.errors import InvalidInput, bracketed, shown
from flexengine.places import (
    DISK,
    MOST_DISKS,
    MOST_ENGINES,
    MOST_WORKERS,
    WORKERS,
    Place,
    disks_of,
    further_disks,
    lane_of,
    place_names,
    place_of,
    worker_names,
    workers_of,
)
from flexengine.policy import Policy
from flexengine.records import Limit, allowed, check, checked, load, named_fields, printable, read, refuse
from flexengine.words import python_words

KINDS = ("cpu", "cuda", "sim")
STREAMING = ("device", "disk_read", "wake", "read")  # older files lack the last one
LEAST, MOST = 1e-30, 1e30  # limits of all numbers, so that predicted seconds are finite
MOST_SLOWED = 2.0  # most seconds that one second of a lane may add to another lane, or waiting to a layer
ATTENTION = ("decode", "host", "prompt", "continued", "call")
BLOCKS = ("read", "some", "all", "all_read")
LANES = ("disk_read", "disk_write", "h2d", "d2h", "device", "cpu")  # of every machine

Table = tuple[tuple[float, float], ...]


@lru_cache(maxsize=4096)
def at(table: Table, x: float) -> float:
    """Return the table's value at x: on a straight line in log x and log y between two points, constant beyond."""
    return float(values_at(table, x))


def values_at(table: Table, x: Any) -> NDArray[np.float64]:
    """Return the table's values at an array of x, as `at`. Values of x must be positive."""
    xs, ys = _logs(table)
    (first, low), (last, high) = table[0], table[-1]
    inside = np.exp(np.interp(np.log(x), xs, ys))
    return np.where(x <= first, low, np.where(x >= last, high, inside))  # exp(log(y)) may differ from y by rounding


@lru_cache(maxsize=1024)
def _logs(table: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the logarithms of x and of y. Cached: a search reads the same tables often."""
    xs, ys = np.log(np.array(table, dtype=float)).T
    return xs, ys


def positive(name: str, value: object) -> float:
    """Return the number. Raise InvalidInput, which begins with `name`, unless it is positive and in the limits."""
    return float(checked(_RATE, name, value))


def _if_known(name: str, value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else positive(name, value)


def _bytes(name: str, value: Any) -> int:
    if positive(name, value) < 1:
        refuse(name, value, "at least 1 byte, or null for no limit")
    return int(value)


def _points(name: str, value: Any) -> Table:
    """Return checked points. A plain number is a table with the same value everywhere."""
    if isinstance(value, (int, float)):
        return ((1.0, positive(name, value)),)
    if not isinstance(value, list | tuple) or not value:
        refuse(name, value, "a list of points [x, y]")
    for point in value:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise InvalidInput(f"{name} holds {shown(point)}; it must hold points [x, y]")
    points = tuple((positive(name, x), positive(name, y)) for x, y in value)
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise InvalidInput(f"{name} is {shown(value)}; x must rise from point to point")
    return points


def _at_most(most: int) -> str:
    return f"a list of bytes, at most {most} of them"


Rate = Annotated[float, Limit(LEAST, MOST), f"a positive number, {LEAST:g} to {MOST:g} in bytes, FLOP and seconds"]
_RATE = allowed(Rate)
IfKnown = Annotated[float, _if_known]  # 0: not known
_Bytes = Annotated[int | None, _bytes]  # None: no limit
_Points = Annotated[Table, _points]
_Slowed = Annotated[float, Limit(0, MOST_SLOWED), f"a number from 0 to {MOST_SLOWED:g}"]


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
    turns: int = 1  # engines that compute slices in turn; the capacity is that of one

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Return all places, from near to far."""
        return (*place_names(1 + len(self.more_disks)), *worker_names(len(self.workers), self.filed))

    @property
    def ram(self) -> int | None:
        """Return the bytes of RAM."""
        return self.device if self.shared else self.host

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


@named_fields
@dataclass(frozen=True)
class Hardware:
    """One machine. Tables are points (x, y) with rising x; every number is positive.

    Attributes:
        name: shown in reports.
        kind: cpu (RAM is the device tier), cuda or sim (a device behind links; disk and device meet in host staging).
        device_bytes, host_bytes, disk_bytes: bytes that may be used, None for no limit. On cpu, host_bytes is None,
            because the host's RAM is the device.
        links: by lane, (bytes of one transfer, bytes per second): disk_read and disk_write of the first offload
            directory, disk2_read and disk2_write of the second and so on, h2d, d2h. On cpu, h2d copies 16-bit weights
            from RAM to a slot.
        checkpoint_read: (bytes of one transfer, bytes per second) of the model's own files.
        products: by dtype of the matrix, (rows of activations, FLOP per second) of a matrix product.
        prompt_attention: (tokens of the prompt, FLOP per second) of causal attention. A multiply-add of a (query, key)
            pair that is not masked counts 2.
        decode_attention: (cached tokens of a sequence, bytes of KV per second) on the device, as memory limits it.
        elementwise: bytes per second that norms, activations and residuals read and write.
        host_attention: bytes of KV per second of decode attention on the host; 0 if not known.
        vector_flops, host_flops: FLOP per second of decode attention and dequantizing as computing limits it, on the
            device and on the host; 0 if not known.
        cell_seconds: fixed cost of one layer of one gpu_batch.
        task_seconds: cost of handing one task to its lane.
        sweep_seconds, sequence_seconds: bookkeeping of a sweep, and of one sequence in a sweep.
        crosstalk: by lane and other lane, seconds that one busy second of the other lane adds to the lane.
        layers: by `ModelFacts.signature`, (tokens of a gpu_batch, seconds) of one layer without its attention.
        resident: the same for weights that stay in memory, whose order a CPU's kernels change. Numbers in it and in
            `fused` are as measured; `corrected` lengthens them in use.
        fused: by `ModelFacts.fused_signature`, (sequences, seconds) of one layer with its attention, which has almost
            nothing to read, if one call of kernels computes several layers, with weights that stay in memory.
        heads: by `ModelFacts.head_signature`, (rows, seconds) of logits and tokens.
        blocks: by `NeuronFacts.signature`, measured tables of records of neurons, in bytes of records per second. read:
            (records per call), scattered. some: (tokens), naming and computing records in memory. all: (tokens),
            computing all records of a block in memory. all_read: (tokens), the same while they are read.
        attention: by `ModelFacts.attention_signature`, measured tables. They replace prompt_attention,
            decode_attention, host_attention, vector_flops and host_flops. decode, host: (cached tokens of a sequence,
            bytes of KV per second). prompt: (tokens of a prompt, FLOP per second). continued: (tokens cached before,
            FLOP per second) of a later piece of a prompt. call: [[1, seconds]] of a call with almost nothing to read.
        streaming: by signature of the first layer, measured slowdown while the model's weights are streamed from the
            checkpoint; replaces crosstalk. device: seconds that one second of disk_read adds to the device. disk_read:
            seconds that one second of the device adds to disk_read. wake: seconds that a layer takes longer if the
            device has waited for its weights. read: ratio of the seconds in which a layer is read to those of as many
            bytes by checkpoint_read.
        workers: bytes of each attention worker.
        filed: how many of the workers, the last ones, hold pages in a file.
        engines: number of engines like this one that compute slices in turn while workers attend
            (`EngineOptions.engines`); their rates and sizes are those of one.
        worker_attention: by attention worker, bytes of KV per second of decode attention; the rate of h2d if not known.
        worker_links: by attention worker, bytes per second of its connection; the rate of h2d if not known.
        worker_seconds: seconds of a question to a worker and of its answer, without attention.
        worker_cores: by attention worker on this machine, the share of the machine's cores with which it computes.
        delegation: by signature of the first layer, seconds that delegation adds to a layer of a gpu_batch, without
            attention itself; `task_seconds` if not measured.
        touch, touch_busy: bytes per second of first writes to RAM (page faults), alone and while the processor
            computes; 0 if not known.
        freed, touch_freed, touch_freed_busy: bytes of RAM that programs freed lately, which a process gets first, and
            the same rates there. The host of a virtual machine may need ten times longer for other RAM.
        measured: False for rates that were not measured, or only some of them, briefly.
        assumed: True if rates that were not measured are round numbers of no machine (`plan.rates.assumed`). The
            planner then puts no KV cache on a disk while memory can hold it, and delegates no attention.
        quick: signatures (keys of `layers`, `resident`, `fused`, `heads` and `attention`) of models measured briefly.
            Those that are missing there did not fit in memory.
        prices: by place, its price in any unit of money, also per time. Places without one cost nothing.
        corrected: by lane, or signature of a layer or head, factor by which jobs have lengthened the measured seconds.
        more_disks: bytes that may be used of each further offload directory, in order; None for no limit.

    Examples:
        >>> Engine(hardware=Hardware.load("my_machine.json"))  # from flexengine measure --save my_machine.json
    """

    name: Annotated[str, printable]
    kind: Annotated[str, KINDS]
    device_bytes: _Bytes
    host_bytes: _Bytes
    disk_bytes: _Bytes
    links: Mapping[str, _Points]
    checkpoint_read: _Points
    products: Mapping[str, _Points]
    prompt_attention: _Points
    decode_attention: _Points
    elementwise: Rate
    host_attention: IfKnown = 0.0
    vector_flops: IfKnown = 0.0
    host_flops: IfKnown = 0.0
    cell_seconds: IfKnown = 0.0
    task_seconds: IfKnown = 0.0
    sweep_seconds: IfKnown = 0.0
    sequence_seconds: IfKnown = 0.0
    crosstalk: Mapping[str, Mapping[str, _Slowed]] = field(default_factory=dict)
    layers: Mapping[str, _Points] = field(default_factory=dict)
    resident: Mapping[str, _Points] = field(default_factory=dict)
    fused: Mapping[str, _Points] = field(default_factory=dict)
    heads: Mapping[str, _Points] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, _Points]] = field(default_factory=dict)
    blocks: Mapping[str, Mapping[str, _Points]] = field(default_factory=dict)
    streaming: Mapping[str, Mapping[str, _Slowed]] = field(default_factory=dict)
    delegation: Mapping[str, IfKnown] = field(default_factory=dict)
    touch: IfKnown = 0.0
    touch_busy: IfKnown = 0.0
    freed: IfKnown = 0.0
    touch_freed: IfKnown = 0.0
    touch_freed_busy: IfKnown = 0.0
    measured: bool = False
    assumed: bool = False
    more_disks: Annotated[tuple[_Bytes, ...], Limit(0, MOST_DISKS - 1), _at_most(MOST_DISKS - 1)] = ()
    workers: Annotated[tuple[_Bytes, ...], Limit(0, MOST_WORKERS), _at_most(MOST_WORKERS)] = ()
    filed: Annotated[int, Limit(0), "a number of workers, fewer than all"] = 0
    engines: Annotated[int, Limit(1, MOST_ENGINES)] = 1
    worker_attention: Mapping[str, Rate] = field(default_factory=dict)
    worker_links: Mapping[str, Rate] = field(default_factory=dict)
    worker_seconds: IfKnown = 0.0
    worker_cores: Mapping[str, Annotated[float, Limit(0, 1), "a share from 0 to 1"]] = field(default_factory=dict)
    corrected: Mapping[str, Rate] = field(default_factory=dict)
    quick: tuple[str, ...] = ()
    prices: Mapping[str, Rate] = field(default_factory=dict)

    @python_words
    def __post_init__(self) -> None:
        check(self)
        if self.filed >= max(1, len(self.workers)):
            refuse("filed", self.filed, "a number of workers, fewer than all")
        if not self.products:
            raise InvalidInput("products is empty; it must have a rate for one dtype at least, such as float16")
        for name, known in (("attention", ATTENTION), ("blocks", BLOCKS), ("streaming", STREAMING)):
            for key, given in getattr(self, name).items():
                unknown = set(given) - set(known)
                if unknown:
                    raise InvalidInput(
                        f"{name} {shown(key)} has {bracketed(sorted(unknown))}; it may have {', '.join(known)}"
                    )
        for name, figures in self.streaming.items():
            if set(STREAMING[:-1]) - set(figures):
                wanted = ", ".join(STREAMING[:-1])
                raise InvalidInput(f"streaming {shown(name)} is {shown(figures)}; it must have {wanted}")
        self._check_lanes()

    def _check_lanes(self) -> None:
        lanes = self.lanes
        needed = {"h2d"} | (set() if self.shared else {"d2h"})
        needed |= {lane for disk in disks_of(self.places) for lane in disk.lanes}
        for place in self.prices:
            if place not in place_names(MOST_DISKS) and not place_of(place).worker:
                raise InvalidInput(f"prices has {shown(place)}; it may have device, host, disk, disk2, worker1, and so"
                                   " on")  # fmt: skip
        if unknown := set(self.links) - needed - {"d2h"}:
            links = ", ".join(sorted(needed | {"d2h"}))
            raise InvalidInput(f"hardware {self.name} has links {sorted(unknown)}; they must be among {links}; further"
                               " disks are listed in more_disks")  # fmt: skip
        if missing := needed - set(self.links):
            raise InvalidInput(f"hardware {self.name} has no links {sorted(missing)}; it must have {sorted(needed)}")
        if self.shared and self.host_bytes is not None:
            raise InvalidInput("hardware of kind cpu has host_bytes; its RAM is device_bytes, set host_bytes to null")
        for lane, others in self.crosstalk.items():
            for other, share in others.items():
                if lane not in lanes or other not in lanes:
                    raise InvalidInput(f"crosstalk {shown(lane)} {shown(other)} is {shown(share)}; it must be between"
                                       f" lanes of {', '.join(lanes)}")  # fmt: skip

    @property
    def shared(self) -> bool:
        """Return whether host and device are one memory."""
        return self.kind == "cpu"

    @property
    def gpu(self) -> bool:
        """Return whether the device computes without the processor."""
        return self.kind == "cuda"

    @cached_property
    def capacity(self) -> Capacity:
        return Capacity(self.device_bytes, self.host_bytes, self.disk_bytes, self.shared, not self.shared,
                        self.more_disks, self.workers, self.filed, turns=self.engines)  # fmt: skip

    def with_capacity(self, capacity: Capacity) -> "Hardware":
        """Return the same rates with these capacities. The machine has rates for all places of the capacity."""
        host = None if capacity.shared else capacity.host
        return replace(self, device_bytes=capacity.device, host_bytes=host, disk_bytes=capacity.disk,
                       more_disks=capacity.more_disks, workers=capacity.workers, filed=capacity.filed)  # fmt: skip

    @property
    def places(self) -> tuple[Place, ...]:
        """Return all places, from near to far."""
        return self.capacity.places

    @property
    def lanes(self) -> tuple[str, ...]:
        """Return all lanes."""
        workers = workers_of(self.places)
        further = (*further_disks(self.places), *workers)
        disks = tuple(lane for place in further for lane in place.lanes)
        links = () if self.shared else tuple(lane for place in further for lane in place.links)
        attention = tuple(lane for worker in workers for lane in worker.attention)
        return LANES[:2] + disks + LANES[2:4] + links + LANES[4:] + attention

    def price(self, works: bool) -> float:
        """Return the price of all places. works: whether attention workers are among them."""
        return sum(self.prices.get(place, 0.0) for place in self.places if works or not place.worker)

    def link_seconds(self, lane: str, nbytes: Any, transfer: float, weights: bool = False) -> Any:
        """Return the seconds of nbytes (a float or an array) on a lane.

        Args:
            transfer: bytes of one transfer.
            weights: whether the bytes are weights.
        """
        rates = self.weight_rates(lane) if weights else self.lane_rates(lane)
        return nbytes / at(rates, max(transfer, 1.0))

    def lane_rates(self, lane: str) -> Table:
        """Return the rates of a lane's link. Without a GPU, the rates of h2d hold for both directions."""
        known = lane_of(lane)
        if known.of_worker and known.place and (rate := self.worker_links.get(known.place)) is not None:
            return ((1.0, rate),)
        return self.links.get(known.link, self.links["h2d"])

    def weight_rates(self, lane: str) -> Table:
        """Return the rates at which a lane moves weights. The first disk's lane reads the checkpoint's files."""
        return self.checkpoint_read if lane == "disk_read" else self.lane_rates(lane)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as in a hardware file."""
        return asdict(self)

    @staticmethod
    def from_json(values: object, what: str) -> "Hardware":
        """Return hardware with these fields. Raise InvalidInput that names `what` and the wrong field."""
        return read(Hardware, values, what)

    @staticmethod
    def load(path: str | Path) -> "Hardware":
        """Read a hardware file, or a shipped one by its name. Raise InvalidInput that names the file and the error."""
        return load(Hardware, path, "hardware file", "hardware")
