"""The engine: a model, a machine and a policy; prompts in, results out."""

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flexengine import kernels
from flexengine.calibration import PIECE, Calibration, calibration, check
from flexengine.config import Result, SamplingParams
from flexengine.course import Course
from flexengine.errors import InvalidInput, OutOfMemory, RanOut
from flexengine.generation import Generation, Means, Progress
from flexengine.job.columns import answered
from flexengine.job.inputs import Row
from flexengine.job.prompts import Request
from flexengine.lossy import EXACT, Lossy, choices
from flexengine.model import identity
from flexengine.model.importance import Importances
from flexengine.model.linear import numerics
from flexengine.model.skeleton import named_dtype
from flexengine.model.tokenizer import eos_tokens, load_tokenizer
from flexengine.model.verify import Verifier
from flexengine.plan.experts import demand_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.feedback import Watch
from flexengine.plan.fitting import fitting
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import ONE_SEQUENCE, Layout
from flexengine.plan.least import has_room, lay_out_given
from flexengine.plan.search import check as check_least
from flexengine.plan.workload import Workload
from flexengine.planning import Place, Planner
from flexengine.policy import Policy
from flexengine.recovery import REPLANS, exhausted, given_too_large, replanned
from flexengine.runtime.execute import Executor
from flexengine.runtime.frames import forget_variables
from flexengine.runtime.shortage import Shortage, shortage
from flexengine.runtime.trace import Trace
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sweeps
from flexengine.survey import Reader, forced
from flexengine.tier.machine import Links
from flexengine.worker.cache import Cache
from flexengine.worker.delegation import Delegation
from flexengine.worker.hidden import Hidden
from flexengine.worker.opened import open_model
from flexengine.worker.weights import Weights
from flexengine.worker.worker import Worker


class Engine:
    """Generates text with a model whose weights, KV cache and activations may live on device, host and disk.

    model: a directory, a .gguf file or a hub id; None is the demo model. policy: None lets the planner choose.
    device: auto, cpu, cuda or sim. device_mem, host_mem: bytes or text such as "800M"; None takes what is free.
    offload_dir: where KV and activations spill. dtype: auto (float32 on CPU and sim, the checkpoint's on CUDA),
    float32, bfloat16, float16. links: rates of a sim machine's links. overlap: False runs one task at a time, to find
    faults, and plans for that. trace: file for Chrome trace JSON. on_sweep: called with a Progress after
    every sweep. trust_remote_code: run Python that lies beside the weights, if the model needs it. hardware: rates to
    plan with instead of this machine's measured ones. lossy: what may differ from the checkpoint's own numbers.
    allow: names of lossy.ALLOW that the planner may choose from, once, when it sees the first job. verify: compare all
    files with their checksums before they are read (see model.verify); `verifier` has counted what was right.

    Raises InvalidInput, ModelNotFound, UnsupportedModel, BadCheckpoint before any weight is read, and OutOfMemory
    from `generate` or `stream` before anything large is allocated. Use as a context manager, or call close().
    """

    def __init__(
        self,
        model: str | Path | None = None,
        policy: Policy | None = None,
        device: str = "auto",
        device_mem: str | int | None = None,
        host_mem: str | int | None = None,
        offload_dir: str | Path | None = None,
        dtype: str | None = None,
        links: Links | None = None,
        overlap: bool = True,
        trace: str | Path | None = None,
        on_sweep: Callable[[Progress], None] | None = None,
        trust_remote_code: bool = False,
        hardware: Hardware | None = None,
        lossy: Lossy = EXACT,
        allow: Sequence[str] = (),
        verify: bool = False,
    ) -> None:
        if not isinstance(policy, Policy | None):
            raise InvalidInput(f"policy is {type(policy).__name__}; it must be a Policy, such as Policy(**fields)")
        named_dtype(dtype)  # wrong names are refused before anything is converted
        kernels.choice()
        place = Place(device, device_mem, host_mem, offload_dir)
        self.machine = place.machine(links)
        if self.machine.no_offload and policy and (policy.cache[2] or policy.activations[2]):
            self.machine.close()
            raise InvalidInput(f"the policy puts cache or activations on disk, but {self.machine.no_offload}")
        self.trace = Trace(trace) if trace else None
        self.policy, self.overlap, self.on_sweep = policy, overlap, on_sweep
        name = str(model) if model is not None else None
        self.verifier = Verifier() if verify else None
        opened = open_model(name, dtype, self.machine.kind, trust_remote_code, lossy=lossy, verifier=self.verifier)
        self.lossy = lossy
        if allow and (lossy or policy is not None):
            raise InvalidInput("allow is for a planner that chooses; it goes with neither lossy switches nor a policy")
        given = choices(allow) if allow else ()
        self._choices = tuple(each for each in given if opened.refusal(each) is None)
        self._unsuited = next(filter(None, map(opened.refusal, given)), None)
        self.source, self.dtype, self.skeleton = opened.source, opened.dtype, opened.skeleton
        self._opened, directory = opened, opened.source.directory
        self.tokenizer = load_tokenizer(directory, trust_remote_code)
        self.reader = Reader(self.tokenizer, self.skeleton.context_length, self.skeleton.head[1][0])
        self.eos = eos_tokens(directory, self.skeleton.config)
        if lossy.calibrate:
            check(lossy.calibrate, self.tokenizer)
        opened.importances = lambda: self.importances
        self._exact = partial(
            Engine, model, None, device, device_mem, host_mem, offload_dir, dtype, links, overlap,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        kernels.load()  # tiers convert with them on a GPU's machine, too: they are built before lanes begin
        self.kernels = kernels.load_for(self.machine.compute)
        self.planner = Planner(self.machine, opened, place.directory, hardware, overlap)
        self.summary: dict[str, Any] = {}
        self.layout: Layout | None = None  # of the last job
        self.fixed_prefill: int | None = None  # prefill_tokens that the planner must keep to
        self.load_first = False  # whether all that stays in memory is read before the first sweep, to time sweeps alone
        self._weights: Weights | None = None
        self._settled = 0  # bytes that weights dropped since had been brought to where they stay
        self._running: Generator[Result] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def facts(self) -> ModelFacts:
        """The model in numbers, as it is kept now."""
        return self._opened.facts

    def settle(self, workload: Workload) -> None:
        """Has the planner choose, for a job of this workload, what it may and has not chosen yet."""
        if self._choices and workload.count:
            self.use(self.planner.least_lossy(workload, self.fixed_prefill, self._choices))
            if self._unsuited:
                self.planner.say(f"not considered: {self._unsuited}")
            self.planner.say(f"chosen: {self.lossy}; python -m flexengine.quality shows what that costs")

    def refusal(self, lossy: Lossy) -> str | None:
        """Why this model cannot be run with these switches here; None if it can."""
        return self._opened.refusal(lossy)

    def use(self, lossy: Lossy) -> None:
        """Settles what was left to the planner."""
        self._drop_weights()
        self.planner.use(lossy)
        self.lossy, self._choices = lossy, ()

    def prepare(self) -> None:
        """Calibrates and encodes the weights now, if they are to be and have not been; else the first job does. Raises
        OutOfMemory if the disk is full."""
        _ = self._opened.origins

    @cached_property
    def _calibration(self) -> Calibration | None:
        """The text to calibrate with, read when it is needed. Raises InvalidInput if there is too little."""
        name = self.lossy.calibrate
        return calibration(name, self.tokenizer, self.skeleton.context_length) if name else None

    @cached_property
    def importances(self) -> Importances | None:
        """What weights are encoded by, measured now unless it has been; None if nothing is calibrated."""
        if self._calibration is None:
            return None
        opened = self._opened
        return self._calibration.importances(
            self.source.directory, opened.given, opened.dtype, self._measured, self.verifier
        )

    def _measured(self) -> dict[str, torch.Tensor]:
        """Importances, by an engine like this one with the checkpoint's own weights. Rates are given to it, so that it
        learns none: recording takes time, too."""
        assert self._calibration is not None
        tokens = sum(map(len, self._calibration.rows))
        self.planner.say(f"calibrating, once for this model and text: the exact model reads {tokens:,} tokens")
        with self._exact(hardware=self.planner.known()) as engine:
            engine.fixed_prefill = PIECE
            return self._calibration.measure(engine.skeleton, engine.score)

    @property
    def switches(self) -> dict[str, Any]:
        """Those of `lossy` that are set, for a job's manifest: a text to calibrate with by its tokens, not its name."""
        text = {"calibrate": self._calibration.digest} if self._calibration is not None else {}
        return self.lossy.given | text

    def close(self) -> None:
        """Ends the stream that is under way, if any, and gives back memory and files."""
        if (running := self._running) is not None:
            try:
                running.close()
            except ValueError as error:
                raise InvalidInput("another thread is generating with this engine; let it end first") from error
            self._running = None
        self._drop_weights()
        self.machine.close()

    def generate(self, prompts: Iterable[Any], params: SamplingParams | None = None) -> list[Result]:
        """Results of all prompts, in their order. A prompt is a string or a row: {"prompt"}, {"messages"} or
        {"prompt_token_ids"}, with sampling parameters of its own if it likes. Raises as `stream`."""
        found: list[Result] = []
        try:
            for result in self.stream(prompts, params):
                found.append(result)
        except RanOut as error:
            error.results = found
            raise
        finally:
            found.sort(key=lambda result: result.index)
        return found

    def score(self, rows: Iterable[tuple[Iterable[int], Iterable[int]]]) -> list[Result]:
        """What the model thinks of given continuations: (prompt, continuation), in token ids. `logprobs` of a result
        has the forced tokens' log probabilities, and what was likeliest instead. Every token is a decode step, so it is
        the job's own cache and kernels that are judged. Raises InvalidInput for rows that cannot be run."""
        return self.generate(forced(rows, self.skeleton.context_length, self.skeleton.head[1][0]))

    def stream(self, prompts: Iterable[Any], params: SamplingParams | None = None) -> Iterator[Result]:
        """Results as rows finish; `index` says which prompt one belongs to. A bad row yields a result with `error`.

        prompts is walked twice, once for the sizes and once for the work, and never held as a whole; an iterator, which
        can be walked only once, is made a list.

        If memory runs out although the plan fits what was said to be there, the job goes on with a smaller block (see
        `summary["replanned"]`) and the same results. Raises RanOut if that does not help, or the policy was given."""
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise InvalidInput(f"prompts is {type(prompts).__name__}; pass a list of prompts")
        if not isinstance(params, SamplingParams | None):
            raise InvalidInput(f"params is {type(params).__name__}; it must be SamplingParams")
        with self._lock:
            if self._running is not None:
                raise InvalidInput("this engine is generating already; finish or close the other stream first")
            self._running = running = self._results(prompts, params or SamplingParams())
        try:
            yield from running
            if self._running is not running:
                raise InvalidInput("the engine was closed before this stream had ended")
        finally:
            running.close()
            if self._running is running:
                self._running = None

    def __call__(self, batch: Any, params: SamplingParams | None = None) -> Any:
        """A batch of columns, a dict (numpy arrays, lists) or a pyarrow Table, with columns for its results: the class
        can be given to Ray Data, `ds.map_batches(Engine, batch_format="pyarrow", fn_constructor_kwargs={...},
        fn_kwargs={"params": SamplingParams(...)}, ...)`, which makes an engine per actor. See examples/ray_data.py.

        Prompts and sampling fields are columns of their names. Added are generated_text, token_ids, finish_reason,
        prompt_tokens, completion_tokens and error (a row that cannot be run, or is too long for the memory there is,
        costs no other row); as JSON text logprobs and samples, if `params` or columns logprobs and n may ask for them.
        They have the same Arrow types in every batch. Why pyarrow: for numpy Ray makes nulls among numbers NaN before
        the engine sees them, and its older versions (2.40, not 2.60) infer the types of what a dict holds anew.

        Sampling noise (temperature above 0) depends on seed, row index, sample and token. The row index is that of
        column `index` (whole numbers), else the row's place in its batch: then equal rows at the same place of
        different batches get equal noise, and a row's text depends on how Ray cuts batches. A column `seed` with a
        number per row prevents the first; an `index` that numbers the rows of the whole job prevents both, and the
        results are then those of one `generate` of all rows in that order. Rows of a batch that share an index are
        generated one after the other, so number them apart. At temperature 0 none of this matters.
        """

        def generate(rows: list[Row]) -> list[Result]:
            try:
                return self.generate(rows, params)
            except OutOfMemory as error:  # no row of this batch is short enough; another batch's may be
                if not error.what.startswith(ONE_SEQUENCE):
                    raise
                return [Result(r.index, error=r.error or r.refused(f"cannot be held: {error}").error) for r in rows]

        return answered(batch, params or SamplingParams(), generate)

    def _results(self, prompts: Iterable[Any], params: SamplingParams) -> Generator[Result]:
        if iter(prompts) is prompts:  # it can be walked only once
            prompts = list(prompts)
        workload = self.reader.survey(prompts, params)
        self.settle(workload)
        layout, largest, why = self.fitting(workload) if workload.count else (None, 0, None)
        fitting = workload.up_to(largest)
        most = sum(n * times for (_, n), times in fitting.sizes.items())
        progress = Progress(most=most)
        if layout is None:
            for row in self._requests(prompts, params, 0, why):
                assert isinstance(row, Row)
                progress.failed += 1
                yield Result(row.index, error=row.error)
            self.summary = self._summarise(Course(iter(()), progress), None)
            return
        course = Course(self._requests(prompts, params, largest, why), progress)
        yield from self._generate(fitting, layout, course)

    def _requests(
        self, prompts: Iterable[Any], params: SamplingParams, largest: int, why: OutOfMemory | None
    ) -> Iterator[Request | Row]:
        """The requests of at most `largest` tokens; the others (and why they are), and bad rows, as rows with an
        error."""
        for item in self.reader.requests(prompts, params):
            if isinstance(item, Request) and len(item.prompt_ids) + item.sampling.max_tokens > largest:
                size = f"prompt of {len(item.prompt_ids)} tokens + max_tokens {item.sampling.max_tokens}"
                yield Row(item.index, item.line).refused(f"{size} cannot be held: {why}")
            else:
                yield item

    def fitting(self, workload: Workload) -> tuple[Layout, int, OutOfMemory | None]:
        """The job's layout, the most tokens of a sequence in it, and why not more; see `plan.fitting`."""
        return fitting(workload, self.plan)

    def _generate(self, workload: Workload, layout: Layout, course: Course) -> Iterator[Result]:
        """The results of a job that begins with a layout. Where memory runs out on the way it goes on with a smaller
        block, at most REPLANS times; rows that are finished stay. Raises RanOut if that does not help, or if the policy
        was given."""
        times = 0
        while (found := (yield from self._attempt(Watch(self.planner.cost(workload), layout), course))) is not None:
            if self.policy is not None:
                raise given_too_large(found, layout, lambda policy: self._laid_out(policy, workload))
            if times == REPLANS:
                raise exhausted(found, layout, times)
            times += 1
            try:
                smaller = self.planner.smaller(workload, layout, found.tier, found.needed, self._placed)
            except OutOfMemory as error:
                raise exhausted(found, layout, times - 1, error) from error
            told = replanned(found, layout, smaller, course.rows, times)
            course.replanned.append(told)
            self.planner.say(told)
            layout = smaller

    def _attempt(self, watch: Watch, course: Course) -> Generator[Result, None, Shortage | None]:
        """Results until all rows are done, or until memory ran out; then `course` holds what is left."""
        began = time.perf_counter()
        if self._calibration is not None:
            self.prepare()  # with an engine of its own, so before this one takes any memory
        self.machine.give_back()  # what planning freed
        try:
            means = self._prepare(watch)
        except Exception as error:
            if (found := shortage(error, self.machine.kind == "cuda")) is None:
                forget_variables(error)
                raise
            self.machine.give_back()
            return found
        course.loaded += time.perf_counter() - began
        course.before = course.before or self._traffic()
        self.layout = watch.layout
        generation = Generation(means, course.feed, self.tokenizer, self.eos, course.progress)
        lack: Shortage | None = None
        try:
            with means.executor:
                yield from generation.run(self.on_sweep)
        except Shortage as error:
            lack = error.with_traceback(None)
            course.again(generation.unfinished(), generation.feed)
        finally:
            means.worker.close()
            self.machine.give_back()
            course.worked(means.executor.busy)
            self.summary = self._summarise(course, means)
            self._write_trace()
        if lack is None:
            self.planner.learn(watch)
        return lack

    def _write_trace(self) -> None:
        """A trace that cannot be written must not cost the results."""
        try:
            if self.trace:
                self.trace.write()
        except OSError as error:
            warnings.warn(f"the trace is lost: {error}", RuntimeWarning, stacklevel=2)

    @property
    def cache_form(self) -> str:
        """How keys and values are encoded; empty if they are not, or if the planner has yet to choose."""
        return str(self._opened.cache_form(bits)) if (bits := self.lossy.cache_bits) else ""

    @property
    def numerics(self) -> dict[str, Any]:
        """What the last bits of a result depend on besides the model and the request. What the planner has yet to
        choose is not in it."""
        import transformers

        cuda, policy = self.machine.kind == "cuda", self.policy
        return {
            **({"cache": self.cache_form} if self.cache_form else {}),
            "dtype": str(self.dtype).removeprefix("torch."),
            # Products there round differently in batches of another shape.
            "policy": policy.to_json() if policy and cuda else None,
            "device": "cuda" if cuda else "cpu",
            "kernels": numerics(self.machine.compute),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def model_files(self, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return marks of the files that the user gave as the model; see `model.identity.marks`."""
        return identity.marks(identity.given_files(self.source), self._opened.files, known)

    def check(self, workload: Workload) -> None:
        """Raises OutOfMemory as `fitting` does, without a search for a policy."""
        least = partial(check_least, self.facts, capacity=self.machine.capacity, prefill_tokens=self.fixed_prefill)
        fitting(workload, least if self.policy is None else self.plan)

    def plan(self, workload: Workload) -> Layout:
        """The layout a job of this workload gets: the given policy's, or the planner's. Raises OutOfMemory."""
        if self.policy is not None:
            return self._laid_out(self.policy, workload)
        return self.planner.choose(workload, self.fixed_prefill, self._placed).layout

    def _laid_out(self, policy: Policy, workload: Workload) -> Layout:
        return lay_out_given(self.facts, policy, workload, self.machine.capacity)

    @property
    def _placed(self) -> Policy | None:
        """The policy under which the weights are in memory, if they are."""
        return self._weights.layout.policy if self._weights is not None else None

    @torch.no_grad()
    def _prepare(self, watch: Watch) -> Means:
        layout = watch.layout
        self._drop_misplaced(layout)
        for tier in ("device", "host", "disk"):
            self.machine.tier(tier).ledger.restart_peak()
        self.machine.keep_freed(has_room(layout, self.machine.capacity))
        with contextlib.ExitStack() as undo:  # the spill files first, as they may fail
            cache = Cache(self.facts, layout, self.machine, self.kernels, self.dtype, self.lossy)
            undo.callback(cache.close)
            hidden = Hidden(self.facts, layout, self.machine, self.dtype)
            undo.callback(hidden.close)
            delegation = None
            if layout.delegation:
                delegation = Delegation(self.facts, layout, self.machine, cache, self.dtype)
                undo.callback(delegation.close)
            if self._weights is None:
                self._weights = Weights(self._opened, layout, self.machine)
            weights = self._weights
            if self.load_first:
                weights.settle_all()
            worker = Worker(self.skeleton, weights, cache, hidden, delegation)
            undo.pop_all()
        streamed, arriving = weights.streamed, weights.arriving
        if arriving:
            watch.expect_loading(weights.missing)
        layers, demand = len(self.skeleton.layers), demand_of(self.facts, layout.homes)
        program = Program(streamed, layers, layout.policy.slots, self.machine.routes, arriving, demand)
        away = arriving or any(streamed) or layout.cache_buffer or layout.hidden_buffer
        apart = self.overlap and (away or self.machine.lanes == "stream")  # an inline lane would wait for the GPU
        executor = Executor(worker.perform, self.machine.lanes if apart else "inline", self.trace)
        self.machine.settle()
        return Means(layout, Sweeps(layout.policy, layout.pools), worker, program, executor, self.machine.settle, watch)

    def _traffic(self) -> dict[str, int]:
        """Bytes moved so far per link, but for weights that were brought to where they stay."""
        found = self.machine.traffic()
        settled = self._settled + (self._weights.settled if self._weights else 0)
        return found | {"disk_read": found["disk_read"] - settled}

    def _drop_misplaced(self, layout: Layout) -> None:
        """Drops the weights of an earlier job unless they lie where the layout wants them."""
        if self._weights is None:
            return
        old, same = self._weights.layout, ("homes", "slot", "stage", "head_rows")
        if old.policy.slots != layout.policy.slots or any(getattr(old, n) != getattr(layout, n) for n in same):
            self._drop_weights()

    def _drop_weights(self) -> None:
        if self._weights is not None:
            self._settled += self._weights.settled
            self._weights.close()
            self._weights = None

    def _summarise(self, course: Course, means: Means | None) -> dict[str, Any]:
        """What `summary` holds: whose job it was, its course, and what it chose and took.

        verified: files, bytes and seconds of what was compared with its checksums since the engine was made.
        """
        tiers = ("device", "disk") if self.machine.capacity.shared else ("device", "host", "disk")
        return {
            "model": self.source.name,
            "device": self.machine.kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            **course.summary(self._traffic()),
            "peak_bytes": {t: self.machine.tier(t).ledger.peak for t in tiers},
            "lossy": self.lossy.given,
            "verified": dict(vars(self.verifier)) if self.verifier else None,
            "policy": means.layout.policy.to_json() if means else None,
            "plan": means.watch.report() if means else None,
        }
