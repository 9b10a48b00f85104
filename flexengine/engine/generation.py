"""The sweeps of a job: requests enter the block when there is room, and rows yield results when they finish.

Requests are taken from an iterator, one window of `engine/arrange.py` at a time, so memory does not grow with the
number of rows.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from flexengine.config import Completion, Result, Score
from flexengine.engine.arrange import Arranged, Arrangement
from flexengine.engine.stages import JobResources, LocalStage, Sweep
from flexengine.engine.state import Progress
from flexengine.engine.sweep_reports import SweepReports
from flexengine.job.prompts import Request
from flexengine.model.sample import NONFINITE, Sampled, logprob_entry
from flexengine.model.stop import Stops
from flexengine.runtime.frames import forget_variables
from flexengine.runtime.shortage import shortage
from flexengine.schedule.batches import Batch
from flexengine.schedule.sweeps import Sequence
from flexengine.worker.sequence_text import SequenceText

Step = TypeVar("Step")
Value = TypeVar("Value")


class Begun(NamedTuple):
    """A sweep that was begun.

    Attributes:
        batches: gpu_batches of the sweep.
        prompt_tokens: number of prompt tokens that it computes.
        began: time at which it was begun, in seconds of time.perf_counter.
        busy: seconds until all stages were started.
    """

    batches: list[Batch]
    prompt_tokens: int
    began: float
    busy: float


@dataclass
class _Open:
    """A row in flight.

    Attributes:
        request: the row's request.
        remaining: number of sequences that are not finished.
        samples: finished sequences, by number.
        scores: their scored tokens, by number; empty if nothing is scored.
        error: error of the first sample that failed; None if none did.
    """

    request: Request
    remaining: int
    samples: dict[int, Completion] = field(default_factory=dict)
    scores: dict[int, list[Sampled]] = field(default_factory=dict)
    error: str | None = None


class Generation:
    """Generates the results of the rows in `feed`.

    Attributes:
        resources: resources of the job.
        arrangement: requests, and rows with an error, that are not started.
        tokenizer: None if the checkpoint has none.
        eos: token ids that end a sequence.
        progress: updated after every sweep.
        reports: told about every sweep.
        step_by_step: whether given continuations are computed one token after the other, like generated ones, because
            the cache is lossy.
    """

    def __init__(
        self, resources: JobResources, arrangement: Arrangement, tokenizer: Any, eos: set[int], reports: SweepReports,
        step_by_step: bool = False,
    ) -> None:  # fmt: skip
        self.resources, self.tokenizer, self.eos, self.progress = resources, tokenizer, eos, reports.progress
        self.arrangement, self.reports, self.step_by_step = arrangement, reports, step_by_step
        self._texts: dict[int, SequenceText] = {}
        self._open: dict[int, _Open] = {}  # by row index
        self._next = 0  # sequence id
        self._begun: list[Begun | None] = [None for _ in resources.sweeps.cohorts]
        self._ended = 0.0  # time at which a sweep ended last

    def run(self, on_sweep: Callable[[Progress], None] | None) -> Iterator[Result]:
        """Yield results in the order in which rows finish. A row with an error yields a result when the row is read.

        Args:
            on_sweep: called with the progress after every sweep.

        Raises:
            Shortage: a sweep ran out of memory. The caller must run the requests of `unfinished()` again, then the rest
                of the arrangement's feed.
            WorkerLost: an attention worker was lost. The caller must do the same, or replace the worker, call `lose`
                with the place of its KV cache, and `run` again.
        """
        while not (self.resources.sweeps.idle and self.arrangement.ended):
            for cohort in range(len(self.resources.sweeps.cohorts)):
                if self._begun[cohort] is not None:
                    yield from self._end(cohort, on_sweep)
                self._take()
                yield from self._refused()
                if not self.resources.sweeps.idle:  # else `_take` read only rows with errors, up to its limit
                    self._guarded(self._begin, cohort)

    def _refused(self) -> Iterator[Result]:
        """Yield the results of rows with an error that were read."""
        while self.arrangement.bad:
            row = self.arrangement.bad.popleft()
            self.progress.failed += 1
            yield Result(row.index, error=row.error, prompt=row.prompt)

    def _end(self, cohort: int, on_sweep: Callable[[Progress], None] | None) -> Iterator[Result]:
        """End the cohort's sweep. Yield the results of the rows that are finished."""
        begun, progress = self._begun[cohort], self.progress
        assert begun is not None
        self._begun[cohort] = None
        ended, each = self._guarded(self._record, begun)
        now = time.perf_counter()
        seconds, self._ended = now - max(begun.began, self._ended), now
        self._note(begun, each, seconds)
        progress.sweeps += 1
        if begun.prompt_tokens:
            progress.prefill_seconds += seconds
        else:
            progress.decode_seconds += seconds
        results = [result for sequence in ended if (result := self._leave(sequence)) is not None]
        progress.rows += sum(result.error is None for result in results)
        if on_sweep:
            on_sweep(progress)
        self.reports.end_sweep()
        yield from results

    def _take(self) -> None:
        """Take requests from the arrangement until one sequence more than a block waits. The additional sequence shows
        the schedule that another sweep follows."""
        sweeps, arrangement = self.resources.sweeps, self.arrangement
        while len(sweeps.waiting) <= sweeps.policy.block_size:
            arrangement.read()
            if not arrangement.ready:
                return
            self._enter(arrangement.ready.popleft())

    def _enter(self, arranged: Arranged) -> None:
        request, sampling = arranged.request, arranged.request.sampling
        self._open[request.index] = _Open(request, len(arranged.stems))
        parts = [(target.prompt_ids, target.continuation) for target in request.targets]
        parts = parts or [(request.prompt_ids, ())] * sampling.n
        each = zip(parts, request.sizes, arranged.stems, strict=True)
        for number, ((ids, targets), (length, most), stem) in enumerate(each):
            stops = Stops(self.tokenizer, sampling, self.eos)
            self._texts[self._next] = SequenceText(request.index, number, ids, sampling, stops, targets)
            self.resources.sweeps.add(Sequence(self._next, length, most, stem, len(targets), self.step_by_step))
            self._next += 1

    def _guarded(self, step: Callable[[Step], Value], argument: Step) -> Value:
        """Return the value of a step of a sweep. Raise Shortage if it ran out of memory.

        After an error no further task starts. Unfinished forward passes and variables in the traceback drop their
        tensors. The Shortage is raised after the `except` block: else the first error, with its traceback, would stay
        referenced as the context of the Shortage.
        """
        try:
            with torch.no_grad():
                return step(argument)
        except BaseException as error:
            failure = shortage(error, self.resources.cuda)
            if failure is None:
                self.resources.abandon()
                forget_variables(error)
                raise
        self.resources.abandon()
        raise failure

    def lose(self, home: str) -> int:
        """Let the sequences whose KV cache was at a lost place wait again; `run` computes them from their prompts.
        Subtract their tokens from `progress`. Return the number of their rows."""
        rows = set[int]()
        for sequence in self.resources.sweeps.lose(home, self.resources.release):
            text = self._texts[sequence.id]
            self.progress.tokens -= len(text.generated)
            self._texts[sequence.id] = replace(text, generated=[], logprobs=[])
            rows.add(text.row)
        self.reports.tokens_lost()
        return len(rows)

    def unfinished(self) -> list[Request]:
        """Return the requests of the rows in flight, in order. Subtract their tokens from `progress`."""
        for row in self._open.values():
            for number, sample in row.samples.items():
                done = len(sample.token_ids)
                if row.request.choices:
                    self.progress.scored_tokens -= done
                    self.progress.scored, done = self.progress.scored - 1, 1
                self.progress.tokens -= done
                self.progress.most += row.request.sizes[number][1] - done
        self.progress.tokens -= sum(len(text.generated) for text in self._texts.values())
        waiting = [arranged.request for arranged in self.arrangement.ready]
        return [row.request for row in self._open.values()] + waiting

    def _begin(self, cohort: int) -> None:
        """Begin a sweep, which advances every live sequence of a cohort by one token. Start it in every stage."""
        began = time.perf_counter()
        resources, sweeps = self.resources, self.resources.sweeps
        batches = sweeps.begin(resources.claim, resources.release, cohort)
        if not batches:
            if sweeps.live:  # of other cohorts
                return
            peak = sweeps.waiting[0].peak_tokens
            pools = [(tier, pool) for tier, group in sweeps.pools.items() for pool in group]
            pages = ", ".join(f"{tier}: {pool.held(peak)} of {pool.pages}" for tier, pool in pools)
            raise RuntimeError(f"the next sequence needs more KV pages per layer than the pools have ({pages}); raise"
                               " --device-mem or lower max_tokens")  # fmt: skip
        prompt_tokens = sum(p.count for b in batches for p in b.pieces if sweeps.in_prompt(p))
        sweep = Sweep(sweeps.sweep, batches, sweeps.stems, sweeps.another)
        local = resources.local
        self.reports.begin_sweep([stage.cells(batches) for stage in local], len(sweeps.live))
        for stage in resources.stages:
            if stage in local:
                self.reports.begin_stage(local.index(stage))
            stage.start(sweep, self._texts)
        self._begun[cohort] = Begun(batches, prompt_tokens, began, time.perf_counter() - began)

    def _record(self, begun: Begun) -> tuple[list[Sequence], list[float]]:
        """Wait for a sweep's results and record them. Return the sequences that leave, and the seconds of each
        stage."""
        resources, progress = self.resources, self.progress
        results = [stage.result() for stage in resources.stages]
        sampled, scored = results[-1].sampled, results[-1].scored
        stopped = {sequence for sequence, token in sampled.items() if self._append(sequence, token)}
        for sequence, tokens in scored.items():
            self._score(sequence, tokens)
        progress.tokens += len(sampled) + len(scored)
        progress.scored += len(scored)
        progress.scored_tokens += sum(map(len, scored.values()))
        progress.computed_prompt_tokens += begun.prompt_tokens
        ended = resources.sweeps.advance(begun.batches, stopped, resources.release)
        return ended, [result.seconds for result in results]

    def _note(self, begun: Begun, seconds: list[float], whole: float) -> None:
        """Give the watch of each stage of this process its seconds. Seconds outside of stages are divided evenly.

        Args:
            begun: the sweep.
            seconds: of each stage.
            whole: of the sweep. With stages in other processes, those in which this process waited are left out.
        """
        own = [(stage, s) for stage, s in zip(self.resources.stages, seconds, strict=True)
               if isinstance(stage, LocalStage)]  # fmt: skip
        rest = (whole if len(own) == len(seconds) else begun.busy) - sum(s for _, s in own)
        for stage, s in own:
            stage.watch.note(begun.batches, s + rest / len(own), stage.executor.times.busy)

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

    def _score(self, sequence: int, scored: list[Sampled]) -> None:
        """Record the targets of a sequence that is scored."""
        text = self._texts[sequence]
        if any(each.token == NONFINITE for each in scored):
            text.error = "its logits are not finite"
            return
        text.scores = scored
        text.generated.extend(each.token for each in scored)
        if text.sampling.logprobs is not None:
            text.logprobs += [logprob_entry(each, self.tokenizer) for each in scored]

    def _leave(self, sequence: Sequence) -> Result | None:
        """Record a finished sequence. Return the row's result if all sequences of the row are finished, else None."""
        text = self._texts.pop(sequence.id)
        row = self._open[text.row]
        self.progress.most -= sequence.max_tokens - (1 if text.targets else len(text.generated))
        row.remaining -= 1
        row.error = row.error or text.error
        logprobs = text.logprobs if text.sampling.logprobs is not None else None
        words = text.stops.text(text.generated) if not text.targets else None
        row.samples[text.sample] = Completion(words, text.generated, text.ended or "length", logprobs)
        row.scores[text.sample] = text.scores
        return self._finish(row) if not row.remaining else None

    def _finish(self, row: _Open) -> Result:
        index, prompt, given = row.request.index, len(row.request.prompt_ids), row.request.prompt
        del self._open[index]
        self.progress.prompt_tokens += prompt
        if row.error:
            self.progress.failed += 1
            place = f"row {index}" + (f" (line {row.request.line})" if row.request.line else "")
            return Result(index, prompt_tokens=prompt, error=f"{place}: {row.error}", prompt=given)
        if row.request.choices:
            return self._scored(row)
        samples = [row.samples[number] for number in sorted(row.samples)]
        first, total = samples[0], sum(len(s.token_ids) for s in samples)
        return Result(
            index, first.generated_text, first.token_ids, first.finish_reason, prompt, total,
            logprobs=first.logprobs, samples=samples if len(samples) > 1 else None, prompt=given,
        )  # fmt: skip

    def _scored(self, row: _Open) -> Result:
        """Return the result of a row that is scored. If log probabilities are requested, it has each of them for a
        single choice."""
        request, scores, first = row.request, list[Score](), 0
        for choice in request.choices:
            tokens = [each for number in range(first, first + len(choice)) for each in row.scores[number]]
            greedy = all(each.token == each.top[0][0] for each in tokens)
            scores.append(Score(math.fsum(each.logprob or 0.0 for each in tokens), len(tokens), greedy))
            first += len(choice)
        result = Result(
            request.index, prompt_tokens=len(request.prompt_ids), completion_tokens=sum(each.tokens for each in scores),
            scores=scores, prompt=request.prompt,
        )  # fmt: skip
        if len(request.choices) == 1 and request.sampling.logprobs is not None:
            samples = [row.samples[number] for number in sorted(row.samples)]
            result.token_ids = [token for sample in samples for token in sample.token_ids]
            result.logprobs = [entry for sample in samples for entry in sample.logprobs or []]
        return result
