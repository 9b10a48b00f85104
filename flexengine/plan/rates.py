"""Seconds of the elementary things a model does on a machine: one layer of a gpu_batch, its attention, its head.

What was measured for this very model is used (`Hardware.layers`, `Hardware.heads`); else it is put together from the
sizes of its tensors and the rates of the machine's kernels.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexengine.errors import InvalidInput
from flexengine.plan.attention import DEQUANTIZE_FLOP, Attention
from flexengine.plan.experts import share
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Hardware, Table, at, values_at
from flexengine.plan.profile import Array

_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # where a layer's time is put together
_NAMES = {2: ("float16", "bfloat16"), 4: ("float32",)}  # of the dtypes with that many bytes an element
# Elementwise work of a layer, reads and writes of elements per token: two norms (read twice, written), two residuals
# (two read, one written), q, k, v and their rotation; and of an FFN's width: the activation, and the product of a gate.
_PER_HIDDEN, _PER_WIDTH = 16, 5


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens (or rows). The rate is interpolated between measured points and constant beyond.

    Attributes:
        rates: (tokens, tokens per second).
    """

    rates: Table

    @staticmethod
    def of(table: Table) -> "Curve":
        """Return the curve of a table (tokens, seconds)."""
        return Curve(tuple((float(x), x / seconds) for x, seconds in table))

    def __call__(self, tokens: Array | float) -> Array:
        """Return the seconds; 0 for no tokens."""
        many = np.asarray(tokens, dtype=float)
        return np.asarray(many / values_at(self.rates, np.maximum(many, 1e-9)))


@dataclass(frozen=True)
class Rates:
    """One model on one machine. layers: (curve, number of such layers); head: logits and a token for each row."""

    model: ModelFacts
    hardware: Hardware
    layers: tuple[tuple[Curve, int], ...]
    head: Curve

    @staticmethod
    def of(model: ModelFacts, hardware: Hardware) -> "Rates":
        kinds: Counter[str] = Counter()
        first: dict[str, int] = {}
        for j in range(len(model.layers)):
            kinds[(name := model.signature(j))] += 1
            first.setdefault(name, j)
        layers = tuple((_layer(model, hardware, first[name], name), times) for name, times in kinds.items())
        table = hardware.heads.get(model.head_signature)
        return Rates(model, hardware, layers, Curve.of(table or _head(model, hardware)))

    def stack(self, tokens: Array | float) -> Array:
        """All layers of one gpu_batch of that many tokens, attention apart."""
        return np.asarray(sum(times * curve(tokens) for curve, times in self.layers))

    def one_layer(self, layer: int, tokens: float) -> float:
        """One layer of one gpu_batch, attention apart."""
        names = list(dict.fromkeys(self.model.signature(j) for j in range(len(self.model.layers))))
        return float(self.layers[names.index(self.model.signature(layer))][0](tokens))

    @cached_property
    def attention(self) -> dict[int | None, Attention]:
        """Attention by window, one entry for each of `windows`."""
        return {window: Attention(self.model, self.hardware, window) for window in self.windows}

    @cached_property
    def calls(self) -> float:
        """Seconds that calling attention takes in all layers of one gpu_batch, whatever there is to read."""
        return sum(layers * self.attention[window].call for window, layers in self.windows.items())

    @property
    def crosstalk(self) -> Mapping[str, Mapping[str, float]]:
        """As in `Hardware.crosstalk`, with what this model's own weights have shown: of disk_read, and of all links
        where the processor that computes also moves their bytes."""
        found = {lane: dict(others) for lane, others in self.hardware.crosstalk.items()}
        moved = self.hardware.links if self.hardware.kind != "cuda" else ("disk_read",)
        for link in moved if self.streaming else ():
            for lane, other, what in (("device", link, "device"), (link, "device", "disk_read")):
                known = found.setdefault(lane, {})
                least = known.get(other, 0.0) if link != "disk_read" else 0.0
                known[other] = max(least, self.streaming[what])
        return found

    @cached_property
    def streaming(self) -> Mapping[str, float]:
        """`Hardware.streaming` of this model."""
        return self.hardware.streaming.get(self.model.signature(0), {})

    @property
    def delegated(self) -> float:
        """Seconds that a layer of a gpu_batch takes longer if its attention is delegated, beside that attention."""
        return self.hardware.delegation.get(self.model.signature(0), self.hardware.task_seconds)

    @cached_property
    def windows(self) -> dict[int | None, int]:
        """How many layers see so many tokens."""
        return dict(Counter(self.model.windows or (None,) * len(self.model.layers)))


def _layer(model: ModelFacts, hardware: Hardware, layer: int, name: str) -> Curve:
    if name in hardware.layers:
        return Curve.of(hardware.layers[name])
    matrices = [t for t in model.layers[layer] if t.matrix]
    points = []
    for tokens in _TOKENS:
        products = sum(_product(hardware, t, tokens, model.active) for t in matrices)
        moved = tokens * model.itemsize * (_PER_HIDDEN * model.hidden + _PER_WIDTH * model.width)
        points.append((float(tokens), hardware.cell_seconds + products + moved / hardware.elementwise))
    return Curve.of(tuple(points))


def _product(hardware: Hardware, t: TensorFact, tokens: int, active: int) -> float:
    """Seconds of multiplying tokens by a matrix. Experts: those that some token chooses, each with its share."""
    table = _products(hardware, t)
    if not t.experts:
        return 2.0 * tokens * t.elements / at(table, tokens)
    touched = t.experts * float(share(active, t.experts, tokens))
    rows = tokens * active / touched
    return touched * 2.0 * rows * t.elements / t.experts / at(table, rows)


def _products(hardware: Hardware, t: TensorFact) -> Table:
    """Return the table of a matrix's own format, else of the same format with exact activations (rounding them is not
    taken to be faster), else one derived from the fastest plain format that is known; see `derived`."""
    for name in (t.form, t.form.split(" by ")[0], *(_NAMES.get(t.held, ()) if not t.form else ())):
        if name in hardware.products:
            return hardware.products[name]
    plain = [(w, hardware.products[name]) for w in (2, 4) for name in _NAMES[w] if name in hardware.products]
    if not plain:
        raise InvalidInput(f"hardware {hardware.name} has products of {', '.join(hardware.products)} alone; add a table"
                           f" for {t.form or f'{t.held}-byte numbers'}, float16 or float32")  # fmt: skip
    width, table = max(plain, key=lambda known: max(rate for _, rate in known[1]))
    return derived(table, width, t.held_bytes / t.elements, bool(t.encoded), hardware.vector_flops)


def derived(table: Table, width: float, nbytes: float, encoded: bool, vector_flops: float) -> Table:
    """Return the products' rates of a format that has none, from those of a plain one.

    One row is limited by reading weights: rate(1) = 2 / width x bandwidth. Many rows are limited by computing. So a
    product of r rows takes, per element, nbytes / bandwidth + 2 r / most FLOP per second, and an encoded one is
    dequantized once: DEQUANTIZE_FLOP at vector_flops or, where that is not known, one more write and read of `width`
    bytes. A table of one point says nothing of memory and holds for every format.

    Args:
        table: (rows, FLOP per second) of the plain format.
        width, nbytes: bytes per element, of the plain format and of the other one.
        encoded: whether elements have to be dequantized.
    """
    if len(table) == 1:
        return table
    bandwidth, most = table[0][1] / table[0][0] * width / 2, max(rate for _, rate in table)
    each = nbytes / bandwidth
    if encoded:
        each += DEQUANTIZE_FLOP / vector_flops if vector_flops else 2 * width / bandwidth
    return tuple((rows, 2 * rows / (each + 2 * rows / most)) for rows, _ in table)


def _head(model: ModelFacts, hardware: Hardware) -> Table:
    points = []
    for rows in (1, 8, 64, 512):
        product = _product(hardware, model.edges[0], rows, 0)
        points.append((float(rows), product + 3 * 4 * rows * model.vocabulary / hardware.elementwise))
    return tuple(points)
