"""The layers of stages on one machine, by the predicted seconds of the job's rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.pipeline.models import make_model
from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.guests.stages import planner as planners
from flexengine.lossy import Lossy
from flexengine.measure import store
from flexengine.plan.candidates import Options
from flexengine.plan.chain import ChainSearch
from tests.helpers.threads import Pipeline, in_threads

pytestmark = pytest.mark.slow
LAYERS, STAGES = 8, 3
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
ROWS = [{"prompt_token_ids": [7 * i + j for j in range(1 + i % 5)]} for i in range(12)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model whose head has the bytes of seven layers, behind a slow link."""
    folder: Path = tmp_path_factory.mktemp("head") / "model"
    make_model(folder, LAYERS, 128, vocabulary=12_000)
    slow = Links(h2d=4e7, d2h=4e7)
    return {"model": folder, "device": "sim", "device_mem": "8M", "host_mem": "1G", "links": slow}


def tokens(engine: Any) -> list[Any]:
    results = engine.generate(ROWS, GREEDY)
    assert [result.error for result in results] == [None] * len(ROWS)
    return [result.token_ids for result in results]


@contextmanager
def on_one_machine(stages: int, **options: Any) -> Iterator[Pipeline]:
    """Yield a pipeline whose stages count as processes of one machine. Each has the memory of the options."""
    with in_threads(stages, **options) as pipeline:
        for group in (pipeline.engine.planner.driver.group, *(server.group for server in pipeline.servers)):
            group.local_size = stages
        yield pipeline


def layers_of(pipeline: Any) -> list[tuple[int, int]]:
    cores = [pipeline.engine.core, *(server.core for server in pipeline.servers)]
    return [core.skeleton.layer_range for core in cores]


def test_the_stage_with_the_head_gets_fewer_layers(options: dict[str, Any]) -> None:
    """All stages take the layers that the first one plans for the rows, plan with its rates, and compute the tokens of
    one process. The next job keeps the layers, whose weights are in memory."""
    with Engine(**options) as engine:
        expected = tokens(engine)
    with on_one_machine(STAGES, **options) as pipeline:
        assert layers_of(pipeline) == [(0, 3), (3, 6), (6, 8)]
        assert tokens(pipeline.engine) == expected
        ranges, planner = layers_of(pipeline), pipeline.engine.planner
        counts = [end - first for first, end in ranges]
        assert sum(counts) == LAYERS
        assert counts[-1] == min(counts) < LAYERS // STAGES
        assert planner.ranges == ranges
        own = planner.rates.known()
        for server in pipeline.servers:
            assert server.planner.rates.known() == own.with_capacity(server.core.machine.capacity)
        assert tokens(pipeline.engine) == expected
        assert layers_of(pipeline) == ranges


def test_no_split_is_faster_for_the_block(options: dict[str, Any]) -> None:
    """All splits of the layers are tried. Each stage predicts the seconds that the first one predicts for it."""
    with on_one_machine(STAGES, **options) as pipeline:
        planner = pipeline.engine.planner
        workload = pipeline.engine.reader.survey(ROWS, GREEDY)
        layout = planner.plan(workload).layout
        whole, machine = planner._whole.facts, planner.rates.known()
        search, block = ChainSearch(whole, [machine] * STAGES, workload), planner._block
        others = search.seconds(layout.policy, planner.ranges)[1:]
        assert [plan.seconds for plan in planner.others] == pytest.approx(others, rel=1e-3)
        every = [((0, a), (a, b), (b, LAYERS)) for a in range(1, LAYERS) for b in range(a + 1, LAYERS)]
        best = min(max(search.seconds(block, ranges)) for ranges in every)
        assert max(search.seconds(block, planner.ranges)) == pytest.approx(best, rel=0.03)
        least = min(max(search.seconds(layout.policy, ranges)) for ranges in every)  # under the policy of the job
        assert max(search.seconds(layout.policy, planner.ranges)) <= 1.03 * least


def test_prompts_are_cut_as_before(options: dict[str, Any]) -> None:
    """After memory ran out, and when a job is resumed, also under the block that divided the layers."""
    with on_one_machine(STAGES, **options) as pipeline:
        planner = pipeline.engine.planner
        workload = pipeline.engine.reader.survey(ROWS, GREEDY)
        planner.plan(workload)
        kept = planner._block.prefill_tokens
        for tokens in (8, 16):
            assert tokens != kept
            found = planner.choose(workload, None, Options(tokens, block=planner._block.block_size))
            assert found.policy.prefill_tokens == tokens
        planner.keep_prefill(8)
        assert planner.choose(workload).policy.prefill_tokens == 8


def test_layers_that_could_not_be_opened_are_taken_again(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(**options) as engine:
        expected = tokens(engine)
    opened, failed = planners.opened_again, list[Any]()

    def once(core: Any, layers: Any) -> Any:
        if layers is not None and core.skeleton.first == 0 and not failed:
            failed.append(layers)
            raise InvalidInput("the files have changed")
        return opened(core, layers)

    with on_one_machine(STAGES, **options) as pipeline:
        monkeypatch.setattr(planners, "opened_again", once)
        with pytest.raises(InvalidInput, match="have changed"):
            pipeline.engine.generate(ROWS, GREEDY)
        assert layers_of(pipeline) == [(0, 3), (3, 6), (6, 8)]
        assert tokens(pipeline.engine) == expected
        assert layers_of(pipeline)[0] == failed[0]


def test_measured_rates_are_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the layers are divided, and with other lossy switches."""
    with on_one_machine(STAGES, **options) as pipeline:
        planner = pipeline.engine.planner
        measured = replace(planner.rates.known(), name="measured, not stored")
        monkeypatch.setattr(store, "knows_quickly", lambda *_: False)
        monkeypatch.setattr(store, "obtain_quickly", lambda *_: (measured, False))
        assert planner.rates.measure_quickly()
        planner.plan(pipeline.engine.reader.survey(ROWS, GREEDY))
        assert planner.rates.known().name == measured.name
        pipeline.engine.use(Lossy(weights="int8"))
        assert planner._whole.lossy == planner.opened.lossy == Lossy(weights="int8")
        assert planner.rates.known().name == measured.name


def test_layers_are_even_with_a_policy(options: dict[str, Any]) -> None:
    with on_one_machine(2, **options, policy=Policy(2, 4, weights=(0, 1, 0))) as pipeline:
        tokens(pipeline.engine)
        assert layers_of(pipeline) == [(0, 4), (4, 8)]


@pytest.mark.parametrize(("stages", "policy"), [(STAGES, None), (2, Policy(2, 4, weights=(0, 1, 0)))])
def test_the_first_stage_prices_the_plans_of_others(
    options: dict[str, Any], stages: int, policy: Policy | None
) -> None:
    """As these stages do, whose own models have been opened with their layers."""
    with on_one_machine(stages, **options, policy=policy) as pipeline:
        planner = pipeline.engine.planner
        workload = pipeline.engine.reader.survey(ROWS, GREEDY)
        planner.plan(workload)
        for rank, other in enumerate(planner.others, 1):
            cost, prediction = planner.remote_case(rank, workload)
            assert len(cost.model.layers) == other.layers[1] - other.layers[0]
            assert prediction.total_seconds == pytest.approx(other.seconds, rel=1e-3)
            assert prediction.bottleneck == other.bottleneck
        pipeline.engine.planner.driver.group.local_size = 1
        assert planner.remote_case(1, workload) is None


def test_layers_are_even_on_several_machines(options: dict[str, Any]) -> None:
    with in_threads(2, **options) as pipeline:
        tokens(pipeline.engine)
        assert layers_of(pipeline) == [(0, 4), (4, 8)]
        assert all(server._hardware is None for server in pipeline.servers)
