"""A stage in a process of its own: it carries out the driver's orders until the driver lets it leave."""

from typing import Any

import torch

from flexengine.engine.rates import RateStore
from flexengine.engine.session import Session
from flexengine.engine.stages import LocalStage, StageResult
from flexengine.guests.stages.group import HIDDENS, ORDERS, RESULTS, Ended, Frame, OrderKind, PipelineGroup
from flexengine.guests.stages.planner import take_layers
from flexengine.guests.stages.remote import TRACE, ChannelPort, JobOrder, Order, RemoteParts, RemotePlan, failure
from flexengine.guests.wire.link import pack, unpack
from flexengine.plan.candidates import Options
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.stages import place_weights
from flexengine.policy import Policy
from flexengine.runtime.lane import forget_variables
from flexengine.worker.hidden import Ports
from flexengine.worker.row_sequence import RowSequence


class StageServer:
    """Carries out orders with one engine, which holds the layers of this stage."""

    def __init__(self, engine: Session, group: PipelineGroup) -> None:
        self.engine, self.core, self.planner, self.group = engine, engine.core, engine.planner, group
        self.planner.alone, self.planner.cohorts = False, group.size
        rank = group.rank
        self.before = ChannelPort(group.receive(rank - 1, HIDDENS))
        self.after = ChannelPort(group.send(rank + 1, HIDDENS)) if rank + 1 < group.size else None
        self.results = group.send(0, RESULTS, most=64)
        # The end of the job wakes a sweep that waits for hidden states.
        self.orders = group.receive(0, ORDERS, lambda f: self.before.end(f.job) if f.kind == OrderKind.END else None)
        self.stage: LocalStage | None = None
        self.failed = False
        self._members: dict[int, RowSequence] = {}
        self._hardware: dict[str, Any] | None = None  # the driver's rates, if all stages plan with them

    def run(self) -> None:
        """Carry out orders. Raise StageLost if the driver or a neighbour is lost."""
        try:
            while (frame := self.orders.get()).kind not in (OrderKind.LEAVE, OrderKind.LAST):
                try:
                    with torch.no_grad():
                        self._do(frame)
                except Ended:
                    self.failed = True
                except Exception as error:
                    forget_variables(error)
                    if not self.failed:
                        self._reply(OrderKind.FAILED, frame, failure(error))
                    self.failed = frame.kind == OrderKind.SWEEP
        finally:
            self._end()

    def _do(self, frame: Frame) -> None:
        if frame.kind == OrderKind.SWEEP:
            if not self.failed:
                result = self._sweep(unpack(frame.body, Order))
                self.results.put(Frame(OrderKind.RESULT, frame.job, frame.number, body=pack(result)))
        elif frame.kind == OrderKind.END:
            self._reply(OrderKind.ANSWER, frame, self._end())
        else:
            job = unpack(frame.body, JobOrder)
            if frame.kind == OrderKind.PREPARE:
                self.failed = False
                self.before.job = frame.job
                if self.after:
                    self.after.job = frame.job
                for place in job.lost:
                    self.core.machine.renew(place)
            if job.lossy != self.core.lossy:
                self.core.drop_weights()
                self.planner.use(job.lossy)
            self._follow(job)
            work = {OrderKind.CHOOSE: self._chosen, OrderKind.LAY_OUT: self._planned, OrderKind.PREPARE: self._prepared}
            self._reply(OrderKind.ANSWER, frame, work[OrderKind(frame.kind)](job))

    def _follow(self, job: JobOrder) -> None:
        """Take the layers and the rates that an order names."""
        if job.layers:
            take_layers(self.core, self.planner, job.layers[self.group.rank])
        if job.hardware is not None and job.hardware != self._hardware:
            rates, self._hardware = Hardware.from_json(job.hardware, "rates of stage 0"), job.hardware
            self.planner.rates = RateStore(self.core.machine, self.core.opened, rates)

    def _reply(self, kind: OrderKind, frame: Frame, values: Any) -> None:
        self.results.put(Frame(kind, frame.job, frame.kind, body=pack(values)))

    def _chosen(self, job: JobOrder) -> Policy:
        limits = Options(job.prefill_tokens, block=job.block)
        return self.planner.choose(job.workload, self.core.resident, limits).policy

    def _planned(self, job: JobOrder) -> RemotePlan:
        layout, skeleton = self._lay_out(job), self.core.skeleton
        found = self.planner.cost(job.workload).predict(layout)
        layers = (*skeleton.layer_range, skeleton.total)
        return RemotePlan(layers, layout.policy, found.total_seconds, found.bottleneck)

    def _lay_out(self, job: JobOrder) -> Layout:
        if job.given:
            return self.planner.layout_under(job.policy, job.workload)
        cost = self.planner.cost(job.workload)
        return place_weights(cost, job.policy, self.core.machine.capacity, self.core.resident).layout

    def _prepared(self, job: JobOrder) -> RemoteParts:
        core, layout = self.core, self._lay_out(job)
        core.opened.prepare()  # before memory is allocated
        core.machine.give_back()
        self.group.expect(self.group.rank - 1, layout.port_buffer)
        ports = Ports(self.before, self.after)
        self.stage = stage = core.stage(self.planner.watch(job.workload, layout), ports=ports)
        stage.__enter__()
        return RemoteParts(stage.layers, stage.policy, dict(stage.pools), stage.cuda)

    def _sweep(self, order: Order) -> StageResult:
        stage = self.stage
        assert stage is not None
        for sequence, tokens in order.events:
            if tokens is None:
                stage.release(sequence)
                self._members.pop(sequence.id, None)
            else:
                stage.claim(sequence, tokens)
        self._members |= {number: text.sequence(number) for number, text in order.texts.items()}
        for number, grown in order.grown.items():
            self._members[number].token_ids.extend(grown)
        stage.start(order.sweep, self._members)
        result = stage.result()
        stage.watch.note(order.sweep.batches, result.seconds, stage.executor.times.busy)
        return result

    def _end(self) -> dict[str, Any]:
        stage, self.stage = self.stage, None
        self._members = {}
        if stage is None:
            return {}
        if self.failed:
            stage.abandon()
        stage.__exit__(None, None, None)
        stage.close()
        core = self.core
        core.machine.give_back()
        return {
            "layers": stage.layers,
            "policy": stage.policy.to_json(),
            "plan": stage.watch.report().to_json(),
            "busy": dict(stage.executor.times.busy),
            "bytes": core.traffic(),
            "peak_bytes": {place: tier.ledger.peak for place, tier in core.machine.tiers.items()},
            TRACE: core.trace.rows(core.skeleton.first) if core.trace else [],
        }
