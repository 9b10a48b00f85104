"""Costs of stages against the layout and the cost model of single machines."""

import itertools
import random
from dataclasses import replace

import pytest

from flexengine.plan.cluster.costs import MOST_READING, ClusterPlan, ClusterTask, Costs, cohort_policy
from flexengine.plan.cluster.devices import DECODE, PREFILL, Cluster, Device, HandRates, Link, MachineRates
from flexengine.plan.cluster.job import ClusterJob, Model, Shape, assumed_harm
from flexengine.plan.cost import Cost
from flexengine.plan.facts import NO_ATTENTION, ModelFacts
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.stages import shape_name, stage_facts
from flexengine.plan.workload import Workload
from tests.helpers.plans import machine_of, opt

TINY = opt(6, 512, 8)
# Layers with a state, with attention, and with both.
HYBRID = replace(
    TINY, windows=(NO_ATTENTION, None, NO_ATTENTION, None, NO_ATTENTION, None), states=(8192, 0, 8192, 4096, 8192, 0),
    mixing=(0, 0, 10**6, 8, 10**6), grain=4,
)  # fmt: skip


def untied(facts: ModelFacts) -> ModelFacts:
    assert facts.embedding is not None
    return replace(facts, head=replace(facts.embedding, name="head"))


def planned(facts: ModelFacts, cuts: list[int], workload: Workload, shape: Shape, kind: str) -> ClusterPlan:
    """The stages between the cuts, on equal machines."""
    hardware = replace(machine_of(random.Random(1), kind), task_seconds=1e-4)
    devices = tuple(Device(f"d{k}", "d", 10**12, MachineRates(hardware), kind) for k in range(len(cuts) - 1))
    made = Model({None: facts})
    cluster = Cluster("c", devices, Link(1e9), Link(1e9))
    task = ClusterTask(cluster, {kind: made}, ClusterJob(workload), (None,), assumed_harm(made, (None,)))
    stages = [k for k in range(len(cuts) - 1) for _ in range(cuts[k + 1] - cuts[k])]
    numbers = Costs(task).numbers(devices, shape)
    return ClusterPlan(task, devices, shape, numbers, stages, [0] * len(stages))


@pytest.mark.parametrize("facts", [TINY, untied(TINY), HYBRID], ids=["tied", "untied", "hybrid"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("cuts", [[0, 6], [0, 2, 6], [0, 1, 4, 6]])
def test_bytes_are_those_of_the_layout(facts: ModelFacts, kind: str, cuts: list[int]) -> None:
    """To the byte for one cohort: weights, KV pages, ports, workspace, embedding and head of each stage."""
    workload, facts = Workload({(100, 20): 6, (37, 9): 2}), replace(facts, gpu=kind == "cuda")
    plan = planned(facts, cuts, workload, Shape(8, 8, 4), kind)
    policy = cohort_policy(Shape(8, 8, 4), ClusterJob(workload))
    assert policy.prefill_tokens == 4 * 100
    for k, (first, end) in enumerate(itertools.pairwise(cuts)):
        capacity = Capacity(None, None, None, kind == "cpu", kind != "cpu")
        layout = lay_out(stage_facts(facts, slice(first, end), (first == 0, end == 6)), policy, workload, capacity)
        read = layout.account["device"].get("read buffers", MOST_READING)  # in RAM they are booked at their largest
        assert plan.priced.memory[k] - MOST_READING == layout.total("device") - read


@pytest.mark.parametrize("facts", [TINY, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_seconds_are_those_of_the_cost_model(facts: ModelFacts, kind: str) -> None:
    """One stage and one cohort are a single machine's job."""
    workload, facts = Workload({(128, 40): 8}), replace(facts, gpu=kind == "cuda")
    plan = planned(facts, [0, 6], workload, Shape(8, 8, 8), kind)
    hardware = plan.devices[0].latency.hardware  # type: ignore[attr-defined]
    layout = lay_out(facts, cohort_policy(Shape(8, 8, 8), ClusterJob(workload)), workload, hardware.capacity)
    predicted = Cost(facts, hardware, workload).predict(layout)
    assert plan.priced.decode[0] == pytest.approx(predicted.sweep_seconds["decode"], rel=1e-6)
    assert plan.priced.seconds == pytest.approx(predicted.seconds, rel=1e-3)


def test_names_of_shapes() -> None:
    assert shape_name(TINY) == "model, 6 layers of 512, 8 heads of 64, vocabulary 50272"
    grouped = replace(TINY, kv_heads=2, kind="llama")
    assert shape_name(grouped) == "llama, 6 layers of 512, 8/2 heads of 64, vocabulary 50272"


@pytest.mark.parametrize(("phase", "tokens", "pairs"), [(DECODE, 100, 800), (PREFILL, 100, 8 * 5050)])
def test_rates_by_hand_of_layers_with_states(phase: str, tokens: int, pairs: int) -> None:
    """A layer without attention moves no keys and values, and computes no pairs; its state is read and written."""
    model = Model({None: HYBRID})
    slow, fast = (HandRates({None: flops}, {None: rate}) for flops, rate in ((1e30, 1.0), (1.0, 1e30)))
    for j, state in enumerate((8192, 0, 8192, 4096)):
        plain = Model({None: replace(TINY, layers=HYBRID.layers)})
        keys = 8 * tokens * TINY.kv_token * (j in (0, 2))
        moved = slow.layer(plain, j, None, phase, 8, tokens) - slow.layer(model, j, None, phase, 8, tokens)
        assert moved == pytest.approx(keys - 2 * 8 * state, abs=1.0)
        flop = fast.layer(plain, j, None, phase, 8, tokens) - fast.layer(model, j, None, phase, 8, tokens)
        assert flop == pytest.approx(4 * TINY.heads * TINY.head_dim * pairs * (j in (0, 2)))
