"""The record of a layer (native/describe.py), read from a run of a small one with random weights.

The inputs and outputs of its modules show which one feeds which, with what between. Norms, activation functions, rotary
positions and factors are found by trying what the kernels can compute. No name and no code of the layer is looked at. A
comparison of whole layers decides whether the record is right (native/recognise.py).
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.model.forward import Attend
from flexengine.model.native.describe import (
    ACTIVATIONS,
    POSITIONS,
    HeadsRecord,
    LayerRecord,
    MlpRecord,
    NormRecord,
    OutGateRecord,
    RotaryRecord,
    Undescribed,
    is_linear,
    norm_of,
    part,
    rotated,
    same,
)


class Seen(NamedTuple):
    """What a module got and gave in a run."""

    path: str
    module: nn.Module
    x: Tensor  # [tokens, ...]
    y: Tensor


class LayerRun(NamedTuple):
    """A run of a small layer. Tensors are [tokens, ...]."""

    layer: nn.Module
    seen: list[Seen]  # modules in the order of their ends
    x: Tensor  # input
    event: Attend  # at attention
    angles: tuple[Tensor, Tensor] | None  # cosines and sines
    attended: Tensor  # [tokens, heads, dim], attention's output
    result: Tensor
    outputs: int | None


class Reader:
    """Reads the record of a layer from its run. Parts that few families have are in native/rarer.py."""

    clips: tuple[float, ...] = (0.0,)  # possible limits of queries, keys and values; 0 for none

    def __init__(self, run: LayerRun) -> None:
        self.run = run
        self.linear = [s for s in run.seen if is_linear(s.module)]
        found = ((s, norm_of(s.module, s.path, s.x.shape[-1])) for s in run.seen if not is_linear(s.module))
        self.norms = [(s, norm) for s, norm in found if norm is not None]
        self.scalars = {x for m in run.layer.modules() for x in vars(m).values() if type(x) is float}
        event = run.event
        self.q, self.k, self.v = (x[0].transpose(0, 1) for x in (event.q, event.k, event.v))
        self.alibi = self.q.shape[-1] == self.v.shape[-1] + 1 and self._is_alibi()
        if self.alibi:
            self.q, self.k = self.q[..., :-1], self.k[..., :-1]

    def record(self) -> LayerRecord:
        """Return the record. Raise Undescribed if there is none."""
        run = self.run
        values = self._values()
        q, k, rotary, factor = self._queries_and_keys()
        heads = [self._with_latent(heads) for heads in (q, k, values)]
        paths = [x.latent.path if x.latent else x.path for x in heads]
        inputs = [self._of(path).x for path in paths]
        if not all(same(x, inputs[0]) for x in inputs[1:]):
            raise Undescribed("queries, keys and values are computed from different inputs")
        before = self._norm_to(inputs[0], run.x, "the input of its attention")
        gate, norm, out = self._output(inputs[0])
        record = self._rest(heads, rotary, factor, before, out)
        return self._checked(record._replace(out_norm=norm, out_gate=gate))

    def _with_latent(self, heads: HeadsRecord) -> HeadsRecord:
        return heads

    def _output(self, x: Tensor) -> tuple[OutGateRecord | None, NormRecord | None, Seen]:
        """Return the gate and the norm between attention and its output projection, and the latter. x: input of
        attention."""
        if (out := next((s for s in self.linear if same(s.x, self.run.attended)), None)) is not None:
            return None, None, out
        raise Undescribed("what follows attention is not its output projection")

    def _rest(
        self,
        heads: Sequence[HeadsRecord],
        rotary: RotaryRecord | None,
        factor: float,
        before: NormRecord | None,
        out: Seen,
    ) -> LayerRecord:
        """Return the record of a layer whose attention is known. heads: of queries, keys and values."""
        (post, attended), known = self._posted(out.y), {out.path, *(one.path for one in heads)}
        found = (*heads, rotary, factor, before, post)
        for summed, first, closing in self._sums(self.run.x, attended):
            for x, norm, _ in self._inputs(summed, None):
                for mlp, y in self._blocks(x, known):
                    if (
                        record := self._ends(found, out, [(summed, first)], (norm, closing, mlp, False), y)
                    ) is not None:
                        return record
        bases = [(self.run.x + f * attended, f) for f in (1.0, *sorted(self.scalars)) if f]
        for x, norm, shared in self._inputs(self.run.x, before):
            for mlp, y in self._blocks(x, known):
                if (record := self._ends(found, out, bases, (norm, None, mlp, shared), y, True)) is not None:
                    return record
        raise Undescribed("how its parts are added is not known")

    def _ends(
        self,
        found: tuple[Any, ...],
        out: Seen,
        bases: Sequence[tuple[Tensor, float]],
        block: tuple[Any, ...],
        y: Tensor,
        parallel: bool = False,
    ) -> LayerRecord | None:
        """Return the record if the block's output y and one of the bases give the layer's output."""
        (q, k, v, rotary, factor, before, post), (norm, closing, mlp, shared) = found, block
        after, y = self._posted(y)
        for base, first in bases:
            for total, second, end in self._sums(base, y):
                if same(total, self.run.result):
                    return LayerRecord(
                        self._attention(),
                        q,
                        k,
                        v,
                        out.path,
                        mlp,
                        (before, norm),
                        (post, after),
                        (closing, end),
                        (first, second),
                        rotary,
                        factor,
                        self.alibi,
                        self._sinks(),
                        parallel,
                        shared,
                        self.run.outputs,
                    )
        return None

    def _checked(self, record: LayerRecord) -> LayerRecord:
        """Return a record that has all parameters of the layer. Raise Undescribed for another one."""
        known = {*record.linear, *(norm.path for norm in record.used)}
        for name in self.run.layer.state_dict():
            path, _, own = name.rpartition(".")
            inside = any(f"{path}.".startswith(f"{block}.") for block in record.blocks)
            if path not in known and not inside and name != f"{record.attention}.{record.sinks}":
                raise Undescribed(f"it has {path or own}, whose use is not known")
        return record

    def _of(self, path: str) -> Seen:
        return next(s for s in self.run.seen if s.path == path)

    def _attention(self) -> str:
        number = self.run.event.layer
        named = self.run.layer.named_modules()
        found: list[str] = [path for path, m in named if vars(m).get("layer_idx") == number and path]
        if not found:
            raise Undescribed("it has no attention module")
        return found[0]

    def _sinks(self) -> str:
        if (sinks := self.run.event.sinks) is None:
            return ""
        module = self.run.layer.get_submodule(self._attention())
        if found := [name for name, x in module.named_parameters(recurse=False) if same(x, sinks)]:
            return found[0]
        raise Undescribed("the sinks of its attention are no parameter")

    def _is_alibi(self) -> bool:
        from flexengine.model.adapters import slopes  # few models have such positions

        q, k = self.q[..., -1], self.k[..., -1]
        positions = torch.tensor(POSITIONS)[:, None] * torch.tensor(slopes(k.shape[1]))
        return same(q, torch.full_like(q, 1 / self.run.event.scale)) and same(k, positions)

    # Queries, keys, values.

    def _values(self) -> HeadsRecord:
        for factor in (1.0, *sorted(self.scalars)):
            if factor and (found := self._heads("v", self.v, [None], factor)[0]) is not None:
                return found._replace(factor=factor)
        raise Undescribed("how its values follow from a projection is not known")

    def _queries_and_keys(self) -> tuple[HeadsRecord, HeadsRecord, RotaryRecord | None, float]:
        kinds: list[RotaryRecord | None] = [None, *self._rotary_kinds()]
        k, rotary = self._heads("k", self.k, kinds, 1.0)
        if k is None:
            k, rotary = self._nested_keys([rotary for rotary in kinds if rotary is None or rotary.end])
        if k is None:
            raise Undescribed("how its keys follow from a projection is not known")
        for factor in (1.0, *sorted(self.scalars)):
            if factor and (found := self._heads("q", self.q, [rotary], factor))[0] is not None:
                return found[0], k, rotary, factor
        raise Undescribed("how its queries follow from a projection is not known")

    def _rotary_kinds(self) -> list[RotaryRecord]:
        """Return the possible rotary positions, the frequent ones first."""
        forms = [(pairing, angles) for pairing in ("halves", "pairs") for angles in ("each", "half", "pair")]
        kinds = [RotaryRecord(*form, last) for last in (False, True) for form in forms]
        return kinds if self.run.angles is not None else []

    def _nested_keys(self, kinds: Sequence[RotaryRecord | None]) -> tuple[HeadsRecord | None, RotaryRecord | None]:
        return None, None

    def _heads(
        self, which: str, target: Tensor, kinds: Sequence[RotaryRecord | None], factor: float
    ) -> tuple[HeadsRecord | None, RotaryRecord | None]:
        """Return the heads' record and the rotary positions that give the target, [tokens, heads, dim]; None if there
        are none."""
        sizes = self.q.shape[1], self.k.shape[1], target.shape[-1]
        for seen in self.linear:
            for joined, groups in self._joined(which, seen.y.shape[1], target):
                x = part(seen.y, joined, which, sizes, groups)
                x = x.flatten(1, 2) if joined == "groups" else x
                for rotary in kinds:
                    for norm, whole, clip, y in self._turned(x, rotary):
                        if same(y * factor, target):
                            return HeadsRecord(seen.path, joined, norm, whole, clip, groups=groups), rotary
        return None, None

    def _joined(self, which: str, columns: int, target: Tensor) -> Iterator[tuple[str, int]]:
        """Yield how a projection with a number of columns may have heads, and in how many groups."""
        queries, others, dim = self.q.shape[1], self.k.shape[1], target.shape[-1]
        for joined, heads in (("", target.shape[1]), ("blocks", queries + 2 * others)):
            if columns == heads * dim:
                yield joined, 1
        if columns == 3 * queries * dim and queries == others:
            yield "heads", 1

    def _turned(
        self, x: Tensor, rotary: RotaryRecord | None
    ) -> Iterator[tuple[NormRecord | None, bool, float, Tensor]]:
        """Yield x with norms, if there are any, limits and rotary positions."""
        angles, last = self.run.angles, rotary is not None and rotary.last

        def turn(x: Tensor) -> Tensor | None:
            return x if rotary is None or angles is None else rotated(rotary, x, *angles)

        first = turn(x) if last else x
        if first is None:
            return
        normed = [
            (norm, s.x.shape[-1] != x.shape[-1], s.y.reshape(x.shape)) for s, norm in self.norms if same(s.x, first)
        ]
        for norm, whole, y in ((None, False, x), *normed):
            for clip in self.clips:
                limited = y.clamp(-clip, clip) if clip else y
                if (turned := limited if last and norm else turn(limited)) is not None:
                    yield norm, whole, clip, turned

    # Norms and sums.

    def _norm_to(self, x: Tensor, start: Tensor, what: str) -> NormRecord | None:
        """Return the norm that makes x of `start`; None if they are the same."""
        if same(x, start):
            return None
        for seen, norm in self.norms:
            if same(seen.y, x) and same(seen.x, start):
                return norm
        raise Undescribed(f"{what} is not a norm of the layer's input")

    def _inputs(self, x: Tensor, shared: NormRecord | None) -> Iterator[tuple[Tensor, NormRecord | None, bool]]:
        """Yield possible inputs of the block after attention: norms of x, and x."""
        for seen, norm in self.norms:
            if same(seen.x, x) and (shared is None or seen.path != shared.path):
                yield seen.y, norm, False
        if shared is not None:
            yield self._of(shared.path).y, None, True
        yield x, None, False

    def _posted(self, y: Tensor) -> tuple[NormRecord | None, Tensor]:
        """Return the norm whose input is y, and its output; None and y if there is none."""
        return next(((norm, seen.y) for seen, norm in self.norms if same(seen.x, y)), (None, y))

    def _sums(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, float, NormRecord | None]]:
        """Yield x + factor * y, its factor, and the norm that follows; None for none."""
        for number in (1.0, *sorted(self.scalars)):
            total = x + number * y
            if number:
                yield from ((seen.y, number, norm) for seen, norm in self.norms if same(seen.x, total))
                yield total, number, None

    # The block after attention.

    def _blocks(self, x: Tensor, known: set[str]) -> Iterator[tuple[MlpRecord, Tensor]]:
        """Yield the blocks with the input x, and their outputs."""
        own = [s for s in self.linear if s.path not in known]
        first = [s for s in own if same(s.x, x)]
        for down in (s for s in own if s not in first):
            normed = [(seen.x, norm) for seen, norm in self.norms if same(seen.y, down.x)]
            for inner, norm in ((down.x, None), *normed):
                if (found := self._inner(first, inner)) is not None:
                    yield found._replace(down=down.path, norm=norm), down.y
        modules = [
            seen
            for seen in sorted(self.run.seen, key=lambda seen: len(seen.path))
            if not is_linear(seen.module)
            and any(True for _ in seen.module.parameters())
            and seen.y.shape == x.shape
            and same(seen.x, x)
        ]
        yield from ((MlpRecord(module=seen.path), seen.y) for seen in modules)
        yield from ((MlpRecord(module=a.path, beside=b.path), a.y + b.y) for a, b in combinations(modules, 2))

    @staticmethod
    def _inner(first: Sequence[Seen], target: Tensor) -> MlpRecord | None:
        """Return projections, and what is between them, that give the input of `down`."""
        for act, function in ACTIVATIONS.items():
            for up in first:
                if same(function(up.y), target):
                    return MlpRecord(up=up.path, act=act)
                if up.y.shape[1] == 2 * target.shape[1]:
                    halves = up.y.chunk(2, 1)
                    for joined, (gate, other) in (("gate_up", halves), ("up_gate", halves[::-1])):
                        if same(function(gate) * other, target):
                            return MlpRecord(up=up.path, joined=joined, act=act)
                for seen in (s for s in first if s is not up and s.y.shape == up.y.shape):
                    if same(function(seen.y) * up.y, target):
                        return MlpRecord(up=up.path, gate=seen.path, act=act)
        return None
