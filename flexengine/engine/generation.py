"""The sweeps of a job: requests enter the block when there is room, and rows yield results when they finish.

Requests are taken from an iterator, one window of `engine/survey.py` at a time, so memory does not grow with the
number of rows.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

import torch

from flexengine.config import Completion, Result, Score
from flexengine.engine.stages import JobResources, Sweep
from flexengine.engine.summary import Progress, SweepReports
from flexengine.engine.survey import Arranged, Arrangement
from flexengine.errors import InvalidInput
from flexengine.job.rows import Request
from flexengine.model.tokenizer import Stops, bad_word_ids, resolved
from flexengine.runtime.execute import Cancelled, shortage
from flexengine.runtime.lane import forget_variables
from flexengine.schedule.batches import Batch
from flexengine.schedule.sweeps import Sequence
from flexengine.worker.row_sequence import RowSequence

Step = TypeVar("Step")
Value = TypeVar("Value")


class Begun(NamedTuple):
    """A sweep that was begun."""

    batches: list[Batch]  # gpu_batches of the sweep
    prompt_tokens: int  # number of prompt tokens that it computes
    began: float  # time at which it was begun, in seconds of time.perf_counter
    busy: float  # seconds until all stages were started


class OpenRow(NamedTuple):
    """A row in flight: its request, and all of its sequences."""

    request: Request
    sequences: list[RowSequence]

    def result(self) -> Result:
        """Return the result of the row, whose sequences have ended."""
        request, prompt = self.request, len(self.request.prompt_ids)
        error = next((each.error for each in self.sequences if each.error), None)
        try:
            if error is None:
                return self._scored(prompt) if request.choices else self._generated(prompt)
        except InvalidInput as fault:
            error = str(fault)
        place = f"row {request.index}" + (f" (line {request.line})" if request.line else "")
        return Result(request.index, prompt_tokens=prompt, error=f"{place}: {error}", prompt=request.prompt)

    def _generated(self, prompt: int) -> Result:
        """Return the result of a row that generates. Raise InvalidInput if its tokens cannot be decoded."""
        samples = [completion(each) for each in self.sequences]
        return Result(
            self.request.index, samples[0].generated_text, samples[0].token_ids, samples[0].finish_reason, prompt,
            sum(len(each.token_ids) for each in samples), logprobs=samples[0].logprobs,
            samples=samples if len(samples) > 1 else None, prompt=self.request.prompt,
        )  # fmt: skip

    def _scored(self, prompt: int) -> Result:
        """Return the result of a row that is scored. If log probabilities are requested, it has each of them for a
        single choice."""
        request, scores, sequences = self.request, list[Score](), iter(self.sequences)
        for choice in request.choices:
            tokens = [each for sequence in islice(sequences, len(choice)) for each in sequence.scores]
            greedy = all(each.token == each.top[0][0] for each in tokens)
            scores.append(Score(math.fsum(each.logprob or 0.0 for each in tokens), len(tokens), greedy))
        result = Result(
            request.index, prompt_tokens=prompt, completion_tokens=sum(each.tokens for each in scores), scores=scores,
            prompt=request.prompt,
        )  # fmt: skip
        if len(request.choices) == 1 and request.sampling.logprobs is not None:
            result.token_ids = [token for sequence in self.sequences for token in sequence.token_ids]
            result.logprobs = [entry for sequence in self.sequences for entry in sequence.logprobs]
        return result


def completion(sequence: RowSequence) -> Completion:
    """Return a sequence of generated tokens as a sample of a result. Raise InvalidInput if they cannot be decoded."""
    assert sequence.stops is not None
    logprobs = sequence.logprobs if sequence.sampling.logprobs is not None else None
    text = sequence.stops.text(sequence.token_ids)
    return Completion(text, sequence.token_ids, sequence.ended or "length", logprobs)


class Generation:
    """Generates the results of the rows in `feed`. eos: token ids that end a sequence. step_by_step: whether given
    continuations are computed one token after the other, like generated ones, because the cache is lossy."""

    def __init__(
        self, resources: JobResources, arrangement: Arrangement, tokenizer: Any, eos: set[int], reports: SweepReports,
        step_by_step: bool = False,
    ) -> None:  # fmt: skip
        self.resources, self.tokenizer, self.eos, self.progress = resources, tokenizer, eos, reports.progress
        self.arrangement, self.reports, self.step_by_step = arrangement, reports, step_by_step
        self._sequences: dict[int, RowSequence] = {}  # by id: those that are not finished
        self._rows: dict[int, OpenRow] = {}  # by row index
        self._words: tuple[Any, Any] = ((), ())  # bad words of the last row with some, and their tokens
        self._ids = count()
        self._begun: list[Begun | None] = [None for _ in resources.sweeps.cohorts]
        self._ended = 0.0  # time at which a sweep ended last

    def run(self, on_sweep: Callable[[Progress], None] | None) -> Iterator[Result]:
        """Yield results in the order in which rows finish. A row with an error yields a result when the row is read.
        on_sweep: called with the progress after every sweep.

        Raises:
            Shortage: a sweep ran out of memory. The caller must run the requests of `unfinished()` again, then the rest
                of the arrangement's feed.
            WorkerLost: an attention worker was lost. The caller must do the same, or replace the worker, call `lose`
                with the place of its KV cache, and `run` again.
            Cancelled: another thread has stopped the job.
        """
        while not (self.resources.sweeps.idle and self.arrangement.ended):
            for cohort in range(len(self.resources.sweeps.cohorts)):
                if self._begun[cohort] is not None:
                    yield from self._end(cohort, on_sweep)
                self._take()
                while self.arrangement.bad:
                    row = self.arrangement.bad.popleft()
                    self.progress.failed += 1
                    yield Result(row.index, error=row.error, prompt=row.prompt)
                if self.resources.own.executor.stopped.is_set():
                    raise Cancelled("the job was stopped")
                if not self.resources.sweeps.idle:  # else `_take` read only rows with errors, up to its limit
                    self._guarded(self._begin, cohort)

    def _end(self, cohort: int, on_sweep: Callable[[Progress], None] | None) -> Iterator[Result]:
        """End the cohort's sweep. Yield the results of the rows that are finished."""
        begun, progress = self._begun[cohort], self.progress
        assert begun is not None
        self._begun[cohort] = None
        ended = self._guarded(self._record, begun)
        now = time.perf_counter()
        seconds, self._ended = now - max(begun.began, self._ended), now
        # With stages in other processes, the seconds in which this one waited are left out.
        own, alone = self.resources.own, len(self.resources.stages) == 1
        own.watch.note(begun.batches, seconds if alone else begun.busy, own.executor.times.busy)
        progress.sweeps += 1
        if begun.prompt_tokens:
            progress.prefill_seconds += seconds
        else:
            progress.decode_seconds += seconds
        results = [result for sequence in ended if (result := self._leave(sequence)) is not None]
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
        if sampling.bad_words not in ((), self._words[0]):
            self._words = sampling.bad_words, bad_word_ids(sampling, self.tokenizer)
        edited = replace(sampling, bad_words=self._words[1]) if sampling.bad_words else sampling
        edited = resolved(edited, self.tokenizer, self.eos)
        row = self._rows[request.index] = OpenRow(request, [])
        parts = [(target.prompt_ids, target.continuation) for target in request.targets]
        parts = parts or [(request.prompt_ids, ())] * sampling.n
        each = zip(parts, request.sizes, arranged.stems, strict=True)
        for number, ((ids, targets), (length, most), stem) in enumerate(each):
            sequence = RowSequence(
                next(self._ids), length, most, stem, len(targets), self.step_by_step, row=request.index, sample=number,
                noise_row=request.noise_row, prompt=ids, sampling=edited, targets=targets,
                stops=Stops(self.tokenizer, sampling, self.eos, ids),
            )  # fmt: skip
            row.sequences.append(sequence)
            self._sequences[sequence.id] = sequence
            self.resources.sweeps.add(sequence)

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
            failure = shortage(error, any(stage.cuda for stage in self.resources.stages))
            self.resources.abandon()
            if failure is None:
                forget_variables(error)
                raise
        raise failure

    def lose(self, home: str) -> int:
        """Let the sequences whose KV cache was at a lost place wait again; `run` computes them from their prompts.
        Subtract their tokens from `progress`. Return the number of their rows."""
        lost = [self._sequences[each.id] for each in self.resources.sweeps.lose(home, self.resources.release)]
        for sequence in lost:
            self.progress.tokens -= len(sequence.token_ids)
            sequence.token_ids, sequence.logprobs = [], []
        self.reports.tokens_lost()
        return len({sequence.row for sequence in lost})

    def unfinished(self) -> list[Request]:
        """Return the requests of the rows in flight, in order. Subtract their tokens from `progress`."""
        progress = self.progress
        for sequence in (each for row in self._rows.values() for each in row.sequences):
            done = len(sequence.token_ids)
            if sequence.targets and sequence.id not in self._sequences:
                progress.scored_tokens -= done
                progress.scored, done = progress.scored - 1, 1
            progress.tokens -= done
            if sequence.id not in self._sequences:
                progress.most += sequence.max_tokens - done
        waiting = [arranged.request for arranged in self.arrangement.ready]
        return [row.request for row in self._rows.values()] + waiting

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
        self.reports.begin_sweep(len(resources.own.program.streamed) * len(batches), len(sweeps.live))
        for stage in resources.stages:
            stage.start(sweep, self._sequences)
        self._begun[cohort] = Begun(batches, prompt_tokens, began, time.perf_counter() - began)

    def _record(self, begun: Begun) -> list[Sequence]:
        """Wait for a sweep's results and record them. Return the sequences that leave."""
        resources, progress = self.resources, self.progress
        results = [stage.result() for stage in resources.stages]
        sampled, scored = results[-1].sampled, results[-1].scored
        stopped = {i for i, token in sampled.items() if self._sequences[i].append(token, self.tokenizer)}
        for i, tokens in scored.items():
            self._sequences[i].score(tokens, self.tokenizer)
        progress.tokens += len(sampled) + len(scored)
        progress.scored += len(scored)
        progress.scored_tokens += sum(map(len, scored.values()))
        progress.computed_prompt_tokens += begun.prompt_tokens
        return resources.sweeps.advance(begun.batches, stopped, resources.release)

    def _leave(self, sequence: Sequence) -> Result | None:
        """Record a finished sequence. Return the row's result if all sequences of the row are finished, else None."""
        ended, progress = self._sequences.pop(sequence.id), self.progress
        row = self._rows[ended.row]
        progress.most -= ended.max_tokens - (1 if ended.targets else len(ended.token_ids))
        if any(each.id in self._sequences for each in reversed(row.sequences)):
            return None
        del self._rows[ended.row]
        progress.prompt_tokens += len(row.request.prompt_ids)
        result = row.result()
        progress.rows += result.error is None
        progress.failed += result.error is not None
        return result
