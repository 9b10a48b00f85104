"""Costs of cases of one job on one cluster: seconds and bytes of every choice of every unit on every device. And plans:
a case with its stages, formats and price, and the strategy that runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, permutations, product

import numpy as np

from flexengine.plan.cluster.case_costs import Array, CaseCosts, Priced, UnitChoice, price
from flexengine.plan.cluster.devices import DECODE, PREFILL, Cluster, Device
from flexengine.plan.cluster.job import ClusterJob, Format, Harm, Model, Shape
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import READING, lay_out
from flexengine.plan.sizes import ALIGN, READ, READ_BUFFERS, SHORT_READ, SHORT_READERS, aligned
from flexengine.plan.stages import StagePlan, Strategy, shape_name, stage_facts
from flexengine.policy import Policy, thousandths

MOST_READING = aligned(READ_BUFFERS * READ) + SHORT_READERS * aligned(SHORT_READ + 2 * ALIGN)
STREAM_SLOTS = 2  # buffers for streamed weights: one is computed with while the next is filled
MOST_PERMUTED = 4  # types whose orders are all tried: 64 of them
TOKEN_BYTES = 4  # of a token's number on its way back to the first stage
MOST_SIMULATED = 200_000  # stages and links that all micro-batches of a round pass

Order = tuple[Device, ...]


@dataclass(frozen=True)
class ClusterTask:
    """What is planned."""

    cluster: Cluster  # devices and links
    models: Mapping[str, Model]  # the model by kind of device
    job: ClusterJob  # rows
    formats: tuple[Format, ...]  # formats that a layer may have
    harm: Harm  # [layers, formats] harm of each format
    theta: float = 1.0  # seconds per unit of harm
    group: int = 1  # least neighbouring layers that are decided together

    @property
    def model(self) -> Model:
        """Return the model as the first device holds it. Shapes and numbers of layers are equal for all."""
        return self.models[self.cluster.devices[0].kind]

    @cached_property
    def choices(self) -> tuple[UnitChoice, ...]:
        """Return the choices of a unit, those on the device first."""
        hosts = (False, True) if any(d.offloads for d in self.cluster.devices) else (False,)
        return tuple(UnitChoice(form, host) for host in hosts for form in self.formats)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each unit. A unit begins where a stage can begin (`plan.stages.even_layers`)."""
        count, firsts = len(self.model.kinds), list[int]()
        for j in range(count):
            if j not in self.model.exact.inherits and (not firsts or j - firsts[-1] >= self.group):
                firsts.append(j)
        return tuple(tuple(range(*ends)) for ends in pairwise([*firsts, count]))

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
        task, job, last = self.task, self.task.job, len(order) - 1
        size = (len(order), len(task.kinds), len(task.choices))
        prefill, decode, load = np.zeros(size), np.zeros(size), np.zeros(size)
        memory, host, slots = np.zeros(size), np.zeros(size), np.zeros(size)
        alive = min(shape.batch, job.rows)
        cached = job.cached(alive)
        cells = product(enumerate(order), enumerate(task.kinds), enumerate(task.choices))
        for (j, device), (k, layers), (c, choice) in cells:
            model = task.models[device.kind]
            weights = [model.bytes[choice.form][i] for i in layers]
            fits = not choice.host or device.offloads
            for table, phase, batch in ((prefill, PREFILL, shape.prefill), (decode, DECODE, shape.decode)):
                seconds = sum(self._layer(device, layer, choice.form, phase, batch) for layer in layers)
                table[j, k, c] = seconds if fits else np.inf
            kept = sum(model.exact.kv_token * cached * model.attends(i) + alive * model.state(i) for i in layers)
            memory[j, k, c] = kept + (0 if choice.host else sum(weights))
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
            fixed_memory=np.array([self._booked(d, shape, (j == 0, j == last)) for j, d in enumerate(order)]),
            capacity=np.array([float(d.memory) for d in order]),
            host_capacity=np.array([float(d.host_memory) for d in order]),
            hop_prefill=self._hops(order, shape.prefill * job.prompt), hop_decode=self._hops(order, shape.decode),
            back=task.cluster.link(order[-1], order[0]).seconds(TOKEN_BYTES * shape.decode),
            harm=harm, theta=task.theta, prefills=shape.prefills, cohorts=shape.cohorts, steps=job.output - 1,
            rounds=shape.rounds(job.rows),
        )  # fmt: skip

    def unordered(self, shape: Shape) -> CaseCosts:
        """Return costs that are not above those of any order of any of the devices: without links, embedding and
        head."""
        order = self.task.cluster.devices
        numbers, hops = self.numbers(order, shape), np.zeros((len(order), len(order)))
        inner = np.array([self._booked(device, shape, (False, False)) for device in order])
        prefill, decode = ([d.latency.fixed(rows) / d.speed for d in order] for rows in (shape.prefill, shape.decode))
        return replace(numbers, hop_prefill=hops, hop_decode=hops, back=0.0,
                       fixed_memory=np.minimum(inner, numbers.fixed_memory), fixed_prefill=np.array(prefill),
                       fixed_decode=np.array(decode))  # fmt: skip

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

    def _booked(self, device: Device, shape: Shape, ends: tuple[bool, bool]) -> float:
        """Return the bytes of a stage besides weights and KV cache of its layers: those of its layout.

        Args:
            device: the stage's device.
            shape: micro-batches.
            ends: whether the stage has the first and the last layer of the model.
        """
        key = (device.kind, shape.prefill, shape.decode, ends)
        if key not in self._bytes:
            job, shared = self.task.job, device.kind == "cpu"
            made = stage_facts(self.task.models[device.kind].exact, slice(1), ends)
            capacity = Capacity(None, None, None, shared, not shared)
            layout = lay_out(made, cohort_policy(shape, job), job.workload, capacity)
            account, weights = layout.account["device"], sum(aligned(t.held_bytes) for t in made.layers[0])
            rest = layout.total("device") - weights - account.get("KV cache", 0)
            # Read buffers in RAM grow with the stage's weights up to this size.
            self._bytes[key] = rest + (MOST_READING - account.get(READING, 0) if shared else 0)
        return float(self._bytes[key])

    def _hops(self, order: Order, tokens: int) -> Array:
        """Return the seconds of sending the hidden states of some tokens from one stage to another."""
        hops = np.zeros((len(order), len(order)))
        for (a, sender), (b, receiver) in permutations(enumerate(order), 2):
            facts = self.task.models[sender.kind].exact
            link = self.task.cluster.link(sender, receiver)
            hops[a, b] = link.seconds(tokens * facts.hidden_bytes)
        return hops


def orders(cluster: Cluster) -> list[Order]:
    """Return the device orders to try: devices of one type stay neighbours, types are permuted.

    Inner stages may stay empty, so orders of fewer types, and single devices, cover every set of devices. With more
    than MOST_PERMUTED types, only orders by memory and that of the file are tried, both ways, also without their first
    types.
    """
    types = cluster.types
    by_memory = tuple(sorted(types, key=lambda name: cluster.of_type(name)[0].memory))
    if len(types) <= MOST_PERMUTED:
        kept = [names for length in range(len(types), 0, -1) for names in permutations(types, length)]
    else:
        kept = [names[k:][::way] for k in range(len(types)) for names in (types, by_memory) for way in (1, -1)]
    tried = [tuple(device for name in names for device in cluster.of_type(name)) for names in kept]
    tried += [cluster.of_type(name)[:1] for name in types]
    return list({tuple(device.name for device in order): order for order in tried}.values())


def cohort_policy(shape: Shape, job: ClusterJob) -> Policy:
    """Return the policy of a stage that computes cohorts, and the longest prompts of a prefill micro-batch together."""
    tokens = max(shape.prefill * job.workload.prompt_tokens(1), shape.decode)
    return Policy(gpu_batch_size=shape.decode, num_gpu_batches=1, prefill_tokens=tokens)


@dataclass(frozen=True)
class ClusterPlan:
    """Stages of one case."""

    task: ClusterTask  # what was planned
    order: Order  # devices of the case; some may have no layers
    shape: Shape  # micro-batches
    numbers: CaseCosts  # costs of the case
    # stage_of, choice_of: by unit, the position of its device in `order`, and its choice
    stage_of: Sequence[int]
    choice_of: Sequence[int]

    @cached_property
    def priced(self) -> Priced:
        """Return seconds, bytes and cost."""
        return price(self.numbers, self.stage_of, self.choice_of)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that have layers, in order."""
        return tuple(self.order[j] for j in self.priced.used)

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Return (first, end) of the layers of each used device."""
        ranges = []
        for j in self.priced.used:
            units = [i for i, stage in enumerate(self.stage_of) if stage == j]
            ranges.append((self.task.groups[units[0]][0], self.task.groups[units[-1]][-1] + 1))
        return tuple(ranges)

    @cached_property
    def choices(self) -> tuple[UnitChoice, ...]:
        """Return the choice of every layer."""
        return tuple(
            self.numbers.choices[c] for c, unit in zip(self.choice_of, self.task.groups, strict=True) for _ in unit
        )

    @property
    def formats(self) -> tuple[Format, ...]:
        """Return the format of every layer."""
        return tuple(choice.form for choice in self.choices)

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens per second of the job."""
        return self.task.job.rows * self.task.job.output / self.priced.seconds

    @cached_property
    def simulated_seconds(self) -> float | None:
        """Return the seconds of the job in virtual time: every micro-batch on every stage and link, each of which
        serves them in order; None if there are too many events.

        Prefill parts of all cohorts flow first. A cohort's first decode step waits for all of its parts, and every
        further step for the tokens of the step before, which travel from the last stage back to the first.

            stage 0   p0 p1 p2 p3 d0 d1 d2 d3 d0 d1 ...
            stage 1      p0 p1 p2 p3 d0 d1 d2 d3 d0 ...
        """
        numbers, priced, num_stages = self.numbers, self.priced, len(self.devices)
        if (numbers.prefills + numbers.steps * numbers.cohorts) * 2 * num_stages > MOST_SIMULATED:
            return None
        free = [0.0] * (2 * num_stages)  # by stage, and by the link after it: when it has served all so far

        def pass_through(ready: float, stages: Sequence[float], links: Sequence[float]) -> float:
            """Return when a micro-batch that may begin at a time has passed all stages and links."""
            for k, seconds in enumerate(chain(*zip(stages, (*links, priced.back), strict=True))):
                ready = free[k] = max(ready, free[k]) + seconds
            return ready

        parts = range(numbers.prefills // numbers.cohorts)
        ready = [
            max(pass_through(0.0, priced.prefill, priced.hop_prefill) for _ in parts) for _ in range(numbers.cohorts)
        ]
        for _ in range(numbers.steps):
            ready = [pass_through(begin, priced.decode, priced.hop_decode) for begin in ready]
        return numbers.rounds * max(free)

    def strategy(self) -> Strategy:
        """Return the strategy that `flexengine run --strategy` executes."""
        stages = []
        for device, (first, end) in zip(self.devices, self.layers, strict=True):
            nbytes = self.task.models[device.kind].bytes
            sizes = [(nbytes[self.choices[j].form][j], self.choices[j].host) for j in range(first, end)]
            host = sum(size for size, on_host in sizes if on_host) / sum(size for size, _ in sizes)
            policy = replace(cohort_policy(self.shape, self.task.job), weights=thousandths((1 - host, host, 0.0)))
            stages.append(StagePlan(device.name, (first, end), self.formats[first:end], policy))
        facts, shape = self.task.model.exact, self.shape
        return Strategy(shape_name(facts), len(facts.layers), tuple(stages), shape.prefill, shape.decode, shape.cohorts)
