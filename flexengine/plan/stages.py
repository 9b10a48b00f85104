"""Pipelines: strategies, the layers of each stage, and policies that form the same gpu_batches in all stages.

A strategy says which device computes which layers, in which formats. It is also a JSON file."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan.candidates import with_neurons
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.min_memory import lay_out_given, planned
from flexengine.plan.workload import Workload
from flexengine.policy import MOST_SEQUENCES, Policy, Split, thousandths
from flexengine.records import Limit, check, load, printable, refuse

FORMATS = (None, "int8", "int4", "int3")  # of a layer's matrices, from exact to coarse; None: the checkpoint's numbers
BITS = {None: 16, "int8": 8, "int4": 4, "int3": 3}
MOST_LAYERS = 10_000
_Count = Annotated[int, Limit(1, MOST_SEQUENCES)]
_REMEDY = "make a strategy with flexengine plan --cluster --save"
_STEPS = 20  # of the shares of weights that are tried
_FINE_STEPS = (0.02, 0.005)  # shares that are moved after these


def _layers(name: str, value: Any) -> tuple[int, int]:
    first, end = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if not (type(first) is int and type(end) is int and 0 <= first < end <= MOST_LAYERS):
        refuse(name, value, f"[first, end] with 0 <= first < end <= {MOST_LAYERS:,}")
    return first, end


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline.

    Raises:
        InvalidInput: a value is not allowed; the message names the field, its value and the limit.
    """

    device: Annotated[str, printable]  # name of the device, as in the cluster file
    # (first, end) of the layers that the stage computes; `end` is not among them
    layers: Annotated[tuple[int, int], _layers]
    # for each of these layers, the format of its matrices, from FORMATS
    weights: tuple[Annotated[str | None, FORMATS[1:], ", or null (exact)"], ...]
    # block shape and placement on this device; None for the planner's choice on the device itself
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check(self)
        if len(self.weights) != self.count:
            raise InvalidInput(f"weights hold {len(self.weights)} formats, but layers {list(self.layers)} are"
                               f" {self.count}; give one format per layer")  # fmt: skip

    @property
    def count(self) -> int:
        """Return the number of layers."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True)
class Strategy:
    """Stages of a pipeline, and sizes of the batches that pass through them.

    Raises:
        InvalidInput: a value is not allowed, or the stages do not hold each layer once, in order.
    """

    model: Annotated[str, printable]  # shape of the model that the strategy was made for; see `shape_name`
    num_layers: Annotated[int, Limit(1, MOST_LAYERS)]  # layers of the model
    stages: Annotated[tuple[StagePlan, ...], Limit(1), "a list of at least one stage"]  # in the order of their layers
    prefill_batch: _Count  # sequences of one prefill micro-batch
    decode_batch: _Count  # sequences of one decode micro-batch; a cohort
    cohorts: _Count  # cohorts in the pipeline at once. At most decode_batch * cohorts sequences are alive.

    def __post_init__(self) -> None:
        check(self, "strategy ")
        if self.prefill_batch > self.decode_batch:
            raise InvalidInput(f"strategy prefill_batch is {self.prefill_batch} and decode_batch {self.decode_batch};"
                               " a cohort is prefilled in parts, so prefill_batch must not be larger")  # fmt: skip
        names = [stage.device for stage in self.stages]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidInput(f"strategy device {twice} has two stages; give each device one range of layers")
        end = 0
        for stage in self.stages:
            first, last = stage.layers
            if first != end:
                fault = f"layers {end} to {first - 1} are in no stage" if first > end else (
                    f"layers {first} to {min(end, last) - 1} are in two stages")  # fmt: skip
                raise InvalidInput(f"strategy {fault}: stage {stage.device} begins with layer {first}, but must begin"
                                   f" with layer {end}; {_REMEDY}")  # fmt: skip
            end = last
        if end != self.num_layers:
            raise InvalidInput(f"strategy stages end with layer {end - 1}, but the model has layers 0 to"
                               f" {self.num_layers - 1}; {_REMEDY}")  # fmt: skip

    @property
    def weights(self) -> tuple[str | None, ...]:
        """Return the format of every layer of the model."""
        return tuple(name for stage in self.stages for name in stage.weights)

    def check(self, model: str, num_layers: int, devices: int) -> None:
        """Raise InvalidInput if the strategy was made for another model or for other devices.

        Args:
            model: shape of the model that is to be run, as in `model`.
            num_layers: layers of this model.
            devices: number of devices at hand.
        """
        if self.num_layers != num_layers:
            raise InvalidInput(f"the strategy is for a model of {self.num_layers} layers, but this one has"
                               f" {num_layers}; {_REMEDY} for this model")  # fmt: skip
        if self.model != model:
            raise InvalidInput(f"the strategy was made for the model {self.model}, but this one is {model}; {_REMEDY}"
                               " for this model")  # fmt: skip
        if devices < len(self.stages):
            raise InvalidInput(f"the strategy has {len(self.stages)} stages, but there are {devices} devices; {_REMEDY}"
                               " for these devices")  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a strategy file holds them."""
        stages = [
            {"device": stage.device, "layers": list(stage.layers), "weights": list(stage.weights),
             "policy": stage.policy.to_json() if stage.policy else None}
            for stage in self.stages
        ]  # fmt: skip
        return {"model": self.model, "num_layers": self.num_layers, "prefill_batch": self.prefill_batch,
                "decode_batch": self.decode_batch, "cohorts": self.cohorts, "stages": stages}  # fmt: skip

    def text(self) -> str:
        """Return the text of a strategy file, with a line for each stage."""
        fields = self.to_json()
        stages = ",\n  ".join(json.dumps(stage) for stage in fields.pop("stages"))
        head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in fields.items())
        return f'{{\n{head} "stages": [\n  {stages}\n ]\n}}'

    @staticmethod
    def load(path: str | Path) -> "Strategy":
        """Read a strategy file. Raise InvalidInput, with the file's name and the fault, if it has no strategy."""
        return load(Strategy, path, "strategy file")


def shape_name(facts: ModelFacts, layers: int | None = None) -> str:
    """Return the text that names a model's shape, equal for checkpoints that one strategy fits.

    Args:
        facts: the model, or a range of its layers.
        layers: layers of the whole model; None if `facts` are those of the whole model.
    """
    heads = f"{facts.heads}/{facts.kv_heads}" if facts.heads != facts.kv_heads else str(facts.heads)
    return (
        f"{facts.kind or 'model'}, {layers or len(facts.layers)} layers of {facts.hidden}, {heads} heads of"
        f" {facts.head_dim}, vocabulary {facts.vocabulary}"
    )


def stage_facts(facts: ModelFacts, layers: slice, ends: tuple[bool, bool]) -> ModelFacts:
    """Return the facts of a range of layers, with the embedding or the head if it has the first or the last layer.

    Args:
        facts: the whole model.
        layers: the range.
        ends: whether it has the first and the last layer.
    """
    begins, finishes = ends
    numbers = range(len(facts.layers))[layers]
    head = facts.head or (None if begins else facts.embedding)
    return replace(
        facts, layers=facts.layers[layers], windows=facts.windows[layers], leaves=not finishes,
        embedding=facts.embedding if begins else None, head=head if finishes else None,
        others=facts.others if begins or finishes else (), blocks=facts.blocks[layers],
        states=facts.states[layers], tables=tuple(t for t in facts.tables if t.layer is None or t.layer in numbers),
    )  # fmt: skip


def even_layers(layers: int, inherits: Set[int], stages: int) -> list[tuple[int, int]]:
    """Return the first layer, and the last layer + 1, of each stage, divided evenly. The first stages get one layer
    more if need be (FlexGen 1.8). A stage that could not begin at its first layer begins at the last one before that
    can begin a stage. Raise InvalidInput if there are fewer such layers than stages.

    Args:
        layers: layers of the model.
        inherits: layers that see keys which a layer before chose (`ModelFacts.inherits`); no stage may begin at them.
        stages: number of stages.
    """
    can, firsts = [j for j in range(layers) if j not in inherits], list[int]()
    if len(can) < stages:
        have = f"the model has {layers} layers"
        if stages <= layers:
            have = f"{len(can)} layers with an indexer, with one of which each must begin"
        raise InvalidInput(f"there are {stages} stages, but {have}; give at most {len(can)} stages")
    for rank in range(stages):
        number = bisect_right(can, rank * (layers // stages) + min(rank, layers % stages)) - 1
        firsts.append(min(max(number, rank and firsts[-1] + 1), len(can) - stages + rank))
    return list(pairwise([*(can[number] for number in firsts), layers]))


def stage_layers(layers: int, inherits: Set[int], rank: int, stages: int, strategy: Strategy | None) -> tuple[int, int]:
    """Return the first layer, and the last layer + 1, of a stage. Raise InvalidInput as `even_layers`, or if the
    strategy is for another number of layers or stages.

    Args:
        layers: layers of the model.
        inherits: as for `even_layers`.
        rank: number of the stage.
        stages: number of stages.
        strategy: names the layers of each stage; None divides them evenly.
    """
    if strategy is None:
        return even_layers(layers, inherits, stages)[rank]
    if len(strategy.stages) != stages:
        raise InvalidInput(
            f"the strategy has {len(strategy.stages)} stages, but {stages} processes run; start as many"
            " processes as it has stages, or make a strategy for this number"
        )
    if strategy.num_layers != layers:
        raise InvalidInput(
            f"the strategy is for {strategy.num_layers} layers, but the model has {layers}; make one for"
            " this model with flexengine plan --cluster"
        )
    return strategy.stages[rank].layers


def block_of(strategy: Strategy, workload: Workload) -> Policy:
    """Return the block of a strategy: the policy of its first stage, if it has gpu_batches of all cohorts, as from
    `plan --stages`. Else all data is on the device, and a prefill chunk holds prefill_batch of the longest prompts."""
    policy = strategy.stages[0].policy
    if policy is not None and policy.num_gpu_batches >= strategy.cohorts:
        return policy
    longest = max((prompt for prompt, _ in workload.sizes), default=1)
    return Policy(strategy.decode_batch, strategy.cohorts, prefill_tokens=max(1, strategy.prefill_batch * longest))


def place_weights(cost: Cost, policy: Policy, capacity: Capacity, resident: Policy | None = None) -> Prediction:
    """Return the prediction of a stage under a policy, with the shares of its weights under which the job is shortest.
    Neurons or experts that are read on demand get the memory that is left.

    Weights near the device are read faster, but take memory from KV cache, without which sequences wait to enter. All
    shares in steps of 1/20 are tried, and then smaller ones.

    Args:
        policy: its weights and its share of neurons do not matter.
        capacity: memory of the stage.
        resident: the policy under which weights are in memory; None if none are. With equal shares they stay, and are
            not loaded again.

    Raises:
        TooLittle: not even weights on disk fit.
    """
    room, fitting = planned(capacity), list[Layout]()

    def laid_out(policy: Policy) -> Layout:
        return lay_out(cost.model, policy, cost.workload, room)

    for device in range(_STEPS, -1, -1):
        for host in range(0 if capacity.shared else _STEPS - device, -1, -1):
            shares = (device / _STEPS, host / _STEPS, (_STEPS - device - host) / _STEPS)
            with suppress(OutOfMemory):
                fitting.append(laid_out(with_neurons(replace(policy, weights=shares), cost.model, room, laid_out)))
    if not fitting:
        least = replace(policy, weights=(0, 0, 1), neurons=0.0)
        fitting = [lay_out_given(cost.model, least, cost.workload, capacity)]
    kept = None if resident is None else resident.weights

    def predicted(layout: Layout) -> Prediction:
        return cost.predict(layout, 0.0 if layout.policy.weights == kept else 1.0)

    best = min(map(predicted, fitting), key=attrgetter("total_seconds"))
    for step in _FINE_STEPS:  # weights move in smaller steps while the job gets shorter
        found: Prediction | None = best
        while found is not None:
            best, found = found, None
            for weights in moved(best.policy.weights, step, capacity.shared):
                with suppress(OutOfMemory):
                    other = predicted(laid_out(replace(best.policy, weights=weights)))
                    if other.total_seconds < (found or best).total_seconds:
                        found = other
    return best


def moved(weights: Split, step: float, shared: bool) -> Iterator[Split]:
    """Yield splits over device, host and disk with a share `step` on another of them. shared: leave out the host."""
    for source, target in permutations(range(3), 2):
        if weights[source] >= step and not (shared and 1 in (source, target)):
            shares = list(weights)
            shares[source], shares[target] = shares[source] - step, shares[target] + step
            yield thousandths(shares)
