"""Slots are handed out in ring order."""

import random

import pytest

from flexengine.schedule.rings import Ring


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
    weights, hidden = Ring("w", 2), Ring("h", 3)
    assert weights.parts(1, ("host", "disk")) == (("w", 1, "host"), ("w", 1, "disk"))
    stages = weights.stage(0, "disk"), hidden.buffer(2), hidden.stage(2)
    assert stages == (("wstage", 0, "disk"), ("hbuf", 2), ("hstage", 2))
    assert [hidden.take() for _ in range(4)] == [0, 1, 2, 0]
