"""Reads the parts of layers that few families have: latent attention, limits, gates and norms of attention's output,
heads in groups, and other forms of rotary positions."""

from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

from flexengine.model.native.describe import (
    GATES,
    HeadsRecord,
    LatentRecord,
    NormRecord,
    OutGateRecord,
    RotaryRecord,
    Undescribed,
    part,
    same,
)
from flexengine.model.native.reader import LayerRun, Reader, Seen


class RarerReader(Reader):
    """Reads the record of a layer from its run.

    Args:
        clip: possible limit of queries, keys and values; 0 for none.
    """

    def __init__(self, run: LayerRun, clip: float) -> None:
        super().__init__(run)
        self.clips = (clip, 0.0) if clip else (0.0,)  # the limit first: usual numbers may be below it

    def _with_latent(self, heads: HeadsRecord) -> HeadsRecord:
        """Return heads with what the projection's input is computed from."""
        x = self._of(heads.path).x
        for seen, norm in self.norms:
            if same(seen.y, x):
                size = seen.x.shape[1]
                found = (s.path for s in self.linear if s.y.shape[1] >= size and same(s.y[:, :size], seen.x))
                if (path := next(found, None)) is not None:
                    return heads._replace(latent=LatentRecord(path, norm))
        return heads

    def _output(self, x: Tensor) -> tuple[OutGateRecord | None, NormRecord | None, Seen]:
        """Return the gate and the norm between attention and its output projection, and the latter. x: input of
        attention."""
        for gate, attended in self._gated(x):
            normed = [(norm, seen.y) for seen, norm in self.norms if same(seen.x, attended)]
            for norm, y in ((None, attended), *normed):
                if (out := next((s for s in self.linear if same(s.x, y)), None)) is not None:
                    return gate, norm, out
        raise Undescribed("what follows attention is not its output projection")

    def _gated(self, x: Tensor) -> Iterator[tuple[OutGateRecord | None, Tensor]]:
        """Yield attention's output without and with possible gates."""
        yield None, self.run.attended
        heads = self.run.attended.shape[1]
        for seen, (act, function) in product(self.linear, GATES.items()):
            if same(seen.x, x) and seen.y.shape[1] in (heads, self.run.attended[0].numel()):
                gate = function(seen.y)
                yield OutGateRecord(seen.path, act), self.run.attended * gate.view(len(gate), heads, -1)

    def _rotary_kinds(self) -> list[RotaryRecord]:
        """Return the possible rotary positions, the frequent ones first."""
        if self.run.angles is None:
            return []
        forms = [("halves", angles) for angles in ("each", "half", "first")]
        forms += [("pairs", angles) for angles in ("each", "pair", "two", "half")]
        forms += [("pairs to halves", angles) for angles in ("each", "half", "first")]
        given = ("cos, sin", "sin, cos", "cos, -sin")
        return [
            RotaryRecord(*form, last, order, end)
            for end, order, last in product((False, True), given, (False, True))
            for form in forms
            if not (end and last)
        ]

    def _nested_keys(self, kinds: Sequence[RotaryRecord | None]) -> tuple[HeadsRecord | None, RotaryRecord | None]:
        """Return the record of keys that end with the same elements in each head, and their rotary positions;
        None if there are none."""
        heads, dim, value_dim = self.k.shape[1], self.k.shape[2], self.v.shape[2]
        for seen in self.linear:
            first, rest = divmod(seen.y.shape[1], heads)
            first -= value_dim
            if rest or not 0 < first < dim:
                continue
            if not same(part(seen.y, "nested", "k", (heads, heads, first)), self.k[..., :first]):
                continue
            latent = self._with_latent(HeadsRecord(seen.path, "nested")).latent
            if latent is None or self._of(latent.path).y.shape[1] != seen.x.shape[1] + dim - first:
                continue
            shared = self._of(latent.path).y[:, None, seen.x.shape[1] :].expand(-1, heads, -1)
            for rotary in kinds:
                if any(same(y, self.k[..., first:]) for _, _, _, y in self._turned(shared, rotary)):
                    return HeadsRecord(seen.path, "nested", latent=latent), rotary
        return None, None

    def _joined(self, which: str, columns: int, target: Tensor) -> Iterator[tuple[str, int]]:
        yield from super()._joined(which, columns, target)
        queries, others, dim = self.q.shape[1], self.k.shape[1], target.shape[-1]
        if columns == 3 * queries * dim and queries == others:
            numbers = {x for m in self.run.layer.modules() for x in vars(m).values() if type(x) is int}
            yield from (("groups", x) for x in sorted(numbers) if x > 1 and queries % x == 0)
        if which == "v" and columns > queries * dim and columns % queries == 0 and queries == others:
            yield "nested", 1
