"""plan.mixes: formats of layers beside stages, against all other formats."""

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexengine import Engine, SamplingParams
from flexengine.errors import TooLittle
from flexengine.lossy import Lossy
from flexengine.plan.chain import ChainPlan, plan_chain
from flexengine.plan.cluster.job import Model
from flexengine.plan.facts import ModelFacts
from flexengine.plan.mixes import mixed_facts, plan_mixed, start_of, steps_of
from flexengine.plan.stages import Strategy
from flexengine.plan.workload import Workload
from flexengine.shell.commands import plan
from flexengine.worker.open_model import open_model
from tests.helpers.families import NEW
from tests.helpers.plans import FLAT, opt
from tests.helpers.threads import in_threads

LAYERS = 4
EXACT = opt(LAYERS, 1024, 16, 4096)
FORMATS = (None, "int8", "int4")
WORK = Workload({(16, 32): 32})
MACHINE = replace(
    FLAT, device_bytes=64 << 20, host_bytes=4 << 30, disk_bytes=1 << 40, links={**FLAT.links, "h2d": ((1.0, 1e9),)}
)


def coded(model: ModelFacts, bits: int) -> ModelFacts:
    """The model with matrices of so many bits."""
    layers = (
        tuple(replace(t, encoded=t.elements * bits // 8, form=f"int{bits}") if t.matrix else t for t in layer)
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


MODEL = Model({None: EXACT, "int8": coded(EXACT, 8), "int4": coded(EXACT, 4)})


@pytest.mark.parametrize("seed", range(20))
def test_the_steps_have_the_best_mix_for_every_price_of_a_byte(seed: int) -> None:
    """Of all mixes, that with the least harm + price x bytes is one of those on the way."""
    rng = random.Random(seed)
    sizes = [sorted((rng.randrange(1, 100) for _ in range(3)), reverse=True) for _ in range(4)]
    harm = np.array([[0.0, *sorted(rng.random() for _ in range(2))] for _ in sizes])
    mix = [start_of(*each) for each in zip(sizes, harm.tolist(), strict=True)]
    way = [tuple(mix)]
    for layer, form in steps_of(sizes, harm):
        mix[layer] = form
        way.append(tuple(mix))
    every = list(product(range(3), repeat=len(sizes)))
    assert all(sizes[j][form] == min(sizes[j]) for j, form in enumerate(way[-1]))
    for price in (0, *(10 ** rng.uniform(-4, 0) for _ in range(30)), 10):

        def worth(forms: tuple[int, ...], price: float = price) -> float:
            return float(sum(harm[j, form] + price * sizes[j][form] for j, form in enumerate(forms)))

        assert min(map(worth, way)) == pytest.approx(min(map(worth, every)))


@pytest.mark.slow
@pytest.mark.parametrize("theta", [0.0, 0.1, 1e3])
def test_no_other_formats_cost_less(theta: float) -> None:
    """With two stages that stream their weights, of all formats of four layers."""
    formats, harm = (None, "int4"), np.array([[0.0, x] for x in (0.9, 0.01, 0.02, 0.6)])

    def chain(facts: ModelFacts) -> ChainPlan:
        return plan_chain(facts, [MACHINE] * 2, WORK)

    found = plan_mixed(MODEL, formats, harm, theta, chain)
    costs = {}
    for numbers in product(range(2), repeat=LAYERS):
        forms = tuple(formats[k] for k in numbers)
        harms = sum(harm[j, k] for j, k in enumerate(numbers))
        costs[forms] = chain(mixed_facts(MODEL.facts, forms)).seconds + theta * harms
    assert found.cost == pytest.approx(costs[found.forms])
    assert found.cost <= 1.02 * min(costs.values())
    if theta == 1e3:
        assert found.forms == (None,) * LAYERS
    if theta == 0:
        assert found.chain.seconds < costs[(None,) * LAYERS]
    if theta == 0.1:
        assert 0 < found.forms.count("int4") < LAYERS


@pytest.mark.parametrize("exact", [0, 2, LAYERS])
def test_fewer_bits_where_exact_layers_do_not_fit(exact: int) -> None:
    """With room for some exact layers, the most harmful ones stay exact."""
    most, harm = sum(MODEL.bytes[None][:exact]) + sum(MODEL.bytes["int4"][exact:]), np.array([[0.0, 0.1, 1.0]] * LAYERS)
    harm[3] = 0.0, 5.0, 50.0

    def chain(facts: ModelFacts) -> ChainPlan:
        if sum(t.held_bytes for layer in facts.layers for t in layer) > most:
            raise TooLittle("weights", {"device": 2}, {"device": 1}, {"device": {}})
        return plan_chain(facts, [replace(MACHINE, device_bytes=1 << 30)], WORK)

    found = plan_mixed(MODEL, FORMATS, harm, 1e3, chain)
    assert found.harm == pytest.approx(sum(harm[j, FORMATS.index(form)] for j, form in enumerate(found.forms)))
    assert sum(MODEL.bytes[form][j] for j, form in enumerate(found.forms)) <= most
    assert exact < 2 or found.forms[3] is None
    assert exact < LAYERS or found.harm == 0
    most = 0
    with pytest.raises(TooLittle):
        plan_mixed(MODEL, FORMATS, harm, 1e3, chain)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "bloom"])
def test_facts_are_those_of_the_opened_model(families: Any, family: str) -> None:
    opened = open_model(str(families(family).directory), None, "cpu")
    facts = {}
    for form in FORMATS:
        opened.use(Lossy(weights=form))
        facts[form] = opened.facts
    count = len(opened.facts.layers)
    for forms in product(FORMATS, repeat=2):
        each = (forms * count)[:count]
        opened.use(Lossy(weights=each if any(each) else None))
        assert mixed_facts(facts, each) == opened.facts


@pytest.mark.slow
def test_a_strategy_with_bits_of_layers_runs(families: Any, tmp_path: Path, capsys: Any) -> None:
    """From the file of harm to tokens, which are those of one process with these formats."""
    known, saved, harm = families("llama"), tmp_path / "strategy.json", tmp_path / "harm.json"
    harms = (1e-4, 1e9, 1e-4, 1e9)
    harm.write_text(json.dumps({"layers": [{"int8": x, "int4": 2 * x} for x in harms]}))
    words = [str(known.directory), "--stages", "2", "--device", "sim", "--device-mem", "1G", "--host-mem", "1G"]
    words += ["--harm", str(harm), "--theta", "1", "--quality", "small", "--prompt-tokens", "8", "--max-tokens", "8"]
    assert plan.main([*words, "--rows", "32", "--save", str(saved), "-v"]) == 0
    shown = capsys.readouterr().out
    assert "of the cost" in shown
    assert "stage 1 alone" in shown
    strategy = Strategy.load(saved)
    assert (strategy.weights[1], strategy.weights[3]) == (None, None)
    formats = strategy.weights if any(strategy.weights) else None
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with Engine(known.directory, device="cpu", lossy=Lossy(weights=formats)) as alone:
        expected = [result.token_ids for result in alone.generate(known.rows, greedy)]
    with in_threads(2, model=known.directory, device="cpu", strategy=strategy) as pipeline:
        assert [result.token_ids for result in pipeline.engine.generate(known.rows, greedy)] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--theta", "2"], "--theta chooses formats of layers, but all are exact; give --quality small"),
        (["--theta", "-1"], "--theta is -1"),
        (["--indicator", "variance"], "--indicator variance says which numbers of --harm count; give --harm, too"),
        (["--theta", "2", "--allow", "int8-cache"], "--allow int8-cache has no effect with --theta"),
        (
            ["--theta", "2", "--weights", "int4"],
            "--theta chooses formats of layers, but --weights is int4, which fixes",
        ),
        (
            ["--harm", "h.json", "--layer-bits", "b.json"],
            "--harm chooses formats of layers, but --layer-bits is b.json",
        ),
        (["--group", "2"], "--group is for a plan with --cluster"),
        (["--allow", "tokens-partition"], "--allow tokens-partition divides attention among attention workers"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    sizes = ["--prompt-tokens", "64", "--max-tokens", "8", "--rows", "8"]
    assert plan.main(["opt-6.7b", "--hardware", "t4-16gb_208gb_ssd", "--stages", "2", *options, *sizes]) == 2
    assert message in capsys.readouterr().err
