"""Execution of tasks: the only module that uses models, tiers and kernels together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flexengine.config import SamplingParams
from flexengine.kernels.paged import PagedAttention
from flexengine.model.forward import EMBEDDING, Attend, Forward, Head, Inputs, Layer, Logits, Pause, Query, Rows
from flexengine.model.native.layer import release
from flexengine.model.queries import use_queries_first
from flexengine.model.sample import Draw, Sampled, sample
from flexengine.model.score import Scores
from flexengine.model.skeleton import Skeleton
from flexengine.model.stop import Stops
from flexengine.places import DEVICE
from flexengine.plan.layout import ENTERING, READING
from flexengine.plan.sizes import SCORED_ROWS
from flexengine.schedule.order import Batch
from flexengine.schedule.program import Op, Task
from flexengine.worker.ahead import Ahead
from flexengine.worker.attend import Attender
from flexengine.worker.cache import Cache, View, packed
from flexengine.worker.embedding import Embedding, Lookup
from flexengine.worker.experts import Experts
from flexengine.worker.hidden import Hidden
from flexengine.worker.on_demand import OnDemand
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights

_OTHERS = {"workspace", "paused forwards", READING, ENTERING}  # allocated outside of tiers


@dataclass
class Text:
    """Tokens and sampling state of a sequence.

    Attributes:
        row: number of the input row.
        sample: number of the row's sample.
        prompt: token ids.
        sampling: sampling parameters.
        stops: checks whether the sequence ends.
        targets: tokens to score. Target i follows prompt token len(prompt) - len(targets) + i. No token is sampled.
        generated: tokens generated so far.
        logprobs: one entry per generated token, if requested.
        scores: the scored targets.
        ended: reason of an end before the token limit; None if there is none.
        error: reason why the sequence has no result; None if there is none.
    """

    row: int
    sample: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: Stops
    targets: tuple[int, ...] = ()
    generated: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Sampled] = field(default_factory=list)
    ended: str | None = None
    error: str | None = None

    def tokens(self, start: int, count: int) -> Sequence[int]:
        """Return `count` tokens from `start` on. They must be all in the prompt, or all generated."""
        length = len(self.prompt)
        return self.prompt[start : start + count] if start < length else self.generated[start - length :][:count]

    def scored(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return (index, target) of the tokens that predict a target, among `count` tokens from `start` on."""
        first = len(self.prompt) - len(self.targets)
        return [(p - start, self.targets[p - first]) for p in range(max(start, first), start + count)]


@dataclass
class BatchState:
    """State of one gpu_batch during one sweep.

    Attributes:
        batch: the gpu_batch.
        forward: its forward pass.
        view: its page tables.
        rows: its embedding rows.
        scored: (sequence, number of targets) in the order of the pass's scores.
        event: last pause of the forward pass that is not handled yet.
        lacking: experts to load before the forward pass is resumed.
    """

    batch: Batch
    forward: Forward
    view: View
    rows: Lookup
    scored: list[tuple[int, int]]
    event: Pause | None = None
    lacking: list[int] = field(default_factory=list)


class Worker:
    """Executes the tasks of a job.

    Call `begin` for a sweep and `perform` for each of its tasks, in the thread of the task's lane. Then read `sampled`.

    Args:
        skeleton: modules of the model.
        weights: weights of the job.
        cache: KV cache of the job.
        hidden: offloaded hidden states of the job.
        attenders: by place, for each place to which the policy delegates attention.
        on_demand: neurons and experts that are read when tokens use them.

    Attributes:
        sampled: by sequence id, the token sampled in the sweep.
        scored: by sequence id, the targets scored in the sweep.
    """

    def __init__(
        self, skeleton: Skeleton, weights: Weights, cache: Cache, hidden: Hidden, attenders: dict[str, Attender],
        on_demand: OnDemand,
    ) -> None:  # fmt: skip
        self.skeleton, self.weights, self.cache, self.hidden = skeleton, weights, cache, hidden
        self.attenders, self.on_demand = attenders, on_demand
        self.layers = len(skeleton.layers)
        if cache.layout.policy.queries_first:
            use_queries_first(skeleton.model)
        self.sampled: dict[int, Sampled] = {}
        self.scored: dict[int, list[Sampled]] = {}
        self._states: list[BatchState] = []
        self._texts: Mapping[int, Text] = {}
        self._stems: Mapping[int, Sequence[int]] = {}
        # Reserve ledger bytes for temporary tensors of torch and buffers of file readers.
        self._regions = Regions(weights.machine)
        for tier, account in cache.layout.account.items():
            for what in _OTHERS & account.keys():
                self._regions.keep_room(tier, account[what], what)
        self.embedding = Embedding(weights, cache.layout, self._regions)
        self.experts, self.ahead = Experts(weights), Ahead(skeleton, weights)

    def begin(self, batches: list[Batch], texts: Mapping[int, Text], stems: Mapping[int, Sequence[int]]) -> None:
        """Prepare the forward passes of one sweep.

        Args:
            batches: gpu_batches of the sweep.
            texts: by sequence id.
            stems: `Sweeps.stems`.
        """
        self._texts, self._stems, self.sampled, self.scored = texts, stems, {}, {}
        self.hidden.begin(batches)
        self.embedding.begin()
        for place, attender in self.attenders.items():
            attender.begin({k: batch for k, batch in enumerate(batches) if batch.attention == place})
        self._states = [self._state(batch) for batch in batches]
        self.ahead.begin(batches)

    def _state(self, batch: Batch) -> BatchState:
        inputs, rows, scored = self._inputs(batch)
        mode = self.skeleton.mode(self.weights.machine.compute)
        forward = Forward(self.skeleton.model, inputs, mode, batch.queries_first, batch.hidden_home == DEVICE)
        return BatchState(batch, forward, self.cache.view(batch), rows, scored)

    def _inputs(self, batch: Batch) -> tuple[Inputs, Lookup, list[tuple[int, int]]]:
        """Return a gpu_batch's tokens, its embedding rows, and (sequence, number of targets) of scored sequences."""
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        targets: list[tuple[int, int]] = []  # index in `ids`, target
        predicted: list[int] = []  # indices of tokens that use predicted neurons
        scored: list[tuple[int, int]] = []
        for piece in packed(batch):
            end = piece.start + piece.count
            if (stem := self._stems.get(piece.sequence)) is not None:
                ids += stem[piece.start : end]
            else:
                text, first = self._texts[piece.sequence], len(ids)
                ids += text.tokens(piece.start, piece.count)
                if text.targets:
                    own = text.scored(piece.start, piece.count)
                    targets += [(first + i, target) for i, target in own]
                    context = len(text.prompt) - len(text.targets)  # `generate` would compute it with all neurons
                    predicted += [first + i for i, _ in own if piece.start + i > context]
                    scored.append((piece.sequence, len(own)))
                elif piece.final:
                    keep.append(len(ids) - 1)
                if piece.start >= len(text.prompt):
                    predicted += range(first, len(ids))
            positions += range(piece.start, end)
        device = self.weights.machine.compute
        in_ram = torch.tensor([ids])
        kept = torch.tensor(keep + [i for i, _ in targets], dtype=torch.int64).to(device)
        scores = Scores(torch.tensor([target for _, target in targets]).to(device), SCORED_ROWS) if targets else None
        inputs = Inputs(in_ram.to(device), torch.tensor([positions]).to(device), kept, scores)
        if self.on_demand.neurons is not None:
            inputs.predicted = torch.zeros(len(ids), dtype=torch.bool)
            inputs.predicted[predicted] = True
        return inputs, self.embedding.look_up(in_ram), scored

    def perform(self, task: Task) -> None:
        """Execute one task. On CUDA, only queue its work on the current stream."""
        cell = task.cell
        if task.lane == DEVICE:
            self.on_demand.reads.cell = cell
        if task.op is Op.LOAD_RESIDENT:
            self.weights.load_resident(cell.layer)
        elif task.op is Op.LOAD_WEIGHT:
            self._load_weight(task)
        elif task.op is Op.OPEN:
            self._open(self._states[cell.batch])
        elif task.op is Op.LOAD_ROWS:
            self._load_rows(task, self._states[cell.batch])
        elif task.op is Op.RESUME:
            self._resume(task, self._states[cell.batch])
        elif task.op is Op.LOAD_CACHE:
            self.cache.load(cell.layer, task.home, self._states[cell.batch].view, task.cache, task.hop)
        elif task.op is Op.STORE_CACHE:
            self.cache.store(cell.layer, task.home, self._states[cell.batch].view, task.cache, task.hop)
        elif task.op is Op.LOAD_HIDDEN:
            self.hidden.load(cell.batch, task.home, task.hidden, task.hop)
        elif task.op is Op.STORE_HIDDEN:
            self.hidden.store(cell.batch, task.home, task.hidden, task.hop)
        elif task.op is Op.COMPUTE:
            self._compute(task)
        elif task.op is Op.ENTER:
            self.hidden.enter(cell.batch)
        elif task.op is Op.LEAVE:
            self.hidden.leave(cell.batch)
        else:
            self._delegate(task, self._states[cell.batch])

    def _load_weight(self, task: Task) -> None:
        layer, slot = task.cell.layer, task.slot
        without = self.experts.names[layer] if task.by_rows else ()
        self.weights.load(layer, slot, task.home, task.hop, without)
        if task.hop == len(self.weights.machine.routes.load[task.home]) - 1:
            self.experts.loaded(layer, slot, task.by_rows)

    def _load_rows(self, task: Task, state: BatchState) -> None:
        if task.cell.layer == EMBEDDING:
            self.embedding.read(state.rows)
        else:
            self.experts.load(task.cell.layer, task.slot, task.home, task.hop, state.lacking)

    def _delegate(self, task: Task, state: BatchState) -> None:
        k, attender = task.cell.batch, self.attenders[state.batch.attention]
        if task.op is Op.PROJECT:
            attend = self._attention(task, state)
            assert isinstance(attend, Attend | Query)
            attender.ask(k, attend, state.view)
        elif task.op is Op.SEND:
            attender.send(k)
        elif task.op is Op.PROJECT_KEYS:
            attender.add(k, self._attended(task, state.forward.resume()), state.view)
        elif task.op is Op.SEND_KEYS:
            attender.send_added(k)
        elif task.op is Op.ATTEND_CACHED:
            attender.attend_cached(k)
        elif task.op is Op.ATTEND:
            attender.attend(k, state.view)
        elif task.op is Op.FETCH:
            attender.fetch(k)
        else:
            state.event = self._up_to_rows(task, state, state.forward.resume(attender.answer(k)))
            if not task.by_rows:
                self._end(task, state)

    def _compute(self, task: Task) -> None:
        state = self._states[task.cell.batch]
        if (j := task.cell.layer) < self.layers:
            if not self._computed(j, state):
                where = state.view, state.batch.cache_home, task.cache
                paged = self.cache.paged(self.ahead.layers(task), self.skeleton.windows, *where)
                event = self._attention(task, state, paged)
                assert isinstance(event, Attend) or paged
                if isinstance(event, Attend):
                    event = state.forward.resume(self.cache.attend(event, *where))
                state.event = self._up_to_rows(task, state, event)
            if self._computed(j + 1, state):
                return  # the end of a later cell ends this one
        else:
            assert isinstance(state.event, Head)
            state.event = state.forward.resume(self.weights.head(state.event.chunk, task.slot))
        if not task.by_rows:
            self._end(task, state)

    def _computed(self, layer: int, state: BatchState) -> bool:
        """Return whether the pass has computed a layer before the layer's own cell."""
        event = state.event
        return isinstance(event, Head) or (isinstance(event, Layer) and event.index > layer)

    def _up_to_rows(self, task: Task, state: BatchState, event: Pause) -> Pause:
        """Resume the pass until experts must be loaded. Return this pause, or the pause at the end of the layer."""
        while isinstance(event, Rows):
            missing = self.experts.lacking(event, task.slot)
            if missing is not None:
                state.lacking = missing
                return event
            event = state.forward.resume()
        return event

    def _resume(self, task: Task, state: BatchState) -> None:
        """Compute the rest of a layer after its experts were loaded. Load the experts of a second mixture here."""
        if isinstance(state.event, Rows):  # else the layer reads no experts, and has ended
            state.event = None
            while isinstance(event := state.forward.resume(), Rows):
                self.experts.bring(event, task.slot)
            state.event = event
        self._end(task, state)

    def _end(self, task: Task, state: BatchState) -> None:
        """Store the result of a cell. The last compute task of the cell calls this."""
        if isinstance(state.event, Layer) and state.event.index == self.layers:
            self.hidden.leaving(task.cell.batch).copy_(state.event.hidden)
            state.event = None
            state.forward.end()
        elif isinstance(state.event, Layer) and task.hidden >= 0:
            hidden = state.event.hidden
            self.hidden.buffer(task.cell.batch, task.hidden).copy_(hidden)
            hidden.untyped_storage().resize_(0)  # the paused model still refers to the tensor: free its memory
        if isinstance(state.event, Logits):
            self._sample(state, state.event.values)
            state.event = None

    def _open(self, state: BatchState) -> None:
        """Start a forward pass, up to the pause for embedding rows."""
        state.event = event = state.forward.resume()
        assert isinstance(event, Rows)
        if event.ids.data_ptr() != state.forward.inputs.ids.data_ptr():
            # Gemma 3 changes the ids before its embedding. The copy to RAM synchronizes a GPU.
            state.rows = self.embedding.look_up(event.ids.cpu(), staged=False)

    def _start(self, state: BatchState) -> Pause:
        if state.event is None:  # a table on the device has no OPEN task
            self._open(state)
        return state.forward.resume(self.embedding.bring(state.rows))

    def _attention(self, task: Task, state: BatchState, paged: Sequence[PagedAttention] = ()) -> Pause:
        """Compute a layer up to its attention, or to its queries if they go first, or layers to their end if they use
        `paged`. Return the pause."""
        j = task.cell.layer
        event = self._start(state) if j == 0 else state.event
        assert isinstance(event, Layer)
        self.weights.bind(j, task.slot)
        offloaded = task.hidden >= 0 and j > 0
        hidden = self.hidden.buffer(task.cell.batch, task.hidden) if offloaded else event.hidden
        if j == 0 and self.skeleton.enters:  # the port buffer is overwritten while the pass still holds its input
            hidden = self.hidden.entered(task.cell.batch).clone()
        state.event = event = None  # free the layer's input when the layer ends
        pause = state.forward.resume(hidden, paged)
        del hidden
        while isinstance(pause, Rows):  # experts before attention
            self.experts.bring(pause, task.slot)
            pause = state.forward.resume()
        if isinstance(pause, Query):
            return Query(self._attended(task, pause.attend))
        return self._attended(task, pause) if isinstance(pause, Attend) else pause

    def _attended(self, task: Task, event: Pause) -> Attend:
        """Return a pause at attention with the number and the window of the layer."""
        assert isinstance(event, Attend)
        return event._replace(layer=task.cell.layer, window=self.skeleton.windows[task.cell.layer])

    def _sample(self, state: BatchState, logits: Tensor) -> None:
        """Sample the next token of sequences, and note the scores. logits: [1, sequences that sample, vocabulary]."""
        final = [p.sequence for p in packed(state.batch) if p.final and not self._texts[p.sequence].targets]
        if final:
            texts = [self._texts[s] for s in final]
            draws = [Draw(t.sampling, t.row, t.sample, t.prompt, t.generated) for t in texts]
            self.sampled.update(zip(final, sample(logits[0].float(), draws), strict=True))
        if (scores := state.forward.inputs.scores) is not None:
            results = iter(scores.results())
            for sequence, count in state.scored:
                self.scored.setdefault(sequence, []).extend(islice(results, count))

    def drop(self) -> None:
        """End unfinished forward passes. Call this in the device lane's thread: other threads cannot unwind a greenlet,
        so its tensors would never be freed."""
        for state in self._states:
            state.forward.end()
        self._states = []

    def close(self) -> None:
        """Free the job's memory. Weights stay for the next job."""
        self._states = []
        release(self.skeleton.model)
        self.cache.close()
        self.hidden.close()
        for attender in self.attenders.values():
            attender.close()
        self.embedding.close()
        self.experts.close()
        self.on_demand.close()
        self._regions.free()
