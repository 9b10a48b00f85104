"""plan.stages: layers of even stages, gpu_batches of cohorts, and where a stage places its weights."""

import random
from collections.abc import Iterable
from dataclasses import replace
from math import inf

import pytest

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan.candidates import for_cohorts
from flexengine.plan.cost import Cost
from flexengine.plan.facts import NeuronFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.min_memory import planned
from flexengine.plan.stages import even_layers, place_weights
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.plans import FLAT, opt

MODEL = opt(12, 1024, 16, 4096)
WEIGHTS = sum(t.held_bytes for t in MODEL.tensors)
LONG = Workload({(500, 16): 64})
SEQUENCE = 544 * MODEL.kv_token * len(MODEL.layers)  # bytes of KV pages of one row
ROOM = 300 << 20  # for all but weights and KV cache


@pytest.mark.parametrize(("layers", "inherits", "stages", "firsts"), [
    (12, (), 4, (0, 3, 6, 9)),
    (11, (), 4, (0, 3, 6, 9)),  # the first stages get one layer more
    (12, (3, 6, 7), 4, (0, 2, 5, 9)),
    (12, (1, 2, 4, 5, 6, 7, 10), 4, (0, 3, 8, 9)),  # 6 is in the run of 3, so that 8 is next
    (12, range(1, 9), 4, (0, 9, 10, 11)),
    (12, range(1, 12), 1, (0,)),
])  # fmt: skip
def test_even_stages_begin_where_they_can(
    layers: int, inherits: Iterable[int], stages: int, firsts: tuple[int, ...]
) -> None:
    ranges = even_layers(layers, frozenset(inherits), stages)
    assert ranges == list(zip(firsts, (*firsts[1:], layers), strict=True))


def test_no_more_even_stages_than_layers_that_begin_one() -> None:
    with pytest.raises(InvalidInput, match=r"3 stages, but 2 layers with an indexer, .* give at most 2 stages"):
        even_layers(12, frozenset(range(1, 11)), 3)
    with pytest.raises(InvalidInput, match="13 stages, but the model has 12 layers; give at most 12 stages"):
        even_layers(12, frozenset(), 13)


@pytest.mark.parametrize(("policy", "stages", "shape"), [
    (Policy(8, 1), 3, (3, 3)),
    (Policy(2, 4), 3, (2, 4)),  # has a gpu_batch for each stage
    (Policy(1, 2), 4, (1, 2)),  # no more gpu_batches than sequences
    (Policy(8, 1, schedule="row"), 2, (8, 1)),
    (Policy(8, 1, cache={"workers": 1}), 2, (2, 4)),  # two for each stage
    (Policy(4, 2, cache={"workers": 0.5, "device": 0.5}), 2, (2, 4)),
])  # fmt: skip
def test_gpu_batches_of_cohorts(policy: Policy, stages: int, shape: tuple[int, int]) -> None:
    found = for_cohorts(policy, stages)
    assert (found.gpu_batch_size, found.num_gpu_batches) == shape


MACHINES = [
    replace(FLAT, device_bytes=device + ROOM, host_bytes=host, disk_bytes=1 << 40)
    for device, host in (
        (WEIGHTS + 70 * SEQUENCE, ROOM),  # all fits
        (WEIGHTS + 4 * SEQUENCE, ROOM),  # weights, or KV cache
        (WEIGHTS // 2 + 2 * SEQUENCE, ROOM),
        (WEIGHTS // 2 + 8 * SEQUENCE, WEIGHTS // 3),
        (WEIGHTS // 4 + 4 * SEQUENCE, 2 * WEIGHTS),
    )
]  # fmt: skip


@pytest.mark.parametrize("machine", range(len(MACHINES)))
@pytest.mark.parametrize("policy", [Policy(8, 1), Policy(16, 4)])
def test_weights_are_placed_where_the_job_is_shortest(machine: int, policy: Policy) -> None:
    """No other shares make it shorter."""
    cost, rng = Cost(MODEL, MACHINES[machine], LONG), random.Random(machine)
    chosen = place_weights(cost, policy, MACHINES[machine].capacity).total_seconds
    for _ in range(100):
        device, host = rng.randrange(21), rng.randrange(21)
        if device + host <= 20:
            weights = (device / 20, host / 20, (20 - device - host) / 20)
            assert chosen <= seconds(cost, replace(policy, weights=weights), MACHINES[machine])


def test_weights_leave_room_for_the_block() -> None:
    """Beside all weights, 4 of 64 sequences would be alive."""
    work = Workload({(50, 64): 64})
    sequence = 114 * MODEL.kv_token * len(MODEL.layers)
    whole = lay_out(MODEL, Policy(16, 4), work, MACHINES[0].capacity).total("device")
    links = FLAT.links | {"h2d": 5e10}
    small = replace(MACHINES[0], device_bytes=whole - 60 * sequence, host_bytes=WEIGHTS, links=links)
    cost = Cost(MODEL, small, work)
    found = place_weights(cost, Policy(16, 4), small.capacity)
    assert found.policy.weights[0] < 1
    assert found.total_seconds < seconds(cost, Policy(16, 4), small)


def seconds(cost: Cost, policy: Policy, hardware: Hardware) -> float:
    try:
        layout = lay_out(MODEL, policy, cost.workload, planned(hardware.capacity))
    except OutOfMemory:
        return inf
    return cost.predict(layout).total_seconds


def test_neurons_get_the_memory_that_is_left() -> None:
    """Of a stage's own memory, whatever share the stage has that chose the block."""
    block = NeuronFacts(4096, 4096, "2 vectors of 1024 float16")
    model = replace(MODEL, blocks=(block,) * len(MODEL.layers))
    every = len(MODEL.layers) * 4096 * 4096
    for device, share in ((WEIGHTS + 70 * SEQUENCE + 2 * every, 1.0), (WEIGHTS + 70 * SEQUENCE + every // 2, None)):
        machine = replace(FLAT, device_bytes=device + ROOM, host_bytes=ROOM, disk_bytes=1 << 40)
        cost = Cost(model, machine, LONG)
        found = place_weights(cost, Policy(8, 1, neurons=0.9), machine.capacity).policy
        assert share in (None, found.neurons)
        if found.neurons < 1:
            with pytest.raises(OutOfMemory):
                lay_out(model, replace(found, neurons=found.neurons + 0.002), LONG, planned(machine.capacity))
