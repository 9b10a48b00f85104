"""Measurement of a model's layers and head, with random weights in the model's own modules. No checkpoint is read."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flexengine.activity import tick
from flexengine.config import SamplingParams
from flexengine.measure.links import WHAT
from flexengine.measure.timing import Borrowed, fill, room, seconds_per_call, unnoticed, without_falls
from flexengine.model.forward import Attend, Forward, Inputs, Layer, Pause, Rows
from flexengine.model.native.layer import release
from flexengine.model.sample import Draw, sample
from flexengine.model.skeleton import ParamRef, Skeleton
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Table
from flexengine.plan.sizes import aligned, workspace
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.tier.machine import Machine
from flexengine.worker.resident import pack_resident

# Tokens of a gpu_batch, the most important ones first. Seconds are interpolated between them. The first NEEDED are
# always measured, the others if there is time. torch's products are up to a third faster if the number of tokens is a
# multiple of 16; 20 and 40 are not.
TOKENS, NEEDED = (64, 1, 256, 20, 512, 16, 4, 40, 2048, 128, 32, 8), 2
ROWS = (1, 8, 16, 64)  # of logits
# Bytes of layers of a pass, 16 times the L3 cache of many machines, and of what is read before each product of a head.
# With 113 MB of layers a cache of 32 MB held enough of them to make passes of 4 tokens a third shorter than jobs'.
UNCACHED, EVICTING = 512 << 20, 128 << 20
LAYER_SECONDS, HEAD_SECONDS = 8.0, 0.4  # for layers with all numbers of tokens; for each size of the head
QUICK = ((64, 1, 256, 16, 512, 8), 0.8, 0.05)  # the same three for a quick measurement
ORDER = ("packed", "apart")  # what modules note of the order of their weights (worker/resident.py, in_place.py)
PASSES = 12  # maximum for each number of tokens
START = ""  # key for the part of a pass before its first layer


def measure_model(
    skeleton: Skeleton,
    facts: ModelFacts,
    held: Mapping[str, torch.dtype],
    machine: Machine,
    most_tokens: int = 2048,
    quick: bool = False,
    also: Callable[[int], None] = lambda bound: None,
) -> dict[str, dict[str, Table]]:
    """Return `Hardware.layers`, `resident` and `heads`: seconds of a layer by tokens, without its attention, with
    weights in either order, and seconds of logits and greedy tokens by rows, including the part of a pass before its
    first layer. Entries that do not fit in memory or in the time are missing. Takes about ten seconds, or one if
    `quick`. Afterwards the modules have their previous parameters. held: dtype of each parameter on the device.
    most_tokens: of a gpu_batch. also: called with the number of first layers that have random weights, while these are
    bound, in the order of weights that stay in memory."""
    among, layer_seconds, head_seconds = QUICK if quick else (TOKENS, LAYER_SECONDS, HEAD_SECONDS)
    with torch.no_grad():
        names = [facts.signature(j) for j in range(len(facts.layers))]
        found: dict[str, dict[str, Table]] = {"layers": {}, "resident": {}, "heads": {}}
        start = 0.0  # seconds of a one-token pass before its first layer
        with unnoticed(machine), random_weights(skeleton, names, held, machine) as bound:
            tokens = fitting(facts, machine, [n for n in among if n <= most_tokens])
            fields = ("layers", "resident") if reorders(skeleton, machine) else ("layers",)
            for field in fields if bound else ():
                if field == "resident":
                    reorder(skeleton, bound, machine)
                with working_memory(facts, machine, tokens):
                    times = time_layers(skeleton, names[:bound], machine, tokens, layer_seconds / len(fields))
                found[field], start = _tables(times), times.get(1, {}).get(START, start)
            release(skeleton.model)  # else activations stay beside the memory of what is measured next
            also(bound)
        if facts.output is not None:
            with unnoticed(machine):
                found["heads"] = {facts.head_signature: _head(skeleton, held, machine, start, head_seconds)}
        return found


def _tables(times: Mapping[int, Mapping[str, float]]) -> dict[str, Table]:
    """Return by signature the table of what `time_layers` has found."""
    tables: dict[str, Table] = {}
    for name in dict.fromkeys(name for by in times.values() for name in by if name != START):
        points = [(float(n), times[n][name]) for n in sorted(times) if name in times[n]]
        numbers, seconds = zip(*points, strict=True)
        tables[name] = tuple(zip(numbers, without_falls(seconds), strict=True))
    return tables


def fitting(facts: ModelFacts, machine: Machine, numbers: Sequence[int]) -> list[int]:
    """Return those of `numbers`, tokens of gpu_batches, that can be computed in the device's free memory together."""
    found, ledger = list[int](), machine.device.ledger
    for number in numbers:
        if ledger.capacity is None or _working(facts, [*found, number]) <= ledger.capacity - ledger.used:
            found.append(number)
    return found


@contextmanager
def working_memory(facts: ModelFacts, machine: Machine, numbers: Sequence[int]) -> Iterator[None]:
    """Reserve the device memory of layers' activations while the block computes gpu_batches of `numbers` tokens in
    turns. Raise OutOfMemory if it is not free."""
    with Borrowed(machine) as regions:
        regions.keep_room("device", _working(facts, numbers), WHAT)
        yield


def _working(facts: ModelFacts, numbers: Sequence[int]) -> int:
    """Return the bytes of a layer's activations with the most tokens, and of what the passes of all hold in turns:
    embeddings, hidden states, random outputs of attention, and what a token adds beside."""
    rows = facts.hidden + facts.hidden_width + facts.heads * facts.head_dim
    most = max(numbers, default=0)
    moment = workspace(facts, Policy(max(1, most), 1, prefill_tokens=max(1, most)), Workload({(max(1, most), 1): 1}))
    return aligned(moment + sum(numbers) * (rows * facts.itemsize + facts.held)) if most else 0


def time_layers(
    skeleton: Skeleton, names: Sequence[str], machine: Machine, tokens: Sequence[int], budget: float
) -> dict[int, dict[str, float]]:
    """Return, by tokens, the seconds of a layer by signature, and under START of the part before the first layer.
    Numbers of tokens take turns, so that slow moments of the machine affect all equally. The first NEEDED are always
    timed, the others if the expected time of a pass is left. names: signature of each layer that has weights. budget:
    seconds for all."""
    trials = {n: PassTrial(skeleton, machine, n) for n in tokens}
    times_of: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in tokens}
    cold: dict[int, tuple[str, float]] = {}  # time of the very first layer, used if there is no other
    took: dict[int, float] = {}
    end = time.perf_counter() + budget
    for number, (i, n) in product(range(PASSES), enumerate(tokens)):
        began = time.perf_counter()
        least = not number and i < NEEDED
        expected = took[n] if n in took else took.get(tokens[0], 0.0) * max(1.0, n / tokens[0])
        if not least and end - began < expected:
            continue
        for layer, seconds in trials[n].walk(len(names)):
            if layer == number == 0:
                cold[n] = names[0], seconds
            else:
                times_of[n][names[layer] if layer >= 0 else START].append(seconds)
            if time.perf_counter() > end and set(times_of[n]) | {cold[n][0] if n in cold else START} == {START, *names}:
                break
        took[n] = time.perf_counter() - began
        tick()
    PassTrial.end_all(trials.values())
    for n, (name, seconds) in cold.items():
        times_of[n] = times_of[n] if name in times_of[n] else {**times_of[n], name: [seconds]}
    return {n: {name: median(times) for name, times in by.items()} for n, by in times_of.items() if n in cold}


@dataclass
class PassTrial:
    """Passes of packed tokens through a skeleton whose first layers have weights. Attention is left out: `answers` has
    random outputs by shape. `forward` is the pass under way, None between passes; `event` is its pause. recycles: see
    `Pass`."""

    skeleton: Skeleton
    machine: Machine
    tokens: int
    answers: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    forward: Forward | None = None
    recycles: bool = False
    event: Pause = field(init=False)

    def walk(self, count: int) -> Iterator[tuple[int, float]]:
        """Run a pass and yield (layer, seconds) for the first `count` layers; layer -1 is the part before them."""
        began = self.begin()
        yield -1, time.perf_counter() - began
        while isinstance(self.event, Layer) and self.event.index < count:
            layer, began = self.event.index, time.perf_counter()
            self.layer()
            yield layer, time.perf_counter() - began

    def begin(self) -> float:
        """Start a pass and run it up to its first layer. Return the time.perf_counter at which the model started."""
        self.end()
        on, width = self.machine.compute, self.skeleton.embedding[1][1]
        positions = torch.arange(self.tokens) % min(self.tokens, self.skeleton.context_length or self.tokens)
        # Embeddings differ, so that tokens choose different experts. All are kept: the last layer computes only those.
        rows = fill(torch.empty(self.tokens, width, dtype=self.skeleton.product.dtype, device=on), 1.0)
        keep = torch.arange(self.tokens, device=on)
        inputs = Inputs(positions[None].to(on), positions[None].to(on), keep)
        self.machine.synchronize()
        began = time.perf_counter()
        self.forward = Forward(
            self.skeleton.model, inputs, self.skeleton.mode(self.machine.compute), recycles=self.recycles
        )
        self.forward.records = lambda: None  # the tokens are one prompt for modules with states
        event = self.forward.resume()
        assert isinstance(event, Rows)
        self.resume((rows, inputs.positions - inputs.positions.min()))
        return began

    def end(self) -> None:
        """End the pass under way, which frees its tensors. Must be called in the thread that began the pass."""
        if self.forward is not None:
            self.forward.end()
            self.forward = None

    @staticmethod
    def end_all(trials: "Iterable[PassTrial]") -> None:
        """End the passes of several trials."""
        for trial in trials:
            trial.end()

    def layer(self) -> None:
        """Compute the next layer."""
        assert isinstance(self.event, Layer)
        assert self.forward is not None
        event = self.forward.resume(self.event.hidden)
        self.resume(self.answer(event)) if isinstance(event, Attend) else self._end(event)

    def attention(self) -> Attend:
        """Compute the next layer up to its attention, and return the pause there."""
        assert self.forward is not None
        assert isinstance(self.event, Layer)
        attend = self.forward.resume(self.event.hidden)
        assert isinstance(attend, Attend)
        return attend

    def resume(self, answer: Any) -> None:
        """Compute what follows a pause. answer: output of a layer's attention, with which the layer ends."""
        assert self.forward is not None
        self._end(self.forward.resume(answer))

    def _end(self, event: Pause) -> None:
        self.event = event
        self.machine.synchronize()

    def answer(self, event: Attend) -> Tensor:
        """Return random numbers in place of the output of attention, [1, tokens, heads, head_dim]."""
        shape = (1, event.q.shape[2], event.q.shape[1], event.v.shape[-1])
        if shape not in self.answers:
            self.answers[shape] = fill(event.q.new_empty(shape), 1.0)
        return self.answers[shape]


@contextmanager
def random_weights(
    skeleton: Skeleton, names: Sequence[str], held: Mapping[str, torch.dtype], machine: Machine
) -> Iterator[int]:
    """Bind random weights to the modules while the block runs. Yield the number of first layers that have weights.

    These are as many layers as are needed to have UNCACHED bytes of layers of every signature, or all layers. If memory
    is short, layers of one signature share weights. If one layer of each signature does not fit, the number is 0.
    """
    slots = [slot for group in (*skeleton.layers, skeleton.others) for slot in group.values()]
    before = [(slot.holder, slot.name, slot.holder[slot.name]) for slot in slots]
    modules = {id(slot.module): slot.module.__dict__ for slot in slots}.values()
    orders = [(own, {key: own.pop(key) for key in ORDER if key in own}) for own in modules]
    with Borrowed(machine) as regions:
        try:
            for buffers in (module._buffers for module in skeleton.model.modules()):
                for key, buffer in buffers.items():
                    if buffer is not None and not buffer.is_meta and buffer.device.type != machine.compute.type:
                        before.append((buffers, key, buffer))
                        buffers[key] = buffer.to(machine.compute)
            yield _give(skeleton, names, held, machine, regions)
        finally:
            for holder, name, tensor in before:
                holder[name] = tensor
            for own, order in orders:
                for key in ORDER:
                    own.pop(key, None)
                own |= order
            release(skeleton.model)


def reorders(skeleton: Skeleton, machine: Machine) -> bool:
    """Return whether jobs may change the order of weights that stay in memory (`Weights.load_resident`)."""
    computing = machine.compute.type == "cpu" and skeleton.product.dtype == torch.float32
    matrices = (name for layer in skeleton.layers for name, param in layer.items() if param.matrix)
    return computing and any(name not in skeleton.forms for name in matrices)


def reorder(skeleton: Skeleton, count: int, machine: Machine) -> None:
    """Change the order of the weights of the first `count` layers, as jobs do with weights that stay in memory."""
    if not reorders(skeleton, machine):
        return
    first = dict[int, ParamRef]()  # by address of a weight, the first parameter that has it
    for name, param in (item for layer in skeleton.layers[:count] for item in layer.items()):
        if name in skeleton.forms:
            continue
        weight = param.holder[param.name]
        if (other := first.setdefault(weight.data_ptr(), param)) is param:
            pack_resident(param, weight)
        elif ORDER[0] in other.module.__dict__:
            param.module.__dict__[ORDER[0]] = other.module.__dict__[ORDER[0]]


def _give(
    skeleton: Skeleton, names: Sequence[str], held: Mapping[str, torch.dtype], machine: Machine, regions: Borrowed
) -> int:
    def shape(name: str, slot: ParamRef) -> tuple[int, ...]:
        """Return the shape of a parameter's tensor, which holds bytes if the parameter is encoded."""
        return skeleton.forms[name].shape if name in skeleton.forms else slot.shape

    def size(slots: Mapping[str, ParamRef]) -> int:
        return sum(aligned(prod(shape(n, slot)) * held[n].itemsize) for n, slot in slots.items()) or 1

    def random(slots: Mapping[str, ParamRef]) -> list[Tensor]:
        tensors = []
        for name, slot in slots.items():
            region = regions.take("device", prod(shape(name, slot)) * held[name].itemsize, WHAT, held[name])
            tensors.append(fill(machine.device.view(region)).view(shape(name, slot)))
        return tensors

    def bind(slots: Mapping[str, ParamRef], tensors: Sequence[Tensor]) -> None:
        for slot, tensor in zip(slots.values(), tensors, strict=True):
            slot.bind(torch.nn.Parameter(tensor, requires_grad=False))

    sizes = {name: size(skeleton.layers[names.index(name)]) for name in names}
    left = room(machine, "device") - size(skeleton.others)
    if sum(sizes.values()) > left:
        return 0
    copies = {name: min(names.count(name), -(-UNCACHED // sizes[name])) for name in sizes}
    bind(skeleton.others, random(skeleton.others))
    sets: dict[str, list[list[Tensor]]] = defaultdict(list)
    met: dict[str, int] = defaultdict(int)
    for j, name in enumerate(names):
        needed = sum(sizes[other] for other in sizes if not sets[other] and other != name)
        if len(sets[name]) < copies[name] and (not sets[name] or sizes[name] + needed <= left):
            sets[name].append(random(skeleton.layers[j]))
            left -= sizes[name]
        bind(skeleton.layers[j], sets[name][met[name] % len(sets[name])])
        met[name] += 1
        if all(met[other] >= copies[other] for other in sizes):
            return j + 1
    return len(names)


def _head(skeleton: Skeleton, held: Mapping[str, torch.dtype], machine: Machine, start: float, budget: float) -> Table:
    """Return seconds of logits and their greedy tokens by rows, each timed for `budget` seconds; if memory is short,
    extrapolated from a part of it."""
    name, (vocabulary, width) = skeleton.head
    name = name if name in held else skeleton.embedding[0]
    dtype, form = held[name], skeleton.forms[name].packed if name in skeleton.forms else None
    row = width * dtype.itemsize if form is None else -(-form.nbytes // vocabulary)
    rows = min(vocabulary, max(1, room(machine, "device") // row))
    form = form.with_rows(rows) if form is not None else None
    with Borrowed(machine) as regions:
        shape = (rows, width) if form is None else (form.nbytes,)
        home = regions.take("device", prod(shape) * dtype.itemsize, WHAT, dtype)
        weight = fill(machine.device.view(home)).view(shape)
        others = fill(machine.device.view(regions.take("device", min(EVICTING, room(machine, "device")), WHAT)))
        points = []
        for count in ROWS:
            x = fill(torch.empty(1, count, width, dtype=skeleton.product.dtype, device=machine.compute), 1.0)
            draws = [Draw(SamplingParams(), i, 0, (1,), ()) for i in range(count)]

            def call(_: int, x: Tensor = x, draws: list[Draw] = draws) -> object:
                return sample(skeleton.product(x, weight, None, form)[0].float(), draws)

            seconds = seconds_per_call(call, budget, machine, others.max)  # layers are computed between two heads
            points.append((float(count), start + seconds * vocabulary / rows))
        return tuple(points)
