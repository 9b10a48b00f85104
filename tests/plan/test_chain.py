"""plan.chain: layers by stage against all other splits, the virtual clock, and FlexGen's Table 3."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest

from bench.cluster.events import Pipeline
from bench.pipeline.offload import T4, block_rates
from flexengine import shipped
from flexengine.errors import InvalidInput, TooLittle
from flexengine.plan.candidates import Options
from flexengine.plan.chain import ChainSearch, chain_strategy, plan_chain
from flexengine.plan.cluster.devices import Link
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.stages import Strategy
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.clock import simulated
from tests.helpers.plans import FLAT, opt

MODEL = opt(12, 1024, 16, 4096)
WEIGHTS = sum(t.held_bytes for t in MODEL.tensors)
ROOM = 300 << 20  # for all but weights and KV cache
WORK = Workload({(64, 16): 32})
SMALL = replace(FLAT, device_bytes=ROOM + WEIGHTS // 8, host_bytes=ROOM + 2 * WEIGHTS, disk_bytes=1 << 40)
FAST = replace(SMALL, products={name: 3 * rate[0][1] for name, rate in FLAT.products.items()})
LARGE = replace(SMALL, device_bytes=ROOM + WEIGHTS)
SLOW = replace(SMALL, products={name: rate[0][1] / 4 for name, rate in FLAT.products.items()})
CHAINS = {
    "alike": [SMALL] * 3,
    "one is large": [SMALL, LARGE, SMALL],
    "one is slow": [SLOW, LARGE, SMALL],
    "two": [SLOW, FAST],
    "a slow one in the middle": [SMALL, SLOW, SMALL, SMALL],
}


def test_unlike_stages_are_told_apart() -> None:
    """Also those of one name and size, with as many layers."""
    for place in (1, 2):
        machines = [SMALL] * 4
        machines[place] = SLOW
        seconds = ChainSearch(MODEL, machines, WORK).seconds(
            Policy(4, 4, weights=(0, 1, 0)), [(0, 3), (3, 6), (6, 9), (9, 12)]
        )
        assert seconds[place] > 1.5 * seconds[3 - place]


@pytest.mark.slow
def test_stages_with_other_layers_search_blocks_of_their_own() -> None:
    """Alike machines, with as many layers, of which some are encoded."""
    mixed = tuple(
        tuple(replace(t, encoded=t.elements // 2, form="int4") if t.matrix else t for t in layer)
        if 3 <= j < 6
        else layer
        for j, layer in enumerate(MODEL.layers)
    )
    ranges = [(0, 3), (3, 6), (6, 9), (9, 12)]
    search = ChainSearch(replace(MODEL, layers=mixed), [SMALL] * 4, Workload({(64, 16): 512}))
    own = [search.block(rank, ranges) for rank in range(4)]
    assert own[1] not in (own[0], *own[2:])
    assert set(search.blocks(ranges)) == set(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_no_stage_begins_where_it_cannot(name: str) -> None:
    """At a layer that sees keys which a layer before chose."""
    machines, inherits = CHAINS[name], {1, 2, 4, 5, 6, 7, 10}
    search = ChainSearch(replace(MODEL, choosing=(16, 2, 32), inherits=frozenset(inherits)), machines, WORK)
    for ranges in (search.even(), [stage.layers for stage in search.plan().stages]):
        assert len(ranges) == len(machines)
        assert (ranges[0][0], ranges[-1][1]) == (0, 12)
        assert all(first < end for first, end in ranges)
        assert not inherits & {first for first, _ in ranges}
    assert max(search.seconds(Policy(4, 4), [(0, 5), (5, 12)])) == inf


def test_too_few_layers_can_begin_a_stage() -> None:
    search = ChainSearch(replace(MODEL, inherits=frozenset(range(1, 11))), [SMALL] * 3, WORK)
    with pytest.raises(InvalidInput, match=r"there are 3 stages, but 2 layers with an indexer.*give at most 2 stages"):
        search.plan()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_no_other_layers_are_faster(name: str) -> None:
    """Under the block of the plan, of all ways to cut twelve layers."""
    machines = CHAINS[name]
    found = ChainSearch(MODEL, machines, WORK)
    plan = found.plan()
    chosen = max(stage.prediction.total_seconds for stage in plan.stages)
    for cuts in combinations(range(1, 12), len(machines) - 1):
        ends = (0, *cuts, 12)
        assert chosen <= 1.02 * max(found.seconds(plan.policy, list(pairwise(ends))))
    assert [stage.layers[0] for stage in plan.stages[1:]] == [stage.layers[1] for stage in plan.stages[:-1]]
    if name == "one is slow":
        assert plan.stages[0].layers[1] < 4
    if name == "alike":
        assert plan.spread < 0.25  # a layer of four is a quarter


@pytest.mark.slow
def test_embedding_and_head_count() -> None:
    """A table that takes as much memory and time as layers leaves fewer layers to the last stage, and not more than an
    even part to the first one, where it takes memory."""
    wide = opt(12, 1024, 16, 120_000)  # of the size of ten layers
    plan = plan_chain(wide, [SMALL] * 3, Workload({(64, 16): 256}))
    counts = [end - first for first, end in (stage.layers for stage in plan.stages)]
    assert counts[0] <= 4
    assert counts[2] < 4 < counts[1]


def test_streamed_weights_are_read_for_each_cohort() -> None:
    """From the disk alone: seconds of a sweep of all cohorts are bytes x cohorts / rate."""
    streamed = sum(t.stored_bytes for layer in MODEL.layers for t in layer) + 2 * 4096 * 1024
    for cohorts in (1, 3):
        cost, policy = Cost(MODEL, SMALL, WORK, cohorts=cohorts), Policy(4, 8, weights=(0, 0, 1))
        lanes = cost.predict(lay_out(MODEL, policy, WORK, SMALL.capacity)).lanes["decode"]
        assert lanes["disk_read"] == pytest.approx(cohorts * streamed / 3e9, rel=0.01)


def test_a_chain_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TooLittle):
        plan_chain(MODEL, [replace(SMALL, device_bytes=1 << 20)] * 2, WORK)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_the_virtual_clock_agrees(name: str) -> None:
    """Each stage's sweeps of one cohort, task by task with all edges, in a pipeline of all cohorts."""
    machines, (prompt, new), rows = CHAINS[name], (64, 16), 48
    found = ChainSearch(MODEL, machines, Workload({(prompt, new): rows}), Options(stores_from=float("inf")))
    plan = found.plan()
    cohorts = len(machines)
    policy = replace(plan.policy, schedule="zigzag", gpu_batch_size=rows // cohorts // 2, num_gpu_batches=2 * cohorts)
    plan = found.made(policy, [stage.layers for stage in plan.stages])
    prefill, decode = [], []
    for stage in plan.stages:
        each = replace(stage.prediction.policy, num_gpu_batches=2)
        cost = Cost(stage.cost.model, stage.cost.hardware, Workload({(prompt, new): rows // cohorts}))
        spans = simulated(cost, lay_out(cost.model, each, cost.workload, cost.hardware.capacity)).spans
        ends = [max(end for task, _, end in spans if task.cell.sweep == sweep) for sweep in range(new)]
        prefill.append(ends[0])
        decode.append((ends[-1] - ends[0]) / (new - 1))
    seconds = Pipeline(prefill, decode, cohorts=cohorts, steps=new - 1).simulate().seconds
    loading = max(stage.prediction.load_seconds for stage in plan.stages)
    assert plan.seconds - loading == pytest.approx(seconds, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(1e12, 1e12), (2e7, 1e12), (1e12, 1e6), (3e6, 4e6)])
def test_links_take_what_the_clock_says(rates: tuple[float, float]) -> None:
    """With a gpu_batch per cohort, which a link sends after the stage has computed it: free links, unlike ones, and
    links that are slower than the stages."""
    (prompt, new), rows, latency = (64, 16), 48, 1e-4
    links = [*(Link(rate, latency) for rate in rates), Link(1e9, 3e-4)]
    found = ChainSearch(MODEL, [SMALL] * 3, Workload({(prompt, new): rows}), links=links)
    ranges = [(0, 4), (4, 8), (8, 12)]
    plan = found.made(Policy(rows // 3, 3, weights=(0, 1, 0), schedule="zigzag", prefill_tokens=4096), ranges)
    each = [stage.prediction.sweep_seconds for stage in plan.stages]
    token = MODEL.hidden * MODEL.itemsize * rows // 3  # bytes of a cohort
    walked = Pipeline(
        [sweep["prefill"] / 3 for sweep in each], [sweep["decode"] / 3 for sweep in each],
        [latency + prompt * token / rate for rate in rates], [latency + token / rate for rate in rates], 3e-4,
        cohorts=3, steps=new - 1,
    ).simulate()  # fmt: skip
    loading = max(stage.prediction.load_seconds for stage in plan.stages)
    assert plan.seconds - loading == pytest.approx(walked.seconds, rel=0.02)
    sent = [sum(end - start for task, start, end in walked.spans if task.lane == f"hop {k}") for k in range(2)]
    assert plan.link_seconds == pytest.approx([x - 3 * new * latency for x in sent])


@pytest.mark.slow
def test_a_stage_sends_while_it_computes() -> None:
    """Of several gpu_batches only the last one's transfer is added, until the link is the slowest part."""
    policy, ranges = Policy(4, 12, weights=(0, 1, 0), schedule="zigzag", prefill_tokens=256), [(0, 6), (6, 12)]
    work, seconds = Workload({(64, 16): 48}), list[float]()
    for rate in (1e15, 1e9, 1e5):
        links = [Link(rate), Link(1e15)]
        plan = ChainSearch(MODEL, [SMALL] * 2, work, links=links).made(policy, ranges)
        seconds.append(plan.seconds)
    free, fast, slow = seconds
    nbytes = 48 * (64 + 16 - 1) * MODEL.hidden * MODEL.itemsize
    assert plan.link_seconds == [pytest.approx(nbytes / 1e5)]
    assert free <= fast <= free + 0.3 * nbytes / 1e9
    assert slow == pytest.approx(nbytes / 1e5, rel=0.02)


def test_a_strategy_has_the_policies() -> None:
    plan = plan_chain(MODEL, [SMALL, LARGE], WORK)
    strategy = chain_strategy(plan, MODEL, [None] * 12)
    assert [stage.layers for stage in strategy.stages] == [stage.layers for stage in plan.stages]
    assert [stage.policy for stage in strategy.stages] == [stage.prediction.policy for stage in plan.stages]
    assert strategy.decode_batch * strategy.cohorts >= plan.policy.block_size
    assert isinstance(strategy, Strategy)


@pytest.mark.slow
def test_table_3() -> None:
    """FlexGen's Table 3: four T4 machines decode 4.65 times as fast as one with OPT-175B, as no weights are on disk."""
    model, machine = opt(96, 12288, 96), Hardware.load(shipped.find_file("hardware", T4))
    one, four = block_rates(model, [machine], 256, 4), block_rates(model, [machine] * 4, 256, 4)
    assert one is not None
    assert four is not None
    assert four.decode >= 3.5 * one.decode
    assert four.prefill >= 2.5 * one.prefill
    assert one.plan.policy.weights[2] > 0.3
    assert max(stage.prediction.policy.weights[2] for stage in four.plan.stages) < 0.1
