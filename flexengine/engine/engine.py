"""The engine: prompts in, results out."""

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from flexengine.config import Result, SamplingParams
from flexengine.engine import fingerprint
from flexengine.engine.calibration import Calibrator
from flexengine.engine.core import Core
from flexengine.engine.job import Job
from flexengine.engine.options import EngineOptions
from flexengine.engine.planner import Planner
from flexengine.engine.survey import Reader, forced
from flexengine.errors import InvalidInput, RanOut
from flexengine.job.columns import answered
from flexengine.lossy import Lossy
from flexengine.plan.facts import ModelFacts
from flexengine.plan.feedback import Watch
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload


class Engine:
    """Generates text with a model whose weights, KV cache and activations may live on device, host and disk.

    Use it as a context manager, or call `close`. For offline batches only: one stream at a time.

    Attributes:
        core: the opened model and machine.
        planner: chooses the policy of each job; `planner.say` is called with messages.
        calibrator: measures importances, if weights are calibrated.
        reader: encodes prompts.
        on_sweep: see EngineOptions; may be changed between jobs.
        load_first: read all weights that stay in memory before the first sweep, so that sweeps are timed alone.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Open a model; read no weights.

        Args:
            model: a directory, a .gguf file or a hub id; None is the demo model.
            options: fields of EngineOptions: policy, device, device_mem, host_mem, offload_dir, links, dtype, overlap,
                trace, on_sweep, trust_remote_code, hardware, lossy, allow, verify.

        Raises:
            InvalidInput: an option is wrong, or this machine cannot serve it.
            ModelNotFound: there is no such model.
            UnsupportedModel: the model's architecture cannot be run.
            BadCheckpoint: the model's files are broken.
        """
        self.options = EngineOptions(model=model, **options)
        self.core = core = Core(self.options)
        self.planner = Planner(
            core.machine, core.opened, self.options.hardware, self.options.overlap,
            self.options.policy, self.options.allow,
        )  # fmt: skip
        self.reader = Reader(core.tokenizer, core.skeleton.context_length, core.skeleton.head[1][0])
        self.calibrator = Calibrator(core, self._exact, lambda message: self.planner.say(message))
        core.opened.importances = lambda: self.calibrator.importances
        self.on_sweep = self.options.on_sweep
        self.load_first = False
        self._job: Job | None = None  # the last one
        self._running: Generator[Result] | None = None
        self._lock = threading.Lock()

    def _exact(self) -> "Engine":
        return Engine(**vars(self.options.exact(self.planner.known())))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def facts(self) -> ModelFacts:
        """The model in numbers, with the present lossy switches."""
        return self.core.facts

    @property
    def lossy(self) -> Lossy:
        """The present lossy switches."""
        return self.core.lossy

    @property
    def layout(self) -> Layout | None:
        """The layout of the last job; None if there was none, or if no row of it could be run."""
        return self._job.layout if self._job else None

    @property
    def watch(self) -> Watch | None:
        """Predicted and measured seconds of the last job so far; None without a layout."""
        return self._job.watch if self._job else None

    @property
    def summary(self) -> dict[str, Any]:
        """Counts, seconds and bytes of the last job so far; see `Job.summary` and `JobState.summary`."""
        return self._job.summary if self._job else {}

    @property
    def switches(self) -> dict[str, Any]:
        """The lossy switches that are set, as a job's manifest names them."""
        return fingerprint.switches(self.core, self.calibrator)

    def fingerprint(self, known_files: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a resumed job compares of this engine; see `engine.fingerprint`."""
        return fingerprint.fingerprint(self.core, known_files)

    def use(self, lossy: Lossy) -> None:
        """Set the lossy switches and drop loaded weights. The planner no longer chooses. Raise InvalidInput for
        switches that this model or machine does not support."""
        self.core.drop_weights()
        self.planner.use(lossy)
        self.planner.choices = ()

    def prepare(self) -> None:
        """Calibrate and encode the weights now, if necessary; else the first job does. Raise OutOfMemory if the disk is
        full."""
        _ = self.core.opened.origins

    def plan(self, workload: Workload) -> Layout:
        """Return the layout of a job of this workload. Raise OutOfMemory if it does not fit."""
        return self.planner.layout(workload, self.core.resident)

    def close(self) -> None:
        """End the running stream, if any, and free memory and files. Raise InvalidInput if another thread runs the
        stream."""
        if (running := self._running) is not None:
            try:
                running.close()
            except ValueError as error:
                raise InvalidInput("another thread is generating with this engine; let it end first") from error
            self._running = None
        self.core.close()

    def generate(self, prompts: Iterable[Any], params: SamplingParams | None = None) -> list[Result]:
        """Return the results of all prompts, in their order. Raise as `stream`.

        Args:
            prompts: strings, or rows: {"prompt"}, {"messages"} or {"prompt_token_ids"}. A row may also have sampling
                parameters, by name.
            params: sampling parameters of all rows. Those of a row replace them.
        """
        results: list[Result] = []
        try:
            for result in self.stream(prompts, params):
                results.append(result)
        except RanOut as error:
            error.results = results
            raise
        finally:
            results.sort(key=lambda result: result.index)
        return results

    def score(self, rows: Iterable[tuple[Iterable[int], Iterable[int]]]) -> list[Result]:
        """Return log probabilities of given continuations (teacher forcing).

        Tokens are fed one per decode step, through the job's KV cache and kernels.

        Args:
            rows: (prompt, continuation) pairs of token ids.

        Returns:
            One Result per row; `logprobs` has an entry per forced token, with the most likely token in `top_logprobs`.

        Raises:
            InvalidInput: a row is empty, too long or has unknown tokens.
        """
        return self.generate(forced(rows, self.core.skeleton.context_length, self.core.skeleton.head[1][0]))

    def stream(self, prompts: Iterable[Any], params: SamplingParams | None = None) -> Iterator[Result]:
        """Yield results as rows finish; `index` is the row's number. A row that cannot be run yields a result with
        `error`.

        If memory runs out although the plan fits the given sizes, the job continues with a smaller block and the same
        results; see `summary["replanned"]`.

        Args:
            prompts: as for `generate`. They are iterated twice, first for their sizes and then to be run, and not
                stored. An iterator is copied to a list.

        Raises:
            InvalidInput: an argument has the wrong type, or the engine is generating already.
            OutOfMemory: no row fits; raised before anything large is allocated.
            RanOut: memory ran out, and smaller plans did not help or the policy was given.
        """
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise InvalidInput(f"prompts is {type(prompts).__name__}; pass a list of prompts")
        if not isinstance(params, SamplingParams | None):
            raise InvalidInput(f"params is {type(params).__name__}; it must be SamplingParams")
        with self._lock:
            if self._running is not None:
                raise InvalidInput("this engine is generating already; finish or close the other stream first")
            self._job = Job(self.core, self.planner, self.calibrator, self.reader, self.on_sweep, self.load_first)
            self._running = running = self._job.results(prompts, params or SamplingParams())
        try:
            yield from running
            if self._running is not running:
                raise InvalidInput("the engine was closed before this stream had ended")
        finally:
            running.close()
            if self._running is running:
                self._running = None

    def __call__(self, batch: Any, params: SamplingParams | None = None) -> Any:
        """Return a batch of columns with result columns added: Ray Data's `map_batches(Engine, ...)` calls this.

        See job/columns.py for the columns, and examples/ray_data.py for a whole program.

        Args:
            batch: a dict of columns (numpy arrays, lists) or a pyarrow Table.
        """
        return answered(batch, params or SamplingParams(), lambda rows: self.generate(rows, params))
