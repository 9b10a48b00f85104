"""What policies/README.md says of FlexGen's machine: its published policies, and the chosen ones, priced anew."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flexengine.errors import OutOfMemory
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import ModelFacts, Workload, lay_out
from flexengine.plan.search import search
from flexengine.policy import Policy
from flexengine.worker.opened import open_model

POLICIES = Path(__file__).parents[1] / "policies"
NAMES = ("6.7b", "30b", "175b")
PUBLISHED = dict(zip(NAMES, (25.26, 7.32, 0.69), strict=True))
T4 = Hardware.load(POLICIES / "hardware" / "t4-16gb_208gb_ssd.json")
ROOMY = replace(T4, device_bytes=18_000_000_000)  # where the published policy for 30B fits


@cache
def table() -> dict[str, list[str]]:
    """Rows of the table of chosen policies, by their first cell."""
    text = (POLICIES / "README.md").read_text(encoding="utf-8").partition("## Chosen by flexengine")[2]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in rows}


def said(row: str, name: str) -> list[float]:
    """The numbers of a cell."""
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", table()[row][NAMES.index(name)])]


@cache
def facts(name: str) -> ModelFacts:
    return open_model(str(POLICIES / "models" / f"opt-{name}"), None, "cuda", False, weights=False).facts


@pytest.mark.parametrize("name", NAMES)
def test_published_policies_are_predicted_within_a_factor_of_two(name: str) -> None:
    policy = Policy.load(POLICIES / "published" / f"opt-{name}.json")
    machine = ROOMY if name == "30b" else T4
    work = Workload({(512, 32): policy.block_size})
    predicted = Cost(facts(name), machine, work).predict(lay_out(facts(name), policy, work, machine.capacity)).tok_s
    assert PUBLISHED[name] / 2 <= predicted <= 2 * PUBLISHED[name]
    assert said("published result, tok/s", name) == [PUBLISHED[name]]
    assert said("published policy, predicted", name)[0] == pytest.approx(predicted, rel=0.01)
    if name == "30b":
        with pytest.raises(OutOfMemory, match="device memory"):
            lay_out(facts(name), policy, work, T4.capacity)


@pytest.mark.parametrize("name", NAMES)
def test_chosen_policies(name: str) -> None:
    """As the table says them, and better than the published ones on the same rows."""
    work = Workload({(512, 32): 1024})
    best = search(facts(name), T4, work).best
    given = Policy.load(POLICIES / "published" / f"opt-{name}.json")
    published = Cost(facts(name), T4, work).predict(lay_out(facts(name), given, work, ROOMY.capacity))
    assert best.total_seconds < published.total_seconds
    assert said("chosen policy, predicted", name)[0] == pytest.approx(best.tok_s, rel=0.01)
    shape = table()["chosen policy: gpu_batch x number, schedule"][NAMES.index(name)]
    p = best.policy
    assert shape == f"{p.gpu_batch_size} x {p.num_gpu_batches}, {p.schedule}"
    splits = {"weights on GPU / CPU / disk": p.weights, "KV cache": p.cache, "activations": p.activations}
    for row, split in splits.items():
        assert said(row, name) == pytest.approx([100 * share for share in split], abs=0.06)
