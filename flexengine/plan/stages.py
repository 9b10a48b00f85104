"""Pipelines: the layers of each stage, and policies that form the same gpu_batches in all stages."""

from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan.candidates import with_neurons
from flexengine.plan.capacity import Capacity
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.min_memory import lay_out_given, planned
from flexengine.plan.prediction import Prediction
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.strategy import Strategy

_STEPS = 20  # of the shares of weights that are tried


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


def stage_layers(layers: int, rank: int, stages: int, strategy: Strategy | None) -> tuple[int, int]:
    """Return the first layer, and the last layer + 1, of a stage. Raise InvalidInput if there are fewer layers than
    stages, or the strategy is for another number of layers or stages.

    Args:
        layers: layers of the model.
        rank: number of the stage.
        stages: number of stages.
        strategy: names the layers of each stage; None divides them evenly, and the first stages get one layer more if
            need be (FlexGen 1.8).
    """
    if strategy is None:
        if stages > layers:
            raise InvalidInput(
                f"there are {stages} stages, but the model has {layers} layers; give at most {layers} stages"
            )
        first = rank * (layers // stages) + min(rank, layers % stages)
        return first, first + layers // stages + (rank < layers % stages)
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
    """Return the block of a strategy, with all data on the device. A prefill chunk holds prefill_batch of the longest
    prompts."""
    longest = max((prompt for prompt, _ in workload.sizes), default=1)
    return Policy(strategy.decode_batch, strategy.cohorts, prefill_tokens=max(1, strategy.prefill_batch * longest))


def for_cohorts(policy: Policy, stages: int) -> Policy:
    """Return the policy with at least one gpu_batch per stage in its block, as far as it has sequences, so that all
    stages compute at the same time; with attention workers two, so that a stage computes one while the workers attend
    to the other. The block keeps its size, or grows by less than one sequence per gpu_batch."""
    block = policy.block_size
    batches = min(stages * (2 if policy.works else 1), block)
    if policy.num_gpu_batches >= batches or policy.schedule == "row":
        return policy
    return replace(policy, gpu_batch_size=-(-block // batches), num_gpu_batches=batches)


def place_weights(cost: Cost, policy: Policy, capacity: Capacity, resident: Policy | None = None) -> Prediction:
    """Return the prediction of a stage under a policy, with the shares of its weights under which the job is shortest.
    Neurons or experts that are read on demand get the memory that is left.

    Weights near the device are read faster, but take memory from KV cache, without which sequences wait to enter. All
    shares in steps of 1/20 are tried.

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
    predictions = [cost.predict(layout, 0.0 if layout.policy.weights == kept else 1.0) for layout in fitting]
    return min(predictions, key=attrgetter("total_seconds"))
