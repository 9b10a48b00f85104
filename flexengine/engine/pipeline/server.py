"""A stage in a process of its own: it carries out the driver's orders until the driver lets it leave."""

from typing import TYPE_CHECKING, Any, cast

import torch

from flexengine.engine.pipeline.messages import pack_result, unpack_order
from flexengine.engine.pipeline.remote import (
    ANSWER,
    CHOOSE,
    END,
    FAILED,
    LAY_OUT,
    LEAVE,
    PREPARE,
    RESULT,
    SWEEP,
    TRACE,
    failure,
    packed_json,
    pools_json,
    unpacked_json,
    workload_of,
)
from flexengine.engine.stages import LocalStage
from flexengine.lossy import Lossy
from flexengine.parallel.frames import LAST, Ended, Frame
from flexengine.parallel.group import HIDDENS, ORDERS, RESULTS, Group
from flexengine.parallel.ports import SendingPort, TakingPort
from flexengine.plan.layout import Layout
from flexengine.plan.stages import place_weights
from flexengine.policy import Policy
from flexengine.runtime.frames import forget_variables
from flexengine.worker.sequence_text import SequenceText
from flexengine.worker.stage_ports import Ports

if TYPE_CHECKING:
    from flexengine.engine.session import Session


class Server:
    """Carries out orders with one engine, which holds the layers of this stage."""

    def __init__(self, engine: "Session", group: Group) -> None:
        self.engine, self.core, self.planner = engine, engine.core, engine.planner
        rank = group.rank
        self.before = TakingPort(group.receive(rank - 1, HIDDENS))
        self.after = SendingPort(group.send(rank + 1, HIDDENS)) if rank + 1 < group.size else None
        self.results = group.send(0, RESULTS, most=64)
        self.orders = group.receive(0, ORDERS, self._seen)
        self.stage: LocalStage | None = None
        self.failed = False
        self._texts: dict[int, SequenceText] = {}

    def _seen(self, frame: Frame) -> None:
        """Wake a sweep that waits for hidden states, if the job has ended."""
        if frame.kind == END:
            self.before.end(frame.second)

    def run(self) -> None:
        """Carry out orders. Raise StageLost if the driver or a neighbour is lost."""
        try:
            while (frame := self.orders.queue.get()).kind not in (LEAVE, LAST):
                try:
                    with torch.no_grad():
                        self._do(frame)
                except Ended:
                    self.failed = True
                except Exception as error:
                    forget_variables(error)
                    if not self.failed:
                        self._reply(FAILED, frame, failure(error))
                    self.failed = frame.kind == SWEEP
        finally:
            self._end()

    def _do(self, frame: Frame) -> None:
        if frame.kind == CHOOSE:
            self._reply(ANSWER, frame, self._chosen(unpacked_json(frame.body)))
        elif frame.kind == LAY_OUT:
            self._reply(ANSWER, frame, self._planned(unpacked_json(frame.body)))
        elif frame.kind == PREPARE:
            self.before.job = frame.second
            if self.after:
                self.after.job = frame.second
            self.failed = False
            self._reply(ANSWER, frame, self._prepared(unpacked_json(frame.body)))
        elif frame.kind == SWEEP and not self.failed:
            self._sweep(frame)
        elif frame.kind == END:
            self._reply(ANSWER, frame, self._end())

    def _reply(self, kind: int, frame: Frame, values: Any) -> None:
        self.results.queue.put(Frame(kind, frame.kind, frame.second, packed_json(values)))

    def _use(self, asked: dict[str, Any]) -> None:
        """Set the lossy switches that the driver chose."""
        if (lossy := Lossy(**asked["lossy"])) != self.core.lossy:
            self.core.drop_weights()
            self.planner.use(lossy)

    def _chosen(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the policy that is best for this stage alone."""
        self._use(asked)
        workload = workload_of(asked["workload"])
        best = self.planner.choose(workload, self.core.resident, asked["block"], asked["prefill_tokens"])
        return best.policy.to_json()

    def _planned(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the layers, the policy and the predicted seconds of a job."""
        self._use(asked)
        layout = self._lay_out(asked)
        seconds = self.planner.cost(workload_of(asked["workload"])).predict(layout).total_seconds
        skeleton = self.core.skeleton
        return {"layers": [*skeleton.layer_range, skeleton.total], "policy": layout.policy.to_json(),
                "seconds": seconds}  # fmt: skip

    def _lay_out(self, asked: dict[str, Any]) -> Layout:
        """Return the layout of a job."""
        policy, workload = Policy(**asked["policy"]), workload_of(asked["workload"])
        if asked["given"]:
            return self.planner.layout_under(policy, workload)
        cost = self.planner.cost(workload)
        return place_weights(cost, policy, self.core.machine.capacity, self.core.resident).layout

    def _prepared(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Allocate the memory of a job. Return the stage's layers, policy and pools."""
        core, planner = self.core, self.planner
        for place in asked["lost"]:
            core.machine.renew(place)
        self._use(asked)
        workload, layout = workload_of(asked["workload"]), self._lay_out(asked)
        core.opened.prepare()  # before memory is allocated
        core.machine.give_back()
        self.stage = stage = core.stage(planner.watch(workload, layout), ports=Ports(self.before, self.after))
        stage.__enter__()
        return {"layers": stage.layers, "policy": stage.policy.to_json(), "pools": pools_json(stage.pools),
                "cuda": stage.cuda}  # fmt: skip

    def _sweep(self, frame: Frame) -> None:
        stage, order = cast(LocalStage, self.stage), unpack_order(frame.body)
        for event in order.events:
            if event.tokens is None:
                stage.release(event.sequence)
                self._texts.pop(event.sequence.id, None)
            else:
                stage.claim(event.sequence, event.tokens)
        self._texts |= order.texts
        for sequence, tokens in order.grown.items():
            self._texts[sequence].generated.extend(tokens)
        stage.start(order.sweep, self._texts)
        result = stage.result()
        stage.watch.note(order.sweep.batches, result.seconds, stage.executor.times.busy)
        self.results.queue.put(Frame(RESULT, frame.first, frame.second, pack_result(result)))

    def _end(self) -> dict[str, Any]:
        """Free the memory of the job. Return what was measured."""
        stage, self.stage = self.stage, None
        self._texts = {}
        if stage is None:
            return {}
        if self.failed:
            stage.abandon()
        stage.__exit__(None, None, None)
        stage.close()
        core = self.core
        core.machine.give_back()
        return {
            "layers": stage.layers, "policy": stage.policy.to_json(), "plan": stage.watch.report().to_json(),
            "busy": dict(stage.executor.times.busy), "bytes": core.traffic(),
            "peak_bytes": {place: tier.ledger.peak for place, tier in core.machine.tiers.items()},
            TRACE: core.trace.rows(core.skeleton.first) if core.trace else [],
        }  # fmt: skip
