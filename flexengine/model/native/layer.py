"""Decoder layers as two calls of native kernels: all before attention in one, all after it in the other.

    before   norm, queries | keys | values, their norms, rotary positions
    after    output projection + residual, norm, the block that follows + residual

What exactly these compute is in the layer's record (native/describe.py); native/parts.py makes steps of it. If the
block is a module, such as experts, this module is called between two calls of kernels.

Of prompts, most rows have no logits. In the last layer only keys and values of these rows are computed, so that the
calls before attention are two: keys | values of all rows, queries of some.

If the pages of the KV cache are at hand, one call computes the whole layer, attention too, and layers after it whose
weights and pages are at hand. native/recognise.py tells which layers compute so. Dtypes other than fp32, GPUs, and
passes that watch or replace modules use the modules.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_
from pkgutil import resolve_name
from typing import Any, NamedTuple, cast

import greenlet
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.paged import PagedAttention
from flexengine.kernels.steps import RecordedSteps, Steps
from flexengine.model.forward import Attend, PausingLayer, attend, this_pass
from flexengine.model.linear import READS, FastConv1D, FastLinear, unwatched
from flexengine.model.native.kind import LayerKind
from flexengine.model.native.parts import HeadSizes, LayerSteps, widths

KEPT_ROWS = 64  # most rows of which queries, keys and values keep their memory while a module runs
MOST_PRODUCTS = 10**11  # multiply-adds of a call of several layers, a second on two cores: Ctrl-C waits for its end
Whole = Sequence[tuple["NativeLayer", PagedAttention]]  # layers, one after the other, and their pages


class BoundWeights(NamedTuple):
    """The weights of a layer as they are bound now."""

    parameters: list[Any]  # the modules' weights and biases; None for no bias
    how: list[tuple[bool, Any]]  # by linear module, whether its weight is reordered, and how activations are rounded
    biases: dict[nn.Module, Tensor | None]  # by linear module, its bias in fp32; None for none
    given: list[Tensor]  # the tensors that the calls read
    addresses: list[int]  # of these
    format: int  # their number in `LayerKind.formats`


class NativeLayer:
    """The calls of one layer. Layers of a kind share recorded calls: adding the steps of one takes as long as products.

    Args:
        layer: the modules.
        event: a pause of the layer at attention.
        width: elements of cosines and sines; 0 for other positions.
        kind: what the layer shares with others.
    """

    def __init__(self, layer: Any, event: Attend, width: int, kind: LayerKind) -> None:
        self.kind, self.record, self.width = kind, kind.record, width
        record = kind.record
        self.module = module = cast(Callable[[str], Any], layer.get_submodule)
        self.attention = module(record.attention)
        self.blocks = [module(path) for path in record.blocks]  # none if calls compute the block after attention
        dim = event.q.shape[-1] - record.alibi
        self.sizes = HeadSizes(event.q.shape[1], event.k.shape[1], dim, event.v.shape[-1])
        self.options = AttentionOptions(event.scale * record.factor, event.window, event.softcap)
        self._inside = [m for block in self.blocks for m in block.modules()]
        modules = [m for m in layer.modules() if m not in self._inside]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._forwards = [m.__dict__ for m in modules], [m.__dict__.get("forward") for m in modules]
        children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self._children = (*zip(*children, strict=True),)  # dictionaries, keys and values
        # Whether the layer's output is the sum after attention plus the output of the block.
        self.adds = record.post[1] is None and record.closing[1] is None and record.factors[1] == 1.0
        self._linear: list[Any] = [module(path) for path in record.linear]
        norms = [module(path) for path in dict.fromkeys(norm.path for norm in record.used)]
        # A block whose router is part of the call, and whose experts need no module; None if the module must run.
        self.mixture: Any = None
        if len(self.blocks) == 1 and record.norms[1] is not None and not record.shared:
            self.mixture = resolve_name("flexengine.model.router:use_routing")(self.blocks[0], kind)
        norms += [self.mixture.router] if self.mixture else []
        self._norms = [m._parameters for m in norms]
        self._parameters = [(m._parameters, name) for m in (*self._linear, *norms) for name in m._parameters]
        if record.sinks:
            self._parameters.append((self.attention._parameters, record.sinks))
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
            if hidden.dtype != torch.float32 or hidden.device.type != "cpu":
                return False
            if self.record.rotary and self.kind.angles(positions, (1, hidden.shape[1], self.width)) is None:
                return False
        return not getattr(greenlet.getcurrent(), "queries_first", False) and self._unchanged and self.kind.proven()

    @property
    def _unchanged(self) -> bool:
        """Whether nothing watches or replaces the layer's modules."""
        if any(self._hooks) or not _same(*self._children):
            return False
        for module in self._linear:  # the class differs with records of neurons
            form = module.forms.get("weight")
            if type(module) not in (FastLinear, FastConv1D) or not (form is None or form.in_steps):
                return False
        attributes, own = self._forwards
        return _same(attributes, repeat("forward"), own)

    def _given(self, positions: Any, tokens: int) -> list[Tensor]:
        """Return what projections get beside hidden states; see LayerSteps.projections."""
        if self.record.alibi:
            return self.kind.alibi(self.sizes.heads, self.options.scale)
        angles = self.kind.angles(positions, (1, tokens, self.width)) if self.record.rotary else []
        assert angles is not None
        return angles

    def __call__(self, hidden: Tensor, positions: Any) -> tuple[int, Tensor]:
        """Compute the layer, and layers after it if this can be done in the same call. hidden, positions: as in
        `usable`.

        Returns:
            The number of layers, and the output of the last one, [1, tokens, hidden].
        """
        with unwatched():
            x = hidden[0].contiguous()
            given = self._given(positions, len(x))
            layers = self._together(len(x))
        if layers:
            return len(layers), self._whole(x, given, layers)[None]
        with unwatched():
            # The rows whose output is computed; None for all, as when over half of them have logits.
            keep = this_pass().inputs.keep if self.last else None
            if keep is not None and 2 * len(keep) > len(x):
                keep = None
            current = this_pass()
            attended, current.attended = current.attended, None
            known = attended is not None and not self.record.shared
            projected = [] if known else self._projected(x, given, keep)
        qkv, shared = [y.transpose(0, 1)[None] for y in projected[:3]], projected[3:]
        del projected
        if attended is None:
            options = self.options
            sinks = self.attention._parameters[self.record.sinks] if self.record.sinks else None
            how = options.scale, options.window, options.softcap, sinks
            attended, _ = attend(self.attention, qkv[0], qkv[1], qkv[2], None, *how)
        del qkv
        with unwatched():
            parts = [x, attended.reshape(len(x), -1), *shared]
            del attended, shared
            if keep is not None:
                out = self._empty(x.shape).zero_()
                parts = [y[keep] for y in parts]
        if keep is None:
            return 1, self._after(parts)[None]
        if len(keep):
            out[keep] = self._after(parts)
        return 1, out[None]

    def _projected(self, x: Tensor, given: Sequence[Tensor], keep: Tensor | None) -> list[Tensor]:
        """Return queries, which are 0 where they are not computed, keys and values, [rows, heads, dim], and what the
        block gets if it is `shared`, [rows, hidden]."""
        if keep is None:
            return self._run("qkv", x, *given)
        k, v, *shared = self._run("kv", x, *given)
        q = self._empty((len(x), self.sizes.heads, self.sizes.dim + self.record.alibi)).zero_()
        if len(keep):
            some = given if self.record.alibi else [y[keep] for y in given]
            q[keep] = self._run("q", x[keep], *some)[0]
        return [q, k, v, *shared]

    def _after(self, parts: list[Tensor]) -> Tensor:
        """Return the layer's output, [rows, hidden], from its input, attention's output, and the block's input if it is
        `shared`, [rows, ...]. The list is emptied, so that attention's output is freed before a module runs."""
        x, attended, *shared = parts
        parts.clear()
        with unwatched():
            if not self.blocks:
                return self._run("after", x, attended, *shared)[0]
            results = self._run("middle", x, attended)
            del attended
        return self._block(x, [*results, *shared])

    def _block(self, x: Tensor, results: Sequence[Tensor]) -> Tensor:
        """Return the layer's output. If a module computes the block after attention, call it. results: of a call."""
        if not self.blocks:
            return results[0]
        summed, record = results[0], self.record
        given = results[1] if record.norms[1] else results[-1] if record.shared else x if record.parallel else summed
        with unwatched():
            y = self.mixture.compute(*results[1:], self._empty) if self.mixture and len(results) > 2 else None
        outputs = [block(given[None]) for block in self.blocks] if y is None else [y]
        with unwatched():
            first, *others = (y[0] if isinstance(y, tuple) else y for y in outputs)
            y = (first + others[0] if others else first).reshape(summed.shape)
            if self.adds:
                return summed.add_(y)  # the sum that the call "end" has; nothing else reads `summed`
            return self._run("end", summed, y)[0]

    def most_layers(self, rows: int) -> int:
        """Return the most layers of one call for a number of tokens."""
        if any(vars(module).keys() & READS for module in self._inside):
            return 1
        products: int = sum(p.numel() for module in self._inside for p in module.parameters(recurse=False))
        products += sum(inputs * outputs for inputs, outputs in map(widths, self._linear))
        return max(1, MOST_PRODUCTS // (rows * products))

    def _together(self, rows: int) -> list[tuple["NativeLayer", PagedAttention]]:
        """Return the layers that one call can compute with their attention, from this one on, and their pages."""
        paged: Sequence[PagedAttention] = getattr(greenlet.getcurrent(), "paged", ())
        found, sizes = list[tuple[NativeLayer, PagedAttention]](), self.sizes
        if not paged or (paged[0].heads, paged[0].room.kv_heads) != sizes[:2]:
            return []
        if paged[0].room.dim < max(sizes.dim + self.record.alibi, sizes.value_dim):
            return []
        format, layer = self._bind().format, cast(NativeLayer | None, self)
        for pages in paged[: self.most_layers(rows)]:
            if layer is None or (found and not (layer.joined and layer.kind is self.kind and layer._unchanged)):
                break
            if layer._bind().format != format or (layer.last and pages.pieces is not None):
                break  # with prompts, the last layer computes some rows only
            found.append((layer, pages))
            layer = layer.following
        return found

    def _whole(self, x: Tensor, given: Sequence[Tensor], layers: Whole) -> Tensor:
        """Compute whole layers, which `_together` returned. Return the output of the last one, [rows, hidden]."""
        if not self.blocks:
            with unwatched():
                return self._layers(x, given, layers)[0]
        if self.mixture and len(x) <= KEPT_ROWS:
            with unwatched():
                if (out := self.mixture.layers(self, x, given, layers)) is not None:
                    return cast(Tensor, out)
        kept, rest = 3 if self.mixture else 1 if self.record.norms[1] is None else 2, list[Tensor]()
        for layer, pages in layers:
            with unwatched():
                results = layer._layers(x, given, [(layer, pages)], rest)
            shared = results[-1:] if self.record.shared else []
            # The module runs without queries, keys and values; of few rows, the next layer has their memory.
            rest = results[kept : len(results) - len(shared)] if len(x) <= KEPT_ROWS else []
            results = [*results[:kept], *shared]
            x = layer._block(x, results)
        return x

    def _layers(self, x: Tensor, given: Sequence[Tensor], layers: Whole, rest: Sequence[Tensor] = ()) -> list[Tensor]:
        """Compute whole layers in one call, but for modules. Return the results of the last one, [rows, ...]. rest:
        memory of results that an earlier call has returned, and that are not needed any more: all but the first ones,
        and the block's input if it is `shared`."""
        call = self.whole_call(x, given, layers[0][1])
        sizes = call.results
        first = len(sizes) - len(rest) - (1 if rest and self.record.shared else 0)
        results = [self._empty(*size) for size in sizes[:first]]
        results += [*rest, *(self._empty(*size) for size in sizes[first + len(rest) :])]
        call.run(*self.addresses_of(x, given, layers, [results]))
        return results

    def addresses_of(
        self, x: Tensor, given: Sequence[Tensor], layers: Whole, results: Sequence[list[Tensor]]
    ) -> list[list[int]]:
        """Return the addresses of each layer for `RecordedSteps.run`. results: tensors of a layer, which layers have in
        turns; a layer reads its input before it writes its output."""
        same, source, rows = [y.data_ptr() for y in given], x.data_ptr(), list[list[int]]()
        shared = [y.data_ptr() for y in layers[0][1].tensors[1:]]  # layers have other pools only
        turns = [[*(y.data_ptr() for y in own), self.kind.scratch.block.data_ptr()] for own in results]
        for number, (layer, pages) in enumerate(layers):
            assert layer._bound is not None
            to = turns[number % len(turns)]
            rows.append([source, *same, pages.pool.data_ptr(), *shared, *layer._bound.addresses, *to])
            source = to[0]
        return rows

    def whole_call(self, x: Tensor, given: Sequence[Tensor], paged: PagedAttention) -> RecordedSteps:
        """Return the recorded call of whole layers. Arguments as of `_layers`; the weights are bound."""
        bound, recent = self._bound, self.kind.recent
        assert bound is not None
        key = bound.format, paged.sizes
        if recent is None or recent[0] is not paged.tables or recent[1] != key:
            call = self._call("whole", bound, (x, *given), paged)
            self.kind.recent = recent = paged.tables, key, call
        return recent[2]

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
        if old and old.how == how and all(map(is_, parameters, old.parameters)):
            return old
        biases: dict[nn.Module, Tensor | None]
        biases = {m: None if m.bias is None else m.bias.float() for m in self._linear}
        given = [m.weight for m in self._linear] + [bias for bias in biases.values() if bias is not None]
        given += [x for holder in self._norms for x in holder.values() if x is not None]
        if self.record.sinks:
            given.append(self.attention._parameters[self.record.sinks])
        formats = [(m.forms.get("weight"), biases[m] is None, *item) for m, item in zip(self._linear, how, strict=True)]
        plain = [x is None for holder in self._norms for x in holder.values()]
        key = (*((x.shape, x.stride(), x.dtype) for x in given), *formats, *plain)
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
            part: "after" or "middle", with x, attention's output and what is `shared`; "end", with the sum after
                attention and the block's output; projections, as in "qkv", with x and what they get; or "whole".
            given: [rows, ...].
            paged: attention of "whole".
        """
        adder = LayerSteps(self.record, self.module, bound.biases, self.sizes, steps)
        x, *others = given
        if part in ("after", "end"):
            return [getattr(adder, part)(x, *others)]
        if part == "middle":
            return adder.middle(x, *others)
        if paged is None:
            return adder.projections(part, x, others)
        own = {self.sizes.dim + self.record.alibi, self.sizes.value_dim}
        q, k, v, *shared = adder.projections("qkv", x, others, None if own == {paged.room.dim} else paged.room.dim)
        sinks = self.attention._parameters[self.record.sinks] if self.record.sinks else None
        attended = adder.attended(q, k, v, paged, self.options._replace(sinks=sinks))
        results = adder.middle(x, attended) if self.blocks else [adder.after(x, attended, *shared)]
        if self.mixture:
            router = self.mixture.router
            results.append(steps.linear(results[1], router.weight, router._parameters.get("bias")))
        return [*results, q, k, v, attended, *shared]


def _same(holders: Sequence[Any], names: Iterable[str], values: Sequence[Any]) -> bool:
    """Return whether dictionaries have these values at these keys, without a loop in Python."""
    return all(map(is_, map(dict.get, holders, names), values))


def release(model: Any) -> None:
    """Drop what layers keep from call to call: memory for intermediate results, and references to weights."""
    for module in model.modules():
        if isinstance(module, PausingLayer) and module.native is not None:
            module.native.release()
