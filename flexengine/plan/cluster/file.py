"""The cluster file: devices with memory and rates, and links, as JSON (docs/cluster.md)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexengine.config import parse_size, read_object, shown
from flexengine.errors import InvalidInput
from flexengine.plan.cluster.devices import Cluster, Device, Link
from flexengine.plan.cluster.latency import PHASES, HandRates, Latency, Machine, Profiled
from flexengine.plan.cluster.model import Format
from flexengine.plan.cluster.regression import fit
from flexengine.plan.hardware import KINDS, Hardware, at, positive
from flexengine.strategy import BITS

MOST_DEVICES = 64
MOST_COUNT = 10**9  # sequences or tokens of a measured layer
EXACT_NAME = "exact"  # of the format None in a file
FORMATS: dict[str, Format] = {form or EXACT_NAME: form for form in BITS}
_FILE = {"name", "types", "devices", "links"}
_OF_TYPE = {"memory", "host_memory", "host_link", "kind", "hardware", "flops", "bandwidth", "layer_seconds", "profile",
            "head_seconds"}  # fmt: skip
_OF_DEVICE = {"name", "type", "node", "count"} | _OF_TYPE
_RATES = ("hardware", "flops", "profile")  # each says how fast a device is; a device has one of them
_LINKS = {"within", "between", "pairs"}
_TRANSFER = 1 << 24  # bytes of one transfer of weights from host to device
Find = Callable[[str], str]


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
    _known(values, _FILE, what)
    types = _object(values.get("types", {}), f"{what}, types")
    for name, fields in types.items():
        _known(_object(fields, f"{what}, type {name}"), _OF_TYPE, f"{what}, type {name}")
    given = values.get("devices")
    if not isinstance(given, list) or not given:
        raise InvalidInput(f"{what}: devices is {shown(given)}; it must be a list of at least one device")
    devices: list[Device] = []
    for number, fields in enumerate(given):
        devices += _devices(_object(fields, f"{what}, device {number + 1}"), types, number, what, find)
    if len(devices) > MOST_DEVICES:
        raise InvalidInput(f"{what} has {len(devices)} devices; there may be {MOST_DEVICES} at most")
    names = [device.name for device in devices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"{what} has two devices {twice}; give each a name of its own")
    within, between, pairs = _links(values, names, what)
    name = values.get("name", "cluster")
    if not (isinstance(name, str) and name and name.isprintable()):
        raise InvalidInput(f"{what}: name is {shown(name)}; it must be printable text")
    return Cluster(name, tuple(devices), within, between, pairs)


def _devices(
    fields: Mapping[str, Any], types: Mapping[str, Any], number: int, what: str, find: Find
) -> list[Device]:  # fmt: skip
    """Return the devices of one entry of `devices`; several if it has a count."""
    field = "name" if "name" in fields and "type" not in fields else "type"
    kind = fields.get(field)
    if not (isinstance(kind, str) and kind):
        raise InvalidInput(f"{what}, device {number + 1}: {field} is {shown(kind)}; give the device a name or a type,"
                           " as text")  # fmt: skip
    name, count = fields.get("name", kind), fields.get("count", 1)
    label = f"{what}, device {name}"
    _known(fields, _OF_DEVICE, label)
    if "type" in fields and types and kind not in types and not _OF_TYPE & set(fields):
        raise InvalidInput(f"{label}: type is {shown(kind)}; types has {', '.join(types)}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
        raise InvalidInput(f"{label}: count is {shown(count)}; it must be a whole number from 1 to {MOST_DEVICES}")
    if not (isinstance(name, str) and name and name.isprintable()):
        raise InvalidInput(f"{label}: name is {shown(name)}; it must be printable text")
    single = count == 1
    device = _device(name, kind, {**types.get(kind, {}), **fields}, label, find)
    names = [name] if single else [f"{name}-{k + 1}" for k in range(count)]
    return [Device(**{**vars(device), "name": one}) for one in names]


def _device(name: str, kind: str, fields: Mapping[str, Any], label: str, find: Find) -> Device:
    """Return one device. fields: of the device and its type."""
    given = [rate for rate in _RATES if fields.get(rate) is not None]
    if len(given) != 1:
        fault = f"has {' and '.join(given)}" if given else "has no rates"
        raise InvalidInput(f"{label} {fault}; give one of hardware (a hardware file), flops with bandwidth, or profile"
                           " (seconds of layers)")  # fmt: skip
    hardware = Hardware.load(find(str(fields["hardware"]))) if given == ["hardware"] else None
    only = {"flops": {"bandwidth", "layer_seconds"}, "profile": {"head_seconds"}, "hardware": set[str]()}
    for rate, names in only.items():
        if rate not in given and (unused := sorted(n for n in names if fields.get(n) is not None)):
            raise InvalidInput(f"{label} has {unused[0]}, which goes with {rate}, but its rates are {given[0]}; remove"
                               f" {unused[0]}")  # fmt: skip
    memory = _size(fields, "memory", label, hardware.device_bytes if hardware else None)
    if memory is None:
        raise InvalidInput(f"{label} has no memory; give the bytes that a stage may use, such as 14GiB")
    host = _size(fields, "host_memory", label, hardware.host_bytes if hardware and not hardware.shared else None)
    link = at(hardware.links["h2d"], _TRANSFER) if hardware and not hardware.shared else 0.0
    link = positive(f"{label}: host_link", fields["host_link"]) if "host_link" in fields else link
    if host and not link:
        raise InvalidInput(f"{label} has host_memory, but no host_link; give the bytes per second from host to device")
    if "host_link" in fields and not host:
        raise InvalidInput(f"{label} has host_link, but no host_memory; give the bytes of host RAM for weights")
    machine = fields.get("kind", hardware.kind if hardware else "cuda")
    if machine not in KINDS or (hardware and machine != hardware.kind):
        allowed = hardware.kind if hardware else ", ".join(KINDS)
        raise InvalidInput(f"{label}: kind is {shown(machine)}; it must be {allowed}")
    node = fields.get("node", "")
    if not isinstance(node, str):
        raise InvalidInput(f"{label}: node is {shown(node)}; it must be the name of a machine")
    return Device(name, kind, memory, _latency(given[0], fields, hardware, label), machine, node, host or 0, link)


def _latency(rate: str, fields: Mapping[str, Any], hardware: Hardware | None, label: str) -> Latency:
    if hardware is not None:
        return Machine(hardware)
    if rate == "profile":
        seconds = fields.get("head_seconds", 0.0)
        return Profiled(_profile(fields["profile"], label), seconds and positive(f"{label}: head_seconds", seconds))
    if fields.get("bandwidth") is None:
        raise InvalidInput(f"{label} has flops, but no bandwidth; give the bytes per second of its memory")
    fixed = fields.get("layer_seconds", 0.0)
    flops = _by_format(fields["flops"], f"{label}: flops")
    bandwidth = _by_format(fields["bandwidth"], f"{label}: bandwidth")
    return HandRates(flops, bandwidth, fixed and positive(f"{label}: layer_seconds", fixed))


def _by_format(value: object, label: str) -> dict[Format, float]:
    """Return a rate by format. A plain number holds for all formats."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(BITS, positive(label, value))
    if unknown := sorted(set(value) - set(FORMATS)):
        raise InvalidInput(f"{label} has {unknown}; formats are {', '.join(FORMATS)}")
    if not value:
        raise InvalidInput(f"{label} is empty; give a number, or one for each format")
    return {FORMATS[name]: positive(f"{label} {name}", rate) for name, rate in value.items()}


def _profile(value: object, label: str) -> dict[tuple[Format, str], Any]:
    """Return the regressions of measured layers."""
    if not isinstance(value, list) or not value:
        raise InvalidInput(f"{label}: profile is {shown(value)}; it must be a list of measured layers")
    points: dict[tuple[Format, str], list[tuple[float, float, float]]] = {}
    names = {"format", "phase", "batch", "tokens", "seconds"}
    for number, entry in enumerate(value):
        where = f"{label}, profile entry {number + 1}"
        fields = _object(entry, where)
        if set(fields) != names:
            raise InvalidInput(f"{where} has fields {sorted(fields)}; it must have {sorted(names)}")
        if fields["format"] not in FORMATS or fields["phase"] not in PHASES:
            raise InvalidInput(f"{where} has format {shown(fields['format'])} and phase {shown(fields['phase'])};"
                               f" formats are {', '.join(FORMATS)}, phases {' and '.join(PHASES)}")  # fmt: skip
        numbers = tuple(positive(f"{where}: {name}", fields[name]) for name in ("batch", "tokens", "seconds"))
        for name, count in zip(("batch", "tokens"), numbers, strict=False):
            if not 1 <= count <= MOST_COUNT:
                raise InvalidInput(f"{where}: {name} is {shown(count)}; it must be 1 to {MOST_COUNT:,}")
        points.setdefault((FORMATS[fields["format"]], fields["phase"]), []).append(numbers)  # type: ignore[arg-type]
    for form in {form for form, _ in points}:
        if missing := [phase for phase in PHASES if (form, phase) not in points]:
            raise InvalidInput(f"{label}: profile has no {missing[0]} of {form or EXACT_NAME} layers; measure both"
                               " phases")  # fmt: skip
    try:
        return {key: fit(key[1], found) for key, found in points.items()}
    except InvalidInput as error:
        raise InvalidInput(f"{label}: {error}") from error


def _links(values: Mapping[str, Any], names: list[str], what: str) -> tuple[Link, Link, dict[frozenset[str], Link]]:
    """Return the links within nodes, between nodes, and of pairs."""
    given = values.get("links")
    if given is None:
        if len(names) > 1:
            raise InvalidInput(f"{what} has {len(names)} devices, but no links; give links with within, for devices of"
                               " one node")  # fmt: skip
        return Link(float("inf")), Link(float("inf")), {}
    fields = _object(given, f"{what}, links")
    _known(fields, _LINKS, f"{what}, links")
    if "within" not in fields and "between" not in fields:
        raise InvalidInput(f"{what}, links has neither within nor between; give the link of devices of one node")
    within = _link(fields.get("within", fields.get("between")), f"{what}, links within")
    between = _link(fields["between"], f"{what}, links between") if "between" in fields else within
    pairs: dict[frozenset[str], Link] = {}
    entries = fields.get("pairs", [])
    if not isinstance(entries, list):
        raise InvalidInput(f"{what}, links pairs is {shown(entries)}; it must be a list")
    for number, entry in enumerate(entries):
        where = f"{what}, links pair {number + 1}"
        pair = dict(_object(entry, where))
        ends = pair.pop("devices", None)
        if not (isinstance(ends, list) and len(ends) == 2 and all(end in names for end in ends) and ends[0] != ends[1]):
            raise InvalidInput(f"{where}: devices is {shown(ends)}; it must be two of {', '.join(names)}")
        if frozenset(ends) in pairs:
            raise InvalidInput(f"{where}: devices is {shown(ends)}, which an earlier pair has; leave out one of them")
        pairs[frozenset(ends)] = _link(pair, where)
    return within, between, pairs


def _link(value: object, label: str) -> Link:
    fields = _object(value, label)
    _known(fields, {"bandwidth", "latency"}, label)
    if "bandwidth" not in fields:
        raise InvalidInput(f"{label} has no bandwidth; give its bytes per second")
    latency = fields.get("latency", 0.0)
    return Link(positive(f"{label}: bandwidth", fields["bandwidth"]),
                latency and positive(f"{label}: latency", latency))  # fmt: skip


def _size(fields: Mapping[str, Any], name: str, label: str, default: int | None) -> int | None:
    """Return the bytes of a field: a number, or text with a unit."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return parse_size(value, f"{label}: {name}")


def _object(value: object, label: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{label} is {shown(value)}; it must be an object of fields")
    return value


def _known(fields: Mapping[str, Any], known: set[str], label: str) -> None:
    if unknown := sorted(set(fields) - known):
        raise InvalidInput(f"{label} has unknown fields {unknown}; it takes {sorted(known)}")
