"""A machine in numbers: what it can hold, how fast bytes cross each link, how fast each kernel computes.

Measured (`flexengine.measure`) or written by hand, as JSON, to plan for a machine one does not have.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexengine.config import from_fields, read_object, shown
from flexengine.errors import InvalidInput
from flexengine.places import MOST_DISKS, TIERS, is_disk, place_names
from flexengine.plan.capacity import Capacity

KINDS = ("cpu", "cuda", "sim")
STREAMING = ("device", "disk_read", "wake")
LEAST, MOST = 1e-30, 1e30  # of any number: what machines have, so that seconds made of them stay finite
MOST_SLOWED = 2.0  # seconds that one second of a lane may add to another, or waiting to a layer
ATTENTION = ("decode", "host", "prompt", "continued", "call")
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


@dataclass(frozen=True)
class Hardware:
    """One machine. Tables are points (x, y) with rising x; every number is positive.

    kind: cpu (RAM is the device tier), cuda or sim (a device behind links; disk and device meet in host staging).
    device_bytes, host_bytes, disk_bytes: what may be used of each; None is no limit. On cpu host_bytes is None: the
        host is the device's RAM.
    more_disks: bytes that may be used of each further offload directory, in order; None is no limit.
    links: per lane (bytes of one transfer, bytes per second): disk_read and disk_write of the offload directory, h2d
        and d2h; on cpu h2d is what brings 16-bit weights from RAM into a slot. disk2_read and disk2_write are those of
        the second offload directory, and so on.
    checkpoint_read: (bytes of one transfer, bytes per second) of the model's own files.
    products: by dtype a matrix is held in, (rows of activations, FLOP per second) of a matrix product.
    prompt_attention: (tokens of the prompt, FLOP per second) of causal attention, 2 per multiply-add of what is seen.
    decode_attention: (cached tokens of a sequence, bytes of KV per second) on the device, as fast as memory allows.
    host_attention: bytes of KV per second where the KV lies in host RAM; 0 if not known.
    vector_flops, host_flops: FLOP per second of decode attention and of dequantizing where memory does not limit them,
        on the device and on the host; 0 if not known.
    attention: measured for the shape of a model's attention (`ModelFacts.attention_signature`), in place of the five
        fields above. decode, host: (cached tokens of a sequence, bytes of KV per second); prompt: (tokens of a prompt,
        FLOP per second); continued: (tokens cached before, FLOP per second) of a further piece of a prompt; call:
        [[1, seconds]] of one call of attention with almost nothing to read.
    elementwise: bytes per second of what norms, activations and residuals read and write.
    cell_seconds: fixed cost of one layer of one gpu_batch; task_seconds: of handing one task to its lane.
    sweep_seconds, sequence_seconds: bookkeeping of a sweep, and of one sequence in it.
    crosstalk: lane to lane: seconds that each busy second of the second adds to the first (they share cores or memory).
    layers: by signature of a model's layer (`ModelFacts.signature`), (tokens of a gpu_batch, seconds) of one layer
        without its attention. heads: by signature of the output projection, (rows, seconds) of logits and tokens.
    streaming: by signature of a model's first layer, what streaming its weights from the checkpoint and computing do
        to each other, in place of crosstalk: "device", seconds that each second of disk_read adds to the device;
        "disk_read", the other way round; "wake", seconds a layer takes longer if the device has waited for its weights.
    delegation: by signature of a model's first layer, seconds that a layer of a gpu_batch takes longer if its attention
        is delegated, beside that attention; `task_seconds` where it was not measured.
    touch: bytes per second of RAM that is written to for the first time; touch_busy: the same while the processor
        computes, as a job does when its KV cache fills; 0 if not known.
    measured: False for what was written by hand.
    corrected: by lane of a link, or signature of a layer or head, how many times as long as was measured its figures
        say that it takes, since jobs have shown that it does.
    """

    name: str
    kind: str
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes: int | None
    links: Mapping[str, Table]
    checkpoint_read: Table
    products: Mapping[str, Table]
    prompt_attention: Table
    decode_attention: Table
    elementwise: float
    host_attention: float = 0.0
    vector_flops: float = 0.0
    host_flops: float = 0.0
    cell_seconds: float = 0.0
    task_seconds: float = 0.0
    sweep_seconds: float = 0.0
    sequence_seconds: float = 0.0
    crosstalk: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    layers: Mapping[str, Table] = field(default_factory=dict)
    heads: Mapping[str, Table] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, Table]] = field(default_factory=dict)
    streaming: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    delegation: Mapping[str, float] = field(default_factory=dict)
    touch: float = 0.0
    touch_busy: float = 0.0
    measured: bool = False
    more_disks: tuple[int | None, ...] = ()
    corrected: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"hardware kind is {shown(self.kind)}; it must be one of {', '.join(KINDS)}")
        for name in ("checkpoint_read", "prompt_attention", "decode_attention"):
            object.__setattr__(self, name, _table(name, getattr(self, name)))
        for name in ("links", "products", "layers", "heads"):
            tables = _object(name, getattr(self, name))
            object.__setattr__(self, name, {key: _table(f"{name} {key}", value) for key, value in tables.items()})
        object.__setattr__(self, "attention", _attention(self.attention))
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            object.__setattr__(self, name, _size(name, getattr(self, name)))
        object.__setattr__(self, "more_disks", _sizes("more_disks", self.more_disks))
        for name, factor in _object("corrected", self.corrected).items():
            _positive(f"corrected {name}", factor)
        for name, lost in _object("delegation", self.delegation).items():
            _known(f"delegation {name}", lost)
        _positive("elementwise", self.elementwise)
        seconds = ("cell_seconds", "task_seconds", "sweep_seconds", "sequence_seconds")
        for name in ("host_attention", "vector_flops", "host_flops", *seconds, "touch", "touch_busy"):
            _known(name, getattr(self, name))
        if not (isinstance(self.name, str) and self.name.isprintable() and isinstance(self.measured, bool)):
            raise InvalidInput(f"name is {shown(self.name)} and measured {shown(self.measured)}; they must be"
                               " printable text and true or false")  # fmt: skip
        if not self.products:
            raise InvalidInput("products is empty; it must have a rate for one dtype at least, such as float16")
        self._check_lanes()

    def _check_lanes(self) -> None:
        lanes = self.lanes
        needed = {"h2d"} | (set() if self.shared else {"d2h"})
        needed |= {f"{disk}_{way}" for disk in self.places if is_disk(disk) for way in ("read", "write")}
        if unknown := set(self.links) - needed - {"d2h"}:
            raise InvalidInput(f"hardware {self.name} has links {sorted(unknown)}; they must be among"
                               f" {', '.join(sorted(needed | {'d2h'}))}")  # fmt: skip
        if missing := needed - set(self.links):
            raise InvalidInput(f"hardware {self.name} has no links {sorted(missing)}; it must have {sorted(needed)}")
        if self.shared and self.host_bytes is not None:
            raise InvalidInput("hardware of kind cpu has host_bytes; its RAM is device_bytes, set host_bytes to null")
        for lane, others in _object("crosstalk", self.crosstalk).items():
            for other, share in _object(f"crosstalk {lane}", others).items():
                known = lane in lanes and other in lanes
                if not known or not 0 <= _number(f"crosstalk {lane}", share) <= MOST_SLOWED:
                    raise InvalidInput(f"crosstalk {shown(lane)} {shown(other)} is {shown(share)};"
                                       f" it must be 0 to {MOST_SLOWED:g}, between lanes of {', '.join(lanes)}")

        for name, figures in _object("streaming", self.streaming).items():
            if set(_object(f"streaming {name}", figures)) != set(STREAMING):
                raise InvalidInput(f"streaming {shown(name)} is {shown(figures)}; it must have {', '.join(STREAMING)}")
            for what, figure in figures.items():
                if not 0 <= _number(f"streaming {what}", figure) <= MOST_SLOWED:
                    raise InvalidInput(f"streaming {shown(name)} {what} is {shown(figure)};"
                                       f" it must be 0 to {MOST_SLOWED:g}")  # fmt: skip

    @property
    def shared(self) -> bool:
        """Whether host and device are one memory."""
        return self.kind == "cpu"

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.device_bytes, self.host_bytes, self.disk_bytes, self.shared, not self.shared,
                        self.more_disks)  # fmt: skip

    def with_capacity(self, capacity: Capacity) -> "Hardware":
        """Return the same rates with these capacities. The machine has rates for all places of the capacity."""
        host = None if capacity.shared else capacity.host
        return replace(self, device_bytes=capacity.device, host_bytes=host, disk_bytes=capacity.disk,
                       more_disks=capacity.more_disks)  # fmt: skip

    @property
    def places(self) -> tuple[str, ...]:
        """Return all places, from near to far."""
        return place_names(1 + len(self.more_disks))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Return all lanes."""
        disks = tuple(f"{disk}_{way}" for disk in self.places[len(TIERS) :] for way in ("read", "write"))
        return LANES[:2] + disks + LANES[2:]

    def link_seconds(self, lane: str, nbytes: Any, transfer: float) -> Any:
        """Return the seconds of nbytes (a float or an array) on a lane in transfers of `transfer` bytes."""
        return nbytes / at(self.links[lane], max(transfer, 1.0))

    def to_json(self) -> dict[str, Any]:
        """The fields as they stand in a hardware file."""
        return asdict(self)

    @staticmethod
    def from_json(values: object, what: str) -> "Hardware":
        """The record of these fields. Raises InvalidInput naming `what` and the field that is wrong."""
        if not isinstance(values, dict):
            raise InvalidInput(f"{what} holds {type(values).__name__}, not an object of hardware fields")
        required = {f.name for f in fields(Hardware)} - {f.name for f in fields(Hardware) if _has_default(f)}
        if missing := required - set(values):
            raise InvalidInput(f"{what} lacks {sorted(missing)}")
        try:
            hardware = from_fields(Hardware, values, what)
        except (InvalidInput, TypeError) as error:
            raise InvalidInput(f"{what}: {str(error).removeprefix(what).lstrip()}") from error
        assert isinstance(hardware, Hardware)
        return hardware

    @staticmethod
    def load(path: str | Path) -> "Hardware":
        """Reads a hardware file. Raises InvalidInput naming the file and what is wrong with it."""
        return Hardware.from_json(read_object(path, "hardware file"), f"hardware file {path}")


def _has_default(f: Any) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name} is {shown(value)}; it must be an object")
    return value


def _number(name: str, value: object) -> float:
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # whole numbers know no limit
            number = float(value)
    if not math.isfinite(number):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a number")
    return number


def _positive(name: str, value: object) -> float:
    if (number := _number(name, value)) <= 0:
        raise InvalidInput(f"{name} is {shown(value)}; it must be positive")
    if not LEAST <= number <= MOST:
        raise InvalidInput(f"{name} is {shown(value)}; it must be {LEAST:g} to {MOST:g}, in bytes, FLOP and seconds")
    return number


def _known(name: str, value: object) -> None:
    """Raise InvalidInput unless a number is positive or 0, which for rates means that they are not known."""
    if _number(name, value) != 0:
        _positive(name, value)


def _size(name: str, size: object) -> int | None:
    """Return checked bytes; None is no limit."""
    if size is None:
        return None
    if (number := _positive(name, size)) < 1:
        raise InvalidInput(f"{name} is {shown(size)}; it must be at least 1 byte, or null for no limit")
    return int(size) if isinstance(size, int) else int(number)


def _sizes(name: str, value: object) -> tuple[int | None, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) >= MOST_DISKS:
        raise InvalidInput(f"{name} is {shown(value)}; it must be a list of bytes, at most {MOST_DISKS - 1} of them")
    return tuple(_size(f"{name} {number}", size) for number, size in enumerate(value))


def _attention(value: object) -> dict[str, dict[str, Table]]:
    """Return the checked tables of `Hardware.attention`."""
    found = {}
    for shape, tables in _object("attention", value).items():
        given = _object(f"attention {shape}", tables)
        if unknown := set(given) - set(ATTENTION):
            raise InvalidInput(f"attention {shown(shape)} has {sorted(unknown)}; it may have {', '.join(ATTENTION)}")
        found[shape] = {what: _table(f"attention {shape} {what}", table) for what, table in given.items()}
    return found


def _table(name: str, value: object) -> Table:
    """Checked points. A plain number means the same everywhere."""
    if isinstance(value, (int, float)):
        return ((1.0, _positive(name, value)),)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidInput(f"{name} is {shown(value)}; it must be a list of points [x, y]")
    points = []
    for point in value:
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            raise InvalidInput(f"{name} holds {shown(point)}; it must hold points [x, y]")
        points.append((_positive(name, point[0]), _positive(name, point[1])))
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise InvalidInput(f"{name} is {shown(value)}; x must rise from point to point")
    return tuple(points)
