"""Strategies: layers, formats and batches of each stage."""

from dataclasses import replace
from typing import Any

import pytest

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.plan.stages import StagePlan, Strategy
from tests.guests.stages.test_tokens import tokens
from tests.helpers.families import NEW
from tests.helpers.threads import in_threads

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SHAPE = "llama, 4 layers of 64, 4/2 heads of 16, vocabulary 601"
FORMATS = ("int8", None, "int4", "int3")
CUTS = ((0, 1), (1, 3), (3, 4))


def strategy(formats: Any = FORMATS, cuts: Any = CUTS, **changed: Any) -> Strategy:
    stages = tuple(StagePlan(f"gpu{i}", cut, formats[slice(*cut)]) for i, cut in enumerate(cuts))
    return replace(Strategy(SHAPE, 4, stages, prefill_batch=1, decode_batch=2, cohorts=3), **changed)


@pytest.mark.parametrize("formats", [FORMATS, (None,) * 4])
def test_stages_hold_the_layers_in_the_formats_of_the_strategy(families: Any, formats: Any) -> None:
    known = families("llama")
    with Engine(known.directory, device="cpu", lossy=Lossy(weights=formats if any(formats) else None)) as alone:
        expected = tokens(alone.generate(known.rows, GREEDY))
    with in_threads(3, model=known.directory, device="cpu", strategy=strategy(formats)) as pipeline:
        assert tokens(pipeline.engine.generate(known.rows, GREEDY)) == expected
        cores = [pipeline.engine.core, *(server.core for server in pipeline.servers)]
        assert [core.skeleton.layer_range for core in cores] == list(CUTS)
        policy = pipeline.engine.summary.policy
        assert policy is not None
        assert (policy.gpu_batch_size, policy.num_gpu_batches) == (2, 3)
        assert policy.prefill_tokens == max(map(len, known.prompts))


def test_a_strategy_of_one_stage(families: Any) -> None:
    known, one = families("llama"), strategy((None,) * 4, ((0, 4),))
    with Engine(known.directory, device="cpu", strategy=one) as engine:
        assert tokens(engine.generate(known.rows, GREEDY)) == known.expected
        assert engine.summary.policy is not None
        assert engine.summary.policy.block_size <= 6


@pytest.mark.parametrize(("changed", "stages", "why"), [
    ({}, 2, "the strategy has 3 stages, but 2 processes run"),
    ({"model": "another"}, 3, "made for the model another, but this one is llama, 4 layers"),
])  # fmt: skip
def test_strategies_of_other_models_and_devices_are_refused(families: Any, changed: Any, stages: int, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        in_threads(stages, model=families("llama").directory, strategy=strategy(**changed)).__enter__()


@pytest.mark.parametrize(("options", "why"), [
    ({"policy": Policy()}, "strategy cannot be combined with policy"),
    ({"lossy": Lossy(weights="int8")}, "names a format of the weights of each layer, but weights is"),
])  # fmt: skip
def test_what_a_strategy_decides_is_not_given_too(families: Any, options: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Engine(families("llama").directory, strategy=strategy(), **options)


def test_a_strategy_for_three_needs_three_processes(families: Any) -> None:
    with pytest.raises(InvalidInput, match="the strategy has 3 stages, but there are 1 devices"):
        Engine(families("llama").directory, device="cpu", strategy=strategy())
