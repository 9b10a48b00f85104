"""Slots are handed out in ring order, and programs without rows on demand stay what they were: see RECORDED."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexengine.policy import TIERS, Policy
from flexengine.schedule.program import DIRECT, STAGED, Program, Task
from flexengine.schedule.sweeps import Pool, Sequence, Sweeps

RECORDED = Path(__file__).parent / "recorded_tasks.json"
SEEDS = 40  # of policies and rows, for each combination of slots and routes
KINDS: list[tuple[str, ...]] = [(), ("host",), ("disk",), ("host", "disk")]
SPLITS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3), (0, 0.5, 0.5), (0.5, 0, 0.5)]


def tasks(slots: int, routes: str, seed: int) -> Iterator[Task]:
    """Tasks of a whole job drawn with this seed. Every second job delegates attention, where its routes allow that."""
    rng = random.Random(seed)
    layers, heads = rng.randint(1, 4), rng.randint(1, 2)
    streamed = [rng.choice(KINDS) for _ in range(layers + heads)]
    arriving = sorted(rng.choices(range(layers + heads), k=rng.randint(0, 3)))
    delegate = bool(seed % 2) and routes == "staged"
    cache = (0, 1, 0) if delegate else rng.choice(SPLITS)
    policy = Policy(
        rng.randint(1, 3), rng.randint(1, 4), cache=cache, activations=(1, 0, 0) if delegate else rng.choice(SPLITS),
        slots=slots, schedule=rng.choice(["row", "zigzag", "diagonal", "continuous"]),
        prefill_tokens=rng.choice([2, 3, 50]), delegate=delegate,
    )  # fmt: skip
    sweeps = Sweeps(policy, {t: Pool(10**6, 4) for t, share in zip(TIERS, policy.cache, strict=True) if share})
    for s in range(rng.randint(1, 7)):
        sweeps.add(Sequence(s, rng.randint(1, 7), rng.randint(1, 4)))
    program = Program(streamed, layers, slots, {"staged": STAGED, "direct": DIRECT}[routes], arriving)
    while not sweeps.idle:
        batches = sweeps.begin(lambda sequence, pages: None)
        yield from program.sweep(sweeps.sweep, batches, sweeps.another)
        sweeps.advance(batches, set())


def digest(slots: int, routes: str, seed: int) -> str:
    """Return a digest of the fields that tasks had when RECORDED was written."""
    names = ("cell", "lane", "reads", "writes", "home", "hop", "slot", "cache", "hidden")
    known = hashlib.sha256()
    for task in tasks(slots, routes, seed):
        known.update(repr((task.op.name, *(getattr(task, name) for name in names))).encode())
    return known.hexdigest()[:16]


@pytest.mark.parametrize("routes", ["staged", "direct"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_tasks_equal_those_recorded_with_the_six_counters(slots: int, routes: str) -> None:
    recorded = json.loads(RECORDED.read_text())[f"{slots} {routes}"]
    assert len(recorded) == SEEDS
    assert [digest(slots, routes, seed) for seed in range(SEEDS)] == recorded
