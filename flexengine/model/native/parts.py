"""The steps of a layer's calls, as its record (native/describe.py) says.

projections   norm, queries | keys | values, their norms, rotary positions
middle        output projection + residual, norm: what the block after attention gets
end           residual + the output of this block, if a module computes it
after         middle, the block and its residual in one call
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.paged import PagedAttention
from flexengine.kernels.steps import Steps
from flexengine.model.linear import FastConv1D, FastLinear
from flexengine.model.native.describe import HeadsRecord, LayerRecord, NormRecord, part

PART = 512  # rows that are computed together, so that what one step writes stays in the CPU's caches for the next


class HeadSizes(NamedTuple):
    """HeadSizes of a layer's attention."""

    heads: int  # query heads
    kv_heads: int
    dim: int  # elements of a head of queries and keys, without ALiBi's
    value_dim: int


def widths(module: Any) -> tuple[int, int]:
    """Return the inputs and outputs of a linear module."""
    return (module.nx, module.nf) if isinstance(module, FastConv1D) else (module.in_features, module.out_features)


class LayerSteps:
    """Adds the steps of calls.

    Args:
        record: of the layer.
        module: returns the module of a path.
        biases: by linear module, its bias in fp32; None for none.
        sizes: of attention.
        steps: gets the steps.
    """

    def __init__(
        self,
        record: LayerRecord,
        module: Callable[[str], Any],
        biases: Mapping[nn.Module, Tensor | None],
        sizes: HeadSizes,
        steps: Steps,
    ) -> None:
        self.record, self.module, self.biases, self.sizes, self.steps = record, module, biases, sizes, steps

    def projections(self, which: str, x: Tensor, given: Sequence[Tensor], width: int | None = None) -> list[Tensor]:
        """Return queries, keys and values, or some of these, as in "qkv".

        Args:
            x: [rows, hidden].
            given: cosines and sines [rows, turned] if positions are rotary; with ALiBi, the additional elements of
                queries [1, heads] and keys [rows, kv_heads].
            width: elements of each head of the results, the last ones 0; None for those that the layer has.

        Returns:
            [rows, heads, width] each; with keys, last, what the block gets if it is `shared`, [rows, hidden].
        """
        record, (heads, kv_heads, dim, value_dim) = self.record, self.sizes
        own = {
            name: (n, d + (record.alibi and name != "v"))
            for name, n, d in (("q", heads, dim), ("k", kv_heads, dim), ("v", kv_heads, value_dim))
        }
        results = {name: self.steps.new((len(x), own[name][0], width or own[name][1])) for name in which}
        shared = [self.steps.new(x.shape)] if record.shared and "k" in which else []
        for rows in self.steps.parts(len(x), PART):
            to = shared[0][rows] if shared else None
            normed = x[rows] if record.norms[0] is None else self._norm(record.norms[0], x[rows], out=to)
            outs = {name: y[rows] for name, y in results.items()}
            direct = {name: y.flatten(1) for name, y in outs.items() if self._direct(name, y)}
            made = self._products(which, normed, direct)
            angles = [y if record.alibi and y.shape[0] == 1 else y[rows] for y in given]
            self._turn([name for name in which if name not in direct], made, angles, outs)
        return [*results.values(), *shared]

    def _heads(self, name: str) -> HeadsRecord:
        record: HeadsRecord = getattr(self.record, name)
        return record

    def _direct(self, name: str, out: Tensor) -> bool:
        """Return whether a projection's output is the result."""
        heads, record = self._heads(name), self.record
        changed = bool(heads.joined or heads.norm or heads.clip or heads.factor != 1.0)
        changed = changed or (name != "v" and bool(record.rotary or record.alibi))
        return not changed and widths(self.module(heads.path))[1] == out.shape[1] * out.shape[2]

    def _products(self, which: str, x: Tensor, outs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of projections, by path, and of norms between two of them. x: [rows, hidden], input of
        attention; outs: receive outputs, by name."""
        made, after = dict[str, Tensor](), 0  # after: number of products with latents
        named = [(name, self._heads(name)) for name in which]
        latents = {heads.latent: widths(self.module(heads.path))[0] for _, heads in named if heads.latent}
        for latent in latents:
            made[latent.path] = self._product(latent.path, x, beside=bool(made))
        for name, heads in named:
            if heads.latent is None and heads.path not in made:
                made[heads.path] = self._product(heads.path, x, beside=bool(made), out=outs.get(name))
        for number, (latent, size) in enumerate(latents.items()):
            made[latent.norm.path] = self._norm(latent.norm, made[latent.path][:, :size], beside=number > 0)
        for name, heads in named:
            if heads.latent is not None and heads.path not in made:
                inner = made[heads.latent.norm.path]
                made[heads.path] = self._product(heads.path, inner, beside=after > 0, out=outs.get(name))
                after += 1
        return made

    def _turn(
        self, names: Sequence[str], made: Mapping[str, Tensor], given: Sequence[Tensor], outs: Mapping[str, Tensor]
    ) -> None:
        """Write the results `outs`: norms, limits, rotary positions, places of heads. made: of `_products`; given: as
        in `projections`."""
        record, rotary, after = self.record, self.record.rotary, 0  # after: number of steps of this kind
        cut = {name: self._cut(name, made) for name in names}
        last = rotary is not None and rotary.last
        for name, heads in ((name, self._heads(name)) for name in (() if last else cut)):
            if heads.norm is not None:
                follows = name != "v" and bool(rotary or record.alibi)
                cut[name] = self._head_norm(heads, cut[name], after > 0, None if follows else outs[name])
                after += 1
        for name, y in cut.items():
            for act, number in (("clip", self._heads(name).clip), ("scale", self._heads(name).factor)):
                if number != (0.0 if act == "clip" else 1.0):
                    self.steps.gate(y.view(len(y), -1), None, act, number)
        after = 0
        for name, y in cut.items():
            if y.data_ptr() != outs[name].data_ptr():
                self._place(name, y, self._shared_part(name, made), given, after > 0, outs[name])
                after += 1

    def _cut(self, name: str, made: Mapping[str, Tensor]) -> Tensor:
        """Return the part of a projection's output that `part` returns."""
        (heads, kv_heads, dim, value_dim), record, shared = self.sizes, self._heads(name), self._shared_part(name, made)
        size = value_dim if name == "v" else dim if shared is None else dim - shared.shape[2]
        cut: Tensor = part(made[record.path], record.joined, name, (heads, kv_heads, size), record.groups)
        return cut

    def _shared_part(self, name: str, made: Mapping[str, Tensor]) -> Tensor | None:
        """Return the last elements of keys if all heads have the same ones, [rows, kv_heads, elements]; None if not."""
        heads = self._heads(name)
        if name != "k" or heads.joined != "nested" or heads.latent is None:
            return None
        rest = made[heads.latent.path][:, None, made[heads.latent.norm.path].shape[1] :]
        return rest.expand(-1, self.sizes.kv_heads, -1)

    def _place(
        self, name: str, y: Tensor, rest: Tensor | None, given: Sequence[Tensor], beside: bool, out: Tensor
    ) -> None:
        """Write heads, with rotary positions, and what belongs to ALiBi. rest: of `_shared_part`."""
        rotary = self.record.rotary if name != "v" else None
        cos, sin = given if rotary is not None else (None, None)
        pairing = "halves" if rotary is None else rotary.pairing
        norm = self._heads(name) if rotary is not None and rotary.last and self._heads(name).norm else None
        if y.dim() == 4:  # groups of heads
            for number, (some, to) in enumerate(zip(y.unbind(1), out.chunk(y.shape[1], 1), strict=True)):
                self.steps.rotate(some, cos, sin, beside or number > 0, to, pairing)
        elif rest is not None or (rotary is not None and rotary.end):
            start = self.sizes.dim - (given[0].shape[1] if rest is None else rest.shape[2])
            self.steps.rotate(y[..., :start], None, None, beside, out[..., :start])
            self.steps.rotate(y[..., start:] if rest is None else rest, cos, sin, True, out[..., start:], pairing)
        else:
            extra = given["qk".index(name)] if self.record.alibi and name != "v" else None
            turned = self.steps.rotate(y, cos, sin, beside, None if norm else out, pairing, extra)
            if norm is not None:
                self._head_norm(norm, turned, False, out)

    def _head_norm(self, record: HeadsRecord, y: Tensor, beside: bool, out: Tensor | None) -> Tensor:
        """Return heads after their norm: in `out`, if it has their shape."""
        assert record.norm is not None
        out = None if out is None or out.shape != y.shape else out
        if not record.whole:
            return self._norm(record.norm, y, beside=beside, out=out)
        flat = None if out is None else out.flatten(1)
        return self._norm(record.norm, y.view(len(y), -1), beside=beside, out=flat).view(y.shape)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, paged: PagedAttention, options: AttentionOptions) -> Tensor:
        """Return attention over pages, [rows, heads * value_dim]."""
        out = self.steps.append_and_attend(q, k, v, paged, options)
        if out.shape[2] == self.sizes.value_dim:
            return out.flatten(1)
        narrow = self.steps.new((*out.shape[:2], self.sizes.value_dim))
        return self.steps.rotate(out[..., : self.sizes.value_dim], None, None, out=narrow).flatten(1)

    def middle(self, x: Tensor, attended: Tensor) -> list[Tensor]:
        """Return the sum after attention, [rows, hidden], and, if norms[1] makes it, the input of the block."""
        results = [self.steps.new(x.shape) for _ in range(1 if self.record.norms[1] is None else 2)]
        for rows in self.steps.parts(len(x), PART):
            self._middle(x[rows], attended[rows], *(y[rows] for y in results))
        return results

    def end(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output. x: the sum after attention; y: output of the block, [rows, hidden] each."""
        result = self.steps.new(x.shape)
        for rows in self.steps.parts(len(x), PART):
            self._added(x[rows], y[rows], 1, result[rows])
        return result

    def after(self, x: Tensor, attended: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return the layer's output. x: input of the layer; attended: attention's output; shared: input of the block if
        it is that of attention, [rows, ...] each."""
        result, mlp = self.steps.new(x.shape), self.record.mlp
        for rows in self.steps.parts(len(x), PART):
            summed, given = self._middle(x[rows], attended[rows])
            given = given if shared is None else shared[rows]
            first = up = self._product(mlp.up, given)
            if mlp.gate:
                first = self._product(mlp.gate, given, beside=True)
            gated: Tensor | None = up if mlp.gate else None
            if mlp.joined:
                halves = up.chunk(2, 1)
                first, gated = halves if mlp.joined == "gate_up" else halves[::-1]
            inner = self.steps.gate(first, gated, mlp.act)
            inner = inner if mlp.norm is None else self._norm(mlp.norm, inner)
            self._summed(summed, mlp.down, inner, 1, result[rows])
        return result

    def _middle(
        self, x: Tensor, attended: Tensor, to: Tensor | None = None, block: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        record, norm = self.record, self.record.norms[1]
        summed = self._summed(x, record.out, self._finished(x, attended), 0, to)
        given = x if record.parallel else summed
        return summed, given if norm is None else self._norm(norm, given, out=block)

    def _finished(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the input of attention's output projection: attention with its gate and its norm."""
        gate, norm = self.record.out_gate, self.record.norms[0]
        if gate is not None:
            by = self._product(gate.path, x if norm is None else self._norm(norm, x))
            to = None if by.shape == attended.shape else self.steps.new(attended.shape)
            attended = self.steps.gate(by, attended, gate.act, out=to)
        return attended if self.record.out_norm is None else self._norm(self.record.out_norm, attended)

    def _summed(self, x: Tensor, path: str, y: Tensor, number: int, out: Tensor | None = None) -> Tensor:
        """Return the residual x plus a projection of y, with norms and factor. number: 0 after attention, 1 at the
        end."""
        record = self.record
        if record.post[number] is None and record.factors[number] == 1.0:
            closing = record.closing[number]
            total = self._product(path, y, residual=x, out=None if closing else out)
            return total if closing is None else self._norm(closing, total, out=out)
        return self._added(x, self._product(path, y), number, out)

    def _added(self, x: Tensor, y: Tensor, number: int, out: Tensor | None) -> Tensor:
        """Return the residual x plus y, with norms and factor."""
        record = self.record
        post, closing, factor = record.post[number], record.closing[number], record.factors[number]
        to = None if closing else out
        if post is not None and factor == 1.0:
            total = self._norm(post, y, residual=x, out=to)
        else:
            total = self.steps.add(x, y if post is None else self._norm(post, y), factor, out=to)
        return total if closing is None else self._norm(closing, total, out=out)

    def _product(
        self, path: str, x: Tensor, residual: Tensor | None = None, beside: bool = False, out: Tensor | None = None
    ) -> Tensor:
        module: FastLinear | FastConv1D = self.module(path)
        bias, form = self.biases[module], module.forms.get("weight")
        if form is not None:
            compute, weight, given = module.product.compute, module.weight, (residual, beside, out)
            return self.steps.product(x, weight, form, bias, compute, *given)
        turned = isinstance(module, FastConv1D)
        weight = module.weight.t() if turned else module.weight
        rounding = None if turned else module.product.rounding(weight)
        return self.steps.linear(x, weight, bias, rounding, residual, beside, not turned and module.packed, out)

    def _norm(
        self,
        record: NormRecord,
        x: Tensor,
        beside: bool = False,
        out: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        module = self.module(record.path)
        weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
        return self.steps.norm(x, weight, record.eps, record.shift, beside, bias, record.centred, out, residual)
