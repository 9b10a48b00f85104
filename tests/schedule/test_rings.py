"""Buffers are taken in turn, and their names."""

import pytest

from flexengine.schedule.frame import Ring, num_buffers, slot_part, slot_stage


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_buffers_are_taken_in_turn(count: int) -> None:
    ring = Ring("c", count)
    assert [ring.take() for _ in range(2 * count + 1)] == [*range(count), *range(count), 0]


def test_with_overlap_one_buffer_more_than_slots() -> None:
    assert [num_buffers(slots) for slots in (1, 2, 3, 4)] == [1, 3, 4, 5]


def test_names() -> None:
    hidden = Ring("h", 3)
    assert (hidden.buffers[2], hidden.stages[2]) == (("hbuf", 2), ("hstage", 2))
    assert (slot_part(1, "disk"), slot_stage(0, "disk2")) == (("w", 1, "disk"), ("wstage", 0, "disk2"))
