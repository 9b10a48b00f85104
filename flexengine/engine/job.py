"""One call of `Engine.stream`, in five steps: survey -> plan -> prepare -> run -> results.

    survey    engine/survey.py      sizes of all rows                      -> Workload
    plan      engine/planner.py     lossy switches, policy, layout         -> Plan
    prepare   engine/core.py        allocate what the layout books         -> JobResources
    run       engine/generation.py  sweeps; results leave as rows finish   -> Result
    results   engine/summary.py     counts, seconds, bytes                 -> summary

If memory runs out, `prepare` and `run` are repeated with a smaller layout. If an attention worker is lost, `run` is
called again with a new worker. If several are lost at once, `prepare` is repeated, too.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import fields, replace
from datetime import datetime
from pkgutil import resolve_name
from typing import Any

from flexengine.activity import activity, listener, message
from flexengine.config import Result, SamplingParams
from flexengine.engine.core import Core
from flexengine.engine.generation import Generation
from flexengine.engine.planner import Plan, Planner
from flexengine.engine.stages import JobResources
from flexengine.engine.summary import JobRows, Progress, Summary, SweepReports, best_read_rate
from flexengine.engine.survey import Arrangement, Params, PromptReader, RequestSpool
from flexengine.errors import WorkerLost
from flexengine.job.rows import Request, Row
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.runtime.execute import Shortage, shortage
from flexengine.runtime.lane import forget_variables

# Imported after a failure.
NEXT_LAYOUT, RENEWED = "flexengine.engine.recovery:layout_after", "flexengine.engine.recovery:renewed_worker"


class Job:
    """The rows of one call of `Engine.stream`, from prompts to results."""

    def __init__(
        self,
        core: Core,
        planner: Planner,
        reader: PromptReader,
        on_sweep: Callable[[Progress], None] | None,
        load_first: bool,
        rows: JobRows,
    ) -> None:
        self.core, self.planner, self.reader = core, planner, reader
        self.on_sweep, self.load_first, self.rows = on_sweep, load_first, rows
        self.layout: Layout | None = None  # the present one; None before the plan is made, and if no row can be run
        self.watch: SweepMonitor | None = None  # predicted and measured seconds under this layout; None without one
        self.summary = core.empty_summary()  # `Engine.summary`; its counts are 0 until the job ends, in any way
        self.progress = Progress()  # counts and seconds so far
        self.replanned = list[str]()  # one message per replan, and per loss of an attention worker
        self.replans = 0  # after out-of-memory errors
        self.losses = 0  # of attention workers since a row was finished last
        self.in_flight = 0  # rows in flight when the last plan ran out of memory
        self.stopped = threading.Event()  # set by any thread to end the job before its next task, with Cancelled
        self._rows_at_loss = 0  # rows finished when a worker was lost last
        self._feed: Iterator[Request | Row] = iter(())  # rows not started; after a replan, unfinished ones first
        self._load_seconds = 0.0  # before the first sweep, summed over plans
        self._bytes_before: dict[str, int] = {}  # bytes moved by link when the job began
        self._busy: dict[str, float] = {}  # seconds of work by lane

    def results(self, prompts: Iterable[Any], params: Params) -> Generator[Result]:
        """Yield results as rows finish. Raise as `Engine.stream`."""
        if iter(prompts) is prompts:  # an iterator can be iterated only once
            prompts = list(prompts)
        if self.rows.total is None and isinstance(prompts, Sized):
            self.rows = replace(self.rows, total=len(prompts))
        self.reader.shares = self.core.shares
        self.reader.now = self.rows.began or datetime.now()
        spool = RequestSpool(params if isinstance(params, SamplingParams) else SamplingParams())
        workload = self.reader.survey(prompts, params, spool=spool)
        self.planner.choose_lossy(workload)
        plan = self.planner.plan(workload, self.core.resident)
        self.progress.most = sum(n * times for (_, n), times in plan.workload.sizes.items())
        given = prompts if self.rows.with_prompts else None
        requests = spool.items(given) if spool.complete else self.reader.requests(prompts, params)
        self._feed = self._fitting(requests, plan)
        try:
            if plan.layout is not None:
                self._say_plan(plan.workload, plan.layout)
                yield from self._run(plan.workload, plan.layout)
                return
            for row in self._feed:
                assert isinstance(row, Row)
                self.progress.failed += 1
                yield Result(row.index, error=row.error, prompt=row.prompt)
            self._summarise()
        finally:
            self._feed = iter(())  # else the requests of a job that ended early would stay in memory

    def _say_plan(self, workload: Workload, layout: Layout) -> None:
        if listener() is not None:
            from flexengine.plan.search import first_line, plan_line

            cost, kept = self.planner.cost(workload), self.core.resident == layout.policy
            predicted = cost.predict(layout, 0.0 if kept else 1.0)
            message(plan_line(cost, predicted), logging.DEBUG)
            if self.planner.alone and (first := first_line(cost, predicted)):
                message(first)

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

    def _run(self, workload: Workload, layout: Layout) -> Iterator[Result]:
        """Yield the results of all rows, under one layout after the other: after a failure, `layout_after` has the next
        one. Finished rows stay finished. Raise as `layout_after`."""
        while True:
            try:
                yield from self._attempt(self.planner.watch(workload, layout))
                return
            except (Shortage, WorkerLost) as error:
                failure = error.with_traceback(None)
            # Outside of `except`: errors of the recovery do not have the failure as their context.
            layout = resolve_name(NEXT_LAYOUT)(self, workload, failure, layout)

    def _attempt(self, watch: SweepMonitor) -> Generator[Result]:
        """Yield results until all rows are done.

        Raises:
            Shortage: memory ran out. `_feed` has the rows that remain, as after WorkerLost.
            WorkerLost: attention workers were lost that `_sweeps` could not replace.
        """
        core, resources = self.core, self._prepare(watch)
        self.watch, self.layout = watch, watch.layout
        reports = SweepReports(
            listener(), self.progress, self.rows, lambda: sum(disk.bytes_read for disk in core.machine.disks),
            best_read_rate(watch.cost.hardware), resources.own.worker.weights.arrivals.pending_bytes,
        )  # fmt: skip
        resources.own.executor.watchdog.look, resources.own.executor.stopped = reports.look, self.stopped
        arrangement = Arrangement(self._feed, core.shares)
        generation = Generation(resources, arrangement, core.tokenizer, core.eos, reports, core.lossy.alters_cache)
        failed = True
        try:
            yield from self._sweeps(resources, generation)
            failed = False
        except (Shortage, WorkerLost):
            unfinished = generation.unfinished()
            self.in_flight, self._feed = len(unfinished), itertools.chain(unfinished, arrangement.feed)
            raise
        finally:
            reports.end(failed)
            resources.close()
            core.machine.give_back()
            self.take_busy(resources.own.executor.times.busy)
            self._summarise()
            self._write_trace()
        if not resources.own.worker.weights.in_place:  # else pages that the system drops cost seconds of products
            self.planner.rates.learn(self.watch)

    def _sweeps(self, resources: JobResources, generation: Generation) -> Iterator[Result]:
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
            self.watch = resolve_name(RENEWED)(self, resources, generation, loss)

    def _prepare(self, watch: SweepMonitor) -> JobResources:
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
            self.note_loss()
            raise
        except Exception as error:
            lack = shortage(error, core.machine.gpu)
            forget_variables(error)
            if lack is None:
                raise
        else:
            self._load_seconds += time.perf_counter() - began
            self._bytes_before = self._bytes_before or core.traffic()
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

    def note_loss(self) -> None:
        """Count the loss of an attention worker."""
        self.losses = self.losses + 1 if self.progress.rows == self._rows_at_loss else 1
        self._rows_at_loss = self.progress.rows

    def report(self, text: str) -> None:
        """Report how the job continues."""
        self.replanned.append(text)
        message(text, logging.WARNING)

    def take_busy(self, busy: dict[str, float]) -> None:
        """Add seconds of work by lane, and clear them."""
        for lane, seconds in busy.items():
            self._busy[lane] = self._busy.get(lane, 0.0) + seconds
        busy.clear()

    def _summarise(self) -> None:
        core, progress, watch = self.core, self.progress, self.watch
        tiers = [t for t in core.machine.tiers if not (core.machine.capacity.shared and t == "host")]
        same = {field.name for field in fields(Summary)} & {field.name for field in fields(Progress)}
        self.summary = replace(
            core.empty_summary(),
            **{name: getattr(progress, name) for name in same},
            generated_tokens=progress.tokens - progress.scored,
            load_seconds=self._load_seconds,
            bytes={link: n - self._bytes_before.get(link, 0) for link, n in core.traffic().items()},
            busy={lane: s / progress.seconds for lane, s in self._busy.items()} if progress.seconds else {},
            replanned=tuple(self.replanned),
            peak_bytes={t: core.machine.tier(t).ledger.peak for t in tiers},
            policy=watch.layout.policy if watch else None,
            plan=watch.report() if watch else None,
            stages=core.driver.report() if core.driver else (),
        )
