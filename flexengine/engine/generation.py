"""The sweeps of a job: requests enter the block when there is room, and rows yield results when they finish.

Requests are taken from an iterator, at most one block ahead, so memory does not grow with the number of rows.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flexengine.config import Completion, Result
from flexengine.engine.generating import Generating
from flexengine.engine.stages import JobResources
from flexengine.engine.state import Progress
from flexengine.job.prompts import Request
from flexengine.job.rows import Row
from flexengine.model.sample import NONFINITE, Sampled, logprob_entry
from flexengine.model.stop import Stops
from flexengine.runtime.frames import forget_variables
from flexengine.runtime.shortage import shortage
from flexengine.schedule.order import Batch
from flexengine.schedule.sweeps import Sequence
from flexengine.worker.worker import Text


class Swept(NamedTuple):
    """A computed sweep.

    Attributes:
        batches: gpu_batches of the sweep.
        ended: sequences that ended.
        prefill: whether a prompt was computed.
        seconds: seconds of each stage.
    """

    batches: list[Batch]
    ended: list[Sequence]
    prefill: bool
    seconds: list[float]


@dataclass
class _Open:
    """A row in flight.

    Attributes:
        request: the row's request.
        remaining: number of samples that are not finished.
        samples: finished samples, by number.
        error: error of the first sample that failed; None if none did.
    """

    request: Request
    remaining: int
    samples: dict[int, Completion] = field(default_factory=dict)
    error: str | None = None


class Generation:
    """Generates the results of the rows in `feed`.

    Attributes:
        resources: resources of the job.
        feed: requests, and rows with an error. Rows that are not started remain in the iterator.
        tokenizer: None if the checkpoint has none.
        eos: token ids that end a sequence.
        progress: updated after every sweep.
        reports: told about every sweep.
    """

    def __init__(
        self, resources: JobResources, feed: Iterator[Request | Row], tokenizer: Any, eos: set[int], reports: Generating
    ) -> None:
        self.resources, self.tokenizer, self.eos, self.progress = resources, tokenizer, eos, reports.progress
        self.feed, self.reports = feed, reports
        self._more = True
        self._bad: deque[Result] = deque()
        self._texts: dict[int, Text] = {}
        self._first: dict[int, Sampled] = {}  # by waiting sequence: first token, if its prompt was computed
        self._open: dict[int, _Open] = {}  # by row index
        self._next = 0  # sequence id

    def run(self, on_sweep: Callable[[Progress], None] | None) -> Iterator[Result]:
        """Yield results in the order in which rows finish. A row with an error yields a result when the row is read.

        Args:
            on_sweep: called with the progress after every sweep.

        Raises:
            Shortage: a sweep ran out of memory. The caller must run the requests of `unfinished()` again, then the rest
                of `feed`.
        """
        sweeps, progress = self.resources.sweeps, self.progress
        while True:
            self._take()
            while self._bad:
                yield self._bad.popleft()
            if sweeps.idle:
                if not self._more:
                    return
                continue  # `_take` read only rows with errors, up to its limit
            began = time.perf_counter()
            swept = self._guarded_sweep()
            seconds = time.perf_counter() - began
            self._note(swept, seconds)
            progress.sweeps += 1
            if swept.prefill:
                progress.prefill_seconds += seconds
            else:
                progress.decode_seconds += seconds
            results = [result for sequence in swept.ended if (result := self._leave(sequence)) is not None]
            progress.rows += sum(result.error is None for result in results)
            if on_sweep:
                on_sweep(progress)
            self.reports.end_sweep()
            yield from results

    def _note(self, swept: Swept, seconds: float) -> None:
        """Give each stage's watch the seconds of a sweep. Seconds outside of stages are divided evenly."""
        rest = (seconds - sum(swept.seconds)) / len(swept.seconds)
        for stage, own in zip(self.resources.stages, swept.seconds, strict=True):
            stage.watch.note(swept.batches, own + rest, stage.executor.busy)

    def _take(self) -> None:
        """Take requests from the feed until one sequence more than a block waits. The additional sequence shows the
        schedule that another sweep follows."""
        sweeps = self.resources.sweeps
        while self._more and len(sweeps.waiting) <= sweeps.policy.block_size and len(self._bad) < 1000:
            item = next(self.feed, None)
            if item is None:
                self._more = False
            elif isinstance(item, Row):
                self._bad.append(Result(item.index, error=item.error, prompt=item.prompt))
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

    def _guarded_sweep(self) -> Swept:
        """Return what `_sweep` returns. Raise Shortage if it ran out of memory.

        After an error no further task starts. Unfinished forward passes and variables in the traceback drop their
        tensors. The Shortage is raised after the `except` block: else the first error, with its traceback, would stay
        referenced as the context of the Shortage.
        """
        try:
            with torch.no_grad():
                return self._sweep()
        except BaseException as error:
            failure = shortage(error, self.resources.cuda)
            if failure is None:
                self.resources.abandon()
                forget_variables(error)
                raise
        self.resources.abandon()
        raise failure

    def unfinished(self) -> list[Request]:
        """Return the requests of the rows in flight, in order. Subtract their tokens from `progress`."""
        done = [len(s.token_ids) for row in self._open.values() for s in row.samples.values()]
        limits = [row.request.sampling.max_tokens * len(row.samples) for row in self._open.values()]
        self.progress.tokens -= sum(done) + sum(len(text.generated) for text in self._texts.values())
        self.progress.most += sum(limits) - sum(done)
        return [row.request for row in self._open.values()]

    def _sweep(self) -> Swept:
        """Advance every live sequence by one token, through one stage after the other."""
        resources = self.resources
        sweeps = resources.sweeps
        batches = sweeps.begin(resources.claim, resources.release)
        if not batches:
            peak = sweeps.waiting[0].peak_tokens
            pools = [(tier, pool) for tier, group in sweeps.pools.items() for pool in group]
            pages = ", ".join(f"{tier}: {pool.held(peak)} of {pool.pages}" for tier, pool in pools)
            raise RuntimeError(f"the next sequence needs more KV pages per layer than the pools have ({pages}); raise"
                               " --device-mem or lower max_tokens")  # fmt: skip
        prefill = any(not sweeps.live[p.sequence].generated for b in batches for p in b.pieces)
        prompt_tokens = sum(p.count for b in batches for p in b.pieces if not p.decodes)
        self.progress.tokens += len(sweeps.joined)
        over = {s.id for s in sweeps.joined if self._append(s.id, self._first.pop(s.id))}
        seconds = self._stages(batches)
        sampled = {s: token for s, token in resources.stages[-1].worker.sampled.items() if s not in over}
        self._first.update((s, sampled.pop(s)) for s in sampled.keys() - sweeps.live.keys())
        stopped = over | {sequence for sequence, token in sampled.items() if self._append(sequence, token)}
        self.progress.tokens += len(sampled)
        self.progress.computed_prompt_tokens += prompt_tokens
        ended = sweeps.advance(batches, stopped)
        for sequence in ended:
            resources.release(sequence)
        return Swept(batches, ended, prefill, seconds)

    def _stages(self, batches: list[Batch]) -> list[float]:
        """Compute the sweep in every stage. Return the seconds of each."""
        seconds, sweeps = list[float](), self.resources.sweeps
        self.reports.begin_sweep([stage.cells(batches) for stage in self.resources.stages], len(sweeps.live))
        for number, stage in enumerate(self.resources.stages):
            self.reports.begin_stage(number)
            seconds.append(stage.sweep(batches, sweeps, self._texts))
        return seconds

    def _append(self, sequence: int, sampled: Sampled) -> bool:
        """Append a token to a sequence. Return whether it was the last one."""
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
        """Record a finished sequence. Return the row's result if all samples of the row are finished, else None."""
        text, _ = self._texts.pop(sequence.id), self._first.pop(sequence.id, None)
        row = self._open[text.row]
        self.progress.most -= sequence.max_tokens - len(text.generated)
        row.remaining -= 1
        row.error = row.error or text.error
        logprobs = text.logprobs if text.sampling.logprobs is not None else None
        words = text.stops.text(text.generated)
        row.samples[text.sample] = Completion(words, text.generated, text.ended or "length", logprobs)
        return self._finish(row) if not row.remaining else None

    def _finish(self, row: _Open) -> Result:
        index, prompt, given = row.request.index, len(row.request.prompt_ids), row.request.prompt
        del self._open[index]
        self.progress.prompt_tokens += prompt
        if row.error:
            self.progress.failed += 1
            place = f"row {index}" + (f" (line {row.request.line})" if row.request.line else "")
            return Result(index, prompt_tokens=prompt, error=f"{place}: {row.error}", prompt=given)
        samples = [row.samples[number] for number in sorted(row.samples)]
        first, total = samples[0], sum(len(s.token_ids) for s in samples)
        return Result(
            index, first.generated_text, first.token_ids, first.finish_reason, prompt, total,
            logprobs=first.logprobs, samples=samples if len(samples) > 1 else None, prompt=given,
        )  # fmt: skip
