"""LLM-PQ's tables: published ratios, reasons, baselines against brute force, indicators by other formulas, formats of a
plan on another model."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bench.bits.hessian import hessian_omegas
from bench.bits.mixes import OURS as MEASURED
from bench.bits.plans import HESSIAN, UNIFORM, VARIANCE, Indicators, cluster_json, planned
from bench.cluster import baselines
from bench.cluster.cases import cluster, decoder, device, uniform_job
from bench.cluster.plans import paper_task, task
from bench.papers import llm_pq
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.stages import FORMATS

TINY = decoder("tiny", 6, 1024, 4096, 1000)


def tiny_task(memory: tuple[float, float], host: float = 0.0) -> ClusterTask:
    """Six layers, whose harm differs, on a slow and a fast device. memory, host: in GB."""
    devices = [device(name, name, speed, size) for name, speed, size in zip("ab", (1, 4), memory, strict=True)]
    if host:
        devices = [replace(d, host_memory=int(host * 1e9), host_link=1e10) for d in devices]
    return task(cluster("two", devices), TINY, uniform_job(8, 64, 16), FORMATS, 1.0)


# Clusters.


@pytest.mark.slow
def test_published_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """13.69 tokens/s of PipeEdge and 55.57 of LLM-PQ, and 10.21 of FlexGen against 7.85: from the paper's tables."""
    few = [llm_pq.PUBLISHED[k] for k in (0, 8)]
    found = {case.number: llm_pq.plans_of(case.number, 512, 100) for case in few}
    monkeypatch.setattr(llm_pq, "plans_of", lambda number, *_: found[number])
    monkeypatch.setattr(llm_pq, "PUBLISHED", few)
    figures = {f.name: f for f in llm_pq.clusters().figures}
    assert figures["1 (V100; OPT-13B), over PipeEdge"].published == pytest.approx(4.059, abs=1e-3)
    assert figures["1 (V100; OPT-13B), over uniform"].ours == pytest.approx(1.0)  # one device
    assert figures["9 (4 T4; OPT-30B), over FlexGen in 8 bits"].published == pytest.approx(0.769, abs=1e-3)
    assert not any(f.unexplained for f in figures.values())
    for number in (1, 9):
        plans = found[number]
        ours, edge = plans[llm_pq.OURS], plans[llm_pq.EDGE]
        assert ours
        assert edge
        assert ours.priced.harm <= edge.priced.harm * (1 + 1e-9)
        assert ours.priced.seconds <= edge.priced.seconds * (1 + 1e-9)


def test_bloom_has_16_bits() -> None:
    """Cluster 8 plans from the shipped shape: 176 billion parameters in two bytes each."""
    facts = paper_task(llm_pq.PUBLISHED[7], 512, 100).model.exact
    assert sum(t.held_bytes for layer in facts.layers for t in layer) / 2 + 250880 * 14336 == pytest.approx(
        176.2e9, rel=2e-3
    )
    assert (
        facts.kv_token == 2 * 2 * 112 * 144
    )  # a key has 129 numbers, one of them for its position; rows are padded to 16


def test_flexgen_puts_as_few_layers_on_hosts_as_fit() -> None:
    made = tiny_task((0.042, 0.2), host=4.0)
    plan = baselines.flexgen_int8(made, 8)
    assert plan is not None
    assert plan.priced.fits
    assert set(plan.formats) == {"int8"}
    assert plan.layers == ((0, 3), (3, 6))  # as many on each, although one is four times as fast
    hosted = [i for i, choice in enumerate(plan.choices) if choice.host]
    assert hosted
    assert all(plan.stage_of[i] == 0 for i in hosted)
    fewer = list(plan.choice_of)
    fewer[hosted[-1]] = 0
    assert not replace(plan, choice_of=fewer).priced.fits
    assert baselines.flexgen_int8(tiny_task((0.042, 0.2)), 8) is None  # there are no hosts


def test_pure_adabits_has_the_least_harm() -> None:
    made = tiny_task((0.055, 0.06))
    plan = baselines.adabits(made, 8)
    assert plan is not None
    least, numbers = math.inf, plan.numbers
    column = np.arange(6)
    for cut, choice in itertools.product(range(1, 6), itertools.product(range(len(FORMATS)), repeat=6)):
        harm = float(numbers.harm[column, choice].sum())
        if harm < least and replace(plan, stage_of=[int(i >= cut) for i in range(6)], choice_of=choice).priced.fits:
            least = harm
    assert plan.priced.harm == pytest.approx(least, rel=2e-3)
    assert least > 0


# Indicators.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=12,
                                      num_attention_heads=2, initializer_range=0.3)  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_hessian_of_a_layer(tiny: Path) -> None:
    """The largest eigenvalue of 2 X^T X / n is 2 / n times the squared largest singular value of X."""
    from flexengine.codec.packed import CODECS, Packed

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    rows, seen = [[1, 2, 3, 4], [5, 6, 7, 8, 9]], dict[Any, list[torch.Tensor]]()
    matrices = [m for m in model.model.layers[1].modules() if isinstance(m, torch.nn.Linear)]
    for matrix in matrices:
        matrix.register_forward_pre_hook(lambda module, args: seen.setdefault(module, []).append(args[0][0]))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
        expected = 0.0
        for matrix in matrices:
            form = Packed(CODECS["int4"], *matrix.weight.shape)
            error = form.dequantize(form.encode(matrix.weight)) - matrix.weight
            expected += float(torch.linalg.svdvals(torch.cat(seen[matrix]))[0] ** 2 * 2 / 9 * error.square().sum())
    found = hessian_omegas(tiny, rows)
    assert found[1]["int4"] == pytest.approx(expected, rel=1e-3)
    assert all(layer["int3"] > layer["int4"] > layer["int8"] for layer in found)


@pytest.mark.slow
def test_plans_hold_the_least_harm_at_some_bits(tiny: Path) -> None:
    """From the file of harm to the strategy, with the commands. Each device has room for six layers in 4 bits: 8 bits
    for one of them and 3 for four take as many bytes."""
    table = [{"int8": h / 289, "int4": h, "int3": 4.6 * h} for h in 2 * (1.0, 1.1, 40.0, 1.0, 1.5, 1.2)]
    file = {"layers": table, "variance": table[::-1]}
    found = Indicators(tiny, file, {MEASURED: table, VARIANCE: table[::-1], HESSIAN: table}, {})
    chosen = dict(planned(found, str(tiny), 4.0))
    assert chosen[UNIFORM] == ("int4",) * 12
    assert chosen[MEASURED] == 2 * ("int3", "int3", "int8", "int3", "int4", "int3")
    assert chosen[VARIANCE] == chosen[MEASURED][::-1]
    assert chosen[HESSIAN] == chosen[MEASURED]
    small = [d["memory"] for d in cluster_json(str(tiny), 3.0)["devices"]]
    large = [d["memory"] for d in cluster_json(str(tiny), 8.0)["devices"]]
    assert all(a < b for a, b in zip(small, large, strict=True))


def test_formats_of_a_plan_on_another_model() -> None:
    table = [{"int4": h} for h in (3.0, 1.0, 2.0, 4.0)]
    assert llm_pq.spread_over(["int8"] * 6 + ["int4"] * 6, table) == ("int8", "int4", "int4", "int8")
    assert llm_pq.spread_over([None, "int3", "int4", "int4"], table) == ("int4", "int3", "int4", None)
    assert llm_pq.spread_over(["int4"], table) == ("int4",) * 4
