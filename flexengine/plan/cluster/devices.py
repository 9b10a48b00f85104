"""Devices of a cluster and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexengine.plan.cluster.latency import Latency
from flexengine.plan.hardware import IfKnown, Rate


@dataclass(frozen=True)
class Link:
    """A link between two devices.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds of a message of no bytes.
    """

    bandwidth: Rate
    latency: IfKnown = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: unique in the cluster.
        type: devices of one type are alike and stay neighbours in the pipeline.
        memory: bytes that a stage may use.
        latency: seconds of layers.
        kind: as `Hardware.kind`; decides in which dtype a model is held.
        node: machine that holds the device; links within a node may be faster.
        host_memory: bytes of host RAM for weights of this device.
        host_link: bytes per second from host RAM to the device; 0 if weights cannot be on the host.
        speed: factor by which the device is faster than `latency` says.
    """

    name: str
    type: str
    memory: int
    latency: Latency
    kind: str = "cuda"
    node: str = ""
    host_memory: int = 0
    host_link: float = 0.0
    speed: float = 1.0

    @property
    def offloads(self) -> bool:
        """Return whether weights can be on the host."""
        return self.host_memory > 0 and self.host_link > 0


@dataclass(frozen=True)
class Cluster:
    """Devices and links.

    Attributes:
        name: shown in reports.
        devices: in the order of the file; names are unique.
        within, between: links of devices of one node, and of different nodes.
        pairs: links of certain pairs of device names, in place of `within` and `between`.
    """

    name: str
    devices: tuple[Device, ...]
    within: Link
    between: Link
    pairs: Mapping[frozenset[str], Link] = field(default_factory=dict)

    def link(self, a: Device, b: Device) -> Link:
        """Return the link between two devices."""
        plain = self.within if a.node == b.node else self.between
        return self.pairs.get(frozenset((a.name, b.name)), plain)

    @property
    def types(self) -> tuple[str, ...]:
        """Return the device types, in the order of their first devices."""
        return tuple(dict.fromkeys(device.type for device in self.devices))

    def of_type(self, name: str) -> tuple[Device, ...]:
        """Return the devices of a type, in the order of the file."""
        return tuple(device for device in self.devices if device.type == name)
