"""Does what tasks say: the one place where models, tiers and kernels meet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexengine.config import SamplingParams
from flexengine.model.forward import Attend, Embed, Forward, Head, Inputs, Layer, Logits, Pause
from flexengine.model.sample import Draw, Sampled, sample
from flexengine.model.skeleton import Skeleton
from flexengine.model.stop import Stops
from flexengine.plan.layout import READING
from flexengine.schedule import sweeps
from flexengine.schedule.order import Batch
from flexengine.schedule.program import Op, Task
from flexengine.worker.cache import Cache, View, packed
from flexengine.worker.delegation import Delegation
from flexengine.worker.embedding import Embedding, Rows
from flexengine.worker.hidden import Hidden
from flexengine.worker.regions import Regions
from flexengine.worker.weights import Weights

_OTHERS = {"workspace", "paused forwards", READING}  # purposes whose memory nobody takes from a tier


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
    """One gpu_batch during one sweep: its forward pass, where that paused, its view of the cache, and its rows of the
    embedding."""

    batch: Batch
    forward: Forward
    view: View
    rows: Rows
    event: Pause | None = None


class Worker:
    """begin() a sweep, perform() its tasks in any lane's thread, then read `sampled`: sequence id to its new token.

    delegation: only where the policy delegates attention.
    """

    def __init__(
        self, skeleton: Skeleton, weights: Weights, cache: Cache, hidden: Hidden, delegation: Delegation | None = None
    ) -> None:
        self.skeleton, self.weights, self.cache, self.hidden = skeleton, weights, cache, hidden
        self.delegation = delegation
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

    def begin(
        self, batches: list[Batch], live: dict[int, sweeps.Sequence], texts: Mapping[int, Text],
        first_tokens: Mapping[int, list[int]],
    ) -> None:  # fmt: skip
        """Prepares the forward passes of one sweep. first_tokens: see `Sweeps.first_tokens`."""
        self._texts, self.sampled, self._joining = texts, {}, first_tokens
        self.hidden.begin(batches)
        self.embedding.begin()
        if self.delegation is not None:
            self.delegation.begin(batches)
        self._runs = [self._run(batch, live) for batch in batches]

    def _run(self, batch: Batch, live: dict[int, sweeps.Sequence]) -> Run:
        inputs, rows = self._inputs(batch)
        mode = self.skeleton.mode(self.weights.machine.compute)
        return Run(batch, Forward(self.skeleton.model, inputs, mode), self.cache.view(batch, live), rows)

    def _inputs(self, batch: Batch) -> tuple[Inputs, Rows]:
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
        return inputs, self.embedding.rows(known)

    def perform(self, task: Task) -> None:
        """Runs one task to its end (on CUDA: queues it on the lane's stream)."""
        cell = task.cell
        if task.op is Op.SETTLE:
            self.weights.settle(cell.layer)
        elif task.op is Op.LOAD_WEIGHT:
            self.weights.load(cell.layer, task.slot, task.home, task.hop)
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
        else:
            assert self.delegation is not None
            self._delegate(task, self.delegation)

    def _delegate(self, task: Task, delegation: Delegation) -> None:
        k, run = task.cell.batch, self._runs[task.cell.batch]
        if task.op is Op.PROJECT:
            delegation.ask(k, self._attention(task, run), run.view)
        elif task.op is Op.SEND:
            delegation.send(k)
        elif task.op is Op.ATTEND:
            delegation.attend(k, run.view)
        elif task.op is Op.FETCH:
            delegation.fetch(k)
        else:
            run.event = run.forward.resume(delegation.answer(k))

    def _compute(self, task: Task) -> None:
        j, k, run = task.cell.layer, task.cell.batch, self._runs[task.cell.batch]
        if j < self.layers:
            run.event = self._layer(task, run)
            if isinstance(run.event, Layer) and task.hidden >= 0:
                hidden = run.event.hidden
                self.hidden.buffer(k, task.hidden).copy_(hidden)
                hidden.untyped_storage().resize_(0)  # the paused model still holds the tensor, but not its memory
        else:
            assert isinstance(run.event, Head)
            run.event = run.forward.resume(self.weights.head(run.event.chunk, task.slot))
        if isinstance(run.event, Logits):
            self._sample(run, run.event.values)
            run.event = None

    def _start(self, run: Run) -> Pause:
        event = run.forward.resume()
        assert isinstance(event, Embed)
        rows = run.rows
        if event.ids.data_ptr() != run.forward.inputs.ids.data_ptr():
            rows = self.embedding.rows(event.ids.cpu(), staged=False)  # Gemma 3 embeds a copy; a GPU is waited for
        return run.forward.resume(self.embedding.bring(rows))

    def _layer(self, task: Task, run: Run) -> Pause:
        attend = self._attention(task, run)
        return run.forward.resume(self.cache.attend(attend, run.view, run.batch.cache_home, task.cache))

    def _attention(self, task: Task, run: Run) -> Attend:
        """Computes a layer up to its attention."""
        j = task.cell.layer
        event = self._start(run) if j == 0 else run.event
        assert isinstance(event, Layer)
        self.weights.bind(j, task.slot)
        away = task.hidden >= 0 and j > 0
        hidden = self.hidden.buffer(task.cell.batch, task.hidden) if away else event.hidden
        run.event = event = None  # the layer's input must not outlive the layer
        attend = run.forward.resume(hidden)
        del hidden
        assert isinstance(attend, Attend)
        return attend._replace(window=self.skeleton.windows[attend.layer])

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
        if self.delegation is not None:
            self.delegation.close()
        self.embedding.close()
        self._regions.free()
