"""One call of `Engine.stream`: requests enter as places fall free, sweeps advance them, results leave as rows finish.

Memory does not grow with the number of rows: requests are taken from an iterator, a block's worth ahead.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from flexengine.config import Completion, Result
from flexengine.engine.state import Progress
from flexengine.job.prompts import Request
from flexengine.job.rows import Row
from flexengine.model.sample import NONFINITE, Sampled, logprob_entry
from flexengine.model.stop import Stops
from flexengine.plan.feedback import Watch
from flexengine.plan.layout import Layout
from flexengine.runtime.execute import Executor
from flexengine.runtime.frames import forget_variables
from flexengine.runtime.shortage import shortage
from flexengine.schedule.order import Batch
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.worker.worker import Text, Worker


@dataclass(frozen=True)
class JobResources:
    """What `Core.prepare` makes for a job under one layout.

    Attributes:
        sweeps: admission, and the gpu_batches of each sweep.
        worker: performs tasks on tensors.
        program: the tasks of a sweep.
        executor: runs tasks on lanes.
        watch: compares sweeps with their prediction.
    """

    layout: Layout
    sweeps: Sweeps
    worker: Worker
    program: Program
    executor: Executor
    watch: Watch


@dataclass
class _Open:
    """A row under way: what became of its samples so far."""

    request: Request
    left: int
    samples: dict[int, Completion] = field(default_factory=dict)
    error: str | None = None


class Generation:
    """Takes `feed`, requests and rows with an error, to results. tokenizer: None if the checkpoint has none."""

    def __init__(
        self, resources: JobResources, feed: Iterator[Request | Row], tokenizer: Any, eos: set[int], progress: Progress
    ) -> None:
        self.resources, self.tokenizer, self.eos, self.progress = resources, tokenizer, eos, progress
        self.feed = feed
        self._more = True
        self._bad: deque[Result] = deque()
        self._texts: dict[int, Text] = {}
        self._first: dict[int, Sampled] = {}  # by sequence that waits: its first token, if its prompt was computed
        self._open: dict[int, _Open] = {}  # by row index
        self._next = 0  # sequence id

    def run(self, on_sweep: Callable[[Progress], None] | None) -> Iterator[Result]:
        """Results in the order in which rows finish; those of bad rows as they are come by.

        Raises Shortage if a sweep gets no memory: `unfinished` and what is left of `feed` are then to be run anew."""
        sweeps, progress = self.resources.sweeps, self.progress
        while True:
            self._take()
            while self._bad:
                yield self._bad.popleft()
            if sweeps.idle:
                if not self._more:
                    return
                continue  # there were so many bad rows that no request was reached
            began = time.perf_counter()
            batches, gone, prefill = self._swept()
            seconds = time.perf_counter() - began
            self.resources.watch.note(batches, seconds, self.resources.executor.busy)
            progress.sweeps += 1
            if prefill:
                progress.prefill_seconds += seconds
            else:
                progress.decode_seconds += seconds
            results = [result for sequence in gone if (result := self._leave(sequence)) is not None]
            progress.rows += sum(result.error is None for result in results)
            if on_sweep:
                on_sweep(progress)
            yield from results

    def _take(self) -> None:
        """Lets a block's worth of sequences wait, and one more, by which the schedule sees that there are others."""
        sweeps = self.resources.sweeps
        while self._more and len(sweeps.waiting) <= sweeps.policy.block_size and len(self._bad) < 1000:
            item = next(self.feed, None)
            if item is None:
                self._more = False
            elif isinstance(item, Row):
                self._bad.append(Result(item.index, error=item.error))
                self.progress.failed += 1
            else:
                self._enter(item)

    def _enter(self, request: Request) -> None:
        sampling = request.sampling
        self._open[request.index] = _Open(request, sampling.n)
        for number in range(sampling.n):
            stops = Stops(self.tokenizer, sampling, self.eos)
            self._texts[self._next] = Text(request.index, number, request.prompt_ids, sampling, stops, request.forced)
            prompt = request.index if sampling.n > 1 else None
            length = len(request.prompt_ids)
            self.resources.sweeps.add(Sequence(self._next, length, sampling.max_tokens, prompt=prompt))
            self._next += 1

    def _swept(self) -> tuple[list[Batch], list[Sequence], bool]:
        """Return what `_sweep` returns. After an error no task is begun any more and no tensor is kept: neither by
        forward passes under way nor by variables in the error's traceback. A Shortage is raised apart from the error
        it was made from."""
        try:
            with torch.no_grad():
                return self._sweep()
        except BaseException as error:
            found = shortage(error, self.resources.worker.weights.machine.kind == "cuda")
            if found is None:
                self._let_go()
                forget_variables(error)
                raise
        self._let_go()
        raise found

    def _let_go(self) -> None:
        self.resources.executor.abandon("device", self.resources.worker.drop)

    def unfinished(self) -> list[Request]:
        """The rows under way, in their order; what had been generated of them no longer counts."""
        done = [len(s.token_ids) for row in self._open.values() for s in row.samples.values()]
        limits = [row.request.sampling.max_tokens * len(row.samples) for row in self._open.values()]
        self.progress.tokens -= sum(done) + sum(len(text.generated) for text in self._texts.values())
        self.progress.most += sum(limits) - sum(done)
        return [row.request for row in self._open.values()]

    def _sweep(self) -> tuple[list[Batch], list[Sequence], bool]:
        """One token further for everyone alive; returns the gpu_batches, who left, whether prompts were computed."""
        resources = self.resources
        sweeps, worker = resources.sweeps, resources.worker
        batches = sweeps.begin(worker.cache.claim, worker.cache.release)
        if not batches:
            raise RuntimeError("the next sequence needs more KV pages than the pools have: a fault of the plan")
        prefill = any(not sweeps.live[p.sequence].generated for b in batches for p in b.pieces)
        self.progress.tokens += len(sweeps.joined)
        over = {s.id for s in sweeps.joined if self._append(s.id, self._first.pop(s.id))}
        worker.begin(batches, sweeps.live, self._texts, sweeps.first_tokens())
        worker.weights.machine.synchronize()
        resources.executor.run(resources.program.sweep(sweeps.sweep, batches, sweeps.another))
        sampled = {sequence: found for sequence, found in worker.sampled.items() if sequence not in over}
        self._first.update((waits, sampled.pop(waits)) for waits in sampled.keys() - sweeps.live.keys())
        ended = over | {sequence for sequence, found in sampled.items() if self._append(sequence, found)}
        self.progress.tokens += len(sampled)
        gone = sweeps.advance(batches, ended)
        for sequence in gone:
            worker.cache.release(sequence)
        return batches, gone, prefill

    def _append(self, sequence: int, sampled: Sampled) -> bool:
        """Takes a sequence's new token; returns whether it was the last."""
        text = self._texts[sequence]
        if sampled.token == NONFINITE:
            text.error = f"its logits are not finite after {len(text.generated)} tokens"
            return True
        text.generated.append(sampled.token)
        if sampled.logprob is not None:
            text.logprobs.append(logprob_entry(sampled, self.tokenizer))
        text.ended = text.stops.reason(text.generated)
        return text.ended is not None

    def _leave(self, sequence: Sequence) -> Result | None:
        """Books a finished sequence; the row's result if it was the last of its samples."""
        text, _ = self._texts.pop(sequence.id), self._first.pop(sequence.id, None)
        row = self._open[text.row]
        self.progress.most -= sequence.max_tokens - len(text.generated)
        row.left -= 1
        row.error = row.error or text.error
        logprobs = text.logprobs if text.sampling.logprobs is not None else None
        words = text.stops.text(text.generated)
        row.samples[text.sample] = Completion(words, text.generated, text.ended or "length", logprobs)
        return self._finish(row) if not row.left else None

    def _finish(self, row: _Open) -> Result:
        index, prompt = row.request.index, len(row.request.prompt_ids)
        del self._open[index]
        self.progress.prompt_tokens += prompt
        if row.error:
            self.progress.failed += 1
            place = f"row {index}" + (f" (line {row.request.line})" if row.request.line else "")
            return Result(index, prompt_tokens=prompt, error=f"{place}: {row.error}")
        samples = [row.samples[number] for number in sorted(row.samples)]
        first, total = samples[0], sum(len(s.token_ids) for s in samples)
        return Result(
            index, first.generated_text, first.token_ids, first.finish_reason, prompt, total,
            logprobs=first.logprobs, samples=samples if len(samples) > 1 else None,
        )  # fmt: skip
