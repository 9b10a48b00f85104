"""Decoder layers as two calls of native kernels: all before attention in one, all after it in the other.

    before   norm, queries | keys | values, rotary positions if there are any
    after    output projection + residual, norm, gate | up or up alone, activation, down projection + residual

If all tokens are the next ones of their sequences, one call computes the whole layer, attention too, and the layers
after it whose weights and pages are at hand. halving.py tells which layers compute so. Dtypes other than fp32, GPUs,
and passes that watch or replace modules use the modules.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import greenlet
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.kernels.base import Decoding
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.recorded import Recorded
from flexengine.kernels.recycled import Recycled
from flexengine.kernels.steps import Steps
from flexengine.model.forward import PausingLayer, attend, this_pass
from flexengine.model.fused import ACTS
from flexengine.model.layer_parts import HEAD_NORMS, Parts
from flexengine.model.linear import FastLinear, unwatched

PART = 512  # rows that a call computes, so that what it writes stays in the CPU's caches
MOST_CALLS = 64  # recorded calls that layers of equal settings keep


class Bound(NamedTuple):
    """The weights of a layer as they are bound now.

    Attributes:
        parameters: the modules' weights and biases; None for no bias.
        how: by linear module, whether its weight is reordered, and how activations are rounded.
        biases: by linear module, its bias in fp32; None for none.
        given: the tensors that the calls read.
        addresses: of these.
        format: their number in `Kind.formats`.
    """

    parameters: list[Any]
    how: list[tuple[bool, Any]]
    biases: dict[FastLinear, Tensor | None]
    given: list[Tensor]
    addresses: list[int]
    format: int


class Proof(Protocol):
    """Comparison of the calls with the modules (halving.py)."""

    @property
    def succeeded(self) -> bool:
        """Whether both compute the same."""


class Scratch:
    """Memory for calls, which all layers of a model share. Fresh memory for every call would cost page faults.

    Attributes:
        block: intermediate results; as large as a call has needed.
        results: memory of results.
    """

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self.results = Recycled()

    def make_room(self, nbytes: int) -> None:
        """Make the block at least this large."""
        if self.block.nbytes < nbytes:
            self.block = torch.empty(nbytes, dtype=torch.uint8)

    def release(self) -> None:
        """Free the memory."""
        self.block = torch.empty(0, dtype=torch.uint8)
        self.results.release()


class Kind:
    """What layers of equal settings share.

    Attributes:
        trial: shows whether they compute so; None in a trial.
        scratch: memory of calls.
        formats: a number for each combination of shapes and formats of a layer's weights.
        recent: page tables, key and call of the last layer that decoded; the next layers of a sweep have the same.
    """

    def __init__(self, trial: "Proof | None", scratch: Scratch) -> None:
        self.trial, self.scratch, self.formats = trial, scratch, dict[Hashable, int]()
        self._calls: dict[Hashable, Recorded] = {}  # the one used last is the last one
        self.release()

    def release(self) -> None:
        """Drop all tensors."""
        self.scratch.release()
        self.recent: tuple[Tensor, Hashable, Recorded] | None = None
        self._angles: tuple[Any, tuple[int, ...], list[Tensor] | None] = None, (), None

    def call(self, key: Hashable, record: Callable[[], Recorded]) -> Recorded:
        """Return the call with a key, and make room for it. If there is none, record it."""
        if (found := self._calls.pop(key, None)) is None:
            found = record()
            if len(self._calls) >= MOST_CALLS:
                del self._calls[next(iter(self._calls))]
        self._calls[key] = found
        self.scratch.make_room(found.nbytes)
        return found

    def angles(self, positions: Any, shape: tuple[int, ...]) -> list[Tensor] | None:
        """Return cosines and sines, [tokens, head_dim]; None if they are others than the calls can use.

        Args:
            positions: argument `position_embeddings` of a layer, the same object for all layers of a pass.
            shape: (1, tokens, head_dim).
        """
        if self._angles[0] is not positions or self._angles[1] != shape:
            fine = type(positions) is tuple and len(positions) == 2
            fine = fine and all(x.shape == shape and x.dtype == torch.float32 for x in positions)
            self._angles = positions, shape, [x[0].contiguous() for x in positions] if fine else None
        return self._angles[2]


class Halves:
    """The calls of one layer. Layers of a kind share recorded calls, as adding the steps of a call takes as long as
    small products.

    Attributes:
        options: scaling, window and softcap that the layer's attention module passes to the attention function.
        kind: what the layer shares with others.
        following: the next layer; None if there is none, or if it does not compute so.
        joined: whether, in the last pass, the layer's input was the output of the layer before, and both got the same
            positions. Only then can it be computed with the layer before.
        last: whether only a norm and the output projection follow, so that only rows with logits are needed.
    """

    def __init__(self, layer: Any, parts: Parts, options: dict[str, Any], kind: Kind) -> None:
        self.parts, self.attention, self.options, self.kind = parts, parts.attention, options, kind
        modules = list(layer.modules())
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for m in modules]
        self._head_norms = self.attention._modules.keys() >= HEAD_NORMS
        self._linear: list[FastLinear] = [m for m in modules if isinstance(m, FastLinear)]
        self._layer_norms = [m for m in modules if isinstance(m, nn.LayerNorm)]
        with_weights = [m._parameters for m in modules if m._parameters.get("weight") is not None]
        self._parameters = [(parameters, name) for parameters in with_weights for name in parameters]
        self._bound: Bound | None = None
        self.following: Halves | None = None
        self.joined = self.last = False

    def usable(self, hidden: Tensor, positions: Any) -> bool:
        """Return whether the calls can replace the modules now.

        Args:
            hidden: [1, tokens, hidden], input of the layer.
            positions: argument `position_embeddings` of the layer.
        """
        with unwatched():
            if hidden.dtype != torch.float32 or hidden.device.type != "cpu":
                return False
            if self._angles(positions, hidden.shape[1]) is None:
                return False
        if getattr(greenlet.getcurrent(), "queries_first", False) or not self._unchanged:
            return False
        return self.kind.trial is None or self.kind.trial.succeeded

    @property
    def _unchanged(self) -> bool:
        """Whether nothing watches or replaces the layer's modules."""
        if self._act_name not in ACTS or any(self._hooks):
            return False
        if not all(type(module) is FastLinear for module in self._linear):  # as with records of neurons (neurons.py)
            return False
        return not any("forward" in attributes for attributes in self._attributes)

    @property
    def _act_name(self) -> str:
        return type(getattr(*self.parts.act)).__name__

    def _angles(self, positions: Any, rows: int) -> list[Tensor] | None:
        """Return what `Kind.angles` returns, or nothing for positions that are not rotary."""
        return self.kind.angles(positions, (1, rows, self.attention.head_dim)) if self.parts.rotary else []

    def __call__(self, hidden: Tensor, positions: Any) -> tuple[int, Tensor]:
        """Compute the layer, and layers after it if this can be done in the same call.

        Args:
            hidden, positions: as in `usable`.

        Returns:
            The number of layers, and the output of the last one, [1, tokens, hidden].
        """
        with unwatched():
            x = hidden[0]
            angles = self._angles(positions, len(x))
            assert angles is not None
            if decodings := self._decodings(len(x)):
                return len(decodings), self._decode(x, angles, decodings)[None]
            q, k, v = (y.transpose(0, 1)[None] for y in self._run(self._before, (x, *angles)))
        attended, _ = attend(self.attention, q, k, v, None, **self.options)
        del q, k, v
        with unwatched():
            return 1, self._rest(x, attended.reshape(len(x), -1))[None]

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the output of `_after`, [rows, hidden]. After the last layer, rows without logits are 0."""
        keep = this_pass().inputs.keep if self.last else None
        if keep is None or len(keep) >= len(x):
            (out,) = self._run(self._after, (x, attended))
            return out
        out = torch.zeros_like(x)
        if len(keep):
            out[keep] = self._run(self._after, (x[keep], attended[keep]))[0]
        return out

    def _decodings(self, rows: int) -> list[tuple["Halves", Decoding]]:
        """Return the layers that one call can compute with their attention, from this one on, and their pages."""
        given: Sequence[Decoding] = getattr(greenlet.getcurrent(), "decodings", ())
        dim, parts = self.attention.head_dim, self.parts
        sizes = parts.q.out_features // dim, parts.k.out_features // dim, dim
        if not given or rows > PART or (given[0].heads, given[0].room.kv_heads, given[0].room.dim) != sizes:
            return []
        found, format = [(self, given[0])], self._bind().format
        for decoding in given[1:]:
            layer = found[-1][0].following
            if layer is None or not layer.joined or layer.kind is not self.kind or not layer._unchanged:
                break
            if layer._bind().format != format:
                break
            found.append((layer, decoding))
        return found

    def _decode(self, x: Tensor, angles: Sequence[Tensor], layers: Sequence[tuple["Halves", Decoding]]) -> Tensor:
        """Compute whole layers. Return the output of the last one, [rows, hidden].

        Args:
            x: [rows, hidden], input of the first layer.
            angles: as in `Kind.angles`.
            layers: what `_decodings` returned.
        """
        x, decoding, bound, recent = x.contiguous(), layers[0][1], self._bind(), self.kind.recent
        key = bound.format, decoding.window
        if recent is None or recent[0] is not decoding.tables or recent[1] != key:
            options: list[Any] = [item for item in decoding if not isinstance(item, Tensor)]
            options += [(decoding.pool.shape, decoding.pool.dtype, decoding.tables.shape)]
            call = self._call(self._whole, bound, (x, *angles), options, decoding)
            self.kind.recent = recent = decoding.tables, key, call
        outputs = [torch.empty_like(x) for _ in layers[:2]]  # a layer reads one and writes the other
        rows, source = list[list[int]](), x
        for number, (layer, decoding) in enumerate(layers):
            assert layer._bound is not None
            target = outputs[number % 2]
            tensors = (source, *angles, *_tensors(decoding))
            rows.append(self._addresses(layer._bound, tensors, [target]))
            source = target
        recent[2].run(*rows)
        return source

    def _run(self, half: Callable[..., list[Tensor]], given: Sequence[Tensor]) -> list[Tensor]:
        """Run `_before` or `_after`, some rows at a time. Return its results, [rows, ...].

        Args:
            half: the method.
            given: its arguments, [rows, ...].
        """
        bound, rows = self._bind(), len(given[0])
        parts, results, low = -(-rows // PART), list[Tensor](), 0
        least, larger = divmod(rows, parts)
        for size, times in ((least + 1, larger), (least, parts - larger)):
            if not times:
                continue
            pieces = [[x[low + size * i : low + size * (i + 1)] for x in given] for i in range(times)]
            call = self._call(half, bound, pieces[0])
            if not results:
                empty = self.kind.scratch.results.empty if this_pass().recycles else _empty
                results = [empty((rows, *shape[1:]), dtype) for shape, dtype in call.results]
            targets = ([x[low + size * i :] for x in results] for i in range(times))
            call.run(*(self._addresses(bound, *both) for both in zip(pieces, targets, strict=True)))
            low += size * times
        return results

    def _addresses(self, bound: Bound, given: Sequence[Tensor], results: Sequence[Tensor]) -> list[int]:
        """Return the addresses of a recorded call, which writes the results."""
        to = (*results, self.kind.scratch.block)
        return [*(x.data_ptr() for x in given), *bound.addresses, *(x.data_ptr() for x in to)]

    def _call(
        self, part: Callable[..., list[Tensor]], bound: Bound, given: Sequence[Tensor], options: Sequence[Any] = (),
        decoding: Decoding | None = None,
    ) -> Recorded:  # fmt: skip
        """Return the call of `_before`, `_after` or `_whole` for tensors of these shapes.

        Args:
            part: the method.
            bound: weights.
            given: its arguments, [rows, ...].
            options: what else the call depends on.
            decoding: the last argument of `_whole`.
        """

        def record() -> Recorded:
            steps, last = cast(NativeKernels, kernels.load()).steps(), [] if decoding is None else [decoding]
            tensors = (*given, *(_tensors(decoding) if decoding else ()), *bound.given)
            return steps.recorded(tensors, part(steps, bound, *given, *last))

        sizes = [(len(given[0]), *(x.stride() for x in given)), bound.format, torch.get_num_threads()]
        return self.kind.call((part.__name__, *sizes, *options), record)

    def release(self) -> None:
        """Drop the references to weights, and the tensors of all layers of this kind."""
        self._bound = None
        self.kind.release()

    def _bind(self) -> Bound:
        """Return the weights that the modules have now."""
        parameters = [holder[name] for holder, name in self._parameters]
        how = [(m.packed, m.product.compute) for m in self._linear]
        old = self._bound
        if old and old.how == how and all(a is b for a, b in zip(parameters, old.parameters, strict=True)):
            return old
        biases: dict[FastLinear, Tensor | None]
        biases = {m: None if m.bias is None else m.bias.float() for m in self._linear}
        given = [holder[name] for holder, name in self._parameters if name == "weight"]
        given += [bias for bias in biases.values() if bias is not None]
        given += [norm.bias for norm in self._layer_norms if norm.bias is not None]
        formats = [(m.forms.get("weight"), biases[m] is None, *item) for m, item in zip(self._linear, how, strict=True)]
        plain = [norm.bias is None for norm in self._layer_norms]
        key = (self._act_name, *((x.shape, x.stride(), x.dtype) for x in given), *formats, *plain)
        number = self.kind.formats.setdefault(key, len(self.kind.formats))
        addresses = [x.data_ptr() for x in given]
        if not all(addresses):
            raise RuntimeError("a weight of a layer that calls of kernels compute is not in memory")
        self._bound = Bound(parameters, how, biases, given, addresses, number)
        return self._bound

    def _before(self, steps: Steps, bound: Bound, x: Tensor, *angles: Tensor) -> list[Tensor]:
        attention, parts = self.attention, self.parts
        normed = _norm(steps, x, parts.before)
        q, k, v = (self._product(steps, bound, normed, module, beside=i > 0).view(x.shape[0], -1, attention.head_dim)
                   for i, module in enumerate((parts.q, parts.k, parts.v)))  # fmt: skip
        if self._head_norms:
            q, k = (_norm(steps, y.flatten(0, 1), module, beside).view(y.shape)
                    for y, module, beside in ((q, attention.q_norm, False), (k, attention.k_norm, True)))  # fmt: skip
        if not angles:
            return [q, k, v]
        cos, sin = angles
        return [steps.rotate(q, cos, sin), steps.rotate(k, cos, sin, beside=True), v]

    def _after(self, steps: Steps, bound: Bound, x: Tensor, attended: Tensor) -> list[Tensor]:
        parts, act = self.parts, ACTS[self._act_name]
        x = self._product(steps, bound, attended, parts.out, residual=x)
        normed = _norm(steps, x, parts.after)
        if parts.gate is None:
            inner = steps.gate(self._product(steps, bound, normed, parts.up), None, act)
        else:
            gate = self._product(steps, bound, normed, parts.gate)
            inner = steps.gate(gate, self._product(steps, bound, normed, parts.up, beside=True), act)
        return [self._product(steps, bound, inner, parts.down, residual=x)]

    def _whole(self, steps: Steps, bound: Bound, x: Tensor, *rest: Any) -> list[Tensor]:
        *angles, decoding = rest
        q, k, v = self._before(steps, bound, x, *angles)
        attended = steps.append_and_attend(q, k, v, decoding, self.options["scaling"], self.options["softcap"])
        return self._after(steps, bound, x, attended.flatten(1))

    @staticmethod
    def _product(
        steps: Steps, bound: Bound, x: Tensor, module: FastLinear, residual: Tensor | None = None, beside: bool = False
    ) -> Tensor:
        return module.product.add_to(steps, x, module, bound.biases[module], residual, beside)


def _tensors(decoding: Decoding) -> tuple[Tensor, ...]:
    at = decoding
    return at.pool, at.tables, at.lengths, at.pages, at.offsets, at.memory


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _norm(steps: Steps, x: Tensor, module: Any, beside: bool = False) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return steps.norm(x, module.weight, module.eps, beside=beside, bias=module.bias, centred=True)
    eps, shift = module.rms
    return steps.norm(x, module.weight, getattr(module, eps), shift, beside)


def release(model: Any) -> None:
    """Drop what layers keep from call to call: memory for intermediate results, and references to weights."""
    for module in model.modules():
        if isinstance(module, PausingLayer) and module.halves is not None:
            module.halves.release()
