"""Seconds of one layer of a gpu_batch, of its attention, and of its head; and rates assumed for unmeasured machines.

Seconds measured for this model are used if there are any (`Hardware.layers`, `Hardware.heads`, `Hardware.attention`).
Else they are computed from the sizes of the model's tensors and the rates of the machine's kernels.

The shape of attention is the number of query heads per KV head, the head width, the format of the cache and the window.
For a shape without measurements, these rules hold:

decode      Reading takes kv_token bytes per cached token at `decode_attention` (on the host: `host_attention`).
            Computing takes 2 FLOP per query head of the group for each element of K and V, and DEQUANTIZE_FLOP more if
            the element is encoded, at `vector_flops` (`host_flops`). The slower of reading and computing counts.
prompt      `prompt_attention` at the length of the prompt, for every shape.
continued   as prompts, at the number of tokens cached before.
call        0 s: `cell_seconds` includes the call.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from flexengine.errors import InvalidInput
from flexengine.places import WORKERS, disks_of, lane_of, place_of, workers_in_memory
from flexengine.plan import guest
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity, Hardware, Table, at, values_at
from flexengine.plan.sizes import EXTENT, Array

# Matrix products: (rows, FLOP per second).
_CPU: Table = ((1, 1.5e10), (8, 4e10), (64, 1.2e11), (512, 1.5e11))
_GPU: Table = ((1, 5e11), (64, 2e13), (1024, 6e13))
_GPU32: Table = ((1, 2.5e11), (64, 8e12), (1024, 1e13))  # twice the bytes, and no tensor cores
_LOST = 0.3  # seconds that computing and a disk's reads or writes lose per second of the other: 0.2 to 0.5 with reads
DEQUANTIZE_FLOP = 4.0  # per encoded element: unpack, scale, add the minimum
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # points at which a layer's seconds are computed
_DTYPES = {2: ("float16", "bfloat16"), 4: ("float32",)}  # names by bytes per element
# Elements that a layer's elementwise operations read and write per token. Per hidden element: two norms (read twice,
# written once), two residuals (two reads, one write), q, k, v and their rotation. Per element of an FFN's width: the
# activation, and the product with the gate.
_PER_HIDDEN, _PER_WIDTH = 16, 5


@dataclass(frozen=True)
class Attention:
    """Seconds of attention in the layers with one window."""

    model: ModelFacts
    hardware: Hardware
    window: int | None = None  # tokens that a query of these layers sees, None for all

    @cached_property
    def measured(self) -> Mapping[str, Table]:
        """Return the tables measured for this shape, or {} if there are none."""
        return self.hardware.attention.get(self.model.attention_signature(self.window), {})

    @property
    def call(self) -> float:
        """Return the seconds of one call with almost nothing to read."""
        table = self.measured.get("call")
        return table[0][1] if table else 0.0

    def decode(self, tokens: Array | float, length: Array | float, place: str = "device") -> Array:
        """Return the seconds of decode attention.

        Args:
            tokens: cached tokens that all sequences together read.
            length: cached tokens of one sequence, about.
            place: place that computes; see `Policy.attends`.
        """
        rate = values_at(self._rates(place), np.maximum(length, 1.0))
        return np.asarray(np.asarray(tokens, dtype=float) * self.model.kv_token / rate)

    def prompt(self, pairs: Array | float, length: float, kind: str = "prompt") -> Array:
        """Return the seconds of attention in prompts.

        Args:
            pairs: (query, key) pairs.
            length: tokens of one prompt or first chunk, about; of "continued", tokens of the prompt cached before.
            kind: "prompt" for prompts and their first chunks, "continued" for later chunks.
        """
        flop = 4.0 * self.model.heads * self.model.head_dim * np.asarray(pairs, dtype=float)
        table = self.measured.get(kind) or self.measured.get("prompt") or self.hardware.prompt_attention
        return np.asarray(flop / at(table, max(length, 1.0)))

    def _rates(self, place: str) -> Table:
        """Return (cached tokens of a sequence, bytes of KV per second) of decode attention that a place computes.

        If the place's rate is unknown, it is assumed equal to the rate of moving the KV to the device. Place "workers"
        is all attention workers together: each holds an equal part of every sequence, so the slowest one counts.
        """
        hardware = self.hardware
        if place == WORKERS or place_of(place).worker:
            moved = at(hardware.links["h2d"], EXTENT)
            workers = workers_in_memory(hardware.places) if place == WORKERS else (place,)
            return ((1.0, len(workers) * min(hardware.worker_attention.get(worker, moved) for worker in workers)),)
        if place == "device":
            return self.measured.get("decode") or self._derived(hardware.decode_attention, hardware.vector_flops)
        plain, flops = (hardware.host_attention, hardware.host_flops) if place == "host" else (None, 0.0)
        plain = plain or at(hardware.links["h2d"], EXTENT)
        return self.measured.get(place) or self._derived(((1.0, plain),), flops)

    def _derived(self, plain: Table, flops: float) -> Table:
        """Return (cached tokens of a sequence, bytes of KV per second) by the rule for decode above. plain: the same
        table as memory limits it. flops: FLOP per second as computing limits it, 0 if not known."""
        if not flops:
            return plain
        model = self.model
        element_flop = 2.0 * model.heads / model.kv_heads + (DEQUANTIZE_FLOP if model.kv_pieces > 1 else 0.0)
        limit = flops * model.kv_token / (2 * model.kv_heads * model.head_dim * element_flop)
        return tuple((x, min(rate, limit)) for x, rate in plain)


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of tokens or rows: on a straight line between two points, as kernels cost a fixed time and
    one for each token; the rate is constant beyond them."""

    points: Table  # (tokens, seconds)

    @cached_property
    def _columns(self) -> Array:
        return np.array(self.points, dtype=float).T

    def __call__(self, tokens: Array | float) -> Array:
        """Return the seconds; 0 for no tokens."""
        counts, (xs, ys) = np.asarray(tokens, dtype=float), self._columns
        beyond = np.minimum(1.0, counts / xs[0]) * np.maximum(1.0, counts / xs[-1])
        return np.asarray(np.interp(counts, xs, ys) * beyond)

    def one(self, tokens: float) -> float:
        """Return the seconds of one number."""
        (first, low), (last, high) = self.points[0], self.points[-1]
        if tokens <= first or tokens >= last:
            return low * tokens / first if tokens <= first else high * tokens / last
        end = bisect(self.points, (tokens,))
        (a, x), (b, y) = self.points[end - 1 : end + 1]
        return x + (y - x) * (tokens - a) / (b - a)


@dataclass(frozen=True)
class Rates:
    """Rates of one model on one machine."""

    model: ModelFacts
    hardware: Hardware
    # by `ModelFacts.signature`, curve of a layer without attention, and number of such layers
    layers: Mapping[str, tuple[Curve, int]]
    head: Curve  # seconds by rows, for logits and one token of each row

    @staticmethod
    def of(model: ModelFacts, hardware: Hardware) -> "Rates":
        """Return the rates of a model on a machine."""
        names = [model.signature(j) for j in range(len(model.layers))]
        kinds = Counter(names)
        layers = {name: (_layer(model, hardware, names.index(name), name), times) for name, times in kinds.items()}
        if model.output is None:
            return Rates(model, hardware, layers, Curve(((1.0, 0.0),)))
        table = hardware.heads.get(model.head_signature) or _head(model, hardware, model.output)
        return Rates(model, hardware, layers, Curve(table))

    def stack(self, tokens: Array | float, resident: float = 0.0) -> Array:
        """Return the seconds of all layers of a gpu_batch, without attention. tokens: of the gpu_batch. resident: share
        of the weights that stay on the device."""
        rows, ways = np.asarray(tokens, dtype=float), ((resident, self.resident), (1 - resident, self.layers))
        return np.asarray(sum(w * n * curve(rows) for w, by in ways if w for curve, n in by.values()))

    @cached_property
    def resident(self) -> dict[str, tuple[Curve, int]]:
        """Return `layers` for weights that stay on the device (`Hardware.resident`)."""
        known = self.hardware.resident
        own = {name: Curve(_corrected(self.hardware, name, known[name])) for name in known.keys() & self.layers.keys()}
        return {name: (own.get(name, curve), times) for name, (curve, times) in self.layers.items()}

    def one_layer(self, layer: int, tokens: float, resident: bool = False) -> float:
        """Return the seconds of one layer, as `stack`. resident: whether its weights stay on the device."""
        return (self.resident if resident else self.layers)[self.model.signature(layer)][0].one(tokens)

    @cached_property
    def attention(self) -> dict[int | None, Attention]:
        """Return the attention of layers by window."""
        return {window: Attention(self.model, self.hardware, window) for window in self.windows}

    @cached_property
    def calls(self) -> float:
        """Return the fixed seconds of the attention calls in all layers of one gpu_batch."""
        return sum(layers * self.attention[window].call for window, layers in self.windows.items())

    def fused(self, tokens: Array | float) -> Array:
        """Return the seconds of all layers of a gpu_batch that decodes, in calls for several layers, with what is fixed
        in their attention."""
        return np.asarray(sum(times * curve(tokens) for curve, times in self.joined))

    def fused_table(self, layer: str) -> Table:
        """Return `Hardware.fused` of layers of a signature, lengthened as jobs showed; () if there is none."""
        points = self.hardware.fused.get(self.model.fused_signature(layer), ()) if self.model.joins else ()
        return _corrected(self.hardware, layer, points)

    @cached_property
    def joined(self) -> list[tuple[Curve, int]]:
        """By kind of layer, the curve of `fused`, and number of such layers; [] if it was not measured for this KV
        cache. No call takes longer than its parts: other programs slowed such a measurement. Beyond the measured
        sequences as much time is saved as at the most of them."""
        call, found = self.calls / max(1, len(self.model.layers)), list[tuple[Curve, int]]()
        for name, (curve, times) in self.resident.items():
            points = [(n, min(seconds, curve.one(n) + call)) for n, seconds in self.fused_table(name)]
            if not points:
                return []
            most, seconds = points[-1]
            saved = curve.one(most) + call - seconds
            rest = tuple((n, max(seconds, s + call - saved)) for n, s in curve.points if n > most)
            found.append((Curve((*points, *rest)), times))
        return found

    @property
    def crosstalk(self) -> Mapping[str, Mapping[str, float]]:
        """Return `Hardware.crosstalk`, corrected by measurements with this model's weights (`streaming`).

        They replace the crosstalk between computing and disk_read. On a machine without a GPU, they are also a lower
        bound for the other links, because the same processor computes and copies. The work of lanes that use the same
        link adds up.
        """
        crosstalk = {lane: dict(others) for lane, others in self.hardware.crosstalk.items()}
        moved = self.hardware.links if not self.hardware.gpu else ("disk_read",)
        for link in moved if self.streaming else ():
            for lane, other, what in (("device", link, "device"), (link, "device", "disk_read")):
                others = crosstalk.setdefault(lane, {})
                measured = others.get(other, 0.0) if link != "disk_read" else 0.0
                others[other] = max(measured, self.streaming[what])
        for a, b in permutations(self.hardware.lanes, 2):
            if lane_of(a).link == lane_of(b).link:  # lanes of one link share its rate
                crosstalk.setdefault(a, {})[b] = 1.0
        return crosstalk

    @cached_property
    def streaming(self) -> Mapping[str, float]:
        """Return `Hardware.streaming` of this model, or {}."""
        return self.hardware.streaming.get(self.model.signature(0), {})

    @property
    def delegated(self) -> float:
        """Return the seconds that delegation adds to a layer of a gpu_batch, without attention itself."""
        return self.hardware.delegation.get(self.model.signature(0), self.hardware.task_seconds)

    @cached_property
    def windows(self) -> dict[int | None, int]:
        """Return the number of layers by window (None: all tokens)."""
        return dict(Counter(self.model.attended))


def _layer(model: ModelFacts, hardware: Hardware, layer: int, name: str) -> Curve:
    if name in hardware.layers:
        return Curve(hardware.layers[name])
    matrices = [t for t in model.layers[layer] if t.matrix]
    points = []
    for tokens in _TOKENS:
        products = sum(_product(hardware, t, tokens, model.active) for t in matrices)
        moved = tokens * model.itemsize * (_PER_HIDDEN * model.hidden_width + _PER_WIDTH * model.width)
        points.append((float(tokens), hardware.cell_seconds + products + moved / hardware.elementwise))
    return Curve(_corrected(hardware, name, points))


def _corrected(hardware: Hardware, name: str, points: Sequence[tuple[float, float]]) -> Table:
    """Return computed seconds of a layer or a head, lengthened as jobs showed; measured ones are stored so."""
    factor = hardware.corrected.get(name, 1.0)
    return tuple((x, factor * seconds) for x, seconds in points)


def _product(hardware: Hardware, t: TensorFact, tokens: int, active: int) -> float:
    """Return the seconds of multiplying tokens by a matrix.

    Of experts, only the chosen ones are multiplied, each with its share of the tokens.
    """
    table = _products(hardware, t)
    if not t.experts:
        return 2.0 * tokens * t.elements / at(table, tokens)
    chosen = t.experts * float(guest("neurons").experts_share(active, t.experts, tokens))
    rows = tokens * active / chosen
    return chosen * 2.0 * rows * t.elements / t.experts / at(table, rows)


def _products(hardware: Hardware, t: TensorFact) -> Table:
    """Return the table (rows, FLOP per second) of a matrix.

    The first that exists is returned: the table of the matrix's format; of the same format with exact activations,
    assuming that rounding them is not faster; a table derived from the fastest plain format, see `derived`.
    """
    for name in (t.form, t.form.split(" by ")[0], *(_DTYPES.get(t.held, ()) if not t.form else ())):
        if name in hardware.products:
            return hardware.products[name]
    plain = [(w, hardware.products[name]) for w in (2, 4) for name in _DTYPES[w] if name in hardware.products]
    if not plain:
        raise InvalidInput(
            f"hardware {hardware.name} has products of {', '.join(hardware.products)} only; add a table"
            f" for {t.form or f'{t.held}-byte numbers'}, float16 or float32"
        )
    width, table = max(plain, key=lambda entry: max(rate for _, rate in entry[1]))
    return derived(table, width, t.held_bytes / t.elements, bool(t.encoded), hardware.vector_flops)


def derived(table: Table, width: float, nbytes: float, encoded: bool, vector_flops: float) -> Table:
    """Return the rates of products in a format that was not measured, from the rates of a plain format.

    A product of one row is limited by reading weights: rate(1) = 2 / width * bandwidth. A product of many rows is
    limited by the peak rate. So r rows take nbytes / bandwidth + 2 r / peak seconds per element. An encoded element is
    also dequantized once: DEQUANTIZE_FLOP at `vector_flops`, or a write and a read of `width` bytes if `vector_flops`
    is unknown. A table of one point does not show the bandwidth, so it is returned for every format.

    Args:
        table: (rows, FLOP per second) of the plain format.
        width: bytes per element of the plain format.
        nbytes: bytes per element of the other format.
        encoded: whether the other format's elements are dequantized.
        vector_flops: as in `Hardware`.
    """
    if len(table) == 1:
        return table
    bandwidth, peak = table[0][1] / table[0][0] * width / 2, max(rate for _, rate in table)
    seconds = nbytes / bandwidth  # per element, besides computing
    if encoded:
        seconds += DEQUANTIZE_FLOP / vector_flops if vector_flops else 2 * width / bandwidth
    return tuple((rows, 2 * rows / (seconds + 2 * rows / peak)) for rows, _ in table)


def _head(model: ModelFacts, hardware: Hardware, head: TensorFact) -> Table:
    points = []
    for rows in (1, 8, 64, 512):
        product = _product(hardware, head, rows, 0)
        points.append((float(rows), product + 3 * 4 * rows * model.vocabulary / hardware.elementwise))
    return _corrected(hardware, model.head_signature, points)


def timed(hardware: Hardware, model: ModelFacts) -> bool:
    """Return whether this model's own layers, head, attention and records were measured on this machine."""
    records = {block.signature for block in model.blocks if block and not block.experts}
    known = {*hardware.layers, *hardware.heads, *hardware.attention, *hardware.blocks}
    return known >= model.signatures | records and knows_fused(hardware, model)


def knows_fused(hardware: Hardware, model: ModelFacts) -> bool:
    """Return whether calls for several layers were measured with the model's KV cache, or with none at all."""
    layers = [name for name in model.signatures if any(key.startswith(name) for key in hardware.fused)]
    return not model.joins or {*hardware.fused} >= {*map(model.fused_signature, layers)}


def origin(hardware: Hardware, model: ModelFacts) -> str:
    """Return in words what was measured for a plan of this model."""
    how = " briefly" if model.signatures & {*hardware.quick} else ""
    if not timed(hardware, model):
        return "measured, but not this model's layers" if hardware.measured else "not measured"
    if hardware.measured:
        return f"measured, this model{how}" if how else "measured"
    return f"this model measured{how}, offload directories {'assumed' if hardware.assumed else 'not measured'}"


def assumed(kind: str, capacity: Capacity, same_device: Sequence[tuple[str, str]] = ()) -> Hardware:
    """Return hardware with assumed rates: round numbers of a small machine of its kind.

    They serve jobs so short that measuring would take longer than a better policy could save. A layer of a gpu_batch of
    32 took 0.9 ms on an H200 (bench/results/gpu.jsonl), nearly all of it a fixed cost.

    Args:
        kind: "cpu", "sim" or "cuda".
        capacity: bytes of each place.
        same_device: pairs of disks that share a device, and so its rate.
    """
    gpu = kind == "cuda"
    products = {"float16": _GPU, "float32": _GPU32} if gpu else {"float16": _CPU, "float32": _CPU}
    memory, link = (5e11, 1.2e10) if gpu else (1.5e10, 5e9)  # bytes per second
    lanes = [disk.lanes for disk in disks_of(capacity.places)]
    rates = [(lane, rate) for both in lanes for lane, rate in zip(both, (1.5e9, 7e8), strict=True)]
    disks: dict[str, Table] = {lane: ((1.0, rate),) for lane, rate in rates}
    talk: dict[str, dict[str, float]] = {}
    if not gpu:
        talk = {"device": dict.fromkeys(disks, _LOST), **{lane: {"device": _LOST} for lane in disks}}
    for a, b in (*same_device, *((b, a) for a, b in same_device)):
        for lane, other in zip(place_of(a).lanes, place_of(b).lanes, strict=True):
            talk.setdefault(lane, {})[other] = 1.0
    return Hardware(
        name=f"{kind}, assumed", kind=kind,
        device_bytes=capacity.device, host_bytes=capacity.host, disk_bytes=capacity.disk,
        more_disks=capacity.more_disks, links={"h2d": ((1.0, link),), "d2h": ((1.0, link),), **disks},
        checkpoint_read=((1.0, 1.5e9),), products=products,
        prompt_attention=((1.0, 5e12 if gpu else 5e10),), decode_attention=((1.0, memory),), elementwise=memory,
        host_attention=8e9, cell_seconds=8e-4 if gpu else 3e-4, task_seconds=5e-5, sweep_seconds=1e-3,
        sequence_seconds=5e-5, crosstalk=talk, assumed=True,
    )  # fmt: skip
