"""Simulate a job on a virtual clock: the tasks of its program, each with seconds from the rates of `plan.cost`.

The cost model sums a sweep's work per lane and takes the longest lane. This module simulates the real sweeps and tasks
with their edges, so it includes three effects that the cost model leaves out: filling the pipeline, gpu_batches of
uneven size, and lanes that wait for each other. It leaves out crosstalk, which the cost model includes.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.simulate import Forecast, simulate
from flexengine.places import lane_of, place_of
from flexengine.plan.cost import Cost
from flexengine.plan.delegation import Crossing, keys_share, projection_share, waiting
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.layout import Layout
from flexengine.plan.neurons import experts_share
from flexengine.plan.rates import Curve
from flexengine.plan.terms import page_transfer, routes
from flexengine.schedule import sweeps
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.frame import Demand
from flexengine.schedule.order import Cell
from flexengine.schedule.pages import Pool
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Copy, Delegate, Op, Task

ROW_ORDER_SEED = 0  # shuffles a workload's rows if no order is given

Rows = Sequence[tuple[int, int]]  # (prompt tokens, tokens to generate), in order of entry
Seconds = Callable[[Task], float]


def simulated(cost: Cost, layout: Layout, rows: Rows | None = None) -> Forecast[Task]:
    """Return the simulated timeline of a job. With one slot, tasks do not overlap.

    The timeline holds every task of every sweep, so the job should be small.

    Args:
        rows: in order of entry. None: the workload's rows, shuffled with a fixed seed.
    """
    if rows is None:
        sizes = [size for size, times in sorted(cost.workload.sizes.items()) for _ in range(times)]
        rows = [sizes[i] for i in np.random.default_rng(ROW_ORDER_SEED).permutation(len(sizes))]
    clock = Clock.of(cost, layout)
    prices: dict[int, Seconds] = {}
    tasks = clock.tasks(rows, prices)
    return simulate(tasks, lambda task: prices[task.cell.sweep](task), overlap=layout.policy.slots > 1)


@dataclass(frozen=True)
class Clock:
    """Prices of the tasks of one job.

    Attributes:
        units: bytes streamed from each tier, per layer and then per head chunk.
        curves: seconds by tokens, per layer, without attention.
        shares: share of the vocabulary, per head chunk.
    """

    cost: Cost
    layout: Layout
    units: tuple[dict[str, int], ...]
    curves: tuple[Curve, ...]
    shares: tuple[float, ...]

    @staticmethod
    def of(cost: Cost, layout: Layout) -> "Clock":
        model, homes = cost.model, layout.homes
        units: list[dict[str, int]] = []
        for layer in model.layers:
            streamed = {home: sum(t.stored_bytes for t in layer if homes[t.name] == home)
                        for home in layout.places[1:]}  # fmt: skip
            units.append({home: nbytes for home, nbytes in streamed.items() if nbytes})
        chunks = layout.head_chunks(model.vocabulary)
        shares = tuple((high - low) / model.vocabulary for low, high in chunks)
        if (head := model.output) is not None:
            off_device = homes[head.name] != "device"
            units += [{homes[head.name]: round(s * head.stored_bytes)} if off_device else {} for s in shares]
        names = [model.signature(j) for j in range(len(model.layers))]
        kinds = {name: curve for name, (curve, _) in cost.rates.layers.items()}
        return Clock(cost, layout, tuple(units), tuple(kinds[name] for name in names), shares)

    # The job.

    def tasks(self, rows: Rows, prices: dict[int, Seconds]) -> Iterator[Task]:
        """Yield the tasks of all sweeps. Before a sweep's first task, `prices` gets its function from task to seconds.

        Args:
            rows: in order of entry.
            prices: by sweep; filled by this method.
        """
        policy, layers = self.layout.policy, len(self.curves)
        way, demand = routes(self.cost.hardware), self.demand
        program = Program(
            [tuple(unit) for unit in self.units], layers, policy.slots, way, demand=demand, halves=self.halves
        )
        walk = sweeps.Sweeps(policy, self.layout.pools)
        for i, (prompt, outputs) in enumerate(rows):
            walk.add(sweeps.Sequence(i, prompt, outputs))
        while not walk.idle:
            batches = walk.begin(lambda sequence, pages: None)
            prices[walk.sweep] = self.seconds(batches)
            yield from _closed(program.sweep(walk.sweep, batches, walk.another), walk.sweep)
            walk.advance(batches, set())

    @property
    def halves(self) -> list[list[tuple[str, ...]]]:
        """Return the tiers of the halves of each unit; [] if units are loaded whole. A head is in the second half."""
        if not self.layout.policy.half_layers:
            return []
        count = len(self.curves)
        layers, heads = self.units[:count], [tuple(unit) for unit in self.units[count:]]
        early, late = (
            [tuple(home for home in unit if self._half(j, first, home)) for j, unit in enumerate(layers)]
            for first in (True, False)
        )
        return [early + [()] * len(heads), late + heads]

    def _half(self, layer: int, early: bool, home: str) -> int:
        """Return the bytes of one half of a layer that are streamed from a tier."""
        tensors, homes = self.cost.model.layers[layer], self.layout.homes
        return sum(t.stored_bytes for t in tensors if t.early == early and homes[t.name] == home)

    @property
    def demand(self) -> Demand:
        """Return which weights the program loads by rows."""
        return self.layout.demand(self.cost.model)

    # Seconds of a task.

    def seconds(self, batches: Sequence[Batch]) -> Seconds:
        """Return a function from the tasks of a sweep to seconds. batches: gpu_batches of the sweep."""
        attention = [self._attention(batch) for batch in batches]
        final = [sum(p.final for p in batch.pieces) for batch in batches]
        logits = [sum(p.logits for p in batch.pieces) for batch in batches]
        hardware, live = self.cost.hardware, sum(final)
        bookkeeping = hardware.sweep_seconds + hardware.sequence_seconds * live
        tokens = [batch.tokens for batch in batches]

        # later: share of a layer's products in experts that are loaded on demand
        def compute(layer: int, k: int, later: float) -> float:
            if layer < 0:
                return bookkeeping
            if layer < len(self.curves):
                work = (1 - later) * self.curves[layer].one(tokens[k]) + attention[k][layer]
            else:
                work = self.shares[layer - len(self.curves)] * self.cost.rates.head.one(logits[k])
            return work + hardware.task_seconds

        def delegated(task: Task, later: float) -> float:
            j, k = task.cell.layer, task.cell.batch
            first, asking = batches[k].queries_first, hardware.worker_seconds if place_of(_place(task)).worker else 0.0
            if task.op in (Op.ATTEND, Op.ATTEND_CACHED):
                return asking + (0.0 if first and task.op is Op.ATTEND else attention[k][j])
            before, keys = projection_share(self.cost.model, j), keys_share(self.cost.model, j)
            part = {Op.PROJECT: before - keys * first, Op.PROJECT_KEYS: keys}.get(task.op, max(0.0, 1 - before - later))
            return part * self.curves[j].one(tokens[k]) + hardware.task_seconds

        def price(task: Task) -> float:
            experts = task.op is Op.RESUME or getattr(task, "by_rows", False)
            later = expert_share(self.cost.model, task.cell.layer) if experts else 0.0
            if task.op is Op.OPEN:
                return hardware.task_seconds
            if task.op is Op.RESUME:
                return later * self.curves[task.cell.layer].one(tokens[task.cell.batch]) + hardware.task_seconds
            if task.op is Op.LOAD_ROWS:
                return self._rows(task, tokens)
            if task.op in (Op.PROJECT, Op.PROJECT_KEYS, Op.ATTEND_CACHED, Op.ATTEND, Op.FINISH):
                return delegated(task, later)
            if task.op is Op.COMPUTE:
                return compute(task.cell.layer, task.cell.batch, later)
            return self._moved(task, batches[task.cell.batch])

        return price

    def _experts(self, layer: int, home: str) -> int:
        """Return the bytes of a layer's experts whose home is this tier."""
        layer_tensors = self.cost.model.layers[layer]
        return sum(t.stored_bytes for t in layer_tensors if t.experts and self.layout.homes[t.name] == home)

    def _rows(self, task: Task, tokens: Sequence[int]) -> float:
        """Return the seconds of loading embedding rows, or the experts that no earlier gpu_batch chose.

        Args:
            tokens: by gpu_batch.
        """
        layer, k, model = task.cell.layer, task.cell.batch, self.cost.model
        if layer < 0:
            t = model.embedding
            assert t is not None
            row = t.stored_bytes / model.vocabulary * t.rows_together
            read = max(row, self.cost.hardware.weight_rates(task.lane)[0][0]) if lane_of(task.lane).of_disk else row
            return float(min(tokens[k], model.vocabulary) * self._read(task, read))
        experts = max(t.experts for t in model.layers[layer])
        before, now = (float(experts_share(model.active, experts, sum(tokens[:end]))) for end in (k, k + 1))
        return self._read(task, (now - before) * self._experts(layer, _place(task)))

    def _read(self, task: Task, nbytes: float) -> float:
        """Return the seconds of moving bytes of weights over a task's lane in one transfer."""
        return float(self.cost.hardware.link_seconds(task.lane, nbytes, nbytes, weights=True))

    def _moved(self, task: Task, batch: Batch) -> float:
        """Return the seconds of a load or store of one layer of a gpu_batch."""
        return float(sum(self._moves(task, batch)))

    def _moves(self, task: Task, batch: Batch) -> Iterator[float]:
        """Yield the seconds of the moves of a load or store of one layer of a gpu_batch."""
        model, home, seconds = self.cost.model, _place(task), self.cost.hardware.link_seconds
        if task.op is Op.LOAD_WEIGHT:
            nbytes = float(self.units[task.cell.layer][home])
            if self.layout.policy.half_layers and task.cell.layer < len(self.curves):
                nbytes = float(self._half(task.cell.layer, not task.buffer, home))
            if getattr(task, "by_rows", False):
                nbytes = max(0.0, nbytes - self._experts(task.cell.layer, home))
            yield seconds(task.lane, nbytes, nbytes, weights=True)
        elif task.op in (Op.LOAD_HIDDEN, Op.STORE_HIDDEN):
            nbytes = batch.tokens * model.hidden * model.itemsize
            yield seconds(task.lane, nbytes, nbytes)
        elif task.op in (Op.SEND, Op.SEND_KEYS, Op.FETCH):
            crossing = Crossing.of(model, self.cost.hardware, self.layout.policy, home)
            sent = crossing.queries + crossing.keys * (not batch.queries_first)
            nbytes = batch.tokens * {Op.SEND: sent, Op.SEND_KEYS: crossing.keys}.get(task.op, crossing.answers)
            yield seconds(task.lane, nbytes, nbytes)
        else:
            yield from self._pages(task, batch)

    def _pages(self, task: Task, batch: Batch) -> Iterator[float]:
        """Yield the seconds of moving KV pages. A decode step stores one token to host RAM, a page elsewhere."""
        lane, home, loads = task.lane, _place(task), task.op is Op.LOAD_CACHE
        groups = zip(self.layout.groups, self.layout.pools[home], strict=True)
        pool = next(pool for group, pool in groups if task.cell.layer in group.layers)
        page = pool.page_tokens * self.cost.model.kv_token
        share = Crossing.of(self.cost.model, self.cost.hardware, self.layout.policy, home).pages
        whole = [p for p in batch.pieces if loads or not (home == "host" and p.decodes)]
        if loads:
            pages = sum(self._loaded(p, pool, batch.delegated) for p in whole)
        else:
            pages = sum(pool.num_written(p.start, p.start + p.count) for p in whole)
        hardware = self.cost.hardware
        transfer = page_transfer(hardware, lane, page, pages, self.cost.neighbours(self.layout.policy))
        yield hardware.link_seconds(lane, share * pages * page, transfer)
        single = (len(batch.pieces) - len(whole)) * self.cost.model.kv_token
        yield hardware.link_seconds(lane, single, single)

    def _loaded(self, piece: Piece, pool: Pool, delegated: bool) -> float:
        """Return the pages that are loaded before a piece is computed. A page of keys without values counts half."""
        pages = pool.num_read(piece.start)
        if self.cost.model.topk is None or not piece.single or delegated:
            return pages
        return (pages + (piece.start % pool.page_tokens > 0)) / 2

    def _values(self, batch: Batch, window: int | None) -> float:
        """Return the seconds that one layer of a gpu_batch waits for chosen values."""
        model, home = self.cost.model, batch.cache_home
        if model.topk is None or home == "device" or batch.delegated:
            return 0.0
        pools = {pool.window: pool for pool in self.layout.pools[home]}
        size = pools[window if window in pools else None].page_tokens
        starts = [p.start for p in batch.pieces if p.decodes]
        seen = sum(max(0, at // size * size - (max(0, at + 1 - window) if window else 0)) for at in starts)
        lanes, handling = waiting(model, self.cost.hardware, home, seen, seen)
        return float(sum(lanes.values()) + handling)

    def _attention(self, batch: Batch) -> list[float]:
        """Return the seconds of attention of a gpu_batch, per layer."""
        rates, model = self.cost.rates, self.cost.model
        decoding = [p.start + 1 for p in batch.pieces if p.decodes]
        prompts = [p for p in batch.pieces if not p.decodes]
        by_window: dict[int | None, float] = {}
        for window in rates.windows:
            seen = [min(n, window) if window else n for n in decoding]
            pairs = sum(p.pairs(window) for p in prompts)
            late = sum(p.pairs(window) for p in prompts if p.start)
            length = sum(p.count for p in prompts if not p.start) / max(1, sum(not p.start for p in prompts))
            past = sum(p.start for p in prompts) / max(1, sum(p.start > 0 for p in prompts))
            attention = rates.attention[window]
            place = self.layout.policy.attended_by(batch.attention)
            work = attention.decode(sum(seen), sum(seen) / max(1, len(seen)), place)
            prompted = attention.prompt(pairs - late, length) + attention.prompt(late, past, "continued")
            by_window[window] = float(work + prompted) + attention.call + self._values(batch, window)
        return [by_window[w] for w in model.windows or (None,) * len(model.layers)]


def expert_share(model: ModelFacts, layer: int) -> float:
    """Return the experts' share of a layer's FLOP in matrix products."""

    def products(tensors: list[TensorFact]) -> float:
        return sum(t.used(model.active) for t in tensors if t.matrix)

    experts = products([t for t in model.layers[layer] if t.experts])
    return experts / max(1.0, products(list(model.layers[layer])))


def _place(task: Task) -> str:
    """Return the place that data comes from or goes to, or that computes attention; "" for other tasks."""
    return task.home if isinstance(task, Copy) else task.place if isinstance(task, Delegate) else ""


def _closed(tasks: Iterator[Task], sweep: int) -> Iterator[Task]:
    """Yield a sweep's tasks and its bookkeeping.

    All tasks wait for the sweep before. Bookkeeping waits for all tasks except weight loads.
    """
    written: dict[Hashable, None] = {}
    for task in tasks:
        if task.op is not Op.LOAD_WEIGHT:
            written |= dict.fromkeys(task.writes)
        yield replace(task, reads=(*task.reads, ("swept", sweep - 1)))
    yield Task(Op.COMPUTE, Cell(sweep, -1, -1), "device", tuple(written), (("swept", sweep),))
