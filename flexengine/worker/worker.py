"""Does what tasks say: the one place where models, tiers and kernels meet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexengine.config import SamplingParams
from flexengine.model.forward import EMBEDDING, Attend, Forward, Head, Inputs, Layer, Logits, Pause, Rows
from flexengine.model.sample import Draw, Sampled, sample
from flexengine.model.skeleton import Skeleton
from flexengine.model.stop import Stops
from flexengine.plan.layout import ENTERING, READING
from flexengine.schedule.order import Batch
from flexengine.schedule.program import Op, Task
from flexengine.worker.attend import Attender
from flexengine.worker.cache import Cache, View, packed
from flexengine.worker.embedding import Embedding, Lookup
from flexengine.worker.experts import Experts
from flexengine.worker.hidden import Hidden
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights

_OTHERS = {"workspace", "paused forwards", READING, ENTERING}  # purposes whose memory nobody takes from a tier


@dataclass
class Text:
    """What is known of a sequence beyond its numbers. row, sample: which prompt, and which of its continuations.

    forced: the tokens to take, if they are not to be chosen. ended: why it ended, if it did before its limit; error:
    why it has no result.
    """

    row: int
    sample: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: Stops
    forced: tuple[int, ...] = ()
    generated: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    error: str | None = None

    def tokens(self, start: int, count: int) -> Sequence[int]:
        """count tokens from `start` on, all of the prompt or all generated."""
        past = len(self.prompt)
        return self.prompt[start : start + count] if start < past else self.generated[start - past :][:count]


@dataclass
class Run:
    """One gpu_batch during one sweep: its forward pass, where that paused, its view of the cache, its rows of the
    embedding, and the experts that are to be loaded before its pass goes on."""

    batch: Batch
    forward: Forward
    view: View
    rows: Lookup
    event: Pause | None = None
    lacking: list[int] = field(default_factory=list)


class Worker:
    """begin() a sweep, perform() its tasks in any lane's thread, then read `sampled`: sequence id to its new token.

    attenders: by place, of the places where the policy lets decode attention be computed.
    """

    def __init__(
        self, skeleton: Skeleton, weights: Weights, cache: Cache, hidden: Hidden, attenders: Mapping[str, Attender]
    ) -> None:
        self.skeleton, self.weights, self.cache, self.hidden = skeleton, weights, cache, hidden
        self.attenders = attenders
        self.layers = len(skeleton.layers)
        self.sampled: dict[int, Sampled] = {}
        self._runs: list[Run] = []
        self._texts: Mapping[int, Text] = {}
        self._joining: Mapping[int, list[int]] = {}
        # Torch and the reader of files allocate for themselves; the ledgers keep room for that.
        self._regions = Regions(weights.machine)
        for tier, account in cache.layout.account.items():
            for what in _OTHERS & account.keys():
                self._regions.keep_room(tier, account[what], what)
        self.embedding = Embedding(weights, cache.layout, self._regions)
        self.experts = Experts(weights)

    def begin(
        self, batches: list[Batch], texts: Mapping[int, Text], first_tokens: Mapping[int, list[int]]
    ) -> None:
        """Prepares the forward passes of one sweep. first_tokens: see `Sweeps.first_tokens`."""
        self._texts, self.sampled, self._joining = texts, {}, first_tokens
        self.hidden.begin(batches)
        self.embedding.begin()
        for place, attender in self.attenders.items():
            attender.begin({k: batch for k, batch in enumerate(batches) if batch.attention == place})
        self._runs = [self._run(batch) for batch in batches]

    def _run(self, batch: Batch) -> Run:
        inputs, rows = self._inputs(batch)
        mode = self.skeleton.mode(self.weights.machine.compute)
        return Run(batch, Forward(self.skeleton.model, inputs, mode), self.cache.view(batch), rows)

    def _inputs(self, batch: Batch) -> tuple[Inputs, Lookup]:
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        for piece in packed(batch):
            end = piece.start + piece.count
            ids += self._texts[piece.sequence].tokens(piece.start, piece.count)
            positions += range(piece.start, end)
            if piece.final:
                keep.append(len(ids) - 1)
        on = self.weights.machine.compute
        known = torch.tensor([ids])
        inputs = Inputs(known.to(on), torch.tensor([positions]).to(on), torch.tensor(keep, dtype=torch.int64).to(on))
        return inputs, self.embedding.look_up(known)

    def perform(self, task: Task) -> None:
        """Runs one task to its end (on CUDA: queues it on the lane's stream)."""
        cell = task.cell
        if task.op is Op.LOAD_RESIDENT:
            self.weights.load_resident(cell.layer)
        elif task.op is Op.LOAD_WEIGHT:
            self._load_weight(task)
        elif task.op is Op.OPEN:
            self._open(self._runs[cell.batch])
        elif task.op is Op.LOAD_ROWS:
            self._load_rows(task, self._runs[cell.batch])
        elif task.op is Op.RESUME:
            self._resume(task, self._runs[cell.batch])
        elif task.op is Op.LOAD_CACHE:
            self.cache.load(cell.layer, task.home, self._runs[cell.batch].view, task.cache, task.hop)
        elif task.op is Op.STORE_CACHE:
            self.cache.store(cell.layer, task.home, self._runs[cell.batch].view, task.cache, task.hop)
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
            self._delegate(task, self._runs[cell.batch])

    def _load_weight(self, task: Task) -> None:
        layer, slot = task.cell.layer, task.slot
        without = self.experts.names[layer] if task.by_rows else ()
        self.weights.load(layer, slot, task.home, task.hop, without)
        if task.hop == len(self.weights.machine.routes.load[task.home]) - 1:
            self.experts.loaded(layer, slot, task.by_rows)

    def _load_rows(self, task: Task, run: Run) -> None:
        if task.cell.layer == EMBEDDING:
            self.embedding.read(run.rows)
        else:
            self.experts.load(task.cell.layer, task.slot, task.home, task.hop, run.lacking)

    def _delegate(self, task: Task, run: Run) -> None:
        k, attender = task.cell.batch, self.attenders[run.batch.attention]
        if task.op is Op.PROJECT:
            attender.ask(k, self._attention(task, run), run.view)
        elif task.op is Op.SEND:
            attender.send(k)
        elif task.op is Op.ATTEND:
            attender.attend(k, run.view)
        elif task.op is Op.FETCH:
            attender.fetch(k)
        else:
            run.event = self._up_to_rows(task, run, run.forward.resume(attender.answer(k)))
            if not task.by_rows:
                self._end(task, run)

    def _compute(self, task: Task) -> None:
        run = self._runs[task.cell.batch]
        if task.cell.layer < self.layers:
            attend = self._attention(task, run)
            answer = self.cache.attend(attend, run.view, run.batch.cache_home, task.cache)
            run.event = self._up_to_rows(task, run, run.forward.resume(answer))
        else:
            assert isinstance(run.event, Head)
            run.event = run.forward.resume(self.weights.head(run.event.chunk, task.slot))
        if not task.by_rows:
            self._end(task, run)

    def _up_to_rows(self, task: Task, run: Run, event: Pause) -> Pause:
        """Go on until experts have to be loaded. Return that pause or, if there are none, the one at the layer's
        end."""
        while isinstance(event, Rows):
            missing = self.experts.lacking(event, task.slot)
            if missing is not None:
                run.lacking = missing
                return event
            event = run.forward.resume()
        return event

    def _resume(self, task: Task, run: Run) -> None:
        """Compute the rest of a layer whose experts were loaded. A layer's second mixture of experts loads its own
        here."""
        if isinstance(run.event, Rows):  # else the layer has not read experts: it ended before
            run.event = None
            while isinstance(event := run.forward.resume(), Rows):
                self.experts.bring(event, task.slot)
            run.event = event
        self._end(task, run)

    def _end(self, task: Task, run: Run) -> None:
        """Put away what a cell has computed. The last task of the cell calls this."""
        if isinstance(run.event, Layer) and run.event.index == self.layers:
            self.hidden.leaving(task.cell.batch).copy_(run.event.hidden)
            run.event = None
            run.forward.end()
        elif isinstance(run.event, Layer) and task.hidden >= 0:
            hidden = run.event.hidden
            self.hidden.buffer(task.cell.batch, task.hidden).copy_(hidden)
            hidden.untyped_storage().resize_(0)  # the paused model still holds the tensor, but not its memory
        if isinstance(run.event, Logits):
            self._sample(run, run.event.values)
            run.event = None

    def _open(self, run: Run) -> None:
        """Begin a forward pass, up to the pause for its embedding rows."""
        run.event = event = run.forward.resume()
        assert isinstance(event, Rows)
        if event.ids.data_ptr() != run.forward.inputs.ids.data_ptr():
            run.rows = self.embedding.look_up(event.ids.cpu(), staged=False)  # Gemma 3 embeds a copy; a GPU waits

    def _start(self, run: Run) -> Pause:
        if run.event is None:  # a table on the device needs no task of its own
            self._open(run)
        return run.forward.resume(self.embedding.bring(run.rows))

    def _attention(self, task: Task, run: Run) -> Attend:
        """Computes a layer up to its attention."""
        j = task.cell.layer
        event = self._start(run) if j == 0 else run.event
        assert isinstance(event, Layer)
        self.weights.bind(j, task.slot)
        away = task.hidden >= 0 and j > 0
        hidden = self.hidden.buffer(task.cell.batch, task.hidden) if away else event.hidden
        if j == 0 and self.skeleton.enters:  # the pass holds its input for longer than the buffer is free
            hidden = self.hidden.entered(task.cell.batch).clone()
        run.event = event = None  # the layer's input must not outlive the layer
        attend = run.forward.resume(hidden)
        del hidden
        while isinstance(attend, Rows):  # experts beside attention
            self.experts.bring(attend, task.slot)
            attend = run.forward.resume()
        assert isinstance(attend, Attend)
        return attend._replace(layer=j, window=self.skeleton.windows[j])

    def _sample(self, run: Run, logits: Tensor) -> None:
        final = [p.sequence for p in packed(run.batch) if p.final]
        if not final:
            return
        values = logits[0].float()
        self._draw(values, final)
        for i, others in enumerate(self._joining.get(s, []) for s in final):
            if others:
                self._draw(values[i : i + 1].expand(len(others), -1), others)

    def _draw(self, logits: Tensor, sequences: list[int]) -> None:
        """Sample the next token of sequences. logits: [sequences, vocabulary]."""
        texts = [self._texts[s] for s in sequences]
        draws = [Draw(t.sampling, t.row, t.sample, t.prompt, t.generated, t.forced) for t in texts]
        self.sampled.update(zip(sequences, sample(logits, draws), strict=True))

    def drop(self) -> None:
        """Ends the forward passes under way. In the thread that computes: elsewhere they could not be unwound, and
        their tensors would stay for good."""
        for run in self._runs:
            run.forward.end()
        self._runs = []

    def close(self) -> None:
        """Gives the job's memory back to the ledgers; the weights stay for the next job."""
        self._runs = []
        self.cache.close()
        self.hidden.close()
        for attender in self.attenders.values():
            attender.close()
        self.embedding.close()
        self.experts.close()
        self._regions.free()
