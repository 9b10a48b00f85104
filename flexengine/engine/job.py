"""One call of `Engine.stream`, in five steps: survey -> plan -> prepare -> run -> results.

    survey    engine/survey.py      sizes of all rows                      -> Workload
    plan      engine/planner.py     lossy switches, policy, layout         -> Plan
    prepare   engine/core.py        allocate what the layout books         -> JobResources
    run       engine/generation.py  sweeps; results leave as rows finish   -> Result
    results   engine/state.py       counts, seconds, bytes                 -> summary

If memory runs out, `prepare` and `run` are repeated with a smaller layout. If an attention worker is lost, `run` is
called again with a new worker. If several are lost at once, `prepare` is repeated, too.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from flexengine.activity import activity, listener, message
from flexengine.config import Result, SamplingParams
from flexengine.engine.arrange import Arrangement
from flexengine.engine.core import Core
from flexengine.engine.generation import Generation
from flexengine.engine.planner import Plan, Planner
from flexengine.engine.stages import JobResources
from flexengine.engine.state import JobState, Progress
from flexengine.engine.summary import Summary
from flexengine.engine.survey import PromptReader, RequestSpool
from flexengine.engine.sweep_reports import JobRows, SweepReports, best_read_rate
from flexengine.errors import WorkerLost
from flexengine.job.prompts import Request
from flexengine.job.rows import Row
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.runtime.lane import forget_variables
from flexengine.runtime.shortage import Shortage, shortage

# Imported after a failure.
RECOVERY, RENEWED = "flexengine.engine.recovery:Recovery", "flexengine.engine.recovery:renewed_worker"


class Job:
    """The rows of one call of `Engine.stream`, from prompts to results.

    Attributes:
        layout: the present layout; None before the plan is made, and if no row can be run.
        watch: predicted and measured seconds under this layout; None without a layout.
        summary: value of `Engine.summary`; its counts are 0 until the job ends, in any way.
    """

    def __init__(
        self,
        core: Core,
        planner: Planner,
        reader: PromptReader,
        on_sweep: Callable[[Progress], None] | None = None,
        load_first: bool = False,
        rows: JobRows | None = None,
    ) -> None:
        self.core, self.planner, self.reader = core, planner, reader
        self.on_sweep, self.load_first, self.rows = on_sweep, load_first, rows or JobRows()
        self.layout: Layout | None = None
        self.watch: SweepMonitor | None = None
        self.summary = core.empty_summary()

    def results(self, prompts: Iterable[Any], params: SamplingParams | Sequence[SamplingParams]) -> Generator[Result]:
        """Yield results as rows finish. Raise as `Engine.stream`."""
        if iter(prompts) is prompts:  # an iterator can be iterated only once
            prompts = list(prompts)
        if self.rows.total is None and isinstance(prompts, Sized):
            self.rows = replace(self.rows, total=len(prompts))
        self.reader.shares = self.core.shares
        spool = RequestSpool(params if isinstance(params, SamplingParams) else SamplingParams())
        workload = self.reader.survey(prompts, params, spool=spool)
        self.planner.choose_lossy(workload)
        plan = self.planner.plan(workload, self.core.resident)
        tokens = sum(n * times for (_, n), times in plan.workload.sizes.items())
        requests = self.reader.replayed(spool, prompts, params, self.rows.with_prompts)
        state = JobState(self._fitting(requests, plan), Progress(most=tokens))
        if plan.layout is not None:
            if listener() is not None:
                from flexengine.plan.brief import plan_line  # its text is for listeners alone

                cost, kept = self.planner.cost(plan.workload), self.core.resident == plan.layout.policy
                message(plan_line(cost, cost.predict(plan.layout, 0.0 if kept else 1.0)), logging.DEBUG)
            yield from self._run(plan.workload, plan.layout, state)
            return
        for row in state.feed:
            assert isinstance(row, Row)
            state.progress.failed += 1
            yield Result(row.index, error=row.error, prompt=row.prompt)
        self.summary = self._summarise(state, None)

    def _fitting(self, requests: Iterator[Request | Row], plan: Plan) -> Iterator[Request | Row]:
        """Yield the requests that fit, and rows with an error for prompts that are too long or cannot be run."""
        for item in requests:
            prompt, most = max(item.sizes, key=sum) if isinstance(item, Request) else (0, 0)
            if isinstance(item, Request) and prompt + most > plan.largest:
                size = f"prompt of {prompt} tokens + max_tokens {most}"
                if item.choices:
                    size = f"context and continuation of {prompt + 1} tokens"
                row = Row(item.index, item.line, {"prompt": item.prompt})
                yield row.refused(f"{size} cannot be held: {plan.refusal}")
            else:
                yield item

    def _run(self, workload: Workload, layout: Layout, state: JobState) -> Iterator[Result]:
        """Yield the results of all rows, under one layout after the other: after a failure, `Recovery` has the next
        one. Finished rows stay finished. Raise as `Recovery.layout_after`."""
        recovery: Any = None
        while True:
            try:
                yield from self._attempt(self.planner.watch(workload, layout), state)
                return
            except (Shortage, WorkerLost) as error:
                failure = error.with_traceback(None)
            # Outside of `except`: errors of the recovery do not have the failure as their context.
            recovery = recovery or resolve_name(RECOVERY)(self.core, self.planner, workload, state)
            layout = recovery.layout_after(failure, layout)

    def _attempt(self, watch: SweepMonitor, state: JobState) -> Generator[Result]:
        """Yield results until all rows are done.

        Raises:
            Shortage: memory ran out. `state` holds the rows that remain, as after WorkerLost.
            WorkerLost: attention workers were lost that `_sweeps` could not replace.
        """
        core, resources = self.core, self._prepare(watch, state)
        self.watch, self.layout = watch, watch.layout
        reports = self._reports(resources, state, watch)
        arrangement = Arrangement(state.feed, core.shares)
        generation = Generation(resources, arrangement, core.tokenizer, core.eos, reports, core.lossy.alters_cache)
        failed = True
        try:
            yield from self._sweeps(resources, generation, state)
            failed = False
        except (Shortage, WorkerLost):
            state.restart(generation.unfinished(), arrangement.feed)
            raise
        finally:
            reports.end(failed)
            resources.close()
            core.machine.give_back()
            state.take_busy(resources.own.executor.times.busy)
            self.summary = self._summarise(state, self.watch)
            self._write_trace()
        self.planner.rates.learn(self.watch)

    def _sweeps(self, resources: JobResources, generation: Generation, state: JobState) -> Iterator[Result]:
        """Yield results until all rows are done. If an attention worker is lost, replace it, and compute again the
        sequences whose KV cache it held.

        Raises:
            Shortage: memory ran out.
            WorkerLost: a worker was lost, and a second one meanwhile, or there is no new one, or there are stages in
                other processes, which hold sequences in flight.
        """
        while True:
            try:
                with resources:
                    yield from generation.run(self.on_sweep)
                return
            except WorkerLost as error:
                loss = error.with_traceback(None)
            self.watch = resolve_name(RENEWED)(self.core, self.planner, resources, generation, state, loss)

    def _reports(self, resources: JobResources, state: JobState, watch: SweepMonitor) -> SweepReports:
        disks = self.core.machine.disks
        reports = SweepReports(
            listener(), state.progress, self.rows, lambda: sum(disk.bytes_read for disk in disks),
            best_read_rate(watch.cost.hardware), resources.own.pending_bytes,
        )  # fmt: skip
        resources.own.executor.watchdog.look = reports.look
        return reports

    def _prepare(self, watch: SweepMonitor, state: JobState) -> JobResources:
        """Return the resources of the sweeps.

        Raises:
            Shortage: their allocation ran out of memory.
            WorkerLost: an attention worker was lost.
        """
        core, began = self.core, time.perf_counter()
        core.opened.prepare()  # partly with a second engine, so before this engine allocates memory
        core.machine.give_back()  # memory that planning freed
        try:
            with activity("allocating", "allocating the memory of the plan"):
                resources = core.prepare(watch, self.load_first)
        except WorkerLost:
            state.note_loss()
            raise
        except Exception as error:
            lack = shortage(error, core.machine.gpu)
            forget_variables(error)
            if lack is None:
                raise
        else:
            state.load_seconds += time.perf_counter() - began
            state.bytes_before = state.bytes_before or core.traffic()
            return resources
        core.machine.give_back()
        raise lack

    def _write_trace(self) -> None:
        """Write the trace, if any. Report it if it cannot be written, so that the job still returns its results."""
        try:
            if trace := self.core.trace:
                trace.others = self.core.driver.spans() if self.core.driver else {}
                trace.write()
        except OSError as error:
            message(f"the trace is lost: {error}; the results are complete", logging.WARNING)

    def _summarise(self, state: JobState, watch: SweepMonitor | None) -> Summary:
        """Return the summary of the job so far."""
        core = self.core
        tiers = [t for t in core.machine.tiers if not (core.machine.capacity.shared and t == "host")]
        return replace(
            state.summary(core.empty_summary(), core.traffic()),
            peak_bytes={t: core.machine.tier(t).ledger.peak for t in tiers},
            policy=watch.layout.policy if watch else None,
            plan=watch.report() if watch else None,
            stages=core.driver.report() if core.driver else (),
        )
