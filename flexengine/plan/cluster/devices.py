"""Devices of a cluster, the seconds of one layer on each, and the links between them.

`Latency` is the interface of the seconds: from rates by hand, from a fitted profile, or from a measured machine. It is
phase-aware, as in LLM-PQ (Zhao et al. 2024, section 4.1): prefill computes whole prompts, decode computes one token of
each sequence.

A profile gives two linear regressions per device type, format and layer shape (LLM-PQ, section 4.1):

    prefill  seconds = a0 + a1 v + a2 s + a3 v s + a4 v s^2         v sequences of s prompt tokens
    decode   seconds = c0 + c1 v + c2 t + c3 v t + c4 max(0, v - knee)    v sequences with t cached tokens

LLM-PQ's decode has no knee: products of few sequences take the time in which the weights are read, those of many the
time of their FLOP, and a straight line through both is wrong at either end. Profiles with few points get none.

Coefficients are not negative: a larger batch never takes less time. Least squares without this limit gives negative
seconds for small batches.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from flexengine.config import parse_size
from flexengine.errors import InvalidInput
from flexengine.plan.cluster.job import Format, Model
from flexengine.plan.facts import NO_ATTENTION
from flexengine.plan.hardware import Hardware, IfKnown, Rate
from flexengine.plan.rates import Rates
from flexengine.plan.records import state_seconds

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
LEAST = {PREFILL: 5, DECODE: 4}  # points of a profile
WITH_KNEE = 10  # points of a profile: twice the coefficients
CLEARLY = 0.9  # a knee must lower the norm of the errors to this share
NOISE = 1e-3  # mean relative error below which a line needs no knee


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
        """Return the seconds of bookkeeping of one micro-batch that the seconds of its layers do not include."""
        return 0.0


@dataclass(frozen=True)
class HandRates(Latency):
    """Rates by hand: a roofline.

    A layer takes the longer of computing its FLOP and of moving its bytes (weights, KV cache, and in prefill the hidden
    states), and `layer_seconds` more.
    """

    # FLOP per second of matrix products, by format; a format that is absent has no kernel
    flops: Mapping[Format, float]
    # bytes per second of the device's memory while a product reads weights, by format
    bandwidth: Mapping[Format, float]
    layer_seconds: float = 0.0  # fixed seconds of a layer

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        if form not in self.flops or form not in self.bandwidth:
            return float("inf")
        facts, nbytes, active = model.exact, model.bytes[form][layer], model.active[layer]
        kv, hidden = facts.kv_token * model.attends(layer), facts.hidden_bytes  # bytes of a token
        state = 2 * batch * model.state(layer)  # bytes that are read and written
        if phase == PREFILL:
            flop, pairs = 2 * active * batch * tokens, batch * tokens * (tokens + 1) / 2
            moved = nbytes + state + batch * tokens * (kv + 2 * hidden)
        else:
            flop, pairs = 2 * active * batch, batch * tokens
            moved = nbytes + state + batch * tokens * kv
        pairs *= model.attends(layer)
        attended = pairs * (4.0 * facts.heads * facts.head_dim) / self.flops.get(None, self.flops[form])
        return max(flop / self.flops[form] + attended, moved / self.bandwidth[form]) + self.layer_seconds

    def head(self, model: Model, rows: int) -> float:
        form = None if None in self.flops else next(iter(self.flops))
        head, logits = model.exact.output, model.exact.logits * rows
        if head is None:
            return 0.0
        return max(2 * head.elements * rows / self.flops[form], (head.held_bytes + logits) / self.bandwidth[form])


@dataclass(frozen=True)
class Regression:
    """A fitted regression."""

    phase: str  # PREFILL or DECODE
    coefficients: tuple[float, ...]  # in the order of the formulas above, in seconds
    knee: float = math.inf  # sequences from which on a product takes the time of its FLOP; infinite if there is none

    def __call__(self, batch: float, tokens: float) -> float:
        """Return the seconds of a layer. Arguments as in `Latency.layer`."""
        terms = _features(self.phase, batch, tokens, self.knee)
        return sum(a * x for a, x in zip(self.coefficients, terms, strict=True))


def _features(phase: str, batch: float, tokens: float, knee: float) -> tuple[float, ...]:
    """Return the terms of the regression of a phase, in the order above."""
    last = batch * tokens * tokens if phase == PREFILL else max(0.0, batch - knee)
    return 1.0, batch, tokens, batch * tokens, last


def fit(phase: str, points: Sequence[tuple[float, float, float]]) -> Regression:
    """Return the regression with the least relative errors.

    Args:
        phase: PREFILL or DECODE.
        points: (batch, tokens, seconds); seconds must be positive.

    Raises:
        InvalidInput: there are fewer points than coefficients.
    """
    if len(points) < LEAST[phase]:
        raise InvalidInput(
            f"a {phase} profile has {len(points)} points, but the regression has {LEAST[phase]}"
            " coefficients; measure as many points or more"
        )
    norm, line = _fit(phase, points, math.inf)
    if phase == DECODE and len(points) >= WITH_KNEE and norm > NOISE * len(points) ** 0.5:
        knees = sorted({v for v, _, _ in points})[1:-1]
        better = min((_fit(phase, points, knee) for knee in knees), key=lambda pair: pair[0], default=(norm, line))
        if better[0] < CLEARLY * norm:
            return better[1]
    return line


def _fit(phase: str, points: Sequence[tuple[float, float, float]], knee: float) -> tuple[float, Regression]:
    """Return the norm of the relative errors, and the regression."""
    rows: NDArray[np.float64] = np.array([_features(phase, v, t, knee) for v, t, _ in points], dtype=float)
    seconds = np.array([y for _, _, y in points], dtype=float)
    scale = np.maximum(rows.max(axis=0), 1e-300)  # without a knee, a term is 0
    found, norm = nnls(rows / scale / seconds[:, None], np.ones(len(points)))
    return float(norm), Regression(phase, tuple(float(a) for a in found / scale), knee if found[-1] else math.inf)


@dataclass(frozen=True)
class Profiled(Latency):
    """Regressions over measured layers, which include bookkeeping, for the one shape of layer that was measured."""

    lines: Mapping[tuple[Format, str], Regression]  # by (format, phase), the fitted seconds of a layer
    head_seconds: float = 0.0  # seconds of the logits of a micro-batch

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        line = self.lines.get((form, phase))
        return float("inf") if line is None else line(batch, tokens)

    def head(self, model: Model, rows: int) -> float:
        return self.head_seconds


@dataclass(frozen=True)
class MachineRates(Latency):
    """Rates of a hardware file, measured or not, through the cost model of a single machine."""

    hardware: Hardware  # the machine
    _rates: dict[tuple[int, Format], tuple[object, Rates]] = field(default_factory=dict, compare=False, repr=False)

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        if form not in model.facts:
            return float("inf")
        rates = self._of(model, form)
        facts = rates.model
        window = facts.windows[layer] if facts.windows else None
        decodes = phase == DECODE and model.state(layer) > 0
        step = batch * state_seconds(facts, self.hardware) if decodes else 0.0
        if window == NO_ATTENTION:
            rows = batch * (tokens if phase == PREFILL else 1)
            return rates.one_layer(layer, rows, True) + step + self.hardware.task_seconds
        attention = rates.attention[window]
        seen, overhead = min(tokens, window) if window else tokens, attention.call + self.hardware.task_seconds
        if phase == PREFILL:
            pairs = tokens * (tokens + 1) / 2 - (tokens - seen) * (tokens - seen + 1) / 2
            attending = float(attention.prompt(batch * pairs, tokens))
            return rates.one_layer(layer, batch * tokens, True) + attending + overhead
        return rates.one_layer(layer, batch, True) + step + float(attention.decode(batch * seen, seen)) + overhead

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
    """A link between two devices."""

    bandwidth: Rate  # bytes per second
    latency: IfKnown = 0.0  # seconds of a message of no bytes

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency + nbytes / self.bandwidth


def links_around(text: str | None, stages: int) -> list[Link]:
    """Return the equal links from each stage of a chain to the next, and from the last one to the first; [] if they are
    not counted, or for one stage. Raise InvalidInput if the text is wrong.

    Args:
        text: bytes per second, and after a comma the seconds of a message, as in --stage-link; None if not given.
        stages: number of stages.
    """
    if text is None:
        return []
    rate, _, seconds = text.partition(",")
    latency = math.inf
    with suppress(ValueError):
        latency = float(seconds or 0.0)
    if not 0 <= latency < math.inf:
        what = "is bytes per second, and after a comma the seconds of a message, such as 1.25G,1e-4"
        raise InvalidInput(f"--stage-link is {text}; it {what}")
    return [Link(parse_size(rate, "--stage-link"), latency)] * stages if stages > 1 else []


@dataclass(frozen=True)
class Device:
    """One device."""

    name: str  # unique in the cluster
    type: str  # devices of one type are alike and stay neighbours in the pipeline
    memory: int  # bytes that a stage may use
    latency: Latency  # seconds of layers
    kind: str = "cuda"  # as `Hardware.kind`; decides in which dtype a model is held
    node: str = ""  # machine that holds the device; links within a node may be faster
    host_memory: int = 0  # bytes of host RAM for weights of this device
    host_link: float = 0.0  # bytes per second from host RAM to the device; 0 if weights cannot be on the host
    speed: float = 1.0  # factor by which the device is faster than `latency` says

    @property
    def offloads(self) -> bool:
        """Return whether weights can be on the host."""
        return self.host_memory > 0 and self.host_link > 0

    @property
    def machine(self) -> Hardware | None:
        """Return the machine of a device with a hardware file, which has all tiers; None for other devices."""
        if not isinstance(self.latency, MachineRates) or self.speed != 1:
            return None
        host = self.host_memory or self.latency.hardware.host_bytes
        return replace(self.latency.hardware, device_bytes=self.memory, host_bytes=host)


@dataclass(frozen=True)
class Cluster:
    """Devices and links."""

    name: str  # shown in reports
    devices: tuple[Device, ...]  # in the order of the file; names are unique
    # within, between: links of devices of one node, and of different nodes
    within: Link
    between: Link
    # links of certain pairs of device names, in place of `within` and `between`
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
