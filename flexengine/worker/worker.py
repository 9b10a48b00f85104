"""Execution of tasks: the only module that uses models, tiers and kernels together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexengine.kernels.paged import PagedAttention
from flexengine.model.forward import EMBEDDING, Attend, Forward, Head, Inputs, Layer, Logits, Pause, Query, Rows
from flexengine.model.native.layer import release
from flexengine.model.sample import Draw, Sampled, sample
from flexengine.model.skeleton import Skeleton
from flexengine.places import DEVICE
from flexengine.plan.layout import ENTERING, READING, ROWS
from flexengine.plan.sizes import SCORED_ROWS
from flexengine.schedule.batches import Batch
from flexengine.schedule.frame import AFTER, BEFORE
from flexengine.schedule.tasks import Compute, Copy, Op, Task
from flexengine.worker.cache import Cache, Tables, View, packed
from flexengine.worker.hidden import Hidden
from flexengine.worker.regions import Regions
from flexengine.worker.row_sequence import RowSequence
from flexengine.worker.rows import Embedding, Lookup
from flexengine.worker.weights import JoinedLayers, Weights

if TYPE_CHECKING:  # imported for jobs that need them
    from flexengine.worker.attend import Attender
    from flexengine.worker.on_demand import OnDemand

EXPERTS = "flexengine.worker.expert_rows:Experts"  # for models that have some
_OTHERS = {"workspace", "paused forwards", READING, ENTERING, ROWS}  # allocated outside of tiers


@dataclass
class BatchState:
    """State of one gpu_batch during one sweep."""

    batch: Batch  # the gpu_batch
    forward: Forward  # its forward pass
    view: View  # its page tables
    rows: Lookup  # its embedding rows
    scored: list[tuple[int, int]]  # (sequence, number of targets) in the order of the pass's scores
    event: Pause | None = None  # last pause of the forward pass that is not handled yet
    lacking: list[int] = field(default_factory=list)  # experts to load before the forward pass is resumed


class Worker:
    """Executes the tasks of a job.

    Call `begin` for a sweep and `perform` for each of its tasks, in the thread of the task's lane. Then read `sampled`.

    Args:
        attenders: by place, for each place to which the policy delegates attention.
        on_demand: neurons and experts that are read when tokens use them; None if there are none.
    """

    operations: "Mapping[Op, Callable[[Any, Any], None]]"  # methods by operation
    turn: Callable[[int, int], int] | None = None  # `ProgramFrame.turns`

    def __init__(
        self, skeleton: Skeleton, weights: Weights, cache: Cache, hidden: Hidden, attenders: "dict[str, Attender]",
        on_demand: "OnDemand | None" = None,
    ) -> None:  # fmt: skip
        self.skeleton, self.weights, self.cache, self.hidden = skeleton, weights, cache, hidden
        self.attenders, self.on_demand = attenders, on_demand
        self.layers = len(skeleton.layers)
        if cache.layout.policy.queries_first:
            resolve_name("flexengine.model.queries:use_queries_first")(skeleton.model)
        self.sampled: dict[int, Sampled] = {}  # by sequence id, the token sampled in the sweep
        self.scored: dict[int, list[Sampled]] = {}  # by sequence id, the targets scored in the sweep
        self._states: list[BatchState] = []
        self._members: Mapping[int, RowSequence] = {}
        self._stems: Mapping[int, Sequence[int]] = {}
        # Reserve ledger bytes for temporary tensors of torch and buffers of file readers.
        self._regions = Regions(weights.machine)
        for tier, account in cache.layout.account.items():
            for what in _OTHERS & account.keys():
                self._regions.keep_room(tier, account[what], what)
        self.embedding = Embedding(weights, cache.layout, self._regions)
        self.experts: Any = resolve_name(EXPERTS)(weights) if skeleton.experts else None
        self.joined = JoinedLayers(skeleton, weights)

    def begin(
        self, batches: list[Batch], members: Mapping[int, RowSequence], stems: Mapping[int, Sequence[int]]
    ) -> None:
        """Prepare the forward passes of one sweep. stems: `Sweeps.stems`."""
        self._members, self._stems, self.sampled, self.scored = members, stems, {}, {}
        self.hidden.begin(batches)
        self.embedding.begin()
        for place, attender in self.attenders.items():
            attender.begin({k: batch for k, batch in enumerate(batches) if batch.attention == place})
        self._states, mode = [], self.skeleton.mode(self.weights.machine.compute)
        for batch in batches:
            inputs, rows, scored = self._inputs(batch)
            forward = self._pass(batch, inputs, mode)
            self._states.append(BatchState(batch, forward, self.cache.view(batch), rows, scored))
        self.joined.begin(batches)

    def _pass(self, batch: Batch, inputs: Inputs, mode: Any) -> Forward:
        """Return the forward pass of a gpu_batch, not started. mode: as in `Forward`."""
        return Forward(self.skeleton.model, inputs, mode, batch.queries_first, batch.hidden_home == DEVICE)

    def _inputs(self, batch: Batch) -> tuple[Inputs, Lookup, list[tuple[int, int]]]:
        """Return a gpu_batch's tokens, its embedding rows, and (sequence, number of targets) of scored sequences."""
        ids, positions, keep = list[int](), list[int](), list[int]()
        targets: list[tuple[int, int]] = []  # index in `ids`, target
        predicted: list[int] = []  # indices of tokens that use predicted neurons
        scored: list[tuple[int, int]] = []
        for piece in packed(batch):
            end = piece.start + piece.count
            if (stem := self._stems.get(piece.sequence)) is not None:
                ids += stem[piece.start : end]
            else:
                sequence, first = self._members[piece.sequence], len(ids)
                ids += sequence.tokens(piece.start, piece.count)
                if sequence.targets:
                    own = sequence.predicting(piece.start, piece.count)
                    targets += [(first + i, target) for i, target in own]
                    # `generate` would compute the context with all neurons.
                    context = len(sequence.prompt) - len(sequence.targets)
                    predicted += [first + i for i, _ in own if piece.start + i > context]
                    scored.append((piece.sequence, len(own)))
                elif piece.final:
                    keep.append(len(ids) - 1)
                if piece.start >= len(sequence.prompt):
                    predicted += range(first, len(ids))
            positions += range(piece.start, end)
        device = self.weights.machine.compute
        in_ram = torch.tensor([ids])
        kept = torch.tensor(keep + [i for i, _ in targets], dtype=torch.int64).to(device)
        scores = None
        if targets:
            new_scores = resolve_name("flexengine.model.scores:Scores")
            scores = new_scores(torch.tensor([target for _, target in targets]).to(device), SCORED_ROWS)
        inputs = Inputs(in_ram.to(device), torch.tensor([positions]).to(device), kept, scores)
        if self.on_demand is not None and self.on_demand.neurons is not None:
            inputs.predicted = torch.zeros(len(ids), dtype=torch.bool)
            inputs.predicted[predicted] = True
        return inputs, self.embedding.look_up(in_ram), scored

    def perform(self, task: Task) -> None:
        """Execute one task. On CUDA, only queue its work on the current stream."""
        if self.on_demand is not None and task.lane == DEVICE:
            self.on_demand.reads.cell = task.cell
        self.operations[task.op](self, task)

    def _load_weight(self, task: Copy) -> None:
        layer, slot = task.cell.layer, task.buffer
        assert slot is not None
        without = self.experts.names[layer] if task.by_rows else ()
        self.weights.load(layer, slot, task.home, task.hop, without)
        if self.experts and task.hop == len(self.weights.machine.routes.load[task.home]) - 1:
            self.experts.loaded(layer, slot, task.by_rows)

    def _load_rows(self, task: Copy) -> None:
        state = self._states[task.cell.batch]
        if task.cell.layer == EMBEDDING:
            self.embedding.read(state.rows)
        else:
            assert task.buffer is not None
            where = task.cell.layer, task.buffer, task.home, task.hop
            self.weights.load_rows(*where, self.experts.names[task.cell.layer], state.lacking)

    def move_pages(self, move: Callable[[int, str, Tables, int, int], None], task: Copy) -> None:
        """Call `Pools.load` or `Pools.store` for the pages of a task's layer, and for its states."""
        assert task.buffer is not None
        layer, view = task.cell.layer, self.view(task)
        for number in (layer, ~layer):
            if number in self.cache.pools.group:
                move(number, task.home, self.cache.tables(view, number), task.buffer, task.hop)

    def view(self, task: Task) -> View:
        """Return the page tables of a task's gpu_batch."""
        return self._states[task.cell.batch].view

    def _project(self, task: Compute) -> None:
        """Compute up to attention, or up to the queries if they go first."""
        state = self._states[task.cell.batch]
        event = self._to_attention(task, task.cell.layer, state)
        assert isinstance(event, Attend | Query)
        self.attender(task).ask(task.cell.batch, event, state.view)

    def _project_keys(self, task: Compute) -> None:
        state = self._states[task.cell.batch]
        event = self._attended(task.cell.layer, state.forward.resume())
        self.attender(task).add(task.cell.batch, event, state.view)

    def _finish(self, task: Compute) -> None:
        state = self._states[task.cell.batch]
        event = state.forward.resume(self.attender(task).answer(task.cell.batch))
        state.event = self._to_rows(task, state, event)
        if not task.by_rows:
            self._end(task, state)

    def attender(self, task: Task) -> "Attender":
        """Return the attender of a task's gpu_batch."""
        return self.attenders[self._states[task.cell.batch].batch.attention]

    def _compute(self, task: Compute) -> None:
        """Compute a cell: the layers of the task, or a chunk of the head."""
        state, layer = self._states[task.cell.batch], task.cell.layer
        if layer >= self.layers:
            assert isinstance(state.event, Head)
            state.event = state.forward.resume(self.weights.head(state.event.chunk, task.slot))
            self._end(task, state)
            return
        end = layer + task.layers
        while layer < end:  # one call of kernels may compute fewer layers than it may
            where = state.view, state.batch.cache_home, task.cache
            # A layer whose experts may be loaded on demand pauses for them, after attention.
            pauses = self.experts and self.experts.names[layer]
            whole = range(layer, layer) if pauses else self.joined.native(layer, end)
            paged = self.cache.paged(whole, self.skeleton.windows, *where)
            event = self._to_attention(task, layer, state, paged)
            if isinstance(event, Attend):
                event = state.forward.resume(self.cache.attend(event, *where))
            event = self._to_rows(task, state, event)
            state.event = event
            layer = event.index if isinstance(event, Layer) else end
        if not task.by_rows:
            self._end(task, state)

    def _to_rows(self, task: Compute, state: BatchState, event: Pause) -> Pause:
        """Resume the pass until experts must be loaded. Return this pause, or the pause at the end of the layer."""
        while isinstance(event, Rows):
            missing = self.experts.lacking(event, task.slot)
            if missing is not None:
                state.lacking = missing
                return event
            event = state.forward.resume()
        return event

    def _resume(self, task: Compute) -> None:
        """Compute the rest of a layer after its experts were loaded. Load the experts of a second mixture here."""
        state = self._states[task.cell.batch]
        if isinstance(state.event, Rows):  # else the layer reads no experts, and has ended
            state.event = None
            assert task.slot is not None
            while isinstance(event := state.forward.resume(), Rows):
                self.experts.bring(event, task.slot)
            state.event = event
        self._end(task, state)

    def _end(self, task: Compute, state: BatchState) -> None:
        """Store the result of a cell. The last compute task of the cell calls this."""
        if isinstance(state.event, Layer) and state.event.index == self.layers:
            self.hidden.at_port(AFTER, task.cell.batch).copy_(state.event.hidden)
            state.event = None
            state.forward.end()
        elif isinstance(state.event, Layer) and task.hidden is not None:
            hidden = state.event.hidden
            self.hidden.buffer(task.cell.batch, task.hidden).copy_(hidden)
            hidden.untyped_storage().resize_(0)  # the paused model still refers to the tensor: free its memory
            if not self.skeleton.embedding_stays:
                state.forward.free_embedding()
        if isinstance(state.event, Logits):
            self._sample(state, state.event.values)
            state.event = None

    def _open(self, task: Task) -> None:
        state = self._states[task.cell.batch]
        state.event = event = state.forward.resume()
        assert isinstance(event, Rows)
        if event.ids.data_ptr() != state.forward.inputs.ids.data_ptr():
            # Gemma 3 changes the ids before its embedding. The copy to RAM synchronizes a GPU.
            state.rows = self.embedding.look_up(event.ids.cpu(), staged=False)

    def _to_attention(
        self, task: Compute, layer: int, state: BatchState, paged: Sequence[PagedAttention] = ()
    ) -> Pause:
        """Compute a layer up to its attention, or to its queries if they go first, or layers to their end if they use
        `paged`. Return the pause."""
        if layer == 0:
            self._embed(task, state)
        event = state.event
        assert isinstance(event, Layer)
        self.weights.bind(layer, task.slot)
        hidden = event.hidden
        if task.hidden is not None and layer > 0:
            hidden = self.hidden.buffer(task.cell.batch, task.hidden)
            if task.op is Op.PROJECT:  # other cells use the buffer before the rest of the layer is computed
                hidden = hidden.clone()
        if layer == 0 and self.skeleton.enters:  # the port buffer is overwritten while the pass still holds its input
            hidden = self.hidden.at_port(BEFORE, task.cell.batch).clone()
        state.event = event = None  # free the layer's input when the layer ends
        where, group = (state.view, state.batch.cache_home, task.cache), self.cache.pools.group
        pages = None
        if self.skeleton.choosing and layer in group:
            pages = partial(self.cache.index_pages, layer, *where, self._prompts(state.batch))
        if ~layer in group:  # cached: of all modules of the layer
            state.forward.records = cache(partial(self.cache.records, layer, *where, pages))
        elif pages is not None:
            state.forward.records = pages
        pause = state.forward.resume(hidden, paged)
        del hidden
        while isinstance(pause, Rows) and layer in self.skeleton.windows:  # experts before attention
            assert task.slot is not None
            self.experts.bring(pause, task.slot)
            pause = state.forward.resume()
        if isinstance(pause, Query):
            return Query(self._attended(layer, pause.attend))
        return self._attended(layer, pause) if isinstance(pause, Attend) else pause

    def _prompts(self, batch: Batch) -> list[int]:
        """Return the tokens of the prompt, or shared prefix, of each piece of a gpu_batch, in packed order. Of scored
        tokens, the prompt has those that would not be generated."""
        ids, members = (p.sequence for p in packed(batch)), self._members
        return [
            len(self._stems[i]) if i in self._stems else len(members[i].prompt) - max(0, len(members[i].targets) - 1)
            for i in ids
        ]

    def _embed(self, task: Task, state: BatchState) -> None:
        """Compute up to the first layer, unless the pass is there."""
        if state.event is None:  # a table on the device has no OPEN task
            self._open(task)
        if not isinstance(state.event, Layer):
            state.event = state.forward.resume(self.embedding.bring(state.rows))

    def _attended(self, layer: int, event: Pause) -> Attend:
        """Return a pause at attention with the number and the window of the layer."""
        assert isinstance(event, Attend)
        return event._replace(layer=layer, window=self.skeleton.windows[layer])

    def _sample(self, state: BatchState, logits: Tensor) -> None:
        """Sample the next token of sequences, and note the scores. logits: [1, sequences that sample, vocabulary]."""
        final = [p.sequence for p in packed(state.batch) if p.final and not self._members[p.sequence].targets]
        if final:
            members = [self._members[s] for s in final]
            draws = [Draw(s.sampling, s.noise_row, s.sample, s.prompt, s.token_ids) for s in members]
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
        if self.experts:
            self.experts.close()
        if self.on_demand is not None:
            self.on_demand.close()
        self._regions.free()


OPERATIONS: dict[Op, Callable[[Worker, Any], None]] = {
    Op.LOAD_WEIGHT: Worker._load_weight,
    Op.LOAD_CACHE: lambda worker, task: worker.move_pages(worker.cache.pools.load, task),
    Op.LOAD_HIDDEN: lambda worker, task: worker.hidden.load(task.cell.batch, task.home, task.buffer, task.hop),
    Op.COMPUTE: Worker._compute,
    Op.STORE_HIDDEN: lambda worker, task: worker.hidden.store(task.cell.batch, task.home, task.buffer, task.hop),
    Op.STORE_CACHE: lambda worker, task: worker.move_pages(worker.cache.pools.store, task),
    Op.LOAD_RESIDENT: lambda worker, task: worker.weights.load_resident(task.cell.layer),
    Op.PROJECT: Worker._project,
    Op.SEND: lambda worker, task: worker.attender(task).send(task.cell.batch),
    Op.PROJECT_KEYS: Worker._project_keys,
    Op.SEND_KEYS: lambda worker, task: worker.attender(task).send(task.cell.batch, added=True),
    Op.ATTEND_CACHED: lambda worker, task: worker.attender(task).attend_cached(task.cell.batch),
    Op.ATTEND: lambda worker, task: worker.attender(task).perform(task, worker.view(task)),
    Op.FETCH: lambda worker, task: worker.attender(task).fetch(task.cell.batch),
    Op.FINISH: Worker._finish,
    Op.OPEN: Worker._open,
    Op.LOAD_ROWS: Worker._load_rows,
    Op.RESUME: Worker._resume,
    Op.ENTER: lambda worker, task: worker.hidden.enter(task.cell.batch),
    Op.LEAVE: lambda worker, task: worker.hidden.leave(task.cell.batch),
}
Worker.operations = OPERATIONS
