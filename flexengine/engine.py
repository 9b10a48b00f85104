"""The engine: a model, a machine and a policy; prompts in, results out."""

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flexengine import kernels
from flexengine.config import Result, SamplingParams, cache_root, parse_size
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.job.prompts import Request, Row, encode, row_of
from flexengine.model.checkpoint import match, read_checkpoint
from flexengine.model.skeleton import Skeleton, build, choose_dtype, load_config, named_dtype
from flexengine.model.source import resolve
from flexengine.model.tokenizer import eos_tokens, load_tokenizer
from flexengine.plan.layout import ONE_SEQUENCE, Layout, Workload, lay_out
from flexengine.plan.rule import default_policy, planned, reshaped
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor
from flexengine.runtime.trace import Trace
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.tier.machine import Links, make_machine
from flexengine.worker.cache import Cache
from flexengine.worker.hidden import Hidden
from flexengine.worker.weights import Weights, held_dtypes, model_facts
from flexengine.worker.worker import Text, Worker

# In nobody's use once loaded: tied copies of the head, and buffers that old checkpoints carry along.
_IGNORABLE = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "lm_head.weight")


@dataclass
class Progress:
    """Where a job stands, told after every sweep. tokens: generated so far; most: generated if nothing stops early."""

    sweeps: int = 0
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    most: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass
class _Job:
    """What one call of `stream` works with."""

    layout: Layout
    sweeps: Sweeps
    worker: Worker
    program: Program
    executor: Executor
    texts: dict[int, Text]
    prompt_lengths: dict[int, int]


class Engine:
    """Generates text with a model whose weights, KV cache and activations may live on device, host and disk.

    model: a directory, a .gguf file or a hub id; None is the demo model. policy: None lets `plan.rule` choose.
    device: auto, cpu, cuda or sim. device_mem, host_mem: bytes or text such as "800M"; None takes what is free.
    offload_dir: where KV and activations spill. dtype: auto (float32 on CPU and sim, the checkpoint's on CUDA),
    float32, bfloat16, float16. links: rates of a sim machine's links. overlap: False runs one task at a time.
    trace: file for Chrome trace JSON. on_sweep: called with a Progress after every sweep.

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
    ) -> None:
        if not isinstance(policy, Policy | None):
            raise InvalidInput(f"policy is {type(policy).__name__}; it must be a Policy, such as Policy(**fields)")
        named_dtype(dtype)  # a wrong name is refused before anything is converted
        device_bytes, host_bytes = (parse_size(s) if s is not None else None for s in (device_mem, host_mem))
        offload = Path(offload_dir) if offload_dir else cache_root() / "offload"
        self.machine = make_machine(device, device_bytes, host_bytes, offload, links)
        self.trace = Trace(trace) if trace else None
        self.policy, self.overlap, self.on_sweep = policy, overlap, on_sweep
        self.source = resolve(str(model) if model is not None else None)
        directory = self.source.directory
        self.dtype = choose_dtype(dtype, load_config(directory), self.machine.kind)
        with torch.no_grad():
            self.skeleton: Skeleton = build(directory, self.dtype)
        prefix = getattr(self.skeleton.model, "base_model_prefix", "")
        self._stored = match(read_checkpoint(directory), self.skeleton.wanted, prefix, _IGNORABLE)
        self._held = held_dtypes(self.skeleton, self._stored, self.dtype, self.machine.compute)
        self.facts = model_facts(self.skeleton, self._stored, self._held, self.dtype)
        self.tokenizer = load_tokenizer(directory)
        self.eos = eos_tokens(directory, self.skeleton.config)
        self.kernels = kernels.load() if self.machine.compute.type == "cpu" else kernels.CudaKernels()
        self.summary: dict[str, Any] = {}
        self._weights: Weights | None = None
        self._running: Generator[Result] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        {"prompt_token_ids"}, with optional max_tokens, temperature, seed and ignore_eos of its own."""
        return sorted(self.stream(prompts, params), key=lambda result: result.index)

    def stream(self, prompts: Iterable[Any], params: SamplingParams | None = None) -> Iterator[Result]:
        """Results as rows finish; `index` says which prompt one belongs to. A bad row yields a result with `error`."""
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

    def _results(self, prompts: Iterable[Any], params: SamplingParams) -> Generator[Result]:
        rows = [p if isinstance(p, Row) else row_of(p, i) for i, p in enumerate(prompts)]
        limit = self.skeleton.context_length or 1 << 40
        vocabulary = self.skeleton.head[1][0]
        encoded = [encode(row, self.tokenizer, limit, params, vocabulary) for row in rows]
        requests = [r for r in encoded if isinstance(r, Request)]
        layout, requests, refused = self._fitting(requests) if requests else (None, requests, {})
        encoded = [refused.get(r.index, r) for r in encoded]
        progress = Progress(failed=len(encoded) - len(requests), most=sum(r.sampling.max_tokens for r in requests))
        for row in encoded:
            if isinstance(row, Row):
                yield Result(row.index, error=row.error)
        if layout is None:
            self.summary = self._summarise(progress, None, 0.0, {})
            return
        yield from self._generate(layout, requests, progress)

    def _fitting(self, requests: list[Request]) -> tuple[Layout, list[Request], dict[int, Row]]:
        """The job's layout. Sets aside the longest requests where they are why it cannot be held; raises if the
        shortest cannot."""
        try:
            return self.plan(requests), requests, {}
        except OutOfMemory as error:
            if not error.what.startswith(ONE_SEQUENCE):
                raise
            whole = error
        ordered = sorted(requests, key=lambda r: len(r.prompt_ids) + r.sampling.max_tokens)
        low, high = 0, len(ordered)
        layout: Layout | None = None
        while low < high:
            middle = (low + high) // 2
            try:
                layout = self.plan(ordered[: middle + 1])
                low = middle + 1
            except OutOfMemory as error:
                high, whole = middle, error
        if layout is None:
            raise whole
        refused = {}
        for r in ordered[low:]:
            size = f"prompt of {len(r.prompt_ids)} tokens + max_tokens {r.sampling.max_tokens}"
            refused[r.index] = Row(r.index, 0, error=f"row {r.index}: {size} cannot be held: {whole}")
        return layout, [r for r in requests if r.index not in refused], refused

    def _generate(self, layout: Layout, requests: list[Request], progress: Progress) -> Iterator[Result]:
        began = time.perf_counter()
        job = self._prepare(layout, requests)
        loaded = time.perf_counter() - began
        before = self.machine.traffic()
        try:
            with job.executor:
                yield from self._run(job, progress)
        finally:
            self.summary = self._summarise(progress, job, loaded, before)
            job.worker.close()
            self._write_trace()

    def _write_trace(self) -> None:
        """A trace that cannot be written must not cost the results."""
        try:
            if self.trace:
                self.trace.write()
        except OSError as error:
            warnings.warn(f"the trace is lost: {error}", RuntimeWarning, stacklevel=2)

    def plan(self, requests: Iterable[Request]) -> Layout:
        """The layout a job of these requests gets: the given policy, or the rule's. Raises OutOfMemory."""
        workload = Workload(tuple((len(r.prompt_ids), r.sampling.max_tokens) for r in requests))
        if self.policy is not None:
            return lay_out(self.facts, self.policy, workload, self.machine.capacity)
        capacity = planned(self.machine.capacity)
        if self._weights is not None:  # weights are placed already: keep them if this job fits beside them
            with contextlib.suppress(OutOfMemory):
                kept = reshaped(self._weights.layout.policy, self.facts, workload, capacity)
                return lay_out(self.facts, kept, workload, capacity)
        return lay_out(self.facts, default_policy(self.facts, workload, capacity), workload, capacity)

    @torch.no_grad()
    def _prepare(self, layout: Layout, requests: list[Request]) -> _Job:
        self._drop_misplaced(layout)
        for tier in ("device", "host", "disk"):
            self.machine.tier(tier).ledger.restart_peak()
        room = {what: layout.account["device"].get(what, 0) for what in ("workspace", "paused forwards")}
        with contextlib.ExitStack() as undo:  # the spill files first: they may fail, and gigabytes of weights take time
            cache = Cache(self.facts, layout, self.machine, self.kernels, self.dtype)
            undo.callback(cache.close)
            hidden = Hidden(self.facts, layout, self.machine, self.dtype)
            undo.callback(hidden.close)
            if self._weights is None:
                self._weights = Weights(self.skeleton, self._stored, self._held, layout, self.machine, self.dtype)
            weights = self._weights
            worker = Worker(self.skeleton, weights, cache, hidden, room)
            undo.pop_all()
        streamed = weights.streamed
        program = Program(streamed, len(self.skeleton.layers), layout.policy.slots, self.machine.routes)
        away = any(streamed) or layout.cache_buffer or layout.hidden_buffer
        executor = Executor(worker.perform, self.machine.lanes if away and self.overlap else "inline", self.trace)
        sweeps = Sweeps(layout.policy, layout.pools)
        for r in requests:
            sweeps.add(Sequence(r.index, len(r.prompt_ids), r.sampling.max_tokens))
        texts = {r.index: Text(r.index, list(r.prompt_ids), r.sampling) for r in requests}
        self.machine.settle()
        return _Job(layout, sweeps, worker, program, executor, texts, {r.index: len(r.prompt_ids) for r in requests})

    def _drop_misplaced(self, layout: Layout) -> None:
        """Drops the weights of an earlier job unless they lie where the layout wants them."""
        if self._weights is None:
            return
        old, same = self._weights.layout, ("homes", "slot", "stage", "head_rows", "wide")
        if old.policy.slots != layout.policy.slots or any(getattr(old, n) != getattr(layout, n) for n in same):
            self._drop_weights()

    def _drop_weights(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _run(self, job: _Job, progress: Progress) -> Iterator[Result]:
        while not job.sweeps.idle:
            began = time.perf_counter()
            with torch.no_grad():
                gone, prefill = self._sweep(job, progress)
            seconds = time.perf_counter() - began
            progress.sweeps += 1
            if prefill:
                progress.prefill_seconds += seconds
            else:
                progress.decode_seconds += seconds
            progress.rows += len(gone)
            if self.on_sweep:
                self.on_sweep(progress)
            for sequence in gone:
                yield self._finish(job, sequence, progress)

    def _sweep(self, job: _Job, progress: Progress) -> tuple[list[Sequence], bool]:
        """One token further for everyone alive; returns who left, and whether a prompt was computed."""
        sweeps, worker = job.sweeps, job.worker
        batches = sweeps.begin(worker.cache.claim)
        if not batches:
            raise RuntimeError("nobody can enter and nobody is alive: the KV pools are too small for the next sequence")
        prefill = any(not sweeps.live[p.sequence].generated for b in batches for p in b.pieces)
        worker.begin(batches, sweeps.live, job.texts)
        self.machine.settle()
        job.executor.run(job.program.sweep(sweeps.sweep, batches, sweeps.another))
        ended = set()
        for sequence, token in worker.sampled.items():
            text = job.texts[sequence]
            text.tokens.append(token)
            if token in self.eos and not text.sampling.ignore_eos:
                ended.add(sequence)
        progress.tokens += len(worker.sampled)
        gone = sweeps.advance(batches, ended)
        for s in gone:
            worker.cache.release(s)
        return gone, prefill

    def _finish(self, job: _Job, sequence: Sequence, progress: Progress) -> Result:
        text, prompt = job.texts.pop(sequence.id), job.prompt_lengths[sequence.id]
        tokens = text.tokens[prompt:]
        progress.prompt_tokens += prompt
        progress.most -= sequence.max_tokens - len(tokens)
        stopped = tokens[-1] in self.eos and not text.sampling.ignore_eos
        words = self.tokenizer.decode(tokens, skip_special_tokens=True) if self.tokenizer else None
        return Result(text.index, words, tokens, "stop" if stopped else "length", prompt, len(tokens))

    def _summarise(self, p: Progress, job: _Job | None, loaded: float, before: dict[str, int]) -> dict[str, Any]:
        seconds = p.prefill_seconds + p.decode_seconds
        tiers = ("device", "disk") if self.machine.capacity.shared else ("device", "host", "disk")
        busy = job.executor.busy if job else {}
        return {
            "model": self.source.name,
            "device": self.machine.kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": p.rows,
            "failed": p.failed,
            "prompt_tokens": p.prompt_tokens,
            "generated_tokens": p.tokens,
            "sweeps": p.sweeps,
            "load_seconds": loaded,
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "total_seconds": seconds,
            "generated_tok_s": p.tokens / seconds if seconds else 0.0,
            "bytes": {link: n - before.get(link, 0) for link, n in self.machine.traffic().items()},
            "peak_bytes": {t: self.machine.tier(t).ledger.peak for t in tiers},
            "busy": {lane: s / seconds for lane, s in busy.items()} if seconds else {},
            "policy": job.layout.policy.to_json() if job else None,
        }
