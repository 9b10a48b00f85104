"""Decoder layers as two calls of native kernels: all before attention in one, all after it in the other.

    before   norm, queries | keys | values, rotary positions if there are any
    after    output projection + residual, norm, gate | up or up alone, activation, down projection + residual

Of prompts, most rows have no logits. In the last layer only keys and values of these rows are computed, so that the
calls before attention are two: keys | values of all rows, queries of some.

If the pages of the KV cache are at hand, one call computes the whole layer, attention too, and layers after it whose
weights and pages are at hand. native/recognise.py tells which layers compute so. Dtypes other than fp32, GPUs, and
passes that watch or replace modules use the modules.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import greenlet
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.paged import PagedAttention
from flexengine.kernels.recycled import Recycled
from flexengine.kernels.steps import RecordedSteps, Steps
from flexengine.model.forward import Attend, PausingLayer, attend, this_pass
from flexengine.model.linear import FastLinear, unwatched

MOST_CALLS = 64  # recorded calls that layers of equal settings keep
PART = 512  # rows that are computed together, so that what one step writes stays in the CPU's caches for the next
MOST_PRODUCTS = 10**11  # multiply-adds of a call of several layers, a second on two cores: Ctrl-C waits for its end
# Names of activation functions, by class.
ACTS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "ReLU": "relu"}


class LayerParts(NamedTuple):
    """The modules of a layer."""

    attention: Any  # module that has the projections to queries, keys and values
    act: tuple[Any, str]  # module with the activation function, and the name of its attribute
    rotary: bool  # whether positions are rotary; if not, the layer gets no cosines and sines
    factor: float  # by which the layer multiplies queries before attention
    before: Any  # norm before attention
    after: Any  # norm after attention
    q: FastLinear  # projections of attention
    k: FastLinear
    v: FastLinear
    out: FastLinear
    up: FastLinear  # projections of the MLP
    down: FastLinear
    gate: FastLinear | None = None
    q_norm: Any = None  # norms of the heads of queries and keys
    k_norm: Any = None


class BoundWeights(NamedTuple):
    """The weights of a layer as they are bound now."""

    parameters: list[Any]  # the modules' weights and biases; None for no bias
    how: list[tuple[bool, Any]]  # by linear module, whether its weight is reordered, and how activations are rounded
    biases: dict[FastLinear, Tensor | None]  # by linear module, its bias in fp32; None for none
    given: list[Tensor]  # the tensors that the calls read
    addresses: list[int]  # of these
    format: int  # their number in `LayerKind.formats`


class Scratch(Recycled):
    """Memory for calls, which all layers of a model share. Fresh memory for every call would cost page faults."""

    block = torch.empty(0, dtype=torch.uint8)  # for intermediate results; as large as a call has needed

    def release(self) -> None:
        super().release()
        self.block = Scratch.block


class LayerKind:
    """Calls and memory of layers of equal settings. proven: returns whether they compute so (native/recognise.py)."""

    def __init__(self, proven: Callable[[], bool], scratch: Scratch) -> None:
        self.proven, self.scratch = proven, scratch
        self.formats = dict[Hashable, int]()  # a number for each combination of shapes and formats of a layer's weights
        self._calls: dict[Hashable, RecordedSteps] = {}  # the one used last is the last one
        self.release()

    def release(self) -> None:
        """Drop all tensors."""
        self.scratch.release()
        # Page tables, key and call of the last whole layer; the next layers of a sweep have the same.
        self.recent: tuple[Tensor, Hashable, RecordedSteps] | None = None
        self._angles: tuple[Any, tuple[int, ...], list[Tensor] | None] = None, (), None

    def call(self, key: Hashable, record: Callable[[], RecordedSteps]) -> RecordedSteps:
        """Return the call with a key, and make the scratch memory as large as it needs. If there is none, record it."""
        if (found := self._calls.pop(key, None)) is None:
            found = record()
            if len(self._calls) >= MOST_CALLS:
                del self._calls[next(iter(self._calls))]
        self._calls[key] = found
        if self.scratch.block.nbytes < found.nbytes:
            self.scratch.block = torch.empty(found.nbytes, dtype=torch.uint8)
        return found

    def angles(self, positions: Any, shape: tuple[int, ...]) -> list[Tensor] | None:
        """Return cosines and sines, [tokens, head_dim]; None if they are others than the calls can use. positions:
        argument `position_embeddings`, the same object for all layers of a pass; shape: (1, tokens, head_dim)."""
        if self._angles[0] is not positions or self._angles[1] != shape:
            fine = type(positions) is tuple and len(positions) == 2
            fine = fine and all(x.shape == shape and x.dtype == torch.float32 for x in positions)
            self._angles = positions, shape, [x[0].contiguous() for x in positions] if fine else None
        return self._angles[2]


class NativeLayer:
    """The calls of one layer. Layers of a kind share recorded calls: adding the steps of one takes as long as products.

    event: a pause of the layer at attention; kind: what the layer shares with others.
    """

    def __init__(self, layer: Any, parts: LayerParts, event: Attend, kind: LayerKind) -> None:
        self.parts, self.attention, self.kind = parts, parts.attention, kind
        scaling = event.scale * parts.factor
        # Arguments that the layer's attention module passes to the attention function.
        self.options: dict[str, Any] = {"scaling": scaling, "sliding_window": event.window, "softcap": event.softcap}
        modules = list(layer.modules())
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for m in modules]
        self._linear: list[FastLinear] = [m for m in modules if isinstance(m, FastLinear)]
        self._layer_norms = [m for m in modules if isinstance(m, nn.LayerNorm)]
        with_weights = [m._parameters for m in modules if m._parameters.get("weight") is not None]
        self._parameters = [(parameters, name) for parameters in with_weights for name in parameters]
        self._bound: BoundWeights | None = None
        self.following: NativeLayer | None = None  # the next layer; None if there is none, or if it does not compute so
        # Whether, in the last pass, the layer's input was the output of the layer before, and both got the same
        # positions. Only then can it be computed with the layer before.
        self.joined = False
        self.last = False  # whether only a norm and the output projection follow: only rows with logits are needed

    def usable(self, hidden: Tensor, positions: Any) -> bool:
        """Return whether the calls can replace the modules now.

        Args:
            hidden: [1, tokens, hidden], input of the layer.
            positions: argument `position_embeddings` of the layer.
        """
        with unwatched():
            shape = (1, hidden.shape[1], self.attention.head_dim)
            if hidden.dtype != torch.float32 or hidden.device.type != "cpu":
                return False
            if self.parts.rotary and self.kind.angles(positions, shape) is None:
                return False
        return not getattr(greenlet.getcurrent(), "queries_first", False) and self._unchanged and self.kind.proven()

    @property
    def _unchanged(self) -> bool:
        """Whether nothing watches or replaces the layer's modules."""
        if self._act_name not in ACTS or any(self._hooks):
            return False
        for module in self._linear:  # the class differs with records of neurons
            form = module.forms.get("weight")
            if type(module) is not FastLinear or not (form is None or form.in_steps):
                return False
        return not any("forward" in attributes for attributes in self._attributes)

    @property
    def _act_name(self) -> str:
        return type(getattr(*self.parts.act)).__name__

    def __call__(self, hidden: Tensor, positions: Any) -> tuple[int, Tensor]:
        """Compute the layer, and layers after it if this can be done in the same call. hidden, positions: as in
        `usable`.

        Returns:
            The number of layers, and the output of the last one, [1, tokens, hidden].
        """
        with unwatched():
            x = hidden[0]
            angles = self.kind.angles(positions, (1, len(x), self.attention.head_dim)) if self.parts.rotary else []
            assert angles is not None
            if layers := self._together(len(x)):
                return len(layers), self._layers(x, angles, layers)[None]
            # The rows whose output is computed; None for all, as when over half of them have logits.
            keep = this_pass().inputs.keep if self.last else None
            if keep is not None and 2 * len(keep) > len(x):
                keep = None
            current = this_pass()
            attended, current.attended = current.attended, None
            given = None if attended is not None else self._projected(x, angles, keep)
        if given is not None:
            q, k, v = (y.transpose(0, 1)[None] for y in given)
            attended, _ = attend(self.attention, q, k, v, None, **self.options)
            del q, k, v, given
        assert attended is not None
        with unwatched():
            attended = attended.reshape(len(x), -1)
            if keep is None:
                return 1, self._run("after", x, attended)[0][None]
            out = self._empty(x.shape).zero_()
            if len(keep):
                out[keep] = self._run("after", x[keep], attended[keep])[0]
            return 1, out[None]

    def _projected(self, x: Tensor, angles: Sequence[Tensor], keep: Tensor | None) -> list[Tensor]:
        """Return queries, which are 0 where they are not computed, keys and values, [rows, heads, head_dim]."""
        if keep is None:
            return self._run("qkv", x, *angles)
        k, v = self._run("kv", x, *angles)
        dim = self.attention.head_dim
        q = self._empty((len(x), self.parts.q.out_features // dim, dim)).zero_()
        if len(keep):
            q[keep] = self._run("q", x[keep], *(y[keep] for y in angles))[0]
        return [q, k, v]

    def most_layers(self, rows: int) -> int:
        """Return the most layers of one call for a number of tokens."""
        return max(1, MOST_PRODUCTS // (rows * sum(m.in_features * m.out_features for m in self._linear)))

    def _together(self, rows: int) -> list[tuple["NativeLayer", PagedAttention]]:
        """Return the layers that one call can compute with their attention, from this one on, and their pages."""
        given: Sequence[PagedAttention] = getattr(greenlet.getcurrent(), "paged", ())
        dim, parts, found = self.attention.head_dim, self.parts, list[tuple[NativeLayer, PagedAttention]]()
        sizes = parts.q.out_features // dim, parts.k.out_features // dim, dim
        if not given or (given[0].heads, given[0].room.kv_heads, given[0].room.dim) != sizes:
            return []
        format, layer = self._bind().format, cast(NativeLayer | None, self)
        for paged in given[: self.most_layers(rows)]:
            if layer is None or (found and not (layer.joined and layer.kind is self.kind and layer._unchanged)):
                break
            if layer._bind().format != format or (layer.last and paged.pieces is not None):
                break  # with prompts, the last layer computes some rows only
            found.append((layer, paged))
            layer = layer.following
        return found

    def _layers(
        self, x: Tensor, angles: Sequence[Tensor], layers: Sequence[tuple["NativeLayer", PagedAttention]]
    ) -> Tensor:
        """Compute whole layers, which `_together` returned. Return the output of the last one, [rows, hidden]."""
        x, paged, bound, recent = x.contiguous(), layers[0][1], self._bind(), self.kind.recent
        key = bound.format, paged.sizes
        if recent is None or recent[0] is not paged.tables or recent[1] != key:
            call = self._call("whole", bound, (x, *angles), paged)
            self.kind.recent = recent = paged.tables, key, call
        results = [self._empty(*result) for result in recent[2].results]
        rows, source = list[list[int]](), x
        for layer, paged in layers:
            assert layer._bound is not None
            rows.append(self._addresses(layer._bound, (source, *angles, *paged.tensors), results))
            source = results[0]  # a layer reads its input before it writes its output
        recent[2].run(*rows)
        return results[0]

    def _run(self, part: str, *given: Tensor) -> list[Tensor]:
        """Run a part of the layer on the tensors `given` of `_steps`. Return its results, [rows, ...]."""
        bound = self._bind()
        call = self._call(part, bound, given)
        results = [self._empty(*result) for result in call.results]
        call.run(self._addresses(bound, given, results))
        return results

    def _empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous tensor with any values, in memory that is used again if the pass allows it."""
        if this_pass().recycles:
            return self.kind.scratch.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _addresses(self, bound: BoundWeights, given: Sequence[Tensor], results: Sequence[Tensor]) -> list[int]:
        """Return the addresses of a recorded call, which writes the results."""
        to = (*results, self.kind.scratch.block)
        return [*(x.data_ptr() for x in given), *bound.addresses, *(x.data_ptr() for x in to)]

    def _call(
        self, part: str, bound: BoundWeights, given: Sequence[Tensor], paged: PagedAttention | None = None
    ) -> RecordedSteps:
        """Return the call of a part of the layer for tensors of these shapes. Arguments as in `_steps`."""

        def record() -> RecordedSteps:
            steps = cast(NativeKernels, kernels.load()).steps()
            tensors = (*given, *(paged.tensors if paged else ()), *bound.given)
            return RecordedSteps(steps, tensors, self._steps(part, steps, bound, given, paged))

        sizes = [(len(given[0]), *(x.stride() for x in given)), bound.format, torch.get_num_threads()]
        return self.kind.call((part, *sizes, *(paged.sizes if paged else ())), record)

    def release(self) -> None:
        """Drop the references to weights, and the tensors of all layers of this kind."""
        self._bound = None
        self.kind.release()

    def _bind(self) -> BoundWeights:
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
        self._bound = BoundWeights(parameters, how, biases, given, addresses, number)
        return self._bound

    def _steps(
        self, part: str, steps: Steps, bound: BoundWeights, given: Sequence[Tensor], paged: PagedAttention | None
    ) -> list[Tensor]:
        """Add the steps of a part of the layer. Return their results.

        Args:
            part: "after", with x and attention's output; projections, as in "qkv", with x and the angles; or "whole".
            given: [rows, ...].
            paged: attention of "whole".
        """
        if part == "after":
            return [self._after(steps, bound, *given)]
        x, *angles = given
        if paged is None:
            return self._projections(part, steps, bound, x, angles)
        q, k, v = self._projections("qkv", steps, bound, x, angles)
        attended = steps.append_and_attend(q, k, v, paged, self.options["scaling"], self.options["softcap"])
        return [self._after(steps, bound, x, attended.flatten(1)), q, k, v, attended]

    def _projections(
        self, which: str, steps: Steps, bound: BoundWeights, x: Tensor, angles: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return queries, keys and values, [rows, heads, head_dim], or some of these."""
        parts, dim = self.parts, self.attention.head_dim
        results = {name: steps.new((len(x), getattr(parts, name).out_features // dim, dim)) for name in which}
        norms = {name: norm for name, norm in (("q", parts.q_norm), ("k", parts.k_norm)) if norm is not None}
        for rows in steps.parts(len(x), PART):
            normed, made = _norm(steps, x[rows], parts.before), dict[str, Tensor]()
            outs = {name: y[rows] for name, y in results.items()}
            for name, out in outs.items():
                follows = name != "v" and bool(angles or norms)  # then the product is not the result yet
                to = None if follows else out.flatten(1)
                made[name] = _product(steps, bound, normed, getattr(parts, name), beside=bool(made), out=to)
            heads = which.removesuffix("v")
            for name in heads if norms else "":
                to = None if angles else outs[name].flatten(0, 1)
                made[name] = _norm(steps, made[name].view(-1, dim), norms[name], beside=name != heads[0], out=to)
            for name in heads if angles else "":
                cos, sin = (y[rows] for y in angles)
                steps.rotate(made[name].view(outs[name].shape), cos, sin, beside=name != heads[0], out=outs[name])
        return list(results.values())

    def _after(self, steps: Steps, bound: BoundWeights, x: Tensor, attended: Tensor) -> Tensor:
        parts, act, result = self.parts, ACTS[self._act_name], steps.new(x.shape)
        for rows in steps.parts(len(x), PART):
            middle = _product(steps, bound, attended[rows], parts.out, residual=x[rows])
            normed = _norm(steps, middle, parts.after)
            first = _product(steps, bound, normed, parts.gate or parts.up)
            up = None if parts.gate is None else _product(steps, bound, normed, parts.up, beside=True)
            inner = steps.gate(first, up, act)
            _product(steps, bound, inner, parts.down, residual=middle, out=result[rows])
        return result


def _product(
    steps: Steps,
    bound: BoundWeights,
    x: Tensor,
    module: FastLinear,
    residual: Tensor | None = None,
    beside: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    weight, bias = module.weight, bound.biases[module]
    form: Any = module.forms.get("weight")
    if form is not None:
        return steps.product(x, weight, form, bias, module.product.compute, residual, beside, out)
    return steps.linear(x, weight, bias, module.product.rounding(weight), residual, beside, module.packed, out)


def _norm(steps: Steps, x: Tensor, module: Any, beside: bool = False, out: Tensor | None = None) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return steps.norm(x, module.weight, module.eps, beside=beside, bias=module.bias, centred=True, out=out)
    eps, shift = module.rms
    return steps.norm(x, module.weight, getattr(module, eps), shift, beside, out=out)


def release(model: Any) -> None:
    """Drop what layers keep from call to call: memory for intermediate results, and references to weights."""
    for module in model.modules():
        if isinstance(module, PausingLayer) and module.native is not None:
            module.native.release()
