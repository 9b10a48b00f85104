"""Costs of cases of one job on one cluster: seconds and bytes of every choice of every unit on every device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

import numpy as np

from flexengine.errors import InvalidInput
from flexengine.plan.capacity import Capacity
from flexengine.plan.cluster.case_costs import EXACT, Array, CaseCosts, UnitChoice
from flexengine.plan.cluster.devices import DECODE, PREFILL, Cluster, Device
from flexengine.plan.cluster.job import ClusterJob, Shape
from flexengine.plan.cluster.model import Format, Harm, Model
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import READING, lay_out
from flexengine.plan.sizes import ALIGN, READ, READ_BUFFERS, SHORT_READ, SHORT_READERS, aligned
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

MOST_READING = aligned(READ_BUFFERS * READ) + SHORT_READERS * aligned(SHORT_READ + 2 * ALIGN)
STREAM_SLOTS = 2  # buffers for streamed weights: one is computed with while the next is filled
MOST_PERMUTED = 4  # types whose orders are all tried: 64 of them
TOKEN_BYTES = 4  # of a token's number on its way back to the first stage

Order = tuple[Device, ...]


@dataclass(frozen=True)
class ClusterTask:
    """What is planned.

    Attributes:
        cluster: devices and links.
        models: the model by kind of device.
        job: rows.
        formats: formats that a layer may have.
        harm: [layers, formats] harm of each format.
        theta: seconds per unit of harm.
        group: neighbouring layers that are decided together.
        offload: whether weights may be on the host.
        form: form of the objective.
    """

    cluster: Cluster
    models: Mapping[str, Model]
    job: ClusterJob
    formats: tuple[Format, ...]
    harm: Harm
    theta: float = 1.0
    group: int = 1
    offload: bool = True
    form: str = EXACT

    @property
    def model(self) -> Model:
        """Return the model as the first device holds it. Names and numbers of layers are equal for all."""
        return self.models[self.cluster.devices[0].kind]

    @cached_property
    def choices(self) -> tuple[UnitChoice, ...]:
        """Return the choices of a unit, those on the device first."""
        hosts = (False, True) if self.offload and any(d.offloads for d in self.cluster.devices) else (False,)
        return tuple(UnitChoice(form, host) for host in hosts for form in self.formats)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each unit."""
        count = len(self.model.layers)
        return tuple(tuple(range(j, min(j + self.group, count))) for j in range(0, count, self.group))

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Return, by class of units, the first unit's layers."""
        return tuple(self.groups[self.classes.index(k)] for k in range(max(self.classes) + 1))

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Return the class of each unit."""
        kinds = [tuple(model.kinds[j] for model in self.models.values() for j in unit) for unit in self.groups]
        known: dict[tuple[int, ...], int] = {}
        return tuple(known.setdefault(kind, len(known)) for kind in kinds)


@dataclass
class Costs:
    """Costs of the cases of a task. Seconds of layers that several cases share are cached."""

    task: ClusterTask
    _seconds: dict[tuple[int, float, str, int, Format, str, int], float] = field(default_factory=dict)
    _bytes: dict[tuple[str, int, int, tuple[bool, bool]], int] = field(default_factory=dict)

    def numbers(self, order: Order, shape: Shape) -> CaseCosts:
        """Return the costs of a case.

        Args:
            order: devices in the order of their stages. The first and the last must have layers.
            shape: micro-batches.
        """
        task, job = self.task, self.task.job
        size = (len(order), len(task.kinds), len(task.choices))
        prefill, decode, load = np.zeros(size), np.zeros(size), np.zeros(size)
        memory, host, slots = np.zeros(size), np.zeros(size), np.zeros(size)
        cached = job.cached(min(shape.batch, job.rows))
        for j, device in enumerate(order):
            model = task.models[device.kind]
            for k, layers in enumerate(task.kinds):
                kv = sum(model.layers[i].kv_token for i in layers) * cached
                for c, choice in enumerate(task.choices):
                    weights = [model.layers[i].bytes[choice.form] for i in layers]
                    fits = not choice.host or device.offloads
                    for table, phase, batch in ((prefill, PREFILL, shape.prefill), (decode, DECODE, shape.decode)):
                        seconds = sum(self._layer(device, layer, choice.form, phase, batch) for layer in layers)
                        table[j, k, c] = seconds if fits else np.inf
                    memory[j, k, c] = kv + (0 if choice.host else sum(weights))
                    if choice.host and fits:
                        load[j, k, c] = sum(weights) / device.host_link
                        host[j, k, c], slots[j, k, c] = sum(weights), STREAM_SLOTS * max(weights)
        harm = np.array(
            [[task.harm[list(unit), task.formats.index(c.form)].sum() for c in task.choices] for unit in task.groups]
        )
        return CaseCosts(
            choices=task.choices, classes=task.classes, prefill=prefill, decode=decode, load=load, memory=memory,
            host=host, slots=slots,
            fixed_prefill=self._fixed(order, shape.prefill), fixed_decode=self._fixed(order, shape.decode),
            fixed_memory=self._fixed_memory(order, shape),
            capacity=np.array([float(d.memory) for d in order]),
            host_capacity=np.array([float(d.host_memory) for d in order]),
            hop_prefill=self._hops(order, shape.prefill * job.prompt), hop_decode=self._hops(order, shape.decode),
            back=task.cluster.link(order[-1], order[0]).seconds(TOKEN_BYTES * shape.decode),
            harm=harm, theta=task.theta, prefills=shape.prefills, cohorts=shape.cohorts, steps=job.output - 1,
            rounds=shape.rounds(job.rows), form=task.form,
        )  # fmt: skip

    def unordered(self, shape: Shape) -> CaseCosts:
        """Return costs that are not above those of any order of any of the devices: without links, embedding and
        head."""
        order = self.task.cluster.devices
        numbers, hops = self.numbers(order, shape), np.zeros((len(order), len(order)))
        tokens = max(shape.prefill * self.task.job.longest_prompt, shape.decode)
        inner = [self._booked(device, tokens, shape.decode, (False, False)) for device in order]
        kept = np.minimum(np.array(inner, dtype=float), numbers.fixed_memory)
        prefill, decode = ([d.latency.fixed(rows) / d.speed for d in order] for rows in (shape.prefill, shape.decode))
        return replace(numbers, hop_prefill=hops, hop_decode=hops, back=0.0, fixed_memory=kept,
                       fixed_prefill=np.array(prefill), fixed_decode=np.array(decode))  # fmt: skip

    def _layer(self, device: Device, layer: int, form: Format, phase: str, batch: int) -> float:
        model, job = self.task.models[device.kind], self.task.job
        key = (id(device.latency), device.speed, device.kind, model.kinds[layer], form, phase, batch)
        if key not in self._seconds:
            tokens = job.prompt if phase == PREFILL else job.past
            self._seconds[key] = device.latency.layer(model, layer, form, phase, batch, tokens) / device.speed
        return self._seconds[key]

    def _fixed(self, order: Order, rows: int) -> Array:
        """Return the seconds of a micro-batch besides layers, by stage. The last stage computes the head."""
        fixed = np.array([device.latency.fixed(rows) / device.speed for device in order])
        last = order[-1]
        fixed[-1] += last.latency.head(self.task.models[last.kind], rows) / last.speed
        return fixed

    def _fixed_memory(self, order: Order, shape: Shape) -> Array:
        """Return the bytes besides layers, by stage: temporary tensors, embedding and head."""
        tokens = max(shape.prefill * self.task.job.longest_prompt, shape.decode)
        last = len(order) - 1
        made = [self._booked(device, tokens, shape.decode, (j == 0, j == last)) for j, device in enumerate(order)]
        return np.array(made, dtype=float)

    def _booked(self, device: Device, tokens: int, rows: int, ends: tuple[bool, bool]) -> int:
        """Return the bytes of a stage besides layers: with facts of the model those of its layout, else an estimate.

        Args:
            device: the stage's device.
            tokens: tokens that are computed together.
            rows: sequences of a cohort.
            ends: whether the stage has the first and the last layer of the model.
        """
        model, (first, last) = self.task.models[device.kind], ends
        if not model.facts:
            edges = model.embedding_bytes * first + model.head_bytes * (last and not (first and model.tied))
            return model.workspace(tokens, rows, last) + edges
        key = (device.kind, tokens, rows, ends)
        if key not in self._bytes:
            policy, shared = cohort_policy(rows, tokens), device.kind == "cpu"
            self._bytes[key] = fixed_bytes(model.facts[None], self.task.job.workload, policy, shared, ends)
        return self._bytes[key]

    def _hops(self, order: Order, tokens: int) -> Array:
        hops = np.zeros((len(order), len(order)))
        for a, sender in enumerate(order):
            for b, receiver in enumerate(order):
                if a != b:
                    nbytes = self.task.models[sender.kind].hop_bytes(tokens)
                    hops[a, b] = self.task.cluster.link(sender, receiver).seconds(nbytes)
        return hops


def orders(cluster: Cluster) -> list[Order]:
    """Return the device orders to try: devices of one type stay neighbours, types are permuted.

    Inner stages may stay empty, so orders of fewer types, and single devices, cover every set of devices. With more
    than MOST_PERMUTED types, only orders by memory and that of the file are tried, both ways, also without their first
    types.
    """
    found: dict[tuple[str, ...], Order] = {}
    for types in _type_orders(cluster):
        order = tuple(device for name in types for device in cluster.of_type(name))
        found.setdefault(tuple(d.name for d in order), order)
    for name in cluster.types:
        device = cluster.of_type(name)[0]
        found.setdefault((device.name,), (device,))
    return list(found.values())


def _type_orders(cluster: Cluster) -> Iterator[Sequence[str]]:
    """Yield the orders of types, those of all types first."""
    types = cluster.types
    if len(types) <= MOST_PERMUTED:
        for length in range(len(types), 0, -1):
            yield from permutations(types, length)
        return
    by_memory = sorted(types, key=lambda name: cluster.of_type(name)[0].memory)
    for dropped in range(len(types)):
        for kept in (types[dropped:], by_memory[dropped:]):
            yield kept
            yield kept[::-1]


def check(task: ClusterTask) -> None:
    """Raise InvalidInput if a device has no kernel for any allowed format."""
    shape = Shape(1, 1, 1)
    costs = Costs(task)
    for device in task.cluster.devices:
        seconds = costs.numbers((device,), shape).decode
        if not np.any(np.isfinite(seconds)):
            names = ", ".join(form or "exact" for form in task.formats)
            raise InvalidInput(
                f"device {device.name} has no rates for layers in {names}; add them to the cluster file,"
                " or allow other formats"
            )


def stage_facts(facts: ModelFacts, first: int, end: int) -> ModelFacts:
    """Return the facts of layers `first` to `end` - 1, with the embedding or the head if they are at an end."""
    begins, ends = first == 0, end == len(facts.layers)
    head = facts.head or (None if begins else facts.embedding)
    return replace(
        facts, layers=facts.layers[first:end], windows=facts.windows[first:end], leaves=not ends,
        embedding=facts.embedding if begins else None, head=head if ends else None,
        others=facts.others if begins or ends else (),
    )  # fmt: skip


def cohort_policy(rows: int, tokens: int) -> Policy:
    """Return the policy of a stage that computes cohorts of `rows` sequences, at most `tokens` tokens together."""
    return Policy(gpu_batch_size=rows, num_gpu_batches=1, prefill_tokens=tokens)


def fixed_bytes(facts: ModelFacts, workload: Workload, policy: Policy, shared: bool, ends: tuple[bool, bool]) -> int:
    """Return the device bytes of a stage besides weights and KV cache of its layers.

    Args:
        facts: the whole model.
        workload: rows of the job.
        policy: the stage's policy, with all data on the device.
        shared: whether host and device are one memory.
        ends: whether the stage has the first and the last layer of the model.
    """
    begins, finishes = ends
    one = replace(facts, layers=facts.layers[:1], windows=facts.windows[:1])
    made = stage_facts(one, 0, 1)
    if not begins:
        made = replace(made, embedding=None, head=facts.head or facts.embedding)
    if not finishes:
        made = replace(made, head=None, leaves=True)
    if not (begins or finishes):
        made = replace(made, others=())
    layout = lay_out(made, policy, workload, Capacity(None, None, None, shared, not shared))
    weights = sum(aligned(t.held_bytes) for t in made.layers[0])
    rest = layout.total("device") - weights - layout.account["device"].get("KV cache", 0)
    if not shared:
        return rest
    # Read buffers grow with the stage's weights up to this size.
    return rest - layout.account["device"].get(READING, 0) + MOST_READING
