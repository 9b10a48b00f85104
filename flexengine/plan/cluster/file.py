"""The cluster file, which has devices with memory and rates, and links, and the file of harm (docs/cluster.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from flexengine.config import parse_size
from flexengine.errors import InvalidInput, bracketed, shown
from flexengine.plan.cluster.devices import PHASES, Cluster, Device, HandRates, Link, MachineRates, Profiled, fit
from flexengine.plan.cluster.job import Format, Harm
from flexengine.plan.hardware import KINDS, Hardware, IfKnown, Rate, at, positive
from flexengine.plan.stages import BITS
from flexengine.records import Limit, known_fields, printable, read, read_object

MOST_DEVICES = 64
MOST_COUNT = 10**9  # sequences or tokens of a measured layer
EXACT_NAME = "exact"  # of the format None in a file
FORMATS: dict[str, Format] = {form or EXACT_NAME: form for form in BITS}
# Each of these fields says how fast a device is, with further fields; a device has one of them.
_RATES = {"hardware": (), "flops": ("bandwidth", "layer_seconds"), "profile": ("head_seconds",)}
_TRANSFER = 1 << 24  # bytes of one transfer of weights from host to device
Find = Callable[[str], str]


def _by_format(name: str, value: Any) -> dict[Format, float]:
    """Return a rate by format. A plain number holds for all formats."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(BITS, positive(name, value))
    if unknown := sorted(set(value) - set(FORMATS)):
        raise InvalidInput(f"{name} has {bracketed(unknown)}; formats are {', '.join(FORMATS)}")
    if not value:
        raise InvalidInput(f"{name} is empty; give a number, or one for each format")
    return {FORMATS[form]: positive(f"{name} {form}", rate) for form, rate in value.items()}


_Size = Annotated[int | None, lambda name, value: parse_size(value, name)]
_ByFormat = Annotated[Mapping[Format, float] | None, _by_format]
_Count = Annotated[float, Limit(1, MOST_COUNT)]


@dataclass(frozen=True)
class _MeasuredLayer:
    format: Annotated[str, FORMATS]
    phase: Annotated[str, PHASES]
    batch: _Count
    tokens: _Count
    seconds: Rate


@dataclass(frozen=True)
class _TypeFields:
    """Fields of a type of devices; a device may have them, too."""

    memory: _Size = None
    host_memory: _Size = None
    host_link: Rate | None = None
    kind: Annotated[str | None, KINDS] = None
    hardware: str | None = None
    flops: _ByFormat = None
    bandwidth: _ByFormat = None
    layer_seconds: IfKnown | None = None
    profile: Annotated[tuple[_MeasuredLayer, ...] | None, Limit(1), "a list of measured layers"] = None
    head_seconds: IfKnown | None = None


@dataclass(frozen=True, kw_only=True)
class _DeviceFields(_TypeFields):
    type: str
    name: Annotated[str, printable]
    node: Annotated[str, "the name of a machine"] = ""
    count: Annotated[int, Limit(1, MOST_DEVICES)] = 1


@dataclass(frozen=True)
class _PairFields(Link):
    devices: Annotated[tuple[str, ...], "two names of devices"] = field(kw_only=True)


@dataclass(frozen=True)
class _LinkFields:
    within: Link | None = None
    between: Link | None = None
    pairs: tuple[_PairFields, ...] = ()


@dataclass(frozen=True)
class _FileFields:
    devices: Annotated[tuple[Mapping[str, Any], ...], Limit(1), "a list of at least one device"]
    types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    links: _LinkFields | None = None
    name: Annotated[str, printable] = "cluster"


_Harms = Annotated[tuple[Mapping[str, IfKnown | None], ...], "a list with an object of formats for each layer"]
INDICATORS = {"measured": "layers", "variance": "variance"}  # fields of a file of harm


@dataclass(frozen=True)
class _HarmFields:
    layers: _Harms
    variance: _Harms | None = None
    model: str | None = None  # for readers


def load(path: str | Path, find: Find = str) -> Cluster:
    """Read a cluster file.

    Args:
        path: the file.
        find: returns the path of a hardware file that the cluster file names.

    Raises:
        InvalidInput: the file has no cluster; the message names the device, the field, its value and what is allowed.
    """
    return from_json(read_object(path, "cluster file"), f"cluster file {path}", find)


def from_json(values: Mapping[str, Any], what: str, find: Find = str) -> Cluster:
    """Return the cluster with these fields. what: origin of the fields, for messages; the rest as for `load`."""
    given = read(_FileFields, values, what)
    for name, own in given.types.items():
        known_fields(own, [f.name for f in fields(_TypeFields)], f"{what}, type {name}")
    devices = [one for number, own in enumerate(given.devices, 1) for one in _devices(own, given, number, what, find)]
    if len(devices) > MOST_DEVICES:
        raise InvalidInput(f"{what} has {len(devices)} devices; there may be {MOST_DEVICES} at most")
    names = [device.name for device in devices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"{what} has two devices {twice}; give each a name of its own")
    return Cluster(given.name, tuple(devices), *_links(given.links, names, what))


def _devices(own: Mapping[str, Any], file: _FileFields, number: int, what: str, find: Find) -> list[Device]:
    """Return the devices of one entry of `devices`; several if it has a count."""
    named = "name" if "name" in own and "type" not in own else "type"
    kind = own.get(named)
    if not (isinstance(kind, str) and kind):
        raise InvalidInput(f"{what}, device {number}: {named} is {shown(kind)}; give the device a name or a type, as"
                           " text")  # fmt: skip
    given = {"name": kind, **file.types.get(kind, {}), **own, "type": kind}
    label = f"{what}, device {given['name']}"
    untyped = "type" not in own or not file.types or kind in file.types
    if not untyped and not own.keys() & {f.name for f in fields(_TypeFields)}:
        raise InvalidInput(f"{label}: type is {shown(kind)}; types has {', '.join(file.types)}")
    entry = read(_DeviceFields, given, label)
    device = _device(entry, label, find)
    names = [entry.name] if entry.count == 1 else [f"{entry.name}-{k + 1}" for k in range(entry.count)]
    return [replace(device, name=one) for one in names]


def _device(entry: _DeviceFields, label: str, find: Find) -> Device:
    given = [rate for rate in _RATES if getattr(entry, rate) is not None]
    if len(given) != 1:
        fault = f"has {' and '.join(given)}" if given else "has no rates"
        raise InvalidInput(f"{label} {fault}; give one of hardware (a hardware file), flops with bandwidth, or profile"
                           " (seconds of layers)")  # fmt: skip
    for rate, names in _RATES.items():
        unused = [name for name in names if getattr(entry, name) is not None]
        if unused and rate not in given:
            raise InvalidInput(f"{label} has {unused[0]}, which goes with {rate}, but its rates are {given[0]}; remove"
                               f" {unused[0]}")  # fmt: skip
    hardware = Hardware.load(find(entry.hardware)) if entry.hardware is not None else None
    memory = entry.memory or (hardware.device_bytes if hardware else None)
    if memory is None:
        raise InvalidInput(f"{label} has no memory; give the bytes that a stage may use, such as 14GiB")
    apart = hardware if hardware and not hardware.shared else None
    host = entry.host_memory or (apart.host_bytes if apart else None)
    link = entry.host_link or (at(apart.links["h2d"], _TRANSFER) if apart else 0.0)
    if host and not link:
        raise InvalidInput(f"{label} has host_memory, but no host_link; give the bytes per second from host to device")
    if entry.host_link and not host:
        raise InvalidInput(f"{label} has host_link, but no host_memory; give the bytes of host RAM for weights")
    kind = entry.kind or (hardware.kind if hardware else "cuda")
    if hardware and kind != hardware.kind:
        raise InvalidInput(f"{label}: kind is {shown(kind)}; it must be {hardware.kind}")
    return Device(entry.name, entry.type, memory, _latency(entry, hardware, label), kind, entry.node, host or 0, link)


def _latency(entry: _DeviceFields, hardware: Hardware | None, label: str) -> MachineRates | Profiled | HandRates:
    if hardware is not None:
        return MachineRates(hardware)
    if entry.profile is not None:
        return Profiled(_fitted(entry.profile, label), entry.head_seconds or 0.0)
    if entry.flops is None or entry.bandwidth is None:
        raise InvalidInput(f"{label} has flops, but no bandwidth; give the bytes per second of its memory")
    return HandRates(entry.flops, entry.bandwidth, entry.layer_seconds or 0.0)


def _fitted(profile: Sequence[_MeasuredLayer], label: str) -> dict[tuple[Format, str], Any]:
    """Return the regressions of measured layers."""
    points: dict[tuple[Format, str], list[tuple[float, float, float]]] = {}
    for one in profile:
        points.setdefault((FORMATS[one.format], one.phase), []).append((one.batch, one.tokens, one.seconds))
    for form in {form for form, _ in points}:
        if missing := [phase for phase in PHASES if (form, phase) not in points]:
            raise InvalidInput(f"{label}: profile has no {missing[0]} of {form or EXACT_NAME} layers; measure both"
                               " phases")  # fmt: skip
    try:
        return {key: fit(key[1], found) for key, found in points.items()}
    except InvalidInput as error:
        raise InvalidInput(f"{label}: {error}") from error


def _links(given: _LinkFields | None, names: list[str], what: str) -> tuple[Link, Link, dict[frozenset[str], Link]]:
    """Return the links within nodes, between nodes, and of pairs."""
    if given is None:
        if len(names) > 1:
            raise InvalidInput(f"{what} has {len(names)} devices, but no links; give links with within, for devices of"
                               " one node")  # fmt: skip
        return Link(float("inf")), Link(float("inf")), {}
    within = given.within or given.between
    if within is None:
        raise InvalidInput(f"{what}, links has neither within nor between; give the link of devices of one node")
    pairs: dict[frozenset[str], Link] = {}
    for number, pair in enumerate(given.pairs, 1):
        ends, fault = list(pair.devices), f"{what}, links pair {number}: devices is {shown(list(pair.devices))}"
        if not (len(ends) == 2 and all(end in names for end in ends) and ends[0] != ends[1]):
            raise InvalidInput(f"{fault}; it must be two of {', '.join(names)}")
        if frozenset(ends) in pairs:
            raise InvalidInput(f"{fault}, which an earlier pair has; leave out one of them")
        pairs[frozenset(ends)] = Link(pair.bandwidth, pair.latency)
    return within, given.between or within, pairs


def load_harm(path: str | Path, layers: int, formats: Sequence[Format], indicator: str = "measured") -> Harm:
    """Read a table of harm of formats to quality, by layer (LLM-PQ's omega).

    The file is {"layers": [{"exact": 0, "int8": x, "int4": y, "int3": z}, ...]} with one object per layer; "exact" may
    be left out. "variance" may be a second such list. The unit is free: theta is seconds per unit.

    Args:
        indicator: which list is read, a key of INDICATORS.

    Raises:
        InvalidInput: the file has no table for a model of so many layers with these formats.
    """
    what = f"harm file {path}"
    table = getattr(read(_HarmFields, read_object(path, "harm file"), what), INDICATORS[indicator])
    if table is None:
        raise InvalidInput(f"{what} has no {indicator}; flexengine quality --harm FILE writes a file that has it")
    what += "" if indicator == "measured" else f", {indicator}"
    if len(table) != layers:
        raise InvalidInput(f"{what} has {len(table)} layers, but the model has {layers}; make it for this model")
    for j, row in enumerate(table):
        known_fields(row, FORMATS, f"{what}, layer {j}")
        if missing := [form for form in formats if form and row.get(form) is None]:
            raise InvalidInput(f"{what}, layer {j} has no harm of {missing[0]}; give it, or do not allow {missing[0]}")
    return np.array([[row.get(form or EXACT_NAME) or 0.0 for form in formats] for row in table])
