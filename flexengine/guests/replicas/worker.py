"""The first engine's worker, with slices that replicas compute (`schedule.turns`)."""

from typing import Any

from torch import Tensor

from flexengine.guests.replicas.client import Replicas
from flexengine.guests.replicas.messages import SliceInput
from flexengine.model.forward import Attend, Forward, Inputs, Layer
from flexengine.schedule.batches import Batch
from flexengine.schedule.tasks import Compute, Op, Task
from flexengine.schedule.turns import Turns
from flexengine.worker.worker import OPERATIONS, Worker


class TurnsWorker(Worker):
    """Executes the tasks of a job whose slices take turns.

    Args:
        replicas: the other engines, with the weights of the job.
        others: arguments of `Worker`.
    """

    def __init__(self, replicas: Replicas, *others: Any) -> None:
        super().__init__(*others)
        self.replicas = replicas
        turns = Turns(replicas.engines, self.layers, self.cache.layout.policy.order)
        self.engine = self.turn = turns.engine

    def begin(self, *args: Any) -> None:
        self._paused: dict[int, int] = {}  # by gpu_batch: layer at whose attention its pass here is paused
        self._hidden: dict[int, Tensor] = {}  # by gpu_batch: input of the layer whose attention is computed
        self.replicas.begin()
        super().begin(*args)

    def _pass(self, batch: Batch, inputs: Inputs, mode: Any) -> Forward:
        if not batch.delegated:
            return super()._pass(batch, inputs, mode)
        return Forward(self.skeleton.model, inputs, mode, recycles=True, rotates=True)

    def _project(self, task: Compute) -> None:
        (_, layer, k), state = task.cell, self._states[task.cell.batch]
        if layer == 0:
            self._embed(task, state)
        assert isinstance(state.event, Layer)
        if self.engine(layer + 1, k):
            self._hidden[k] = state.event.hidden.clone()  # layers may change their input in place
        super()._project(task)
        self._paused[k] = layer

    def _finish(self, task: Compute) -> None:
        (_, layer, k), state = task.cell, self._states[task.cell.batch]
        if self._paused.pop(k) == layer:
            super()._finish(task)
            return
        event = state.forward.leave_layer()
        while isinstance(event, Layer) and event.index < layer:
            event = state.forward.resume(None)
        self.weights.bind(layer, task.slot)
        self.weights.machine.keep_until_read(hidden := self._hidden.pop(k))  # made by the lane that took it back
        event = state.forward.finish(hidden, self.attender(task).answer(k))
        state.event = self._to_rows(task, state, event)
        if not task.by_rows:
            self._end(task, state)

    def _leave(self, task: Task) -> None:
        (_, layer, k), state = task.cell, self._states[task.cell.batch]
        self.replicas.enter(self.engine(layer + 1, k), k, state.forward.inputs.positions, self._hidden[k])

    def _hand_over(self, task: Task) -> None:
        number, k = task.cell.layer + 1, task.cell.batch
        engine = self.engine(number, k)
        given = SliceInput(k, number, self.engine(number + 1, k) != engine)
        self.replicas.request(engine, given, self.attender(task).answer(k))

    def _take_back(self, task: Task) -> None:
        (_, layer, k), state = task.cell, self._states[task.cell.batch]
        result, tensors = self.replicas.answer(self.engine(layer, k), k, layer)
        device = self.weights.machine.compute
        query, key, value, *others = (x.to(device) for x in tensors)
        if self.engine(layer + 1, k) != self.engine(layer, k):
            self._hidden[k] = others.pop(0)
        event = Attend(layer, query, key, value, result.scale, None, result.softcap, others[0] if others else None)
        self.attender(task).ask(k, self._attended(layer, event), state.view)

    def drop(self) -> None:
        super().drop()
        self._paused, self._hidden = {}, {}

    operations = OPERATIONS | {
        Op.PROJECT: _project,
        Op.FINISH: _finish,
        Op.LEAVE: _leave,
        Op.HAND_OVER: _hand_over,
        Op.TAKE_BACK: _take_back,
    }
