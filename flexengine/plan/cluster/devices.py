"""Devices of a cluster, the seconds of one layer on each, and the links between them.

`Latency` is the interface of the seconds: from rates by hand, from a fitted profile, or from a measured machine. It is
phase-aware, as in LLM-PQ (Zhao et al. 2024, section 4.1): prefill computes whole prompts, decode computes one token of
each sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flexengine.plan.cluster.model import Format, Model
from flexengine.plan.cluster.regression import Regression
from flexengine.plan.hardware import Hardware, IfKnown, Rate
from flexengine.plan.rates import Rates

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)


class Latency(Protocol):
    """Seconds of parts of a model on a device."""

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        """Return the seconds of one layer of one micro-batch; infinite if the device has no kernel for the format.

        Args:
            model: the model.
            layer: number of the layer.
            form: format of the layer's matrices.
            phase: PREFILL or DECODE.
            batch: sequences of the micro-batch.
            tokens: prompt tokens of a sequence in prefill; cached tokens of a sequence in decode.
        """

    def head(self, model: Model, rows: int) -> float:
        """Return the seconds of the logits of some sequences."""

    def fixed(self, rows: int) -> float:
        """Return the seconds of bookkeeping of one micro-batch."""


@dataclass(frozen=True)
class HandRates:
    """Rates by hand: a roofline.

    A layer takes the longer of computing its FLOP and of moving its bytes (weights, KV cache, and in prefill the hidden
    states), and `layer_seconds` more.

    Attributes:
        flops: FLOP per second of matrix products, by format; a format that is absent has no kernel.
        bandwidth: bytes per second of the device's memory while a product reads weights, by format.
        layer_seconds: fixed seconds of a layer.
    """

    flops: Mapping[Format, float]
    bandwidth: Mapping[Format, float]
    layer_seconds: float = 0.0

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        if form not in self.flops or form not in self.bandwidth:
            return float("inf")
        part, exact = model.layers[layer], self.flops.get(None, self.flops[form])
        if phase == PREFILL:
            flop, pairs = 2 * part.active * batch * tokens, batch * tokens * (tokens + 1) / 2
            moved = part.bytes[form] + batch * tokens * (part.kv_token + model.hop_bytes(2))
        else:
            flop, pairs = 2 * part.active * batch, batch * tokens
            moved = part.bytes[form] + batch * tokens * part.kv_token
        computed = flop / self.flops[form] + pairs * part.pair_flop / exact
        return max(computed, moved / self.bandwidth[form]) + self.layer_seconds

    def head(self, model: Model, rows: int) -> float:
        form = None if None in self.flops else next(iter(self.flops))
        return max(
            2 * model.head_elements * rows / self.flops[form],
            (model.head_bytes + 4 * model.vocabulary * rows) / self.bandwidth[form],
        )

    def fixed(self, rows: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Profiled:
    """Regressions over measured layers (LLM-PQ section 4.1), for the one shape of layer that was measured.

    Attributes:
        lines: by (format, phase), the fitted seconds of a layer.
        head_seconds: seconds of the logits of a micro-batch.
    """

    lines: Mapping[tuple[Format, str], Regression]
    head_seconds: float = 0.0

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        line = self.lines.get((form, phase))
        return float("inf") if line is None else line(batch, tokens)

    def head(self, model: Model, rows: int) -> float:
        return self.head_seconds

    def fixed(self, rows: int) -> float:
        return 0.0  # the measured layers include it


@dataclass(frozen=True)
class MachineRates:
    """Rates of a hardware file, measured or not, through the cost model of a single machine.

    Attributes:
        hardware: the machine.
    """

    hardware: Hardware
    _rates: dict[tuple[int, Format], tuple[object, Rates]] = field(default_factory=dict, compare=False, repr=False)

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        if form not in model.facts:
            return float("inf")
        rates = self._of(model, form)
        facts = rates.model
        window = facts.windows[layer] if facts.windows else None
        attention = rates.attention[window]
        seen, overhead = min(tokens, window) if window else tokens, attention.call + self.hardware.task_seconds
        if phase == PREFILL:
            pairs = tokens * (tokens + 1) / 2 - (tokens - seen) * (tokens - seen + 1) / 2
            attending = float(attention.prompt(batch * pairs, tokens))
            return rates.one_layer(layer, batch * tokens) + attending + overhead
        return rates.one_layer(layer, batch) + float(attention.decode(batch * seen, seen)) + overhead

    def head(self, model: Model, rows: int) -> float:
        return float(self._of(model, None).head(rows)) + self.hardware.task_seconds

    def fixed(self, rows: int) -> float:
        return self.hardware.sweep_seconds + rows * self.hardware.sequence_seconds

    def _of(self, model: Model, form: Format) -> Rates:
        """Return the rates of the model in a format. Cached: a search asks for the same rates often."""
        key = (id(model), form)
        if key not in self._rates:
            self._rates[key] = (model, Rates.of(model.facts[form], self.hardware))
        return self._rates[key][1]


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
