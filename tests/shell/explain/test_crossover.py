"""Lengths of prompts at which workers pay: spans against a scan, and predicted seconds on both sides of an end."""

from dataclasses import replace

import pytest

from flexengine.plan.cost import Cost
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.explain.links import CLOSE, LONGEST, ROUNDING, SHORTEST, PromptRange, near, span, spans
from tests.helpers.explained import GPU, model
from tests.helpers.plans import predicted

POLICY = Policy(4, 8, cache={"workers": 1}, schedule="zigzag", prefill_tokens=64)  # type: ignore[arg-type]
TIGHT = replace(GPU, device_bytes=500 << 20, workers=(2 << 30,) * 2,
                worker_attention={"worker1": 5e10, "worker2": 5e10},
                links={**GPU.links, "h2d": 1e10, "d2h": 1e10})  # fmt: skip


@pytest.mark.parametrize("ends", [(), (20, 300), (0, 40), (5000, 1 << 20), (20, 300, 5000, 9000), (0, 1 << 20)])
def test_spans_of_a_condition(ends: tuple[int, ...]) -> None:
    """Each (first, end) is found to 2 %."""
    pairs = list(zip(ends[::2], ends[1::2], strict=True))
    found = list(spans(lambda n: any(first <= n < end for first, end in pairs)))
    assert len(found) == len(pairs)
    for (first, end), (low, high) in zip(pairs, found, strict=True):
        assert max(first, SHORTEST) <= low <= max(first * CLOSE, SHORTEST)
        assert high is None if end > LONGEST else high is not None and end <= high <= end * CLOSE + 1


def test_lengths_that_fit_nowhere_end_the_search() -> None:
    assert list(spans(lambda n: None if n > 1000 else n >= 100)) == [PromptRange(100, None)]
    assert list(spans(lambda n: None)) == []


def test_seconds_on_both_sides_of_an_end() -> None:
    """Workers lose just before the first length, and win just after it, by predictions of both policies."""
    facts, work = model(), Workload({(64, 16): 64})
    found = span(facts, TIGHT, work, POLICY)
    assert len(found) == 1
    assert found[0].first > SHORTEST

    def gain(prompt: int) -> float:
        rows = Workload({(prompt, 16): 64})
        others = [replace(POLICY, cache=(1, 0, 0)), replace(POLICY, cache=(0, 1, 0)),
                  replace(POLICY, cache=(0, 1, 0), delegate="host")]  # fmt: skip
        best = min(predicted(facts, rows, other, TIGHT).total_seconds for other in others)
        return best / predicted(facts, rows, POLICY, TIGHT).total_seconds

    assert gain(round(found[0].first * 0.95)) <= 1 + ROUNDING < gain(round(found[0].first * 1.05))


def test_near_keeps_the_block() -> None:
    found = near(Cost(model(), TIGHT, Workload({(64, 16): 64})), POLICY)
    assert found is not None
    assert found.policy.works == 0
    assert found.policy.block_size == POLICY.block_size
