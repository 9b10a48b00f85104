"""An opened model on which one job at a time runs: the base of `Engine`, whose public methods use it."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar, cast

from flexengine.activity import MESSAGE, Activity, listener_of, log, reported, reporting
from flexengine.config import Result, SamplingParams
from flexengine.engine.core import SPAWN, Core
from flexengine.engine.job import Job
from flexengine.engine.options import EngineOptions
from flexengine.engine.planner import Planner
from flexengine.engine.summary import JobRows, Summary
from flexengine.engine.survey import Params, PromptReader
from flexengine.errors import FlexError, InvalidInput, RanOut, shown
from flexengine.job.manifest import MODEL_FILES
from flexengine.lossy import MIXED, Lossy
from flexengine.model import identity
from flexengine.plan.facts import ModelFacts
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.runtime.execute import Cancelled
from flexengine.tier.memory import keep
from flexengine.words import in_python, python_words, reword

if TYPE_CHECKING:
    from flexengine.engine.calibrator import Calibrator, OpenExact

P = ParamSpec("P")
T = TypeVar("T")
_begun: ContextVar[list[Job] | None] = ContextVar("jobs that a call in a thread has begun", default=None)
_ENDED = {False: "stop() of this engine", True: "close() of this engine"}
# Imported for pipelines.
CALIBRATOR = "flexengine.engine.calibrator:Calibrator"
BITS = "flexengine.guests.bits:Bits"  # chooses the formats of layers, for weights that are `mixed`
STAGES_DRIVER = "flexengine.guests.stages.remote:Driver"
STAGES_PLANNER = "flexengine.guests.stages.planner:PipelinePlanner"
STAGES_CHECK = "flexengine.guests.stages.remote:check_alike"


class Session:
    """A model opened on a machine, and the job that runs on it."""

    def __init__(self, options: EngineOptions, exact_engine: "OpenExact") -> None:
        """Open the model. Raise as `Engine`. exact_engine: return an engine for the same model with the checkpoint's
        own weights."""
        self.options = options
        self.listener = listener_of(options.progress)  # receives reports of progress, and messages; None for the logger
        if options.progress is None and self.listener is None and "ipykernel" in sys.modules:
            self.listener = _in_notebook
        with reporting(self.listener):
            self.core = core = _core(options)
        basis = core.machine, core.opened, options.hardware, options.overlap, options.policy, options.allow
        strategy = options.strategy
        planner = resolve_name(STAGES_PLANNER) if core.driver else None
        self.planner = planner(core, strategy, *basis) if planner else Planner(*basis)
        self.planner.rates.engines = options.engines
        if strategy is not None:
            from flexengine.plan.stages import shape_name

            total = core.skeleton.total
            strategy.check(shape_name(core.facts, total), total, options.group.size if options.group else 1)
            self.planner.block = strategy.decode_batch * strategy.cohorts
        self.reader = PromptReader(core.tokenizer, core.skeleton, core.shares, core.options.given_ram, core.eos)
        self._exact_engine = exact_engine
        if core.lossy.enabled:
            self.calibrator.check()
        core.opened.importances = lambda: self.calibrator.importances
        core.opened.thresholds = lambda: self.calibrator.thresholds
        # Chooses the formats of weights `mixed`; None once they are chosen.
        self._bits: Any = resolve_name(BITS)(core, self.calibrator) if core.lossy.weights == MIXED else None
        if options.group is not None:
            resolve_name(STAGES_CHECK)(core, options, options.group)
        self.on_sweep = options.on_sweep  # see EngineOptions; may be changed between jobs
        self.load_first = False  # read weights that stay in memory before the first sweep, so that it is timed alone
        self._job: Job | None = None  # the last one
        self._running: Generator[Result] | None = None
        self._closed, self._process = False, os.getpid()
        self._lock = threading.RLock()  # held while a job begins; a listener may call `close` meanwhile
        self._turn = threading.RLock()  # held while the job's generator is executed or closed

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copy and pickle: two engines would share one memory, which either would free."""
        self._check_open()
        raise InvalidInput("an engine can be neither copied nor pickled; use this one, or open another Engine")

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer, of `transformers`; None if the checkpoint has none."""
        return self.core.tokenizer

    @property
    def facts(self) -> ModelFacts:
        """Return the model in numbers, with the present lossy switches."""
        return self.core.facts

    @property
    def lossy(self) -> Lossy:
        """Return the present lossy switches."""
        return self.core.lossy

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the last job; None if there was none, or if no row of it could be run."""
        return self._job.layout if self._job else None

    @property
    def watch(self) -> SweepMonitor | None:
        """Return predicted and measured seconds of the last job so far; None without a layout."""
        return self._job.watch if self._job else None

    @property
    def summary(self) -> Summary:
        """Return counts, seconds and bytes of the last job. The counts are 0 before a job has ended."""
        return self._job.summary if self._job else self.core.empty_summary()

    @property
    def switches(self) -> dict[str, Any]:
        """Return the lossy switches that are set, as a job's manifest names them, with the bits of each layer; or those
        that the planner may choose from."""
        if self.options.allow:
            return {"allow": sorted(self.options.allow)}
        self.choose_bits()
        with reporting(self.listener):
            return self.calibrator.switches if self.core.lossy.enabled else {}

    @cached_property
    def calibrator(self) -> "Calibrator":
        """What the exact model measures for lossy switches. Exact engines load no line of it."""
        return cast("Calibrator", resolve_name(CALIBRATOR)(self.core, self._exact_engine))

    def fingerprint(self, known_files: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's name and files, and `Core.numerics`, which a resumed job compares. With the lossy switches
        and a request's own parameters, these determine its results. known_files: marks of the model's files in the
        manifest of the run that began the job; {} if there was none."""
        core = self.core
        with reporting(self.listener):
            files = identity.marks(identity.given_files(core.source), core.opened.files, known_files)
        return {"model": core.source.name, **core.numerics, MODEL_FILES: files}

    def use(self, lossy: Lossy) -> None:
        """Set the lossy switches and drop loaded weights. The planner no longer chooses. Raise InvalidInput for
        switches that this model or machine does not support, and while a job runs."""
        self._check_idle()
        self.core.drop_weights()
        self.planner.use(lossy)
        self.planner.choices = ()
        self._bits = resolve_name(BITS)(self.core, self.calibrator) if lossy.weights == MIXED else None

    def choose_bits(self) -> None:
        """Choose the format of every layer now, if weights are `mixed`; else the first job does. Calibrates and
        measures, if necessary."""
        if (bits := self._bits) is not None:
            with reporting(self.listener):
                self.use(bits.chosen())

    def prepare(self) -> None:
        """Calibrate, choose bits and encode the weights now, if necessary; else the first job does. Raise OutOfMemory
        if the disk is full."""
        self._check_open()
        self.choose_bits()
        with reporting(self.listener):
            self.core.opened.prepare()

    def plan(self, workload: Workload) -> Layout:
        """Return the layout of a job of this workload. Raise OutOfMemory if it does not fit."""
        self._check_open()
        self.choose_bits()
        with reporting(self.listener):
            return self.planner.layout(workload, self.core.resident)

    def stop(self) -> None:
        """End the running job, from any thread, before its next task; the call that runs it raises InvalidInput. The
        engine can then run another job. Nothing happens if no job runs."""
        if self._job is not None:
            self._job.stopped.set()

    async def in_thread(self, method: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return what a method of this engine returns. It runs in a thread, so other tasks of the event loop go on. If
        the task that awaits it is cancelled, the job is stopped, and has ended when the task goes on.

        Examples:
            >>> results = await engine.in_thread(engine.generate, prompts, SamplingParams(max_tokens=32))
        """
        jobs: list[Job] = []
        token = _begun.set(jobs)
        call = asyncio.ensure_future(asyncio.to_thread(method, *args, **options))  # with a copy of this context
        _begun.reset(token)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            while not call.done():  # it may not have begun yet
                for job in jobs:
                    job.stopped.set()
                await asyncio.wait([call], timeout=0.05)
            call.exception()  # as the job was stopped: else asyncio reports that no task has read it
            raise

    def close(self) -> None:
        """End the running job, if any, in any thread, as `stop` does; wait for its end, and free memory and files.

        Further calls do nothing, and so do calls in a forked process, whose parent owns the engine. If the function
        that calls `close` was called by the job itself, the job ends and frees all after the function has returned.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self.stop()
        # The listener calls this, and the job may be waiting for the listener: the job frees all when it ends.
        if self._running is not None and getattr(self.listener, "calls_me", bool)():
            return
        with self._turn:
            try:
                if self._running is not None:
                    self._running.close()
            except ValueError:  # it is being executed, and has called this
                return
            self._running = None
            self._free()

    def _free(self) -> None:
        self.core.close()
        if self.core.driver is not None:
            self.core.driver.leave()

    def _check_idle(self) -> None:
        self._check_open()
        if self._running is not None:
            where = "in this thread or another one"
            raise InvalidInput(
                f"this engine is generating already, {where}; let the other call end, or call stop(), as a task that is"
                " cancelled ends only what `await engine.in_thread(...)` runs"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise InvalidInput("this engine is closed; open a new Engine")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            where = "before this process was forked, and its threads are in the parent process"
            raise InvalidInput(f"this engine was opened {where}; {SPAWN}")

    @python_words
    def stream(self, prompts: Iterable[Any], params: Params | None = None) -> Generator[Result]:
        """Yield results as rows finish, in any order; `index` is the number of the row.

        Memory does not grow with the number of rows, if `prompts` is no iterator. If memory runs out although the plan
        fits the given sizes, the job continues with a smaller block and the same results; see `Summary.replanned`.

        Args:
            prompts: an iterable of prompts as for `generate`. It is iterated twice, first for the sizes of all rows and
                then to run them, and not stored. An iterator, which can be iterated only once, is copied to a list.
            params: as for `generate`.

        Returns:
            A generator of a Result per row. A row that cannot be run has a Result with `error`. Closing the generator
            ends the job.

        Raises:
            InvalidInput: as for `generate`. Errors of arguments are raised by the call, others with the first result.
            OutOfMemory: as for `generate`.
            RanOut: as for `generate`, without results.

        Examples:
            >>> for result in engine.stream(prompts, SamplingParams(max_tokens=32)):
            ...     print(result.index, result.generated_text)
        """
        from flexengine.job.python_arguments import argument, remedy_of  # jobs of files do without

        self._check_open()
        prompts = argument("prompts", prompts)
        if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping | set | frozenset) or not isinstance(
            prompts, Iterable
        ):
            must = f"it must be a list of prompts{remedy_of('prompts', prompts)}"
            raise InvalidInput(f"prompts is {shown(prompts)}; {must}")
        if isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params):
            prompts = list(prompts)
            if len(params) != len(prompts):
                fault = f"params has {len(params)} entries, but prompts has {len(prompts)}"
                raise InvalidInput(f"{fault}; give one SamplingParams for each prompt, or one for all")
        elif not isinstance(params, SamplingParams | None):
            raise InvalidInput(f"params is {shown(params)}; it must be SamplingParams, or a list of them")
        return _in_python(self.results(prompts, SamplingParams() if params is None else params, JobRows()))

    def results(self, prompts: Iterable[Any], params: Params, rows: JobRows) -> Generator[Result]:
        """Yield results as `stream`, which checks the arguments. rows: those of the whole job, of which these prompts
        may be a part, for its progress reports."""
        with self._lock:
            self._check_idle()
            self.choose_bits()
            self._job = job = Job(self.core, self.planner, self.reader, self.on_sweep, self.load_first, rows)
            self._running = running = reported(self.listener, job.results(prompts, params))
        if (begun := _begun.get()) is not None:
            begun.append(job)
        try:
            while True:
                with self._turn:
                    result = next(running, None)
                    if self._running is not running:
                        raise InvalidInput("the engine was closed before this stream had ended")
                if result is None:
                    return
                yield result
                del result
                self._check_process()
        except Cancelled:
            raise InvalidInput(f"the job was ended before all rows were done, by {_ENDED[self._closed]}") from None
        finally:
            if os.getpid() != self._process:
                keep(running)  # never closed: files and memory are the parent's
            else:
                with self._turn:
                    running.close()
                    if self._running is running:
                        self._running = None
                        if self._closed:
                            self._free()

    def _all(
        self,
        prompts: Iterable[Any],
        params: Params | None = None,
        on_result: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Return the results of a job, in the order of their indices. on_result: called with each as soon as it is
        computed."""
        results: list[Result] = []
        try:
            with contextlib.closing(self.stream(prompts, params)) as stream:
                for result in stream:
                    results.append(result)
                    if on_result is not None:
                        on_result(result)
        except RanOut as error:
            error.results = results
            raise
        finally:
            results.sort(key=lambda result: result.index)
        return results


def _in_notebook(record: Activity) -> None:
    """Send messages to the logger, as without a listener, and print the text of long work that is done only once, such
    as converting and compiling: a cell that shows nothing for minutes seems to hang."""
    if record.state == "began" or record.name == MESSAGE:
        log.log(record.level, "%s", record.text)
    if record.state == "began" and record.level >= logging.INFO:
        print(f"flexengine: {record.text}; progress=True shows more", file=sys.stderr)


def _in_python(results: Generator[Result]) -> Generator[Result]:
    """Yield results, with their errors, and errors of the job, in the words of Python."""
    try:
        for result in results:
            result.error = result.error and in_python(result.error)
            yield result
    except FlexError as error:
        reword(error)
        raise
    finally:
        results.close()


def _core(options: EngineOptions) -> Core:
    """Return the core of an engine: of the whole model, or of a stage's layers."""
    group = options.group
    if group is None:
        return Core(options)
    if options.lossy.weights == MIXED:
        raise InvalidInput(
            f"weights is {MIXED!r} with {group.size} stages, of which none has all layers; choose the bits before"
            " (flexengine quality --weights mixed --budget SIZE --save-bits FILE.json), and give --weights FILE.json"
        )

    from flexengine.plan.stages import stage_layers
    from flexengine.tier.cuda import take_one

    take_one(group.local_rank)
    layers = partial(stage_layers, rank=group.rank, stages=group.size, strategy=options.strategy)
    return Core(options, layers, resolve_name(STAGES_DRIVER)(group) if group.rank == 0 else None)
