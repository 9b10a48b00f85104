"""Slots are handed out in ring order, and programs without rows on demand stay what they were: see RECORDED."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexengine.places import TIERS
from flexengine.policy import Policy
from flexengine.schedule.pages import Pool
from flexengine.schedule.program import Program, Task
from flexengine.schedule.rings import Ring
from flexengine.schedule.routes import DIRECT, STAGED
from flexengine.schedule.sweeps import Sequence, Sweeps

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
    sweeps = Sweeps(policy, {t: (Pool(10**6, 4),) for t, share in zip(TIERS, policy.cache, strict=True) if share})
    for s in range(rng.randint(1, 7)):
        sweeps.add(Sequence(s, rng.randint(1, 7), rng.randint(1, 4)))
    program = Program(streamed, layers, slots, {"staged": STAGED, "direct": DIRECT}[routes], arriving)
    while not sweeps.idle:
        batches = sweeps.begin(lambda sequence, pages: None)
        yield from program.sweep(sweeps.sweep, batches, sweeps.another)
        sweeps.advance(batches, set())


RESOURCES = ("reads", "writes")
RENAMED = {"LOAD_RESIDENT": "SETTLE", "resident": "home"}  # ops and resources renamed since RECORDED was written


def digest(slots: int, routes: str, seed: int) -> str:
    """Return a digest of the fields that tasks had when RECORDED was written. The staging of a weight slot was then not
    divided by disks; these machines have one."""
    names = ("cell", "lane", "reads", "writes", "home", "hop", "slot", "cache", "hidden")
    known = hashlib.sha256()
    for task in tasks(slots, routes, seed):
        names_of = {
            name: tuple(
                (RENAMED.get(r[0], r[0]), *(r[1:2] if r[0] == "wstage" else r[1:])) for r in getattr(task, name)
            )
            for name in RESOURCES
        }
        op = RENAMED.get(task.op.name, task.op.name)
        known.update(repr((op, *(names_of.get(name, getattr(task, name)) for name in names))).encode())
    return known.hexdigest()[:16]


@pytest.mark.parametrize("routes", ["staged", "direct"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_tasks_equal_those_recorded_with_the_six_counters(slots: int, routes: str) -> None:
    recorded = json.loads(RECORDED.read_text())[f"{slots} {routes}"]
    assert len(recorded) == SEEDS
    assert [digest(slots, routes, seed) for seed in range(SEEDS)] == recorded


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_ring_hands_out_each_slot_in_turn_and_never_one_that_is_held(count: int) -> None:
    """Against a list of the slots in use, oldest first."""
    rng, ring = random.Random(count), Ring("w", count)
    used: list[int] = []
    expected = 0
    held = False
    for _ in range(500):
        assert ring.free == (len(used) < count)
        if ring.free and rng.random() < 0.6:
            assert ring.take() == expected
            used.append(expected)
            expected = (expected + 1) % count
        elif len(used) > held:
            assert ring.current == used[held]
            if held:
                ring.give_back()
                used.pop(0)
            held = count > 1 and rng.random() < 0.5
            ring.leave(held)
            if not held:
                used.pop(0)


def test_names_of_slots() -> None:
    weights, hidden = Ring("w", 2), Ring("h", 3, first=1)
    assert weights.parts(1, ("host", "disk")) == (("w", 1, "host"), ("w", 1, "disk"))
    stages = weights.stage(0, "disk"), hidden.buffer(2), hidden.stage(2)
    assert stages == (("wstage", 0, "disk"), ("hbuf", 2), ("hstage", 2))
    assert [hidden.take() for _ in range(4)] == [1, 2, 0, 1]
