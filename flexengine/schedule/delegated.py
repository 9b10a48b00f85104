"""Tasks of a cell whose attention is computed where its KV cache lies: on the host, or on an attention worker (FlexGen
section 4.2, Lamina).

| resource | meaning |
|---|---|
| ("near", k), ("far", k) | q, k, v of batch k, then the output of attention: on the device (near), at the place (far) |
| ("near kv", k), ("far kv", k) | k, v of batch k, if its queries go first |

A cell has five tasks: the layer up to attention (device), copy of q, k, v to this place, attention, copy of its output
to the device, rest of the layer (device). `Routes.attend` has the lanes of the copies and of attention. The place
computes attention of one batch while the device computes other batches:

    device  P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 P20 ...     P start, A attention, F rest of layer j, batch k
    cpu         A00 A01 A02     A10     A11     A12 ...

If queries go first, the start of such a cell computes queries only, and three more tasks follow the copy of q: keys
and values (device), their copy, and attention over cached tokens, which needs neither. Attention then adds the new
tokens:

    device        P00 K00         F00 P10 K10         F10 P20 ...     K keys and values, S copies, C cached tokens
    worker1_send      S00 S00             S10 S10
    worker1               C00 A00             C10 A10
"""

from collections.abc import Iterator

from flexengine.schedule.expand import WholeCell
from flexengine.schedule.frame import ProgramFrame
from flexengine.schedule.order import CellPart, CellStep
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.rows import ExpertCell
from flexengine.schedule.tasks import Delegate, Op, Resources, Task


class DelegatedCell(WholeCell):
    """Expands cells with delegated attention."""

    def __init__(self, frame: ProgramFrame, prefetch: Prefetch) -> None:
        super().__init__(frame, prefetch)
        self._experts = ExpertCell(frame, prefetch)

    def __call__(self, step: CellStep) -> Iterator[Task]:
        if step.part is CellPart.TO_ATTENTION:
            yield from self.prefetch.in_cell(step)
            yield self.compute(Op.PROJECT, step, writes=(("near", step.cell.batch),))
            yield from self.attention(step)
        else:
            by_rows = bool(self.prefetch.experts(step.cell.layer))
            yield self.compute(Op.FINISH, step, by_rows=by_rows, reads=(("near", step.cell.batch),))
            if by_rows:
                yield from self._experts.load_experts(step)
                yield self._experts.resume(step)

    def attention(self, step: CellStep) -> Iterator[Task]:
        """Yield the tasks that may run while the device computes other cells."""
        cell, place = step.cell, self.batch(step).attention
        send, attend, fetch = self.frame.routes.attend[place]
        k = cell.batch
        near, far, kv = ("near", k), ("far", k), ("kv", cell.layer, k)
        queried: Resources = (far,)
        yield Delegate(Op.SEND, cell, send, (near,), (far,), place)
        if self.batch(step).queries_first:
            near_kv, far_kv = ("near kv", k), ("far kv", k)
            yield self.compute(Op.PROJECT_KEYS, step, writes=(near_kv,))
            yield Delegate(Op.SEND_KEYS, cell, send, (near_kv,), (far_kv,), place)
            yield Delegate(Op.ATTEND_CACHED, cell, attend, (far,), (far,), place)
            queried = (far, far_kv)
        yield Delegate(Op.ATTEND, cell, attend, queried, (kv, far), place)
        yield Delegate(Op.FETCH, cell, fetch, (far,), (near,), place)
